"""What the cleaning rules on maths texts drop of real sets, and how many of the dropped problems were good.

    python benchmarks/pipeline_false_drops.py --data ../shared/data/math/sets   # docs/figures/pipeline-false-drops.json

``pipeline_false_drops_labels.json`` holds, by rule and set, the places of problems that were read one by one by the
author: ``good`` ones are complete as they stand and have one answer, ``flawed`` ones are not. They are what the
rules of 20 November dropped, but for Asymptote drawings and most options, which go by policy; so that the figures say
what each later change of a rule saves, and what it lets through. Only the text rules run here, no verifier.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from common import FIGURES, parser_of, write_figure

from magicrl.evaluation.provenance import environment_facts
from magicrl.pipeline.entry import Entry
from magicrl.pipeline.maths_rules import maths_fault
from magicrl.pipeline.pipeline_schema import MathsCleaning

LABELS = Path(__file__).with_name("pipeline_false_drops_labels.json")
SETS = {
    "gsm8k": "gsm8k/train.jsonl",
    "math-train": "math_train/math.json",
    "math-test": "math_test/test.jsonl",
    "deepmath": "deepmath_5k/math_deepmath_deal.jsonl",
    "aime": "aime_1983_2023/aime.json",
    "olympiad": "olympiadbench/simple_olympiadbench.jsonl",
    "svamp": "svamp/simple_svamp.jsonl",
    "amc23": "amc23/simple_amc23.jsonl",
    "aime24": "aime24/simple_aime24.jsonl",
    "aime25": "aime25/simple_aime25.jsonl",
}
STATEMENT = ("problem", "question", "Question", "prompt")
GOLD = ("answer", "Answer", "ground_truth", "final_answer")
DRAWN = re.compile(r"\[/?asy\]|tikzpicture")


def entries(path: Path, name: str) -> list[Entry]:
    """A set's problems; where its gold is not in a column of its own, a number stands for it."""
    text = path.read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)
    found: list[Entry] = []
    for place, row in enumerate(rows):
        problem = next(row[column] for column in STATEMENT if isinstance(row.get(column), str))
        gold = next((str(row[column]) for column in GOLD if row.get(column)), "1")
        common = {"source": name, "data_source": name, "ability": "math", "problem": problem, "prompt": problem}
        found.append(Entry(id=f"{name}/{place}", golds=(gold[-100:],), **common))
    return found


def main() -> None:
    parser = parser_of(__doc__, FIGURES / "pipeline-false-drops.json")
    parser.add_argument("--data", type=Path, required=True)
    options = parser.parse_args()
    rules = MathsCleaning()
    counts: defaultdict[str, dict[str, int]] = defaultdict(dict)
    dropped: dict[str, str] = {}
    drawn: set[str] = set()
    problems: dict[str, int] = {}
    for name, path in SETS.items():
        held = entries(options.data / path, name)
        problems[name] = len(held)
        for entry in held:
            fault = maths_fault(entry, rules)
            if fault is None:
                continue
            dropped[entry.id] = fault.reason
            counts[fault.reason][name] = counts[fault.reason].get(name, 0) + 1
            if DRAWN.search(entry.problem):
                drawn.add(entry.id)
    document = {
        "command": "python benchmarks/pipeline_false_drops.py --data ../shared/data/math/sets",
        "problems": problems,
        "dropped": {reason: counts[reason] for reason in sorted(counts)},
        "dropped_with_a_drawing_in_code": len(drawn),
        "read": read_ones(dropped),
        "environment": environment_facts(),
    }
    write_figure(options.output, document)
    print(json.dumps({name: document[name] for name in ("dropped", "read")}, indent=1))


def read_ones(dropped: dict[str, str]) -> list[dict[str, Any]]:
    """By the rule that dropped them first: of the problems that were read, how many are dropped today."""
    told: list[dict[str, Any]] = []
    for rule, sets in json.loads(LABELS.read_text())["rules"].items():
        labels = {f"{name}/{place}": word for name, own in sets.items() for word in own for place in own[word]}
        good = [name for name, word in labels.items() if word == "good"]
        flawed = [name for name, word in labels.items() if word == "flawed"]
        told.append(
            {
                "rule": rule,
                "good": len(good),
                "flawed": len(flawed),
                "good_dropped_now": sum(name in dropped for name in good),
                "flawed_dropped_now": sum(name in dropped for name in flawed),
            }
        )
    return told


if __name__ == "__main__":
    main()
