"""A million synthetic problems through the pipeline: seconds, problems a second, peak memory, and a kill in the middle.

    python benchmarks/pipeline_million.py --folder /tmp/million --output docs/figures/pipeline-million.json

The problems are made from a seed: sums in words with a solution; known shares of them are proofs, need a figure, have a
wrong solution, an unreadable record, or are copies. What the pipeline drops must be exactly these. One process does all
steps, so that its CPU seconds and peak memory are those of the whole; `--workers` adds processes.

With `--kill-after SECONDS` the process is killed (SIGKILL) after so many seconds of wall time and the command ends with
status 3; the same command goes on from what is there. The figures are sums over all slices, what was lost by a kill
and done again included, so that a long run can be cut up on a machine that others use, and shows what a kill costs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from magicrl.evaluation.provenance import environment_facts
from magicrl.pipeline.build import build
from magicrl.pipeline.frame import Watcher
from magicrl.pipeline.pipeline_schema import PipelineConfig
from magicrl.pipeline.stats import counts_of

SHARES = {"proof": 0.02, "needs a figure": 0.02, "solution disagrees": 0.02, "unreadable record": 0.001, "copy": 0.05}
THINGS = (
    "apples",
    "stones",
    "letters",
    "coins",
    "bricks",
    "pages",
    "lamps",
    "chairs",
    "seeds",
    "ropes",
    "boats",
    "maps",
)
PLACES = ("farm", "harbour", "school", "library", "mill", "station", "market", "garden", "workshop", "forest", "castle")
NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ida", "Jon", "Kim", "Lea", "Max", "Nora", "Olaf")


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


def run_slice(options: argparse.Namespace, path: Path) -> dict[str, Any]:
    """One process builds until it is done or killed; its CPU seconds (of its children, too) and peak memory."""
    words = [sys.executable, __file__, "--folder", str(options.folder), "--workers", str(options.workers), "--slice"]
    began = time.monotonic()
    child = psutil.Popen([*words, str(path)])
    inner: dict[int, float] = {}
    killed = False
    while child.poll() is None:
        if options.kill_after is not None and time.monotonic() - began > options.kill_after:
            inner = _children(child)
            child.send_signal(signal.SIGKILL)
            killed = True
            break
        time.sleep(0.2)
    _, status, used = os.wait4(child.pid, 0) if killed else (0, child.returncode, None)
    if not killed:
        if status:
            raise SystemExit(f"the build failed with status {status}")
        return json.loads((options.folder / "slice.json").read_text())
    assert used is not None
    seconds = used.ru_utime + used.ru_stime + sum(inner.values())
    wall = time.monotonic() - began
    return {"cpu_seconds": seconds, "wall_seconds": wall, "peak_gib": used.ru_maxrss / 2**20, "killed": True}


def _children(process: psutil.Process) -> dict[int, float]:
    """CPU seconds of a process's children, which end with it and are nobody's afterwards."""
    found: dict[int, float] = {}
    for child in process.children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.NoSuchProcess:
            continue
        found[child.pid] = times.user + times.system
    return found


def build_once(options: argparse.Namespace) -> None:
    """In the slice's own process: build, and say what it cost."""
    began = time.monotonic()
    path = Path(options.slice)
    build(config_for(path, options.workers), output=options.folder / "run", watcher=Watcher())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    wall = time.monotonic() - began
    told = {"cpu_seconds": _cpu(), "wall_seconds": wall, "peak_gib": peak, "killed": False}
    (options.folder / "slice.json").write_text(json.dumps(told))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--kill-after", type=float)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--slice", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.slice is not None:
        build_once(options)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    path, state_path = options.folder / "problems.jsonl", options.folder / "slices.json"
    if not state_path.exists():
        planted = write_problems(path, options.count)
        state_path.write_text(json.dumps({"count": options.count, "planted": planted, "slices": []}))
    state: dict[str, Any] = json.loads(state_path.read_text())
    if state["count"] != options.count:
        raise SystemExit(f"{options.folder} holds a run of {state['count']} problems; choose another --folder")
    state["slices"].append(run_slice(options, path))
    state_path.write_text(json.dumps(state))
    if state["slices"][-1]["killed"]:
        print(f"killed after {options.kill_after:g} s ({len(state['slices'])} slices so far); run again to go on")
        raise SystemExit(3)
    document = figures(options, path, state)
    text = json.dumps(document, indent=1)
    if options.output is not None:
        options.output.write_text(text + "\n")
    print(text)


def figures(options: argparse.Namespace, path: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Of a run that is done."""
    run, slices = options.folder / "run", state["slices"]
    seconds = sum(one["wall_seconds"] for one in slices)
    used = sum(one["cpu_seconds"] for one in slices)
    again = _cpu()
    build(config_for(path, options.workers), output=run, watcher=Watcher())
    again = _cpu() - again
    counts = counts_of(run)
    return {
        "problems": options.count,
        "workers": options.workers,
        "wall_seconds": round(seconds, 1),
        "cpu_seconds": round(used, 1),
        "problems_per_cpu_second": round(options.count / used, 1),
        "peak_gib": round(max(one["peak_gib"] for one in slices), 2),
        "slices": [{**one, "cpu_seconds": round(one["cpu_seconds"], 1)} for one in slices],
        "unchanged_rerun_cpu_seconds": round(again, 1),
        "disk_gib": round(sum(file.stat().st_size for file in run.rglob("*") if file.is_file()) / 2**30, 2),
        "planted": state["planted"],
        "steps": [
            {"step": c.step, "in": c.entered, "kept": c.kept, "dropped": c.reasons, "seconds": c.seconds}
            for c in counts
        ],
        "load": os.getloadavg(),
        "environment": environment_facts(),
    }


def _cpu() -> float:
    """CPU seconds of this process and of its children that ended."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


if __name__ == "__main__":
    main()
