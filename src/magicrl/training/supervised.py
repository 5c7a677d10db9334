"""Supervised steps with the learner of reinforcement learning: another row of the loss table, nothing else.

The row is ``nll``: the mean negative log-likelihood of the response tokens, the end token included; prompts carry no
loss. Demonstrations (``sft.py``) and a model's own correct responses (control arms) go through the same function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from magicrl.config.schema import AlgorithmConfig
from magicrl.records import TokenArray, TrainBatch, TrainSample, frozen_floats
from magicrl.training.memory import release_free_memory
from magicrl.training.protocols import Controls, Learner

SUPERVISED = AlgorithmConfig(loss="nll")
"""The ``algorithm`` of a learner's settings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisedStep:
    """What one supervised step did.

    Attributes:
        index: its number within the schedule, from 0.
        loss: mean nats per response token, before the update.
        learning_rate: of this update.
        tokens: prompt and response tokens of the batch.
        loss_tokens: response tokens of the batch.
    """

    index: int
    loss: float
    learning_rate: float
    tokens: int
    loss_tokens: int


def supervised_sample(prompt_tokens: TokenArray, response_tokens: TokenArray, index: int) -> TrainSample:
    """A sample for the ``nll`` row: advantage 1, its own group, every response token in the loss."""
    return TrainSample(
        prompt_tokens=prompt_tokens,
        tokens=response_tokens,
        advantage=1.0,
        group_index=index,
        sample_index=0,
        sampler_logprobs=frozen_floats(np.zeros(len(response_tokens))),
        policy_version=0,
    )


def supervised_steps(
    learner: Learner,
    batches: Iterable[Sequence[TrainSample]],
    schedule: Callable[[int], float],
    *,
    first: int = 0,
    on_step: Callable[[SupervisedStep], None] | None = None,
) -> list[SupervisedStep]:
    """Make one SGD step a batch, whatever the samples' source (demonstrations, a model's own correct responses).

    Args:
        learner: with the loss row ``nll``.
        batches: the samples of each step.
        schedule: learning rate of step ``i``.
        first: number of the first step, when an interrupted run goes on.
        on_step: called after each step.

    Raises:
        FloatingPointError: a loss or gradient is not finite (from the learner).
    """
    steps: list[SupervisedStep] = []
    for index, samples in enumerate(batches, start=first):
        batch = TrainBatch.of(samples)
        rate = schedule(index)
        metrics = learner.update(batch, Controls(learning_rate=rate))
        release_free_memory()
        step = SupervisedStep(
            index=index,
            loss=float(metrics.values["loss"]),
            learning_rate=rate,
            tokens=sum(len(sample) for sample in samples),
            loss_tokens=batch.num_loss_tokens,
        )
        steps.append(step)
        if on_step is not None:
            on_step(step)
    return steps


def phase_schedule(
    rate: float, *, steps: int, warmup_steps: int, decay: Literal["constant", "linear", "cosine"]
) -> Callable[[int], float]:
    """Learning rate of step 0 to ``steps - 1``: warm-up to ``rate``, then down to a tenth of it.

    Example:
        >>> at = phase_schedule(1.0, steps=5, warmup_steps=2, decay="linear")
        >>> [round(at(i), 3) for i in range(5)]
        [0.5, 1.0, 1.0, 0.55, 0.1]
    """

    def at(step: int) -> float:
        if step < warmup_steps:
            return rate * (step + 1) / warmup_steps
        if decay == "constant":
            return rate
        gone = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps - 1))
        left = 1 - gone if decay == "linear" else (1 + math.cos(math.pi * gone)) / 2
        return rate * (0.1 + 0.9 * left)

    return at
