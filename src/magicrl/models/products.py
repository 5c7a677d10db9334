"""Matrix products of bfloat16 tensors in float32, for float32 logits and for CPUs that are slower in bfloat16.

torch emulates bfloat16 products on a CPU without AVX512, 50 times slower than in float32. An Intel CPU without AMX
takes twice as long as in float32 where it has AVX512-BF16, and 3.5 times where not. On these, the operands are
converted, some rows of a weight at a time, and the result is rounded once, as hardware with bfloat16 products does.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

INTEL = "GenuineIntel"  # the maker whose AVX512-BF16, where it exists, takes as long as four float32 instructions
_WIDEN_ROWS = 4096  # rows of a weight that are converted at once, instead of a float32 copy of the whole weight


def is_widened(x: Tensor) -> bool:
    """Return whether products of this tensor are computed in float32, which is faster."""
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and widens_bfloat16()


@functools.cache
def widens_bfloat16() -> bool:
    """Return whether bfloat16 products on this CPU are faster in float32."""
    has_products = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    flags = processor_flags()
    return not has_products or (INTEL in flags and "amx_bf16" not in flags)


@functools.cache
def processor_flags() -> frozenset[str]:
    """Return the words of Linux' description of the processors: instructions, the maker's name."""
    described = Path("/proc/cpuinfo")
    return frozenset(described.read_text(errors="replace").split() if described.exists() else ())


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left @ right`` in their dtype."""
    return (left.float() @ right.float()).to(left.dtype) if is_widened(left) else left @ right


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
