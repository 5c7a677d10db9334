"""``magicrl train`` and ``magicrl.train``: train a recipe, with a live display, a summary and a report.

``magicrl sft`` makes an initial model.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from magicrl.commands.given import in_python, overrides_of
from magicrl.commands.init import init, written_by_init
from magicrl.commands.options import Overrides, as_command
from magicrl.commands.plan import planned
from magicrl.commands.run_folder import Run, load_run
from magicrl.commands.training import Progress, observed, prepared, session_of, threads_kept
from magicrl.config.errors import RecipeError
from magicrl.config.given import Data, PathText, Recipe, Reward, Settings, given_recipe
from magicrl.config.loader import load_sft_recipe, load_train_recipe, placed_errors
from magicrl.config.overrides import Overrides as GivenOverrides
from magicrl.config.paths import MODELS, is_unchanged
from magicrl.config.schema import TrainConfig
from magicrl.reporting.display import LiveDisplay
from magicrl.reporting.run_page import write_run_page
from magicrl.reporting.scores import summary
from magicrl.reporting.wording import print_prose
from magicrl.training.diagnosis import NOTHING_LEARNED
from magicrl_verifiers.progress import duration, plural


@in_python()
def train(
    recipe: Recipe | None = None,
    *,
    settings: Settings | None = None,
    model: PathText | None = None,
    data: Data | None = None,
    reward: Reward | None = None,
    output: PathText | None = None,
    resume: bool = False,
    progress: Progress = True,
) -> Run:
    """Train with MAGIC: optional SFT, evaluation, reinforcement learning in stages, evaluation, report.

    Args:
        recipe: The training recipe: a shipped name, a file, or in Python a dict; default: what init proposes
            for ``model``, ``data`` and ``reward``.
        settings: A setting to override, ``--set optimizer.learning_rate=1e-5`` (repeatable); in Python a dict of dotted
            keys, ``{"optimizer.learning_rate": 1e-5}``.
        model: The start model's folder or hub name, in place of the recipe's start.
        data: Training problems in place of the recipe's; 100 of them are held out as the test (``data.holdout``). A
            file, a folder or a hub name; in Python also records, problems, a data frame, or a function that returns
            records.
        reward: Verifier or reward of every set of problems: ``exact``, ``maths``, ``code`` or ``file.py:function``; in
            Python also a function ``(problem, response) -> score``, called in this process, or several.
        output: The run folder; default: ``run.output`` of the recipe, else ``runs/<run.name>``.
        resume: Continue the run in the output folder from its last checkpoint (from the start if there is none); with
            live data or a live reward, with the same.
        progress: True for the usual display, False for none, or a `RunObserver`.

    Raises:
        ValueError: An argument, a setting, a file or the data cannot be used. Nothing was computed.
        RuntimeError: training cannot continue (``TrainingStopped``).
        FloatingPointError: a loss or a gradient was not finite.
        KeyboardInterrupt: Stopped by the user; the step in progress is kept, and ``resume=True`` continues.
    """
    if recipe is None:
        if model is None or data is None:
            raise RecipeError("train needs a recipe, or a model and data to write one for (magicrl recipes lists them)")
        recipe = inspect.unwrap(init)(model, data, reward=reward, progress=progress is True)
        model = data = reward = None  # they are in the recipe
    assert recipe is not None
    given, overrides = given_recipe(recipe), overrides_of(settings, model=model, data=data, reward=reward)
    made = prepared(given, overrides, output, resume=resume)
    if progress is True:
        minutes = minutes_needed(made.config, given, overrides)
        print_prose(Console(emoji=False), f"{made.config.run.name}: {minutes}results go to {made.folder}")
    from magicrl.training.session import StopRequest

    with (
        threads_kept(),
        StopRequest().watching() as stop,
        session_of(made, observed(made.config, progress), stop) as session,
    ):
        session.run()
    write_run_page(made.folder)
    return load_run(made.folder)


def _present(work: functools.partial[Run], *, dry_run: bool = False) -> int:
    """Print the results.

    Exit status: 0 the model learned, or the evaluation cannot decide; 3 the run finished and the model learned nothing
    (the terminal, the report and run.json give the reason); 1 it stopped; 2 the command line, the recipe, the data or
    the model cannot be used.

    Example: magicrl train quickstart --set run.seed=1 --output runs/seed-1

    Args:
        dry_run: Build everything with random weights of the same architecture and substitute data, and train one step
            per stage on this machine's CPU. Nothing is kept.
    """
    if dry_run:
        from magicrl.commands import dry_run as rehearsal

        given = {name: work.keywords.get(name) for name in ("settings", "model", "data", "reward")}
        if not work.args:
            raise RecipeError("--dry-run needs a recipe; magicrl init writes one")
        return rehearsal.dry_run(given_recipe(work.args[0]), overrides_of(**given))
    run = work()
    console = Console(emoji=False)
    console.print(summary(run.recorded, console.width), crop=False)
    return NOTHING_LEARNED if run.learned is False else 0


command = as_command(train, _present)


def minutes_needed(config: TrainConfig, recipe: Path | Mapping[str, Any], overrides: GivenOverrides) -> str:
    """Return ``about 50 minutes on two CPU cores; ``: measured for a shipped recipe or one of `init`, else planned.

    Empty if the planner does not know the model, or with an accelerator. From the first step on, the display shows the
    time left.
    """
    if config.run.expected_minutes and not overrides and written_by_init(recipe):
        return f"about {duration(60 * config.run.expected_minutes)} if the recipe is as init wrote it; "
    # a copy of a shipped recipe may have been changed
    if config.run.expected_minutes and is_unchanged(recipe, overrides):
        return f"about {config.run.expected_minutes:g} minutes on two CPU cores; "
    from magicrl.models.loading import resolve_device
    from magicrl.planning.planner import Options

    if config.cluster is not None or resolve_device(config.run.device).type != "cpu":
        return ""
    try:
        _, plan = planned(recipe, overrides, None, "cpu-2core", Options(gpus=1))
    except ValueError:
        return ""
    steps = sum(stage.max_steps for stage in config.stages)
    # init has measured this machine: only the effect of the overrides is planned
    if written_by_init(recipe) and (minutes := load_train_recipe(recipe, ()).run.expected_minutes):
        _, unchanged = planned(recipe, (), None, "cpu-2core", Options(gpus=1))
        return f"about {duration(60 * minutes * plan.hours / unchanged.hours)} from what init measured; "
    # the planner counts products, which are not what takes the time of a very small model
    time_needed = f"about {duration(plan.hours * 3600)}" if plan.hours >= 1 / 60 else "a minute or less"
    training = f"{time_needed} for " + ("at most " * (steps > 1) + plural(steps, "training step"))
    return f"{training} as planned on two CPU cores, without evaluations; "


def sft(recipe: Path, /, *, set_: Overrides = None, output: Path | None = None) -> int:
    """Make an initial model by supervised fine-tuning on demonstrations of generated tasks.

    Example: magicrl sft quickstart-sft --output runs/models/tiny

    Parameters
    ----------
    recipe
        The supervised recipe (TOML).
    set_
        Override a setting: --set run.seed=1 (repeatable).
    output
        The model folder; default: run.output of the recipe, else runs/models/<run.name>.
    """
    console = Console(emoji=False)
    config = load_sft_recipe(recipe, set_ or [])
    folder = output or Path(config.run.output or MODELS / config.run.name)
    from magicrl.training.sft import run_sft
    from magicrl.training.start_checks import check_sft

    with placed_errors(recipe, set_ or []):
        check_sft(config, folder)
    started = time.perf_counter()
    with placed_errors(recipe, set_ or []), LiveDisplay(console=console, title=config.run.name) as display:
        run_sft(config, folder, on_step=functools.partial(display.progress, "supervised start"))
    console.print(f"model: {folder} ({time.perf_counter() - started:.0f} s)")
    return 0
