"""Runs from Python: `start` makes a run one step at a time. `prepared` and `watched` serve every run."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console

from magicrl.commands.given import (
    Data,
    PathText,
    Recipe,
    Reward,
    Settings,
    given_recipe,
    in_python,
    overrides_of,
    path_text,
    refuse_live_elsewhere,
)
from magicrl.commands.run_folder import Run, evaluation_rows, load_run
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

Progress = bool | RunObserver
"""True: told as the command tells it (a panel in a terminal, lines in a notebook or a file); False: nothing; or your
own `RunObserver`."""


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
    """Build a run and test its start model, for a loop of one's own; the arguments are those of `train`.

    With every step made and then `Training.finish`, the run is the one that `train` makes, bit for bit.

    Example::

        with magicrl.start("quickstart") as run:
            for step in run:
                print(step.number, step.metrics["train/accuracy/mean"])
            finished = run.finish()

    Raises:
        ValueError: as `train`.
    """
    overrides = overrides_of(settings, model=model, data=data, reward=reward)
    made = prepared(given_recipe(recipe), overrides, output_folder(output), resume=resume)
    return Training(made, observed(made.config, progress))


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One training step."""

    number: int
    """From 1."""
    stage: int
    """From 0."""
    metrics: Mapping[str, float | int | str | None]
    """Its line of ``metrics.jsonl``: ``train/accuracy/mean``, ``learner/loss``, ..."""
    groups: tuple[ScoredGroup, ...]
    """Every group that was sampled, rejected ones too: problem, responses, verdicts, rewards."""


class Training:
    """A run that is made a step at a time; `start` gives it. It holds models and workers until it is closed.

    A context manager: what leaves the block as an error is noted in ``run.json``, as for any run. Iterating makes the
    steps that are left. ``path`` is the run folder.
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
        """Training steps so far."""
        return self._open().steps_done

    @property
    def done(self) -> bool:
        """Every stage has ended: there is no further step."""
        return self._open().stage is None

    def step(self) -> Step:
        """Make the next training step.

        Raises:
            ValueError: every stage has ended (`done`), or the run is closed.
            RuntimeError, FloatingPointError, KeyboardInterrupt: as `train`.
        """
        with self._working() as session:
            found = session.step()
        if found is None:
            raise ValueError(f"every stage of {self.path} has ended; finish() tests and writes the model")
        metrics, groups = found
        return Step(number=metrics.step, stage=metrics.stage, metrics=metrics.values, groups=groups)

    def __iter__(self) -> Iterator[Step]:
        while not self.done:
            yield self.step()

    def evaluate(self) -> pd.DataFrame:
        """Test the present weights on the recipe's test sets; the training is not disturbed.

        Returns:
            A row a set and temperature, as `Run.evaluations` has them; also in the run folder.
        """
        with self._working() as session:
            name = f"step-{session.steps_done:06d}"
            session.examine(name, start=False)
        return evaluation_rows(e for e in load_run(self.path).recorded.evaluations if e.name == name)

    def save(self) -> Path:
        """Write a checkpoint of the whole state; returns its folder."""
        with self._working() as session:
            return session.save()

    def finish(self) -> Run:
        """Test the trained weights, write model, verdict and report, close; also before every stage has ended."""
        with self._working() as session:
            if session.stage is not None:
                session.save()
            session.end()
        self._finished = True
        self.close()
        return load_run(self.path)

    def close(self) -> None:
        """End the workers. A run that is not finished stands as stopped, to be resumed from its last checkpoint."""
        self._leave(None if self._finished else Closed("closed before the run's end"))
        if self._finished:
            write_run_page(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        if error is None:
            self.close()
        else:
            self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        """End the run's context, with the error that ends it."""
        if self._session is None:
            return
        self._session = None
        if error is None:
            self._held.__exit__(None, None, None)
            return
        with contextlib.suppress(type(error)):  # whoever raised it goes on raising it
            self._held.__exit__(type(error), error, error.__traceback__)

    def _open(self) -> Session:
        if self._session is None:
            raise ValueError(f"the run in {self.path} is closed; magicrl.start(..., resume=True) goes on with it")
        return self._session

    @contextmanager
    def _working(self) -> Generator[Session]:
        """The session with this run's own threads and signals, for the length of a call: other runs have theirs."""
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
    """A run was closed before its end: for `run.json`, which is to say so; nobody sees it raised."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A run that was looked at and may begin: nothing has been written yet."""

    recipe: Path | Mapping[str, Any]
    overrides: Overrides
    config: TrainConfig
    folder: Path
    resume: bool
    ready: Ready
    trackers: Mapping[str, Tracker]
    parts: AbstractContextManager[LocalParts | None]


def prepared(recipe: Path | Mapping[str, Any], overrides: Overrides, output: Path | None, *, resume: bool) -> Prepared:
    """Load the recipe and check everything.

    Raises:
        ValueError: whatever a run can be refused for.
    """
    config = load_train_recipe(recipe, overrides)
    folder = output or Path(config.run.output or f"runs/{config.run.name}")
    trackers = make_trackers(config.logging.trackers)
    # torch takes seconds to import: not before the recipe is known to be right
    from magicrl.training.start_checks import check_run

    with placed_errors(recipe, overrides):
        refuse_live_elsewhere(config)
        parts = parts_of(config, folder)
        ready = check_run(config, folder, resume=resume)
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


def run_to_end(made: Prepared, observer: AbstractContextManager[RunObserver]) -> Path:
    """Make the run; one that stops leaves its report so far. Returns the report's page.

    Raises:
        RecipeError: with its place, where only building found what is wrong.
        RuntimeError, FloatingPointError, KeyboardInterrupt: as `train`.
    """
    from magicrl.training.session import StopRequest

    with StopRequest().watching() as stop, session_of(made, observer, stop) as session:
        session.run()
    return write_run_page(made.folder)


@contextmanager
def session_of(made: Prepared, observer: AbstractContextManager[RunObserver], stop: StopRequest) -> Generator[Session]:
    """The run's session with everything around it: parts elsewhere, observers, trackers, places of errors."""
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
    """Who is told of the run: its observer and its trackers; where it stops, its report so far is written."""
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
            with contextlib.suppress(ValueError):  # a full disk: why the run stopped is what matters
                page = write_run_page(made.folder)
                shown.event({"kind": "report so far", "message": str(page)})
        raise


def display_of(config: TrainConfig, console: Console | None = None) -> LiveDisplay:
    """The live display of a run of this recipe."""
    steps = [stage.max_steps for stage in config.stages]
    return LiveDisplay(console=console, title=config.run.name, max_steps=sum(steps), stage_steps=steps)


def parts_of(config: TrainConfig, output: Path | None = None) -> AbstractContextManager[LocalParts | None]:
    """What makes the parts that live elsewhere: None for a recipe without ``[cluster]``.

    ``output`` is the run's folder, where their workers' output is kept.
    """
    if config.cluster is None:
        return nullcontext()
    from magicrl.distributed.runtime import require_ray

    require_ray()
    from magicrl.distributed.cluster_parts import cluster_parts

    return cluster_parts(config, output)


def observed(config: TrainConfig, progress: Progress) -> AbstractContextManager[RunObserver]:
    if isinstance(progress, bool):
        return display_of(config) if progress else nullcontext(NullObserver())
    if isinstance(progress, RunObserver):
        return nullcontext(progress)
    raise ValueError(
        "progress must be True, False or an object with the methods step, event and progress "
        f"(magicrl.training.recorder.RunObserver), got {progress!r:.60} ({type(progress).__name__})"
    )


def output_folder(output: PathText | None) -> Path | None:
    return None if output is None else Path(path_text("output", output))


@contextmanager
def threads_kept() -> Generator[None]:
    """torch's threads are the process's: a run sets its own, and the caller's are there again after it."""
    import torch

    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
