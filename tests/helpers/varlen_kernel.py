"""A slow CPU kernel for torch's `varlen_attn`, which has one only for CUDA, written after its docstring.

Everything in front of the kernel is torch's: checks of the public function, the operator, its gradient registration.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from magicrl.models import attention, packing


@dataclass(frozen=True)
class Call:
    """Arguments of the kernel."""

    query_ends: list[int]
    key_ends: list[int]
    longest: tuple[int, int]
    window: tuple[int, int]


@contextmanager
def kernel_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[Call], list[Call]]]:
    """Register CPU passes for a device of capability 9.0, in any floating-point type, and return the calls of both."""
    monkeypatch.setattr(packing, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(attention, "DTYPES", (*attention.DTYPES, torch.float32, torch.float64))
    forwards: list[Call] = []
    backwards: list[Call] = []

    def forward(
        q: Tensor, k: Tensor, v: Tensor, query_ends: Tensor, key_ends: Tensor, max_q: int, max_k: int,
        causal: bool = False, scale: float | None = None, window: Any = None, *_further: object,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        call = _checked(q, k, v, query_ends, key_ends, (max_q, max_k), causal, window)
        forwards.append(call)
        out, log_sums = torch.empty_like(q), q.new_empty(q.shape[1], len(q), dtype=torch.float64)
        for rows, keys in _sequences(call):
            scores = _scores(q[rows], k[keys], scale, call.window)
            log_sums[:, rows] = scores.logsumexp(-1)
            out[rows] = (scores.softmax(-1) @ _wide(v[keys], q)).transpose(0, 1).to(q.dtype)
        return out, log_sums, torch.zeros(2, dtype=torch.uint64)

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, query_ends: Tensor,
        key_ends: Tensor, max_q: int, max_k: int, causal: bool, _random: Tensor, scale: float | None = None,
        window: Any = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        call = _checked(q, k, v, query_ends, key_ends, (max_q, max_k), causal, window)
        backwards.append(call)
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        grads = [torch.zeros_like(x) for x in (q, k, v)]
        for rows, keys in _sequences(call):
            weights = (_scores(q[rows], k[keys], scale, call.window) - log_sums[:, rows, None]).exp()
            d_out, o = (x[rows].transpose(0, 1).double() for x in (grad, out))
            d_weights = d_out @ _wide(v[keys], q).transpose(1, 2)
            d_scores = factor * weights * (d_weights - (d_out * o).sum(-1, keepdim=True))
            grads[0][rows] = (d_scores @ _wide(k[keys], q)).transpose(0, 1).to(q.dtype)
            d_k, d_v = d_scores.transpose(1, 2) @ q[rows].transpose(0, 1).double(), weights.transpose(1, 2) @ d_out
            for total, part in ((grads[1], d_k), (grads[2], d_v)):
                total[keys] = part.unflatten(0, (k.shape[1], -1)).sum(1).transpose(0, 1).to(q.dtype)
        return grads[0], grads[1], grads[2]

    library = torch.library.Library("torch_attn", "IMPL")
    library.impl("_varlen_attn", forward, "CPU")
    library.impl("_varlen_attn_backward", backward, "CPU")
    try:
        yield forwards, backwards
    finally:
        library._destroy()


def _checked(
    q: Tensor, k: Tensor, v: Tensor, query_ends: Tensor, key_ends: Tensor, longest: tuple[int, int], causal: bool,
    window: Any,
) -> Call:  # fmt: skip
    """Check what the CUDA kernel reads without a check: a wrong length or stride gives wrong numbers there."""
    assert query_ends.dtype == key_ends.dtype == torch.int32
    assert all(x.stride(-1) == 1 for x in (q, k, v)), "a head's values must follow each other"
    assert (len(q), len(k), len(v)) == (int(query_ends[-1]), int(key_ends[-1]), int(key_ends[-1]))
    sizes = query_ends.diff(), key_ends.diff()
    assert longest == tuple(int(x.max()) for x in sizes)
    assert bool((sizes[0] >= 1).all())
    assert bool((sizes[0] <= sizes[1]).all())
    assert causal == (tuple(window) == (-1, 0))
    return Call(query_ends.tolist(), key_ends.tolist(), longest, (window[0], window[1]))


def _sequences(call: Call) -> Iterator[tuple[slice, slice]]:
    ends = [pairwise(x) for x in (call.query_ends, call.key_ends)]
    return ((slice(*rows), slice(*keys)) for rows, keys in zip(*ends, strict=True))


def _wide(x: Tensor, query: Tensor) -> Tensor:
    """Convert ``[tokens, kv_heads, dim]`` to ``[heads, tokens, dim]`` in float64."""
    return x.double().transpose(0, 1).repeat_interleave(query.shape[1] // x.shape[1], 0)


def _scores(q: Tensor, k: Tensor, scale: float | None, window: tuple[int, int]) -> Tensor:
    """Return ``[heads, queries, keys]``, -inf where hidden. The last query is at the position of the last key."""
    places = torch.arange(len(k))
    apart = places - places[-len(q) :, None]  # distance of a key to the right of the query
    hidden = torch.zeros_like(apart, dtype=torch.bool)
    if window[0] >= 0:
        hidden |= apart < -window[0]
    if window[1] >= 0:
        hidden |= apart > window[1]
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    return (factor * q.double().transpose(0, 1) @ _wide(k, q).transpose(1, 2)).masked_fill(hidden, -torch.inf)
