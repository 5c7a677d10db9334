"""A plan as JSON values: what ``magicrl plan --json`` prints and the plan's page is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from magicrl.config.schema import TrainConfig
    from magicrl.planning.planner import Plan, StagePlan

GIB = 2.0**30


def plan_facts(made: Plan, hours: float | None, price: float | None) -> dict[str, Any]:
    """The plan as JSON values: seconds, GiB, hours."""
    layout, hardware = made.placed.layout, made.hardware
    facts: dict[str, Any] = {
        "model": made.shape.name,
        "parameters": made.shape.parameters,
        "gpu": hardware.name,
        "gpus": made.options.gpus,
        "staleness": made.options.staleness,
        "calibration": {"name": made.calibration.name, "source": made.calibration.source},
        "layout": {
            "colocated": layout.colocated,
            "rollout_gpus": layout.rollout_gpus,
            "tensor_parallel": layout.tensor_parallel,
            "learner_gpus": layout.learner_gpus,
            "sequence_parallel": layout.sequence_parallel,
        },
        "memory_gib": {
            "budget": round(hardware.budget / GIB, 2),
            "learner": {name: round(value / GIB, 3) for name, value in made.placed.learner.terms().items()},
            "learner_total": round(made.placed.learner.total / GIB, 2),
            "engine": {name: round(value / GIB, 3) for name, value in made.placed.engine.terms().items()},
            "fits": made.placed.fits,
        },
        "stages": [_stage_facts(stage) for stage in made.stages],
        "hours": round(made.hours, 3),
        "gpu_hours": round(made.hours * made.options.gpus, 3),
        "what_if": [
            {
                "change": change.change,
                "seconds": None if change.seconds is None else round(change.seconds, 3),
                "ratio": None if change.ratio is None else round(change.ratio, 3),
            }
            for change in made.what_if
        ],
    }
    if made.stated is not None:
        facts["stated"] = _stated_facts(made)
    if price is not None:
        facts["cost"] = round(made.hours * made.options.gpus * price, 2)
    if hours is not None:
        facts["budget_hours"] = hours
        facts["steps_in_budget"] = _steps_within(made, hours)
    return facts


def _stated_facts(made: Plan) -> dict[str, Any]:
    stated = made.stated
    assert stated is not None, "asked for where the recipe has [cluster]"
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
        facts["hours"] = round(stated.seconds / 3600, 3)
        facts["times_the_plan"] = round(stated.seconds / 3600 / made.hours, 3)
    return facts


def _stage_facts(stage: StagePlan) -> dict[str, Any]:
    parts = stage.timing.parts
    return {
        "max_tokens": stage.limit,
        "rollout_batch": stage.rollout_batch,
        "group_size": stage.group_size,
        "mean_length": round(stage.lengths.mean, 1),
        "truncated": round(stage.lengths.truncated, 4),
        "steps": stage.steps,
        "rollout_seconds": round(parts.rollout, 3),
        "learn_seconds": round(parts.learn, 3),
        "other_seconds": round(parts.other, 3),
        "step_seconds": round(stage.timing.seconds, 3),
        "step_seconds_80_percent": [round(stage.low, 3), round(stage.high, 3)],
        "tail_share": round(parts.tail, 3),
        "idle_share": round(parts.idle, 3),
        "preemptions": round(parts.preemptions, 1),
        "hours_per_1000_steps": round(stage.hours_per_1000, 3),
        "hours": round(stage.hours, 3),
    }


def _steps_within(made: Plan, hours: float) -> int:
    """Steps of the recipe, stage after stage, that end within so many hours."""
    left, steps = hours * 3600, 0
    for stage in made.stages:
        fitting = min(stage.steps, int(left / stage.timing.seconds))
        steps += fitting
        left -= fitting * stage.timing.seconds
        if fitting < stage.steps:
            break
    return steps


def neighbours(config: TrainConfig, made: Plan) -> dict[str, Any]:
    """Other numbers of accelerators, D_R and group sizes at the plan's longest stage; null where nothing fits."""
    from magicrl.planning.sweep import longest_stage, over_batches, over_gpus

    index = longest_stage(made)
    over: list[dict[str, Any]] = []
    for point in over_gpus(config, made):
        stage = None if point.stage is None else _stage_facts(point.stage)
        keys = ("step_seconds", "step_seconds_80_percent", "rollout_seconds")
        over.append({"gpus": point.gpus, **{key: None if stage is None else stage[key] for key in keys}})
    return {
        "longest_stage": index,
        "over_gpus_max_tokens": made.stages[index].limit,
        "over_gpus": over,
        "over_batches": [
            {
                "rollout_batch": point.rollout_batch,
                "group_size": point.group_size,
                "step_seconds": None if point.seconds is None else round(point.seconds, 3),
                "seconds_a_response": None if point.per_response is None else round(point.per_response, 6),
            }
            for point in over_batches(config, made)
        ],
    }
