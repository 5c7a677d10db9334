"""Matrix products of bfloat16 tensors in float32, for float32 logits and for CPUs that emulate bfloat16.

A CPU without AVX512 has no bfloat16 products. torch emulates them, 50 times slower than in float32. Here the operands
are converted, some rows of a weight at a time, and the result is rounded once, as hardware with bfloat16 products does.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_WIDEN_ROWS = 4096  # rows of a weight that are converted at once, instead of a float32 copy of the whole weight


def is_emulated(x: Tensor) -> bool:
    """Return whether torch would emulate products of this tensor."""
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and emulates_bfloat16()


@functools.cache
def emulates_bfloat16() -> bool:
    """Return whether this CPU has no bfloat16 products."""
    return not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left @ right`` in their dtype."""
    return (left.float() @ right.float()).to(left.dtype) if is_emulated(left) else left @ right


def float32_product(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return ``hidden @ weight^T`` in float32 for ``[n, d]`` and ``[V, d]`` of a narrower dtype. Other dtypes are
    kept.
    """
    if hidden.dtype in (torch.float32, torch.float64):
        return hidden @ weight.T
    if hidden.is_cuda:
        # The hardware adds products of narrow numbers in float32. This only skips the final rounding.
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    wide, out = hidden.float(), torch.empty(len(hidden), len(weight), device=hidden.device)
    for start in range(0, len(weight), _WIDEN_ROWS):
        words = slice(start, start + _WIDEN_ROWS)
        torch.mm(wide, weight[words].float().T, out=out[:, words])
    return out
