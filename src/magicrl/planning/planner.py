"""A recipe and a number of accelerators to a plan: memory, layout, time by stage, and what other numbers of
accelerators, other D_R and other group sizes would take, each in its best layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from magicrl.config.schema import StageConfig, TrainConfig
from magicrl.planning.costs import Calibration, Efficiency, load_calibration
from magicrl.planning.hardware import Hardware
from magicrl.planning.layouts import Demand, Placed, Stated, candidates, check_stated, refusal
from magicrl.planning.lengths import KEPT, SHARED, SIGMA, Lengths, Measured, lengths_of_mean, reasoning_lengths
from magicrl.planning.shapes import ModelShape
from magicrl.planning.simulator import one_step_off, simulate_async
from magicrl.planning.workload import Layout, StepTime, Workload, replica_setup, step_parts, step_time

LONG_CONTEXT = 4096
"""From this T on, lengths are taken to be those of an R1-distilled model; below, half of T."""
INTERVAL = (0.1, 0.9)
"""Quantiles of the step time's interval."""
DRAWS = 8
"""Efficiencies drawn for the interval."""
PROMPT = 256
ASYNC_STEPS = 8
"""Played for an asynchronous step; the second half counts."""
SHORT_LIST = 3
"""Layouts that are played out of those that an estimate puts first, for asynchronous steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What a plan assumes beside the recipe.

    Attributes:
        gpus: accelerators.
        staleness: updates that rollouts may be behind; 0 synchronous, 1 one step off, more fully asynchronous.
        mean_length: mean response tokens at the recipe's largest T; None: assumed.
        prompt: mean prompt tokens; None: 256, or T where that is less.
        kept: share of groups that survive rejection; None: that of ``measured``, or 0.6 where the recipe rejects.
        measured: lengths and survivors of a run that exists, instead of assumed ones.
        other: seconds a response outside rollout and GPU passes; None: the calibration's.
        offload_moments: AdamW's moments in the host's memory.
    """

    gpus: int
    staleness: int = 0
    mean_length: float | None = None
    prompt: int | None = None
    kept: float | None = None
    measured: Measured | None = None
    other: float | None = None
    offload_moments: bool = False

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise ValueError(f"--gpus must be at least 1, got {self.gpus}")
        if self.staleness < 0:
            raise ValueError(f"--staleness must be 0 or more, got {self.staleness}")
        if self.measured is not None and self.mean_length is not None:
            raise ValueError("--mean-length and --lengths-from both give lengths: use one of them")
        if self.other is not None and self.other < 0:
            raise ValueError(f"--other must be 0 or more seconds a response, got {self.other:g}")
        if self.kept is not None and not 0 < self.kept <= 1:
            raise ValueError(f"--kept is a share, above 0 and at most 1, got {self.kept:g}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds of a step under a schedule.

    Attributes:
        parts: of the synchronous step: rollout, updates, everything else, tail, idle time.
        seconds: a step, overlapped where the schedule overlaps.
    """

    parts: StepTime
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """One stage.

    Attributes:
        limit: T.
        rollout_batch: D_R.
        group_size: M.
        lengths: of its responses.
        steps: the stage's ``max_steps``.
        timing: of a step.
        low: seconds a step, a tenth of the drawn efficiencies are faster.
        high: a tenth are slower.
    """

    limit: int
    rollout_batch: int
    group_size: int
    lengths: Lengths
    steps: int
    timing: Timing
    low: float
    high: float

    @property
    def hours_per_1000(self) -> float:
        """Hours of 1000 steps."""
        return self.timing.seconds / 3.6

    @property
    def hours(self) -> float:
        """Hours of the whole stage."""
        return self.timing.seconds * self.steps / 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf:
    """A change and what a step of the longest stage then takes.

    Attributes:
        change: in words.
        seconds: a step; None where it does not fit.
        ratio: to the plan's step.
    """

    change: str
    seconds: float | None
    ratio: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All that ``magicrl plan`` says."""

    shape: ModelShape
    hardware: Hardware
    options: Options
    calibration: Calibration
    placed: Placed
    stages: tuple[StagePlan, ...]
    what_if: tuple[WhatIf, ...]
    stated: Stated | None = None
    """What becomes of the recipe's own ``[cluster]``; None where there is none, or the accelerators are CPUs."""

    @property
    def hours(self) -> float:
        """Hours of all stages."""
        return sum(stage.hours for stage in self.stages)


def stage_lengths(stage: StageConfig, longest: int, options: Options) -> Lengths:
    """Lengths under a stage's T: measured, of the given mean at the recipe's largest T, or assumed."""
    if options.measured is not None:
        return options.measured.lengths.at(stage.max_tokens)
    if options.mean_length is not None:
        return lengths_of_mean(options.mean_length, SIGMA, longest, SHARED).at(stage.max_tokens)
    if longest >= LONG_CONTEXT:
        return reasoning_lengths(stage.max_tokens)
    return lengths_of_mean(longest / 2, SIGMA, longest, SHARED).at(stage.max_tokens)


def workload(config: TrainConfig, stage: StageConfig, options: Options, lengths: Lengths) -> Workload:
    """A stage's step as the cost model sees it; ``old_logprobs`` are computed only where there are several updates."""
    mini = stage.mini_batch or stage.rollout_batch
    sgd_steps = max(1, ceil(stage.rollout_batch / mini)) * config.algorithm.reuse
    seen = options.measured.kept if options.measured is not None else KEPT
    return Workload(
        lengths=lengths,
        prompt=options.prompt or min(PROMPT, stage.max_tokens, config.data.max_prompt_tokens),
        rollout_batch=stage.rollout_batch,
        group_size=stage.group_size,
        sgd_steps=sgd_steps,
        reuse=config.algorithm.reuse,
        kept=options.kept or (seen if config.algorithm.reject_zero_advantage else 1.0),
        forwards=(sgd_steps > 1) + (config.reference.mode != "none"),
        micro_batch_tokens=config.model.micro_batch_tokens,
        recompute=_recomputes(config, stage.max_tokens),
        shared_prompts=config.model.share_prompts,
    )


def _recomputes(config: TrainConfig, limit: int) -> bool:
    above = config.model.checkpoint_above_tokens
    largest = max(config.model.micro_batch_tokens, limit)
    return config.model.gradient_checkpointing or (above is not None and largest > above)


def demand(config: TrainConfig, shape: ModelShape, hardware: Hardware, options: Options) -> Demand:
    """What of the recipe decides memory; one accelerator runs the in-process engine with the recipe's limits."""
    longest = max(stage.max_tokens for stage in config.stages)
    alone, lora = options.gpus == 1, config.model.lora
    prompt = config.data.max_prompt_tokens if longest >= LONG_CONTEXT else (options.prompt or PROMPT)
    return Demand(
        shape=shape,
        hardware=hardware,
        longest=longest + prompt,
        micro_batch_tokens=config.model.micro_batch_tokens,
        checkpointing=_recomputes(config, longest),
        head_chunk_tokens=config.model.head_chunk_tokens,
        reference=config.reference.mode != "none",
        offload_moments=options.offload_moments,
        rows=config.rollout.max_rows if alone else 256,
        cache_limit=config.rollout.memory_limit_mb * 2.0**20 if alone else float("inf"),
        adapters=0 if lora is None else shape.adapter_parameters(lora.rank, lora.target_modules),
    )


def timing(
    shape: ModelShape,
    hardware: Hardware,
    efficiency: Efficiency,
    work: Workload,
    layout: Layout,
    staleness: int,
    draws: int = 3,
) -> Timing:
    """A step under the schedule that the staleness allows: colocated layouts are synchronous whatever it is."""
    parts = step_time(shape, hardware, efficiency, work, layout, draws)
    if layout.colocated or staleness == 0:
        return Timing(parts=parts, seconds=parts.seconds)
    if staleness == 1:
        return Timing(parts=parts, seconds=one_step_off(parts.rollout, parts.parts))
    stream = simulate_async(
        [work.drawn(seed) for seed in range(ASYNC_STEPS)],
        work.prompt,
        replica_setup(shape, hardware, efficiency, layout),
        layout.replicas,
        parts.parts,
        staleness,
    )
    return Timing(parts=parts, seconds=stream.seconds_per_step(ASYNC_STEPS // 2))


def estimate(
    shape: ModelShape, hardware: Hardware, efficiency: Efficiency, work: Workload, layout: Layout, staleness: int
) -> float:
    """Seconds a step, for a first choice of layouts: an asynchronous step is not played, but the slower of the
    learner's side and of an engine whose replicas stay full with the responses that may be on their way."""
    if layout.colocated or staleness < 2:
        return timing(shape, hardware, efficiency, work, layout, staleness, draws=1).seconds
    setup = replica_setup(shape, hardware, efficiency, layout)
    context = work.prompt + work.lengths.mean_context
    on_their_way = (staleness + 1) * work.responses / layout.replicas / 2
    batch = max(1, int(min(setup.rows, on_their_way, setup.capacity / context)))
    tokens = work.responses * work.lengths.mean / layout.replicas
    engine = tokens / batch * setup.cost.step(batch, batch * context)
    parts = step_parts(shape, hardware, efficiency, work, layout)
    return max(engine, parts.total)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A recipe's stages as workloads, with how many steps each has."""

    works: tuple[Workload, ...]
    steps: tuple[int, ...]

    def total(self, needed: Demand, efficiency: Efficiency, layout: Layout, staleness: int, *, played: bool) -> float:
        """Seconds of all stages, from one draw; estimated, or played."""
        shape, hardware = needed.shape, needed.hardware
        return sum(
            steps
            * (
                timing(shape, hardware, efficiency, work, layout, staleness, draws=1).seconds
                if played
                else estimate(shape, hardware, efficiency, work, layout, staleness)
            )
            for work, steps in zip(self.works, self.steps, strict=True)
        )


def best_layout(
    needed: Demand, options: Options, efficiency: Efficiency, job: Job, short_list: int = SHORT_LIST
) -> Placed | None:
    """The layout that fits and takes least time over all stages; None where none fits.

    Asynchronous steps are estimated for all layouts and played for the first ``short_list``.
    """
    fitting = [placed for placed in candidates(needed, options.gpus) if placed.fits]
    if not fitting:
        return None

    def seconds(placed: Placed, *, played: bool) -> float:
        return job.total(needed, efficiency, placed.layout, options.staleness, played=played)

    first = sorted(fitting, key=lambda placed: seconds(placed, played=False))
    if options.staleness < 2 or short_list == 1:
        return first[0]
    return min(first[:short_list], key=lambda placed: seconds(placed, played=True))


def make_plan(
    config: TrainConfig, shape: ModelShape, hardware: Hardware, options: Options, *, what_if: bool = True
) -> Plan:
    """The plan of a recipe; ``what_if`` False leaves out what changes would do.

    Raises:
        ValueError: nothing fits; the text says by how much, and what would make it fit.
    """
    calibration = load_calibration(hardware.name, shape.hidden)
    if options.other is not None:
        calibration = calibration.given("other", options.other)
    efficiency, needed = calibration.efficiency, demand(config, shape, hardware, options)
    longest = max(stage.max_tokens for stage in config.stages)
    lengths = [stage_lengths(stage, longest, options) for stage in config.stages]
    works = tuple(workload(config, s, options, at) for s, at in zip(config.stages, lengths, strict=True))
    job = Job(works=works, steps=tuple(stage.max_steps for stage in config.stages))
    placed = best_layout(needed, options, efficiency, job)
    if placed is None:
        raise ValueError(refusal(needed, options.gpus))
    stages: list[StagePlan] = []
    for stage, work in zip(config.stages, works, strict=True):
        found = timing(shape, hardware, efficiency, work, placed.layout, options.staleness)
        drawn = [
            timing(shape, hardware, e, work, placed.layout, options.staleness, draws=1).seconds
            for e in calibration.drawn(DRAWS if options.staleness < 2 else DRAWS // 2)
        ]
        low, high = np.quantile(drawn, INTERVAL)
        stages.append(
            StagePlan(
                limit=stage.max_tokens,
                rollout_batch=stage.rollout_batch,
                group_size=stage.group_size,
                lengths=work.lengths,
                steps=stage.max_steps,
                timing=found,
                low=min(float(low), found.seconds),
                high=max(float(high), found.seconds),
            )
        )
    return Plan(
        shape=shape,
        hardware=hardware,
        options=options,
        calibration=calibration,
        placed=placed,
        stages=tuple(stages),
        what_if=_what_if(needed, options, efficiency, job, stages) if what_if else (),
        stated=_stated(config, needed, options, efficiency, job),
    )


def _stated(config: TrainConfig, needed: Demand, options: Options, efficiency: Efficiency, job: Job) -> Stated | None:
    """The recipe's own split, checked; with its time where it fits."""
    if config.cluster is None or needed.hardware.name.startswith("cpu"):
        return None
    found = check_stated(needed, config.cluster, options.gpus)
    if not found.fits or found.placed is None:
        return found
    played = options.staleness >= 2  # as for the layout that is compared with
    return replace(found, seconds=job.total(needed, efficiency, found.placed.layout, options.staleness, played=played))


def _what_if(
    needed: Demand, options: Options, efficiency: Efficiency, job: Job, stages: Sequence[StagePlan]
) -> tuple[WhatIf, ...]:
    """Twice the accelerators, D_R or group size, at the stage that takes longest; each in its own best layout."""
    index = max(range(len(stages)), key=lambda i: stages[i].hours)
    work, now = job.works[index], stages[index].timing.seconds
    changes = (
        (f"{2 * options.gpus} accelerators", replace(options, gpus=2 * options.gpus), work),
        (f"D_R {2 * work.rollout_batch}", options, replace(work, rollout_batch=2 * work.rollout_batch)),
        (f"group size {2 * work.group_size}", options, replace(work, group_size=2 * work.group_size)),
    )
    found: list[WhatIf] = []
    for change, other, heavier in changes:
        if needed.hardware.gpus_per_node == 1 and other.gpus > 1:
            continue  # this machine has no second accelerator
        placed = best_layout(needed, other, efficiency, Job(works=(heavier,), steps=(1,)), short_list=1)
        if placed is None:
            found.append(WhatIf(change=change, seconds=None, ratio=None))
            continue
        then = timing(needed.shape, needed.hardware, efficiency, heavier, placed.layout, other.staleness).seconds
        found.append(WhatIf(change=change, seconds=then, ratio=then / now))
    return tuple(found)


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
