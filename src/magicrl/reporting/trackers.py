"""Experiment trackers, and the observer that copies a run's metrics to them.

TensorBoard, Weights & Biases, trackio and MLflow are built in. A custom tracker implements ``Tracker`` and is named in
the recipe as ``file.py:Class`` (examples/tracker.py). Each tracker's package is an extra and is imported when the
tracker is made. Trackers read their own settings and keys: ``wandb login`` or WANDB_API_KEY, WANDB_MODE, WANDB_ENTITY,
WANDB_BASE_URL; TRACKIO_DIR, TRACKIO_SPACE_ID, TRACKIO_SERVER_URL; MLFLOW_TRACKING_URI and its credentials.
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
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from magicrl.config.loader import leaves
from magicrl.files import write_atomically
from magicrl.records import StepMetrics
from magicrl.registry import is_builtin, resolve
from magicrl.reporting.read_folders import RecordedRun, SetEvaluation, read_run
from magicrl_verifiers.secrets import without_secrets

STATE_FILE = "trackers.json"
"""File in the run folder with the run's ``id`` in trackers and what each was sent: its ``last`` step, and the number of
``events`` at each step."""
Report = Callable[[Mapping[str, object]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """The run that a tracker opens."""

    recorded: RecordedRun  # the run folder
    project: str  # group of runs, for trackers with groups
    identity: str  # 16 hex digits that identify this run folder in every tracker, the same after a resume

    @property
    def title(self) -> str:
        """The recipe's name, and the folder's name if it differs."""
        name, folder = self.recorded.name, self.recorded.path.resolve().name
        return name if folder == name else f"{name} ({folder})"

    @property
    def facts(self) -> dict[str, Any]:
        """The resolved configuration, with the run's provenance as ``provenance``."""
        run, last = self.recorded.run, (self.recorded.environments or [{}])[-1]
        provenance = {key: run.get(key) for key in ("config_hash", "start_model", "data")}
        provenance |= {key: last.get(key) for key in ("git", "versions")}
        return {**self.recorded.config, "provenance": {k: v for k, v in provenance.items() if v is not None}}


class Tracker(Protocol):
    """A destination for a run's metrics. Any error that it raises ends the tracker, never the run.

    ``logging.trackers`` names a class (or a function without arguments) that makes it before training.
    """

    def open(self, run: TrackedRun) -> None:
        """Begin a run, or continue the one of this identity. Steps and events are sent only once."""
        ...

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of one training step. Keys are ``area/name/stat``."""
        ...

    def event(self, step: int, kind: str, message: str) -> None:
        """Record an event (stage, evaluation, warning) as text at a step."""
        ...

    def results(self, step: int, values: Mapping[str, float]) -> None:
        """Record test results (keys of ``result_figures``), at step 0 before and at the last step after training."""
        ...

    def close(self, status: str) -> None:
        """End the run. ``status`` is ``finished``, ``stopped`` or ``failed``."""
        ...


def result_figures(evaluations: tuple[SetEvaluation, ...]) -> dict[str, float]:
    """Return the test scores with their 95 % intervals: ``test_after/held_out_t0.6/mean``, ``/low``, ``/high``.

    Where rewards are graded, the mean rewards are included (``held_out_reward_t0.6``).
    """
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
    """Make the trackers that ``logging.trackers`` names, by name.

    Raises:
        ValueError: a tracker is not installed, cannot be made or lacks a method of ``Tracker``, or there is no login
            for W&B.
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


class TrackerMirror(contextlib.AbstractContextManager["TrackerMirror"]):
    """A ``RunObserver`` that copies steps, events and test results to trackers.

    The trackers open at the first step or event, when the run folder is complete. ``trackers.json`` there has the last
    training step and the test results sent to each tracker. A resumed run sends only later steps and other results,
    beginning with those in its folder: a new tracker, or one that had failed, gets everything that it missed. Events
    are counted by step, because a resume adds some at a step that was sent, and repeats those after its checkpoint. If
    the process is killed between sending a step and writing the file, the step appears twice.

    A tracker that raises an error is dropped with one warning event.

    Args:
        folder: the run folder.
        trackers: result of ``make_trackers``.
        project: group of runs, for trackers with groups.
        report: called with the warning event, which is also written to ``events.jsonl``.
    """

    def __init__(self, folder: Path, trackers: Mapping[str, Tracker], *, project: str, report: Report) -> None:
        self._folder = folder
        self._project = project
        self._report = report
        self._trackers = dict(trackers)
        self._begun = False
        self._identity = secrets.token_hex(8)
        self._last: dict[str, int] = {}  # last training step sent to each tracker
        self._earlier: dict[str, int] = {}  # the same, by earlier processes
        self._events: dict[str, dict[str, int]] = {}  # by tracker and step: events sent
        self._logged: Counter[int] = Counter()  # by step: events in the log
        self._results: dict[str, dict[str, float]] = {}  # by tracker: test results sent
        self._step = 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        status = "finished" if kind is None else "stopped" if issubclass(kind, KeyboardInterrupt) else "failed"
        for name in [*self._trackers] if self._begun else ():
            self._call(name, "close", status)
        self._trackers.clear()

    def step(self, metrics: StepMetrics) -> None:
        """Send a training step."""
        self._step = metrics.step
        if self._begin() or not self._trackers:
            return
        for name in [*self._trackers]:
            self._send(name, metrics)
        self._save()

    def event(self, event: Mapping[str, Any]) -> None:
        """Send a stage, an evaluation or a finding."""
        if self._begin() or not self._trackers:
            return
        step = int(event.get("step", self._step))
        self._logged[step] += 1
        for name in [*self._trackers]:
            self._send_event(name, step, self._logged[step], event)
        if event.get("kind") == "evaluation":
            figures = result_figures(read_run(self._folder).evaluations)
            for name in [*self._trackers]:
                self._send_results(name, figures)
        self._save()

    def progress(self, phase: str, done: int, total: int) -> None:
        """Ignore progress inside a step."""

    def _begin(self) -> bool:
        """Open the trackers and send them the contents of the run folder. Return False if they were open already."""
        if self._begun:
            return False
        self._begun = True
        if not self._trackers:
            return True
        recorded = read_run(self._folder)
        figures = result_figures(recorded.evaluations)
        state = self._folder / STATE_FILE
        if state.exists():
            try:
                kept = json.loads(state.read_text(encoding="utf-8"))
                events = {name: dict(counts) for name, counts in kept.get("events", {}).items()}
                last = dict(kept.get("last", {}))
                # a file of version 0.2 does not say which results were sent: all of those in the folder
                sent = kept.get("results", dict.fromkeys(last, figures))
                results = {name: dict(values) for name, values in sent.items()}
                self._identity, self._last, self._events, self._results = str(kept["id"]), last, events, results
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                # Trackers are a copy of the run folder, and must not end the run.
                self._warn(f"{state} is damaged ({error}); the trackers get this run again, as {self._identity}")
            self._earlier = dict(self._last)
        rows: list[tuple[int, int, StepMetrics | Mapping[str, Any]]] = [(row.step, 0, row) for row in recorded.metrics]
        for event in recorded.events:
            step = int(event.get("step", 0))
            self._logged[step] += 1
            rows.append((step, self._logged[step], event))
        rows.sort(key=lambda row: row[:2])  # an event comes after the figures of its step
        self._step = rows[-1][0] if rows else 0
        # before the trackers open, so that a kill from here on does not make a second run in them
        self._save()
        run = TrackedRun(recorded=recorded, project=self._project, identity=self._identity)
        for name in [*self._trackers]:
            self._call(name, "open", run)
            for step, number, row in rows:
                if isinstance(row, StepMetrics):
                    self._send(name, row)
                else:
                    self._send_event(name, step, number, row)
            self._send_results(name, figures)
        self._save()
        return True

    def _save(self) -> None:
        state = {"id": self._identity, "last": self._last, "events": self._events, "results": self._results}
        write_atomically(self._folder / STATE_FILE, json.dumps(state))

    def _send(self, name: str, metrics: StepMetrics) -> None:
        """Send a step's metrics, unless an earlier process sent that step."""
        if metrics.step <= self._earlier.get(name, -1):
            return
        numbers = {key: float(v) for key, v in metrics.values.items() if isinstance(v, (int, float))}
        self._call(name, "step", metrics.step, {key: v for key, v in numbers.items() if math.isfinite(v)})
        if name in self._trackers:
            self._last[name] = metrics.step

    def _send_event(self, name: str, step: int, number: int, event: Mapping[str, Any]) -> None:
        """Send the event with this number among the events of its step, unless it was sent."""
        if number <= self._events.get(name, {}).get(str(step), 0):
            return
        kind = str(event.get("kind", "event"))
        kind = str(event.get("rule", kind)) if kind == "health" else kind
        self._call(name, "event", step, kind, str(event.get("message", "")))
        if name in self._trackers:
            self._events.setdefault(name, {})[str(step)] = number

    def _send_results(self, name: str, figures: Mapping[str, float]) -> None:
        """Send the results that differ from those sent: a longer run is tested again."""
        sent = self._results.get(name, {})
        for area, step in (("test_before/", 0), ("test_after/", self._step)):
            values = {key: value for key, value in figures.items() if key.startswith(area) and sent.get(key) != value}
            if values:
                self._call(name, "results", step, values)
            if values and name in self._trackers:
                self._results.setdefault(name, {}).update(values)

    def _call(self, name: str, method: str, *arguments: Any) -> None:
        """Call a method of a tracker, unless it was dropped. Drop a tracker that raises an error, with a warning."""
        try:
            if name in self._trackers:
                getattr(self._trackers[name], method)(*arguments)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code with network and disk; the run continues
            del self._trackers[name]
            self._warn(
                f"tracker {name} ended ({without_secrets(f'{type(error).__name__}: {error}')}); "
                "training and metrics.jsonl continue, and a resumed run brings the tracker up to date"
            )

    def _warn(self, message: str) -> None:
        self._logged[self._step] += 1
        warning: dict[str, object] = {"kind": "warning", "step": self._step, "message": message}
        with (self._folder / "events.jsonl").open("a", encoding="utf-8") as file:
            row = {"time": datetime.now(tz=UTC).isoformat(timespec="seconds"), **warning}
            file.write(json.dumps(row) + "\n")
        self._report(warning)


# Built-in trackers.


class TensorBoardTracker:
    """Event files in ``<run>/tensorboard``. Each event is flushed at once, so that it survives a kill."""

    def __init__(self) -> None:
        # generated modules create their classes on import, invisible to type checkers
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

    results = step

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
    """One W&B run per run folder, online or offline in ``<run>/wandb`` for a later ``wandb sync``.

    Offline, each process writes its own file with the same run id. Sync all of them.
    """

    def __init__(self) -> None:
        """Import W&B and check the login.

        Raises:
            ValueError: no API key.
        """
        self._wandb: Any = importlib.import_module("wandb")
        self._run: Any = None
        self._texts: dict[tuple[int, str], str] = {}  # of events so far, by step and kind
        with _service_of_this_process():
            if self._wandb.setup().settings.mode in ("offline", "dryrun", "disabled"):
                return
            known, reason = False, ""
            try:
                # In a terminal, W&B asks for the key. An invalid key fails when the run opens.
                known = self._wandb.login(verify=False)
            except self._wandb.errors.UsageError as error:
                reason = f" ({error})"
        if not known:
            raise ValueError(
                f"logging.trackers names wandb, and W&B has no API key{reason}: run `wandb login` or set "
                "WANDB_API_KEY, or set WANDB_MODE=offline to keep the run on disk"
            )

    def open(self, run: TrackedRun) -> None:
        settings: dict[str, Any] = {"console": "off", "silent": True}
        if "WANDB_FINISH_TIMEOUT" not in os.environ:
            settings["finish_timeout"] = _FINISH_SECONDS  # a dead network must not block the report forever
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
        # W&B drops a step before its newest one, which a resume's event has, and keeps the last value of a step.
        step = max(step, self._run.step)
        earlier = self._texts.get((step, kind))
        self._texts[step, kind] = message if earlier is None else f"{earlier}\n{message}"
        self._run.log({f"events/{kind}": self._texts[step, kind]}, step=step)

    def results(self, step: int, values: Mapping[str, float]) -> None:
        self._run.summary.update(dict(values))

    def close(self, status: str) -> None:
        if self._run is not None:
            self._run.finish(exit_code=_EXIT_CODES[status])
            self._run = None


@contextmanager
def _service_of_this_process() -> Generator[None]:
    """Remove the address of W&B's service from the environment at the end.

    W&B sets it for its child processes. A run that this process starts later would share the service, which survives a
    kill of that run and then refuses to resume it ("run ID is in use").
    """
    given = os.environ.get(_SERVICE)
    try:
        yield
    finally:
        if given is None:
            os.environ.pop(_SERVICE, None)


class TrackioTracker:
    """A local database (TRACKIO_DIR, default ``~/.cache/huggingface/trackio``), shown by ``trackio show``.

    One trackio run per run folder, continued by resumes. Nothing leaves the machine unless TRACKIO_SPACE_ID or
    TRACKIO_SERVER_URL is set.
    """

    def __init__(self) -> None:
        self._trackio: Any = importlib.import_module("trackio")
        self._run: Any = None

    def open(self, run: TrackedRun) -> None:
        with contextlib.redirect_stdout(io.StringIO()):  # the terminal belongs to the display of the run
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

    results = step

    def close(self, status: str) -> None:
        if self._run is not None:
            with contextlib.redirect_stdout(io.StringIO()):  # the terminal belongs to the display of the run
                self._trackio.finish()  # not `self._run.finish`: trackio would finish it again at exit and print
            self._run = None


_MLFLOW_STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
_MLFLOW_RUN = "magicrl.run"
_MLFLOW_PARAMETERS = 100
"""Most parameters that MLflow takes in one request. The figures of a step are far below its limit of 1,000 metrics."""


class MlflowTracker:
    """A run on an MLflow server (MLFLOW_TRACKING_URI), found again by its tag ``magicrl.run``.

    Settings become parameters, steps and test results metrics, and events tags ``events/KIND/STEP``.
    """

    def __init__(self) -> None:
        """Import MLflow and check that a server is named.

        Raises:
            ValueError: MLFLOW_TRACKING_URI is not set.
        """
        self._entities: Any = importlib.import_module("mlflow.entities")
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            # without it MLflow would write a database into the current folder, where nobody looks for it
            raise ValueError(
                "logging.trackers names mlflow, and MLFLOW_TRACKING_URI is not set: set it to the address of your "
                "MLflow server"
            )
        self._client: Any = importlib.import_module("mlflow").MlflowClient()
        self._run = ""

    def open(self, run: TrackedRun) -> None:
        project = self._client.get_experiment_by_name(run.project)
        group = project.experiment_id if project else self._client.create_experiment(run.project)
        known = self._client.search_runs([group], f"tags.`{_MLFLOW_RUN}` = '{run.identity}'", max_results=1)
        if known:
            self._run = known[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return
        tags = {_MLFLOW_RUN: run.identity}
        self._run = self._client.create_run(group, run_name=run.title, tags=tags).info.run_id
        settings = [self._entities.Param(key, str(value)) for key, value in leaves(run.facts).items()]
        for start in range(0, len(settings), _MLFLOW_PARAMETERS):
            self._client.log_batch(self._run, params=settings[start : start + _MLFLOW_PARAMETERS])

    def step(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._entities.Metric(key, value, now, step) for key, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def event(self, step: int, kind: str, message: str) -> None:
        tag = f"events/{kind}/{step:06d}"
        earlier = self._client.get_run(self._run).data.tags.get(tag)
        self._client.set_tag(self._run, tag, message if earlier is None else f"{earlier}\n{message}")

    results = step

    def close(self, status: str) -> None:
        if self._run:
            self._client.set_terminated(self._run, _MLFLOW_STATUS[status])
            self._run = ""
