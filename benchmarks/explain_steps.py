"""Twenty random steps of three runs made again by ``magicrl explain`` and compared with the recording by hash.

``python benchmarks/explain_steps.py FOLDER`` makes the runs in FOLDER (tiny; tiny with four updates a step; the
quickstart, its stages shortened) and writes ``docs/figures/explain.json``. Which steps is a function of the seed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

import magicrl

STEPS, SEED = 20, 24
KEPT = 6
"""Checkpoints that the runs keep."""
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": ("tiny", {}),
    "four updates a step": ("tiny", {"stages.0.mini_batch": 2, "stages.1.mini_batch": 2}),
    "quickstart, 30 steps": (
        "quickstart",
        {
            "stages.0.min_steps": 1,
            "stages.0.max_steps": 20,
            "stages.1.min_steps": 1,
            "stages.1.max_steps": 10,
            "evaluation.samples": 1,
            "evaluation.pass_at": [1],
            "evaluation.start_pass_at": None,
            "checkpoint.every": 5,
        },
    ),
}


def main() -> None:
    """Make the runs, then the steps, and write the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path, default=Path("docs/figures/explain.json"))
    given = parser.parse_args()
    rng = np.random.default_rng(SEED)
    found: list[dict[str, Any]] = []
    for at, (name, (recipe, settings)) in enumerate(RUNS.items()):
        kept = {"checkpoint.keep_last": KEPT, **settings}
        folder = given.folder / name.replace(" ", "-").replace(",", "")
        done = (folder / "run.json").exists() and magicrl.load_run(folder).status == "finished"
        run = magicrl.load_run(folder) if done else magicrl.train(recipe, settings=kept, output=folder, progress=False)
        steps = len(run.metrics)
        count = STEPS // len(RUNS) + (at < STEPS % len(RUNS))
        for step in sorted(int(s) for s in rng.choice(steps, size=count, replace=False) + 1):
            found.append({"name": name, **compared(run.path, step)})
            print(json.dumps(found[-1]))
    given.output.write_text(json.dumps({"seed": SEED, "steps": found}, indent=1) + "\n")
    print(f"{sum(one['equal'] for one in found)} of {len(found)} equal -> {given.output}")


def compared(run: Path, step: int) -> dict[str, Any]:
    """What came out equal of one step."""
    document = magicrl.explain(run, step)
    update = document["update"]
    off = [abs(n["float64"] / n["recorded"] - 1) for n in update["grad_norms"] if n["recorded"]]
    return {
        "step": step,
        "from_checkpoint": document["from_checkpoint"],
        "sgd_steps": update["sgd_steps"],
        "equal": document["equal"],
        "checks": {check["name"]: check["equal"] for check in document["checks"]},
        "sha256": {check["name"]: check["repeated"] for check in document["checks"]},
        "grad_norm_off": max(off, default=None),
    }


if __name__ == "__main__":
    main()
