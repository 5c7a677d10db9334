"""A recipe and a number of accelerators to a plan: memory, layout, time by stage, and what other numbers of
accelerators, other D_R and other group sizes would take, each in its best layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, inf

import numpy as np

from magicrl.config.cluster_schema import ClusterConfig
from magicrl.config.schema import LoraConfig, StageConfig, TrainConfig
from magicrl.planning.costs import Calibration, System, forward_flops, load_calibration
from magicrl.planning.hardware import Hardware
from magicrl.planning.layouts import (
    Demand,
    Placed,
    Stated,
    candidates,
    check_stated,
    default_shards,
    fits,
    learner_settings,
    place_on,
    refusal,
    sides,
)
from magicrl.planning.shapes import ModelShape
from magicrl.planning.simulator import one_step_off, simulate_async
from magicrl.planning.workload import (
    KEPT,
    Layout,
    Lengths,
    Measured,
    StepTime,
    Workload,
    lengths_of_mean,
    reasoning_lengths,
    replica_setup,
    step_parts,
    step_time,
)

LONG_CONTEXT = 4096  # from this T on, lengths are taken to be those of an R1-distilled model; below, half of T
INTERVAL = (0.1, 0.9)  # quantiles of the step time's interval
DRAWS = 8  # efficiencies drawn for the interval
PROMPT = 256
ASYNC_STEPS = 8  # played for an asynchronous step; the second half counts
SHORT_LIST = 3  # layouts that are played out of those that an estimate puts first, for asynchronous steps


Setting = bool | int | float | str
"""Value of a recipe's setting."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What a plan assumes beside the recipe."""

    gpus: int  # accelerators
    staleness: int = 0  # updates that rollouts may be behind; 0 synchronous, 1 one step off, more fully asynchronous
    mean_length: float | None = None  # mean response tokens at the recipe's largest T; None: assumed
    prompt: int | None = None  # mean prompt tokens; None: 256, or T where that is less
    # share of groups that survive rejection; None: that of ``measured``, or 0.6 where the recipe rejects
    kept: float | None = None
    measured: Measured | None = None  # lengths and survivors of a run that exists, instead of assumed ones
    other: float | None = None  # seconds a response outside rollout and GPU passes; None: the calibration's
    as_stated: bool = False  # the learner's settings are the recipe's; else all that it could set are tried

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
class StagePlan:
    """One stage: seconds of a step with nine tenths of the drawn efficiencies above ``low``, a tenth above ``high``."""

    work: Workload  # of a step, with T, D_R, M and lengths
    steps: int  # the stage's ``max_steps``
    parts: StepTime  # of the synchronous step: rollout, updates, everything else, tail, idle time
    seconds: float  # a step, overlapped where the schedule overlaps
    low: float
    high: float

    @property
    def hours_per_1000(self) -> float:
        """Hours of 1000 steps."""
        return self.seconds / 3.6

    @property
    def hours(self) -> float:
        """Hours of the whole stage."""
        return self.seconds * self.steps / 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All that ``magicrl plan`` says."""

    shape: ModelShape
    hardware: Hardware
    options: Options
    calibration: Calibration
    placed: Placed
    stages: tuple[StagePlan, ...]
    what_if: Mapping[str, float | None]  # a change, and seconds of the longest stage's step then; None: does not fit
    settings: Mapping[str, Setting]
    """What the recipe has to set to run so, where it differs: dotted keys to values."""
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
        return lengths_of_mean(options.mean_length, longest).at(stage.max_tokens)
    if longest >= LONG_CONTEXT:
        return reasoning_lengths(stage.max_tokens)
    return lengths_of_mean(longest / 2, longest).at(stage.max_tokens)


def workload(config: TrainConfig, stage: StageConfig, options: Options, lengths: Lengths) -> Workload:
    """A stage's step as the cost model sees it; ``old_logprobs`` are computed only where there are several updates.

    ``config`` is the recipe as it is in this stage.
    """
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
        shared_prompts=config.model.share_prompts,
    )


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
        checkpointing=config.model.gradient_checkpointing,
        checkpoint_above=config.model.checkpoint_above_tokens,
        head_chunk_tokens=config.model.head_chunk_tokens,
        reference=config.reference.mode != "none",
        rows=config.rollout.max_rows if alone else 256,
        cache_limit=config.rollout.memory_limit_mb * 2.0**20 if alone else float("inf"),
        adapters=0 if lora is None else shape.adapter_parameters(lora.rank, lora.target_modules),
    )


def timing(
    system: System,
    work: Workload,
    layout: Layout,
    staleness: int,
    draws: int = 3,
) -> tuple[StepTime, float]:
    """Parts of a synchronous step, and the seconds of one under the schedule that the staleness allows.

    Colocated layouts are synchronous whatever it is.
    """
    parts = step_time(system, work, layout, draws)
    if layout.colocated or staleness == 0:
        return parts, parts.seconds
    if staleness == 1:
        return parts, one_step_off(parts.rollout, parts.parts)
    stream = simulate_async(
        [work.drawn(seed) for seed in range(ASYNC_STEPS)],
        work.prompt,
        replica_setup(system, layout),
        layout.replicas,
        parts.parts,
        staleness,
    )
    return parts, stream.seconds_per_step(ASYNC_STEPS // 2)


def estimate(system: System, work: Workload, layout: Layout, staleness: int) -> float:
    """Seconds a step, for a first choice of layouts: an asynchronous step is not played, but the slower of the
    learner's side and of an engine whose replicas stay full with the responses that may be on their way."""
    if layout.colocated or staleness < 2:
        return timing(system, work, layout, staleness, draws=1)[1]
    setup = replica_setup(system, layout)
    context = work.prompt + work.lengths.mean_context
    on_their_way = (staleness + 1) * work.responses / layout.replicas / 2
    batch = max(1, int(min(setup.rows, on_their_way, setup.capacity / context)))
    tokens = work.responses * work.lengths.mean / layout.replicas
    engine = tokens / batch * setup.cost.step(batch, batch * context)
    parts = step_parts(system, work, layout)
    return max(engine, parts.total)


def flops_bound(shape: ModelShape, hardware: Hardware, work: Workload, gpus: int) -> dict[str, float]:
    """Seconds of rollout, update and step where FLOPs at the data sheet's peak were all: no plan can be below."""
    a_pass = forward_flops(shape, work.tokens, work.mean_context) / (gpus * hardware.flops)
    update = 3.0 * a_pass * work.kept * work.reuse
    return {"rollout": a_pass, "update": update, "step": (1 + work.forwards) * a_pass + update}


Job = Sequence[tuple[Workload, int]]
"""A recipe's stages as workloads, with how many steps each has."""


def total_seconds(system: System, job: Job, layout: Layout, staleness: int, *, played: bool) -> float:
    """Seconds of all stages, from one draw; estimated, or played."""

    def seconds(work: Workload) -> float:
        if played:
            return timing(system, work, layout, staleness, draws=1)[1]
        return estimate(system, work, layout, staleness)

    return sum(steps * seconds(work) for work, steps in job)


RANK = LoraConfig().rank  # of adapters that a remedy proposes
SHORTEST = 256  # T that a remedy proposes
WORTH = 0.005
"""Share of the learner's time that a setting has to save to be changed from the recipe's."""


def searched(needed: Demand, system: System, options: Options, job: Job) -> list[tuple[float, Placed]]:
    """Layouts that fit, each with the learner's seconds (all but the rollout), which no schedule is faster than.

    The learner's settings matter to the engine only by what they leave resident beside it, so that of those with equal
    or more resident bytes the fastest stands for all.
    """
    found: list[tuple[float, Placed]] = []

    def learning(placed: Placed) -> float:
        return sum(steps * step_parts(system, work, placed.layout).total for work, steps in job)

    if options.as_stated:
        return [(learning(placed), placed) for placed in candidates(needed, options.gpus) if placed.fits]
    for side in sides(needed, options.gpus):
        if not side.degrees:
            continue
        ways = [(way, place_on(way, side, side.degrees[0], sp)) for way, sp in learner_settings(needed, side)]
        timed = [(learning(placed), changes(needed, placed), placed, way) for way, placed in ways]
        timed.sort(key=lambda one: one[0] * (1 + WORTH * one[1]))
        least = inf
        for seconds, _, placed, way in timed:
            resident = placed.learner.resident if side.colocated else 0.0
            if resident < least:
                least = resident
                layouts = (place_on(way, side, tp, placed.layout.sequence_parallel) for tp in side.degrees)
                found += [(seconds, layout) for layout in layouts if layout.fits]
    return found


def changes(needed: Demand, placed: Placed) -> int:
    """Of how many settings a layout's learner differs from the recipe's, sequence parallelism counted as one."""
    layout = placed.layout
    default = default_shards(needed, layout.learner_gpus, colocated=layout.colocated)
    return (
        (layout.micro_batch_tokens != needed.micro_batch_tokens)
        + ((layout.checkpointing, layout.checkpoint_above) != (needed.checkpointing, needed.checkpoint_above))
        + (layout.offload != needed.offload_optimizer)
        + (layout.shards != (needed.shard_ranks or default))
        + (layout.sequence_parallel > 1)
    )


def recipe_settings(config: TrainConfig, needed: Demand, placed: Placed, staleness: int) -> dict[str, Setting]:
    """What a recipe has to set to run as ``placed``, where it differs: dotted keys to values."""
    layout, cluster = placed.layout, config.cluster or ClusterConfig()
    learner, rollout, model = cluster.learner, cluster.rollout, config.model
    found: dict[str, tuple[Setting | None, Setting | None]] = {
        "model.micro_batch_tokens": (model.micro_batch_tokens, layout.micro_batch_tokens),
        "model.gradient_checkpointing": (model.gradient_checkpointing, layout.checkpointing),
        "model.checkpoint_above_tokens": (model.checkpoint_above_tokens, layout.checkpoint_above),
    }
    if needed.hardware.gpus_per_node > 1 and (layout.gpus > 1 or config.cluster is not None):
        lag = 0 if layout.colocated else staleness
        default = learner.shard_ranks or default_shards(needed, layout.learner_gpus, colocated=layout.colocated)
        share = floor(100 * (placed.engine.weights + layout.cache_bytes) / needed.hardware.memory) / 100
        vllm = config.rollout.vllm
        found |= {
            "cluster.learner.ranks": (learner.ranks, layout.learner_gpus),
            "cluster.learner.sequence_parallel": (learner.sequence_parallel, layout.sequence_parallel),
            "cluster.learner.shard_ranks": (default, layout.shards),
            "cluster.learner.offload_optimizer": (learner.offload_optimizer, layout.offload),
            "cluster.rollout.replicas": (rollout.replicas, layout.replicas),
            "cluster.rollout.tensor_parallel": (rollout.tensor_parallel, layout.tensor_parallel),
            "cluster.rollout.colocated": (rollout.colocated, layout.colocated),
            "rollout.engine": (config.rollout.engine, "vllm"),
            "rollout.max_rows": (config.rollout.max_rows, layout.rows),
            "rollout.max_staleness": (config.rollout.max_staleness, lag),
            "entropy.estimator": (config.entropy.estimator, "exact" if lag else "sampled"),
        }
        if layout.colocated and layout.gpus > 1:
            found["rollout.vllm.gpu_share"] = (vllm.gpu_share, share)
    return {key: new for key, (old, new) in found.items() if new is not None and new != old}


def best_layout(
    needed: Demand, system: System, options: Options, job: Job, short_list: int = SHORT_LIST
) -> Placed | None:
    """The layout that fits and takes least time over all stages; None where none fits.

    Asynchronous steps are estimated for all layouts and played for the first ``short_list``.
    """

    def seconds(placed: Placed, *, played: bool) -> float:
        return total_seconds(system, job, placed.layout, options.staleness, played=played)

    found = sorted(searched(needed, system, options, job), key=lambda one: one[0])
    if options.staleness < 2:
        best: tuple[float, Placed | None] = (inf, None)
        for bound, placed in found:
            if bound >= best[0]:
                break
            best = min(best, (seconds(placed, played=False), placed), key=lambda one: one[0])
        return best[1]
    fitting = [placed for _, placed in found]
    # playing every layout of an asynchronous step takes too long: the estimate chooses which are played
    first = sorted(fitting, key=lambda placed: seconds(placed, played=False))
    if short_list == 1:
        return next(iter(first), None)
    return min(first[:short_list], key=lambda placed: seconds(placed, played=True), default=None)


@dataclass(frozen=True, slots=True)
class Remedy:
    """A number of accelerators, and settings over the recipe's, with which it fits."""

    gpus: int
    sets: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """As flags of the command line."""
        return " ".join((f"--gpus {self.gpus}", *(f"--set {one}" for one in self.sets)))


class DoesNotFit(ValueError):
    """No layout fits; ``ways`` has the least of each kind of change that would make one fit."""

    def __init__(self, text: str, ways: tuple[Remedy, ...]) -> None:
        super().__init__(text)
        self.ways = ways


def remedies(config: TrainConfig, shape: ModelShape, hardware: Hardware, options: Options) -> Iterator[Remedy]:
    """LoRA, the longest T by halves, both, on these accelerators; the fewest for the recipe as it is. Of each kind
    the first that fits."""
    lora = config.model.model_copy(update={"lora": LoraConfig()})
    adapted = [] if config.model.lora else [(config.model_copy(update={"model": lora}), (f"model.lora.rank={RANK}",))]
    longest = max(stage.max_tokens for stage in config.stages)
    limits = [longest >> k for k in range(1, 8) if longest >> k >= SHORTEST]

    def cut(recipe: TrainConfig, sets: tuple[str, ...]) -> Iterator[tuple[TrainConfig, tuple[str, ...]]]:
        for limit in limits:
            stages = tuple(s.model_copy(update={"max_tokens": min(limit, s.max_tokens)}) for s in recipe.stages)
            less = (f"stages.{i}.max_tokens={limit}" for i, s in enumerate(recipe.stages) if s.max_tokens > limit)
            yield recipe.model_copy(update={"stages": stages}), (*sets, *less)

    here: list[Iterable[tuple[TrainConfig, tuple[str, ...]]]] = [adapted, cut(config, ())]
    here += [cut(*one) for one in adapted]
    found = 0
    for kind in here:
        first = next(
            (sets for recipe, sets in kind if fits(demand(recipe, shape, hardware, options), options.gpus)), None
        )
        if first is not None and found < 2:
            found += 1
            yield Remedy(options.gpus, first)
    if hardware.gpus_per_node > 1:
        node = hardware.gpus_per_node
        counts = [
            *range(options.gpus + 1, 2 * node),
            *(node * 2**k for k in range(1, 10) if node * 2**k > options.gpus),
        ]
        for count in counts:
            if fits(demand(config, shape, hardware, replace(options, gpus=count)), count):
                yield Remedy(count)
                return


def make_plan(
    config: TrainConfig, shape: ModelShape, hardware: Hardware, options: Options, *, what_if: bool = True
) -> Plan:
    """The plan of a recipe; ``what_if`` False leaves out what changes would do.

    Raises:
        DoesNotFit: nothing fits; the text says by how much, and what would make it fit.
    """
    calibration = load_calibration(hardware.name, shape.hidden)
    if options.other is not None:
        calibration = calibration.given("other", options.other)
    system, needed = System(shape, hardware, calibration.efficiency), demand(config, shape, hardware, options)
    longest = max(stage.max_tokens for stage in config.stages)
    job = [
        (workload(config.in_stage(i), stage, options, stage_lengths(stage, longest, options)), stage.max_steps)
        for i, stage in enumerate(config.stages)
    ]
    placed = best_layout(needed, system, options, job)
    if placed is None:
        ways = tuple(remedies(config, shape, hardware, options))
        raise DoesNotFit(refusal(needed, options.gpus, [way.words for way in ways]), ways)
    stages: list[StagePlan] = []
    for work, steps in job:
        setting = (work, placed.layout, options.staleness)
        parts, seconds = timing(system, *setting)
        # an asynchronous step is played over several batches, which takes longer: fewer draws of it
        others = calibration.drawn(DRAWS if options.staleness < 2 else DRAWS // 2)
        drawn = [timing(replace(system, efficiency=other), *setting, draws=1)[1] for other in others]
        low, high = np.quantile(drawn, INTERVAL)
        stages.append(
            StagePlan(
                work=work,
                steps=steps,
                parts=parts,
                seconds=seconds,
                low=min(float(low), seconds),
                high=max(float(high), seconds),
            )
        )
    return Plan(
        shape=shape,
        hardware=hardware,
        options=options,
        calibration=calibration,
        placed=placed,
        stages=tuple(stages),
        what_if=_what_if(needed, system, options, stages) if what_if else {},
        settings=recipe_settings(config, needed, placed, options.staleness),
        stated=_stated(config, needed, system, options, job),
    )


def _stated(config: TrainConfig, needed: Demand, system: System, options: Options, job: Job) -> Stated | None:
    """The recipe's own split, checked; with its time where it fits."""
    if config.cluster is None or needed.hardware.name.startswith("cpu"):
        return None
    found = check_stated(needed, config.cluster, options.gpus)
    if not found.fits or found.placed is None:
        return found
    played = options.staleness >= 2  # as for the layout that is compared with
    seconds = total_seconds(system, job, found.placed.layout, options.staleness, played=played)
    return replace(found, seconds=seconds)


def _what_if(
    needed: Demand, system: System, options: Options, stages: Sequence[StagePlan]
) -> Mapping[str, float | None]:
    """Twice the accelerators, D_R or group size, at the stage that takes longest; each in its own best layout."""
    work = stages[longest_stage(stages)].work
    size, batch = 2 * work.group_size, 2 * work.rollout_batch
    found: dict[str, float | None] = {}
    if not options.as_stated:
        own = replace(options, as_stated=True)
        found["the recipe's learner settings"] = _step_seconds(needed, system, own, work)
    if needed.hardware.gpus_per_node > 1:  # else this machine has no second accelerator
        twice = replace(options, gpus=2 * options.gpus)
        found[f"{twice.gpus} accelerators"] = _step_seconds(needed, system, twice, work)
    found[f"D_R {batch}"] = _step_seconds(needed, system, options, replace(work, rollout_batch=batch))
    found[f"group size {size}"] = _step_seconds(needed, system, options, replace(work, group_size=size))
    return found


def _step_seconds(needed: Demand, system: System, options: Options, work: Workload) -> float | None:
    """Seconds of a step in its own best layout; None where nothing fits."""
    placed = best_layout(needed, system, options, [(work, 1)], short_list=1)
    if placed is None:
        return None
    return timing(system, work, placed.layout, options.staleness)[1]


FACTORS = (0.25, 0.5, 1, 2, 4, 8)  # of the accelerators
BATCHES = (0.5, 1, 2, 4)  # of D_R and of the group size


def longest_stage(stages: Sequence[StagePlan]) -> int:
    """Index of the stage that takes most hours: the one that changes and sweeps are about."""
    return max(range(len(stages)), key=lambda i: stages[i].hours)


def over_gpus(config: TrainConfig, plan: Plan, factors: Sequence[float] = FACTORS) -> dict[int, StagePlan | None]:
    """Table 9's curve for this recipe: accelerators to a step of the longest stage on them, None where nothing fits.

    The plan's own number is among them; a machine with one accelerator gives its own alone.
    """
    index, gpus = longest_stage(plan.stages), plan.options.gpus
    counts = sorted({gpus, *(round(gpus * f) for f in factors if gpus * f >= 1)})
    one = config.model_copy(update={"stages": (config.stages[index],)})

    def stage(count: int) -> StagePlan | None:
        try:
            options = replace(plan.options, gpus=count)
            return make_plan(one, plan.shape, plan.hardware, options, what_if=False).stages[0]
        except ValueError:
            return None

    if plan.hardware.gpus_per_node == 1:
        counts = [gpus]
    return {count: plan.stages[index] if count == gpus else stage(count) for count in counts}


def over_batches(config: TrainConfig, plan: Plan) -> dict[tuple[int, int], float | None]:
    """D_R and group size by turns, the others as they are, to seconds of a step; None where nothing fits.

    The plan's own pair is among them.
    """
    now, options = plan.stages[longest_stage(plan.stages)], plan.options
    work, system = now.work, System(plan.shape, plan.hardware, plan.calibration.efficiency)
    needed = demand(config, plan.shape, plan.hardware, options)
    own = (work.rollout_batch, work.group_size)
    pairs = [(round(own[0] * f), own[1]) for f in BATCHES] + [(own[0], round(own[1] * f)) for f in BATCHES]
    found: dict[tuple[int, int], float | None] = {}
    for batch, members in pairs:
        if batch < 1 or members < 2:  # a group of one has no advantages
            continue
        other = replace(work, rollout_batch=batch, group_size=members)
        same = (batch, members) == own
        found[batch, members] = now.seconds if same else _step_seconds(needed, system, options, other)
    return found
