"""Arithmetic whose bits do not depend on what else is computed: ``model.exact`` (docs/guides/runs.md#exact-mode).

A number may differ between sampler and learner for four reasons, and this module removes each one. torch multiplies few
rows by other kernels, so rows are padded to a multiple of `ROWS`, unless all products are magicrl's (`ExactLinear`).
Attention adds over as many keys as a batch happens to have, so it adds over blocks of `BLOCK` keys here, counted from
the start of each sequence and in order: by one kernel on both sides where there are `cpu_kernels`, else by torch.
Functions such as torch's SiLU compute the last values of a tensor differently from the others, so `silu` consists of
operations that do not. The sum of a single row is spread over threads, which `row_sums` avoids.

torch does not guarantee these properties of its kernels. `use_exact` measures them, with the model's own shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from magicrl.models import cpu_kernels, cpu_rows
from magicrl.models.linear import gradient_sum, linear_product, weight_gradient
from magicrl.models.products import product, widens_bfloat16

ROWS = 16
"""Rows of torch's products are padded to a multiple of this."""
BLOCK = 64
"""Number of keys of a block."""
_FEW, _SMALL = 4, 4096
_CHUNK = 64  # queries whose scores exist at once
_CHUNK_ELEMENTS = 1 << 19  # number of these scores, which then fit in a core's cache
_KNOWN = ("LlamaForCausalLM", "Qwen3ForCausalLM")
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def rounded_up(count: int, step: int) -> int:
    """Return ``count`` rounded up to a multiple of ``step``."""
    return -(-count // step) * step


def filled_rows(x: Tensor, step: int = ROWS) -> Tensor:
    """Return ``[n, ...]`` padded with rows of zeros to a multiple of ``step``."""
    missing = -len(x) % step
    return torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x


def least_rows(heads: int, dim: int, dtype: torch.dtype) -> int:
    """Return the number of rows to which the queries of one token that share a key head of this width are padded."""
    if dtype != torch.bfloat16 or widens_bfloat16():
        return rounded_up(heads, _FEW)
    # oneDNN does not compute a product of at most _SMALL multiplications, and has a separate kernel for a single row.
    return max(heads, 2, _SMALL // (BLOCK * dim) + 1)


def row_sums(x: Tensor) -> Tensor:
    """Return the sum of each row of ``[n, d]``."""
    # torch splits the sum of a single row over threads, and adds the parts.
    return x.sum(dim=1) if len(x) > 1 else torch.cat((x, x)).sum(dim=1)[:1]


def silu(x: Tensor) -> Tensor:
    """Return ``x / (1 + exp(-x))``, computed in float32 or wider."""
    return cast(Tensor, _Silu.apply(x))


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide / wide.neg().exp_().add_(1)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grads[0], x)


def block_weights(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute unnormalised attention weights of masked scores ``[..., blocks * BLOCK]`` in place.

    Returns:
        The weights, their sum and the largest score, ``[..., 1]`` each. A fully hidden block adds 0.
    """
    largest = scores.amax(dim=-1, keepdim=True)
    weights = scores.sub_(largest).exp_()
    # A running sum has a fixed order for any number of blocks.
    total = weights.unflatten(-1, (-1, BLOCK)).sum(dim=-1).cumsum(dim=-1)[..., -1:]
    return weights, total, largest


def add_block(total: Tensor | None, weights: Tensor, values: Tensor) -> Tensor:
    """Return ``total`` plus the product of one block, ``[batch, rows, BLOCK] @ [batch, BLOCK, dim]``, in float32 or
    wider.
    """
    part = product(weights.to(values.dtype), values)
    return part.to(weights.dtype) if total is None else total.add_(part)


def attend_exactly(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Attend causally within rows. The queries are those of the last keys.

    Args:
        query: ``[rows, width, heads, dim]``, as the result.
        key, value: ``[rows, keys, kv_heads, dim]``, from the start of each sequence.
        scaling: Factor on the scores.
    """
    return cast(Tensor, _ExactAttention.apply(query, key, value, scaling))


class _ExactAttention(torch.autograd.Function):
    """Exact forward pass. The backward pass is an ordinary one, from this output and its log-sums: gradients need not
    be equal to anything.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        ctx.scaling = scaling
        width, heads, kv_heads = query.shape[1], query.shape[2], key.shape[2]
        if cpu_kernels.has_both(query.dtype, query.device, query.shape[3]):
            rows = len(query)
            tables = cpu_rows.CpuRow([width] * rows, [key.shape[1]] * rows).tables
            found = cpu_rows.attend_row(*(x.flatten(0, 1) for x in (query, key, value)), *tables, scaling, True)
            out, logs = (x.unflatten(0, (rows, width)) for x in cast("tuple[Tensor, Tensor]", found))
            ctx.save_for_backward(query, key, value, out, logs.transpose(1, 2))
            return out
        q = _heads_first(query.unflatten(2, (kv_heads, -1)), ROWS)
        k, v = (_heads_first(x[:, :, :, None], BLOCK).flatten(1, 2) for x in (key, value))
        outputs, log_sums = _attended(q, k, v, key.shape[1] - width, scaling)
        # [rows * kv_heads, width, heads of each, ...] -> [rows, width, heads, ...]
        out, logs = (
            x[:, :width].unflatten(0, (-1, kv_heads)).transpose(1, 2).flatten(2, 3) for x in (outputs, log_sums)
        )
        assert out.shape[2] == heads
        ctx.save_for_backward(query, key, value, out, logs[..., 0].transpose(1, 2))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, log_sums = ctx.saved_tensors
        width, keys = query.shape[1], key.shape[1]
        wide = [x.transpose(1, 2).to(log_sums.dtype) for x in (grads[0], query, key, value, out)]
        causal = width == keys
        mask = None
        if not causal:
            positions = torch.arange(keys)
            hidden = positions > positions[-width:, None]
            mask = torch.zeros(width, keys, dtype=log_sums.dtype).masked_fill_(hidden, -torch.inf)
        found = _FLASH_BACKWARD(*wide, log_sums, 0.0, causal, attn_mask=mask, scale=ctx.scaling)
        return *(x.transpose(1, 2).to(query.dtype) for x in found), None


def _heads_first(x: Tensor, step: int) -> Tensor:
    """Convert ``[rows, width, kv_heads, heads, dim]`` to ``[rows * kv_heads, width, heads, dim]``, width padded to a
    multiple of ``step``.
    """
    rows, width, kv_heads, *rest = x.shape
    filled = x.new_zeros(rows, kv_heads, rounded_up(width, step), *rest)
    filled[:, :, :width] = x.transpose(1, 2)
    return filled.flatten(0, 1)


def _attended(q: Tensor, k: Tensor, v: Tensor, first: int, scaling: float) -> tuple[Tensor, Tensor]:
    """Return outputs ``[batch, width, heads, dim]`` and log-sums ``[batch, width, heads, 1]``.

    ``q`` has the shape of the outputs, and its first query is at position ``first``. ``k`` and ``v`` are ``[batch,
    keys, dim]``.
    """
    batch, width, heads, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(batch, width, heads, v.shape[-1])
    log_sums = torch.empty(batch, width, heads, 1, dtype=wide)
    for start in range(0, width, _CHUNK):
        stop = min(start + _CHUNK, width)
        # Keys after the last query of the chunk are not read. The keys of padded queries exist.
        reach = min(rounded_up(first + stop, BLOCK), k.shape[1])
        at_once = max(1, _CHUNK_ELEMENTS // ((stop - start) * heads * reach))
        hidden = torch.arange(reach) > torch.arange(first + start, first + stop)[:, None]
        for row in range(0, batch, at_once):
            part = slice(row, row + at_once)
            scores = product(q[part, start:stop].flatten(1, 2), k[part, :reach].transpose(1, 2)).to(wide)
            scores.mul_(scaling).unflatten(1, (-1, heads)).masked_fill_(hidden[:, None], -torch.inf)
            weights, total, largest = block_weights(scores)
            found: Tensor | None = None
            for block in range(0, reach, BLOCK):
                keys = slice(block, block + BLOCK)
                found = add_block(found, weights[..., keys], v[part, keys])
            assert found is not None
            out[part, start:stop] = found.div_(total).unflatten(1, (-1, heads)).to(q.dtype)
            log_sums[part, start:stop] = total.log_().add_(largest).unflatten(1, (-1, heads))
    return out, log_sums


class FilledContext:
    """Attention context for the first ``tokens`` of a padded row. The others attend to nothing."""

    def __init__(self, context: Any, tokens: int) -> None:
        self._context, self._tokens = context, tokens

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, rules: Any = None
    ) -> Tensor:
        """Attend as `magicrl.models.packing.AttentionContext` does."""
        parts = (x[:, :, : self._tokens] for x in (query, key, value))
        found = cast(Tensor, self._context.attend(layer, *parts, scaling, rules))
        missing = query.shape[2] - self._tokens
        # Gradients of the padding are zero, because nothing real has read it.
        return F.pad(found, (0, 0, 0, 0, 0, missing)) if missing else found


def multiplies_exactly(weight: Tensor) -> bool:
    """Return whether `exact_product` serves a linear layer's ``weight``, ``[columns, d]``."""
    return cpu_kernels.can_multiply(weight) or cpu_kernels.can_multiply_rows(weight)


def exact_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x``, ``[..., d]``, times the transposed ``weight``, by magicrl's kernels. It has no gradient."""
    return exact_products(weight)(x.flatten(0, -2)).unflatten(0, x.shape[:-1])


def exact_products(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the same for rows ``[n, d]``, as a function that converts the weight once."""
    if weight.dtype == torch.float32:
        return lambda rows: cpu_kernels.multiply_rows(rows, weight)
    packed = cpu_kernels.packed_weight(weight)
    return lambda rows: cpu_kernels.multiply(rows, packed, len(weight))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.total = gradient_sum(weight)
        return exact_product(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        grad_weight = weight_gradient(grad, x, ctx.total) if ctx.needs_input_grad[1] else None
        return grad @ weight if ctx.needs_input_grad[0] else None, grad_weight


class ExactLinear(nn.Linear):
    """A linear layer without a bias by magicrl's kernels, in which a row's bits don't depend on the others."""

    def forward(self, input: Tensor) -> Tensor:
        return cast(Tensor, _Product.apply(input, self.weight))


class ExactSiLU(nn.Module):
    """`silu` as an activation of transformers."""

    def forward(self, x: Tensor) -> Tensor:
        return silu(x)


def use_exact(model: Any) -> None:
    """Give a model's layers exact arithmetic, and test whether this machine's products support it.

    Raises:
        ValueError: The architecture, a layer or the device is not supported, or the bits of a product depend on its
            number of rows.
    """
    check_exact(model)
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    # Decided by the width of a layer's input, so that sampler and head of the learner decide alike.
    for module in linear:
        if multiplies_exactly(module.weight):
            module.__class__ = ExactLinear
            vars(module).pop("forward", None)  # of `LinearForward`, which would multiply by torch
    model.exact_rows = 1 if all(type(module) is ExactLinear for module in linear) else ROWS
    for layer in model.get_decoder().layers:
        layer.self_attn.exact = True
        layer.mlp.act_fn = ExactSiLU()
    model.exact = True
    _measure(model)


def check_exact(model: Any) -> None:
    """Raise ``ValueError``, with the reason, for a model that cannot be exact."""
    name, config = type(model).__name__, model.config
    fault: str | None = None
    if name not in _KNOWN or not type(model).__module__.startswith("transformers.models."):
        fault = f"it is proven for {' and '.join(_KNOWN)}, this model is a {name}"
    elif model.device.type == "cuda":
        fault = 'it is not proven on CUDA; set run.device = "cpu"'
    elif config.hidden_act != "silu":
        fault = f"the activation {config.hidden_act!r} is not known to be exact"
    elif model.get_decoder().layers[0].self_attn.head_dim < 16:
        fault = "its heads are narrower than 16"
    elif any(isinstance(m, nn.Linear) and cast("Tensor | None", m.bias) is not None for m in model.modules()):
        fault = "a layer has a bias"
    elif any(getattr(layer.self_attn, "sliding_window", None) is not None for layer in model.get_decoder().layers):
        fault = "a layer has a sliding window"
    elif getattr(model.get_decoder().rotary_emb, "rope_type", "default") not in ("default", "linear", "llama3", "yarn"):
        fault = "its rotary embedding depends on the length of the sequence"
    if fault is not None:
        raise ValueError(f"exact log-probs: {fault}; use another model or leave model.exact out")


@torch.no_grad()
def _measure(model: Any) -> None:
    """Compare few rows with the same rows among many, for each weight shape of this model, and test the functions."""
    generator = torch.Generator().manual_seed(0)
    shapes = {tuple(m.weight.shape) for m in model.modules() if type(m) is nn.Linear}
    wrong = [f"a product with a weight of {shape}" for shape in shapes if not _even(shape, model.dtype, generator)]
    dim = cast(int, model.get_decoder().layers[0].self_attn.head_dim)
    # Products of one block and of one sequence, with as few rows as decoding has.
    rows, many = least_rows(1, dim, model.dtype), (3, 2 * BLOCK, dim)
    q, k = (_cancelling(many, sign, model.dtype, generator) for sign in (1, -1))
    weights, v = (_cancelling((3, n, BLOCK), sign, model.dtype, generator) for n, sign in ((2 * BLOCK, 1), (dim, -1)))
    scores, values = product(q, k.transpose(1, 2)), product(weights, v.transpose(1, 2).contiguous())
    few = slice(BLOCK + 5, BLOCK + 5 + rows)
    found = product(q[:1, few], k[:1, :BLOCK].transpose(1, 2))
    part = product(weights[:1, few], v[:1].transpose(1, 2).contiguous())
    if not (torch.equal(found, scores[:1, few, :BLOCK]) and torch.equal(part, values[:1, few])):
        wrong.append(f"attention over heads of {dim}")
    x = torch.randn(70000, generator=generator).abs() * 4
    for name, function in {"exp": torch.exp, "log": torch.log, "cos": torch.cos}.items():
        if not torch.equal(function(x)[60001:60014], function(x[60001:60014])):
            wrong.append(name)
    table = torch.randn(16, len(model.get_output_embeddings().weight), generator=generator)
    if not torch.equal(row_sums(table)[9:10], row_sums(table[9:10])):
        wrong.append("the sum of a row")
    if wrong:
        raise ValueError(
            f"model.exact: on this machine ({torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}, "
            f"{torch.get_num_threads()} threads) the bits of a row depend on the other rows in {', '.join(wrong)}; "
            "set run.threads = 1, or leave model.exact out"
        )


def _cancelling(shape: tuple[int, ...], sign: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return tensors whose halves of the last dimension are equal up to ``sign``. The product of 1 and -1 is then only
    rounding.

    Rounding to bfloat16 hides the order of a sum in nearly every element. It shows in each of these.
    """
    half = torch.randn(*shape[:-1], shape[-1] // 2, generator=generator)
    return F.pad(torch.cat((half, sign * half), dim=-1), (0, shape[-1] % 2)).to(dtype)


def _even(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> bool:
    many = 5 * ROWS * torch.get_num_threads()
    x, weight = (_cancelling((n, shape[1]), sign, dtype, generator) for n, sign in ((many, 1), (shape[0], -1)))
    expected = linear_product(x, weight)
    counts = sorted({ROWS, 2 * ROWS, 3 * ROWS, many // 2 // ROWS * ROWS, many - ROWS})
    return all(torch.equal(linear_product(x[3:][:rows], weight), expected[3:][:rows]) for rows in counts)
