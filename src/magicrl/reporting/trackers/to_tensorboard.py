"""TensorBoard: event files in ``<run>/tensorboard``, written with TensorBoard's own writer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from magicrl.reporting.trackers.base import NOTHING, TrackedRun, flatten

FOLDER = "tensorboard"
# generated modules make their classes as they are imported, where no type checker sees them
Event, SessionLog = cast(Any, event_pb2).Event, cast(Any, event_pb2).SessionLog
Summary = cast(Any, summary_pb2).Summary


class TensorBoardTracker:
    """One event a step, flushed at once: what was written survives a kill."""

    name = "tensorboard"

    def __init__(self) -> None:
        self._writer: Any = None

    def open(self, run: TrackedRun) -> int:
        folder = run.recorded.path / FOLDER
        recorded = run.recorded.metrics[-1].step if run.recorded.metrics else NOTHING
        held = min(_last_step(folder), recorded)
        self._writer = EventFileWriter(str(folder))
        if held == NOTHING:
            self._add(0, hparams_pb(flatten(run.facts), trial_id=run.identity))
        # TensorBoard drops what earlier files hold from this step on: a resumed run writes it again
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=held + 1, session_log=start))
        self._writer.flush()
        return held

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._add(step, Summary(value=[Summary.Value(tag=key, simple_value=v) for key, v in values.items()]))

    def event(self, step: int, kind: str, message: str) -> None:
        self._add(step, text_pb(f"events/{kind}", message))

    def results(self, step: int, values: Mapping[str, float]) -> None:
        self.step(step, values)

    def close(self, status: str) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add(self, step: int, summary: Any) -> None:
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()


def _last_step(folder: Path) -> int:
    """The last training step in the event files there, as TensorBoard will show them."""
    last = NOTHING
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for raw in RawEventFileLoader(str(path)).Load():
            event = Event.FromString(raw)
            if event.HasField("session_log") and event.session_log.status == SessionLog.START:
                last = min(last, event.step - 1)
            elif any(v.HasField("simple_value") and not v.tag.startswith("test_") for v in event.summary.value):
                last = max(last, event.step)
    return last
