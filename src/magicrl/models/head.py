"""The language-model head that returns log-probabilities and entropies instead of logits.

For a response of 32K tokens and a vocabulary of 150K words the logits alone take 18 GiB in float32, and
autograd would keep several copies. Only two numbers a token are needed: the log-probability of its target
and the entropy of its distribution. This head makes them piece by piece and, in the backward pass, makes
each piece's logits again, so that ``[tokens, vocabulary]`` never exists whole.

Per token, with z the logits after scaling, soft-capping and division by tau, and p = softmax(z):

    log p(a) = z_a - logsumexp(z)            d log p(a) / d z = onehot(a) - p
    H        = -sum_v p_v log p_v            d H / d z        = -p * (log p + H)

What is done to a piece of logits is a ``HeadBackend``'s: torch everywhere (``head_torch.py``), Triton kernels on
CUDA (``head_triton.py``). This file has the formula's frame: checks, autograd, and the order of the pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from magicrl.models.head_backend import HeadBackend, HeadInputs, HeadOptions, Pull
from magicrl.models.head_torch import TorchHead
from magicrl.models.head_triton import TRITON_IS_THERE, TritonHead

__all__ = ["HeadOptions", "logprobs_and_entropies", "pieces"]

_LEAST_WORDS = 1024
"""Fewest words of a piece: narrower ones would make the products slow."""
_WIDEN_ROWS = 4096


def logprobs_and_entropies(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    options: HeadOptions,
    bias: Tensor | None = None,
    *,
    weight_gradient: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution, both differentiable.

    Matrix products run in the dtype of ``weight``; softmax statistics in float32 (float64 for float64
    inputs).

    Args:
        hidden: ``[tokens, d]`` last hidden states, in the dtype of ``weight``.
        weight: ``[V, d]`` output embedding; may be padded below row ``options.valid_vocab``.
        targets: ``[tokens]`` int64, each below the valid vocabulary.
        options: temperature, valid vocabulary, piece size, backend and the model's logit transform.
        bias: ``[V]`` or None.
        weight_gradient: ``[V, d]``, mostly more precise than ``weight``: the backward pass adds the weight's
            gradient to it and gives autograd none, so that no second one of its size exists.

    Returns:
        ``(logprobs, entropies)``, each ``[tokens]``, in nats, float32 (float64 for float64 inputs).

    Raises:
        ValueError: a target lies outside the valid vocabulary, or Triton is asked for and not there.

    Example: with V = 2, d = 1, weight [[1], [0]], hidden [[0]]: log-probability -log 2, entropy log 2.
    """
    vocab = weight.shape[0] if options.valid_vocab is None else options.valid_vocab
    if not 0 < vocab <= weight.shape[0]:
        raise ValueError(f"valid_vocab is {vocab}, but the head has {weight.shape[0]} rows")
    assert targets.shape == hidden.shape[:1], (hidden.shape, targets.shape)
    assert weight_gradient is None or weight_gradient.shape == weight.shape
    if targets.numel() and (int(targets.max()) >= vocab or int(targets.min()) < 0):
        wrong = int(targets.max()) if int(targets.max()) >= vocab else int(targets.min())
        raise ValueError(f"token {wrong} lies outside the vocabulary of {vocab} words: is this the model's tokenizer?")
    found = _Head.apply(hidden, weight, bias, targets, options, weight_gradient)
    logprobs, entropies = cast("tuple[Tensor, Tensor]", found)
    return logprobs, entropies


def _inputs(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: HeadOptions) -> HeadInputs:
    vocab = weight.shape[0] if options.valid_vocab is None else options.valid_vocab
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    wide_bias = None if bias is None else bias[:vocab].to(dtype)
    return HeadInputs(hidden=hidden, weight=weight[:vocab], bias=wide_bias, targets=targets, options=options)


def _backend(inputs: HeadInputs) -> HeadBackend:
    wanted = inputs.options.backend
    fits = TRITON_IS_THERE and inputs.hidden.dtype != torch.float64
    if wanted == "triton" and not fits:
        raise ValueError("the head's Triton kernels need triton, and float32 or narrower tensors; use backend='torch'")
    if fits and (wanted == "triton" or (wanted == "auto" and inputs.hidden.is_cuda)):
        return TritonHead(inputs)
    return TorchHead(inputs)


class _Head(torch.autograd.Function):
    """Saves one logsumexp and one entropy a token; logits are made twice and kept never."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        options: HeadOptions,
        weight_gradient: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies, log_sums = _backend(_inputs(hidden, weight, bias, targets, options)).statistics()
        ctx.save_for_backward(hidden, weight, bias, targets, log_sums, entropies)
        ctx.options, ctx.weight_gradient = options, weight_gradient
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_sums, entropies = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        inputs = _inputs(hidden, weight, bias, targets, ctx.options)
        pull = Pull(
            logprobs=grads[0],
            entropies=grads[1] if bool(grads[1].any()) else None,
            log_sums=log_sums,
            entropy_values=entropies,
        )
        total: Tensor | None = ctx.weight_gradient
        made = torch.zeros_like(weight) if needs_weight and total is None else None
        into = made if total is None else total
        grad_hidden = torch.zeros_like(hidden, dtype=inputs.dtype) if needs_hidden else None
        grad_bias = torch.zeros_like(bias, dtype=inputs.dtype) if needs_bias else None
        _accumulate(inputs, pull, grad_hidden, into if needs_weight else None, grad_bias)
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            made,
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def pieces(tokens: int, vocab: int, chunk_tokens: int) -> Iterator[tuple[slice, list[slice]]]:
    """Words, and the rows that meet them one after the other; a piece has at most ``chunk_tokens * vocab`` logits.

    All rows at once as far as it goes: a weight's gradient is then one product, and nothing is summed over pieces.
    """
    budget = max(chunk_tokens * vocab, 1)
    words = min(vocab, max(budget // max(tokens, 1), min(_LEAST_WORDS, vocab)))
    count = -(-vocab // words)
    words = -(-vocab // count)
    rows = max(1, min(tokens, budget // words))
    for start in range(0, vocab, words):
        yield (
            slice(start, min(start + words, vocab)),
            [slice(row, min(row + rows, tokens)) for row in range(0, tokens, rows)],
        )


def _accumulate(
    inputs: HeadInputs, pull: Pull, grad_hidden: Tensor | None, grad_weight: Tensor | None, grad_bias: Tensor | None
) -> None:
    """Add every piece's share to the gradients that are wanted."""
    backend = _backend(inputs)
    for words, spans in pieces(len(inputs.hidden), len(inputs.weight), inputs.options.chunk_tokens):
        # a narrow gradient is summed over pieces in the statistics' precision
        narrow = grad_weight is not None and len(spans) > 1 and grad_weight.dtype != inputs.dtype
        part = None if grad_weight is None else grad_weight[words]
        if narrow and part is not None:
            part = torch.zeros_like(part, dtype=inputs.dtype)
        for rows in spans:
            gradient = backend.gradient(pull, rows, words)
            if grad_hidden is not None:
                _add_product(grad_hidden[rows], gradient, inputs.weight[words])
            if part is not None:
                _add_product(part, gradient.T, inputs.hidden[rows])
            if grad_bias is not None:
                grad_bias[words] += gradient.sum(dim=0, dtype=grad_bias.dtype)
        if narrow:
            assert grad_weight is not None
            assert part is not None
            grad_weight[words] += part.to(grad_weight.dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right``; a low-precision product is added in the total's precision."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda and total.dtype == torch.float32:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        for start in range(0, len(total), _WIDEN_ROWS):  # a buffer that stays in cache: torch's mixed sum is slow
            span = slice(start, start + _WIDEN_ROWS)
            total[span].add_((left[span] @ right).to(total.dtype))
