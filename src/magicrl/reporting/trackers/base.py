"""What every tracker does, and how a run's figures are named in it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from magicrl.records import StepMetrics
from magicrl.reporting.read_folders import Evaluation, RecordedRun

NOTHING = -1
"""The last step of a tracker that holds none; events before the first training step are at step 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """What a tracker is told as it begins or goes on.

    Attributes:
        recorded: the run folder as it stands.
        project: groups runs, where a tracker knows groups.
        identity: 16 hex digits that name this run folder in every tracker, the same after a resume.
    """

    recorded: RecordedRun
    project: str
    identity: str

    @property
    def title(self) -> str:
        """The recipe's name, with the folder's where that says more."""
        name, folder = self.recorded.name, self.recorded.path.resolve().name
        return name if folder == name else f"{name} ({folder})"

    @property
    def facts(self) -> dict[str, Any]:
        """The resolved configuration with the run's provenance under ``provenance``."""
        run = self.recorded.run
        environments: list[Mapping[str, Any]] = run.get("environments") or [{}]
        provenance = {
            "config_hash": run.get("config_hash"),
            "git": environments[-1].get("git"),
            "start_model": run.get("start_model"),
            "data": run.get("data"),
            "versions": environments[-1].get("versions"),
        }
        return {**self.recorded.config, "provenance": {k: v for k, v in provenance.items() if v is not None}}


class Tracker(Protocol):
    """A place that a run's figures are copied to. Any error it raises ends it, never the run."""

    name: str

    def open(self, run: TrackedRun) -> int:
        """Begin or go on; returns the last training step that it holds and keeps (``NOTHING`` for none)."""
        ...

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """The figures of one training step, keys ``area/name/stat``."""
        ...

    def event(self, step: int, kind: str, message: str) -> None:
        """A stage mark, a test, a warning: text at a step."""
        ...

    def results(self, step: int, values: Mapping[str, float]) -> None:
        """Test results, each told once a process, keys as ``result_figures`` gives them."""
        ...

    def close(self, status: str) -> None:
        """The run is over: ``finished``, ``stopped`` or ``failed``."""
        ...


def scalars(metrics: StepMetrics) -> dict[str, float]:
    """The figures of a step that a curve can show: finite numbers."""
    return {
        key: float(value)
        for key, value in metrics.values.items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    }


def result_figures(evaluations: tuple[Evaluation, ...]) -> dict[str, float]:
    """Accuracies of the tests with their 95 % intervals: ``test_after/held_out_t0.6/mean``, ``/low``, ``/high``."""
    found: dict[str, float] = {}
    for evaluation in evaluations:
        if evaluation.name not in ("before", "after"):
            continue
        area = f"test_{evaluation.name}/{evaluation.set_name}"
        for temperature, score in evaluation.temperatures.items():
            intervals = {f"{area}_t{temperature:g}": score.accuracy}
            intervals |= {f"{area}_pass{k}": interval for k, interval in score.pass_at.items()}
            for key, interval in intervals.items():
                found |= {f"{key}/mean": interval.mean, f"{key}/low": interval.low, f"{key}/high": interval.high}
    return found


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str | float | int | bool]:
    """Dotted keys of a configuration; a list of tables by index, any other list as text."""
    flat: dict[str, str | float | int | bool] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{name}.")
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            for i, item in enumerate(value):
                flat |= flatten(item, f"{name}.{i}.")
        elif isinstance(value, (str, float, int, bool)):
            flat[name] = value
        else:
            flat[name] = str(value)
    return flat
