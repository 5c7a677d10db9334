"""Trackers: places that a run's figures are copied to, and the observer that copies them.

TensorBoard, Weights & Biases and trackio come with magicrl; one's own is named in the recipe as ``file.py:Class`` and
does what ``Tracker`` says (examples/tracker.py). Each package is an extra, imported as its tracker is made. What else
they need comes from their own settings, keys too: ``wandb login`` or WANDB_API_KEY, WANDB_MODE, WANDB_ENTITY,
WANDB_BASE_URL; TRACKIO_DIR, TRACKIO_SPACE_ID, TRACKIO_SERVER_URL.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import math
import os
import secrets
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from magicrl.config.loader import leaves
from magicrl.files import write_atomically
from magicrl.records import StepMetrics
from magicrl.registry import is_builtin, resolve
from magicrl.reporting.read_folders import Evaluation, RecordedRun, read_run
from magicrl_verifiers.secrets import without_secrets

STATE_FILE = "trackers.json"
"""File in the run folder: the run's ``id`` in trackers, and the last training step that each was sent, as ``last``."""
Report = Callable[[Mapping[str, object]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """The run that a tracker opens."""

    recorded: RecordedRun  # the run folder
    project: str  # groups runs, where a tracker knows groups
    identity: str  # 16 hex digits that name this run folder in every tracker, the same after a resume

    @property
    def title(self) -> str:
        """The recipe's name, with the folder's where that says more."""
        name, folder = self.recorded.name, self.recorded.path.resolve().name
        return name if folder == name else f"{name} ({folder})"

    @property
    def facts(self) -> dict[str, Any]:
        """The resolved configuration with the run's provenance under ``provenance``."""
        run, last = self.recorded.run, (self.recorded.environments or [{}])[-1]
        provenance = {key: run.get(key) for key in ("config_hash", "start_model", "data")}
        provenance |= {key: last.get(key) for key in ("git", "versions")}
        return {**self.recorded.config, "provenance": {k: v for k, v in provenance.items() if v is not None}}


class Tracker(Protocol):
    """A place that a run's figures are copied to. Any error it raises ends it, never the run.

    ``logging.trackers`` names a class (or a function without arguments) that makes one, before anything is trained.
    """

    def open(self, run: TrackedRun) -> None:
        """Begin a run, or continue the one of this identity. The steps that follow were not sent before."""
        ...

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """The figures of one training step, keys ``area/name/stat``."""
        ...

    def event(self, step: int, kind: str, message: str) -> None:
        """A stage mark, a test, a warning: text at a step."""
        ...

    def results(self, step: int, values: Mapping[str, float]) -> None:
        """Test results, keys as ``result_figures`` gives them; step 0 before training, the last one after it."""
        ...

    def close(self, status: str) -> None:
        """The run is over: ``finished``, ``stopped`` or ``failed``."""
        ...


def scalars(metrics: StepMetrics) -> dict[str, float]:
    """The figures of a step that a curve can show: finite numbers."""
    numbers = {key: float(v) for key, v in metrics.values.items() if isinstance(v, (int, float))}
    return {key: value for key, value in numbers.items() if math.isfinite(value)}


def result_figures(evaluations: tuple[Evaluation, ...]) -> dict[str, float]:
    """Accuracies of the tests, and mean rewards (``held_out_reward_t0.6``) where they are graded, with their 95 %
    intervals: ``test_after/held_out_t0.6/mean``, ``/low``, ``/high``."""
    found: dict[str, float] = {}
    for evaluation in evaluations:
        if evaluation.name not in ("before", "after"):
            continue
        area = f"test_{evaluation.name}/{evaluation.set_name}"
        for temperature, score in evaluation.temperatures.items():
            intervals = {f"{area}_t{temperature:g}": score.accuracy}
            intervals |= {} if score.reward is None else {f"{area}_reward_t{temperature:g}": score.reward}
            intervals |= {f"{area}_pass{k}": interval for k, interval in score.pass_at.items()}
            for key, interval in intervals.items():
                found |= {f"{key}/mean": interval.mean, f"{key}/low": interval.low, f"{key}/high": interval.high}
    return found


def make_trackers(references: Sequence[str]) -> dict[str, Tracker]:
    """The trackers that ``logging.trackers`` names, before anything is trained.

    Raises:
        ValueError: one is not installed or cannot be made, does not do what ``Tracker`` says, or W&B has nobody
            logged in.
    """
    made: dict[str, Tracker] = {}
    for reference in dict.fromkeys(references):
        maker = resolve("tracker", reference)
        try:
            tracker = maker()
        except ImportError as error:
            extra = f"pip install 'magicrl[{reference}]', or " if is_builtin("tracker", reference) else ""
            raise ValueError(
                f"logging.trackers names {reference}, which is not installed ({error}): {extra}take it out of the "
                "recipe"
            ) from error
        except TypeError as error:
            raise ValueError(f"logging.trackers names {reference}, which makes no tracker: {error}") from error
        missing = [name for name in ("open", "step", "event", "results", "close") if not hasattr(tracker, name)]
        if missing:
            raise ValueError(f"logging.trackers names {reference}, which makes no tracker: no {', '.join(missing)}")
        made[reference] = tracker
    return made


class TrackerMirror:
    """A ``RunObserver`` that copies steps, events and test results to trackers.

    The trackers open at the first step or event, when the run folder is complete. ``trackers.json`` there has the last
    training step that each was sent. A resumed run sends only later steps, those of its folder first: a tracker that is
    new or that failed gets all that it has missed. After a kill between sending and writing a step appears twice.

    A tracker that raises is dropped with one warning event.

    Args:
        folder: the run folder.
        trackers: by their references, as ``make_trackers`` gives them.
        project: groups runs, where a tracker knows groups.
        report: called with the warning event, which this class adds to ``events.jsonl``.
    """

    def __init__(self, folder: Path, trackers: Mapping[str, Tracker], *, project: str, report: Report) -> None:
        self._folder = folder
        self._project = project
        self._report = report
        self._trackers = dict(trackers)
        self._begun = False
        self._identity = secrets.token_hex(8)
        self._last: dict[str, int] = {}  # last training step that each tracker was sent
        self._earlier: dict[str, int] = {}  # the same, of the processes before this one
        self._results: set[str] = set()  # keys of the test results that were sent
        self._step = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        status = "finished" if kind is None else "stopped" if issubclass(kind, KeyboardInterrupt) else "failed"
        for name in [*self._trackers] if self._begun else ():
            self._call(name, "close", status)
        self._trackers.clear()

    def step(self, metrics: StepMetrics) -> None:
        """A training step is over."""
        self._step = metrics.step
        if self._begin() or not self._trackers:
            return
        for name in [*self._trackers]:
            self._send(name, metrics.step, metrics)
        self._save()

    def event(self, event: Mapping[str, Any]) -> None:
        """A stage mark, a test, a finding."""
        if self._begin() or not self._trackers:
            return
        for name in [*self._trackers]:
            self._send(name, int(event.get("step", self._step)), event)
        if event.get("kind") == "evaluation":
            figures = result_figures(read_run(self._folder).evaluations)
            new = {key: value for key, value in figures.items() if key not in self._results}
            self._results |= set(new)
            for name in [*self._trackers]:
                self._send_results(name, new)

    def progress(self, phase: str, done: int, total: int) -> None:
        """Trackers show no progress inside a step."""

    def _begin(self) -> bool:
        """Open the trackers and send them what the run folder holds; True if that happened now."""
        if self._begun:
            return False
        self._begun = True
        if not self._trackers:
            return True
        recorded = read_run(self._folder)
        state = self._folder / STATE_FILE
        if state.exists():
            kept = json.loads(state.read_text(encoding="utf-8"))
            self._identity, self._last = kept["id"], kept.get("last", {})
            self._earlier = dict(self._last)
        rows: list[tuple[int, StepMetrics | Mapping[str, Any]]] = [(row.step, row) for row in recorded.metrics]
        rows += [(int(event.get("step", 0)), event) for event in recorded.events]
        rows.sort(key=lambda row: row[0])  # stable: an event comes after the figures of its step
        self._step = rows[-1][0] if rows else 0
        figures = result_figures(recorded.evaluations)
        self._results = set(figures)
        # before the trackers open: a kill from here on leaves no second run in them
        self._save()
        run = TrackedRun(recorded=recorded, project=self._project, identity=self._identity)
        for name in [*self._trackers]:
            self._call(name, "open", run)
            for step, row in rows:
                self._send(name, step, row)
            if name not in self._earlier:
                self._send_results(name, figures)
        self._save()
        return True

    def _save(self) -> None:
        write_atomically(self._folder / STATE_FILE, json.dumps({"id": self._identity, "last": self._last}))

    def _send(self, name: str, step: int, row: StepMetrics | Mapping[str, Any]) -> None:
        """Send a step's figures or an event, unless an earlier process sent that step."""
        if step <= self._earlier.get(name, -1):
            return
        if isinstance(row, StepMetrics):
            self._call(name, "step", step, scalars(row))
            if name in self._trackers:
                self._last[name] = step
        else:
            kind = str(row.get("kind", "event"))
            kind = str(row.get("rule", kind)) if kind == "health" else kind
            self._call(name, "event", step, kind, str(row.get("message", "")))

    def _send_results(self, name: str, figures: Mapping[str, float]) -> None:
        for area, step in (("test_before/", 0), ("test_after/", self._step)):
            values = {key: value for key, value in figures.items() if key.startswith(area)}
            if values:
                self._call(name, "results", step, values)

    def _call(self, name: str, method: str, *arguments: Any) -> None:
        """Call a method of a tracker; drop one that raises with a warning. One that was dropped is not called."""
        try:
            if name in self._trackers:
                getattr(self._trackers[name], method)(*arguments)
        except Exception as error:  # noqa: BLE001 - foreign code with a network and a disk behind it; the run goes on
            del self._trackers[name]
            warning: dict[str, object] = {
                "kind": "warning",
                "step": self._step,
                "message": f"tracker {name} ended ({without_secrets(f'{type(error).__name__}: {error}')}); "
                "training and metrics.jsonl go on, and a resumed run brings the tracker up to date",
            }
            with (self._folder / "events.jsonl").open("a", encoding="utf-8") as file:
                row = {"time": datetime.now(tz=UTC).isoformat(timespec="seconds"), **warning}
                file.write(json.dumps(row) + "\n")
            self._report(warning)


# Those that come with magicrl.


class TensorBoardTracker:
    """Event files in ``<run>/tensorboard``: one event a step, flushed at once, so that it survives a kill."""

    def __init__(self) -> None:
        # generated modules make their classes as they are imported, where no type checker sees them
        protocol: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._event: Any = protocol.Event
        self._writer: Any = None

    def open(self, run: TrackedRun) -> None:
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(run.recorded.path / "tensorboard"))
        plain = {key: v if isinstance(v, (str, float, int, bool)) else str(v) for key, v in leaves(run.facts).items()}
        self._add(0, hparams_pb(plain, trial_id=run.identity))

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


_EXIT_CODES = {"finished": 0, "failed": 1, "stopped": 255}
_FINISH_SECONDS = 300.0
_SERVICE = "WANDB_SERVICE"


class WandbTracker:
    """One W&B run per run folder: online, or offline in ``<run>/wandb`` for a later ``wandb sync``.

    Offline, each process writes a file of its own, all with the same run id: sync all of them.
    """

    def __init__(self) -> None:
        """Raises ValueError without an API key."""
        self._wandb: Any = importlib.import_module("wandb")
        self._run: Any = None
        with _service_of_this_process():
            _check_login(self._wandb)

    def open(self, run: TrackedRun) -> None:
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

    One trackio run per run folder, also over resumes. Nothing leaves the machine unless
    TRACKIO_SPACE_ID or TRACKIO_SERVER_URL says so.
    """

    def __init__(self) -> None:
        self._trackio: Any = importlib.import_module("trackio")
        self._run: Any = None

    def open(self, run: TrackedRun) -> None:
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
