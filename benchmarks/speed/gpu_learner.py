"""One update of the learner on one device: seconds, MFU, and peak memory against ``magicrl plan``.

The whole model is trained if the planner's estimate fits into the device, else LoRA adapters over frozen bfloat16
weights. The learner of one process keeps 18 bytes per trained parameter on its device (bfloat16 weight, float32
master, gradient and two moments). The learner over ranks can keep all but the first in pinned host memory
(`offload_optimizer`), 16 bytes per parameter. A machine with one GPU rarely has that for 7B, so it is not measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.shared import rounded
from benchmarks.speed.gpu_device import forget_peak, name_of, now, peak_gib, planned_with, product_rate, random_model
from benchmarks.speed.models import sample_of
from magicrl.config.algorithm_schema import AlgorithmConfig
from magicrl.config.model_schema import LoraConfig, ModelConfig
from magicrl.planning.costs import sequence_work, update_flops
from magicrl.planning.hardware import GIB, Hardware, peak_flops
from magicrl.planning.memory import LearnerMemory, LearnerSetup, learner_memory
from magicrl.planning.shapes import ModelShape
from magicrl.records import TrainBatch
from magicrl.training.learner import LocalLearner
from magicrl.training.objective import LearnerSettings
from magicrl.training.protocols import Controls

PROMPT = 8
LORA = LoraConfig()
CONTROLS = Controls(learning_rate=1e-6)


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerCase:
    """One update on one response."""

    name: str  # of the case in the JSON
    shape: ModelShape
    tokens: int  # of the response, behind a prompt of 8
    checkpointing: bool  # layers are computed again in the backward pass
    # whether adapters are trained; None: where the whole model does not fit even with checkpointing
    lora: bool | None = None
    updates: int = 3  # measured, after a first one that compiles kernels
    compiled: bool = False  # decoder layers are, before the first update

    @property
    def adapters(self) -> int:
        """Return the number of parameters of LoRA adapters."""
        return self.shape.adapter_parameters(LORA.rank, LORA.target_modules)


def estimate(case: LearnerCase, runtime: float, *, lora: bool, checkpointing: bool) -> LearnerMemory:
    """Return the estimate of ``magicrl plan`` for one accelerator."""
    settings = ModelConfig()
    setup = LearnerSetup(
        gpus=1,
        sequence_parallel=1,
        micro_batch_tokens=settings.micro_batch_tokens,
        longest=PROMPT + case.tokens,
        checkpointing=checkpointing,
        head_chunk_tokens=settings.head_chunk_tokens,
        adapters=case.adapters if lora else 0,
    )
    return learner_memory(case.shape, setup, runtime)


def needs_lora(case: LearnerCase, hardware: Hardware) -> bool:
    """Return whether the whole model exceeds one accelerator with checkpointing, by the planner's estimate."""
    if case.lora is not None:
        return case.lora
    return estimate(case, hardware.runtime, lora=False, checkpointing=True).total > hardware.budget


def make_learner(case: LearnerCase, device: str, *, lora: bool) -> LocalLearner:
    """Return a learner in bfloat16 over float32 masters, with a recipe's loss."""
    settings = ModelConfig(
        gradient_checkpointing=case.checkpointing, lora=LORA if lora else None, compile=case.compiled
    )
    model = random_model(case.shape, torch.float32, device)
    return LocalLearner(model, LearnerSettings(algorithm=AlgorithmConfig(loss="dapo"), model=settings))


def batch_of(case: LearnerCase) -> TrainBatch:
    """Return one response of random tokens."""
    rng = np.random.default_rng(0)
    prompt, tokens = (rng.integers(1, case.shape.vocabulary, size) for size in (PROMPT, case.tokens))
    return TrainBatch.of([sample_of(prompt, tokens, 1.0)])


def learner_case(case: LearnerCase, device: str, side: int) -> dict[str, Any]:
    """Return the estimate and, if it fits, the measurement."""
    hardware = planned_with(device)
    lora = needs_lora(case, hardware)
    planned = estimate(case, 0.0, lora=lora, checkpointing=case.checkpointing)
    fits = planned.total + hardware.runtime <= hardware.budget
    found: dict[str, Any] = {
        "device": hardware.name,
        "model": case.shape.name,
        "parameters": case.shape.parameters,
        "trained": f"LoRA of rank {LORA.rank}" if lora else "all weights",
        "trained_parameters": case.adapters if lora else case.shape.parameters,
        "checkpointing": case.checkpointing,
        "compiled": case.compiled,
        "response_tokens": case.tokens,
        "device_memory_gib": rounded(hardware.memory / GIB),
        "planned_gib": {
            "without_runtime": rounded(planned.total / GIB),
            **{term: rounded(size / GIB) for term, size in planned.terms().items() if size},
        },
        "fits_by_plan": fits,
    }
    return {**found, **_measured(case, device, side, lora=lora)} if fits else found


def _measured(case: LearnerCase, device: str, side: int, *, lora: bool) -> dict[str, Any]:
    rate, peak = product_rate(device, side), peak_flops(name_of(device))
    learner, batch = make_learner(case, device, lora=lora), batch_of(case)
    forget_peak(device)
    seconds: list[float] = []
    for _ in range(1 + case.updates):
        start = now(device)
        learner.update(batch, CONTROLS)
        seconds.append(now(device) - start)
    best = min(seconds[1:])
    work = sequence_work([(PROMPT, [case.tokens])])
    done = update_flops(case.shape, work, adapters=case.adapters if lora else None) / best
    return {
        "seconds": rounded(best),
        "all_seconds": [rounded(value) for value in seconds],
        "tokens_per_s": rounded(case.tokens / best),
        "model_tflop_per_s": rounded(done / 1e12),
        "product_tflop_per_s": rounded(rate / 1e12),
        "share_of_product": rounded(done / rate),
        "mfu": None if peak is None else rounded(done / peak),
        "peak_memory_gib": peak_gib(device),
    }
