"""A tracker of your own: a CSV file a run, a line a metric and step; test results and events in files beside it.

    magicrl train tiny --set 'logging.trackers=["examples/tracker.py:CsvTracker"]'

It is made before training begins and opened at the first step, also of a resumed run. ``trackers.json`` has the last
step that it was sent, and only later ones are sent. Whatever it raises ends the tracker with a warning, never the run.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from magicrl.reporting.trackers import TrackedRun


class CsvTracker:
    """``<run>/csv/steps.csv``, ``results.csv`` and ``events.csv``."""

    def __init__(self) -> None:
        self.folder = Path()

    def open(self, run: TrackedRun) -> None:
        self.folder = run.recorded.path / "csv"
        self.folder.mkdir(exist_ok=True)

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
