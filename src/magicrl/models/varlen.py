"""Attention over a packed row in one call of torch's variable-length flash kernel: on CUDA, where it serves a layer.

`torch.nn.attention.varlen` is told where the queries and the keys of each sequence end. A sequence may have fewer
queries than keys; they are then those of its last keys, so that the kernel serves responses which share a prompt, too:
each one's keys are its prompt's and its own. Nothing is padded, no mask is made, and queries stay where they are.
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
"""What the kernel computes in."""
_AMPERE = (8, 0)  # flash kernels need its instructions
# torch 2.11 takes fewer key heads than query heads without being told
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


@cache
def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a CUDA device for which this torch has flash kernels; None of any other."""
    if device.type != "cuda" or not torch.backends.cuda.is_flash_attention_available():
        return None
    return torch.cuda.get_device_capability(device)


def serves(
    capability: tuple[int, int] | None, dtype: torch.dtype, widths: tuple[int, int], rules: ScoreRules, longest: int
) -> bool:
    """Whether the kernel computes a layer's attention; buckets of similar lengths do where it does not.

    Args:
        capability: see `capability_of`.
        dtype: of queries, keys and values.
        widths: of a head's keys and of its values.
        rules: of the layer; of these the kernel knows windows.
        longest: keys of the longest sequence: a chunk of as many hides nothing.
    """
    keys, values = widths
    # between 192 and 256 there is no backward pass on some devices
    fits = keys == values and keys % 8 == 0 and (keys <= 192 or keys == 256)
    more = rules.exact or rules.softcap is not None or rules.sinks is not None
    chunked = rules.chunk is not None and rules.chunk < longest
    able = capability is not None and capability >= _AMPERE and dtype in DTYPES
    return able and fits and not more and not chunked


class VarlenRow:
    """Causal attention of the sequences of a row.

    Args:
        queries: tokens of each sequence, one after the other in the row; at least one each.
        keys: of each sequence, at least as many; its queries are those of the last ones. None: its queries' own.
        source: ``[sum(keys)]`` which token of the row each key is of, every token at least once; None: they are
            the row's.
        device: of the row.
    """

    def __init__(
        self,
        queries: Sequence[int],
        keys: Sequence[int] | None = None,
        source: NDArray[np.int64] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        seen = queries if keys is None else keys
        # counted by the kernel in 32 bits, from 0
        ends = (np.r_[0, np.cumsum(sizes)].astype(np.int32) for sizes in (queries, seen))
        self._query_ends, self._key_ends = (torch.from_numpy(x).to(device) for x in ends)
        self._longest = max(queries), max(seen)
        self._copies = None if source is None else _Copies(source, device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, rules: ScoreRules = PLAIN) -> Tensor:
        """See `magicrl.models.packing.AttentionContext`; only for layers that the kernel `serves`."""
        # [1, heads, tokens, dim] -> [tokens, heads, dim], a view
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        if self._copies is not None:
            k, v = (self._copies.of(x) for x in (k, v))
        window = rules.window if rules.window is not None and rules.window < self._longest[1] else None
        # what is seen to the left of a query, itself not counted; all there is
        left = -1 if window is None else window - 1
        ends, longest = (self._query_ends, self._key_ends), self._longest
        out = varlen_attn(q, k, v, *ends, *longest, scale=scaling, window_size=(left, 0), **_GROUPED)
        return cast(Tensor, out)[None]


class _Copies:
    """Rows of a tensor, each at one place or at several; the gradients of a row's places are added in their order."""

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
        """``x[source]``."""
        return cast(Tensor, _Copy.apply(x, self._source, self._sums))


class _Copy(torch.autograd.Function):
    """An indexed add on a GPU has no order, and rounds after each of its terms."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, sums: list[tuple[Tensor, Tensor]]) -> Tensor:
        ctx.sums, ctx.rows = sums, len(x)
        return x.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        total = grad.new_empty(ctx.rows, *grad.shape[1:])
        for rows, places in ctx.sums:
            # [times that a row was copied, rows, ...], all rows of which were copied as often
            parts = grad.index_select(0, places.flatten()).unflatten(0, places.shape)
            total.index_copy_(0, rows, parts.sum(dim=0))
        return total, None, None
