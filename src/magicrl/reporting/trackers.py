"""Trackers: places that a run's figures are copied to, and the observer that keeps them level with the run folder.

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
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from magicrl.config.loader import leaves
from magicrl.records import StepMetrics
from magicrl.registry import is_builtin, resolve
from magicrl.reporting.read_folders import Evaluation, RecordedRun, read_run
from magicrl_verifiers.secrets import without_secrets

IDENTITY_FILE = "trackers.json"
Report = Callable[[Mapping[str, object]], None]

NOTHING = -1
"""The last step of a tracker that holds none; events before the first training step are at step 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """What a tracker is told as it begins or goes on."""

    recorded: RecordedRun  # the run folder as it stands
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


@dataclass(kw_only=True, slots=True)
class _Copy:
    """A tracker and what it has been told."""

    name: str
    tracker: Tracker
    held: int = NOTHING  # the last training step that it held as it opened
    last: int = NOTHING  # the last training step that it holds
    told: set[str] = field(default_factory=set[str])  # test results


class TrackerMirror:
    """A ``RunObserver`` that copies what the run folder holds to trackers, and keeps them in step with it.

    The trackers open at the first step or event, when a resumed run has rewound its folder to the checkpoint.
    Then each is brought to where the folder stands, and what it already holds is not written twice. One that
    raises is let go with one warning event; a later ``--resume`` brings it up to date.

    Args:
        folder: the run folder.
        trackers: by their references, as ``make_trackers`` gives them.
        project: groups runs, where a tracker knows groups.
        report: told of the warning event, which this class adds to ``events.jsonl``.
    """

    def __init__(self, folder: Path, trackers: Mapping[str, Tracker], *, project: str, report: Report) -> None:
        self._folder = folder
        self._project = project
        self._report = report
        self._waiting = [_Copy(name=name, tracker=tracker) for name, tracker in trackers.items()]
        self._open: list[_Copy] = []
        self._step = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        status = "finished" if kind is None else "stopped" if issubclass(kind, KeyboardInterrupt) else "failed"
        for copy in list(self._open):
            self._guard(copy, lambda c: c.tracker.close(status))
        self._open.clear()

    def step(self, metrics: StepMetrics) -> None:
        """A training step is over."""
        self._step = metrics.step
        if self._begin():
            return  # the folder that they were brought level with holds this step already
        for copy in list(self._open):
            if metrics.step > copy.last:
                copy.last = metrics.step
                self._guard(copy, lambda c: c.tracker.step(metrics.step, scalars(metrics)))

    def event(self, event: Mapping[str, object]) -> None:
        """A stage mark, a test, a finding."""
        opened = self._begin()
        for copy in list(self._open):
            # one that opened just now has been told of it, unless the event (a resume) is where its history ended
            if not opened or self._place(event) <= copy.held:
                self._guard(copy, lambda c: self._tell(c, event))
            if not opened and event.get("kind") == "evaluation" and copy in self._open:
                self._guard(copy, self._tell_results)

    def progress(self, phase: str, done: int, total: int) -> None:
        """Trackers show no progress inside a step."""

    def _begin(self) -> bool:
        """Open the trackers if they wait for it; True if that happened now."""
        if not self._waiting:
            return False
        waiting, self._waiting = self._waiting, []
        for copy in waiting:
            self._open.append(copy)
            self._guard(copy, self._bring_level)
        return True

    def _bring_level(self, copy: _Copy) -> None:
        recorded = read_run(self._folder)
        run = TrackedRun(recorded=recorded, project=self._project, identity=_identity(self._folder))
        copy.held = held = copy.tracker.open(run)
        for step, row in _in_order(recorded):
            self._step = max(self._step, step)
            if step <= held and held != NOTHING:
                continue
            if isinstance(row, StepMetrics):
                copy.tracker.step(step, scalars(row))
            else:
                self._tell(copy, row)
        copy.last = max(held, recorded.metrics[-1].step if recorded.metrics else NOTHING)
        copy.told = set() if held == NOTHING else set(result_figures(recorded.evaluations))
        self._tell_results(copy)

    def _tell_results(self, copy: _Copy) -> None:
        """Results that the tracker was not told of: of the start model at step 0, of the trained one at the last."""
        figures = result_figures(read_run(self._folder).evaluations)
        for area, step in (("test_before/", 0), ("test_after/", self._step)):
            new = {key: value for key, value in figures.items() if key.startswith(area) and key not in copy.told}
            if new:
                copy.tracker.results(step, new)
                copy.told |= set(new)

    def _tell(self, copy: _Copy, event: Mapping[str, Any]) -> None:
        kind = str(event.get("kind", "event"))
        if kind == "health":
            kind = str(event.get("rule", kind))
        place = self._place(event)
        # a tracker that held later steps than the checkpoint takes no text at earlier ones again
        if place >= copy.last:
            copy.tracker.event(place, kind, str(event.get("message", "")))

    def _place(self, event: Mapping[str, Any]) -> int:
        step = event.get("step")
        return step if isinstance(step, int) else self._step

    def _guard(self, copy: _Copy, action: Callable[[_Copy], None]) -> None:
        try:
            action(copy)
        except Exception as error:  # noqa: BLE001 - foreign code with a network and a disk behind it; the run goes on
            if copy in self._open:
                self._open.remove(copy)
            warning: dict[str, object] = {
                "kind": "warning",
                "step": self._step,
                "message": f"tracker {copy.name} ended ({without_secrets(f'{type(error).__name__}: {error}')}); "
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


# Those that come with magicrl.


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
            settings = leaves(run.facts).items()
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
