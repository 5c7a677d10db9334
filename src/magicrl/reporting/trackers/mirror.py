"""The observer that copies a run to its trackers, and never lets one of them harm the run."""

from __future__ import annotations

import importlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from magicrl.config.errors import without_secrets
from magicrl.records import StepMetrics
from magicrl.reporting.read_folders import RecordedRun, read_run
from magicrl.reporting.trackers.base import NOTHING, TrackedRun, Tracker, result_figures, scalars

TRACKERS = {
    "tensorboard": ("magicrl.reporting.trackers.to_tensorboard", "TensorBoardTracker"),
    "wandb": ("magicrl.reporting.trackers.to_wandb", "WandbTracker"),
    "trackio": ("magicrl.reporting.trackers.to_trackio", "TrackioTracker"),
}
IDENTITY_FILE = "trackers.json"
Report = Callable[[Mapping[str, object]], None]


def make_trackers(names: Sequence[str]) -> list[Tracker]:
    """The trackers of these names, before anything is trained.

    Raises:
        ValueError: one is not installed, or W&B has nobody logged in.
    """
    made: list[Tracker] = []
    for name in dict.fromkeys(names):
        module_name, class_name = TRACKERS[name]
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            raise ValueError(
                f"logging.trackers names {name}, which is not installed ({error}): "
                f"pip install 'magicrl[{name}]', or take it out of the recipe"
            ) from error
        if name == "wandb":
            module.check_login()
        made.append(getattr(module, class_name)())
    return made


class TrackerMirror:
    """A ``RunObserver`` that copies what the run folder holds to trackers, and keeps them in step with it.

    The trackers open at the first step or event, when a resumed run has rewound its folder to the checkpoint.
    Then each is brought to where the folder stands, and what it already holds is not written twice. One that
    raises is let go with one warning event; a later ``--resume`` brings it up to date.

    Args:
        folder: the run folder.
        trackers: as ``make_trackers`` gives them.
        project: groups runs, where a tracker knows groups.
        report: told of the warning event, which this class adds to ``events.jsonl``.
    """

    def __init__(self, folder: Path, trackers: Sequence[Tracker], *, project: str, report: Report) -> None:
        self._folder = folder
        self._project = project
        self._report = report
        self._waiting = list(trackers)
        self._held: dict[str, int] = {}
        self._last: dict[str, int] = {}
        self._told: dict[str, set[str]] = {}
        self._open: list[Tracker] = []
        self._step = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        status = "finished" if kind is None else "stopped" if issubclass(kind, KeyboardInterrupt) else "failed"
        for tracker in list(self._open):
            self._guard(tracker, lambda t: t.close(status))
        self._open.clear()

    def step(self, metrics: StepMetrics) -> None:
        """A training step is over."""
        self._step = metrics.step
        if self._begin():
            return  # the folder that they were brought level with holds this step already
        for tracker in list(self._open):
            if metrics.step > self._last[tracker.name]:
                self._last[tracker.name] = metrics.step
                self._guard(tracker, lambda t: t.step(metrics.step, scalars(metrics)))

    def event(self, event: Mapping[str, object]) -> None:
        """A stage mark, a test, a finding."""
        opened = self._begin()
        for tracker in list(self._open):
            # one that opened just now has been told of it, unless the event (a resume) is where its history ended
            if not opened or self._place(event) <= self._held[tracker.name]:
                self._guard(tracker, lambda t: self._tell(t, event))

    def progress(self, phase: str, done: int, total: int) -> None:
        """Trackers show no progress inside a step."""

    def _begin(self) -> bool:
        """Open the trackers if they wait for it; True if that happened now."""
        if not self._waiting:
            return False
        waiting, self._waiting = self._waiting, []
        for tracker in waiting:
            self._open.append(tracker)
            self._guard(tracker, self._bring_level)
        return True

    def _bring_level(self, tracker: Tracker) -> None:
        recorded = read_run(self._folder)
        run = TrackedRun(recorded=recorded, project=self._project, identity=_identity(self._folder))
        self._held[tracker.name] = held = tracker.open(run)
        for step, row in _in_order(recorded):
            self._step = max(self._step, step)
            if step <= held and held != NOTHING:
                continue
            if isinstance(row, StepMetrics):
                tracker.step(step, scalars(row))
            else:
                self._tell(tracker, row)
        last = recorded.metrics[-1].step if recorded.metrics else NOTHING
        self._last[tracker.name] = max(held, last)
        self._told[tracker.name] = set() if held == NOTHING else set(result_figures(recorded.evaluations))
        self._tell_results(tracker)

    def _tell_results(self, tracker: Tracker) -> None:
        """Results that the tracker was not told of: of the start model at step 0, of the trained one at the last."""
        told = self._told[tracker.name]
        figures = result_figures(read_run(self._folder).evaluations)
        for area, step in (("test_before/", 0), ("test_after/", self._step)):
            new = {key: value for key, value in figures.items() if key.startswith(area) and key not in told}
            if new:
                tracker.results(step, new)
                told |= set(new)

    def _tell(self, tracker: Tracker, event: Mapping[str, Any]) -> None:
        kind = str(event.get("kind", "event"))
        if kind == "health":
            kind = str(event.get("rule", kind))
        place = self._place(event)
        # a tracker that held later steps than the checkpoint takes no text at earlier ones again
        if place >= self._last.get(tracker.name, NOTHING):
            tracker.event(place, kind, str(event.get("message", "")))
        if kind == "evaluation" and tracker.name in self._told:  # not while it is brought level
            self._tell_results(tracker)

    def _place(self, event: Mapping[str, Any]) -> int:
        step = event.get("step")
        return step if isinstance(step, int) else self._step

    def _guard(self, tracker: Tracker, action: Callable[[Tracker], None]) -> None:
        try:
            action(tracker)
        except Exception as error:  # noqa: BLE001 - foreign code with a network and a disk behind it; the run goes on
            if tracker in self._open:
                self._open.remove(tracker)
            warning: dict[str, object] = {
                "kind": "warning",
                "step": self._step,
                "message": f"tracker {tracker.name} ended ({without_secrets(f'{type(error).__name__}: {error}')}); "
                "training and metrics.jsonl go on, and a resumed run brings the tracker up to date",
            }
            with (self._folder / "events.jsonl").open("a", encoding="utf-8") as file:
                row = {"time": datetime.now(tz=UTC).isoformat(timespec="seconds"), **warning}
                file.write(json.dumps(row) + "\n")
            self._report(warning)


def _in_order(recorded: RecordedRun) -> list[tuple[int, StepMetrics | Mapping[str, Any]]]:
    """Steps and events as they happened: an event of a step comes after its figures."""
    rows: list[tuple[int, StepMetrics | Mapping[str, Any]]] = [(row.step, row) for row in recorded.metrics]
    rows += [(int(event.get("step", 0)), event) for event in recorded.events]
    return sorted(rows, key=lambda row: row[0])  # stable


def _identity(folder: Path) -> str:
    """The run's name in trackers, made once for a run folder."""
    path = folder / IDENTITY_FILE
    if path.exists():
        return str(json.loads(path.read_text(encoding="utf-8"))["id"])
    identity = secrets.token_hex(8)
    path.write_text(json.dumps({"id": identity}), encoding="utf-8")
    return identity
