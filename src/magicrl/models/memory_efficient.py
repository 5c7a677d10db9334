"""Layers that save less for the backward pass: the same values, about half the memory, no matrix product computed
twice; on a CPU by kernels (`magicrl.models.cpu_kernels`), which read and write each number once.

With autograd, a normalisation saves a float32 and a rounded copy of its input, a gated feed-forward layer four tensors
of the intermediate width, and attention in float32 all of its inputs at twice the width. Here a normalisation saves its
input and one factor per token, a gated layer its two projections, and attention its inputs as given. The backward pass
recomputes the rest elementwise. `use_memory_efficient_layers` puts these functions into a model, for layers whose
output on a random input is equal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from magicrl.models.cpu_kernels import (
    LANES,
    gated,
    gated_backward,
    has_kernels,
    normalised,
    normalised_backward,
    rotate,
    serves_both,
)
from magicrl.models.exact import ExactLinear, exact_product
from magicrl.models.linear import gradient_sum, linear_product, use_gradient_sums, weight_gradient
from magicrl.models.products import product

_PROBED_ROWS, _PROBED_HEAD = 3, 64
_WIDENED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_WIDENED_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def rms_norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool = False) -> Tensor:
    """Return ``weight * x / sqrt(mean(x^2) + eps)`` over the last dimension of ``[..., d]``, computed in float32 or
    wider.

    ``plus_one`` multiplies by ``1 + weight`` before rounding (Gemma) instead of by ``weight`` after it (Llama).
    """
    return cast(Tensor, _Norm.apply(x, weight, eps, plus_one))


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Tensor:
        ctx.eps = eps
        ctx.kernels = not plus_one and serves_both(x, weight, width=len(weight))
        if ctx.kernels:
            ctx.save_for_backward(x, weight)
            return normalised(x, weight, eps)
        normed = x.to(_wide(x), copy=True)
        factor = normed.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
        normed.mul_(factor)
        ctx.save_for_backward(x, weight, factor)
        ctx.plus_one = plus_one
        return normed.mul_(1 + weight.to(normed.dtype)).to(x.dtype) if plus_one else normed.to(x.dtype).mul(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.kernels:
            x, weight = ctx.saved_tensors
            return *normalised_backward(grads[0], x, weight, ctx.eps), None, None
        x, weight, factor = ctx.saved_tensors
        normed = x.to(factor.dtype, copy=True).mul_(factor)
        grad = grads[0].to(factor.dtype, copy=True)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            # The sum over all tokens is in float32 and rounded once.
            grad_weight = (grad * normed).flatten(0, -2).sum(dim=0).to(weight.dtype)
        grad.mul_(weight.to(factor.dtype) + 1 if ctx.plus_one else weight.to(factor.dtype))
        # Remove the part along x, which a normalisation does not change.
        along = (grad * normed).mean(dim=-1, keepdim=True)
        return grad.sub_(normed.mul_(along)).mul_(factor).to(x.dtype), grad_weight, None, None


def gated_linear(
    gate: Tensor,
    up: Tensor,
    weight: Tensor | None,
    activation: Callable[[Tensor], Tensor],
    times: Callable[[Tensor, Tensor], Tensor] = linear_product,
) -> Tensor:
    """Return ``activation(gate) * up``, and with a weight its product ``[..., f] @ [d, f]^T`` by ``times``. It saves
    ``gate`` and ``up`` only.
    """
    return cast(Tensor, _Gated.apply(gate, up, weight, activation, times))


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor,
        up: Tensor,
        weight: Tensor | None,
        activation: Callable[[Tensor], Tensor],
        times: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        ctx.activation, ctx.total = activation, gradient_sum(weight)
        ctx.kernels = is_silu(activation) and serves_both(gate, up, width=gate.shape[-1])
        flat = [x.flatten(0, -2) for x in (gate, up)]
        found = gated(*flat).view(gate.shape) if ctx.kernels else activation(gate) * up
        return found if weight is None else times(found, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        (grad,) = grads
        if weight is None:
            _, grad_gate, grad_up = _gated_backward(ctx, grad, gate, up)
            return grad_gate, grad_up, None, None, None
        found, grad_gate, grad_up = _gated_backward(ctx, product(grad, weight), gate, up)
        grad_weight = weight_gradient(grad, found, ctx.total) if ctx.needs_input_grad[2] else None
        return grad_gate, grad_up, grad_weight, None, None


def _gated_backward(ctx: Any, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gated product, and the gradients of ``gate`` and ``up`` from that of the product."""
    if ctx.kernels:
        return gated_backward(grad, gate, up)
    # Recompute the activation, so that autograd provides its derivative.
    with torch.enable_grad():
        leaf = gate.detach().requires_grad_()
        active = ctx.activation(leaf)
    (grad_gate,) = torch.autograd.grad(active, leaf, grad * up)
    return active.detach() * up, grad_gate, grad * active.detach()


def is_silu(activation: object) -> bool:
    """Return whether this activation of a model is SiLU: transformers', torch's or that of exact mode."""
    return type(activation).__name__ in ("SiLU", "SiLUActivation", "ExactSiLU")


class _Rotary:
    """A model's `apply_rotary_pos_emb`, by a kernel where there is one."""

    def __init__(self, own: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self._own = own

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        """Rotate ``[1, heads, tokens, dim]`` by ``[1, tokens, dim]``."""
        # A compiler writes its own kernels.
        packed = not torch.compiler.is_compiling() and unsqueeze_dim == 1 and len(q) == len(k) == 1
        alike = cos.shape == sin.shape == (1, *q.shape[2:]) and q.shape[2:] == k.shape[2:]
        if not packed or not alike or not serves_both(q, k, cos, sin, width=q.shape[-1], multiple=2 * LANES):
            return self._own(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        signs = signed(sin[0])
        return cast(Tensor, _Rotated.apply(q, cos[0], signs)), cast(Tensor, _Rotated.apply(k, cos[0], signs))


def signed(sin: Tensor) -> Tensor:
    """Return the sine with the minus of `rotate_half` in its first half."""
    low, high = sin.chunk(2, dim=-1)
    return torch.cat((-low, high), dim=-1)


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        # Back by the same angle: each half gets the other's sine.
        return _rotated(grads[0], cos, sin.roll(sin.shape[-1] // 2, -1)), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    by_token = x[0].transpose(0, 1)  # [tokens, heads, dim]
    if by_token.stride(2) != 1 or by_token.stride(1) != x.shape[3]:
        by_token = by_token.contiguous()
    out = by_token.new_empty(by_token.shape)
    rotate(by_token, cos, sin, out)
    return out.transpose(0, 1)[None]


def widened_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Compute attention on a CPU in float32 for any dtype of the inputs, which are saved as given.

    Args:
        query: ``[rows, width, heads, head_dim]``, as the result.
        key, value: ``[rows, keys, kv_heads, head_dim]``.
        scale: Factor on the scores.
        mask: ``[width, keys]`` bool, the visible keys of each query. None means all.
        causal: Whether a query sees only the keys up to its own place.
    """
    return cast(Tensor, _WidenedAttention.apply(query, key, value, scale, mask, causal))


class _WidenedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None, causal: bool
    ) -> Tensor:
        wide = [x.transpose(1, 2).to(_wide(x)) for x in (query, key, value)]
        ctx.mask = (
            None if mask is None else torch.zeros(mask.shape, dtype=wide[0].dtype).masked_fill_(~mask, -torch.inf)
        )
        ctx.scale, ctx.causal = scale, causal
        out, log_sums = _WIDENED(*wide, 0.0, causal, attn_mask=ctx.mask, scale=scale)
        rounded = out.transpose(1, 2).to(query.dtype)
        ctx.save_for_backward(query, key, value, rounded, log_sums)
        return rounded

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *given, log_sums = ctx.saved_tensors
        wide = [x.transpose(1, 2).to(_wide(x)) for x in (grads[0], *given)]
        found = _WIDENED_BACKWARD(*wide, log_sums, 0.0, ctx.causal, attn_mask=ctx.mask, scale=ctx.scale)
        dtype = given[0].dtype
        return *(x.transpose(1, 2).to(dtype) for x in found), None, None, None


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@torch.no_grad()
def use_memory_efficient_layers(model: nn.Module) -> None:
    """Replace the forward of every layer that is equal to one of these functions.

    A layer that differs by more than the rounding of its dtype keeps its own forward. A forward is a `partial` of the
    module and not a closure, so that the layer of a copied model finds its own weights.
    """
    use_gradient_sums(model)
    for name in {type(module).__module__ for module in model.modules()}:
        _use_rotary(sys.modules.get(name))
    for module in model.modules():
        norm = _as_norm(module)
        if norm is not None:
            module.forward = norm
        elif {"gate_proj", "up_proj", "down_proj", "act_fn"} <= set(dict(module.named_children())):
            efficient = partial(_efficient_gated, module)
            if _equal(module, cast(nn.Module, module.gate_proj), efficient):
                module.forward = efficient


def _use_rotary(file: Any) -> None:
    """Replace the rotary function that the attention layers of a file call, for all models of that file.

    The function decides at each call whether a kernel serves it: sharded weights are float32 and gathered in bfloat16.
    """
    own = getattr(file, "apply_rotary_pos_emb", None)
    if own is None or isinstance(own, _Rotary) or not has_kernels(torch.bfloat16, torch.device("cpu"), _PROBED_HEAD):
        return
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, _PROBED_ROWS, _PROBED_HEAD) for heads in (2, 1)] + [(1, _PROBED_ROWS, _PROBED_HEAD)] * 2
    given = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    rotary: Any = _Rotary(own)
    try:
        found = [torch.cat([x.flatten() for x in function(*given)]) for function in (own, rotary)]
    except (TypeError, RuntimeError):  # a function of the same name with other arguments or shapes
        return
    if torch.allclose(found[0].float(), found[1].float(), rtol=2**-6, atol=2**-6):
        file.apply_rotary_pos_emb = rotary


def _efficient_norm(module: nn.Module, eps: float, plus_one: bool, hidden: Tensor) -> Tensor:
    return rms_norm(hidden, cast(Tensor, module.weight), eps, plus_one)


def _as_norm(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, Tensor) or not isinstance(eps, float):
        return None
    return next(
        (
            efficient
            # No attribute says whether the weight is stored minus 1 (Gemma), so both are tried.
            for efficient in (partial(_efficient_norm, module, eps, p) for p in (False, True))
            if _equal(module, module, efficient)
        ),
        None,
    )


def _efficient_gated(module: Any, hidden: Tensor) -> Tensor:
    gate, up = module.gate_proj(hidden), module.up_proj(hidden)
    down = module.down_proj
    # An adapter instead of the layer, or a bias, requires a call of the layer.
    times = {nn.Linear: linear_product, ExactLinear: exact_product}.get(type(down))
    if times is not None and cast("Tensor | None", down.bias) is None:
        return gated_linear(gate, up, down.weight, module.act_fn, times)
    return down(gated_linear(gate, up, None, module.act_fn))


def _equal(module: nn.Module, first: nn.Module, efficient: Callable[[Tensor], Tensor]) -> bool:
    """Return whether both give the same output for a random input of the width of ``first``."""
    weight = next(first.parameters())
    generator = torch.Generator(device=weight.device).manual_seed(0)
    probe = torch.randn(
        (1, _PROBED_ROWS, weight.shape[-1]), generator=generator, device=weight.device, dtype=torch.float32
    ).to(weight.dtype)
    own = cast(Tensor, module(probe))
    # In float64, transformers still normalises in float32, and any replacement by the caller must be detected.
    close = 4 * torch.finfo(weight.dtype).eps if weight.dtype != torch.float64 else 1e-12
    return float((own - efficient(probe)).abs().max()) <= close * float(own.abs().max())
