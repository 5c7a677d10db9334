"""Minutes with a run before it is paid for, as JSON values: ``magicrl.preflight`` and ``magicrl preflight``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magicrl.api.given import Data, Recipe, RewardFunction, Settings, given_recipe, in_python, overrides_of
from magicrl.api.training import threads_kept
from magicrl.config.errors import RecipeError
from magicrl.config.loader import load_train_recipe, placed_errors
from magicrl.config.overrides import Overrides

if TYPE_CHECKING:
    from os import PathLike

    from magicrl.training.preflight import Facts


def preflight(
    recipe: Recipe,
    *,
    settings: Settings | None = None,
    model: str | PathLike[str] | None = None,
    data: Data | None = None,
    reward: str | RewardFunction | None = None,
    minutes: float = 5.0,
    samples: int = 256,
) -> dict[str, Any]:
    """Look at a run on its own model, reward and data before it is made: can it learn, and if not, why.

    Args:
        recipe: a shipped recipe's name, a file, or the same tree as a dict.
        settings: dotted keys to values, over the recipe's.
        model: as in `train`.
        data: as in `train`.
        reward: as in `train`.
        minutes: that may be spent, about; a supervised start that is not there yet is made besides.
        samples: most responses of the first measurement.

    Returns:
        What ``magicrl preflight --json`` prints: ``sound``, ``findings`` (name, severity, message, remedy) and the
        figures that they rest on.

    Raises:
        ValueError: an argument is wrong, or the run would be refused at its start.

    Example::

        found = magicrl.preflight("quickstart", settings={"optimizer.learning_rate": 3e-2})
        print(found["findings"][0]["message"])
    """
    with in_python():
        overrides = overrides_of(settings, model=model, data=data, reward=reward)
        return looked_at(given_recipe(recipe), overrides, minutes=minutes, samples=samples)


def looked_at(
    recipe: Path | Mapping[str, Any],
    overrides: Overrides,
    *,
    minutes: float,
    samples: int,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """The facts and findings of a recipe as JSON values.

    Raises:
        ValueError: an argument is wrong, or the run would be refused at its start.
    """
    if not minutes > 0:
        raise RecipeError(f"minutes must be above 0, got {minutes:g}")
    if samples < 1:
        raise RecipeError(f"samples must be at least 1, got {samples}")
    config = load_train_recipe(recipe, overrides)
    if config.rollout.replay is not None or config.rollout.engine == "replay":
        raise RecipeError("recorded rollouts tell nothing of the start model; name another", key="rollout.engine")
    # torch takes seconds to import: not before the recipe is known to be right
    from magicrl.training.assemble import LocalParts, build, set_threads, start_model_folder
    from magicrl.training.preflight import Budget, measure
    from magicrl.training.start_checks import check_run

    # whatever is on other machines is tried on this one
    config = config.model_copy(update={"cluster": None})
    run = Path(config.run.output or f"runs/{config.run.name}")
    with placed_errors(recipe, overrides), threads_kept():
        # beside the run, which may be there already: a supervised start is where the run itself will look for it
        ready = check_run(config, run.with_name(f".{run.name}-preflight"), resume=False)
        set_threads(config)
        with contextlib.closing(LocalParts(config).judge()) as judge:
            judge.warm_up(ready.data.verifiers())
            start = start_model_folder(config.start, run.parent / "models", lambda what, done, of: None)
            built = build(config, ready, start)
            with contextlib.closing(built.engine):
                facts = measure(config, built, judge, Budget(60 * minutes, samples), tell)
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
