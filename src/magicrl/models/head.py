"""The language-model head that returns log-probabilities and entropies instead of logits.

For a response of 32K tokens and a vocabulary of 150K words the logits alone take 18 GiB in float32, and
autograd would keep several copies. Only two numbers a token are needed: the log-probability of its target
and the entropy of its distribution. This head makes them chunk by chunk and, in the backward pass, makes
each chunk's logits again, so that ``[tokens, vocabulary]`` never exists whole.

Per token, with z the logits after soft-capping, scaling and division by tau, and p = softmax(z):

    log p(a) = z_a - logsumexp(z)            d log p(a) / d z = onehot(a) - p
    H        = -sum_v p_v log p_v            d H / d z        = -p * (log p + H)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

_CPU_BLOCK_ELEMENTS = 1 << 19
"""Softmax statistics are taken over blocks of rows that stay in a core's cache (2 MiB of float32)."""
_GPU_BLOCK_ELEMENTS = 1 << 27


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadOptions:
    """What lies between hidden states and log-probabilities, apart from the weights.

    Attributes:
        temperature: tau, > 0; divides the logits before the log-softmax (recipe section 2).
        valid_vocab: rows of the weight that are words. Later rows are padding: their probability is 0.
            None means all rows.
        chunk_tokens: rows of logits that exist at once.
        scale: constant factor on the logits, before soft-capping (Cohere, Granite).
        softcap: logits become ``softcap * tanh(logits / softcap)`` (Gemma 2); None for most models.
    """

    temperature: float = 1.0
    valid_vocab: int | None = None
    chunk_tokens: int = 1024
    scale: float = 1.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(f"temperature must be > 0 to take log-probabilities, got {self.temperature}")
        if self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be >= 1, got {self.chunk_tokens}")


def logprobs_and_entropies(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    options: HeadOptions,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution, both differentiable.

    Matrix products run in the dtype of ``weight``; softmax statistics in float32 (float64 for float64
    inputs). The weight's gradient is summed over chunks in float32 and then given its dtype.

    Args:
        hidden: ``[tokens, d]`` last hidden states, in the dtype of ``weight``.
        weight: ``[V, d]`` output embedding; may be padded below row ``options.valid_vocab``.
        targets: ``[tokens]`` int64, each below the valid vocabulary.
        options: temperature, valid vocabulary, chunk size and the model's logit transform.
        bias: ``[V]`` or None.

    Returns:
        ``(logprobs, entropies)``, each ``[tokens]``, in nats, float32 (float64 for float64 inputs).

    Raises:
        ValueError: a target lies outside the valid vocabulary.

    Example: with V = 2, d = 1, weight [[1], [0]], hidden [[0]]: log-probability -log 2, entropy log 2.
    """
    vocab = weight.shape[0] if options.valid_vocab is None else options.valid_vocab
    if not 0 < vocab <= weight.shape[0]:
        raise ValueError(f"valid_vocab is {vocab}, but the head has {weight.shape[0]} rows")
    assert targets.shape == hidden.shape[:1], (hidden.shape, targets.shape)
    if targets.numel() and (int(targets.max()) >= vocab or int(targets.min()) < 0):
        wrong = int(targets.max()) if int(targets.max()) >= vocab else int(targets.min())
        raise ValueError(f"token {wrong} lies outside the vocabulary of {vocab} words: is this the model's tokenizer?")
    logprobs, entropies = cast("tuple[Tensor, Tensor]", _Head.apply(hidden, weight, bias, targets, options))
    return logprobs, entropies


def _statistics_dtype(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


class _Blocks:
    """Walks over the logits of all tokens in chunks (one matrix product) and blocks (one softmax)."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, options: HeadOptions) -> None:
        vocab = weight.shape[0] if options.valid_vocab is None else options.valid_vocab
        self.hidden, self.options = hidden, options
        self.weight = weight[:vocab]  # padded rows are never computed, so their probability is exactly 0
        self.dtype = _statistics_dtype(hidden)
        self.bias = None if bias is None else bias[:vocab].to(self.dtype)
        elements = _CPU_BLOCK_ELEMENTS if hidden.device.type == "cpu" else _GPU_BLOCK_ELEMENTS
        self.block_rows = max(1, min(elements // vocab, options.chunk_tokens, len(hidden)))
        self.buffers = [torch.empty(self.block_rows, vocab, dtype=self.dtype, device=hidden.device) for _ in range(2)]

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Rows of a chunk and its raw product with the weight ``[rows, vocab]`` in the weight's dtype."""
        for start in range(0, len(self.hidden), self.options.chunk_tokens):
            rows = slice(start, min(start + self.options.chunk_tokens, len(self.hidden)))
            yield rows, self.hidden[rows] @ self.weight.T

    def blocks(self, rows: slice, product: Tensor) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Blocks of a chunk: rows of the whole, the block of ``product``, its logits and a spare buffer.

        Logits are in the statistics' dtype, transformed and divided by tau. The last two are reused by the
        next block.
        """
        for start in range(0, product.shape[0], self.block_rows):
            part = product[start : start + self.block_rows]
            logits, spare = (buffer[: len(part)] for buffer in self.buffers)
            logits.copy_(part)
            if self.bias is not None:
                logits.add_(self.bias)
            if self.options.scale != 1.0:
                logits.mul_(self.options.scale)
            if self.options.softcap is not None:
                logits.div_(self.options.softcap).tanh_().mul_(self.options.softcap)
            if self.options.temperature != 1.0:
                logits.div_(self.options.temperature)
            yield slice(rows.start + start, rows.start + start + len(part)), part, logits, spare

    def transform_gradient(self, gradient: Tensor, logits: Tensor) -> None:
        """Turn the gradient of the final logits into that of the raw product, in place."""
        factor = self.options.scale / self.options.temperature
        if self.options.softcap is not None:  # d softcap*tanh(x/softcap) = 1 - tanh^2
            gradient.mul_(1 - (logits * (self.options.temperature / self.options.softcap)).square_())
        if factor != 1.0:
            gradient.mul_(factor)


class _Head(torch.autograd.Function):
    """Saves one logsumexp and one entropy a token; logits are made twice and kept never."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: HeadOptions
    ) -> tuple[Tensor, Tensor]:
        walk = _Blocks(hidden, weight, bias, options)
        logprobs = torch.empty(len(hidden), dtype=walk.dtype, device=hidden.device)
        entropies, log_sums = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for rows, product in walk.chunks():
            for span, _, logits, spare in walk.blocks(rows, product):
                largest = logits.amax(dim=1, keepdim=True)
                logits.sub_(largest)
                chosen = logits.gather(1, targets[span, None])[:, 0]
                torch.exp(logits, out=spare)
                total = spare.sum(dim=1)
                log_total = total.log()
                torch.sub(chosen, log_total, out=logprobs[span])
                # sum_v p_v z_v with z relative to the largest: no cancellation of large numbers
                mean = spare.mul_(logits).sum(dim=1).div_(total)
                torch.sub(log_total, mean, out=entropies[span])
                torch.add(log_total, largest[:, 0], out=log_sums[span])
        ctx.save_for_backward(hidden, weight, bias, targets, log_sums, entropies)
        ctx.options = options
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_sums, entropies = ctx.saved_tensors
        grad_logprobs, grad_entropies = grads
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        walk = _Blocks(hidden, weight, bias, ctx.options)
        with_entropy = bool(grad_entropies.any())
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=walk.dtype) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=walk.dtype) if needs_bias else None
        for rows, product in walk.chunks():
            for span, part, logits, spare in walk.blocks(rows, product):
                _logit_gradient(
                    logits, spare, log_sums[span], entropies[span] if with_entropy else None,
                    targets[span], grad_logprobs[span], grad_entropies[span],
                )  # fmt: skip
                walk.transform_gradient(spare, logits)
                part.copy_(spare)  # the chunk now holds its gradient
            if grad_hidden is not None:
                torch.mm(product, walk.weight, out=grad_hidden[rows])
            if grad_weight is not None:
                _add_product(grad_weight[: len(walk.weight)], product, hidden[rows])
            if grad_bias is not None:
                grad_bias[: len(walk.weight)] += product.sum(dim=0, dtype=walk.dtype)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
        )


def _logit_gradient(
    logits: Tensor,
    out: Tensor,
    log_sums: Tensor,
    entropies: Tensor | None,
    targets: Tensor,
    grad_logprobs: Tensor,
    grad_entropies: Tensor,
) -> None:
    """Write ``g (onehot - p) - h p (log p + H)`` into ``out``, all ``[rows, vocab]``; g, h are per row.

    Arranged as ``p * (-(g + h (H - L)) - h z) + g onehot`` with L the logsumexp: one exponential and two passes.
    """
    torch.sub(logits, log_sums[:, None], out=out)
    out.exp_()
    if entropies is None:
        out.mul_(-grad_logprobs[:, None])
    else:
        constant = grad_logprobs + grad_entropies * (entropies - log_sums)
        out.mul_(torch.addcmul(constant[:, None], logits, grad_entropies[:, None]).neg_())
    out.scatter_add_(1, targets[:, None], grad_logprobs[:, None])


def _add_product(total: Tensor, gradient: Tensor, hidden: Tensor) -> None:
    """``total += gradient^T hidden``; a low-precision product is added in the total's precision."""
    if total.dtype == gradient.dtype:
        total.addmm_(gradient.T, hidden)
    else:
        total.add_(gradient.T @ hidden)
