"""Attention over a packed row by magicrl's own CPU kernels, forward and backward (`cpu_kernels.cpp`).

As `magicrl.models.varlen` on CUDA: queries and keys stay where they are in the row, a prompt's are read by all of its
responses, nothing is padded and no mask is made. Kept for the backward pass are inputs, output and a number a query
and head. Scores, sums and gradients are float32; weights and the scores' gradients are bfloat16 where they meet values,
keys and queries, as in flash attention on a GPU. What a thread computes does not depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from magicrl.models import cpu_kernels
from magicrl.models.scores import ScoreRules


def serves(query: Tensor, value: Tensor, rules: ScoreRules, longest: int) -> bool:
    """Whether the kernels compute a layer's attention over sequences of at most ``longest`` keys."""
    width = query.shape[-1]
    fits = value.shape[-1] == width and rules.plain(longest)
    return fits and cpu_kernels.serves(query.dtype, query.device, width)


class KernelRow:
    """Causal attention of the sequences of a row; arguments as of `magicrl.models.varlen.VarlenRow`."""

    def __init__(
        self, queries: Sequence[int], keys: Sequence[int] | None = None, source: NDArray[np.int64] | None = None
    ) -> None:
        asked, seen = np.array(queries), np.array(queries if keys is None else keys)
        source = np.arange(seen.sum()) if source is None else source
        offsets = np.cumsum(seen) - seen
        table = np.stack((np.cumsum(asked) - asked, asked, offsets, seen), axis=1)
        # sequences that begin with one key share keys: they follow each other, a prompt before its responses
        owners = source[offsets]
        order = np.argsort(owners, kind="stable")
        bounds = np.flatnonzero(np.r_[True, np.diff(owners[order]) != 0, True])
        self._tables = [
            torch.from_numpy(np.ascontiguousarray(x, dtype=np.int64)) for x in (table[order], source, bounds)
        ]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """See `magicrl.models.packing.AttentionContext`; only for layers that the kernels serve."""
        # [1, heads, tokens, dim] -> [tokens, heads, dim], a view
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        out, _ = attend_row(q, k, v, *self._tables, scaling)
        return cast(Tensor, out)[None]


# an operator of torch's, so that gradient checkpointing can keep what it gives
@torch.library.custom_op("magicrl::attend_row", mutates_args=())
def attend_row(
    q: Tensor, k: Tensor, v: Tensor, sequences: Tensor, source: Tensor, families: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """Attention of bfloat16 ``q`` over ``k`` and ``v``, and the logarithms of the softmax's sums.

    Args:
        q: ``[tokens, heads, dim]``, as the first result; ``[tokens, heads]`` float32 is the second.
        k, v: ``[tokens, kv_heads, dim]``.
        sequences: ``[S, 4]`` int64: first query in the row, queries, first key in ``source``, keys.
        source: ``[keys]`` int64, the token of the row that each key is of.
        families: bounds of sequences that share keys.
        scaling: factor on the scores.
    """
    del families
    q, k, v = (_last_axis_whole(x) for x in (q, k, v))
    tokens, heads, dim = q.shape
    out, sums = q.new_empty(tokens, heads, dim), q.new_empty(tokens, heads, dtype=torch.float32)
    cpu_kernels.kernels().attend_row(
        out.data_ptr(), sums.data_ptr(), *_views(q, k, v), sequences.data_ptr(), source.data_ptr(), len(sequences),
        k.shape[1], heads // k.shape[1], dim, scaling, torch.get_num_threads(),
    )  # fmt: skip
    return out, sums


@torch.library.custom_op("magicrl::attend_row_backward", mutates_args=())
def attend_row_backward(
    grad: Tensor,
    out: Tensor,
    sums: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Tensor,
    source: Tensor,
    families: Tensor,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``q``, ``k`` and ``v`` from that of `attend_row`'s first result; the others as there."""
    q, k, v = (_last_axis_whole(x) for x in (q, k, v))
    grad = grad.contiguous()
    heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[2]
    dq = torch.empty_like(out)
    # a prompt's keys get gradients from all of its responses: summed up in float32, rounded once
    dk, dv = (torch.zeros(k.shape, dtype=torch.float32) for _ in range(2))
    tables = (x.data_ptr() for x in (sequences, source, families))
    cpu_kernels.kernels().attend_row_backward(
        dq.data_ptr(), dk.data_ptr(), dv.data_ptr(), grad.data_ptr(), out.data_ptr(), sums.data_ptr(),
        *_views(q, k, v), *tables, len(families) - 1, kv_heads, heads // kv_heads, dim, scaling,
        torch.get_num_threads(),
    )  # fmt: skip
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _last_axis_whole(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


def _views(*tensors: Tensor) -> list[int]:
    """Address, and strides of tokens and heads."""
    return [number for x in tensors for number in (x.data_ptr(), x.stride(0), x.stride(1))]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scaling = inputs
    ctx.save_for_backward(*output, *tensors)


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    found = attend_row_backward(grad, *ctx.saved_tensors, ctx.scaling)
    return *cast("tuple[Tensor, Tensor, Tensor]", found), None, None, None, None


attend_row.register_autograd(_backward, setup_context=_save)
