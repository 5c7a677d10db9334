"""The trackers that come with magicrl: TensorBoard, Weights & Biases, trackio.

Each package is an extra, imported as its tracker is made. What else they need comes from their own settings, keys too:
``wandb login`` or WANDB_API_KEY, WANDB_MODE, WANDB_ENTITY, WANDB_BASE_URL; TRACKIO_DIR, TRACKIO_SPACE_ID,
TRACKIO_SERVER_URL.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from magicrl.evaluation.samples import flat_settings
from magicrl.reporting.trackers import NOTHING, TrackedRun


class TensorBoardTracker:
    """Event files in ``<run>/tensorboard``: one event a step, flushed at once, so that it survives a kill."""

    def __init__(self) -> None:
        # generated modules make their classes as they are imported, where no type checker sees them
        protocol: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._event, self._log = protocol.Event, protocol.SessionLog
        self._writer: Any = None

    def open(self, run: TrackedRun) -> int:
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = run.recorded.path / "tensorboard"
        recorded = run.recorded.metrics[-1].step if run.recorded.metrics else NOTHING
        held = min(self._last_step(folder), recorded)
        # TensorBoard reads files by the second in their names: a resume within a second must not come before its run
        written = [int(path.name.split(".")[3]) for path in folder.glob("events.out.tfevents.*")]
        time.sleep(min(1.0, max(0.0, max(written, default=0) + 1 - time.time())))
        self._writer = EventFileWriter(str(folder))
        if held == NOTHING:
            settings = flat_settings(run.facts, index=".{}").items()
            plain = {key: v if isinstance(v, (str, float, int, bool)) else str(v) for key, v in settings}
            self._add(0, hparams_pb(plain, trial_id=run.identity))
        # TensorBoard drops what earlier files hold from this step on: a resumed run writes it again
        start = self._log(status=self._log.START)
        self._writer.add_event(self._event(wall_time=time.time(), step=held + 1, session_log=start))
        self._writer.flush()
        return held

    def step(self, step: int, values: Mapping[str, float]) -> None:
        summary = self._summaries.Summary
        self._add(step, summary(value=[summary.Value(tag=key, simple_value=v) for key, v in values.items()]))

    def event(self, step: int, kind: str, message: str) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._add(step, text_pb(f"events/{kind}", message))

    def results(self, step: int, values: Mapping[str, float]) -> None:
        self.step(step, values)

    def close(self, status: str) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add(self, step: int, summary: Any) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def _last_step(self, folder: Path) -> int:
        """The last training step in the event files there, as TensorBoard will show them."""
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader

        last = NOTHING
        for path in sorted(folder.glob("events.out.tfevents.*")):
            for raw in RawEventFileLoader(str(path)).Load():
                event = self._event.FromString(raw)
                if event.HasField("session_log") and event.session_log.status == self._log.START:
                    last = min(last, event.step - 1)
                elif any(v.HasField("simple_value") and not v.tag.startswith("test_") for v in event.summary.value):
                    last = max(last, event.step)
        return last


_EXIT_CODES = {"finished": 0, "failed": 1, "stopped": 255}
_FINISH_SECONDS = 300.0
_SERVICE = "WANDB_SERVICE"


class WandbTracker:
    """One W&B run a run folder, also over resumes: online, or offline in ``<run>/wandb`` for a later ``wandb sync``.

    Online, W&B keeps the steps that it has and the rest is added. Offline, W&B cannot append to an earlier
    process's file, so a resumed run writes the whole history into a new one with the same run id: the newest
    file is complete, and syncing it (or all of them in order) gives one run without gaps.
    """

    def __init__(self) -> None:
        """Raises ValueError without an API key."""
        self._wandb: Any = importlib.import_module("wandb")
        self._run: Any = None
        with _service_of_this_process():
            _check_login(self._wandb)

    def open(self, run: TrackedRun) -> int:
        settings: dict[str, Any] = {"console": "off", "silent": True}
        if "WANDB_FINISH_TIMEOUT" not in os.environ:
            settings["finish_timeout"] = _FINISH_SECONDS  # a dead network must not hold up the report for ever
        with _service_of_this_process():
            self._run = self._wandb.init(
                project=os.environ.get("WANDB_PROJECT") or run.project,
                id=run.identity,
                name=run.title,
                dir=str(run.recorded.path),
                config=run.facts,
                resume="allow",
                settings=self._wandb.Settings(**settings),
            )
        return int(self._run.step) - 1 if self._run.resumed else NOTHING

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def event(self, step: int, kind: str, message: str) -> None:
        self._run.log({f"events/{kind}": message}, step=step)

    def results(self, step: int, values: Mapping[str, float]) -> None:
        self._run.summary.update(dict(values))

    def close(self, status: str) -> None:
        if self._run is not None:
            self._run.finish(exit_code=_EXIT_CODES[status])
            self._run = None


@contextmanager
def _service_of_this_process() -> Generator[None]:
    """Leave no address of W&B's service behind in the environment.

    W&B puts it there for its own child processes. A run that this process starts later would share the service, which
    outlives a kill of that run and then refuses to resume it ("run ID is in use").
    """
    given = os.environ.get(_SERVICE)
    try:
        yield
    finally:
        if given is None:
            os.environ.pop(_SERVICE, None)


def _check_login(wandb: Any) -> None:
    """Log in to W&B, unless it is offline; asks in a terminal.

    Raises:
        ValueError: no API key.
    """
    if wandb.setup().settings.mode in ("offline", "dryrun", "disabled"):
        return
    known, reason = False, ""
    try:
        known = wandb.login(verify=False)  # whether the key is right shows as the run opens
    except wandb.errors.UsageError as error:
        reason = f" ({error})"
    if not known:
        raise ValueError(
            f"logging.trackers names wandb, and W&B has no API key{reason}: run `wandb login` or set WANDB_API_KEY, "
            "or set WANDB_MODE=offline to keep the run on disk"
        )


class TrackioTracker:
    """A local database (TRACKIO_DIR, default ``~/.cache/huggingface/trackio``), shown by ``trackio show``.

    One trackio run a run folder; a resumed run adds the steps that are not there yet. Nothing leaves the machine unless
    TRACKIO_SPACE_ID or TRACKIO_SERVER_URL says so.
    """

    def __init__(self) -> None:
        self._trackio: Any = importlib.import_module("trackio")
        self._run: Any = None

    def open(self, run: TrackedRun) -> int:
        with _silence():
            self._run = self._trackio.init(
                project=run.project,
                name=f"{run.title} {run.identity}",  # trackio resumes by name
                config=run.facts,
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        # the only thing that tells it for a local database, a Space and a server alike
        return int(self._run._next_step) - 1

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def event(self, step: int, kind: str, message: str) -> None:
        self._run.log({f"events/{kind}": message}, step=step)

    def results(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, status: str) -> None:
        if self._run is not None:
            with _silence():
                self._trackio.finish()  # not the run's own: trackio would finish that again at exit, aloud
            self._run = None


def _silence() -> contextlib.redirect_stdout[io.StringIO]:
    """trackio prints where it logs to; the display of the run owns the terminal."""
    return contextlib.redirect_stdout(io.StringIO())
