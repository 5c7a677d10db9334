"""The language-model head that returns log-probabilities and entropies instead of logits.

For a response of 32K tokens and a vocabulary of 150K words the logits alone take 18 GiB in float32, and autograd would
keep several copies. Only two numbers a token are needed. This head makes them piece by piece and, in the backward pass,
makes each piece's logits again, so that ``[tokens, vocabulary]`` never exists whole.

Per token, with z the logits after scaling, soft-capping and division by tau, and p = softmax(z):

    log p(a) = z_a - logsumexp(z)            d log p(a) / d z = onehot(a) - p
    H        = -sum_v p_v log p_v            d H / d z        = -p * (log p + H)

With ``entropy_clamp`` H is that of p over the likelier words alone, divided by their sum (Shen 2025, 2509.03493).
`TorchHead` works on a piece of logits everywhere, `KernelHead` in bfloat16 on a CPU that has kernels,
``head_triton.TritonHead`` on CUDA.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from magicrl.models import cpu_kernels
from magicrl.models.exact import filled_rows, row_sums

Backend = Literal["auto", "torch", "triton"]
TRITON_INSTALLED = importlib.util.find_spec("triton") is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """Tile sizes of the Triton kernels."""

    tokens: int = 128  # rows of a program
    words: int = 128  # columns of one tile of logits
    inner: int = 64  # of the hidden width, multiplied at a time
    group: int = 16  # blocks of rows that follow each other before the next words
    words_per_program: int = 16  # tiles that a program of the forward pass goes through, one after the other
    warps: int = 8  # of a program
    stages: int = 3  # of its pipeline


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadOptions:
    """What lies between hidden states and log-probabilities, apart from the weights."""

    temperature: float = 1.0  # tau, > 0; divides the logits before the log-softmax (recipe section 2)
    valid_vocab: int | None = None  # rows of the weight that are words: padding has probability 0. None: all
    chunk_tokens: int = 1024  # a piece has as many logits as so many tokens have, whatever its shape
    scale: float = 1.0  # constant factor on the logits, before soft-capping (Cohere, Granite)
    softcap: float | None = None  # logits become ``softcap * tanh(logits / softcap)`` (Gemma 2); None for most models
    float32: bool = False  # logits of narrower weights in float32, never rounded to the weights' dtype
    backend: Backend = "auto"  # ``auto`` is Triton where the tensors are on CUDA and Triton is installed, else torch
    tiles: Tiles | None = None  # of the Triton kernels; None is what suits device, dtype and softcap
    exact: bool = False  # the bits of a token do not depend on the others (`magicrl.models.exact`); on a CPU
    entropy_clamp: float = 0.0  # share of the words, the least likely, that the entropies leave out; in torch

    def __post_init__(self) -> None:
        if not 0 <= self.entropy_clamp < 1:
            raise ValueError(f"entropy_clamp must be in [0, 1), got {self.entropy_clamp}")
        if self.temperature <= 0:
            raise ValueError(f"temperature must be > 0 to take log-probabilities, got {self.temperature}")
        if self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be >= 1, got {self.chunk_tokens}")


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadInputs:
    """What a backend works on: the weight's padded rows are gone, so their probability is exactly 0."""

    hidden: Tensor  # ``[tokens, d]``
    weight: Tensor  # ``[vocab, d]`` in the dtype of ``hidden``
    bias: Tensor | None  # ``[vocab]`` in the dtype of the statistics, or None
    targets: Tensor  # ``[tokens]`` int64
    options: HeadOptions

    @property
    def dtype(self) -> torch.dtype:
        """Of softmax statistics: float32, or float64 for float64 inputs."""
        return torch.float64 if self.hidden.dtype == torch.float64 else torch.float32


@dataclass(frozen=True, kw_only=True, slots=True)
class Pull:
    """What the logits' gradient is made of, ``[tokens]`` each, in the dtype of the statistics.

    Arranged as ``p * (-(g + h (H - L)) - h z) + g onehot``: one exponential and two passes.
    """

    logprobs: Tensor  # gradient of the log-probabilities, g
    entropies: Tensor | None  # gradient of the entropies, h; None if all are zero
    log_sums: Tensor  # logsumexp of the logits, L
    entropy_values: Tensor  # H
    kept: Tensor | None = None  # ``[tokens, 2]`` with a clamp: a bound below the logits that H keeps, their logsumexp

    def constant(self, rows: slice) -> Tensor:
        """``-(g + h (H - L))``."""
        found = self.logprobs[rows]
        if self.entropies is not None and self.kept is None:
            found = found + self.entropies[rows] * (self.entropy_values[rows] - self.log_sums[rows])
        return -found


def softmax_statistics(
    logits: Tensor, weights: Tensor, targets: Tensor, *, exact: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of the targets, entropies, and logarithms of the sums of the weights, ``[r]`` each.

    Args:
        logits: ``[r, V]`` relative to the largest of each row.
        weights: ``[r, V]`` their exponentials; written over.
        targets: ``[r]``.
        exact: see `HeadOptions`.
    """
    sums = row_sums if exact else _row_sums
    total = sums(weights)
    log_total = total.log()
    logprobs = logits.gather(1, targets[:, None])[:, 0].sub_(log_total)
    # sum_v p_v z_v with z relative to the largest: no cancellation of large numbers
    mean = sums(weights.mul_(logits)).div_(total)
    return logprobs, log_total - mean, log_total


def clamped_statistics(logits: Tensor, spare: Tensor, clamp: float, *, exact: bool) -> tuple[Tensor, Tensor]:
    """Entropies over the likelier words of each row, ``[r]``, and `Pull.kept` relative to the largest, ``[r, 2]``.

    Args:
        logits: ``[r, V]`` relative to the largest of each row.
        spare: ``[r, V]``, written over.
        clamp: share of the words that are left out, the least likely; of equally likely ones all or none.
        exact: see `HeadOptions`.
    """
    sums = row_sums if exact else _row_sums
    unlikely = logits < logits.kthvalue(int(clamp * logits.shape[1]) + 1, dim=1, keepdim=True).values
    stay = logits.masked_fill(unlikely, torch.inf).amin(dim=1)
    # the bound is halfway to the next word: the backward pass may round its logits differently
    bound = (stay + logits.masked_fill(~unlikely, -torch.inf).amax(dim=1)) / 2
    torch.exp(logits, out=spare)
    total = sums(spare.masked_fill_(unlikely, 0.0))
    log_total = total.log()
    return log_total - sums(spare.mul_(logits)).div_(total), torch.stack((bound, log_total), dim=1)


def _row_sums(x: Tensor) -> Tensor:
    return x.sum(dim=1)


_CPU_BLOCK_ELEMENTS = 1 << 19
"""Softmax statistics are taken over blocks of rows that stay in a core's cache (2 MiB of float32)."""
# 128 MiB of float32, twice: logits and spare
_GPU_BLOCK_ELEMENTS = 1 << 25


class TorchHead:
    """The two passes over the logits in torch: softmax in blocks that stay in cache."""

    def __init__(self, inputs: HeadInputs) -> None:
        self._inputs = inputs
        self._elements = _GPU_BLOCK_ELEMENTS if inputs.hidden.is_cuda else _CPU_BLOCK_ELEMENTS
        self._buffers: list[Tensor] = []

    def statistics(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Log-probs, entropies and logsumexp, ``[tokens]`` each, and `Pull.kept`."""
        inputs, clamp = self._inputs, self._inputs.options.entropy_clamp
        tokens, vocab = len(inputs.hidden), len(inputs.weight)
        logprobs = torch.empty(tokens, dtype=inputs.dtype, device=inputs.hidden.device)
        entropies, log_sums = torch.empty_like(logprobs), torch.empty_like(logprobs)
        kept = logprobs.new_empty(tokens, 2) if clamp else None
        step = inputs.options.chunk_tokens
        for start in range(0, tokens, step):
            # all words of some rows: a softmax needs its whole row once
            product = self._product(slice(start, start + step), slice(0, vocab))
            for span, _, logits, spare in self._blocks(start, product, slice(0, vocab)):
                largest = logits.amax(dim=1, keepdim=True)
                # relative to the largest, so that no exponential overflows
                logits.sub_(largest)
                torch.exp(logits, out=spare)
                found = softmax_statistics(logits, spare, inputs.targets[span], exact=inputs.options.exact)
                logprobs[span], entropies[span], log_total = found
                torch.add(log_total, largest[:, 0], out=log_sums[span])
                if kept is not None:
                    entropies[span], own = clamped_statistics(logits, spare, clamp, exact=inputs.options.exact)
                    kept[span] = own + largest
        return logprobs, entropies, log_sums, kept

    def gradient(self, pull: Pull, rows: slice, words: slice) -> Tensor:
        inputs = self._inputs
        product = self._product(rows, words)
        for span, part, logits, spare in self._blocks(rows.start, product, words):
            # p from the saved logsumexp: no sum over words is needed again, so a piece may have a part of them
            torch.sub(logits, pull.log_sums[span, None], out=spare)
            spare.exp_()
            constant = pull.constant(span)[:, None]
            if pull.entropies is None or pull.kept is not None:
                spare.mul_(constant)
            else:
                spare.mul_(torch.addcmul(constant, logits, pull.entropies[span, None], value=-1))
            place = inputs.targets[span] - words.start
            # a target among other words is another piece's
            (here,) = torch.where((place >= 0) & (place < product.shape[1]))
            spare[here, place[here]] += pull.logprobs[span][here]
            if pull.entropies is not None and pull.kept is not None:
                spare.add_(_clamped_pull(logits, pull.kept[span], pull.entropies[span], pull.entropy_values[span]))
            self._through_transform(spare, logits)
            # over the product that it came from, rounded to the weights' dtype: no second tensor of a piece's size
            part.copy_(spare)
        return product.to(inputs.hidden.dtype)

    def _product(self, rows: slice, words: slice) -> Tensor:
        inputs = self._inputs
        if inputs.options.float32:
            return float32_product(inputs.hidden[rows], inputs.weight[words])
        hidden = inputs.hidden[rows]
        return ((filled_rows(hidden) if inputs.options.exact else hidden) @ inputs.weight[words].T)[: len(hidden)]

    def _blocks(self, first: int, product: Tensor, words: slice) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Blocks of a product: rows of the whole, the block of ``product``, its logits and a spare buffer.

        Logits are in the statistics' dtype, transformed and divided by tau; they and the spare are reused by the next.
        """
        inputs, options = self._inputs, self._inputs.options
        # two buffers for all blocks, in the statistics' dtype: the whole product is never widened
        rows = max(1, min(self._elements // product.shape[1], len(product)))
        if not self._buffers or self._buffers[0].numel() < rows * product.shape[1]:
            self._buffers = [product.new_empty(rows * product.shape[1], dtype=inputs.dtype) for _ in range(2)]
        for start in range(0, len(product), rows):
            part = product[start : start + rows]
            logits, spare = (buffer[: part.numel()].view(part.shape) for buffer in self._buffers)
            logits.copy_(part)
            # in the model's own order, and tau last: it divides the logits as the model defines them
            if inputs.bias is not None:
                logits.add_(inputs.bias[words])
            if options.scale != 1.0:
                logits.mul_(options.scale)
            if options.softcap is not None:
                logits.div_(options.softcap).tanh_().mul_(options.softcap)
            if options.temperature != 1.0:
                logits.div_(options.temperature)
            yield slice(first + start, first + start + len(part)), part, logits, spare

    def _through_transform(self, gradient: Tensor, logits: Tensor) -> None:
        """Turn the gradient of the final logits into that of the raw product, in place."""
        options = self._inputs.options
        factor = options.scale / options.temperature
        if options.softcap is not None:  # d softcap*tanh(x/softcap) = 1 - tanh^2
            gradient.mul_(1 - (logits * (options.temperature / options.softcap)).square_())
        if factor != 1.0:
            gradient.mul_(factor)


class KernelHead(TorchHead):
    """The same with own kernels in place of the passes over bfloat16 logits, on a CPU, where nothing but a factor lies
    between product and softmax."""

    @staticmethod
    def serves(inputs: HeadInputs) -> bool:
        options = inputs.options
        more = inputs.bias is not None or options.softcap is not None or options.float32 or options.exact
        return not more and not options.entropy_clamp and cpu_kernels.serves(
            inputs.weight.dtype, inputs.weight.device, _KERNEL_BLOCK
        )  # fmt: skip

    @property
    def _factor(self) -> float:
        return self._inputs.options.scale / self._inputs.options.temperature

    def statistics(self) -> tuple[Tensor, Tensor, Tensor, None]:
        inputs, step = self._inputs, self._inputs.options.chunk_tokens
        tokens, words = len(inputs.hidden), slice(0, len(inputs.weight))
        logprobs, entropies, log_sums = (torch.empty(tokens, dtype=inputs.dtype) for _ in range(3))
        for start in range(0, tokens, step):
            rows = slice(start, start + step)
            product = self._product(rows, words)
            factors = torch.full((len(product),), self._factor)
            largest, sums, moments = cpu_kernels.softmax_sums(product, factors, _KERNEL_BLOCK)
            total = sums.sum(-1)
            log_total = total.log()
            chosen = product.gather(1, inputs.targets[rows, None])[:, 0].float() * self._factor
            logprobs[rows], entropies[rows] = chosen - largest - log_total, log_total - moments / total
            log_sums[rows] = largest + log_total
        return logprobs, entropies, log_sums, None

    def gradient(self, pull: Pull, rows: slice, words: slice) -> Tensor:
        product = self._product(rows, words).contiguous()
        slope = None if pull.entropies is None else pull.entropies[rows]
        targets = self._inputs.targets[rows] - words.start  # one among other words is another piece's
        cpu_kernels.softmax_pull(
            product, self._factor, self._factor, pull.log_sums[rows], pull.constant(rows), slope, pull.logprobs[rows],
            targets,
        )  # fmt: skip
        return product


_KERNEL_BLOCK = 256  # words whose weights are summed up in float32


def _clamped_pull(logits: Tensor, kept: Tensor, pull: Tensor, entropies: Tensor) -> Tensor:
    """``[r, V]`` the entropies' part of the logits' gradient: ``-h q (log q + H)``, q being p over the words kept."""
    log_q = logits - kept[:, 1:]
    found = log_q.exp().mul_(log_q.add_(entropies[:, None])).mul_(-pull[:, None])
    return found.masked_fill_(logits < kept[:, :1], 0.0)


__all__ = ["Float32Head", "HeadOptions", "float32_product", "logprobs_and_entropies", "pieces"]


def float32_product(hidden: Tensor, weight: Tensor) -> Tensor:
    """``hidden @ weight^T`` in float32 for ``[n, d]`` and ``[V, d]`` of a narrower dtype; others stay as they are."""
    if hidden.dtype in (torch.float32, torch.float64):
        return hidden @ weight.T
    if hidden.is_cuda:
        # products of narrow numbers are summed up in float32 by the hardware: they are only not rounded
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    wide, out = hidden.float(), torch.empty(len(hidden), len(weight), device=hidden.device)
    for start in range(0, len(weight), _WIDEN_ROWS):
        words = slice(start, start + _WIDEN_ROWS)  # some words at a time: no float32 copy of the whole weight
        torch.mm(wide, weight[words].float().T, out=out[:, words])
    return out


class Float32Head:
    """In the place of an output head's forward: the same weights, logits in float32 (MiniMax-M1, ScaleRL).

    An object, so that a copied model's head finds its own weight.
    """

    def __init__(self, head: torch.nn.Linear) -> None:
        self._head = head

    @classmethod
    def put_into(cls, model: Any) -> None:
        """Let the model's own head, and whoever asks `serves`, compute in float32."""
        head = model.get_output_embeddings()
        if not isinstance(head, torch.nn.Linear):
            raise ValueError(
                f"the output head of {type(model).__name__} is no linear layer; leave out model.head_dtype"
            )
        head.forward = cls(head)  # pyright: ignore[reportAttributeAccessIssue]

    @classmethod
    def serves(cls, model: Any) -> bool:
        """Whether the model's head computes in float32."""
        return isinstance(model.get_output_embeddings().forward, cls)

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = float32_product(hidden.flatten(0, -2), self._head.weight).unflatten(0, hidden.shape[:-1])
        bias = cast("Tensor | None", self._head.bias)
        return logits if bias is None else logits + bias


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

    Matrix products run in the dtype of ``weight``; softmax statistics in float32 (float64 for float64 inputs).

    Args:
        hidden: ``[tokens, d]`` last hidden states, in the dtype of ``weight``.
        weight: ``[V, d]`` output embedding; may be padded below row ``options.valid_vocab``.
        targets: ``[tokens]`` int64, each below the valid vocabulary.
        options: temperature, valid vocabulary, piece size, backend and the model's logit transform.
        bias: ``[V]`` or None.
        weight_gradient: ``[V, d]``, mostly more precise than ``weight``: the backward pass adds the weight's
            gradient to it and gives autograd none, so that no second one of its size exists.

    Returns:
        ``(logprobs, entropies)``, each ``[tokens]``, in nats, in the dtype of the statistics.

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


def _backend(inputs: HeadInputs) -> Any:
    """`TorchHead`, or one of the same two passes in kernels."""
    wanted = inputs.options.backend
    fits = TRITON_INSTALLED and inputs.hidden.dtype != torch.float64 and not inputs.options.entropy_clamp
    if wanted == "triton" and not fits:
        raise ValueError(
            "the head's Triton kernels need triton, float32 or narrower tensors, and no entropy_clamp; use "
            "backend='torch'"
        )
    if fits and (wanted == "triton" or (wanted == "auto" and inputs.hidden.is_cuda)):
        from magicrl.models.head_triton import TritonHead

        return TritonHead(inputs)
    return KernelHead(inputs) if KernelHead.serves(inputs) else TorchHead(inputs)


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
        logprobs, entropies, *saved = _backend(_inputs(hidden, weight, bias, targets, options)).statistics()
        ctx.save_for_backward(hidden, weight, bias, targets, entropies, *saved)
        ctx.options, ctx.weight_gradient = options, weight_gradient
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, entropies, log_sums, kept = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        inputs = _inputs(hidden, weight, bias, targets, ctx.options)
        pull = Pull(
            logprobs=grads[0],
            # with alpha 0 nothing pulls at the entropies, and their part of every logit is left out
            entropies=grads[1] if bool(grads[1].any()) else None,
            log_sums=log_sums,
            entropy_values=entropies,
            kept=kept,
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
    # as few words as let all rows in, but never so few that the products become slow
    words = min(vocab, max(budget // max(tokens, 1), min(_LEAST_WORDS, vocab)))
    count = -(-vocab // words)
    # of equal width, so that the last one is no sliver
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
        # the product is summed up in float32 by the hardware anyway: it is added without being rounded
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        for start in range(0, len(total), _WIDEN_ROWS):  # a buffer that stays in cache: torch's mixed sum is slow
            span = slice(start, start + _WIDEN_ROWS)
            total[span].add_((left[span] @ right).to(total.dtype))
