"""From ablations to runs: every arm and seed as one resolved recipe, keyed by what decides its result.

Two ablations whose arms resolve to the same recipe share its run. Supervised starts are made phase by phase, each from
the model of the phase before, so that starts which begin alike share what they have in common; the first of several
phases has the recipe's own seed, and is made once for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from magicrl.config.loader import decisive, digest, load_sft_recipe, load_train_recipe
from magicrl.config.schema import SftConfig, TrainConfig
from magicrl.experiments.definition import Ablation, Arm, Scale, ScaleDefinition, base_recipe

THREADS = 1
"""Of every run: tensors this small gain nothing from a second thread, and runs are done side by side."""
_UNIMPORTANT: dict[str, Any] = {"run": {"name", "output", "expected_minutes"}}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStart:
    """One phase of a supervised start that runs share.

    Attributes:
        key: of its recipe, seed included, and of what it goes on from.
        recipe: resolved, with this phase alone; its model is replaced by that of ``after``.
        after: the phase before, None for the first.
    """

    key: str
    recipe: SftConfig
    after: PlannedStart | None = None

    def chain(self) -> list[PlannedStart]:
        """All phases up to this one, the first one first."""
        return [*(self.after.chain() if self.after else ()), self]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """One run of one arm.

    Attributes:
        key: a hash of everything that decides the result.
        scale: tiny, small, paper or quick.
        seed: of the start, the prompts and the sampling.
        config: the resolved recipe; its start is replaced by the folder of ``start`` or of the run ``after``.
        start: the supervised start, of the first run where one goes on from another; None where the recipe names a
            model. It is also the reference, where the recipe wants one and names none.
        after: key of the run whose model this one starts from.
        arms: ``(ablation, arm)`` names that this run serves.
        minutes: CPU minutes that it is expected to take.
    """

    key: str
    scale: Scale
    seed: int
    config: TrainConfig
    start: PlannedStart | None
    after: str | None
    arms: tuple[tuple[str, str], ...]
    minutes: float | None = field(default=None, compare=False)


def plan_runs(ablations: Iterable[Ablation], scale: Scale, seeds: Sequence[int] | None = None) -> list[PlannedRun]:
    """The runs of ``ablations``, each once, seed by seed, a run after the one that it goes on from.

    Seed by seed: a study that is stopped has as many whole seeds of every arm as there was time for.

    Args:
        ablations: those that have no such scale are left out.
        scale: which of their definitions.
        seeds: default: 0 to the ablation's number of seeds less one.

    Raises:
        RecipeError: an arm's settings make no recipe.
    """
    found: dict[str, PlannedRun] = {}
    for ablation in ablations:
        definition = ablation.scales.get(scale)
        if definition is None:
            continue
        for seed in range(definition.seeds) if seeds is None else seeds:
            for run in _runs_of_seed(ablation, scale, definition, seed):
                known = found.get(run.key)
                found[run.key] = run if known is None else replace(known, arms=(*known.arms, *run.arms))
    order = {seed: place for place, seed in enumerate(seeds)} if seeds is not None else {}
    return sorted(found.values(), key=lambda run: order.get(run.seed, run.seed))


def _runs_of_seed(ablation: Ablation, scale: Scale, definition: ScaleDefinition, seed: int) -> list[PlannedRun]:
    runs: dict[str, PlannedRun] = {}
    for arm in definition.arms:
        after = None if arm.after is None else runs[arm.after].key
        runs[arm.name] = _resolved(ablation, scale, definition, arm, seed, after)
    return list(runs.values())


def _resolved(
    ablation: Ablation, scale: Scale, definition: ScaleDefinition, arm: Arm, seed: int, after: str | None
) -> PlannedRun:
    base = base_recipe(definition.base)
    overrides = [*definition.set, *arm.set, f"run.seed={seed}", f"run.threads={THREADS}"]
    config = load_train_recipe(base, overrides, base.parent)
    start = None
    if config.start.sft is not None:
        changes = [*definition.start_set, f"run.threads={THREADS}"]
        start = _phases(load_sft_recipe(Path(config.start.sft), changes), seed)
    decides = decisive(config, {**_UNIMPORTANT, "logging": True, "checkpoint": True})
    if config.start.sft is not None:
        decides["start"]["sft"] = Path(config.start.sft).name  # where the package is installed decides nothing
    decides["made"] = [None if start is None else start.key, after]
    return PlannedRun(
        key=digest(decides),
        scale=scale,
        seed=seed,
        config=config,
        start=start,
        after=after,
        arms=((ablation.id, arm.name),),
        minutes=definition.minutes,
    )


def _phases(recipe: SftConfig, seed: int) -> PlannedStart:
    """A link a phase. The first of several has the recipe's seed, so that it is made once; the others the run's."""
    start: PlannedStart | None = None
    for phase in recipe.phases:
        shared = len(recipe.phases) > 1 and phase is recipe.phases[0]
        run = recipe.run.model_copy(update={"seed": recipe.run.seed if shared else seed})
        own = recipe.model_copy(update={"run": run, "phases": (phase,)})
        decides = decisive(own, _UNIMPORTANT)
        decides["after"] = None if start is None else start.key
        start = PlannedStart(key=digest(decides), recipe=own, after=start)
    assert start is not None, "the schema asks for a phase"
    return start
