"""A plan beside its neighbours: other numbers of accelerators, other D_R and group sizes, each in its best layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from magicrl.config.schema import TrainConfig
from magicrl.planning.planner import (
    Job,
    Plan,
    StagePlan,
    best_layout,
    demand,
    make_plan,
    timing,
    workload,
)

FACTORS = (0.25, 0.5, 1, 2, 4, 8)
"""Of the accelerators."""
BATCHES = (0.5, 1, 2, 4)
"""Of D_R and of the group size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuPoint:
    """A step of the longest stage on another number of accelerators.

    Attributes:
        gpus: accelerators.
        stage: its plan; None where nothing fits.
    """

    gpus: int
    stage: StagePlan | None


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPoint:
    """A step with another D_R or group size, on the plan's accelerators.

    Attributes:
        rollout_batch: D_R.
        group_size: M.
        seconds: a step; None where nothing fits.
    """

    rollout_batch: int
    group_size: int
    seconds: float | None

    @property
    def per_response(self) -> float | None:
        """Seconds of the step over its responses."""
        return None if self.seconds is None else self.seconds / (self.rollout_batch * self.group_size)


def longest_stage(plan: Plan) -> int:
    """Index of the stage that takes most hours: the one that a sweep is about."""
    return max(range(len(plan.stages)), key=lambda i: plan.stages[i].hours)


def over_gpus(config: TrainConfig, plan: Plan, factors: Sequence[float] = FACTORS) -> tuple[GpuPoint, ...]:
    """Table 9's curve for this recipe; the plan's own number of accelerators is among the points.

    A machine with one accelerator gives its own point alone.
    """
    index, gpus = longest_stage(plan), plan.options.gpus
    counts = sorted({gpus, *(round(gpus * f) for f in factors if gpus * f >= 1)})
    if plan.hardware.gpus_per_node == 1:
        counts = [gpus]
    one = config.model_copy(update={"stages": (config.stages[index],)})
    found: list[GpuPoint] = []
    for count in counts:
        if count == gpus:
            found.append(GpuPoint(gpus=count, stage=plan.stages[index]))
            continue
        try:
            there = make_plan(one, plan.shape, plan.hardware, replace(plan.options, gpus=count), what_if=False)
        except ValueError:
            found.append(GpuPoint(gpus=count, stage=None))
        else:
            found.append(GpuPoint(gpus=count, stage=there.stages[0]))
    return tuple(found)


def over_batches(config: TrainConfig, plan: Plan, factors: Sequence[float] = BATCHES) -> tuple[BatchPoint, ...]:
    """D_R and group size by turns, the others as they are; the plan's own is among the points once."""
    index, options = longest_stage(plan), plan.options
    stage, now = config.stages[index], plan.stages[index]
    work = workload(config, stage, options, now.lengths)
    needed = demand(config, plan.shape, plan.hardware, options)
    d_r, size = work.rollout_batch, work.group_size
    pairs = {(round(d_r * f), size): None for f in factors} | {(d_r, round(size * f)): None for f in factors}
    found: list[BatchPoint] = []
    for batch, members in pairs:
        if batch < 1 or members < 2:  # a group of one has no advantages
            continue
        seconds: float | None = now.timing.seconds
        if (batch, members) != (d_r, size):
            other = replace(work, rollout_batch=batch, group_size=members)
            efficiency = plan.calibration.efficiency
            placed = best_layout(needed, options, efficiency, Job(works=(other,), steps=(1,)), short_list=1)
            seconds = (
                None
                if placed is None
                else timing(plan.shape, plan.hardware, efficiency, other, placed.layout, options.staleness).seconds
            )
        found.append(BatchPoint(rollout_batch=batch, group_size=members, seconds=seconds))
    return tuple(found)
