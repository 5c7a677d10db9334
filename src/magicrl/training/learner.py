"""The learner of one process: Eq. 3.1 (or another row of the loss table) from a batch to new weights.

Three things make an update independent of how it is cut into micro-batches: every response's weight comes from
the whole mini-batch, the loss of a micro-batch is its additive share, and metrics are sums that are divided
once. So the same code with a share of the samples is one rank's part of a distributed update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from magicrl.algorithms.corrections import Correction
from magicrl.algorithms.loss_metrics import LossMetrics
from magicrl.algorithms.losses import LOSSES, LossInputs, LossOutputs, loss_terms
from magicrl.algorithms.reducers import response_weights
from magicrl.config.schema import ModelConfig, OptimizerConfig
from magicrl.models.loading import resolve_dtype, save_policy
from magicrl.models.packing import PackedBatch
from magicrl.models.scorer import PolicyScorer
from magicrl.records import FloatArray, TrainBatch, TrainSample
from magicrl.training.lora import LoraAdapters
from magicrl.training.optimizer import MasterOptimizer
from magicrl.training.protocols import Controls, NotFiniteError, UpdateMetrics


class LocalLearner:
    """Owns a model, its float32 master weights and AdamW; implements ``Learner``.

    Args:
        model: the start model in float32 (float64 is kept, for tests); it belongs to the learner from here on
            and is given the compute precision ``model_config.dtype``.
        tokenizer: written beside the weights by ``save_hf``.
        valid_vocab: rows of the output head that are words; None means all.
        loss: a row of ``algorithms.losses.LOSSES``.
        optimizer: AdamW's settings; the rate of each update comes with its ``Controls``.
        model_config: precision, micro-batch size, gradient checkpointing, LoRA.
        correction: sampler correction of the policy term: ``none``, ``tis`` or ``mis``.
        correction_cap: largest importance weight of a correction.
        kl_coefficient: beta; with 0 the KL of samples that have ``ref_logprobs`` is measured only.
        max_response_tokens: T, for the rows whose reducer divides by it (Dr.GRPO).

    Raises:
        ValueError: unknown loss, a model that cannot be trained, or LoRA without PEFT.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        valid_vocab: int | None = None,
        loss: str = "magic",
        optimizer: OptimizerConfig | None = None,
        model_config: ModelConfig | None = None,
        correction: Correction = "none",
        correction_cap: float = 2.0,
        kl_coefficient: float = 0.0,
        max_response_tokens: int | None = None,
    ) -> None:
        if loss not in LOSSES:
            raise ValueError(f"unknown loss {loss!r}; known: {', '.join(LOSSES)}")
        settings = model_config or ModelConfig()
        self._row = LOSSES[loss]
        self._tokenizer = tokenizer
        self._correction: Correction = correction
        self._correction_cap = correction_cap
        self._beta = kl_coefficient
        self._max_response_tokens = max_response_tokens
        model.requires_grad_(True)
        self._lora = None if settings.lora is None else LoraAdapters(model, settings.lora)
        self._model = model if self._lora is None else self._lora.model
        compute = torch.float64 if model.dtype == torch.float64 else resolve_dtype(settings.dtype)
        trained = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        self._optimizer = MasterOptimizer(trained, optimizer or OptimizerConfig(), compute)
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

    def update(self, batch: TrainBatch, controls: Controls) -> UpdateMetrics:
        """One SGD step on the mini-batch; see ``Learner.update``.

        Raises:
            NotFiniteError: loss or gradient norm is not finite (weights and moments are as before), or the new
                weights are not: the learner is then of no more use.
            ValueError: the batch has no loss tokens, or samples disagree in what log-probs they carry.
        """
        metrics = self.accumulate(batch.samples, self.sample_weights(batch), controls)
        norm = self._optimizer.gradient_norm()
        values = metrics.values()
        for name, value in (("loss", values["loss"]), ("gradient norm", norm)):
            if not math.isfinite(value):
                culprit = self._culprit(batch, controls)
                self._optimizer.forget()
                raise NotFiniteError(
                    f"the {name} of update {self.version + 1} is {value}; weights and optimizer are unchanged. "
                    "Resume from the last checkpoint with a lower optimizer.learning_rate or entropy coefficient; "
                    'if it happens at once, check the model with model.dtype = "float32"',
                    culprit,
                )
        self._optimizer.step(controls.learning_rate, norm)
        if not self._optimizer.weights_are_finite():
            raise NotFiniteError(
                f"update {self.version} made weights that are not finite, with a learning rate of "
                f"{controls.learning_rate:g}; this step is in no checkpoint. Resume from the last one with a lower "
                "optimizer.learning_rate",
                None,
            )
        return UpdateMetrics(values={**values, "grad_norm": norm, "learning_rate": controls.learning_rate})

    def _culprit(self, batch: TrainBatch, controls: Controls) -> tuple[int, int] | None:
        """(group, sample) of the first sample whose own loss or gradient is not finite. Spoils the gradients."""
        weights = self.sample_weights(batch)
        for index, sample in enumerate(batch.samples):
            self._optimizer.forget()
            loss = self.accumulate([sample], weights[index : index + 1], controls).values()["loss"]
            if not (math.isfinite(loss) and math.isfinite(self._optimizer.gradient_norm())):
                return sample.group_index, sample.sample_index
        return None

    def sample_weights(self, batch: TrainBatch) -> Tensor:
        """What each loss token of each response weighs, ``[samples]`` float64, from the whole mini-batch."""
        return response_weights(
            self._row.reducer,
            torch.tensor([sample.num_loss_tokens for sample in batch.samples]),
            torch.tensor([sample.group_index for sample in batch.samples]),
            num_loss_tokens=batch.num_loss_tokens,
            max_tokens=self._max_response_tokens,
        )

    def accumulate(self, samples: Sequence[TrainSample], weights: Tensor, controls: Controls) -> LossMetrics:
        """Add these samples' share of the mini-batch's gradient to ``gradients()``, one micro-batch at a time.

        Args:
            samples: all of a mini-batch, or one worker's share of it.
            weights: ``[samples]``, these samples' entries of the whole mini-batch's ``sample_weights``.
            controls: of this update.

        Returns:
            Sums over these samples; those of other shares add to them.
        """
        parts: list[LossMetrics] = []
        for indices, packed in self._scorer.micro_batches(samples):
            outputs = self._micro_batch([samples[i] for i in indices], packed, weights[indices], controls)
            outputs.loss.backward()
            parts.append(outputs.metrics)
        return LossMetrics.merge(parts)

    def gradients(self) -> dict[str, Tensor]:
        """Gradients accumulated since the last update, by parameter name, in the masters' precision."""
        return self._optimizer.gradients()

    def _micro_batch(
        self, samples: Sequence[TrainSample], packed: PackedBatch, weights: Tensor, controls: Controls
    ) -> LossOutputs:
        device = self._scorer.device
        head = self._optimizer.gradient_of(self._scorer.head.weight)
        logprobs, entropies = self._scorer.forward(packed, controls.temperature, head_gradient=head)
        inputs, rows = loss_inputs(
            samples, packed.response_lengths, logprobs, entropies if controls.alpha else entropies.detach()
        )
        return loss_terms(
            self._row,
            inputs,
            weights.to(device)[rows],
            alpha=controls.alpha,
            beta=self._beta,
            policy_weight=controls.policy_weight,
            clip_low=controls.clip_low,
            clip_high=controls.clip_high,
            correction=self._correction,
            correction_cap=self._correction_cap,
        )

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
        policy_version=spread([s.policy_version for s in samples], torch.int64),
    )
    return inputs, rows
