"""The loss that one update minimises, over all of a mini-batch or over one worker's share of it.

Three properties make an update independent of the split into micro-batches and over workers. Every response's weight is
computed from the whole mini-batch. The loss of a micro-batch is an additive share. Metrics are sums that are divided
once. `LocalLearner` and the ranks of ``distributed/learner`` run this code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from magicrl.algorithms.entropy import ControllerSettings, EntropyController, make_controller
from magicrl.algorithms.loss_terms import LossMetrics, LossOutputs, loss_terms
from magicrl.algorithms.losses import loss_row
from magicrl.algorithms.token_weights import (
    NONE,
    NOT_GIVEN,
    LossInputs,
    Need,
    correction_of,
    needs_of,
    reducer_of,
    response_weights,
)
from magicrl.config.algorithm_schema import AlgorithmConfig, EntropyConfig
from magicrl.config.errors import RecipeError
from magicrl.config.model_schema import AdamWConfig, ModelConfig
from magicrl.config.schema import TrainConfig
from magicrl.config.section import Section
from magicrl.models.packing import PackedBatch
from magicrl.models.scorer import PolicyScorer
from magicrl.records import FloatArray, TrainBatch, TrainSample
from magicrl.registry import is_builtin
from magicrl.training.protocols import Controls

T = TypeVar("T")
NO_CLIP = 0.2
"""Clip ratio passed to loss rows that do not clip. They ignore it."""


class LearnerSettings(Section):
    """Recipe sections that a learner reads, in one process or in every rank."""

    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: AdamWConfig = AdamWConfig()
    model: ModelConfig = ModelConfig()

    @staticmethod
    def of(config: TrainConfig) -> LearnerSettings:
        """Return the sections of a training recipe."""
        return LearnerSettings(algorithm=config.algorithm, optimizer=config.optimizer, model=config.model)


MicroBatch: TypeAlias = tuple[Sequence[TrainSample], Tensor, PackedBatch]
"""Samples, the weight of each of their loss tokens (``[samples]``), and the packed samples."""


class Objective:
    """Loss row, reducer and correction of a recipe, with their settings. Each process resolves the names itself.

    Attributes:
        row: Row of the loss table.
        correction: Correction of the mismatch between sampler and learner.
        needs: Optional sample fields that the loss row, its statistics or the correction read.
        needs_old_logprobs_first: Whether the old log-probs are read whatever the number of updates per rollout batch.

    Raises:
        RecipeError: A name is unknown, or a file or module cannot be imported, or holds something else under that name.
    """

    def __init__(self, settings: LearnerSettings) -> None:
        algorithm = settings.algorithm
        # Ranks receive names, never objects: each process resolves them (`magicrl.registry`).
        self.row = resolve_setting("algorithm.loss", loss_row, algorithm.loss)
        self.correction = resolve_setting("algorithm.correction", correction_of, algorithm.correction)
        self._reducer = self.row.reducer
        if algorithm.reducer is not None:
            self._reducer = resolve_setting("algorithm.reducer", reducer_of, algorithm.reducer)
        self._algorithm = algorithm
        read_first = needs_of(self.row.statistics)
        self.needs: frozenset[Need] = frozenset({*self.row.needs, *self.correction.needs, *read_first})
        # These read the whole mini-batch, so they need the old log-probs before the first update.
        self.needs_old_logprobs_first = self.correction.batch_mask is not None or "old_logprobs" in read_first

    def clip(self, algorithm: AlgorithmConfig) -> tuple[float, float]:
        """Return (eps_low, eps_high): those of the stage or recipe, else the defaults of the loss row."""
        low, high = self.row.clip or (NO_CLIP, NO_CLIP)
        return (
            low if algorithm.clip_low is None else algorithm.clip_low,
            high if algorithm.clip_high is None else algorithm.clip_high,
        )

    def statistics(self, batch: TrainBatch) -> Mapping[str, Any]:
        """Return the row's statistics of the whole mini-batch. They are computed once, before it is split."""
        if self.row.statistics is None:
            return {}
        found: object = self.row.statistics(batch)
        if not isinstance(found, Mapping):
            raise ValueError(f"{self._named('loss')}: statistics must return a dict; got {type(found).__name__}")
        return dict(found)

    def sample_weights(self, batch: TrainBatch) -> Tensor:
        """Return the weight of each loss token of each response, ``[samples]`` float64, from the whole mini-batch."""
        return response_weights(
            self._reducer,
            torch.tensor([sample.num_loss_tokens for sample in batch.samples]),
            torch.tensor([sample.group_index for sample in batch.samples]),
            num_loss_tokens=batch.num_loss_tokens,
            max_tokens=batch.max_response_tokens,
            named=self._named("loss" if self._algorithm.reducer is None else "reducer"),
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
        """Run forward and backward of each micro-batch. The gradients add up in the parameters.

        Args:
            scorer: Model that returns log-probs and entropies.
            micro_batches: At least one.
            controls: Settings of this update.
            statistics: Statistics of the whole mini-batch.
            head_gradient: Returns the buffer that the head's backward pass adds the gradient of its weight to. None
                leaves the gradient to autograd.
            loss_scale: Factor that scales the gradients, but not the metrics (`LossScale`).

        Returns:
            Sums over these samples. Those of other shares add to them.
        """
        parts: list[LossMetrics] = []
        for job in micro_batches:
            logprobs, entropies = scorer.forward(job[-1], controls.temperature, head_gradient=head_gradient())
            outputs = self.terms(job, logprobs, entropies, controls, statistics)
            # Backward follows at once, so that only one micro-batch's activations are in memory.
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
        """Return the share of these samples in the mini-batch's loss. Log-probs and entropies are ``[tokens]``."""
        # With alpha 0 the entropy is only a metric, and the head's backward pass skips it.
        with_gradient = controls.alpha or "entropy" in self.needs
        samples, weights, packed = job
        inputs = loss_inputs(
            samples, packed.response_lengths, logprobs, entropies if with_gradient else entropies.detach()
        )._replace(
            clip_low=controls.clip_low,
            clip_high=controls.clip_high,
            cap=self._algorithm.correction_cap,
            coefficients=controls.coefficients,
            statistics=statistics,
        )
        return loss_terms(
            self.row,
            inputs,
            weights.to(logprobs.device)[inputs.sample_index],
            alpha=controls.alpha,
            beta=controls.kl_coefficient,
            teacher=controls.teacher_coefficient,
            correction=self.correction,
            named=self._named("loss"),
        )

    def advice(self, metrics: LossMetrics) -> str:
        """Return what to do about a loss with these metrics, or about its gradient, that is not finite."""
        part = metrics.faulty()
        if part is not None and not is_builtin(part, getattr(self._algorithm, part)):
            return (
                f"{self._named(part)} returns numbers that are not finite, although the log-probs are: look in it for "
                "a division by 0, log(0) or exp of a large number"
            )
        advice = (
            "Start a new run with a lower optimizer.learning_rate or entropy coefficient. "
            'If the first update fails, check the model with model.dtype = "float32"'
        )
        if is_builtin("loss", self._algorithm.loss):
            return advice
        # Autograd multiplies an infinite derivative by the 0 of the branch that was not selected.
        return (
            f"{advice}, and {self._named('loss')} for an infinite derivative (sqrt, log or division at 0), which "
            "torch.where does not hide"
        )

    def _named(self, part: str) -> str:
        """Return the setting of a part with its value."""
        return f"algorithm.{part} = {getattr(self._algorithm, part)!r}"

    def check(self, samples: Sequence[TrainSample], controls: Controls) -> None:
        """Raise ``ValueError`` unless the samples carry the log-probs that the loss reads."""
        if any(sample.ref_logprobs is None for sample in samples):
            if controls.kl_coefficient:
                raise ValueError(f"beta = {controls.kl_coefficient} needs log-probs of the reference model")
            if "ref_logprobs" in self.needs:
                raise ValueError("the loss needs log-probs of the reference model")
        if self.correction is not NONE and not all(len(sample.sampler_logprobs) for sample in samples):
            raise ValueError(f"correction {self.correction.name!r} needs the sampler's log-probs")


def resolve_setting(key: str, resolve: Callable[[str], T], reference: str) -> T:
    """Return the object that the recipe's ``key`` names. An error names the key."""
    try:
        return resolve(reference)
    except ValueError as error:
        raise RecipeError(str(error), key=key) from error


def entropy_controller(config: EntropyConfig) -> EntropyController:
    """Return the controller of the recipe's ``[entropy]`` section."""
    settings = ControllerSettings(config.preset, config.alpha, config.target, config.step, config.maximum)
    return resolve_setting(
        "entropy.controller", lambda reference: make_controller(reference, settings), config.controller
    )


def loss_inputs(
    samples: Sequence[TrainSample], response_lengths: Sequence[int], logprobs: Tensor, entropies: Tensor
) -> LossInputs:
    """Return the loss's view of a micro-batch.

    All arrays hold response tokens only, sample after sample, in the order of the packed batch.

    Raises:
        ValueError: Only some of the samples carry a kind of log-probs.
    """
    lengths = np.array(response_lengths)

    def floats(kind: str) -> Tensor | None:
        arrays = [cast("FloatArray | None", getattr(sample, kind)) for sample in samples]
        present = [array for array in arrays if array is not None and len(array)]
        # None, not zeros: the loss then knows that rho is 1, or that there is no reference model.
        if not present:
            return None
        if len(present) < len(samples):
            raise ValueError(f"{len(present)} of {len(samples)} samples have {kind}; all of them need it, or none")
        return torch.from_numpy(np.concatenate(present)).to(logprobs.device, logprobs.dtype)

    def spread(values: Sequence[float] | Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values), lengths)).to(logprobs.device, dtype)

    def mask(arrays: Iterable[NDArray[np.bool_] | None]) -> Tensor:
        # Without a mask every response token counts, including the end token (T_k).
        whole = [
            np.ones(len(s.tokens), dtype=np.bool_) if a is None else a for s, a in zip(samples, arrays, strict=True)
        ]
        return torch.from_numpy(np.concatenate(whole)).to(logprobs.device)

    masked = any(s.policy_mask is not None for s in samples)
    old, sampler = floats("old_logprobs"), floats("sampler_logprobs")
    return LossInputs(
        logprobs=logprobs,
        advantages=spread([s.advantage for s in samples], logprobs.dtype),
        loss_mask=mask(s.loss_mask for s in samples),
        sample_index=spread(range(len(samples)), torch.int64),
        old_logprobs=NOT_GIVEN if old is None else old,
        sampler_logprobs=NOT_GIVEN if sampler is None else sampler,
        ref_logprobs=floats("ref_logprobs"),
        teacher_logprobs=floats("teacher_logprobs"),
        entropy=entropies,
        group_index=spread([s.group_index for s in samples], torch.int64),
        policy_version=torch.from_numpy(np.concatenate([s.token_versions for s in samples])).to(logprobs.device),
        policy_mask=mask(s.policy_mask for s in samples) if masked else None,
    )
