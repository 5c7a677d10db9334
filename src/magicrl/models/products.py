"""Matrix products of bfloat16 tensors in float32, for float32 logits and for CPUs that emulate bfloat16.

A CPU without AVX512 has no bfloat16 products. torch emulates them, 50 times slower than in float32. Here the operands
are converted, some rows of a weight at a time, and the result is rounded once, as hardware with bfloat16 products does.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import Tensor, nn

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


def linear_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x``, ``[..., d]``, times the transposed ``weight``, plus ``bias``, with gradients."""
    if not is_emulated(x):
        return nn.functional.linear(x, weight, bias)
    return cast(Tensor, _Linear.apply(x, weight, bias))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        found = float32_product(x.flatten(0, -2), weight)
        found = found if bias is None else found.add_(bias)
        return found.to(x.dtype).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grads[0].flatten(0, -2)
        wanted_x, wanted_weight, wanted_bias = ctx.needs_input_grad
        return (
            product(rows, weight).view(x.shape) if wanted_x else None,
            product(rows.T, x.flatten(0, -2)) if wanted_weight else None,
            rows.sum(dim=0, dtype=torch.float32).to(rows.dtype) if wanted_bias else None,
        )


class LinearForward:
    """Forward of a linear layer by `linear_product`. It is an object, so that the layer of a copied model finds its own
    weight.
    """

    def __init__(self, module: nn.Linear) -> None:
        self._module = module

    def __call__(self, input: Tensor) -> Tensor:
        return linear_product(input, self._module.weight, cast("Tensor | None", self._module.bias))

    @classmethod
    def put_into(cls, model: nn.Module) -> None:
        """Replace the forward of every linear layer if this CPU emulates bfloat16."""
        for module in model.modules() if emulates_bfloat16() else ():
            if type(module) is nn.Linear and "forward" not in vars(module):
                module.forward = cls(module)
