"""What one update minimises, for all of a mini-batch or one worker's share of it.

Three things make an update independent of how it is cut into micro-batches and spread over workers: every response's
weight comes from the whole mini-batch, the loss of a micro-batch is its additive share, and metrics are sums that are
divided once. ``LocalLearner`` and the ranks of ``distributed/learner`` run this same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from magicrl.algorithms.corrections import Correction
from magicrl.algorithms.loss_metrics import LossMetrics
from magicrl.algorithms.losses import LOSSES, LossInputs, LossOutputs, loss_terms
from magicrl.algorithms.reducers import response_weights
from magicrl.models.packing import PackedBatch
from magicrl.models.scorer import PolicyScorer
from magicrl.records import FloatArray, TrainBatch, TrainSample
from magicrl.training.protocols import Controls


class MicroBatch(NamedTuple):
    """Samples, what each of their loss tokens weighs (``[samples]``), and the samples packed."""

    samples: Sequence[TrainSample]
    weights: Tensor
    packed: PackedBatch


class Objective:
    """A row of the loss table with the settings that a recipe fixes.

    Args:
        loss: a row of ``algorithms.losses.LOSSES``.
        correction: sampler correction of the policy term.
        correction_cap: largest importance weight of a correction.
        kl_coefficient: beta; with 0 the KL of samples that have ``ref_logprobs`` is measured only.

    Raises:
        ValueError: unknown loss.
    """

    def __init__(
        self,
        loss: str,
        *,
        correction: Correction = "none",
        correction_cap: float = 2.0,
        kl_coefficient: float = 0.0,
    ) -> None:
        if loss not in LOSSES:
            raise ValueError(f"unknown loss {loss!r}; known: {', '.join(LOSSES)}")
        self._row = LOSSES[loss]
        self._correction: Correction = correction
        self._correction_cap = correction_cap
        self._beta = kl_coefficient

    def sample_weights(self, batch: TrainBatch) -> Tensor:
        """What each loss token of each response weighs, ``[samples]`` float64, from the whole mini-batch."""
        return response_weights(
            self._row.reducer,
            torch.tensor([sample.num_loss_tokens for sample in batch.samples]),
            torch.tensor([sample.group_index for sample in batch.samples]),
            num_loss_tokens=batch.num_loss_tokens,
            max_tokens=batch.max_response_tokens,
        )

    def accumulate(
        self,
        scorer: PolicyScorer,
        micro_batches: Iterable[MicroBatch],
        controls: Controls,
        *,
        head_gradient: Callable[[], Tensor | None] = lambda: None,
    ) -> LossMetrics:
        """Run forward and backward of each micro-batch; gradients add up where the parameters keep theirs.

        Args:
            scorer: gives log-probs and entropies.
            micro_batches: at least one.
            controls: of this update.
            head_gradient: what the head's backward pass adds its weight's gradient to; None leaves it to autograd.

        Returns:
            Sums over these samples; those of other shares add to them.
        """
        parts: list[LossMetrics] = []
        for job in micro_batches:
            outputs = self._terms(scorer, job, controls, head_gradient())
            outputs.loss.backward()
            parts.append(outputs.metrics)
        return LossMetrics.merge(parts)

    def _terms(self, scorer: PolicyScorer, job: MicroBatch, controls: Controls, head: Tensor | None) -> LossOutputs:
        logprobs, entropies = scorer.forward(job.packed, controls.temperature, head_gradient=head)
        inputs, rows = loss_inputs(
            job.samples, job.packed.response_lengths, logprobs, entropies if controls.alpha else entropies.detach()
        )
        return loss_terms(
            self._row,
            inputs,
            job.weights.to(scorer.device)[rows],
            alpha=controls.alpha,
            beta=self._beta,
            policy_weight=controls.policy_weight,
            clip_low=controls.clip_low,
            clip_high=controls.clip_high,
            correction=self._correction,
            correction_cap=self._correction_cap,
        )


def not_finite_loss(name: str, value: float, update: int) -> str:
    """What to tell when ``name`` (the loss, the gradient norm) of an update is not finite."""
    return (
        f"the {name} of update {update} is {value}; weights and optimizer are unchanged. "
        "Resume from the last checkpoint with a lower optimizer.learning_rate or entropy coefficient; "
        'if it happens at once, check the model with model.dtype = "float32"'
    )


def not_finite_weights(update: int, learning_rate: float) -> str:
    """What to tell when an update made weights that are not finite."""
    return (
        f"update {update} made weights that are not finite, with a learning rate of {learning_rate:g}; this step is "
        "in no checkpoint. Resume from the last one with a lower optimizer.learning_rate"
    )


def loss_inputs(
    samples: Sequence[TrainSample], response_lengths: Sequence[int], logprobs: Tensor, entropies: Tensor
) -> tuple[LossInputs, Tensor]:
    """The loss's view of a micro-batch, and ``[tokens]`` the row of each token's sample.

    Raises:
        ValueError: some samples carry a kind of log-probs and others do not.
    """
    lengths = np.array(response_lengths)

    def floats(kind: str) -> Tensor | None:
        arrays = [cast("FloatArray | None", getattr(sample, kind)) for sample in samples]
        present = [array for array in arrays if array is not None and len(array)]
        if not present:
            return None
        if len(present) < len(samples):
            raise ValueError(f"{len(present)} of {len(samples)} samples have {kind}; all of them need it, or none")
        return torch.from_numpy(np.concatenate(present)).to(logprobs.device, logprobs.dtype)

    def spread(values: Sequence[float] | Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values), lengths)).to(logprobs.device, dtype)

    masks = [np.ones(len(s.tokens), dtype=np.bool_) if s.loss_mask is None else s.loss_mask for s in samples]
    policy_masks = [np.ones(len(s.tokens), dtype=np.bool_) if s.policy_mask is None else s.policy_mask for s in samples]
    masked = any(s.policy_mask is not None for s in samples)
    versions = np.concatenate([s.token_versions for s in samples])
    rows = spread(range(len(samples)), torch.int64)
    inputs = LossInputs(
        logprobs=logprobs,
        advantages=spread([s.advantage for s in samples], logprobs.dtype),
        loss_mask=torch.from_numpy(np.concatenate(masks)).to(logprobs.device),
        sample_index=rows,
        old_logprobs=floats("old_logprobs"),
        sampler_logprobs=floats("sampler_logprobs"),
        ref_logprobs=floats("ref_logprobs"),
        entropy=entropies,
        group_index=spread([s.group_index for s in samples], torch.int64),
        policy_version=torch.from_numpy(versions).to(logprobs.device),
        policy_mask=torch.from_numpy(np.concatenate(policy_masks)).to(logprobs.device) if masked else None,
    )
    return inputs, rows
