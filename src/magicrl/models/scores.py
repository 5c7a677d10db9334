"""Rules of a layer for its attention scores in addition to scaling: windows, chunks, a soft cap, sinks.

Sliding windows (Mistral, Gemma, gpt-oss) and chunks (Llama 4) hide distant keys. A soft cap (Gemma 2) is ``cap *
tanh(score / cap)``. A sink (gpt-oss) is one more score per head that takes part in the softmax and has no value.
transformers passes them as arguments of its attention interface and in the masks that it builds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from magicrl.models.exact import attend_exactly
from magicrl.models.memory_efficient import widened_attention

WIDENED_UP_TO = 256
"""Width up to which torch's CPU attention is faster in float32 than in bfloat16, four times at 48 tokens, because
bfloat16 packs its operands for every block. Above it both are equally fast, and bfloat16 takes half the memory."""

_ALIGNED = 8  # CUDA has fast kernels only for head widths that are multiples of this
_CAPPED_ROWS = 256  # queries whose capped scores exist at once


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreRules:
    """Rules of one layer. The default is plain causal attention."""

    window: int | None = None  # a query sees itself and the ``window - 1`` tokens before it
    chunk: int | None = None  # a query sees its own chunk of this many tokens, up to itself
    softcap: float | None = None  # cap of the scaled scores
    sinks: Tensor | None = None  # ``[heads]`` scores in addition to those of the keys
    exact: bool = False  # blocks of keys are counted from the start of a sequence (`magicrl.models.exact`)

    def cuts(self, longest: int) -> bool:
        """Return whether a window or a chunk hides anything in a sequence of ``longest`` tokens."""
        return any(size is not None and size < longest for size in (self.window, self.chunk))

    def plain(self, longest: int) -> bool:
        """Return whether attention over ``longest`` tokens is plain and causal."""
        return not self.exact and self.softcap is None and self.sinks is None and not self.cuts(longest)

    def seen(self, queries: Any, keys: Any) -> Any:
        """Return whether queries at these positions see keys at those. Takes arrays or tensors that broadcast."""
        visible = keys <= queries
        if self.window is not None:
            visible = visible & (keys > queries - self.window)
        if self.chunk is not None:
            visible = visible & (keys // self.chunk == queries // self.chunk)
        return visible


PLAIN, EXACT = ScoreRules(), ScoreRules(exact=True)


def attend_rows(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, rules: ScoreRules = PLAIN, mask: Tensor | None = None
) -> Tensor:
    """Attend within the rows of a bucket, ``[rows, width, heads, dim]``. The queries are those of the last keys.

    ``mask`` is ``[width, keys]`` bool, the visible keys of each query under plain rules. None if there are as many
    keys.
    """
    if rules.exact:
        return attend_exactly(q, k, v, scaling)
    if rules.plain(k.shape[1]):
        return _product(q, k, v, scaling, mask)
    keys = torch.arange(k.shape[1], device=q.device)
    seen = cast(Tensor, rules.seen(keys[-q.shape[1] :, None], keys))
    if rules.softcap is not None:
        return _capped(q, k, v, scaling, rules.softcap, seen)
    if rules.sinks is None:
        return _product(q, k, v, scaling, seen)
    return _with_sinks(q, k, v, scaling, rules.sinks, seen)


def _product(q: Tensor, k: Tensor, v: Tensor, scaling: float, mask: Tensor | None) -> Tensor:
    causal = mask is None
    # float16 at any width, because torch's CPU attention is eight times slower in it.
    narrow = q.dtype == torch.float16 or (q.dtype == torch.bfloat16 and q.shape[1] <= WIDENED_UP_TO)
    if narrow and q.device.type == "cpu" and q.shape[-1] == v.shape[-1]:
        return widened_attention(q, k, v, scaling, mask=mask, causal=causal)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2)


def _with_sinks(q: Tensor, k: Tensor, v: Tensor, scaling: float, sinks: Tensor, seen: Tensor) -> Tensor:
    """Attend with each sink as one more key. It meets only an extra component of the queries, and its value is 0."""
    width = v.shape[-1]
    scores = (sinks / scaling).to(q.dtype)[:, None].expand(*q.shape[:3], 1)
    q = torch.cat((q, F.pad(scores, (0, _ALIGNED - 1))), dim=-1)
    k = F.pad(k, (0, _ALIGNED, 0, 0, 0, 1))
    one = torch.zeros_like(k)
    one[:, -1, :, -_ALIGNED] = 1.0
    # Kernels require values as wide as keys.
    v = F.pad(v, (0, _ALIGNED, 0, 0, 0, 1))
    return _product(q, k + one, v, scaling, F.pad(seen, (0, 1), value=True))[..., :width]


def _capped(q: Tensor, k: Tensor, v: Tensor, scaling: float, cap: float, seen: Tensor) -> Tensor:
    """Attend with capped scores, for some queries at a time also in the backward pass: no torch kernel caps scores."""
    heads = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(heads, dim=1) for x in (k, v))

    def part(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = (cap * ((q @ k.transpose(2, 3)).to(wide) * (scaling / cap)).tanh()).masked_fill(~seen, -torch.inf)
        return scores.softmax(-1).to(q.dtype) @ v

    pieces = zip(q.split(_CAPPED_ROWS, dim=2), seen.split(_CAPPED_ROWS), strict=True)
    outputs = [cast(Tensor, checkpoint(part, piece, k, v, visible, use_reentrant=False)) for piece, visible in pieces]
    return torch.cat(outputs, dim=2).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class LocalMask:
    """Marker that transformers passes on as the mask of a layer whose queries do not see all earlier keys."""

    tokens: int


def rules_of(module: torch.nn.Module, mask: object, given: dict[str, Any]) -> ScoreRules:
    """Return the rules of a layer from the mask that transformers made for it and the arguments of its attention.

    Raises:
        ValueError: The mask or an argument is of an unsupported kind. The message names the layer.
    """
    name = type(module).__name__
    if getattr(module, "exact", False):
        return EXACT
    if mask is not None and not isinstance(mask, LocalMask):
        raise ValueError(f"{name} makes an attention mask of its own, which magicrl does not know; use another model")
    unknown = sorted(key for key in ("position_bias", "head_mask", "block_mask") if given.get(key) is not None)
    if unknown:
        raise ValueError(f"attention with {', '.join(unknown)} ({name}) is not supported; use another model")
    sizes = [size for size in (mask.tokens if mask else None, given.get("sliding_window")) if size is not None]
    size = cast(int, min(sizes)) if sizes else None
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    # Only the kind of the layer distinguishes chunks from windows.
    chunked = kinds is not None and kinds[cast(int, module.layer_idx)] == "chunked_attention"
    softcap, sinks = given.get("softcap"), given.get("s_aux")
    if softcap is not None and sinks is not None:
        raise ValueError(f"{name} caps its scores and has sinks, which is not supported; use another model")
    return ScoreRules(window=None if chunked else size, chunk=size if chunked else None, softcap=softcap, sinks=sinks)
