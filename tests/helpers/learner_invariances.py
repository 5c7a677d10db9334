"""Invariances of the learner, for `identities.py`: a real (tiny) transformer, packed and split in many ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from magicrl.config.algorithm_schema import AlgorithmConfig
from magicrl.config.model_schema import ModelConfig
from magicrl.records import TrainBatch, TrainSample, frozen_floats, frozen_tokens
from magicrl.selfcheck.loss import VOCABULARY, tiny_model
from magicrl.training.learner import LocalLearner
from magicrl.training.objective import LearnerSettings
from magicrl.training.protocols import Controls

CONTROLS = Controls(
    alpha=0.02, clip_low=0.2, clip_high=0.25, temperature=0.8, kl_coefficient=0.1, teacher_coefficient=0.3
)
LOSSES = ("magic", "grpo", "gspo", "dr_grpo", "cispo", "scalerl", "dppo")


def rows(dtype: torch.dtype) -> list[tuple[str, float]]:
    """Return (name, relative L2 error of the gradient) of each way to split the same mini-batch."""
    samples = off_policy_samples(dtype)
    found: list[tuple[str, float]] = []
    for loss in LOSSES:
        whole = gradient(learner(dtype, loss), samples)
        found.append(
            (f"{loss}: one response a micro-batch", error(gradient(learner(dtype, loss, budget=1), samples), whole))
        )
        shuffled = [samples[i] for i in np.random.default_rng(3).permutation(len(samples))]
        found.append(
            (f"{loss}: another order and packing", error(gradient(learner(dtype, loss, budget=70), shuffled), whole))
        )
        found.append((f"{loss}: two workers, gradients added", error(two_workers(dtype, loss, samples), whole)))
    return found


def off_policy_samples(dtype: torch.dtype) -> list[TrainSample]:
    """Return four groups of three responses with old, reference and sampler log-probs near the policy's."""
    rng = np.random.default_rng(0)
    plain = [
        TrainSample(
            prompt_tokens=frozen_tokens(np.arange(1 + group, 6 + 2 * group) % VOCABULARY),
            tokens=frozen_tokens(rng.integers(0, VOCABULARY, rng.integers(1, 25))),
            advantage=float(rng.normal()),
            group_index=group,
            sample_index=member,
            sampler_logprobs=frozen_floats([]),
            policy_version=0,
        )
        for group in range(4)
        for member in range(3)
    ]
    logprobs, _ = learner(dtype, "magic").logprobs(plain, CONTROLS.temperature)

    def near(
        values: np.ndarray[tuple[int], np.dtype[np.float32]], scale: float
    ) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        return frozen_floats(values + rng.normal(0, scale, len(values)))

    return [
        replace(
            s,
            old_logprobs=near(v, 0.3),
            ref_logprobs=near(v, 0.5),
            teacher_logprobs=near(v, 0.6),
            sampler_logprobs=near(v, 0.4),
        )
        for s, v in zip(plain, logprobs, strict=True)
    ]


def learner(dtype: torch.dtype, loss: str, budget: int = 10_000) -> LocalLearner:
    settings = ModelConfig(dtype="float32", micro_batch_tokens=budget, head_chunk_tokens=7)
    return LocalLearner(
        tiny_model(dtype),
        LearnerSettings(
            algorithm=AlgorithmConfig(loss=loss, correction="tis"),
            model=settings,
        ),
    )


def gradient(one: LocalLearner, samples: Sequence[TrainSample]) -> dict[str, Tensor]:
    batch = TrainBatch.of(samples, max_response_tokens=32)
    one.accumulate(batch.samples, one.objective.sample_weights(batch), CONTROLS)
    return {name: value.clone() for name, value in one.gradients().items()}


def two_workers(dtype: torch.dtype, loss: str, samples: Sequence[TrainSample]) -> dict[str, Tensor]:
    batch = TrainBatch.of(samples, max_response_tokens=32)
    total: dict[str, Tensor] = {}
    for share in ([0, 3, 4, 11], [1, 2, 5, 6, 7, 8, 9, 10]):
        worker = learner(dtype, loss)
        worker.accumulate([samples[i] for i in share], worker.objective.sample_weights(batch)[share], CONTROLS)
        for name, value in worker.gradients().items():
            total[name] = total[name] + value if name in total else value.clone()
    return total


def error(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    difference = sum(float((ours[k] - theirs[k]).double().square().sum()) for k in theirs)
    return (difference / sum(float(v.double().square().sum()) for v in theirs.values())) ** 0.5
