"""Recall and precision of dedup and decontamination on planted copies, in real and in generated sets.

    python benchmarks/pipeline_planted.py --data ../shared/data/math/sets           # docs/figures/pipeline-planted.json
    python benchmarks/pipeline_planted.py --data ... --rules development --output runs/x.json   # the rules to look at
    python benchmarks/pipeline_planted.py --speed 1000000 --output runs/speed.json  # a million synthetic documents

Dedup: plants of training problems are put beside them. Recall of a kind: share of plants in the cluster of their
original, the original kept. A renumbered plant is another problem: there the share that is left alone counts.
Precision: of the plants that are dropped, the share that are dropped for their original.
Decontamination: plants of test problems are put among training problems. Recall: share of plants with a hit on their
own test problem; besides, the share found under a kind for which texts are dropped.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from plants import DEVELOPMENT, EVALUATION, KINDS, SECOND, Rules, planted

from magicrl.data.word_problems import WordProblems
from magicrl.evaluation.provenance import environment_facts
from magicrl.files import write_atomically
from magicrl.pipeline.decontaminate_step import find_contamination
from magicrl.pipeline.dedup_step import find_duplicates
from magicrl.pipeline.entry import Document
from magicrl.pipeline.pipeline_schema import DecontaminationSettings, DedupSettings

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures" / "pipeline-planted.json"
TRAINING = {"gsm8k": "gsm8k/simple_gsm8k_train.jsonl", "math_train": "math_train/simple_math_train.jsonl"}
TESTS = {
    "math500": "math500/simple_math500.jsonl",
    "aime24": "aime24/simple_aime24.jsonl",
    "aime25": "aime25/simple_aime25.jsonl",
}
RULES = {"development": (DEVELOPMENT, 1), "second": (SECOND, 20261), "evaluation": (EVALUATION, 31)}
Texts = list[tuple[str, str]]


def read(path: Path, name: str) -> Texts:
    """Ids and statements of a set."""
    with path.open(encoding="utf-8") as file:
        return [(f"{name}/{number}", json.loads(line)["problem"]) for number, line in enumerate(file)]


def generated(count: int, seed: int) -> Texts:
    """Stories of the generated family, and formulas: many of one mould, so that much is alike and not the same."""
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


def dedup_figures(base: Texts, rules: Rules, *, each: int, seed: int, settings: DedupSettings) -> dict[str, Any]:
    """Plants of ``base`` beside it: recall by kind, and precision of what the plants add."""
    plants = planted(base, rules, each=each, seed=seed)
    documents = [Document(name, text, (1.0,)) for name, text in base]
    copies = {f"plant/{i}": (kind, name) for i, (kind, name, _) in enumerate(plants)}
    documents += [Document(f"plant/{i}", text, (0.0,)) for i, (_, _, text) in enumerate(plants)]
    random.Random(seed).shuffle(documents)
    folder = Path(tempfile.mkdtemp(prefix="planted-"))
    began = time.process_time()
    found = find_duplicates(documents, settings, folder=folder)
    seconds = time.process_time() - began
    shutil.rmtree(folder)
    last = {one.id: one.kept for one in found.dropped}
    asked, hit, stages, joined = Counter[str](), Counter[str](), Counter[str](), 0
    for name, (kind, original) in copies.items():
        asked[kind] += 1
        same = name in last and last[name] == last.get(original, original)
        hit[kind] += same if kind != "renumbered" else name not in last
        joined += same and kind != "renumbered"
    stages.update(one.stage for one in found.dropped if one.id in copies)
    wrong = sum(stages.values()) - joined
    return {
        "documents": len(documents),
        "plants": dict(asked),
        "recall": {kind: round(hit[kind] / asked[kind], 4) for kind in KINDS if kind != "renumbered" and asked[kind]},
        "renumbered_left_alone": round(hit["renumbered"] / asked["renumbered"], 4) if asked["renumbered"] else None,
        "precision_of_plants": round(joined / (joined + wrong), 4) if joined + wrong else None,
        "found_by": dict(stages),
        "dropped_of_the_set_itself": dict(Counter(one.stage for one in found.dropped if one.id not in copies)),
        "pairs_guarded": dict(found.pairs_guarded),
        "cpu_seconds": round(seconds, 1),
    }


def decontamination_figures(
    training: Texts, tests: dict[str, Texts], rules: Rules, *, each: int, seed: int, settings: DecontaminationSettings
) -> dict[str, Any]:
    """Plants of test problems among training problems: recall by kind, the kind given, precision of dropped texts."""
    plants = planted([one for members in tests.values() for one in members], rules, each=each, seed=seed)
    copies = {f"plant/{i}": (kind, name) for i, (kind, name, _) in enumerate(plants)}
    documents = [Document(name, text) for name, text in training]
    documents += [Document(f"plant/{i}", text) for i, (_, _, text) in enumerate(plants)]
    random.Random(seed).shuffle(documents)
    references = {name: [Document(i, text) for i, text in members] for name, members in tests.items()}
    folder = Path(tempfile.mkdtemp(prefix="planted-"))
    began = time.process_time()
    hits = list(find_contamination(documents, references, settings, folder=folder))
    seconds = time.process_time() - began
    shutil.rmtree(folder)
    own = {hit.document: hit for hit in hits if hit.document in copies and hit.reference == copies[hit.document][1]}
    asked, reported, dropped = Counter[str](), Counter[str](), Counter[str]()
    given: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    for name, (kind, _) in copies.items():
        asked[kind] += 1
        if name in own:
            reported[kind] += 1
            given[kind][own[name].kind] += 1
            dropped[kind] += own[name].kind in settings.drop
    wrong = [
        h for h in hits if h.document in copies and h.reference != copies[h.document][1] and h.kind in settings.drop
    ]
    shared = {r.text for members in references.values() for r in members}
    right = sum(hit.kind in settings.drop for hit in own.values())
    return {
        "documents": len(documents),
        "plants": dict(asked),
        "recall_reported": {kind: round(reported[kind] / asked[kind], 4) for kind in KINDS if asked[kind]},
        "recall_dropped": {kind: round(dropped[kind] / asked[kind], 4) for kind in KINDS if asked[kind]},
        "kinds_given": {kind: dict(given[kind]) for kind in KINDS if asked[kind]},
        "precision_of_plants": round(right / (right + len(wrong)), 4) if right + len(wrong) else None,
        "hits_on_the_training_set_itself": dict(Counter(hit.kind for hit in hits if hit.document not in copies)),
        "test_problems": len(shared),
        "cpu_seconds": round(seconds, 1),
    }


def synthetic(count: int, seed: int) -> Iterator[Document]:
    """Documents as long as problems are, a tenth of them copies: equal, retypeset, or with a word more."""
    rng = random.Random(seed)
    words = ["".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(3, 9))) for _ in range(20000)]
    weights = [1 / (rank + 10) for rank in range(len(words))]
    recent: list[str] = []
    drawn: list[str] = []
    for number in range(count):
        if len(drawn) < 64:
            drawn = rng.choices(words, weights, k=100_000)
        if recent and rng.random() < 0.1:
            text = rng.choice(recent)
            form = rng.random()
            if form < 0.4:
                text = text.replace("^{2}", "²").replace("$", "")
            elif form < 0.8:
                text = text.replace(". ", " indeed. ", 1)
        else:
            size = rng.randint(15, 60)
            chosen, drawn = drawn[-size:], drawn[:-size]
            chosen[size // 2] = f"$x^{{2}} + {rng.randint(2, 999)}$."
            chosen[size // 3] = str(rng.randint(2, 9999))
            text = " ".join(chosen).capitalize() + "?"
            if len(recent) < 5000:
                recent.append(text)
            else:
                recent[rng.randrange(5000)] = text
        yield Document(f"synthetic/{number}", text, (float(len(text)),))


def speed_figures(count: int) -> dict[str, Any]:
    """CPU seconds and peak memory of dedup and decontamination over ``count`` synthetic documents."""
    told: dict[str, Any] = {"documents": count}
    with tempfile.TemporaryDirectory(prefix="speed-") as name:
        before, wall = time.process_time(), time.monotonic()
        for _ in synthetic(count, 0):
            pass
        told["generating_cpu_seconds"] = round(time.process_time() - before, 1)
        before, wall = time.process_time(), time.monotonic()
        found = find_duplicates(synthetic(count, 0), DedupSettings(), folder=Path(name) / "dedup")
        told["dedup_cpu_seconds"] = round(time.process_time() - before - told["generating_cpu_seconds"], 1)
        told["dedup_wall_seconds"] = round(time.monotonic() - wall, 1)
        told["dedup_dropped"] = dict(Counter(one.stage for one in found.dropped))
        told["dedup_disk_mib"] = round(sum(p.stat().st_size for p in Path(name).rglob("*") if p.is_file()) / 2**20)
        told["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        references = {"test": [Document(f"t{i}", d.text) for i, d in enumerate(synthetic(600, 1))]}
        before, wall = time.process_time(), time.monotonic()
        hits = find_contamination(
            synthetic(count, 0), references, DecontaminationSettings(), folder=Path(name) / "decontamination"
        )
        told["decontamination_hits"] = sum(1 for _ in hits)
        told["decontamination_cpu_seconds"] = round(time.process_time() - before - told["generating_cpu_seconds"], 1)
        told["peak_mib_both"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return told


def figures(data: Path | None, rules: Rules, *, each: int, seed: int) -> dict[str, Any]:
    """All planted figures; real sets where ``data`` is given."""
    made = generated(4000, seed)
    told: dict[str, Any] = {
        "generated": {
            "dedup": dedup_figures(made, rules, each=each, seed=seed, settings=DedupSettings()),
        }
    }
    if data is not None:
        sets = {name: read(data / path, name) for name, path in (TRAINING | TESTS).items()}
        training = [one for name in TRAINING for one in sets[name]]
        tests = {name: sets[name] for name in TESTS}
        told["real"] = {"dedup": {}, "decontamination": {}}
        for name in TRAINING:
            told["real"]["dedup"][name] = dedup_figures(
                sets[name], rules, each=each, seed=seed, settings=DedupSettings()
            )
        told["real"]["decontamination"] = decontamination_figures(
            training, tests, rules, each=each, seed=seed, settings=DecontaminationSettings()
        )
    return told


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of the real sets; without it only generated ones")
    parser.add_argument("--rules", choices=sorted(RULES), default="evaluation")
    parser.add_argument("--each", type=int, default=200, help="plants of each kind")
    parser.add_argument("--speed", type=int, help="run over this many synthetic documents, and nothing else")
    parser.add_argument("--output", type=Path, default=FIGURES)
    given = parser.parse_args(arguments)
    told: dict[str, Any] = {"environment": environment_facts()}
    if given.speed:
        told["speed"] = speed_figures(given.speed)
    else:
        rules, seed = RULES[given.rules]
        told |= {"rules": given.rules, "seed": seed, "each": given.each}
        told |= figures(given.data, rules, each=given.each, seed=seed)
        if given.output.exists() and "speed" in (before := json.loads(given.output.read_text())):
            told["speed"] = before["speed"]
    write_atomically(given.output, json.dumps(told, indent=1) + "\n")
    sys.stdout.write(
        json.dumps({name: value for name, value in told.items() if name != "environment"}, indent=1) + "\n"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
