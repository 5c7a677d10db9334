"""Make the plan of a recipe on a number of accelerators: memory, layout, time by stage, and what changes would do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor

from magicrl.config.cluster_schema import ClusterConfig
from magicrl.config.schema import LoraConfig, StageConfig, TrainConfig
from magicrl.planning.costs import Calibration, System, forward_flops, load_calibration
from magicrl.planning.hardware import Hardware
from magicrl.planning.layouts import Demand, Placed, Stated, check_stated, default_shards, fitting_layouts, refusal
from magicrl.planning.shapes import ModelShape
from magicrl.planning.workload import (
    KEPT,
    Layout,
    Lengths,
    Measured,
    StepTime,
    Workload,
    lengths_of_mean,
    reasoning_lengths,
    timing,
)

LONG_CONTEXT = 4096  # from this T on, lengths are taken to be those of an R1-distilled model; below, half of T
PROMPT = 256

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
    """One stage of a plan."""

    work: Workload  # of a step, with T, D_R, M and lengths
    steps: int  # the stage's ``max_steps``
    parts: StepTime  # seconds of rollout, updates and everything else
    seconds: float  # per step, overlapped where the schedule overlaps

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


def flops_bound(shape: ModelShape, hardware: Hardware, work: Workload, gpus: int) -> dict[str, float]:
    """Seconds of rollout, update and step where FLOPs at the data sheet's peak were all: no plan can be below."""
    a_pass = forward_flops(shape, work.tokens, work.mean_context) / (gpus * hardware.flops)
    update = 3.0 * a_pass * work.kept * work.reuse
    return {"rollout": a_pass, "update": update, "step": (1 + work.forwards) * a_pass + update}


Job = Sequence[tuple[Workload, int]]
"""A recipe's stages as workloads, with how many steps each has."""


def total_seconds(system: System, job: Job, layout: Layout, staleness: int) -> float:
    """Seconds of all stages on a layout."""
    return sum(steps * timing(system, work, layout, staleness)[1] for work, steps in job)


def best_layout(needed: Demand, system: System, gpus: int, staleness: int, job: Job) -> Placed | None:
    """The fitting layout that takes least time over all stages; None where none fits."""
    found = fitting_layouts(needed, gpus)
    return min(found, key=lambda placed: total_seconds(system, job, placed.layout, staleness), default=None)


def best_step(
    needed: Demand, system: System, gpus: int, staleness: int, work: Workload
) -> tuple[StepTime, float] | None:
    """Parts and seconds of one step on the layout that is best for it; None where none fits."""
    placed = best_layout(needed, system, gpus, staleness, [(work, 1)])
    return None if placed is None else timing(system, work, placed.layout, staleness)


RANK = LoraConfig().rank  # of adapters that a remedy proposes
SHORTEST = 256  # T that a remedy proposes


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
        needs = ((demand(recipe, shape, hardware, options), sets) for recipe, sets in kind)
        first = next((sets for needed, sets in needs if fitting_layouts(needed, options.gpus)), None)
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
            if fitting_layouts(demand(config, shape, hardware, replace(options, gpus=count)), count):
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
        calibration = replace(calibration, efficiency=replace(calibration.efficiency, other=options.other))
    system, needed = System(shape, hardware, calibration.efficiency), demand(config, shape, hardware, options)
    longest = max(stage.max_tokens for stage in config.stages)
    job = [
        (workload(config.in_stage(i), stage, options, stage_lengths(stage, longest, options)), stage.max_steps)
        for i, stage in enumerate(config.stages)
    ]
    placed = best_layout(needed, system, options.gpus, options.staleness, job)
    if placed is None:
        ways = tuple(remedies(config, shape, hardware, options))
        raise DoesNotFit(refusal(needed, options.gpus, [way.words for way in ways]), ways)
    timed = [(work, steps, *timing(system, work, placed.layout, options.staleness)) for work, steps in job]
    stages = tuple(StagePlan(work=w, steps=steps, parts=parts, seconds=s) for w, steps, parts, s in timed)
    return Plan(
        shape=shape,
        hardware=hardware,
        options=options,
        calibration=calibration,
        placed=placed,
        stages=stages,
        what_if=_what_if(needed, system, options, stages[longest_stage(stages)].work) if what_if else {},
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
    return replace(found, seconds=total_seconds(system, job, found.placed.layout, options.staleness))


def _what_if(needed: Demand, system: System, options: Options, work: Workload) -> Mapping[str, float | None]:
    """Seconds per step with twice the accelerators, one update of staleness more, twice D_R and twice the group size,
    each on its own best layout; None where nothing fits."""

    def seconds(changed: Workload, gpus: int = options.gpus, staleness: int = options.staleness) -> float | None:
        step = best_step(needed, system, gpus, staleness, changed)
        return None if step is None else step[1]

    found: dict[str, float | None] = {}
    if needed.hardware.gpus_per_node > 1:  # else this machine has no second accelerator
        found[f"{2 * options.gpus} accelerators"] = seconds(work, gpus=2 * options.gpus)
        if options.gpus > 1:
            found[f"staleness {options.staleness + 1}"] = seconds(work, staleness=options.staleness + 1)
    found[f"D_R {2 * work.rollout_batch}"] = seconds(replace(work, rollout_batch=2 * work.rollout_batch))
    found[f"group size {2 * work.group_size}"] = seconds(replace(work, group_size=2 * work.group_size))
    return found


FACTORS = (0.25, 0.5, 1, 2, 4, 8)  # multiples of the plan's number of accelerators


def longest_stage(stages: Sequence[StagePlan]) -> int:
    """Index of the stage that takes most hours: changes and sweeps are about it."""
    return max(range(len(stages)), key=lambda i: stages[i].hours)


def over_gpus(config: TrainConfig, plan: Plan, factors: Sequence[float] = FACTORS) -> dict[int, StagePlan | None]:
    """Table 9's curve for this recipe: accelerators to a step of the longest stage on them, None where nothing fits.

    The plan's own number is among them; a machine with one accelerator gives its own alone.
    """
    now, options = plan.stages[longest_stage(plan.stages)], plan.options
    system = System(plan.shape, plan.hardware, plan.calibration.efficiency)
    counts = {round(options.gpus * f) for f in factors if options.gpus * f >= 1}
    found: dict[int, StagePlan | None] = {options.gpus: now}
    for count in (counts - {options.gpus}) if plan.hardware.gpus_per_node > 1 else ():
        needed = demand(config, plan.shape, plan.hardware, replace(options, gpus=count))
        step = best_step(needed, system, count, options.staleness, now.work)
        found[count] = None if step is None else replace(now, parts=step[0], seconds=step[1])
    return dict(sorted(found.items()))
