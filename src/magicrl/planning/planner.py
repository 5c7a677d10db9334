"""The plan of a recipe on a number of accelerators: memory, layout, time by stage, and the effect of changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, inf

from magicrl.config.cluster_schema import ClusterConfig
from magicrl.config.model_schema import DType, LoraConfig
from magicrl.config.schema import StageConfig, TrainConfig
from magicrl.planning.costs import Efficiency, System, forward_flops, learner_flops, load_calibration
from magicrl.planning.hardware import Hardware
from magicrl.planning.layouts import Demand, Placed, Stated, check_stated, default_shards, fitting_layouts, refusal
from magicrl.planning.memory import value_bytes
from magicrl.planning.shapes import ModelShape, load_shape
from magicrl.planning.workload import (
    KEPT,
    Layout,
    Lengths,
    StepTime,
    Workload,
    lengths_of_mean,
    reasoning_lengths,
    timing,
)

LONG_CONTEXT = 4096  # from this T on, assumed lengths are those of an R1-distilled model; below, half of T
PROMPT = 256

Setting = bool | int | float | str
"""Value of a setting of a recipe."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Assumptions of a plan in addition to the recipe."""

    gpus: int  # accelerators
    # maximum age of rollouts in updates: 0 synchronous, 1 one step off, more fully asynchronous; None: the recipe's
    staleness: int | None = None
    mean_length: float | None = None  # mean response tokens at the recipe's largest T; None: assumed
    prompt: int | None = None  # mean prompt tokens; None: 256, or T if that is less
    # share of groups that are kept after rejection; None: that of ``measured``, or 0.6 where the recipe rejects
    kept: float | None = None
    # lengths and share of kept groups of an existing run (`read_measured`) instead of assumed ones
    measured: tuple[Lengths, float] | None = None
    other: float | None = None  # seconds per response outside rollout and GPU passes; None: from the calibration

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise ValueError(f"--gpus must be at least 1, got {self.gpus}")
        if self.prompt is not None and self.prompt < 1:
            raise ValueError(f"--prompt-tokens must be at least 1, got {self.prompt}")
        if self.staleness is not None and self.staleness < 0:
            raise ValueError(f"--staleness must be 0 or more, got {self.staleness}")
        if self.measured is not None and self.mean_length is not None:
            raise ValueError("--mean-length and --lengths-from both give lengths: use one of them")
        if self.other is not None and not 0 <= self.other < inf:
            raise ValueError(f"--other must be 0 or more seconds per response, got {self.other:g}")
        if self.kept is not None and not 0 < self.kept <= 1:
            raise ValueError(f"--kept is a share, above 0 and at most 1, got {self.kept:g}")


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """One stage of a plan."""

    work: Workload  # of a step, with T, D_R, M and lengths
    steps: int  # the stage's ``max_steps``
    parts: StepTime  # seconds of rollout, updates and everything else
    seconds: float  # per step, with the overlap of the schedule

    @property
    def hours(self) -> float:
        """Hours of the whole stage."""
        return self.seconds * self.steps / 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The result of ``magicrl plan``."""

    shape: ModelShape
    hardware: Hardware
    options: Options
    staleness: int  # that of the options, or the recipe's; without effect where the layout is colocated
    calibration: Efficiency
    placed: Placed
    stages: tuple[StagePlan, ...]
    what_if: Mapping[str, float | None]  # by change the seconds of the longest stage's step; None: does not fit
    settings: Mapping[str, Setting]  # changes of the recipe for this layout: dotted keys to values
    dtype: DType = "bfloat16"  # of the recipe, which the memory follows; the times are those of the calibration
    stated: Stated | None = None  # the recipe's ``[cluster]``; None where there is none, or on CPUs
    adapters: int = 0  # parameters that LoRA trains; 0 without it

    @property
    def hours(self) -> float:
        """Hours of all stages."""
        return sum(stage.hours for stage in self.stages)


def stage_lengths(stage: StageConfig, longest: int, options: Options) -> Lengths:
    """Return the lengths for a stage's T: measured, with the given mean at the recipe's largest T, or assumed."""
    if options.measured is not None:
        return options.measured[0].at(stage.max_tokens)
    if options.mean_length is not None:
        return lengths_of_mean(options.mean_length, longest).at(stage.max_tokens)
    if longest >= LONG_CONTEXT:
        return reasoning_lengths(stage.max_tokens)
    return lengths_of_mean(longest / 2, longest).at(stage.max_tokens)


def workload(config: TrainConfig, stage: StageConfig, options: Options, lengths: Lengths) -> Workload:
    """Return the work of a stage's step. Old log-probs are computed only if there are several updates.

    ``config`` is the recipe with the settings of this stage.
    """
    mini = stage.mini_batch or stage.rollout_batch
    sgd_steps = max(1, ceil(stage.rollout_batch / mini)) * config.algorithm.reuse
    seen = options.measured[1] if options.measured is not None else KEPT
    teacher = None if config.teacher is None else config.teacher.local_model
    own_teacher = config.teacher is not None and teacher is None and config.teacher.server is None
    return Workload(
        lengths=lengths,
        prompt=options.prompt or min(PROMPT, stage.max_tokens, config.data.max_prompt_tokens),
        rollout_batch=stage.rollout_batch,
        group_size=stage.group_size,
        sgd_steps=sgd_steps,
        reuse=config.algorithm.reuse,
        kept=options.kept or (seen if config.algorithm.reject_zero_advantage else 1.0),
        forwards=(sgd_steps > 1) + (config.reference.mode != "none") + own_teacher,
        teacher=None if teacher is None else load_shape(teacher),
        shared_prompts=config.model.share_prompts,
    )


def demand(config: TrainConfig, shape: ModelShape, hardware: Hardware, options: Options) -> Demand:
    """Return the settings that determine memory. One accelerator runs the in-process engine with its limits."""
    longest = max(stage.max_tokens for stage in config.stages)
    single = options.gpus == 1
    prompt = config.data.max_prompt_tokens if longest >= LONG_CONTEXT else (options.prompt or PROMPT)
    teacher, lora = None if config.teacher is None else config.teacher.local_model, config.model.lora
    return Demand(
        shape=shape,
        hardware=hardware,
        width=value_bytes(config.model.dtype),
        engine_width=value_bytes(config.rollout.dtype or config.model.dtype),
        longest=longest + prompt,
        micro_batch_tokens=config.model.micro_batch_tokens,
        checkpointing=config.model.gradient_checkpointing,
        checkpoint_above=config.model.checkpoint_above_tokens,
        head_chunk_tokens=config.model.head_chunk_tokens,
        reference=config.reference.mode != "none",
        teacher=0 if teacher is None else load_shape(teacher).parameters,
        rows=config.rollout.max_rows if single else 256,
        cache_limit=config.rollout.memory_limit_mb * 2.0**20 if single else float("inf"),
        adapters=0 if lora is None else shape.adapter_parameters(lora.rank, lora.target_modules),
    )


def flops_bound(
    shape: ModelShape, hardware: Hardware, work: Workload, gpus: int, adapters: int = 0
) -> dict[str, float]:
    """Return the seconds of rollout, update and step for only FLOPs at the peak rate, a lower bound of every plan."""
    rate, sizes = gpus * hardware.flops, (work.tokens, work.mean_context)
    a_pass = forward_flops(shape, *sizes) / rate
    update = learner_flops(shape, *sizes, recompute=0.0, adapters=adapters) / rate * work.kept * work.reuse
    teacher = 0.0 if work.teacher is None else forward_flops(work.teacher, *sizes) / rate
    return {"rollout": a_pass, "update": update, "step": (1 + work.forwards) * a_pass + teacher + update}


Job = Sequence[tuple[Workload, int]]
"""The stages of a recipe as (work of a step, number of steps)."""


def total_seconds(system: System, job: Job, layout: Layout, staleness: int) -> float:
    """Return the seconds of all stages on a layout."""
    return sum(steps * timing(system, work, layout, staleness)[1] for work, steps in job)


def best_layout(needed: Demand, system: System, gpus: int, staleness: int, job: Job) -> Placed | None:
    """Return the fastest fitting layout over all stages; None where none fits."""
    found = fitting_layouts(needed, gpus)
    return min(found, key=lambda placed: total_seconds(system, job, placed.layout, staleness), default=None)


def best_step(
    needed: Demand, system: System, gpus: int, staleness: int, work: Workload
) -> tuple[StepTime, float] | None:
    """Return parts and seconds of one step on its best layout; None where none fits."""
    placed = best_layout(needed, system, gpus, staleness, [(work, 1)])
    return None if placed is None else timing(system, work, placed.layout, staleness)


RANK = LoraConfig().rank  # of adapters in a remedy
SHORTEST = 256  # smallest T in a remedy


def recipe_settings(config: TrainConfig, needed: Demand, placed: Placed, staleness: int) -> dict[str, Setting]:
    """Return the changes of a recipe for the layout ``placed``: dotted keys to values."""
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
        share = floor(100 * (placed.engine["weights"] + layout.cache_bytes) / needed.hardware.memory) / 100
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


class DoesNotFit(ValueError):
    """No layout fits. ``ways`` has flags of ``magicrl plan``, for each kind of change the smallest that fits."""

    def __init__(self, text: str, ways: Sequence[str]) -> None:
        super().__init__(text)
        self.ways = ways


def remedies(config: TrainConfig, shape: ModelShape, hardware: Hardware, options: Options) -> Iterator[str]:
    """Yield command line flags with which the recipe fits, for each kind of change the first that fits.

    The kinds are LoRA, a T halved several times, and both, on these accelerators; and more accelerators.
    """
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
            yield " ".join((f"--gpus {options.gpus}", *(f"--set {one}" for one in first)))
    if hardware.gpus_per_node > 1:
        node = hardware.gpus_per_node
        counts = [
            *range(options.gpus + 1, 2 * node),
            *(node * 2**k for k in range(1, 10) if node * 2**k > options.gpus),
        ]
        for count in counts:
            if fitting_layouts(demand(config, shape, hardware, replace(options, gpus=count)), count):
                yield f"--gpus {count}"
                return


def make_plan(
    config: TrainConfig, shape: ModelShape, hardware: Hardware, options: Options, *, what_if: bool = True
) -> Plan:
    """Return the plan of a recipe.

    Args:
        config: the recipe.
        shape: shape of the model.
        hardware: the accelerators.
        options: assumptions in addition to the recipe.
        what_if: include the effect of changes.

    Raises:
        DoesNotFit: nothing fits. The text says what is missing and what would make it fit.
    """
    calibration = load_calibration(hardware.name, shape.hidden)
    if options.other is not None:
        calibration = replace(calibration, other=options.other)
    needed = demand(config, shape, hardware, options)
    system = System(shape, hardware, calibration, needed.adapters)
    longest = max(stage.max_tokens for stage in config.stages)
    if shape.context is not None and longest + (options.prompt or 1) > shape.context:
        raise ValueError(
            f"T = {longest} and the prompt exceed the context of {shape.name} ({shape.context} tokens); lower "
            "stages.N.max_tokens or name another model"
        )
    job = [
        (workload(config.in_stage(i), stage, options, stage_lengths(stage, longest, options)), stage.max_steps)
        for i, stage in enumerate(config.stages)
    ]
    own = config.rollout.max_staleness
    staleness = own if options.staleness is None else options.staleness
    placed = best_layout(needed, system, options.gpus, staleness, job)
    if placed is None:
        ways = list(remedies(config, shape, hardware, options))
        text = refusal(needed, options.gpus, ways)
        if config.rollout.vllm.engine_args:  # such as cpu_offload_gb, which may make it fit
            text += f"; not counted: rollout.vllm.engine_args ({', '.join(config.rollout.vllm.engine_args)})"
        raise DoesNotFit(text, ways)
    stages: list[StagePlan] = []
    for work, steps in job:
        parts, seconds = timing(system, work, placed.layout, staleness)
        stages.append(StagePlan(work=work, steps=steps, parts=parts, seconds=seconds))
    stated = None
    if config.cluster is not None and not hardware.name.startswith("cpu"):
        stated = check_stated(needed, config.cluster, options.gpus)
        if stated.fits and stated.placed is not None:
            stated = replace(stated, seconds=total_seconds(system, job, stated.placed.layout, own), staleness=own)
    return Plan(
        shape=shape,
        hardware=hardware,
        options=options,
        staleness=staleness,
        calibration=calibration,
        placed=placed,
        stages=tuple(stages),
        what_if=_what_if(config, system, options, staleness, stages) if what_if else {},
        settings=recipe_settings(config, needed, placed, staleness),
        dtype=config.model.dtype,
        stated=stated,
        adapters=needed.adapters,
    )


def _what_if(
    config: TrainConfig, system: System, options: Options, staleness: int, stages: Sequence[StagePlan]
) -> Mapping[str, float | None]:
    """Return the seconds per step with twice the accelerators, more staleness, twice D_R, and twice the group size.

    Each is on its own best layout; None where nothing fits.
    """

    def seconds(changed: Workload, gpus: int = options.gpus, staleness: int = staleness) -> float | None:
        needed = demand(config, system.shape, system.hardware, replace(options, gpus=gpus))
        step = best_step(needed, system, gpus, staleness, changed)
        return None if step is None else step[1]

    index = longest_stage(stages)
    work, stage = stages[index].work, config.stages[index]
    found: dict[str, float | None] = {}
    if system.hardware.gpus_per_node > 1:  # else the machine has only one accelerator
        found[f"{2 * options.gpus} accelerators"] = seconds(work, gpus=2 * options.gpus)
        if options.gpus > 1:
            found[f"staleness {staleness + 1}"] = seconds(work, staleness=staleness + 1)
    for name, key, value in (
        ("D_R", "rollout_batch", 2 * stage.rollout_batch),  # with the recipe's D_T, so that there are more updates
        ("group size", "group_size", 2 * stage.group_size),
    ):
        changed = stage.model_copy(update={key: value})
        found[f"{name} {value}"] = seconds(workload(config.in_stage(index), changed, options, work.lengths))
    return found


def longest_stage(stages: Sequence[StagePlan]) -> int:
    """Return the index of the stage with the most hours, the subject of changes and sweeps."""
    return max(range(len(stages)), key=lambda i: stages[i].hours)


def over_gpus(config: TrainConfig, plan: Plan) -> dict[int, StagePlan | None]:
    """Return the curve of Table 9 for this recipe: by number of accelerators a step of the longest stage.

    The numbers are a quarter to eight times that of the plan; on a machine with one accelerator only that of the plan.
    None where nothing fits.
    """
    now, options = plan.stages[longest_stage(plan.stages)], plan.options
    system = System(plan.shape, plan.hardware, plan.calibration, plan.adapters)
    counts = {round(options.gpus * f) for f in (0.25, 0.5, 1, 2, 4, 8) if options.gpus * f >= 1}
    found: dict[int, StagePlan | None] = {options.gpus: now}
    for count in (counts - {options.gpus}) if plan.hardware.gpus_per_node > 1 else ():
        needed = demand(config, plan.shape, plan.hardware, replace(options, gpus=count))
        step = best_step(needed, system, count, plan.staleness, now.work)
        found[count] = None if step is None else replace(now, parts=step[0], seconds=step[1])
    return dict(sorted(found.items()))
