"""Arithmetic whose bits do not depend on what else is computed: ``model.exact``, on a CPU (docs/exact.md).

A number may differ between sampler and learner for four reasons, and each is taken away here. Products of few rows run
in other kernels: rows are filled up to a multiple of `ROWS`. Attention adds over as many keys as a batch happens to
have: here over blocks of `BLOCK` keys, counted from the start of each sequence and added in their order. Functions
such as torch's SiLU take the last values of a tensor another way than the others: `silu` is made of parts that do not.
And the sum of a lone row is spread over threads, which `row_sums` keeps it from.

What is true of the kernels is not promised by torch: `use_exact` measures it, on the model's own weights.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 16
"""A product's rows are filled up to a multiple of this."""
BLOCK = 64
"""Keys of a block."""
_FEW, _SMALL = 4, 4096
_CHUNK = 64  # queries whose scores exist at once
_CHUNK_ELEMENTS = 1 << 19  # of these scores, which then stay in a core's cache
_KNOWN = ("LlamaForCausalLM", "Qwen3ForCausalLM")
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def rounded_up(count: int, step: int) -> int:
    """The next multiple of ``step``."""
    return -(-count // step) * step


def filled_rows(x: Tensor) -> Tensor:
    """``[n, ...]`` with rows of zeros behind it, up to a multiple of `ROWS`."""
    missing = -len(x) % ROWS
    return torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x


def least_rows(heads: int, dim: int, dtype: torch.dtype) -> int:
    """Rows that the queries of one token are filled up to, which share a key head of this width."""
    if dtype != torch.bfloat16:
        return rounded_up(heads, _FEW)
    # a product of at most so many multiplications is not oneDNN's, and oneDNN has a kernel of its own for one row
    return max(heads, 2, _SMALL // (BLOCK * dim) + 1)


def row_sums(x: Tensor) -> Tensor:
    """Sum of each row of ``[n, d]``."""
    # of a single row torch makes a sum for each thread, and adds these
    return x.sum(dim=1) if len(x) > 1 else torch.cat((x, x)).sum(dim=1)[:1]


def silu(x: Tensor) -> Tensor:
    """``x / (1 + exp(-x))``, in float32 at least."""
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
    """Attention weights of masked scores ``[..., blocks * BLOCK]``, made in their place and not normalised yet.

    Returns:
        The weights, their sum and the largest score, ``[..., 1]`` each. A block that is hidden whole adds 0.
    """
    largest = scores.amax(dim=-1, keepdim=True)
    weights = scores.sub_(largest).exp_()
    # a running sum has an order, whatever the number of blocks
    total = weights.unflatten(-1, (-1, BLOCK)).sum(dim=-1).cumsum(dim=-1)[..., -1:]
    return weights, total, largest


def add_block(total: Tensor | None, weights: Tensor, values: Tensor) -> Tensor:
    """``total`` plus the product of one block, ``[batch, rows, BLOCK] @ [batch, BLOCK, dim]``, in float32 at least."""
    part = torch.bmm(weights.to(values.dtype), values)
    return part.to(weights.dtype) if total is None else total.add_(part)


def attend_exactly(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Causal attention within rows, the queries being those of the last keys.

    Args:
        query: ``[rows, width, heads, dim]``, as the result.
        key, value: ``[rows, keys, kv_heads, dim]``, from the start of each sequence.
        scaling: factor on the scores.
    """
    return cast(Tensor, _ExactAttention.apply(query, key, value, scaling))


class _ExactAttention(torch.autograd.Function):
    """Backward is torch's own, from this output and its log-sums: a gradient has nothing that it must equal."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        width, heads, kv_heads = query.shape[1], query.shape[2], key.shape[2]
        q = _heads_first(query.unflatten(2, (kv_heads, -1)), ROWS)
        k, v = (_heads_first(x[:, :, :, None], BLOCK).flatten(1, 2) for x in (key, value))
        outputs, log_sums = _attended(q, k, v, key.shape[1] - width, scaling)
        # [rows * kv_heads, width, heads of each, ...] -> [rows, width, heads, ...]
        out, logs = (
            x[:, :width].unflatten(0, (-1, kv_heads)).transpose(1, 2).flatten(2, 3) for x in (outputs, log_sums)
        )
        assert out.shape[2] == heads
        ctx.save_for_backward(query, key, value, out, logs[..., 0].transpose(1, 2))
        ctx.scaling = scaling
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
    """``[rows, width, kv_heads, heads, dim]`` -> ``[rows * kv_heads, width, heads, dim]``, width a multiple of step."""
    rows, width, kv_heads, *rest = x.shape
    filled = x.new_zeros(rows, kv_heads, rounded_up(width, step), *rest)
    filled[:, :, :width] = x.transpose(1, 2)
    return filled.flatten(0, 1)


def _attended(q: Tensor, k: Tensor, v: Tensor, first: int, scaling: float) -> tuple[Tensor, Tensor]:
    """Outputs ``[batch, width, heads, dim]`` and log-sums ``[batch, width, heads, 1]``.

    ``q`` as the outputs, its first query at position ``first``; ``k``, ``v`` ``[batch, keys, dim]``.
    """
    batch, width, heads, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(batch, width, heads, v.shape[-1])
    log_sums = torch.empty(batch, width, heads, 1, dtype=wide)
    for start in range(0, width, _CHUNK):
        stop = min(start + _CHUNK, width)
        # keys behind the last query of the chunk are read for nobody; those of a filled-up query are there
        reach = min(rounded_up(first + stop, BLOCK), k.shape[1])
        at_once = max(1, _CHUNK_ELEMENTS // ((stop - start) * heads * reach))
        hidden = torch.arange(reach) > torch.arange(first + start, first + stop)[:, None]
        for row in range(0, batch, at_once):
            part = slice(row, row + at_once)
            scores = torch.bmm(q[part, start:stop].flatten(1, 2), k[part, :reach].transpose(1, 2)).to(wide)
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
    """An attention context for the first ``tokens`` of a row that was filled up; the others attend to nothing."""

    def __init__(self, context: Any, tokens: int) -> None:
        self._context, self._tokens = context, tokens

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, rules: Any = None
    ) -> Tensor:
        """See `magicrl.models.packing.AttentionContext`."""
        parts = (x[:, :, : self._tokens] for x in (query, key, value))
        found = cast(Tensor, self._context.attend(layer, *parts, scaling, rules))
        missing = query.shape[2] - self._tokens
        # gradients of what is cut off are zero: nothing real read it
        return F.pad(found, (0, 0, 0, 0, 0, missing)) if missing else found


class _ExactActivation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return silu(x)


def use_exact(model: Any) -> None:
    """Give a model's layers exact arithmetic, and look whether this machine's products keep their promise.

    Raises:
        ValueError: another architecture, a layer that is not known to be exact, a device that is no CPU, or kernels
            whose bits depend on the number of rows.
    """
    check_exact(model)
    for layer in model.get_decoder().layers:
        layer.self_attn.exact = True
        layer.mlp.act_fn = _ExactActivation()
    model.exact = True
    _measure(model)


def check_exact(model: Any) -> None:
    """Raise ``ValueError`` for a model that cannot be exact, in the words of its cause."""
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
    """Compare rows of few with the same rows of many, for a weight of each shape of this model; and the functions."""
    generator = torch.Generator().manual_seed(0)
    shapes = {tuple(m.weight.shape) for m in model.modules() if isinstance(m, nn.Linear)}
    wrong = [f"a product with a weight of {shape}" for shape in shapes if not _even(shape, model.dtype, generator)]
    dim = cast(int, model.get_decoder().layers[0].self_attn.head_dim)
    if not _even_attention(dim, model.dtype, generator):
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
    """Halves of a last dimension that are equal up to ``sign``: of 1 and -1 a product is what rounding leaves.

    The order of a sum, which rounding to bfloat16 hides from nearly every element, shows in each of these.
    """
    half = torch.randn(*shape[:-1], shape[-1] // 2, generator=generator)
    return F.pad(torch.cat((half, sign * half), dim=-1), (0, shape[-1] % 2)).to(dtype)


def _even(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> bool:
    many = 5 * ROWS * torch.get_num_threads()
    x, weight = (_cancelling((n, shape[1]), sign, dtype, generator) for n, sign in ((many, 1), (shape[0], -1)))
    expected = F.linear(x, weight)
    counts = sorted({ROWS, 2 * ROWS, 3 * ROWS, many // 2 // ROWS * ROWS, many - ROWS})
    return all(torch.equal(F.linear(x[3:][:rows], weight), expected[3:][:rows]) for rows in counts)


def _even_attention(dim: int, dtype: torch.dtype, generator: torch.Generator) -> bool:
    """Products of one block and of one sequence, with as few rows as decoding has."""
    rows, many = least_rows(1, dim, dtype), (3, 2 * BLOCK, dim)
    q, k = (_cancelling(many, sign, dtype, generator) for sign in (1, -1))
    weights, v = (_cancelling((3, n, BLOCK), sign, dtype, generator) for n, sign in ((2 * BLOCK, 1), (dim, -1)))
    scores, values = torch.bmm(q, k.transpose(1, 2)), torch.bmm(weights, v.transpose(1, 2).contiguous())
    few = slice(BLOCK + 5, BLOCK + 5 + rows)
    found = torch.bmm(q[:1, few], k[:1, :BLOCK].transpose(1, 2))
    part = torch.bmm(weights[:1, few], v[:1].transpose(1, 2).contiguous())
    return torch.equal(found, scores[:1, few, :BLOCK]) and torch.equal(part, values[:1, few])
