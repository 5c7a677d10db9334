"""The frozen reference model of the KL term: log-probs only, unmoved by anything that happens in a run."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from magicrl.config.schema import ModelConfig
from magicrl.models.scorer import PolicyScorer
from magicrl.records import FloatArray, TrainSample


class ReferenceModel:
    """pi_ref of the k3 term (recipe section 2).

    Args:
        model: loaded in the precision that it is to compute in; it is frozen here and belongs to the reference.
        valid_vocab: rows of the head that are words; None means all.
        model_config: micro-batch and head-chunk sizes.
    """

    def __init__(
        self, model: PreTrainedModel, *, valid_vocab: int | None = None, model_config: ModelConfig | None = None
    ) -> None:
        settings = model_config or ModelConfig()
        model.requires_grad_(False)
        self._scorer = PolicyScorer(
            model,
            valid_vocab=valid_vocab,
            micro_batch_tokens=settings.micro_batch_tokens,
            head_chunk_tokens=settings.head_chunk_tokens,
            share_prompts=settings.share_prompts,
        )

    def logprobs(self, samples: Sequence[TrainSample], temperature: float) -> tuple[list[FloatArray], list[FloatArray]]:
        """Log-probs and entropies of every response token at tau, ``[T]`` a sample."""
        return self._scorer.score(samples, temperature)
