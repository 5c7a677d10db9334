"""The planner against measured CPU runs: python benchmarks/plan_cpu.py RUN_FOLDER RUN_FOLDER [--write]

Of each run two efficiencies are found on its first stage (one of the rollout, one of the learner) and its later
stages are predicted, step by step, from the lengths that were sampled and the groups that were kept. For a model so
small that a decode step is the host's time the shape of that time (seconds a step, seconds a row) is ``TINY_DECODE``
and the first stage gives its scale alone. A run of one thread is measured in CPU seconds where it
recorded them, since a busy machine stretches the wall clock. Then each run is predicted with the other's efficiencies,
which shows what does not carry from one width of model to another. Writes ``docs/figures/plan-cpu.json``; ``--write``
also the tables of ``cpu-2core`` in ``calibration.toml``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from common import ROOT, document, parser_of, rounded, write_figure
from plan_published import error, write_tables
from scipy.optimize import brentq

from magicrl.config.loader import load_train_recipe
from magicrl.planning.costs import Efficiency, LearnerWork, System, decode_cost, learner_seconds
from magicrl.planning.hardware import load_hardware
from magicrl.planning.shapes import ModelShape, load_shape
from magicrl.planning.workload import rollout_seconds

HARDWARE = load_hardware("cpu-2core")
START = Efficiency(kv=0.4, step_overhead=0.003, learner=0.2, other=1e-4)
# Measured at batches of 64 and 256 under T = 48, tried on 32 and 128 and on T = 128: within 6 %, but for 11 % at 256.
TINY_DECODE = replace(START, step_overhead=0.002042, row=1.3e-05)
NINE_TENTHS = 1.645  # deviations of a normal variable that hold nine tenths of it, both sides together
TINY = 1e7  # parameters below which a decode step is the host's time, not arithmetic


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One measured step."""

    stage: int
    lengths: np.ndarray  # ``[groups, group_size]`` tokens sampled
    prompt: float  # mean tokens
    groups: int  # that were trained on
    trained: int  # response tokens of these
    rollout: float  # seconds
    train: float  # seconds
    other: float  # seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A measured run, and what of its recipe decides its cost."""

    name: str
    shape: ModelShape
    rows: int
    micro_batch_tokens: int
    group_size: int
    clock: str
    steps: list[Step]


def load_run(folder: Path) -> Run:
    config = load_train_recipe(folder / "config.toml")
    size = config.stages[0].group_size
    steps: list[Step] = []
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    alone = config.run.threads == 1 and all("time/rollout_cpu" in record["values"] for record in records)
    suffix = "_cpu" if alone else ""
    for record in records:
        values = record["values"]
        table = pq.read_table(
            folder / "rollouts" / f"step-{record['step']:06d}.parquet", columns=["prompt_tokens", "tokens"]
        )
        lengths = np.array([len(tokens) for tokens in table["tokens"].to_pylist()])
        steps.append(
            Step(
                stage=record["stage"],
                lengths=lengths.reshape(-1, size),
                prompt=float(np.mean([len(tokens) for tokens in table["prompt_tokens"].to_pylist()])),
                groups=int(values["groups/trained"]),
                trained=int(values["tokens/trained"]),
                rollout=values[f"time/rollout{suffix}"],
                train=values[f"time/train{suffix}"],
                other=values["time/other"],
            )
        )
    return Run(
        name=folder.name,
        shape=load_shape(str(folder / "model")),
        rows=config.rollout.max_rows,
        micro_batch_tokens=config.model.micro_batch_tokens,
        group_size=size,
        clock="CPU seconds" if alone else "wall clock",
        steps=steps,
    )


def sampling_seconds(run: Run, step: Step, efficiency: Efficiency) -> float:
    lengths = step.lengths
    return rollout_seconds(
        decode_cost(System(run.shape, HARDWARE, efficiency)),
        responses=lengths.size,
        batch=min(run.rows, lengths.size),
        mean=float(lengths.mean()),
        mean_context=float((lengths**2).mean() / lengths.mean() / 2),
        longest=float(lengths.max()),
        prompts=len(lengths),
        prompt=round(step.prompt),
    )[0]


def train_seconds(run: Run, step: Step, efficiency: Efficiency) -> float:
    work = LearnerWork(
        tokens=step.groups * step.prompt + step.trained,
        mean_context=step.prompt + float(step.lengths.mean()) / 2,
        responses=step.groups * run.group_size,
        variation=0.0,
        sgd_steps=1,
        micro_batch_tokens=run.micro_batch_tokens,
        recompute=False,
    )
    return learner_seconds(System(run.shape, HARDWARE, efficiency), work, 1)


def fitted(run: Run, steps: Sequence[Step]) -> Efficiency:
    """The efficiencies that give these steps' mean rollout and training times; of a tiny model's decode step the scale
    is found, its shape is ``TINY_DECODE``."""
    tiny = run.shape.parameters < TINY
    measured, trained = np.mean([s.rollout for s in steps]), np.mean([s.train for s in steps])

    def at(value: float) -> Efficiency:
        if tiny:
            return replace(START, step_overhead=value * TINY_DECODE.step_overhead, row=value * TINY_DECODE.row)
        return replace(START, matmul=value)

    def gap(value: float) -> float:
        return float(np.mean([sampling_seconds(run, s, at(value)) for s in steps]) - measured)

    low, high = (0.05, 20.0) if tiny else (0.01, 1.0)
    found = at(float(brentq(gap, low, high, rtol=1e-4)))

    def learning(value: float) -> float:
        return float(np.mean([train_seconds(run, s, replace(found, learner=value)) for s in steps]) - trained)

    other = float(np.mean([s.other / s.lengths.size for s in steps]))
    return replace(found, learner=float(brentq(learning, 0.001, 1.0, rtol=1e-4)), other=other)


def compared(run: Run, steps: Sequence[Step], efficiency: Efficiency) -> dict[str, Any]:
    """Means over steps, predicted and measured, and the median absolute error of a single step."""
    rollout = np.array([sampling_seconds(run, s, efficiency) for s in steps])
    train = np.array([train_seconds(run, s, efficiency) for s in steps])
    other = np.array([efficiency.other * s.lengths.size for s in steps])
    pairs = {
        "rollout": (rollout, np.array([s.rollout for s in steps])),
        "train": (train, np.array([s.train for s in steps])),
        "step": (rollout + train + other, np.array([s.rollout + s.train + s.other for s in steps])),
    }
    return {
        part: {
            "predicted_seconds": rounded(float(p.mean())),
            "measured_seconds": rounded(float(m.mean())),
            "error": error(float(p.mean()), float(m.mean())),
            "median_error_of_a_step": rounded(float(np.median(np.abs(p / m - 1)))),
        }
        for part, (p, m) in pairs.items()
    }


def told_of(run: Run, deviation: float) -> dict[str, Any]:
    """What the calibration says of a run's efficiency."""
    return {
        "hardware": "cpu-2core",
        "hidden": run.shape.hidden,
        "source": f"the first stage of {run.name} on shared EPYC cores, {run.clock}",
        "factor": round(exp(NINE_TENTHS * deviation), 3),
        "factor_from": "the error on the later stage of that run",
    }


def main() -> None:
    parser = parser_of(__doc__, ROOT / "docs" / "figures" / "plan-cpu.json")
    parser.add_argument("runs", nargs=2, type=Path)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    runs = [load_run(folder) for folder in options.runs]
    result: dict[str, Any] = {
        "run": document({"hardware": "two shared cores, under whatever load there was"}),
    }
    tables: dict[str, tuple[Efficiency, dict[str, Any]]] = {}
    for run, other in zip(runs, reversed(runs), strict=True):
        first = [s for s in run.steps if s.stage == 0]
        later = [s for s in run.steps if s.stage > 0]
        efficiency = fitted(run, first)
        foreign = fitted(other, [s for s in other.steps if s.stage == 0])
        ahead = compared(run, later, efficiency)
        result[run.name] = {
            "clock": run.clock,
            "efficiency": {key: rounded(value) for key, value in asdict(efficiency).items()},
            "first_stage_fitted": compared(run, first, efficiency),
            "later_stages_predicted": ahead,
            f"predicted_with_{other.name}": compared(run, run.steps, foreign),
        }
        deviation = max(0.1, abs(ahead["rollout"]["error"]), abs(ahead["train"]["error"]))
        tables[f"cpu-2core-{run.name}"] = (efficiency, told_of(run, deviation))
    if options.write:
        write_tables(tables)
    write_figure(options.output, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
