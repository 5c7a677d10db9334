"""Attention over a packed row in one call of torch's variable-length flash kernel on CUDA.

`torch.nn.attention.varlen` takes the ends of each sequence's queries and keys. A sequence may have fewer queries than
keys, and they are then those of its last keys. The kernel therefore also supports responses that share a prompt: the
keys of each are its prompt's and its own. There is no padding and no mask, and queries stay in the row.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from magicrl.models.scores import PLAIN, ScoreRules

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
