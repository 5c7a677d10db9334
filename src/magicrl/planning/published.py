"""Published step times, the setting of each, and what had to be assumed about it.

The setting of the report's section 4 (Tables 8 and 9): R1-Distill-Qwen-7B, 64 prompts x 16 responses, T = 16K, H800.
From the released scripts: tensor parallel 1, 0.8 of the memory for the engine while the learner's state is in the
host's memory, the log-prob pass always made, layers recomputed, prompts kept together on a replica.

Assumed, since not published: the length distribution's spread and how much of it a group shares, mean prompt, and the
share of groups that survives rejection. Its mean is published: 12.5K tokens at T = 32K when trained from scratch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from magicrl.planning.costs import BF16
from magicrl.planning.hardware import Hardware, load_hardware
from magicrl.planning.lengths import Lengths, lengths_of_mean
from magicrl.planning.shapes import ModelShape, load_shape
from magicrl.planning.workload import Layout, Workload

MEAN_AT_32K = 12_500
SIGMA = 0.8
SHARED = 0.5
PROMPT = 256
KEPT = 0.6
ENGINE_SHARE = 0.8
"""Of the memory, for weights and cache, as in the released scripts."""

Part = Literal["rollout", "learn", "other", "step"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A published run.

    Attributes:
        model: known name.
        hardware: known name.
        gpus: accelerators, all of them doing both parts in turn.
        limit: T.
        rollout_batch: D_R.
        group_size: M.
        sgd_steps: N_SGD.
        tensor_parallel: of the engine.
        sequence_parallel: of the learner.
    """

    model: str
    hardware: str
    gpus: int
    limit: int
    rollout_batch: int
    group_size: int
    sgd_steps: int = 1
    tensor_parallel: int = 1
    sequence_parallel: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One published figure.

    Attributes:
        name: where it stands.
        setting: of the run.
        part: which part of a step.
        seconds: a step.
        fitted: one of the figures that the unknowns are fitted on.
    """

    name: str
    setting: Setting
    part: Part
    seconds: float
    fitted: bool = False


def seven(gpus: int = 32, sgd_steps: int = 1) -> Setting:
    """The setting of Tables 8 and 9."""
    return Setting(
        model="DeepSeek-R1-Distill-Qwen-7B",
        hardware="H800-80G",
        gpus=gpus,
        limit=16384,
        rollout_batch=64,
        group_size=16,
        sgd_steps=sgd_steps,
    )


def thirty_two(gpus: int) -> Setting:
    """The setting of Table 7, 1000 steps of OR1-32B, nearly all at T = 16K; its GPU count is not published."""
    return Setting(
        model="DeepSeek-R1-Distill-Qwen-32B",
        hardware="H800-80G",
        gpus=gpus,
        limit=16384,
        rollout_batch=256,
        group_size=16,
        tensor_parallel=4,
        sequence_parallel=1,
    )


def _hours(hours: float) -> float:
    """Seconds a step from hours per 1000 steps."""
    return hours * 3.6


def rows() -> tuple[Row, ...]:
    """Tables 8 and 9, a figure a row."""
    found = [
        Row(name=f"T9 {gpus} GPUs", setting=seven(gpus), part="rollout", seconds=seconds, fitted=gpus in (32, 256))
        for gpus, seconds in ((32, 375.0), (64, 270.0), (128, 225.0), (256, 205.0))
    ]
    table8: tuple[tuple[int, tuple[float, float, float, float]], ...] = (
        (1, (90, 8, 18, 116)),
        (2, (87, 10, 17, 114)),
        (4, (90, 12, 16, 118)),
    )
    parts: tuple[Part, ...] = ("rollout", "learn", "other", "step")
    for steps, hours in table8:
        for part, value in zip(parts, hours, strict=True):
            found.append(
                Row(
                    name=f"T8 N_SGD {steps} {part}",
                    setting=seven(sgd_steps=steps),
                    part=part,
                    seconds=_hours(value),
                    fitted=steps == 1 and part != "step",
                )
            )
    return tuple(found)


TABLE7_HOURS: dict[Part, float] = {"rollout": 223.0, "learn": 27.0, "other": 59.0, "step": 309.0}


@cache
def reasoning_lengths(
    limit: int, mean_at_32k: float = MEAN_AT_32K, sigma: float = SIGMA, shared: float = SHARED
) -> Lengths:
    """Lengths of an R1-distilled model in training from scratch, under another T."""
    return lengths_of_mean(mean_at_32k, sigma, 32768, shared).at(limit)


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """A published setting with everything that the model needs."""

    shape: ModelShape
    hardware: Hardware
    work: Workload
    layout: Layout


def resolve(setting: Setting, lengths: Lengths | None = None, kept: float = KEPT) -> Resolved:
    """What a setting means, with the assumptions above; other lengths where they are known."""
    shape, hardware = load_shape(setting.model), load_hardware(setting.hardware)
    weights = BF16 * shape.parameters / setting.tensor_parallel
    work = Workload(
        lengths=lengths or reasoning_lengths(setting.limit),
        prompt=PROMPT,
        rollout_batch=setting.rollout_batch,
        group_size=setting.group_size,
        sgd_steps=setting.sgd_steps,
        kept=kept,
        forwards=1,
        micro_batch_tokens=1,
        recompute=True,
    )
    layout = Layout(
        rollout_gpus=setting.gpus,
        tensor_parallel=setting.tensor_parallel,
        learner_gpus=setting.gpus,
        sequence_parallel=setting.sequence_parallel,
        colocated=True,
        cache_bytes=ENGINE_SHARE * hardware.memory - weights,
    )
    return Resolved(shape=shape, hardware=hardware, work=work, layout=layout)
