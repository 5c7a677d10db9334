"""Attention: the rules of a layer, and kernels that attend over a packed row in one call.

Rules come in addition to scaling. Sliding windows (Mistral, Gemma, gpt-oss) and chunks (Llama 4) hide distant keys. A
soft cap (Gemma 2) is ``cap * tanh(score / cap)``. A sink (gpt-oss) is one more score per head that takes part in the
softmax and has no value. transformers passes them as arguments of its attention interface and in the masks that it
builds.

`VarlenRow` calls torch's variable-length flash kernel on CUDA, `magicrl.models.cpu_rows.CpuRow` magicrl's own kernels.
In both, queries and keys stay in the row, a prompt's keys are read by all of its responses, and there is no padding and
no mask. A sequence may have fewer queries than keys, and they are then those of its last keys.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint

from magicrl.models import cpu_kernels
from magicrl.models.exact import attend_exactly
from magicrl.models.memory_efficient import widened_attention
from magicrl.models.products import is_widened, product

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
    slow = q.dtype == torch.float16 or is_widened(q)
    slow = slow or (q.dtype == torch.bfloat16 and q.shape[1] <= WIDENED_UP_TO)
    if slow and q.device.type == "cpu" and q.shape[-1] == v.shape[-1]:
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
        scores = product(q, k.transpose(2, 3)).to(wide) * (scaling / cap)
        scores = (cap * scores.tanh()).masked_fill(~seen, -torch.inf)
        return product(scores.softmax(-1).to(q.dtype), v)

    pieces = zip(q.split(_CAPPED_ROWS, dim=2), seen.split(_CAPPED_ROWS), strict=True)
    outputs = [cast(Tensor, checkpoint(part, piece, k, v, visible, use_reentrant=False)) for piece, visible in pieces]
    return torch.cat(outputs, dim=2).transpose(1, 2)


def rules_of(module: torch.nn.Module, mask: object, given: dict[str, Any]) -> ScoreRules:
    """Return the rules of a layer from the mask that transformers made for it and the arguments of its attention.

    magicrl's mask is None, or the number of keys that a query sees (`magicrl.models.packing.register_attention`).

    Raises:
        ValueError: The mask or an argument is of an unsupported kind. The message names the layer.
    """
    name = type(module).__name__
    if getattr(module, "exact", False):
        return EXACT
    if mask is not None and not isinstance(mask, int):
        raise ValueError(f"{name} makes an attention mask of its own, which magicrl does not know; use another model")
    unknown = sorted(key for key in ("position_bias", "head_mask", "block_mask") if given.get(key) is not None)
    if unknown:
        raise ValueError(f"attention with {', '.join(unknown)} ({name}) is not supported; use another model")
    sizes = [size for size in (mask, given.get("sliding_window")) if size is not None]
    size = cast(int, min(sizes)) if sizes else None
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    # Only the kind of the layer distinguishes chunks from windows.
    chunked = kinds is not None and kinds[cast(int, module.layer_idx)] == "chunked_attention"
    softcap, sinks = given.get("softcap"), given.get("s_aux")
    if softcap is not None and sinks is not None:
        raise ValueError(f"{name} caps its scores and has sinks, which is not supported; use another model")
    return ScoreRules(window=None if chunked else size, chunk=size if chunked else None, softcap=softcap, sinks=sinks)


DTYPES = (torch.bfloat16, torch.float16)
"""Precisions that the kernel supports."""
_AMPERE = (8, 0)  # flash kernels use its instructions
# torch 2.11 accepts fewer key heads than query heads without this argument.
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


@cache
def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a CUDA device if torch has flash kernels for it, None otherwise."""
    if device.type != "cuda" or not torch.backends.cuda.is_flash_attention_available():
        return None
    return torch.cuda.get_device_capability(device)


def supports_varlen(
    capability: tuple[int, int] | None, dtype: torch.dtype, widths: tuple[int, int], rules: ScoreRules, longest: int
) -> bool:
    """Return whether the kernel computes a layer's attention. Otherwise buckets of similar lengths do.

    Args:
        capability: See `capability_of`.
        dtype: Precision of queries, keys and values.
        widths: Widths of a head's keys and of its values.
        rules: Rules of the layer. The kernel supports only windows.
        longest: Keys of the longest sequence. A chunk of at least this size hides nothing.
    """
    keys, values = widths
    # Between 192 and 256 some devices have no backward pass.
    fits = keys == values and keys % 8 == 0 and (keys <= 192 or keys == 256)
    more = rules.exact or rules.softcap is not None or rules.sinks is not None
    chunked = rules.chunk is not None and rules.chunk < longest
    able = capability is not None and capability >= _AMPERE and dtype in DTYPES
    return able and fits and not more and not chunked


class VarlenRow:
    """Causal attention of the sequences of a row.

    Args:
        queries: Tokens of each sequence in the row, at least one each.
        keys: Keys of each sequence, at least as many. Its queries are those of the last keys. None means the queries'
            own.
        source: ``[sum(keys)]`` token of the row of each key, every token at least once. None means the row itself.
        device: Device of the row.
    """

    def __init__(
        self,
        queries: Sequence[int],
        keys: Sequence[int] | None = None,
        source: NDArray[np.int64] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        seen = queries if keys is None else keys
        # The kernel counts in 32 bits, from 0.
        ends = (np.r_[0, np.cumsum(sizes)].astype(np.int32) for sizes in (queries, seen))
        self._query_ends, self._key_ends = (torch.from_numpy(x).to(device) for x in ends)
        self._longest = max(queries), max(seen)
        self._copies = None if source is None else _Copies(source, device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, rules: ScoreRules = PLAIN) -> Tensor:
        """Attend as `magicrl.models.packing.AttentionContext` does. Only for layers that `supports_varlen` accepts."""
        # [1, heads, tokens, dim] -> [tokens, heads, dim], a view
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        if self._copies is not None:
            k, v = (self._copies.of(x) for x in (k, v))
        window = rules.window if rules.window is not None and rules.window < self._longest[1] else None
        # Keys that are visible to the left of a query, excluding its own. -1 means all.
        left = -1 if window is None else window - 1
        ends, longest = (self._query_ends, self._key_ends), self._longest
        out = varlen_attn(q, k, v, *ends, *longest, scale=scaling, window_size=(left, 0), **_GROUPED)
        return cast(Tensor, out)[None]


class _Copies:
    """Rows of a tensor at one or several places. The gradients of a row are added in the order of its places."""

    def __init__(self, source: NDArray[np.int64], device: torch.device | str) -> None:
        counts = np.bincount(source)
        starts, order = np.cumsum(counts) - counts, np.argsort(source, kind="stable")
        self._source = torch.from_numpy(source).to(device)
        self._sums: list[tuple[Tensor, Tensor]] = []
        for count in np.unique(counts):
            rows = np.flatnonzero(counts == count)
            places = order[starts[rows] + np.arange(count)[:, None]]
            self._sums.append((torch.from_numpy(rows).to(device), torch.from_numpy(places).to(device)))

    def of(self, x: Tensor) -> Tensor:
        """Return ``x[source]``."""
        return cast(Tensor, _Copy.apply(x, self._source, self._sums))


class _Copy(torch.autograd.Function):
    """Indexed copy with a deterministic backward pass. An indexed add on a GPU has no order, and rounds after each
    term.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, sums: list[tuple[Tensor, Tensor]]) -> Tensor:
        ctx.sums, ctx.rows = sums, len(x)
        return x.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        total = grad.new_empty(ctx.rows, *grad.shape[1:])
        for rows, places in ctx.sums:
            # [number of copies, rows, ...], for all rows with this number of copies
            parts = grad.index_select(0, places.flatten()).unflatten(0, places.shape)
            total.index_copy_(0, rows, parts.sum(dim=0))
        return total, None, None


def supports_row(query: Tensor, value: Tensor, rules: ScoreRules, longest: int) -> bool:
    """Return whether the kernels compute a layer's attention over sequences of at most ``longest`` keys."""
    width = query.shape[-1]
    fits = value.shape[-1] == width and (rules.exact or rules.plain(longest))
    return fits and cpu_kernels.has_kernels(query.dtype, query.device, width)
