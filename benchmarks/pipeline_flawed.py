"""Flawed problems among good ones: what the cleaning rules, the difficulty filter and the judges each let through.

    python benchmarks/pipeline_flawed.py --data ../shared/data/math/sets --model runs/models/smollm2-start \
        --judge http://127.0.0.1:8377/v1 --folder runs/flawed        # docs/figures/pipeline-flawed.json
    python benchmarks/pipeline_flawed.py --draw                      # the section of docs/judging.md from that JSON

Good problems are real ones of SVAMP, GSM8K and MATH as they stand; flawed ones are others of the same sets, each spoilt
by one rule below, with the gold it had. Besides stand the six flawed problems of RECIPE section 12, with a gold each.
Every step sees all of them, so that its share is its own; the funnel at the end is what is left after all three.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import FIGURES, ROOT, parser_of, put_section, table, write_figure

from magicrl.evaluation.provenance import environment_facts
from magicrl.files import write_atomically
from magicrl.pipeline.build import build
from magicrl.pipeline.frame import Watcher
from magicrl.pipeline.judge_step import FLAWED
from magicrl.pipeline.pipeline_schema import PipelineConfig
from magicrl.pipeline.stats import step_folders

PAGE = ROOT / "docs" / "judging.md"
SETS = {"svamp": "svamp/simple_svamp.jsonl", "gsm8k": "gsm8k/simple_gsm8k_train.jsonl"}
SETS["math"] = "math_train/simple_math_train.jsonl"
GOLDS = {
    "blank": "30",
    "missing-options": "33000000",
    "ambiguous": "0.8",
    "label": "1050",
    "translation-note": "32",
    "doubled": "18",
}
STEPS = ("clean", "difficulty", "judge")


def _cut(text: str, rng: random.Random) -> str:
    """The question ends in the middle."""
    words = text.split(" ")
    return " ".join(words[: -max(3, len(words) // 5)])


def _blanked(text: str, rng: random.Random) -> str:
    """Every number but the last is a blank."""
    found = list(re.finditer(r"\d+(?:\.\d+)?", text))
    gone = found[:-1] or found
    for one in reversed(gone):
        text = f"{text[: one.start()]}____{text[one.end() :]}"
    return text


def _options(text: str, rng: random.Random) -> str:
    """The question speaks of options that are not there."""
    body = re.split(r"(?<=[.?!]) ", text.strip())
    return " ".join([*body[:-1], "Which of the following is correct?"])


def _garbled(text: str, rng: random.Random) -> str:
    """As a file read in another encoding, or text that lost letters."""
    return "".join("Ã¢â‚¬" if sign in "aeo" and rng.random() < 0.25 else sign for sign in text)


def _label(text: str, rng: random.Random) -> str:
    return f"Example {rng.randrange(2, 60)} ({rng.randrange(2, 9)} points, page {rng.randrange(10, 300)}): {text}"


NOTE = "Translate the above text into English, keep the line breaks, and output the translation directly."
ADVERT = "See the video lesson on our channel! Next problem: 14. Hint: use the method of chapter 3. [2 marks]"
KINDS: dict[str, Callable[[str, random.Random], str]] = {
    "cut off": _cut,
    "numbers blanked": _blanked,
    "label in front": _label,
    "translation note": lambda text, rng: f"{text}\n\n{NOTE}",
    "stands twice": lambda text, rng: f"{text}\n{text}",
    "options missing": _options,
    "garbled": _garbled,
    "distraction": lambda text, rng: f"{text} {ADVERT}",
}


def rows_of(data: Path, *, each: int, good: int, seed: int) -> list[dict[str, Any]]:
    """``each`` flawed rows of every kind, ``good`` good ones, and the six; ``kind`` is empty for a good one."""
    rng = random.Random(seed)
    pools: list[list[dict[str, Any]]] = []
    for path in SETS.values():
        with (data / path).open(encoding="utf-8") as file:
            known = [json.loads(line) for line in file]
        fit = [one for one in known if 40 <= len(one["problem"]) <= 400 and re.search(r"\d", one["problem"])]
        rng.shuffle(fit)
        pools.append([one for one in fit if "[asy]" not in one["problem"]])
    drawn = (pools[number % len(pools)].pop() for number in range(10**9))
    rows: list[dict[str, Any]] = []
    for kind, spoil in KINDS.items():
        for place in range(each):
            one = next(drawn)
            name = f"{kind.replace(' ', '-')}-{place}"
            rows.append({"id": name, "kind": kind, "problem": spoil(one["problem"], rng), "answer": str(one["answer"])})
    for place in range(good):
        one = next(drawn)
        rows.append({"id": f"good-{place}", "kind": "", "problem": one["problem"], "answer": str(one["answer"])})
    for problem in FLAWED:
        name = problem.id.partition("/")[2]
        rows.append({"id": f"report-{name}", "kind": "report's six", "problem": problem.text, "answer": GOLDS[name]})
    rng.shuffle(rows)
    return rows


def step_of(use: str, options: argparse.Namespace) -> dict[str, Any]:
    """The step's settings: of the recipe ``laptop``."""
    if use == "clean":
        return {"use": "clean"}
    if use == "difficulty":
        sampler = {"model": str(options.model.resolve()), "dtype": "bfloat16", "max_rows": 64, "memory_limit_mb": 1024}
        sampling = {"samples": options.samples, "max_tokens": 80, "extract": "box", "label": "smollm2-start"}
        return {"use": "difficulty", "sampler": sampler, **sampling}
    judge = {"base_url": options.judge, "model": options.judge_model, "votes": options.votes, "max_tokens": 120}
    judge |= {"reasons_characters": 160, "concurrency": 8, "unreadable_attempts": 1}
    return {"use": "judge", "flawed": False, "settings": {"judges": [judge]}}


def dropped_by(use: str, options: argparse.Namespace) -> dict[str, str]:
    """Reasons by row of one step alone; what is there already is not made again."""
    columns = {"problem": "problem", "answer": "answer", "id": "id"}
    source = {"name": "planted", "path": "rows.jsonl", "columns": columns}
    source["template"] = "{prompt} End with the answer in \\boxed{}."
    tree = {"name": f"flawed-{use}", "workers": 1, "sources": [source], "steps": [step_of(use, options)]}
    output = options.folder / use
    build(PipelineConfig.model_validate(tree, context={"folder": options.folder}), output=output, watcher=Watcher())
    (step,) = step_folders(output)
    rows = [row for table in step.tables("dropped", ["id", "reason"]) for row in table.to_pylist()]
    return {row["id"].removeprefix("planted/"): row["reason"] for row in rows}


def figures(kinds: Mapping[str, str], drops: Mapping[str, dict[str, str]]) -> dict[str, Any]:
    """By kind and step: how many were dropped; and what is left of good and flawed ones after each step."""
    good, flawed = ([name for name, kind in kinds.items() if bool(kind) == spoilt] for spoilt in (False, True))
    table: list[dict[str, Any]] = []
    for kind in ("", *KINDS, "report's six"):
        names = [name for name, own in kinds.items() if own == kind]
        dropped = {f"dropped_by_{use}": sum(name in drops[use] for name in names) for use in drops}
        table.append({"kind": kind or "good", "problems": len(names), **dropped})
    funnel: list[dict[str, Any]] = []
    left = set(kinds)
    for use in drops:
        before, left = left, left - drops[use].keys()
        passed = {
            word: {"reached": len(before.intersection(names)), "passed": len(left.intersection(names))}
            for word, names in (("good", good), ("flawed", flawed))
        }
        funnel.append({"step": use, **passed})

    def surviving(names: Sequence[str]) -> float:
        return round(sum(name not in drops["difficulty"] for name in names) / len(names), 4)

    return {
        "table": table,
        "funnel": funnel,
        "flawed": len(flawed),
        "good": len(good),
        "flawed_that_survive_difficulty": surviving(flawed),
        "good_that_survive_difficulty": surviving(good),
        "report_six": {
            name: {use: drops[use].get(name, "kept") for use in drops}
            for name, kind in kinds.items()
            if kind == "report's six"
        },
    }


def section(found: Mapping[str, Any]) -> list[str]:
    """The figures as docs/judging.md tells them."""
    settings, six = found["settings"], found["report_six"]
    flawed, good = found["flawed_that_survive_difficulty"], found["good_that_survive_difficulty"]
    spared = found["good"] - found["table"][0]["dropped_by_judge"]
    missed = found["flawed"] - sum(row["dropped_by_judge"] for row in found["table"][1:])
    of_six = {use: sum(one[use] != "kept" for one in six.values()) for use in STEPS}
    rows = [[row["kind"], row["problems"], *(row[f"dropped_by_{use}"] for use in STEPS)] for row in found["table"]]
    return [
        f"`{found['command']}`: {found['good']} good problems of SVAMP, GSM8K and MATH and {found['flawed']} flawed",
        f"ones, {settings['each']} of each kind below and the report's six, each set alone before every step",
        f"({settings['samples']} rollouts of the supervised start, {settings['votes']} votes of",
        f"{settings['judge_model']}).",
        "",
        *table("kind | problems | dropped by cleaning | by difficulty | by the judge", rows),
        "",
        f"Of the flawed problems {flawed:.0%} survive the difficulty filter, of the good ones {good:.0%}: a filter by",
        f"difficulty is none of flaws. Of the report's six, cleaning drops {of_six['clean']}, the difficulty filter",
        f"{of_six['difficulty']} and the judge {of_six['judge']}.",
        "",
        f"The judge keeps {missed} of the {found['flawed']} flawed problems and {spared} of the {found['good']} good",
        "ones: it is too weak to be of use.",
    ]


def main() -> None:
    parser = parser_of(__doc__, FIGURES / "pipeline-flawed.json")
    draw = "--draw" in sys.argv
    parser.add_argument("--draw", action="store_true", help="write the section from the JSON that is there")
    parser.add_argument("--data", type=Path, required=not draw)
    parser.add_argument("--model", type=Path, required=not draw)
    parser.add_argument(
        "--judge", required=not draw, help="address of an OpenAI-compatible server, as http://host:port/v1"
    )
    parser.add_argument("--judge-model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--folder", type=Path, required=not draw)
    parser.add_argument("--each", type=int, default=5)
    parser.add_argument("--good", type=int, default=40)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--votes", type=int, default=4)
    parser.add_argument("--until", choices=STEPS, default="judge", help="stop after this step")
    options = parser.parse_args()
    if options.draw:
        put_section(PAGE, "flawed", section(json.loads(options.output.read_text())))
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    rows = rows_of(options.data, each=options.each, good=options.good, seed=0)
    write_atomically(options.folder / "rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    kinds = {row["id"]: row["kind"] for row in rows}
    drops: dict[str, dict[str, str]] = {}
    for use in STEPS[: STEPS.index(options.until) + 1]:
        drops[use] = dropped_by(use, options)
        print(f"{use}: {len(drops[use])} of {len(kinds)} dropped", flush=True)
    if options.until != "judge":
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    document = {
        "command": "python benchmarks/pipeline_flawed.py",
        "settings": {name: getattr(options, name) for name in ("each", "good", "samples", "votes", "judge_model")},
        **figures(kinds, drops),
        "judging": json.loads((options.folder / "judge" / "01-judge" / "work" / "judging.json").read_text()),
        "cpu_seconds_of_the_last_call": round(used.ru_utime + used.ru_stime, 1),
        "environment": environment_facts(),
    }
    write_figure(options.output, document)
    put_section(PAGE, "flawed", section(document))


if __name__ == "__main__":
    main()
