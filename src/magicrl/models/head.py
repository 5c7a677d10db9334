"""Language-model head that returns log-probabilities and entropies instead of logits.

For a response of 32K tokens and a vocabulary of 150K words, the logits take 18 GiB in float32, and autograd would keep
several copies. Only two numbers per token are needed. This head computes the logits in pieces, and computes each piece
again in the backward pass, so that ``[tokens, vocabulary]`` never exists as a whole. If all tokens fit into one piece,
the backward pass gets the logits of the forward pass, since that piece existed anyway.

Per token, with z the logits after scaling, soft-capping and division by tau, and p = softmax(z):

    log p(a) = z_a - logsumexp(z)            d log p(a) / d z = onehot(a) - p
    H        = -sum_v p_v log p_v            d H / d z        = -p * (log p + H)

With ``entropy_clamp``, H is that of p restricted to the most likely words and renormalised (Shen 2025, 2509.03493).
`TorchHead` works on a piece of logits on any device, `KernelHead` in bfloat16 on a CPU with kernels,
``head_triton.TritonHead`` on CUDA.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from magicrl.models import cpu_kernels
from magicrl.models.exact import exact_products, filled_rows, multiplies_exactly, row_sums
from magicrl.models.products import float32_product, is_widened, product

Backend = Literal["auto", "torch", "triton"]
TRITON_INSTALLED = importlib.util.find_spec("triton") is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """Tile sizes of the Triton kernels."""

    tokens: int = 128  # rows of a program
    words: int = 128  # columns of one tile of logits
    inner: int = 64  # part of the hidden width that is multiplied at a time
    group: int = 16  # consecutive blocks of rows before the next words
    words_per_program: int = 16  # tiles of a program of the forward pass, one after the other
    warps: int = 8  # per program
    stages: int = 3  # of its pipeline


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadOptions:
    """Settings of the step from hidden states to log-probabilities."""

    temperature: float = 1.0  # tau, > 0; divides the logits before the log-softmax (recipe section 2)
    valid_vocab: int | None = None  # rows of the weight that are words: padding has probability 0. None: all
    chunk_tokens: int = 1024  # logits of a piece in units of the vocabulary, whatever its shape
    scale: float = 1.0  # constant factor on the logits, before soft-capping (Cohere, Granite)
    softcap: float | None = None  # logits become ``softcap * tanh(logits / softcap)`` (Gemma 2); None for most models
    float32: bool = False  # logits of narrower weights in float32, never rounded to the weights' dtype
    backend: Backend = "auto"  # ``auto`` is Triton where the tensors are on CUDA and Triton is installed, else torch
    tiles: Tiles | None = None  # of the Triton kernels; None selects them by device, dtype and softcap
    exact: bool = False  # bits of a token do not depend on the others (`magicrl.models.exact`); only on a CPU
    entropy_clamp: float = 0.0  # share of least likely words that the entropies exclude; only in torch

    def __post_init__(self) -> None:
        if not 0 <= self.entropy_clamp < 1:
            raise ValueError(f"entropy_clamp must be in [0, 1), got {self.entropy_clamp}")
        if self.temperature <= 0:
            raise ValueError(f"temperature must be > 0 to take log-probabilities, got {self.temperature}")
        if self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be >= 1, got {self.chunk_tokens}")


class HeadInputs:
    """Inputs of a backend. The weight's padded rows are removed, so their probability is exactly 0.

    Attributes:
        hidden: ``[tokens, d]``.
        weight: ``[vocab, d]`` in the dtype of ``hidden``.
        bias: ``[vocab]`` in ``dtype``, or None.
        targets: ``[tokens]`` int64.
        options: As given.
        dtype: Precision of softmax statistics: float32, or float64 for float64 inputs.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: HeadOptions
    ) -> None:
        vocab = weight.shape[0] if options.valid_vocab is None else options.valid_vocab
        self.dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        self.hidden, self.weight, self.targets, self.options = hidden, weight[:vocab], targets, options
        self.bias = None if bias is None else bias[:vocab].to(self.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pull:
    """Terms of the logits' gradient, ``[tokens]`` each, in the dtype of the statistics.

    The gradient is arranged as ``p * (-(g + h (H - L)) - h z) + g onehot``, which takes one exponential and two passes.
    """

    logprobs: Tensor  # gradient of the log-probabilities, g
    entropies: Tensor | None  # gradient of the entropies, h; None if all are zero
    log_sums: Tensor  # logsumexp of the logits, L
    entropy_values: Tensor  # H
    kept: Tensor | None = None  # ``[tokens, 2]`` with a clamp: lower bound of the logits in H, their logsumexp

    def constant(self, rows: slice) -> Tensor:
        """Return ``-(g + h (H - L))``."""
        found = self.logprobs[rows]
        if self.entropies is not None and self.kept is None:
            found = found + self.entropies[rows] * (self.entropy_values[rows] - self.log_sums[rows])
        return -found


def softmax_statistics(
    logits: Tensor, weights: Tensor, targets: Tensor, *, exact: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs of the targets, entropies, and logarithms of the sums of the weights, ``[r]`` each.

    Args:
        logits: ``[r, V]`` relative to the largest of each row.
        weights: ``[r, V]`` their exponentials, which are overwritten.
        targets: ``[r]``.
        exact: See `HeadOptions`.
    """
    sums = row_sums if exact else _row_sums
    total = sums(weights)
    log_total = total.log()
    logprobs = logits.gather(1, targets[:, None])[:, 0].sub_(log_total)
    # sum_v p_v z_v with z relative to the largest avoids cancellation of large numbers.
    mean = sums(weights.mul_(logits)).div_(total)
    return logprobs, log_total - mean, log_total


def clamped_statistics(logits: Tensor, spare: Tensor, clamp: float, *, exact: bool) -> tuple[Tensor, Tensor]:
    """Return entropies over the most likely words of each row, ``[r]``, and `Pull.kept` relative to the largest, ``[r,
    2]``.

    Args:
        logits: ``[r, V]`` relative to the largest of each row.
        spare: ``[r, V]``, which is overwritten.
        clamp: Share of least likely words that are excluded. Of equally likely words all or none are.
        exact: See `HeadOptions`.
    """
    sums = row_sums if exact else _row_sums
    unlikely = logits < logits.kthvalue(int(clamp * logits.shape[1]) + 1, dim=1, keepdim=True).values
    stay = logits.masked_fill(unlikely, torch.inf).amin(dim=1)
    # The bound is halfway to the next word, because the backward pass may round its logits differently.
    bound = (stay + logits.masked_fill(~unlikely, -torch.inf).amax(dim=1)) / 2
    torch.exp(logits, out=spare)
    total = sums(spare.masked_fill_(unlikely, 0.0))
    log_total = total.log()
    return log_total - sums(spare.mul_(logits)).div_(total), torch.stack((bound, log_total), dim=1)


def _row_sums(x: Tensor) -> Tensor:
    return x.sum(dim=1)


_CPU_BLOCK_ELEMENTS = 1 << 19
"""Softmax statistics are computed over blocks of rows that fit in a core's cache (2 MiB of float32)."""
# 128 MiB of float32, twice: logits and spare
_GPU_BLOCK_ELEMENTS = 1 << 25


class TorchHead:
    """The two passes over the logits in torch, with softmax in blocks that fit in cache.

    Attributes:
        whole: ``[tokens, vocab]`` product of hidden states and weight, if all tokens fit into one piece. `statistics`
            sets it, and `gradient` overwrites it.
    """

    def __init__(self, inputs: HeadInputs, whole: Tensor | None = None) -> None:
        self._inputs = inputs
        self.whole = whole
        self._elements = _GPU_BLOCK_ELEMENTS if inputs.hidden.is_cuda else _CPU_BLOCK_ELEMENTS
        self._buffers: list[Tensor] = []
        self._exactly: Callable[[Tensor], Tensor] | None = None

    def statistics(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return log-probs, entropies and logsumexp, ``[tokens]`` each, and `Pull.kept`."""
        inputs, clamp = self._inputs, self._inputs.options.entropy_clamp
        tokens, vocab = len(inputs.hidden), len(inputs.weight)
        logprobs = torch.empty(tokens, dtype=inputs.dtype, device=inputs.hidden.device)
        entropies, log_sums = torch.empty_like(logprobs), torch.empty_like(logprobs)
        kept = logprobs.new_empty(tokens, 2) if clamp else None
        step = inputs.options.chunk_tokens
        for start in range(0, tokens, step):
            # All words of some rows, because a softmax needs the whole row.
            product = self._logits(slice(start, start + step))
            self.whole = product if tokens <= step else None
            for span, _, logits, spare in self._blocks(start, product, slice(0, vocab)):
                largest = logits.amax(dim=1, keepdim=True)
                # Relative to the largest, so that no exponential overflows.
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
        """Return the gradient of the raw product for a piece of rows and words."""
        inputs = self._inputs
        product = self._product(rows, words)
        for span, part, logits, spare in self._blocks(rows.start, product, words):
            # p comes from the saved logsumexp. It needs no sum over words, so a piece may have only some of them.
            torch.sub(logits, pull.log_sums[span, None], out=spare)
            spare.exp_()
            constant = pull.constant(span)[:, None]
            if pull.entropies is None or pull.kept is not None:
                spare.mul_(constant)
            else:
                spare.mul_(torch.addcmul(constant, logits, pull.entropies[span, None], value=-1))
            place = inputs.targets[span] - words.start
            # A target among other words belongs to another piece.
            (here,) = torch.where((place >= 0) & (place < product.shape[1]))
            spare[here, place[here]] += pull.logprobs[span][here]
            if pull.entropies is not None and pull.kept is not None:
                spare.add_(_clamped_pull(logits, pull.kept[span], pull.entropies[span], pull.entropy_values[span]))
            # The gradient of the final logits becomes that of the raw product, in place.
            options = self._inputs.options
            factor = options.scale / options.temperature
            if options.softcap is not None:  # d softcap*tanh(x/softcap) = 1 - tanh^2
                spare.mul_(1 - (logits * (options.temperature / options.softcap)).square_())
            if factor != 1.0:
                spare.mul_(factor)
            # In place of the product, in the dtype of the weights: a second tensor of this size is not needed.
            part.copy_(spare)
        return product.to(inputs.hidden.dtype)

    def _logits(self, rows: slice) -> Tensor:
        """Return the product of some rows with all words. In exact mode it has the sampler's bits, unlike gradients."""
        inputs = self._inputs
        if inputs.options.exact and multiplies_exactly(inputs.weight):
            self._exactly = self._exactly or exact_products(inputs.weight)
            return self._exactly(inputs.hidden[rows])
        return self._product(rows, slice(0, len(inputs.weight)))

    def _product(self, rows: slice, words: slice) -> Tensor:
        inputs = self._inputs
        if self.whole is not None:
            return self.whole
        if inputs.options.float32:
            return float32_product(inputs.hidden[rows], inputs.weight[words])
        hidden, weight = inputs.hidden[rows], inputs.weight[words]
        filled = filled_rows(hidden) if inputs.options.exact else hidden
        found = float32_product(filled, weight).to(hidden.dtype) if is_widened(hidden) else filled @ weight.T
        return found[: len(hidden)]

    def _blocks(self, first: int, product: Tensor, words: slice) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Yield blocks of a product: their rows, the block of ``product``, its logits and a spare buffer.

        Logits are in the dtype of the statistics, transformed and divided by tau. They and the spare are reused by the
        next block.
        """
        inputs, options = self._inputs, self._inputs.options
        # Two buffers for all blocks in the dtype of the statistics, so that the product is never widened as a whole.
        rows = max(1, min(self._elements // product.shape[1], len(product)))
        if not self._buffers or self._buffers[0].numel() < rows * product.shape[1]:
            self._buffers = [product.new_empty(rows * product.shape[1], dtype=inputs.dtype) for _ in range(2)]
        for start in range(0, len(product), rows):
            part = product[start : start + rows]
            logits, spare = (buffer[: part.numel()].view(part.shape) for buffer in self._buffers)
            logits.copy_(part)
            # In the model's own order, and tau last, because it divides the logits as the model defines them.
            if inputs.bias is not None:
                logits.add_(inputs.bias[words])
            if options.scale != 1.0:
                logits.mul_(options.scale)
            if options.softcap is not None:
                logits.div_(options.softcap).tanh_().mul_(options.softcap)
            if options.temperature != 1.0:
                logits.div_(options.temperature)
            yield slice(first + start, first + start + len(part)), part, logits, spare


class KernelHead(TorchHead):
    """Head with CPU kernels instead of the passes over bfloat16 logits. Only a factor may be between product and
    softmax.
    """

    @staticmethod
    def serves(inputs: HeadInputs) -> bool:
        """Return whether the kernels support these inputs."""
        options = inputs.options
        more = inputs.bias is not None or options.softcap is not None or options.float32
        return not more and not options.entropy_clamp and cpu_kernels.has_kernels(
            inputs.weight.dtype, inputs.weight.device, _KERNEL_BLOCK
        )  # fmt: skip

    @property
    def _factor(self) -> float:
        return self._inputs.options.scale / self._inputs.options.temperature

    def statistics(self) -> tuple[Tensor, Tensor, Tensor, None]:
        inputs, step = self._inputs, self._inputs.options.chunk_tokens
        tokens = len(inputs.hidden)
        logprobs, entropies, log_sums = (torch.empty(tokens, dtype=inputs.dtype) for _ in range(3))
        for start in range(0, tokens, step):
            rows = slice(start, start + step)
            product = self._logits(rows)
            self.whole = product if tokens <= step else None
            factors = torch.full((len(product),), self._factor)
            largest, _, log_totals, entropies[rows] = cpu_kernels.softmax_sums(product, factors, _KERNEL_BLOCK)
            chosen = product.gather(1, inputs.targets[rows, None])[:, 0].float() * self._factor
            logprobs[rows], log_sums[rows] = chosen - largest - log_totals, largest + log_totals
        return logprobs, entropies, log_sums, None

    def gradient(self, pull: Pull, rows: slice, words: slice) -> Tensor:
        product = self._product(rows, words).contiguous()
        slope = None if pull.entropies is None else pull.entropies[rows]
        targets = self._inputs.targets[rows] - words.start  # out of range for a target of another piece
        cpu_kernels.softmax_pull(
            product, self._factor, pull.log_sums[rows], pull.constant(rows), slope, pull.logprobs[rows], targets
        )
        return product


_KERNEL_BLOCK = 256  # words whose weights are added in float32


def _clamped_pull(logits: Tensor, kept: Tensor, pull: Tensor, entropies: Tensor) -> Tensor:
    """Return the entropies' part of the logits' gradient, ``[r, V]``: ``-h q (log q + H)``, with q being p over the
    kept words.
    """
    log_q = logits - kept[:, 1:]
    found = log_q.exp().mul_(log_q.add_(entropies[:, None])).mul_(-pull[:, None])
    return found.masked_fill_(logits < kept[:, :1], 0.0)


class Float32Head:
    """Replacement of an output head's forward with the same weights and float32 logits (MiniMax-M1, ScaleRL).

    It is an object, so that the head of a copied model finds its own weight.
    """

    def __init__(self, head: torch.nn.Linear) -> None:
        self._head = head

    @classmethod
    def put_into(cls, model: Any) -> None:
        """Make the model's head compute in float32. Code that calls `serves` then does so too."""
        head = model.get_output_embeddings()
        if not isinstance(head, torch.nn.Linear):
            raise ValueError(
                f"the output head of {type(model).__name__} is not a linear layer; leave out model.head_dtype"
            )
        head.forward = cls(head)  # pyright: ignore[reportAttributeAccessIssue]

    @classmethod
    def serves(cls, model: Any) -> bool:
        """Return whether the model's head computes in float32."""
        return isinstance(model.get_output_embeddings().forward, cls)

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = float32_product(hidden.flatten(0, -2), self._head.weight).unflatten(0, hidden.shape[:-1])
        bias = cast("Tensor | None", self._head.bias)
        return logits if bias is None else logits + bias


_LEAST_WORDS = 1024
"""Smallest number of words of a piece. Narrower pieces would make the products slow."""
_ADDED_ROWS = 4096  # rows of a sum that fit into a cache


def logprobs_and_entropies(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    options: HeadOptions,
    bias: Tensor | None = None,
    *,
    weight_gradient: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each target and the entropy of each distribution, both differentiable.

    Matrix products are computed in the dtype of ``weight``, softmax statistics in float32 (float64 for float64 inputs).

    Args:
        hidden: ``[tokens, d]`` last hidden states, in the dtype of ``weight``.
        weight: ``[V, d]`` output embedding. Rows from ``options.valid_vocab`` on may be padding.
        targets: ``[tokens]`` int64, each below the valid vocabulary.
        options: Temperature, valid vocabulary, piece size, backend and the model's logit transform.
        bias: ``[V]`` or None.
        weight_gradient: ``[V, d]``, usually more precise than ``weight``. The backward pass adds the weight's gradient
            to it and returns none to autograd, so that there is no second tensor of this size.

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


def _backend(inputs: HeadInputs, whole: Tensor | None = None) -> Any:
    """Return `TorchHead`, or a head that computes the same two passes in kernels."""
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
    return KernelHead(inputs, whole) if KernelHead.serves(inputs) else TorchHead(inputs, whole)


class _Head(torch.autograd.Function):
    """The head as an autograd function. It saves a logsumexp and an entropy per token, and logits of a single piece."""

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
        backend = _backend(HeadInputs(hidden, weight, bias, targets, options))
        logprobs, entropies, *saved = backend.statistics()
        ctx.save_for_backward(hidden, weight, bias, targets, entropies, *saved)
        ctx.options, ctx.weight_gradient, ctx.whole = options, weight_gradient, backend.whole
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, entropies, log_sums, kept = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        inputs = HeadInputs(hidden, weight, bias, targets, ctx.options)
        pull = Pull(
            logprobs=grads[0],
            # With alpha 0 the entropies have no gradient, and their part is skipped.
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
        # The first backward pass overwrites the logits, so a second one computes them again.
        whole, ctx.whole = ctx.whole, None
        _accumulate(inputs, pull, whole, grad_hidden, into if needs_weight else None, grad_bias)
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            made,
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def pieces(tokens: int, vocab: int, chunk_tokens: int) -> Iterator[tuple[slice, list[slice]]]:
    """Yield words, and the rows that are multiplied with them. A piece has at most ``chunk_tokens * vocab`` logits.

    All rows are in one piece if possible: a weight's gradient is then one product, without a sum over pieces.
    """
    budget = max(chunk_tokens * vocab, 1)
    # Few enough words for all rows, but enough for fast products.
    words = min(vocab, max(budget // max(tokens, 1), min(_LEAST_WORDS, vocab)))
    count = -(-vocab // words)
    # Equal widths, so that the last piece is not tiny.
    words = -(-vocab // count)
    rows = max(1, min(tokens, budget // words))
    for start in range(0, vocab, words):
        yield (
            slice(start, min(start + words, vocab)),
            [slice(row, min(row + rows, tokens)) for row in range(0, tokens, rows)],
        )


def _accumulate(
    inputs: HeadInputs,
    pull: Pull,
    whole: Tensor | None,
    grad_hidden: Tensor | None,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
) -> None:
    """Add every piece's contribution to the gradients that are needed."""
    backend = _backend(inputs, whole)
    for words, spans in pieces(len(inputs.hidden), len(inputs.weight), inputs.options.chunk_tokens):
        # A narrow gradient is summed over pieces in the precision of the statistics.
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
    """Compute ``total += left @ right``. A low-precision product is added in the total's precision."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif left.T.is_contiguous() and cpu_kernels.adds_gradients(left):
        cpu_kernels.add_gradient(total, left.T, right)
    elif total.is_cuda and total.dtype == torch.float32:
        # The hardware adds the product in float32 anyway, so it is added to the total without rounding.
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        for start in range(0, len(total), _ADDED_ROWS):  # blocks that fit in cache, because torch's mixed sum is slow
            span = slice(start, start + _ADDED_ROWS)
            total[span].add_(product(left[span], right).to(total.dtype))
