"""A million synthetic problems through the pipeline: seconds, problems a second, peak memory.

    python benchmarks/pipeline_million.py --folder runs/million     # docs/figures/pipeline-million.json

The problems are made from a seed: sums in words with a solution; known shares of them are proofs, need a figure, have a
wrong solution, an unreadable record, or are copies. What the pipeline drops must be exactly these. One process does all
steps, so that its CPU seconds and peak memory are those of the whole; `--workers` adds processes.
"""

from __future__ import annotations

import json
import os
import random
import resource
import time
from pathlib import Path
from typing import Any

from common import FIGURES, parser_of, write_figure

from magicrl.evaluation.provenance import environment_facts
from magicrl.pipeline.build import build
from magicrl.pipeline.frame import Watcher
from magicrl.pipeline.pipeline_schema import PipelineConfig
from magicrl.pipeline.stats import counts_of

SHARES = {"proof": 0.02, "needs a figure": 0.02, "solution disagrees": 0.02, "unreadable record": 0.001, "copy": 0.05}
THINGS = ["apples", "stones", "letters", "coins", "bricks", "pages", "lamps", "chairs", "seeds", "ropes", "boats"]
THINGS += ["maps"]
PLACES = ["farm", "harbour", "school", "library", "mill", "station", "market", "garden", "workshop", "forest", "castle"]
NAMES = ["Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ida", "Jon", "Kim", "Lea", "Max", "Nora", "Olaf"]


def write_problems(path: Path, count: int) -> dict[str, int]:
    """Write the set; returns how many problems of each kind it holds."""
    rng = random.Random(0)
    planted = dict.fromkeys(SHARES, 0)
    former: list[str] = []
    with path.open("w") as file:
        for place in range(count):
            kind = rng.choices([*SHARES, "good"], [*SHARES.values(), 1 - sum(SHARES.values())])[0]
            if kind == "copy" and former:
                line = rng.choice(former)
            else:
                kind = "good" if kind == "copy" else kind
                line = _line(rng, place, kind)
                if kind == "good" and place % 20 == 0:
                    former.append(line)
            if kind != "good":
                planted[kind] += 1
            file.write(line + "\n")
    return planted


def _line(rng: random.Random, place: int, kind: str) -> str:
    a, b, c = rng.randrange(2, 5000), rng.randrange(2, 5000), rng.randrange(2, 90)
    name, other, thing, where = rng.choice(NAMES), rng.choice(NAMES), rng.choice(THINGS), rng.choice(PLACES)
    text = (
        f"In the {where} number {place}, {name} keeps {a} {thing} on every one of {c} shelves, and {other} brings {b} "
        f"more {thing} on a {rng.choice(('Monday', 'Friday', 'Sunday'))}. How many {thing} are there in all?"
    )
    total = a * c + b
    if kind == "unreadable record":
        return '{"problem": "cut off'
    if kind == "proof":
        text = f"Prove that ${a}n^2 + {b}n + {place}$ is never a square when $n > {c}$."
    if kind == "needs a figure":
        text += " Use the lengths as shown in the figure."
    wrong = kind == "solution disagrees"
    solution = f"There are ${a} \\cdot {c} = {a * c}$ and {b}, so $\\boxed{{{total + wrong}}}$."
    return json.dumps({"problem": text, "answer": str(total), "solution": solution})


def config_for(path: Path, workers: int) -> PipelineConfig:
    """Read, clean, near-duplicates out, a mixture of half."""
    tree: dict[str, Any] = {
        "name": "million",
        "workers": workers,
        "sources": [{"path": str(path)}],
        "steps": [
            {"use": "clean"},
            {"use": "dedup", "settings": {"stages": ["exact", "near"]}},
            {"use": "mix", "caps": {path.stem: 500_000}},
        ],
    }
    return PipelineConfig.model_validate(tree)


def main() -> None:
    parser = parser_of(__doc__, FIGURES / "pipeline-million.json")
    parser.add_argument("--folder", type=Path, required=True, help="empty or not there yet")
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    path, run = options.folder / "problems.jsonl", options.folder / "run"
    planted = write_problems(path, options.count)
    config = config_for(path, options.workers)
    spent: list[float] = []
    walls: list[float] = []
    for _ in range(2):  # the second finds that nothing has changed
        began, before = time.monotonic(), _cpu()
        build(config, output=run, watcher=Watcher())
        spent.append(_cpu() - before)
        walls.append(time.monotonic() - began)
    document = {
        "problems": options.count,
        "workers": options.workers,
        "wall_seconds": round(walls[0], 1),
        "cpu_seconds": round(spent[0], 1),
        "problems_per_cpu_second": round(options.count / spent[0], 1),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "unchanged_rerun_cpu_seconds": round(spent[1], 1),
        "disk_gib": round(sum(file.stat().st_size for file in run.rglob("*") if file.is_file()) / 2**30, 2),
        "planted": planted,
        "steps": [
            {"step": c.step, "in": c.entered, "kept": c.kept, "dropped": c.reasons, "seconds": c.seconds}
            for c in counts_of(run)
        ],
        "load": os.getloadavg(),
        "environment": environment_facts(),
    }
    write_figure(options.output, document)
    print(json.dumps(document, indent=1))


def _cpu() -> float:
    """CPU seconds of this process and of its children that ended."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


if __name__ == "__main__":
    main()
