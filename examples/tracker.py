"""A custom tracker: CSV files per run, with one line per metric and step, and files for test results and events.

    magicrl train tiny --set 'logging.trackers=["examples/tracker.py:CsvTracker"]'

A tracker is created before training and opened at the first step, also in a resumed run. ``trackers.json`` keeps the
last step and the events that were sent, and only others are sent. An exception ends the tracker with a warning, never
the run.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from magicrl.reporting.trackers import TrackedRun


class CsvTracker:
    """Writer of ``csv/steps.csv``, ``csv/results.csv`` and ``csv/events.csv`` in the run folder."""

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
