"""Attention over the sequences of a packed row in bfloat16, by magicrl's kernels (`kernels/rows.cpp`).

The backward pass needs inputs, output and one number per query and head. Scores, sums and gradients are float32.
Weights and the gradients of scores are rounded to bfloat16 before products with values, keys and queries, as in flash
attention on a GPU. The result does not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from magicrl.models.cpu_kernels import addresses, kernels


class CpuRow:
    """Causal attention of the sequences of a row. Arguments as in `magicrl.models.attention.VarlenRow`."""

    def __init__(
        self, queries: Sequence[int], keys: Sequence[int] | None = None, source: NDArray[np.int64] | None = None
    ) -> None:
        asked, seen = np.array(queries), np.array(queries if keys is None else keys)
        source = np.arange(seen.sum()) if source is None else source
        offsets = np.cumsum(seen) - seen
        table = np.stack((np.cumsum(asked) - asked, asked, offsets, seen), axis=1)
        # Sequences that start with the same key share keys. They must follow each other, a prompt before its responses.
        owners = source[offsets]
        order = np.argsort(owners, kind="stable")
        bounds = np.flatnonzero(np.r_[True, np.diff(owners[order]) != 0, True])
        self.tables = [
            torch.from_numpy(np.ascontiguousarray(x, dtype=np.int64)) for x in (table[order], source, bounds)
        ]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, exact: bool = False) -> Tensor:
        """Attend as `magicrl.models.packing.AttentionContext` does, for layers that
        `magicrl.models.attention.supports_row` accepts.
        """
        # [1, heads, tokens, dim] -> [tokens, heads, dim], a view
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        out, _ = attend_row(q, k, v, *self.tables, scaling, exact)
        return cast(Tensor, out)[None]


# A torch operator, so that gradient checkpointing can keep its result.
@torch.library.custom_op("magicrl::attend_row", mutates_args=())
def attend_row(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Tensor,
    source: Tensor,
    families: Tensor,
    scaling: float,
    exact: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute attention of bfloat16 ``q`` over ``k`` and ``v``.

    Args:
        q: ``[tokens, heads, dim]``.
        k, v: ``[tokens, kv_heads, dim]``.
        sequences: ``[S, 4]`` int64: first query in the row, queries, first key in ``source``, keys.
        source: ``[keys]`` int64, the token of the row of each key.
        families: Bounds of sequences that share keys.
        scaling: Factor on the scores.
        exact: Each token has the bits that `magicrl.models.cpu_kernels.DecodeKernel` gives it. Inputs may be float32
            then, without gradients.

    Returns:
        The output ``[tokens, heads, dim]``, and the logarithms of the softmax sums ``[tokens, heads]`` float32.
    """
    q, k, v = (_with_contiguous_heads(x) for x in (q, k, v))
    tokens, heads, dim = q.shape
    out, sums = q.new_empty(tokens, heads, dim), q.new_empty(tokens, heads, dtype=torch.float32)
    attend = partial(kernels().attend_row_exactly, q.dtype == torch.float32) if exact else kernels().attend_row
    attend(
        *addresses(out, sums), *_views(q, k, v), *addresses(sequences, source), len(sequences),
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
    """Return the gradients of ``q``, ``k`` and ``v`` from that of `attend_row`'s first result."""
    q, k, v = (_with_contiguous_heads(x) for x in (q, k, v))
    grad = grad.contiguous()
    heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[2]
    dq = torch.empty_like(out)
    # A prompt's keys get gradients from all of its responses, added in float32 and rounded once.
    dk, dv = (torch.zeros(k.shape, dtype=torch.float32) for _ in range(2))
    kernels().attend_row_backward(
        *addresses(dq, dk, dv, grad, out, sums), *_views(q, k, v), *addresses(sequences, source, families),
        len(families) - 1, kv_heads, heads // kv_heads, dim, scaling,
        torch.get_num_threads(),
    )  # fmt: skip
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _with_contiguous_heads(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


def _views(*tensors: Tensor) -> list[int]:
    """Return address and the strides of tokens and heads of each tensor."""
    return [number for x in tensors for number in (x.data_ptr(), x.stride(0), x.stride(1))]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scaling, _ = inputs
    ctx.save_for_backward(*output, *tensors)


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    found = attend_row_backward(grad, *ctx.saved_tensors, ctx.scaling)
    return *cast("tuple[Tensor, Tensor, Tensor]", found), None, None, None, None, None


attend_row.register_autograd(_backward, setup_context=_save)
