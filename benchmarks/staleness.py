"""Accuracy against steps at staleness 0, 1, 2 and 4, with and without corrections, on the quickstart's task.

Written down on 20 November 2026, before the first run:

- at staleness 1 and 2, differences to the synchronous run lie within the spread of three seeds, corrected or not;
- at staleness 4 without a correction learning is slower over the first 60 steps, and the end is a few points lower or
  more uneven over the seeds; truncated importance sampling and the second-moment mask bring back most of that;
- the gap of sampler and learner grows with staleness, about in proportion, and stays below 0.1 nats at 4;
- m2po at 0.04 masks under one per cent of the tokens here: updates are small and responses short.

The engine has rows enough for everything that is issued, so that the staleness of most tokens is the bound: the worst
case of each bound. All arms of a seed have the same start, prompts and validation problems.

    python benchmarks/staleness.py --seeds 0 1 2 --output docs/figures/staleness.json

About 15 CPU seconds a run on one thread. Results are written as they come; what is there is not run again.

With ``--replicas 2`` the engine is a pool of two processes in Ray, which go on while the learner works; the table of
docs/asynchronous.md is written anew. Expected on 21 November 2026, before the first run: at 0 the accuracies of one
process but for near-ties; above it tokens are less stale than the bound, since replicas that stand ready have finished
what they were asked before newer weights come, or not, as time has it; with ``tis`` every end within five points of
the synchronous one; without a correction 4 falls apart as in one process.

    python benchmarks/staleness.py --replicas 2 --seeds 0 1 --arms "0 none" "1 tis" "2 tis" "4 tis" "4 none"
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import FIGURES, RECIPES, ROOT, document, parser_of, put_section, rounded, table, write_figure

from magicrl.api.training import parts_of
from magicrl.config.loader import load_train_recipe
from magicrl.records import StepMetrics
from magicrl.training.recorder import NullObserver
from magicrl.training.session import train

PAGE = ROOT / "docs" / "asynchronous.md"
RECIPE = RECIPES / "quickstart.toml"
STEPS, EVERY = 80, 20

COMMON = (
    "data.test={}", "logging.samples=0", "logging.rollouts_every=0", "checkpoint.every=1000", "run.threads=1",
    'data.validation=[{family="running_sum", seed=2, count=60, split="validation"}]',
    f"evaluation.every={EVERY}", "evaluation.validation_samples=4", "entropy.controller=none",
    "optimizer.learning_rate=6e-4", "rollout.max_rows=1024", "algorithm.second_moment=0.04",
    "stages.0.max_tokens=64", "stages.0.rollout_batch=16", "stages.0.min_steps=0", f"stages.0.max_steps={STEPS - 1}",
    "stages.0.transition.rule=fixed",
    # the recipe's second stage cannot be left out by a setting: one step, at the same T, that the curve ends before
    "stages.1.max_tokens=64", "stages.1.rollout_batch=16", "stages.1.min_steps=0", "stages.1.max_steps=1",
)  # fmt: skip

POOL = ("cluster.verifier.workers_per_node=1", "cluster.timeouts.start=600")

ARMS: Mapping[str, tuple[int, str]] = {
    "0 none": (0, "none"),
    **{f"{k} {correction}": (k, correction) for k in (1, 2, 4) for correction in ("none", "tis", "m2po")},
}
SERIES = (
    "staleness/mean", "staleness/older/ratio", "learner/sampler_gap_mean", "learner/corrected_ratio",
    "staleness/spanning/ratio", "entropy/exact/mean", "length/mean", "groups/trained",
)  # fmt: skip


class Curve(NullObserver):
    """Keeps every step's metrics."""

    def __init__(self) -> None:
        self.rows: list[StepMetrics] = []

    def step(self, metrics: StepMetrics) -> None:
        self.rows.append(metrics)


def one(arm: str, seed: int, start: Path | None, folder: Path, extra: Sequence[str]) -> dict[str, Any]:
    staleness, correction = ARMS[arm]
    settings = [f"run.seed={seed}", f"rollout.max_staleness={staleness}", f"algorithm.correction={correction}"]
    config = load_train_recipe(RECIPE, [*COMMON, *settings, *extra])
    if start is not None:
        config = config.model_copy(update={"start": config.start.model_copy(update={"model": str(start), "sft": None})})
    shutil.rmtree(folder, ignore_errors=True)
    curve, began = Curve(), time.process_time()
    with parts_of(config) as parts:
        train(config, folder, curve, resume=False, parts=parts)
    measured = [r for r in curve.rows if "validation/accuracy/mean" in r.values]
    means = {key: [float(v) for r in curve.rows if (v := r.values.get(key)) is not None] for key in SERIES}
    return {
        "steps": [r.step for r in measured],
        "accuracy": [r.values["validation/accuracy/mean"] for r in measured],
        "standard_error": [rounded(float(r.values["validation/accuracy/standard_error"] or 0)) for r in measured],
        "train_accuracy": [rounded(float(r.values["train/accuracy/mean"] or 0)) for r in curve.rows],
        **{key: rounded(float(np.mean(values))) for key, values in means.items() if values},
        "cpu_seconds": rounded(time.process_time() - began),
    }


def summary(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """By arm over its seeds: accuracy at each step, and the area under the curve (mean accuracy over the looks)."""
    arms: dict[str, Any] = {}
    for arm in ARMS:
        found = [run for key, run in runs.items() if key.rpartition(" ")[0] == arm]
        if not found:
            continue
        accuracy = np.array([run["accuracy"] for run in found])
        arms[arm] = {
            "seeds": len(found),
            "steps": found[0]["steps"],
            "accuracy": [rounded(float(x)) for x in accuracy.mean(0)],
            "lowest": [rounded(float(x)) for x in accuracy.min(0)],
            "highest": [rounded(float(x)) for x in accuracy.max(0)],
            "mean_over_steps": [rounded(float(x)) for x in accuracy.mean(1)],
            **{key: rounded(float(np.mean([r[key] for r in found]))) for key in SERIES if key in found[0]},
        }
    return arms


def section(result: Mapping[str, Any]) -> list[str]:
    """The page's table of a pool."""
    machine, replicas = result["machine"], result["settings"]["replicas"]
    rows: list[list[object]] = []
    for arm, found in result["arms"].items():
        rows.append(
            [
                *ARMS[arm], found["seeds"], *(f"{x:.2f}" for x in found["accuracy"]),
                f"{found['lowest'][-1]:.2f} to {found['highest'][-1]:.2f}", f"{found.get('staleness/mean', 0.0):.2f}",
                f"{found.get('staleness/spanning/ratio', 0.0):.1%}", f"{found['learner/sampler_gap_mean']:.3f}",
                f"{found['learner/corrected_ratio']:.2%}",
            ]
        )  # fmt: skip
    head = "staleness | correction | seeds | step 20 | 40 | 60 | 80 | seeds at 80 | mean staleness | spanning | gap "
    return [
        f"`python benchmarks/staleness.py --replicas {replicas}` with these arms ({machine['started'][:10]}, "
        f"{machine['machine']}): the same task on a pool of {replicas} replicas.",
        "",
        *table(f"{head}| corrected", rows),
    ]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--start", type=Path, help="a start model's folder; default: the recipe's, made when absent")
    parser.add_argument("--set", action="append", default=[], help="a further setting of every run")
    parser.add_argument("--runs", type=Path, default=Path("runs/staleness"))
    parser.add_argument("--replicas", type=int, default=0, help="of a pool in Ray; default: the engine of one process")
    parser.add_argument(
        "--output", type=Path, help="default: docs/figures/staleness.json, of a pool staleness-pool.json"
    )
    options = parser.parse_args()
    name = "staleness-pool.json" if options.replicas else "staleness.json"
    output = options.output or FIGURES / name
    known = json.loads(output.read_text()) if output.exists() else {}
    runs: dict[str, Any] = known.get("runs", {})
    pool = [f"cluster.rollout.replicas={options.replicas}", *POOL] if options.replicas else []
    further = [*pool, *options.set]
    settings = {"recipe": "quickstart", "settings": [*COMMON, *further], "steps": STEPS, "replicas": options.replicas}
    for seed in options.seeds:
        for arm in options.arms:
            key = f"{arm} {seed}"
            if key in runs:
                continue
            runs[key] = one(arm, seed, options.start, options.runs / name / key.replace(" ", "-"), further)
            result = {**document(settings), "arms": summary(runs), "runs": runs}
            write_figure(output, result)
    if options.replicas and output == FIGURES / name:
        put_section(PAGE, "staleness-pool", section(json.loads(output.read_text())))


if __name__ == "__main__":
    main()
