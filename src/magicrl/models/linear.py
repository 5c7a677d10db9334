"""Linear layers and embeddings of a model that is trained on a CPU, which add their weights' gradients to float32 sums.

A bfloat16 weight may have the attribute ``gradient_sum``, float32 of its shape. The backward pass of an embedding, and
that of a linear layer where `adds_gradients`, adds the weight's gradient to that and gives none to autograd. So it is
neither rounded nor written twice.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from magicrl.models.cpu_kernels import add_gradient, adds_gradients
from magicrl.models.products import float32_product, is_widened, product, widens_bfloat16


def linear_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x``, ``[..., d]``, times the transposed ``weight``, plus ``bias``, with gradients."""
    summed = gradient_sum(weight) is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if not summed and not is_widened(x):
        return nn.functional.linear(x, weight, bias)
    return cast(Tensor, _Linear.apply(x, weight, bias))


def gradient_sum(weight: Tensor | None) -> Tensor | None:
    """Return where the gradient of a linear layer's weight is added, None if autograd gets it."""
    found = getattr(weight, "gradient_sum", None)
    return found if weight is not None and found is not None and adds_gradients(weight) else None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.total = gradient_sum(weight)
        if not is_widened(x):
            return nn.functional.linear(x, weight, bias)
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
            weight_gradient(rows, x, ctx.total) if wanted_weight else None,
            rows.sum(dim=0, dtype=torch.float32).to(rows.dtype) if wanted_bias else None,
        )


def weight_gradient(pull: Tensor, x: Tensor, total: Tensor | None) -> Tensor | None:
    """Return the gradient of a layer's weight from that of its result, or add it to ``total`` and return None.

    Args:
        pull: ``[..., columns]``.
        x: Input of the layer, ``[..., width]``.
        total: The weight's `gradient_sum`.
    """
    pull, x = pull.flatten(0, -2), x.flatten(0, -2)
    if total is None:
        return product(pull.T, x)
    add_gradient(total, pull, x)
    return None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.total, ctx.padding = weight.gradient_sum, padding  # pyright: ignore[reportAttributeAccessIssue]
        return nn.functional.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        (tokens,), (grad,) = ctx.saved_tensors, grads
        rows, tokens = grad.flatten(0, -2).float(), tokens.flatten()
        if ctx.padding is not None:
            rows[tokens == ctx.padding] = 0
        ctx.total.index_add_(0, tokens, rows)
        return None, None, None


class LinearForward:
    """Forward of a linear layer by `linear_product`. It is an object, so that the layer of a copied model finds its own
    weight.
    """

    def __init__(self, module: nn.Linear) -> None:
        self._module = module

    def __call__(self, input: Tensor) -> Tensor:
        return linear_product(input, self._module.weight, cast("Tensor | None", self._module.bias))


class _EmbeddingForward:
    """The same of an embedding, whose gradient touches few rows of the weight's."""

    def __init__(self, module: nn.Embedding) -> None:
        self._module = module

    def __call__(self, input: Tensor) -> Tensor:
        module = self._module
        summed = hasattr(module.weight, "gradient_sum") and torch.is_grad_enabled()
        if not summed or torch.compiler.is_compiling():
            return nn.functional.embedding(input, module.weight, module.padding_idx)
        return cast(Tensor, _Embedding.apply(input, module.weight, module.padding_idx))


def use_gradient_sums(model: nn.Module) -> None:
    """Replace the forward of every linear layer and embedding for which it is not torch's function."""
    for module in model.modules():
        if "forward" in vars(module):
            continue
        if type(module) is nn.Linear and (widens_bfloat16() or gradient_sum(module.weight) is not None):
            module.forward = LinearForward(module)
        elif type(module) is nn.Embedding and hasattr(module.weight, "gradient_sum"):
            module.forward = _EmbeddingForward(module)
