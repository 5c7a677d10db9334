"""Published step times, the setting of each, and the assumptions about it.

The setting of the report's section 4 (Tables 8 and 9): R1-Distill-Qwen-7B, 64 prompts x 16 responses, T = 16K, H800.
From the released scripts: tensor parallel 1, 0.8 of the memory for the engine while the learner's state is in the
host's memory, the log-prob pass always made, layers recomputed, prompts kept together on a replica.

Assumed, since not published: the spread of the length distribution, the correlation of lengths in a group, the mean
prompt, and the share of groups that survives rejection. The mean length is published: 12.5K tokens at T = 32K when
trained from scratch.

The module fits four unknowns to published step times and shows how far they carry. The unknowns are logarithms of
``Efficiency``'s kv, step_overhead, learner and other. Five figures fix them: Table 9 at 32 and 256 GPUs, and the three
parts of Table 8's first row. Residuals are logarithms of predicted over published.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from magicrl.planning.costs import BF16, Efficiency, System
from magicrl.planning.hardware import Hardware, load_hardware
from magicrl.planning.shapes import ModelShape, load_shape
from magicrl.planning.workload import KEPT, Layout, Lengths, StepTime, Workload, reasoning_lengths, step_time

PROMPT = 256
ENGINE_SHARE = 0.8  # share of memory for weights and cache, as in the released scripts

Part = Literal["rollout", "learn", "other", "step"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A published run. The defaults are those of Tables 8 and 9."""

    gpus: int  # accelerators, each used for both parts in turn
    model: str = "DeepSeek-R1-Distill-Qwen-7B"  # known name
    hardware: str = "H800-80G"
    limit: int = 16384  # T
    rollout_batch: int = 64  # D_R
    group_size: int = 16  # M
    sgd_steps: int = 1  # N_SGD
    tensor_parallel: int = 1  # ranks of the engine
    sequence_parallel: int = 1  # ranks of the learner that share a sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One published figure."""

    name: str  # place of the figure in the report
    setting: Setting  # setting of the run
    part: Part  # part of a step
    seconds: float  # seconds per step
    fitted: bool = False  # the unknowns are fitted on this figure


PARTS: tuple[Part, ...] = ("rollout", "learn", "other", "step")
TABLE9 = {32: 375.0, 64: 270.0, 128: 225.0, 256: 205.0}  # seconds per rollout, by GPUs
TABLE8 = {1: (90, 8, 18, 116), 2: (87, 10, 17, 114), 4: (90, 12, 16, 118)}  # hours per 1000 steps, by N_SGD


def rows() -> tuple[Row, ...]:
    """Return Tables 8 and 9, one row per figure."""
    found = [
        Row(name=f"T9 {gpus} GPUs", setting=Setting(gpus=gpus), part="rollout", seconds=s, fitted=gpus in (32, 256))
        for gpus, s in TABLE9.items()
    ]
    for steps, hours in TABLE8.items():
        setting = Setting(gpus=32, sgd_steps=steps)
        for part, value in zip(PARTS, hours, strict=True):
            fitted = steps == 1 and part != "step"
            name = f"T8 N_SGD {steps} {part}"
            found.append(Row(name=name, setting=setting, part=part, seconds=value * 3.6, fitted=fitted))
    return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """A published setting with all inputs of the model."""

    shape: ModelShape
    hardware: Hardware
    work: Workload
    layout: Layout

    def system(self, efficiency: Efficiency) -> System:
        return System(self.shape, self.hardware, efficiency)

    def time(self, efficiency: Efficiency) -> StepTime:
        return step_time(self.system(efficiency), self.work, self.layout)


def resolve(setting: Setting, lengths: Lengths | None = None, kept: float = KEPT) -> Resolved:
    """Return the meaning of a setting under the assumptions above, or with other lengths where they are known."""
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
    )
    layout = Layout(
        rollout_gpus=setting.gpus,
        tensor_parallel=setting.tensor_parallel,
        learner_gpus=setting.gpus,
        sequence_parallel=setting.sequence_parallel,
        colocated=True,
        cache_bytes=ENGINE_SHARE * hardware.memory - weights,
        micro_batch_tokens=setting.limit + PROMPT,
        checkpointing=True,
    )
    return Resolved(shape=shape, hardware=hardware, work=work, layout=layout)


UNKNOWNS = ("kv", "step_overhead", "learner", "other")
START = Efficiency(kv=0.3, step_overhead=0.004, learner=0.3, other=0.05)


def with_unknowns(logarithms: NDArray[np.float64], base: Efficiency = START) -> Efficiency:
    """Return the efficiency whose unknowns have these logarithms."""
    values = {name: exp(float(value)) for name, value in zip(UNKNOWNS, logarithms, strict=True)}
    return replace(base, **values)


def part_seconds(time: StepTime, part: str) -> float:
    """Return the seconds of one part of a step as the report's tables count it."""
    return {"rollout": time.rollout, "learn": time.learn, "other": time.other, "step": time.seconds(0)}[part]


def predict(row: Row, efficiency: Efficiency) -> float:
    """Return the model's seconds for a published figure."""
    return part_seconds(resolve(row.setting).time(efficiency), row.part)


def fit(rows: Sequence[Row]) -> Efficiency:
    """Fit by least squares on the rows marked ``fitted``, and ignore the others.

    Raises:
        ValueError: There are fewer rows than unknowns.
    """
    used = [row for row in rows if row.fitted]
    if len(used) < len(UNKNOWNS):
        raise ValueError(f"{len(UNKNOWNS)} unknowns need as many rows to be fitted on, got {len(used)}")

    def residuals(logarithms: NDArray[np.float64]) -> NDArray[np.float64]:
        efficiency = with_unknowns(logarithms)
        return np.array([log(predict(row, efficiency) / row.seconds) for row in used])

    low, high = np.log([0.02, 1e-5, 0.02, 1e-4]), np.log([1.0, 0.1, 1.0, 1.0])
    start = np.array([log(getattr(START, name)) for name in UNKNOWNS])
    solved = least_squares(residuals, start, bounds=(low, high), diff_step=1e-3, xtol=1e-9, ftol=1e-12)
    return with_unknowns(solved.x)


def curve(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return the curve t = a + b / N through two points ``(N, seconds)``.

    Example:
        >>> curve([(1, 30.0), (2, 20.0)])
        (10.0, 20.0)
    """
    (n, first), (m, second) = points
    b = (first - second) / (1 / n - 1 / m)
    return first - b / n, b
