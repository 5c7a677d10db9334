"""A tracker of your own: a CSV file a run, a line a metric and step; test results and events in files beside it.

    magicrl train tiny --set 'logging.trackers=["examples/tracker.py:CsvTracker"]'

It is made before training begins and opened at the first step. ``open`` returns the last step that the tracker holds:
the run then tells it every later one, so that a resumed run, or one that got its tracker late, ends with each step
once. Whatever it raises ends the tracker with a warning, never the run.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from magicrl.reporting.trackers import NOTHING, TrackedRun


class CsvTracker:
    """``<run>/csv/steps.csv``, ``results.csv`` and ``events.csv``."""

    def __init__(self) -> None:
        self.folder = Path()

    def open(self, run: TrackedRun) -> int:
        self.folder = run.recorded.path / "csv"
        self.folder.mkdir(exist_ok=True)
        steps = self.folder / "steps.csv"
        recorded = run.recorded.metrics[-1].step if run.recorded.metrics else NOTHING
        rows = list(csv.reader(steps.open())) if steps.exists() else []
        kept = [row for row in rows if int(row[0]) <= recorded]  # a resumed run makes the later steps again
        with steps.open("w", newline="") as file:
            csv.writer(file).writerows(kept)
        return int(kept[-1][0]) if kept else NOTHING

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._append("steps", [[step, key, value] for key, value in values.items()])

    def event(self, step: int, kind: str, message: str) -> None:
        self._append("events", [[step, kind, message]])

    def results(self, step: int, values: Mapping[str, float]) -> None:
        self._append("results", [[step, key, value] for key, value in values.items()])

    def close(self, status: str) -> None:
        self._append("events", [["", "end", status]])

    def _append(self, name: str, rows: list[list[object]]) -> None:
        with (self.folder / f"{name}.csv").open("a", newline="") as file:
            csv.writer(file).writerows(rows)
