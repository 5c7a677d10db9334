"""Recall and precision of dedup and decontamination on planted copies, in real and in generated sets.

    python -m benchmarks.pipeline.planted --data ../shared/data/math/sets    # writes pipeline-planted.json
    python -m benchmarks.pipeline.planted --data ... --rules development --output runs/x.json   # the development rules

Dedup: plants of training problems are added to them. Recall of a kind is the share of plants in the cluster of their
original, with the original kept. A renumbered plant is another problem, so for it the share that is kept counts.
Precision is the share of dropped plants that are dropped for their original.
Decontamination: plants of test problems are added to training problems. Recall is the share of plants with a hit on
their test problem, and the share found under a kind for which texts are dropped.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.pipeline.plants import DEVELOPMENT, EVALUATION, KINDS, SECOND, Rules, planted
from benchmarks.shared import FIGURES, parser_of, write_figure
from magicrl.data.word_problems import WordProblems
from magicrl.evaluation.provenance import environment_facts
from magicrl.pipeline.decontaminate_step import find_contamination
from magicrl.pipeline.dedup_step import find_duplicates
from magicrl.pipeline.entry import Document
from magicrl.pipeline.pipeline_schema import DecontaminationSettings, DedupSettings

TRAINING = {"gsm8k": "gsm8k/simple_gsm8k_train.jsonl", "math_train": "math_train/simple_math_train.jsonl"}
TESTS = {
    "math500": "math500/simple_math500.jsonl",
    "aime24": "aime24/simple_aime24.jsonl",
    "aime25": "aime25/simple_aime25.jsonl",
}
RULES = {"development": (DEVELOPMENT, 1), "second": (SECOND, 20261), "evaluation": (EVALUATION, 31)}
Texts = list[tuple[str, str]]


def read(path: Path, name: str) -> Texts:
    """Return ids and statements of a set."""
    with path.open(encoding="utf-8") as file:
        return [(f"{name}/{number}", json.loads(line)["problem"]) for number, line in enumerate(file)]


def generated(count: int, seed: int) -> Texts:
    """Return stories of the generated family, and formulas of one template, so that many are similar but different."""
    family = WordProblems()
    found = [
        (f"story/{i}", p.prompt)
        for i, p in zip(range(count // 2), family.stream(seed=seed, split="train"), strict=False)
    ]
    rng = random.Random(seed)
    moulds = (
        r"Let $f(x) = {a}x^{{2}} + {b}x + {c}$. What is the sum of the values of $x$ for which $f(x) = {d}$?",
        r"Find the number of integers $n$ with $1 \le n \le {a}{b}$ such that ${c}n + {d}$ is divisible by {a}.",
        r"A rectangle has sides $\frac{{{a}}}{{{b}}}$ and $\frac{{{c}}}{{{d}}}$. Compute its area as a fraction.",
        r"How many ways are there to choose {a} cards from a deck of {b}{c} cards, if card {d} must be among them?",
        r"Two trains start {a}{b} miles apart. One goes {c} mph and the other {d} mph. When do they meet?",
        r"Evaluate $\log_{{{a}}} {b}{c} + \sqrt{{{d}}}$ to the nearest hundredth.",
    )
    seen: set[str] = set()
    while len(found) < count:
        text = rng.choice(moulds).format(**{letter: rng.randint(2, 99) for letter in "abcd"})
        if text not in seen:
            seen.add(text)
            found.append((f"formula/{len(found)}", text))
    return found


def beside(base: Texts, plants: Sequence[tuple[str, str, str]], seed: int) -> list[Document]:
    """Return texts and plants in random order; of two equal copies dedup keeps the text, by its rank."""
    documents = [Document(name, text, (1.0,)) for name, text in base]
    documents += [Document(f"plant/{i}", text, (0.0,)) for i, (_, _, text) in enumerate(plants)]
    random.Random(seed).shuffle(documents)
    return documents


def shares(of: Counter[str], asked: Counter[str], kinds: Sequence[str] = KINDS) -> dict[str, float]:
    return {kind: round(of[kind] / asked[kind], 4) for kind in kinds if asked[kind]}


def dedup_figures(base: Texts, rules: Rules, *, each: int, seed: int) -> dict[str, Any]:
    """Measure plants of ``base`` in it: recall by kind, and precision of the added plants."""
    plants = planted(base, rules, each=each, seed=seed)
    copies = {f"plant/{i}": (kind, name) for i, (kind, name, _) in enumerate(plants)}
    documents = beside(base, plants, seed)
    began = time.process_time()
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        found, guarded = find_duplicates(documents, DedupSettings(), folder=Path(folder))
    seconds = time.process_time() - began
    last = {name: one.kept for name, one in found.items()}
    asked, hit, joined = Counter[str](), Counter[str](), 0
    for name, (kind, original) in copies.items():
        asked[kind] += 1
        same = name in last and last[name] == last.get(original, original)
        hit[kind] += same if kind != "renumbered" else name not in last
        joined += same and kind != "renumbered"
    stages = Counter(one.stage for name, one in found.items() if name in copies)
    return {
        "documents": len(documents),
        "plants": dict(asked),
        "recall": shares(hit, asked, [kind for kind in KINDS if kind != "renumbered"]),
        "renumbered_left_alone": shares(hit, asked, ["renumbered"]).get("renumbered"),
        "precision_of_plants": round(joined / stages.total(), 4) if stages else None,
        "found_by": dict(stages),
        "dropped_of_the_set_itself": dict(Counter(one.stage for name, one in found.items() if name not in copies)),
        "pairs_guarded": guarded,
        "cpu_seconds": round(seconds, 1),
    }


def decontamination_figures(
    training: Texts, tests: dict[str, Texts], rules: Rules, *, each: int, seed: int
) -> dict[str, Any]:
    """Measure plants of test problems in training problems: recall by kind, reported kind, precision of drops."""
    settings = DecontaminationSettings()
    plants = planted([one for members in tests.values() for one in members], rules, each=each, seed=seed)
    copies = {f"plant/{i}": (kind, name) for i, (kind, name, _) in enumerate(plants)}
    documents = beside(training, plants, seed)
    references = {name: [Document(i, text) for i, text in members] for name, members in tests.items()}
    began = time.process_time()
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        hits = list(find_contamination(documents, references, settings, folder=Path(folder)))
    seconds = time.process_time() - began
    own = {hit.document: hit for hit in hits if hit.document in copies and hit.reference == copies[hit.document][1]}
    asked, reported, dropped = Counter[str](), Counter[str](), Counter[str]()
    given: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    for name, (kind, _) in copies.items():
        asked[kind] += 1
        if name in own:
            reported[kind] += 1
            given[kind][own[name].kind] += 1
            dropped[kind] += own[name].kind in settings.drop
    right = dropped.total()
    drops = [hit for hit in hits if hit.document in copies and hit.kind in settings.drop]
    wrong = sum(hit.reference != copies[hit.document][1] for hit in drops)
    return {
        "documents": len(documents),
        "plants": dict(asked),
        "recall_reported": shares(reported, asked),
        "recall_dropped": shares(dropped, asked),
        "kinds_given": {kind: dict(given[kind]) for kind in KINDS if asked[kind]},
        "precision_of_plants": round(right / (right + wrong), 4) if right + wrong else None,
        "hits_on_the_training_set_itself": dict(Counter(hit.kind for hit in hits if hit.document not in copies)),
        "test_problems": len({text for members in tests.values() for _, text in members}),
        "cpu_seconds": round(seconds, 1),
    }


def figures(data: Path | None, rules: Rules, *, each: int, seed: int) -> dict[str, Any]:
    """Return all figures; real sets are included if ``data`` is given."""
    told: dict[str, Any] = {"generated": {"dedup": dedup_figures(generated(4000, seed), rules, each=each, seed=seed)}}
    if data is not None:
        sets = {name: read(data / path, name) for name, path in (TRAINING | TESTS).items()}
        training = [one for name in TRAINING for one in sets[name]]
        tests = {name: sets[name] for name in TESTS}
        told["real"] = {
            "dedup": {name: dedup_figures(sets[name], rules, each=each, seed=seed) for name in TRAINING},
            "decontamination": decontamination_figures(training, tests, rules, each=each, seed=seed),
        }
    return told


def main() -> None:
    parser = parser_of(__doc__, FIGURES / "pipeline-planted.json")
    parser.add_argument("--data", type=Path, help="folder of the real sets; without it only generated ones")
    parser.add_argument("--rules", choices=sorted(RULES), default="evaluation")
    parser.add_argument("--each", type=int, default=200, help="plants of each kind")
    given = parser.parse_args()
    rules, seed = RULES[given.rules]
    told = figures(given.data, rules, each=given.each, seed=seed)
    head = {"environment": environment_facts(), "rules": given.rules, "seed": seed, "each": given.each}
    write_figure(given.output, head | told)
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
