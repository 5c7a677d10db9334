"""The results file: one JSON line a run, keyed by what decided it; enough to decide every claim and draw every figure.

A line holds the curves of ``measures.CURVES`` a step, the running sums of the costs, the tests before and after at
every temperature, and where it was made. Curves are rounded to four digits: a suite is a few MB. Where a run recorded
its test responses (``logging.samples``) the line also has their lengths, from which follows what a shorter limit would
have given.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from magicrl.experiments.definition import Ablation, Scale
from magicrl.experiments.measures import COSTS, CURVES, Result
from magicrl.experiments.planning import PlannedRun, plan_runs
from magicrl.reporting.read_folders import RecordedRun, read_run
from magicrl.training.recorder import environment_facts

SCHEMA_VERSION = 1


def result_of(run: PlannedRun, folder: Path, *, cpu_seconds: float, stopped: str | None) -> dict[str, Any]:
    """The line of a run whose folder is ``folder``.

    Args:
        run: as it was planned.
        folder: of the run.
        cpu_seconds: CPU time of its process.
        stopped: why it ended before its time, if it did: a loss that was not finite, nothing left to learn from.
    """
    recorded = read_run(folder)
    return {
        "schema_version": SCHEMA_VERSION,
        "key": run.key,
        "scale": run.scale,
        "seed": run.seed,
        "arms": [list(pair) for pair in run.arms],
        "stopped": stopped,
        "steps": len(recorded.metrics),
        "cpu_seconds": rounded(cpu_seconds),
        "curves": curves_of(recorded),
        "tests": {name: _accuracies(recorded, name) for name in ("before", "after")},
        "lengths": {name: found for name in ("before", "after") if (found := lengths_of(recorded, name))},
        "machine": environment_facts(),
    }


def curves_of(run: RecordedRun) -> dict[str, list[float | None]]:
    """Every curve and every running cost of a recorded run, a value a step; a curve without any value is left out."""
    found: dict[str, list[float | None]] = {}
    for name, key in CURVES.items():
        values = [_number(row.values.get(key)) for row in run.metrics]
        if any(value is not None for value in values):
            found[name] = [None if value is None else rounded(value) for value in values]
    for name, key in COSTS.items():
        spent = accumulate(_number(row.values.get(key)) or 0.0 for row in run.metrics)
        found[name] = [rounded(value) for value in spent]
    return found


def _number(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if math.isfinite(value) else None


def _accuracies(run: RecordedRun, name: str) -> dict[str, float]:
    """Accuracy by temperature on the first test set; empty where the run ended before that test."""
    found = [run.evaluation(name, label) for label in run.sets[:1]]
    return {
        str(float(temperature)): rounded(score.accuracy.mean)
        for evaluation in found
        if evaluation is not None
        for temperature, score in evaluation.temperatures.items()
    }


def lengths_of(run: RecordedRun, name: str) -> dict[str, Any]:
    """Recorded test responses at temperature 1: how many, and the lengths of the right ones in tokens, ascending."""
    found = [evaluation for label in run.sets[:1] if (evaluation := run.evaluation(name, label)) is not None]
    shown = [r for e in found for sample in e.samples for r in sample.responses if r.temperature == 1.0]
    right = sorted(r.tokens for r in shown if r.outcome == "correct" and r.tokens is not None)
    return {"responses": len(shown), "right": right} if shown else {}


def rounded(value: float) -> float:
    """Four significant digits."""
    return float(f"{value:.4g}")


def read_results(path: Path) -> dict[str, Result]:
    """The results in ``path`` by key; none where there is no such file.

    Raises:
        ValueError: a line that is no result, with its number.
    """
    found: dict[str, Result] = {}
    if not path.exists():
        return found
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            row = json.loads(line)
            version, key = row["schema_version"], row["key"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: not a result of an experiment ({error}); remove it") from error
        if version != SCHEMA_VERSION:
            raise ValueError(f"{path}, line {number}: schema_version {version}, this magicrl reads {SCHEMA_VERSION}")
        found[key] = row
    return found


def append_result(path: Path, row: Mapping[str, Any]) -> None:
    """Add a line; a run is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        stream.write(json.dumps(row, allow_nan=False) + "\n")


def by_arm(
    ablations: Iterable[Ablation], scale: Scale, results: Mapping[str, Result], seeds: Sequence[int] | None = None
) -> dict[str, dict[str, dict[int, Result]]]:
    """Results by ablation, arm and seed, for ``claims.decide`` and figures: those that the definitions now ask for."""
    found: dict[str, dict[str, dict[int, Result]]] = {}
    for run in plan_runs(ablations, scale, seeds):
        for ablation, arm in run.arms:
            if run.key in results:
                found.setdefault(ablation, {}).setdefault(arm, {})[run.seed] = results[run.key]
    return found
