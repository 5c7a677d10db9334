"""``magicrl train`` and ``magicrl sft``: recipes to runs, with a live display, a summary and the report."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from magicrl.cli.live import LiveDisplay
from magicrl.config.loader import load_sft_recipe, load_train_recipe, placed_errors
from magicrl.config.paths import MODELS, is_unchanged
from magicrl.config.schema import TrainConfig
from magicrl.reporting.report import write_report
from magicrl.reporting.run_folder import read_run
from magicrl.reporting.summary import summary
from magicrl.reporting.trackers.mirror import TrackerMirror, make_trackers
from magicrl.reporting.wording import duration
from magicrl.training.conclusion import NOTHING_LEARNED
from magicrl.training.observer import Observers

if TYPE_CHECKING:
    from magicrl.reporting.trackers.base import Tracker
    from magicrl.training.assemble import PartsMaker
    from magicrl.training.preflight import Ready


def run_training(recipe: Path, overrides: Sequence[str], output: Path | None, *, resume: bool) -> int:
    """Load the recipe, check everything, say how long it takes, train, report. Returns the exit status."""
    console = Console()
    config = load_train_recipe(recipe, overrides)
    folder = output or Path(config.run.output or f"runs/{config.run.name}")
    trackers = make_trackers(config.logging.trackers)
    # torch takes seconds to import: not before the recipe is known to be right
    from magicrl.training.preflight import check_run

    with placed_errors(recipe, overrides):
        made_elsewhere = parts_of(config)
        ready = check_run(config, folder, resume=resume)
        with made_elsewhere as parts:
            needed = minutes_needed(config, recipe, overrides)
            console.print(f"{config.run.name}: {needed}everything is kept in {folder}", highlight=False)
            _train(config, folder, ready, parts, trackers, console, resume=resume)
    page = write_report(folder)
    run = read_run(folder)
    console.print(summary(run))
    console.print(f"report: {page}")
    return NOTHING_LEARNED if run.learning is not None and run.learning.failed else 0


def _train(
    config: TrainConfig,
    folder: Path,
    ready: Ready,
    parts: PartsMaker | None,
    trackers: Sequence[Tracker],
    console: Console,
    *,
    resume: bool,
) -> None:
    """The run under its display, mirrored to its trackers; one that stops leaves its report."""
    from magicrl.training.loop import TrainingStopped
    from magicrl.training.session import train

    steps = [stage.max_steps for stage in config.stages]
    try:
        with (
            LiveDisplay(console=console, title=config.run.name, max_steps=sum(steps), stage_steps=steps) as display,
            TrackerMirror(folder, trackers, project=config.logging.project, report=display.event) as mirror,
        ):
            train(config, folder, Observers(display, mirror), resume=resume, parts=parts, ready=ready)
    except (KeyboardInterrupt, TrainingStopped, FloatingPointError):
        if (folder / "metrics.jsonl").exists():
            with contextlib.suppress(ValueError):  # a full disk: why the run stopped is what matters
                console.print(f"report so far: {write_report(folder)}")
        raise


def minutes_needed(config: TrainConfig, recipe: Path, overrides: Sequence[str]) -> str:
    """``about 50 minutes on two CPU cores; ``: measured for a shipped recipe, else planned for this model and recipe.

    Empty where the planner does not know the model, or an accelerator does the work; the display tells the time left
    from the first step on.
    """
    if config.run.expected_minutes and is_unchanged(recipe, overrides):
        return f"about {config.run.expected_minutes:g} minutes on two CPU cores; "
    from magicrl.cli.plan import planned
    from magicrl.models.loading import resolve_device
    from magicrl.planning.planner import Options

    if config.cluster is not None or resolve_device(config.run.device).type != "cpu":
        return ""
    try:
        _, plan = planned(recipe, overrides, None, "cpu-2core", Options(gpus=1))
    except ValueError:
        return ""
    steps = sum(stage.max_steps for stage in config.stages)
    training = f"about {duration(plan.hours * 3600)} for at most {steps} training steps"
    return f"{training} as planned on two CPU cores, beside the tests; "


def parts_of(config: TrainConfig) -> AbstractContextManager[PartsMaker | None]:
    """What makes the parts that live elsewhere: None for a recipe without ``[cluster]``."""
    if config.cluster is None:
        return nullcontext()
    from magicrl.distributed.runtime import require_ray

    require_ray()
    from magicrl.distributed.cluster_parts import cluster_parts

    return cluster_parts(config)


def run_supervised(recipe: Path, overrides: Sequence[str], output: Path | None) -> int:
    """Load the supervised recipe, train, say where the model is. Returns the exit status."""
    console = Console()
    config = load_sft_recipe(recipe, overrides)
    folder = output or Path(config.run.output or MODELS / config.run.name)
    from magicrl.training.preflight import check_sft
    from magicrl.training.sft import SftProgress, run_sft

    with placed_errors(recipe, overrides):
        check_sft(config, folder)
    started = time.perf_counter()
    with placed_errors(recipe, overrides), LiveDisplay(console=console, title=config.run.name) as display:

        def show(info: SftProgress) -> None:
            display.progress("supervised start", info.step, info.total)

        result = run_sft(config, folder, on_step=show)
    console.print(f"model: {result.folder} ({time.perf_counter() - started:.0f} s)")
    return 0
