"""``magicrl preflight`` and ``magicrl.preflight``: check a run before compute is spent on it."""

from __future__ import annotations

import contextlib
import functools
import json as json_text
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from magicrl.commands.given import Data, PathText, Recipe, Reward, Settings, given_recipe, in_python, overrides_of
from magicrl.commands.options import as_command
from magicrl.commands.tables import progress_lines
from magicrl.config.errors import RecipeError

if TYPE_CHECKING:
    from magicrl.training.preflight import Facts

UNSOUND = 3
"""Exit status if something would keep the run from learning; ``magicrl train`` has the same for such a run."""


@in_python()
def preflight(
    recipe: Recipe,
    *,
    settings: Settings | None = None,
    model: PathText | None = None,
    data: Data | None = None,
    reward: Reward | None = None,
    minutes: float = 5.0,
    samples: int = 256,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Check a run before you spend compute on it: signal, reward, chat template, learning rate, time and memory.

    Samples from the initial model, calls the reward and makes two training steps on a copy in memory. No run folder is
    created.

    Args:
        recipe: The training recipe: a shipped name, a file, or in Python a dict.
        settings: A setting to override, ``KEY=VALUE`` (repeatable); in Python a dict of dotted keys.
        model: As in train.
        data: As in train.
        reward: As in train.
        minutes: Approximate time budget. SFT of an initial model that does not exist yet comes in addition; the model
            is kept.
        samples: Largest number of responses in the first measurement.
        progress: Called with a line of text at each measurement; default: not at all.

    Returns:
        ``sound``, ``findings`` (name, severity, message, remedy) and the figures behind them, as JSON values.

    Raises:
        ValueError: an argument is wrong, or the run would be refused at its start.

    Example::

        found = magicrl.preflight("quickstart", settings={"optimizer.learning_rate": 3e-2})
        print(found["findings"][0]["message"])
    """
    if not minutes > 0:
        raise RecipeError(f"minutes must be above 0, got {minutes:g}")
    if samples < 1:
        raise RecipeError(f"samples must be at least 1, got {samples}")
    from magicrl.config.loader import load_train_recipe, placed_errors

    given, overrides = given_recipe(recipe), overrides_of(settings, model=model, data=data, reward=reward)
    config = load_train_recipe(given, overrides)
    if config.rollout.replay is not None or config.rollout.engine == "replay":
        raise RecipeError("recorded rollouts tell nothing of the start model; name another", key="rollout.engine")
    # torch takes seconds to import, so the recipe is read first
    from magicrl.commands.training import threads_kept
    from magicrl.training.assemble import LocalParts, build_run, set_threads, start_model_folder
    from magicrl.training.preflight import Budget, measure
    from magicrl.training.start_checks import check_run

    # the parts on other machines are measured on this machine
    config = config.model_copy(update={"cluster": None})
    run = Path(config.run.output or f"runs/{config.run.name}")
    with placed_errors(given, overrides), threads_kept():
        # next to the run, which may exist: the SFT model is stored where the run itself looks for it
        ready = check_run(config, run.with_name(f".{run.name}-preflight"), resume=False)
        set_threads(config)
        with contextlib.closing(LocalParts(config).judge()) as judge:
            judge.warm_up(ready.data.verifiers())
            start = start_model_folder(config.start, run.parent / "models", lambda what, done, of: None)
            built = build_run(config, ready, start)
            with contextlib.closing(built.engine):
                facts = measure(config, built, judge, Budget(60 * minutes, samples), progress or (lambda _: None))
    return _document(config.run.name, facts)


def _document(name: str, facts: Facts) -> dict[str, Any]:
    from magicrl.training.preflight_rules import preflight_findings

    found = preflight_findings(facts)
    values = asdict(facts)
    values["learnable"]["answers"].pop("judging")
    return {
        "recipe": name,
        "sound": all(item.severity != "stop" for item in found),
        "findings": [item.as_dict() for item in found],
        **values,
    }


def _present(work: functools.partial[dict[str, Any]], *, json: bool = False, page: Path | None = None) -> int:
    """Print the findings.

    Exit status: 0 sound; 3 something would keep the run from learning (with the setting that fixes it); 1 the run would
    be refused; 2 the command line or the recipe is wrong.

    Example: magicrl preflight quickstart --set optimizer.learning_rate=3e-2

    Args:
        json: Print the figures and findings as a JSON object.
        page: Also write a page to this file: one HTML file that needs no server.
    """
    notes = Console(emoji=False, stderr=True, highlight=False)
    found = work(progress=progress_lines(notes))
    from magicrl.reporting.command_pages import preflight_figures, preflight_verdict, write_preflight_page
    from magicrl.reporting.wording import visible

    if json:
        sys.stdout.write(json_text.dumps(found, indent=1) + "\n")
    else:
        console = Console(emoji=False, highlight=False, soft_wrap=True)
        table = Table(show_header=False, box=None, pad_edge=False)
        for label, value in preflight_figures(found):
            table.add_row(label, visible(value))
        console.print(table, markup=False, soft_wrap=True)
        for finding in found["findings"]:
            console.print(f"{finding['severity']}: {finding['name'].replace('_', ' ')}", style="bold", markup=False)
            console.print(f"  {visible(finding['message'])}\n  {visible(finding['remedy'])}", markup=False)
        console.print(preflight_verdict(found), markup=False)
    if page is not None:
        written = write_preflight_page(found, page, "magicrl " + shlex.join(sys.argv[1:]))
        notes.print(f"page: {written}", markup=False, soft_wrap=True)
    return 0 if found["sound"] else UNSOUND


command = as_command(preflight, _present)
