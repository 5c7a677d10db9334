"""What one update minimises, for all of a mini-batch or one worker's share of it.

Three things make an update independent of how it is cut into micro-batches and spread over workers: every response's
weight comes from the whole mini-batch, the loss of a micro-batch is its additive share, and metrics are sums that are
divided once. ``LocalLearner`` and the ranks of ``distributed/learner`` run this same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from magicrl.algorithms.entropy import ControllerSettings, EntropyController, make_controller
from magicrl.algorithms.loss_terms import LossInputs, LossMetrics, LossOutputs, loss_terms
from magicrl.algorithms.losses import NONE, Need, correction_of, loss_row, needs_of, reducer_of, response_weights
from magicrl.config.algorithm_schema import AlgorithmConfig, EntropyConfig
from magicrl.config.errors import RecipeError
from magicrl.config.schema import AdamWConfig, ModelConfig, Section, TrainConfig
from magicrl.models.packing import PackedBatch
from magicrl.models.scorer import PolicyScorer
from magicrl.records import FloatArray, TrainBatch, TrainSample
from magicrl.training.protocols import Controls

T = TypeVar("T")
NO_CLIP = 0.2
"""Clip ratio handed to rows that do not clip; they ignore it."""


class LearnerSettings(Section):
    """What a recipe says about learning: the same object for a learner of one process and for every rank of many."""

    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: AdamWConfig = AdamWConfig()
    model: ModelConfig = ModelConfig()

    @staticmethod
    def of(config: TrainConfig) -> LearnerSettings:
        """A training recipe's."""
        return LearnerSettings(algorithm=config.algorithm, optimizer=config.optimizer, model=config.model)


class MicroBatch(NamedTuple):
    """Samples, what each of their loss tokens weighs (``[samples]``), and the samples packed."""

    samples: Sequence[TrainSample]
    weights: Tensor
    packed: PackedBatch


class Objective:
    """The loss row, reducer and correction that a recipe names, with their settings; each process resolves them itself.

    Attributes:
        row: of the loss table.
        correction: of the sampler.
        needs: what of the samples costs something and is read by one of them.
        needs_old_logprobs_first: whether the old log-probs are read whatever the number of SGD steps.

    Raises:
        RecipeError: an unknown name, a file or module that cannot be imported, or something else under that name.
    """

    def __init__(self, settings: LearnerSettings) -> None:
        algorithm = settings.algorithm
        # names travel to the ranks, never what they name: each process resolves them (`magicrl.registry`)
        self.row = brought("algorithm.loss", loss_row, algorithm.loss)
        self.correction = brought("algorithm.correction", correction_of, algorithm.correction)
        self._reducer = self.row.reducer
        if algorithm.reducer is not None:
            self._reducer = brought("algorithm.reducer", reducer_of, algorithm.reducer)
        self._algorithm = algorithm
        self.needs: frozenset[Need] = frozenset({*self.row.needs, *self.correction.needs})
        # read of a whole mini-batch, so they are taken before any update
        read_first = self.correction.batch_mask is not None or "old_logprobs" in needs_of(self.row.statistics)
        self.needs_old_logprobs_first = read_first

    def clip(self, algorithm: AlgorithmConfig) -> tuple[float, float]:
        """(eps_low, eps_high): a stage's or the recipe's, else the row's own."""
        low, high = self.row.clip or (NO_CLIP, NO_CLIP)
        return (
            low if algorithm.clip_low is None else algorithm.clip_low,
            high if algorithm.clip_high is None else algorithm.clip_high,
        )

    def statistics(self, batch: TrainBatch) -> Mapping[str, Any]:
        """What the row wants to know of the whole mini-batch; taken once, before it is cut or spread."""
        return {} if self.row.statistics is None else dict(self.row.statistics(batch))

    def sample_weights(self, batch: TrainBatch) -> Tensor:
        """What each loss token of each response weighs, ``[samples]`` float64, from the whole mini-batch."""
        return response_weights(
            self._reducer,
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
        statistics: Mapping[str, Any] = MappingProxyType({}),
        head_gradient: Callable[[], Tensor | None] = lambda: None,
        loss_scale: float = 1.0,
    ) -> LossMetrics:
        """Run forward and backward of each micro-batch; gradients add up where the parameters keep theirs.

        Args:
            scorer: gives log-probs and entropies.
            micro_batches: at least one.
            controls: of this update.
            statistics: of the whole mini-batch.
            head_gradient: what the head's backward pass adds its weight's gradient to; None leaves it to autograd.
            loss_scale: what the gradients are multiplied by (``training/loss_scale.py``); metrics are not.

        Returns:
            Sums over these samples; those of other shares add to them.
        """
        parts: list[LossMetrics] = []
        for job in micro_batches:
            logprobs, entropies = scorer.forward(job.packed, controls.temperature, head_gradient=head_gradient())
            outputs = self.terms(job, logprobs, entropies, controls, statistics)
            # at once, so that no more than one micro-batch's activations are held
            outputs.loss.backward(torch.full_like(outputs.loss, loss_scale))
            parts.append(outputs.metrics)
        return LossMetrics.merge(parts)

    def terms(
        self,
        job: MicroBatch,
        logprobs: Tensor,
        entropies: Tensor,
        controls: Controls,
        statistics: Mapping[str, Any] = MappingProxyType({}),
    ) -> LossOutputs:
        """The share in the mini-batch's loss of samples with these log-probs and entropies, ``[tokens]`` each."""
        # with alpha 0 the entropy is a metric alone, and the head's backward pass is spared its part
        with_gradient = controls.alpha or "entropy" in self.needs
        inputs, rows = loss_inputs(
            job.samples, job.packed.response_lengths, logprobs, entropies if with_gradient else entropies.detach()
        )
        return loss_terms(
            self.row,
            inputs,
            job.weights.to(logprobs.device)[rows],
            alpha=controls.alpha,
            beta=controls.kl_coefficient,
            clip_low=controls.clip_low,
            clip_high=controls.clip_high,
            coefficients=controls.coefficients,
            statistics=statistics,
            correction=self.correction,
            correction_cap=self._algorithm.correction_cap,
        )

    def check(self, samples: Sequence[TrainSample], controls: Controls) -> None:
        """Raise ``ValueError`` unless the samples carry what the loss's terms read, as the loss itself would."""
        if any(sample.ref_logprobs is None for sample in samples):
            if controls.kl_coefficient:
                raise ValueError(f"beta = {controls.kl_coefficient} needs the reference's log-probs")
            if "ref_logprobs" in self.needs:
                raise ValueError("the loss needs the reference's log-probs")
        if self.correction is not NONE and not all(len(sample.sampler_logprobs) for sample in samples):
            raise ValueError(f"correction {self.correction.name!r} needs the sampler's log-probs")


def brought(key: str, resolve: Callable[[str], T], reference: str) -> T:
    """What the recipe's ``key`` names; a mistake in it is the key's."""
    try:
        return resolve(reference)
    except ValueError as error:
        raise RecipeError(str(error), key=key) from error


def entropy_controller(config: EntropyConfig) -> EntropyController:
    """The controller of the recipe's ``[entropy]`` section."""
    settings = ControllerSettings(config.preset, config.alpha, config.target, config.step, config.maximum)
    return brought("entropy.controller", lambda reference: make_controller(reference, settings), config.controller)


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
    # all arrays: response tokens alone, sample after sample, as the packed batch has them
    lengths = np.array(response_lengths)

    def floats(kind: str) -> Tensor | None:
        arrays = [cast("FloatArray | None", getattr(sample, kind)) for sample in samples]
        present = [array for array in arrays if array is not None and len(array)]
        # None, not zeros: the loss then knows that rho is 1, or that there is no reference
        if not present:
            return None
        if len(present) < len(samples):
            raise ValueError(f"{len(present)} of {len(samples)} samples have {kind}; all of them need it, or none")
        return torch.from_numpy(np.concatenate(present)).to(logprobs.device, logprobs.dtype)

    def spread(values: Sequence[float] | Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values), lengths)).to(logprobs.device, dtype)

    def mask(arrays: Iterable[NDArray[np.bool_] | None]) -> Tensor:
        # no mask: every response token counts, the end token included (T_k)
        whole = [
            np.ones(len(s.tokens), dtype=np.bool_) if a is None else a for s, a in zip(samples, arrays, strict=True)
        ]
        return torch.from_numpy(np.concatenate(whole)).to(logprobs.device)

    masked = any(s.policy_mask is not None for s in samples)
    # which response each token is of: the reducer's weights are a number a response
    rows = spread(range(len(samples)), torch.int64)
    inputs = LossInputs(
        logprobs=logprobs,
        advantages=spread([s.advantage for s in samples], logprobs.dtype),
        loss_mask=mask(s.loss_mask for s in samples),
        sample_index=rows,
        old_logprobs=floats("old_logprobs"),
        sampler_logprobs=floats("sampler_logprobs"),
        ref_logprobs=floats("ref_logprobs"),
        entropy=entropies,
        group_index=spread([s.group_index for s in samples], torch.int64),
        policy_version=torch.from_numpy(np.concatenate([s.token_versions for s in samples])).to(logprobs.device),
        policy_mask=mask(s.policy_mask for s in samples) if masked else None,
    )
    return inputs, rows
