"""The learner of one process: Eq. 3.1 (or another row of the loss table) from a batch to new weights.

What is minimised is ``objective.py``'s; here are the weights, their optimizer, and what is kept and written of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from magicrl.algorithms.losses import LossMetrics
from magicrl.models.loading import device_name, peak_mb, resolve_dtype, save_policy
from magicrl.models.scorer import PolicyScorer
from magicrl.records import FloatArray, TrainBatch, TrainSample
from magicrl.training.lora import LoraAdapters
from magicrl.training.objective import LearnerSettings, MicroBatch, Objective, not_finite_loss, not_finite_weights
from magicrl.training.optimizer import MasterOptimizer
from magicrl.training.protocols import Controls, NotFiniteError, UpdateMetrics


class LocalLearner:
    """Owns a model, its float32 master weights and AdamW; implements ``Learner``.

    Args:
        model: the start model in float32 (float64 is kept, for tests); it belongs to the learner from here on
            and is given the compute precision ``model.dtype``.
        tokenizer: written beside the weights by ``save_hf``.
        valid_vocab: rows of the output head that are words; None means all.
        learning: what the recipe says about learning; the rate of each update comes with its ``Controls``.

    Raises:
        ValueError: unknown loss, a model that cannot be trained, or LoRA without PEFT.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        learning: LearnerSettings | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        valid_vocab: int | None = None,
    ) -> None:
        learning = learning or LearnerSettings()
        self._objective = Objective(learning)
        settings = learning.model
        self._tokenizer = tokenizer
        model.requires_grad_(True)
        self._lora = None if settings.lora is None else LoraAdapters(model, settings.lora)
        self._model = model if self._lora is None else self._lora.model
        compute = torch.float64 if model.dtype == torch.float64 else resolve_dtype(settings.dtype)
        trained = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        self._optimizer = MasterOptimizer(trained, learning.optimizer, compute)
        for parameter in self._model.parameters():
            # parameters only: buffers such as the rotary frequencies stay precise
            parameter.data = parameter.data.to(compute)
        self._scorer = PolicyScorer(
            self._model,
            valid_vocab=valid_vocab,
            micro_batch_tokens=settings.micro_batch_tokens,
            head_chunk_tokens=settings.head_chunk_tokens,
            share_prompts=settings.share_prompts,
            checkpoint_above_tokens=0 if settings.gradient_checkpointing else settings.checkpoint_above_tokens,
        )

    @property
    def scorer(self) -> PolicyScorer:
        """What turns samples into micro-batches and these into log-probs."""
        return self._scorer

    @property
    def version(self) -> int:
        """Number of updates made."""
        return self._optimizer.steps

    @property
    def devices(self) -> tuple[str, ...]:
        """The one that it computes on; see ``OnDevices``."""
        return (device_name(self._scorer.device),)

    def peak_mb(self) -> float:
        """Most memory of this process so far, an engine in it included."""
        return peak_mb(self._scorer.device)

    def update(self, batch: TrainBatch, controls: Controls) -> UpdateMetrics:
        """One SGD step on the mini-batch; see ``Learner.update``.

        Raises:
            NotFiniteError: loss or gradient norm is not finite (weights and moments are as before), or the new
                weights are not: the learner is then of no more use.
            ValueError: the batch has no loss tokens, or samples disagree in what log-probs they carry.
        """
        weights, statistics = self.sample_weights(batch), self._objective.statistics(batch)
        metrics = self.accumulate(batch.samples, weights, controls, statistics)
        norm = self._optimizer.gradient_norm()
        values = metrics.values()
        for name, value in (("loss", values["loss"]), ("gradient norm", norm)):
            if not math.isfinite(value):
                culprit = self._culprit(batch, controls, statistics)
                self._optimizer.forget()
                raise NotFiniteError(not_finite_loss(name, value, self.version + 1), culprit)
        self._optimizer.step(controls.learning_rate, norm)
        if not self._optimizer.weights_are_finite():
            raise NotFiniteError(not_finite_weights(self.version, controls.learning_rate), None)
        return UpdateMetrics(values={**values, "grad_norm": norm, "learning_rate": controls.learning_rate})

    def _culprit(self, batch: TrainBatch, controls: Controls, statistics: Mapping[str, Any]) -> tuple[int, int] | None:
        """(group, sample) of the first sample whose own loss or gradient is not finite. Spoils the gradients."""
        weights = self.sample_weights(batch)
        for index, sample in enumerate(batch.samples):
            self._optimizer.forget()
            loss = self.accumulate([sample], weights[index : index + 1], controls, statistics).values()["loss"]
            if not (math.isfinite(loss) and math.isfinite(self._optimizer.gradient_norm())):
                return sample.group_index, sample.sample_index
        return None

    def sample_weights(self, batch: TrainBatch) -> Tensor:
        """What each loss token of each response weighs, ``[samples]`` float64, from the whole mini-batch."""
        return self._objective.sample_weights(batch)

    def accumulate(
        self,
        samples: Sequence[TrainSample],
        weights: Tensor,
        controls: Controls,
        statistics: Mapping[str, Any] = MappingProxyType({}),
    ) -> LossMetrics:
        """Add these samples' share of the mini-batch's gradient to ``gradients()``, one micro-batch at a time.

        Args:
            samples: all of a mini-batch, or one worker's share of it.
            weights: ``[samples]``, these samples' entries of the whole mini-batch's ``sample_weights``.
            controls: of this update.
            statistics: of the whole mini-batch.

        Returns:
            Sums over these samples; those of other shares add to them.
        """
        jobs = (
            MicroBatch([samples[i] for i in members], weights[members], packed)
            for members, packed in self._scorer.micro_batches(samples)
        )
        head = self._scorer.head.weight
        return self._objective.accumulate(
            self._scorer,
            jobs,
            controls,
            statistics=statistics,
            head_gradient=lambda: self._optimizer.gradient_of(head),
        )

    def gradients(self) -> dict[str, Tensor]:
        """Gradients accumulated since the last update, by parameter name, in the masters' precision."""
        return self._optimizer.gradients()

    def logprobs(self, samples: Sequence[TrainSample], temperature: float) -> tuple[list[FloatArray], list[FloatArray]]:
        """Log-probs and entropies of every response token, ``[T]`` a sample, without gradient."""
        return self._scorer.score(samples, temperature)

    def weights(self) -> Mapping[str, Any]:
        """Present weights by HF parameter name in the compute precision, LoRA merged; a tied weight stands once."""
        if self._lora is not None:
            return self._lora.merged_weights()
        return {name: parameter.detach() for name, parameter in self._model.named_parameters()}

    def state(self) -> Mapping[str, Any]:
        """Masters, moments and counters; see ``MasterOptimizer.state``. With LoRA the adapters' alone."""
        return self._optimizer.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Inverse of ``state``: what follows is bit for bit what would have followed."""
        self._optimizer.restore(state)

    def save_hf(
        self,
        folder: Path,
        *,
        extra_files: Mapping[str, str] | None = None,
        generation: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a model folder in the compute precision, LoRA merged; see ``save_policy`` for what goes with it.

        Raises:
            ValueError: the learner was made without a tokenizer.
        """
        if self._tokenizer is None:
            raise ValueError("save_hf needs the tokenizer; give it to LocalLearner(tokenizer=...)")
        model = self._model if self._lora is None else self._lora.merged_model()
        save_policy(model, self._tokenizer, folder, extra_files=extra_files, generation=generation)
