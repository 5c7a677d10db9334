"""Do sequences that share a row stay apart? A probe of a loaded model.

magicrl packs sequences one after the other and keeps them apart in the attention alone. A layer that carries something
from token to token by other means (the recurrent and convolutional layers of hybrid models) takes it over from one
sequence into the next, in silence: log-probs and gradients are then those of another text.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from magicrl.models.packing import PackedBatch
from magicrl.models.shared_prompts import packed_with_shared_prompts
from magicrl.records import TrainSample, frozen_floats, frozen_tokens

Hidden = Callable[[PackedBatch], Tensor]
"""The last hidden states ``[N, d]`` of a micro-batch."""

_PROMPT, _RESPONSE, _WORDS = 3, 5, 4096
# What another sequence's text may change (experts in groups of other sizes round differently), and what another
# layout of the row may: a share of the hidden states' norm.
_TEXT, _LAYOUT = (1e-5, 1e-3), (1e-3, 5e-2)


@torch.no_grad()
def check_isolation(
    model: PreTrainedModel, *, valid_vocab: int | None = None, hidden: Hidden | None = None, shared: bool = True
) -> None:
    """Compare a response packed behind another one with the same behind another text, and with it alone.

    Args:
        model: a causal LM with magicrl's attention.
        valid_vocab: rows of its embedding that are words; None means all.
        hidden: how its hidden states are computed; default: its decoder, as it stands.
        shared: probe rows of one prompt and its responses too.

    Raises:
        ValueError: they differ; the text names the architecture.
    """
    compute = hidden or partial(_decoder_hidden, model)
    words = min(_WORDS, valid_vocab or int(cast(Any, model.get_input_embeddings()).weight.shape[0]))
    low = model.dtype not in (torch.float32, torch.float64)
    for pack in (PackedBatch.of, packed_with_shared_prompts) if shared else (PackedBatch.of,):
        first, other, second = _samples(words)
        behind, behind_other, alone = (
            compute(pack(given, model.device))[-_RESPONSE + 1 :].double()
            for given in ((first, second), (other, second), (second,))
        )
        leak, moved = (_distance(x, y) for x, y in ((behind_other, behind), (behind, alone)))
        if leak > _TEXT[low] or moved > _LAYOUT[low]:
            raise ValueError(
                f"{type(model).__name__} (model type {model.config.model_type!r}) mixes sequences that share a row: a "
                f"response's hidden states change by {max(leak, moved):.1g} with what stands before it. Its layers "
                "carry more than attention from token to token (recurrent or convolutional layers, as hybrid models "
                "have them), which magicrl cannot keep apart; use a model whose layers all attend, such as Llama, "
                "Qwen2, Qwen3 or Gemma"
            )


def _decoder_hidden(model: PreTrainedModel, batch: PackedBatch) -> Tensor:
    decoder = cast(Callable[..., Any], model.get_decoder())
    output = decoder(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        use_cache=False,
        attention_context=batch.attention,
    )
    return cast(Tensor, output.last_hidden_state)[0]


def _samples(words: int) -> tuple[TrainSample, TrainSample, TrainSample]:
    """Three responses to one prompt; no token of the second is the first's."""
    rng = np.random.default_rng(0)
    prompt, first, second = (rng.integers(0, words, size) for size in (_PROMPT, _RESPONSE, _RESPONSE))
    other = (first + max(1, words // 2)) % words
    return _sample(prompt, first, 0), _sample(prompt, other, 0), _sample(prompt, second, 1)


def _sample(prompt: NDArray[np.int64], tokens: NDArray[np.int64], index: int) -> TrainSample:
    return TrainSample(
        prompt_tokens=frozen_tokens(prompt),
        tokens=frozen_tokens(tokens),
        advantage=0.0,
        group_index=0,
        sample_index=index,
        sampler_logprobs=frozen_floats(np.zeros(len(tokens))),
        policy_version=0,
    )


def _distance(found: Tensor, expected: Tensor) -> float:
    norm = float(expected.norm())
    return float((found - expected).norm()) / norm if norm else 0.0
