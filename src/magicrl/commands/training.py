"""Runs in Python: `start` trains one step at a time. Every run begins with `prepared`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magicrl.commands.given import in_python, overrides_of, refuse_live_elsewhere
from magicrl.commands.run_folder import Run, evaluation_rows, load_run
from magicrl.config.given import Data, PathText, Recipe, Reward, Settings, given_recipe, path_text
from magicrl.config.loader import load_train_recipe, placed_errors
from magicrl.config.overrides import Overrides
from magicrl.config.schema import TrainConfig
from magicrl.records import ScoredGroup
from magicrl.reporting.display import LiveDisplay
from magicrl.reporting.run_page import write_run_page
from magicrl.reporting.trackers import TrackerMirror, make_trackers
from magicrl.training.recorder import NullObserver, Observers, RunObserver

if TYPE_CHECKING:
    import pandas as pd

    from magicrl.reporting.trackers import Tracker
    from magicrl.training.assemble import LocalParts
    from magicrl.training.session import Session, StopRequest
    from magicrl.training.start_checks import Ready

_log = logging.getLogger(__name__)

Progress = bool | RunObserver
"""``True`` for the display of the command (a panel in a terminal, lines in a notebook or a file), ``False`` for none,
or a custom `RunObserver`."""


@in_python()
def start(
    recipe: Recipe,
    *,
    settings: Settings | None = None,
    model: PathText | None = None,
    data: Data | None = None,
    reward: Reward | None = None,
    output: PathText | None = None,
    resume: bool = False,
    progress: Progress = False,
) -> Training:
    """Build a run and evaluate its initial model, for a custom training loop. The arguments are those of `train`.

    All steps and then `Training.finish` give the same run as `train`, bit for bit.

    Example::

        with magicrl.start("quickstart") as run:
            for step in run:
                print(step.number, step.metrics["train/accuracy/mean"])
            finished = run.finish()

    Raises:
        ValueError: As for `train`.
    """
    overrides = overrides_of(settings, model=model, data=data, reward=reward)
    made = prepared(given_recipe(recipe), overrides, output, resume=resume)
    made = replace(made, folder=made.folder.absolute())  # the working directory may change between steps
    return Training(made, observed(made.config, progress))


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One training step."""

    number: int
    """Number of the step, from 1."""
    stage: int
    """Number of the stage, from 0."""
    metrics: Mapping[str, float | int | str | None]
    """Metrics as in ``metrics.jsonl``: ``train/accuracy/mean``, ``learner/loss``, ..."""
    groups: tuple[ScoredGroup, ...] = field(repr=False)  # its arrays fill thousands of lines
    """All sampled groups, including rejected ones: problem, responses, verdicts, rewards."""


class Training(AbstractContextManager["Training"]):
    """A run that trains one step at a time, returned by `start`. It keeps models and workers until it is closed.

    As a context manager it records an error that leaves the block in ``run.json``, as every run does. Iteration trains
    the remaining steps. ``path`` is the run folder.
    """

    path: Path

    def __init__(self, made: Prepared, observer: AbstractContextManager[RunObserver]) -> None:
        from magicrl.training.session import StopRequest

        self.path = made.folder
        self._made = made
        self._finished = False
        self._stop = StopRequest()
        self._held = session_of(made, observer, self._stop)
        with threads_kept(), self._stop.watching():
            self._session: Session | None = self._held.__enter__()

    @property
    def steps_done(self) -> int:
        """Number of training steps so far."""
        return self._open().steps_done

    @property
    def done(self) -> bool:
        """Whether every stage has ended, so that there is no further step."""
        return self._open().stage is None

    def step(self) -> Step:
        """Train the next step.

        Raises:
            ValueError: Every stage has ended (`done`), or the run is closed.
            RuntimeError, FloatingPointError, KeyboardInterrupt: As for `train`.
        """
        with self._working() as session:
            found = session.step()
        if found is None:
            raise ValueError(f"every stage of {self.path} has ended; finish() evaluates and writes the model")
        metrics, groups = found
        return Step(number=metrics.step, stage=metrics.stage, metrics=metrics.values, groups=groups)

    def __iter__(self) -> Iterator[Step]:
        while not self.done:
            yield self.step()

    def evaluate(self) -> pd.DataFrame:
        """Evaluate the current weights on the recipe's test sets. This does not change the training.

        Returns:
            A row per set and temperature, as in `Run.evaluations`. They are also in the run folder.
        """
        with self._working() as session:
            name = f"step-{session.steps_done:06d}"
            session.examine(name)
        return evaluation_rows(e for e in load_run(self.path).recorded.evaluations if e.name == name)

    def save(self) -> Path:
        """Write a checkpoint of the whole state and return its folder."""
        with self._working() as session:
            return session.save()

    def finish(self) -> Run:
        """Evaluate the trained weights, write model, verdict and report, and close, also if stages remain."""
        with self._working() as session:
            if session.stage is not None:
                session.save()
            session.end()
        self._finished = True
        self.close()
        return load_run(self.path)

    def close(self) -> None:
        """End the workers. An unfinished run has the status ``stopped`` and can be resumed from its last checkpoint."""
        self._leave(None if self._finished else Closed("closed before the run's end"))
        if self._finished:
            write_run_page(self.path)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        if error is None:
            self.close()
        else:
            self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        """End the run's context with the error that ended the run."""
        if self._session is None:
            return
        self._session = None
        if error is None:
            self._held.__exit__(None, None, None)
            return
        with contextlib.suppress(type(error)):  # the caller raises it
            self._held.__exit__(type(error), error, error.__traceback__)

    def _open(self) -> Session:
        if self._session is None:
            raise ValueError(f"the run in {self.path} is closed; magicrl.start(..., resume=True) continues it")
        return self._session

    @contextmanager
    def _working(self) -> Generator[Session]:
        """Yield the session with this run's threads and signals for one call, since other runs have their own."""
        from magicrl.training.assemble import set_threads

        session = self._open()
        with in_python(), threads_kept(), self._stop.watching():
            set_threads(self._made.config)
            try:
                yield session
            except BaseException as error:
                self._leave(error)
                raise


class Closed(KeyboardInterrupt):
    """The reason in ``run.json`` of a run that was closed before its end. It is never raised to the user."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A checked run that can start. Nothing has been written yet."""

    recipe: Path | Mapping[str, Any]
    overrides: Overrides
    config: TrainConfig
    folder: Path
    resume: bool
    ready: Ready
    trackers: Mapping[str, Tracker]
    parts: AbstractContextManager[LocalParts | None]


def prepared(
    recipe: Path | Mapping[str, Any], overrides: Overrides, output: PathText | None, *, resume: bool
) -> Prepared:
    """Load the recipe and run all checks.

    Raises:
        ValueError: A check failed.
    """
    given = None if output is None else Path(path_text("output", output))
    config = load_train_recipe(recipe, overrides)
    folder = given or Path(config.run.output or f"runs/{config.run.name}")
    trackers = make_trackers(config.logging.trackers)
    # torch takes seconds to import, so the recipe is read first
    from magicrl.training.start_checks import check_run

    with placed_errors(recipe, overrides):
        refuse_live_elsewhere(config)
        parts = parts_of(config, folder)
        ready = check_run(config, folder, resume=resume)
    if (policy := ready[1]) is not None:
        warn_of_toy_recipe(recipe, overrides, sum(p.numel() for p in policy.model.parameters()))
    return Prepared(
        recipe=recipe,
        overrides=overrides,
        config=config,
        folder=folder,
        resume=resume,
        ready=ready,
        trackers=trackers,
        parts=parts,
    )


TOY_RATE = 20.0
"""Ratio of a recipe's learning rate to the one that ``magicrl init`` proposes from which another model is in danger."""


def warn_of_toy_recipe(recipe: Path | Mapping[str, Any], overrides: Overrides, parameters: int) -> None:
    """Log a warning if a recipe for a tiny model was given another model, but not another learning rate.

    Args:
        recipe: the recipe without overrides.
        overrides: its overrides.
        parameters: number of parameters of the model that will be trained.
    """
    from magicrl.commands.plan import start_model
    from magicrl.config.overrides import override_of
    from magicrl.training.recipe_proposal import proposed_learning_rate

    keys = {override_of(one).key for one in overrides}
    if not keys & {"model", "start.model"} or "optimizer.learning_rate" in keys:
        return
    own = load_train_recipe(recipe)
    proposed = proposed_learning_rate(parameters)
    if isinstance(start_model(own), str) or own.optimizer.learning_rate < TOY_RATE * proposed:
        return
    _log.warning(
        "the recipe %s is made for a tiny model: optimizer.learning_rate = %g is %.0f times the %g that magicrl init "
        "proposes for %.3g million parameters, and T = %d may be too short. Write a recipe for your model: "
        "magicrl init --model MODEL --data DATA",
        own.run.name,
        own.optimizer.learning_rate,
        own.optimizer.learning_rate / proposed,
        proposed,
        parameters / 1e6,
        own.stages[0].max_tokens,
    )


@contextmanager
def session_of(made: Prepared, observer: AbstractContextManager[RunObserver], stop: StopRequest) -> Generator[Session]:
    """Yield the run's session, with the parts on other machines, observers, trackers and places of errors."""
    from magicrl.training.session import open_session

    with (
        placed_errors(made.recipe, made.overrides),
        made.parts as parts,
        watched(made, observer) as watcher,
        open_session(
            made.config, made.folder, watcher, ready=made.ready, resume=made.resume, stop=stop, parts=parts
        ) as session,
    ):
        yield session


@contextmanager
def watched(made: Prepared, observer: AbstractContextManager[RunObserver]) -> Generator[RunObserver]:
    """Yield an observer that forwards to the run's observer and trackers. If the run stops, write its report so far."""
    from magicrl.training.protocols import TrainingStopped

    shown: RunObserver = NullObserver()
    try:
        with (
            observer as shown,
            TrackerMirror(
                made.folder, made.trackers, project=made.config.logging.project, report=shown.event
            ) as mirror,
        ):
            yield Observers(shown, mirror)
    except (KeyboardInterrupt, TrainingStopped, FloatingPointError):
        if (made.folder / "metrics.jsonl").exists():
            with contextlib.suppress(ValueError, OSError):  # a full disk must not hide why the run stopped
                page = write_run_page(made.folder)
                shown.event({"kind": "report so far", "message": str(page)})
        raise


def parts_of(config: TrainConfig, output: Path | None = None) -> AbstractContextManager[LocalParts | None]:
    """Return a context manager for the parts on other machines; its value is None for a recipe without ``[cluster]``.

    Args:
        config: The recipe.
        output: The run folder, which keeps the output of the workers.
    """
    if config.cluster is None:
        return nullcontext()
    from magicrl.distributed.runtime import require_ray

    require_ray()
    from magicrl.distributed.cluster_parts import cluster_parts

    return cluster_parts(config, output)


def observed(config: TrainConfig, progress: Progress) -> AbstractContextManager[RunObserver]:
    if progress is False:
        return nullcontext(NullObserver())
    if progress is True:
        steps = [stage.max_steps for stage in config.stages]
        return LiveDisplay(title=config.run.name, max_steps=sum(steps), stage_steps=steps)
    if isinstance(progress, RunObserver) and not isinstance(progress, type):
        return nullcontext(progress)
    raise ValueError(
        "progress must be True, False or an object with the methods step, event and progress "
        f"(magicrl.training.recorder.RunObserver), got {progress!r:.60} ({type(progress).__name__})"
    )


@contextmanager
def threads_kept() -> Generator[None]:
    """Restore torch's number of threads at the end. It belongs to the process, and a run sets its own."""
    import torch

    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
