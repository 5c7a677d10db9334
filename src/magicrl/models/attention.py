"""One attention backend for every HF decoder: packed sequences when learning, a slot cache when decoding.

transformers sends the attention of every decoder that follows its attention interface (Llama, Qwen2,
Qwen3, Gemma, SmolLM, ...) to a registered function and passes unknown keyword arguments of the model's
``forward`` through to it. magicrl registers one such function under the name ``magicrl``; the keyword
argument ``attention_context`` carries what to do. So no model is reimplemented, and nothing is padded:
linear layers see ``[1, tokens, d]`` and only the context knows where sequences begin and end.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

ATTENTION_NAME = "magicrl"


class AttentionContext(Protocol):
    """What attention means in the present forward pass.

    A context may have an attribute ``longest``, the most tokens that any query sees; without it a sliding window is
    compared with the tokens of the whole row.
    """

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attend within this layer.

        Args:
            layer: index of the layer.
            query: ``[1, heads, tokens, head_dim]``, rotary embedding applied.
            key: ``[1, kv_heads, tokens, head_dim]``, rotary embedding applied.
            value: ``[1, kv_heads, tokens, head_dim]``.
            scaling: factor on the scores.

        Returns:
            ``[1, tokens, heads, head_dim]``.
        """
        ...


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    context = cast("AttentionContext | None", kwargs.get("attention_context"))
    if context is None:
        raise ValueError(
            "a model with magicrl's attention needs attention_context=...; load the model with "
            "attn_implementation='sdpa' to use it outside magicrl"
        )
    if dropout:
        raise ValueError(f"attention dropout must be 0 in magicrl, the model's config says {dropout}")
    for quirk in ("softcap", "s_aux"):
        if kwargs.get(quirk) is not None:
            raise ValueError(f"attention with {quirk} ({type(module).__name__}) is not supported; use another model")
    # a packed row is longer than any of its sequences, and within one no window may cut
    longest = cast(int, getattr(context, "longest", query.shape[2]))
    if kwargs.get("sliding_window") is not None and kwargs["sliding_window"] < longest:
        raise ValueError(
            f"sliding-window attention ({kwargs['sliding_window']} tokens) is not supported; "
            "use a model with full attention or set use_sliding_window=false in its config"
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer = cast(int, module.layer_idx)
    return context.attend(layer, query, key, value, scale), None


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    """The context knows which keys a query may see; transformers builds no mask."""


def register_attention() -> None:
    """Make ``attn_implementation="magicrl"`` known to transformers. Safe to call twice."""
    AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
