# pyright: basic, reportAttributeAccessIssue=false, reportMissingImports=false, reportIndexIssue=false
"""The head's two passes over the logits as Triton kernels: no logit of the forward pass ever reaches memory.

Imported only where Triton is installed. A program of the forward pass multiplies its rows with one tile of words after
the other and keeps three running numbers a row (largest logit, sum of exponentials, their mean logit's numerator),
which are those of a softmax over the words seen so far; programs share the vocabulary, and their numbers are joined in
float32 afterwards, in a fixed order. The kernel of the backward pass multiplies again and writes the product's
gradient, rounded to the weights' dtype, for the two products that follow.

The kernels run on CUDA, and anywhere in Triton's interpreter (``TRITON_INTERPRET=1``), which is how they are tested
where there is no GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from magicrl.models.head import HeadInputs, Pull, Tiles

FAR_BELOW = tl.constexpr(-1e38)
"""Finite, so that its exponential times it is 0 and not undefined."""


@triton.jit
def _place(row_blocks, word_blocks, GROUP: tl.constexpr):
    """Which block of rows and of words this program has: neighbours share both, so that these stay in the L2 cache."""
    program = tl.program_id(0)
    in_group = GROUP * word_blocks
    first = program // in_group * GROUP
    rows = tl.minimum(row_blocks - first, GROUP)
    return first + program % in_group % rows, program % in_group // rows


@triton.jit
def _logits(
    hidden, weight, bias, rows, words, row_end, word_end, hidden_row, hidden_col, weight_row, weight_col,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, TEMPERATURE: tl.constexpr, WIDTH: tl.constexpr,
    WITH_BIAS: tl.constexpr, ROUND: tl.constexpr, TOKENS: tl.constexpr, WORDS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """One tile of transformed logits ``[TOKENS, WORDS]`` in float32; far below all others beyond the last word."""
    inner = tl.arange(0, INNER)
    total = tl.zeros((TOKENS, WORDS), dtype=tl.float32)
    for start in range(0, WIDTH, INNER):
        column = start + inner
        # 64 bits: a row's number times its stride may not fit into 32
        left = tl.load(
            hidden + rows[:, None].to(tl.int64) * hidden_row + column[None, :] * hidden_col,
            mask=(rows[:, None] < row_end) & (column[None, :] < WIDTH), other=0.0,
        )  # fmt: skip
        right = tl.load(
            weight + words[None, :].to(tl.int64) * weight_row + column[:, None] * weight_col,
            mask=(words[None, :] < word_end) & (column[:, None] < WIDTH), other=0.0,
        )  # fmt: skip
        # no TF32: a float32 model is to be computed in float32
        total = tl.dot(left, right, total, input_precision="ieee")
    if ROUND:  # as a matrix product of this dtype is rounded, so that both backends mean one model
        total = total.to(hidden.dtype.element_ty).to(tl.float32)
    if WITH_BIAS:
        total += tl.load(bias + words, mask=words < word_end, other=0.0)[None, :]
    if SCALE != 1.0:
        total *= SCALE
    if SOFTCAP > 0.0:
        # tanh by its exponential: the language has none of its own
        doubled = tl.exp(-2.0 * tl.abs(total / SOFTCAP))
        bounded = (1.0 - doubled) / (1.0 + doubled) * SOFTCAP
        total = tl.where(total < 0, -bounded, bounded)
    if TEMPERATURE != 1.0:
        total /= TEMPERATURE
    return tl.where(words[None, :] < word_end, total, FAR_BELOW)


@triton.jit
def statistics_kernel(
    hidden, weight, bias, targets, largest_out, total_out, weighted_out, chosen_out, tokens, vocab,
    hidden_row, hidden_col, weight_row, weight_col,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, TEMPERATURE: tl.constexpr, WIDTH: tl.constexpr,
    WITH_BIAS: tl.constexpr, ROUND: tl.constexpr, TOKENS: tl.constexpr, WORDS: tl.constexpr, INNER: tl.constexpr,
    GROUP: tl.constexpr, PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    """Largest logit, sum of exponentials and sum of exponentials times logits, both relative to the largest.

    A program has a block of rows and a part of the words; outputs are ``[parts, tokens]``.
    """
    row_block, part = _place(tl.cdiv(tokens, TOKENS), tl.cdiv(vocab, WORDS * PER_PROGRAM), GROUP)
    rows = row_block * TOKENS + tl.arange(0, TOKENS)
    inside = rows < tokens
    target = tl.load(targets + rows, mask=inside, other=-1)
    largest = tl.full((TOKENS,), FAR_BELOW, dtype=tl.float32)
    total = tl.zeros((TOKENS,), dtype=tl.float32)
    weighted = tl.zeros((TOKENS,), dtype=tl.float32)
    chosen = tl.zeros((TOKENS,), dtype=tl.float32)
    first = part * WORDS * PER_PROGRAM
    for start in range(first, tl.minimum(first + WORDS * PER_PROGRAM, vocab), WORDS):
        words = start + tl.arange(0, WORDS)
        logits = _logits(
            hidden, weight, bias, rows, words, tokens, vocab, hidden_row, hidden_col, weight_row, weight_col,
            SCALE, SOFTCAP, TEMPERATURE, WIDTH, WITH_BIAS, ROUND, TOKENS, WORDS, INNER,
        )  # fmt: skip
        is_target = words[None, :] == target[:, None]
        chosen += tl.sum(tl.where(is_target, logits, 0.0), axis=1)
        higher = tl.maximum(largest, tl.max(logits, axis=1))
        shrink = tl.exp(largest - higher)
        relative = logits - higher[:, None]
        powers = tl.exp(relative)
        # what was summed relative to the old largest is moved to the new one
        weighted = (weighted + total * (largest - higher)) * shrink + tl.sum(powers * relative, axis=1)
        total = total * shrink + tl.sum(powers, axis=1)
        largest = higher
    place = part.to(tl.int64) * tokens + rows
    tl.store(largest_out + place, largest, mask=inside)
    tl.store(total_out + place, total, mask=inside)
    tl.store(weighted_out + place, weighted, mask=inside)
    # exactly one program sees a row's target
    mine = (target >= first) & (target < first + WORDS * PER_PROGRAM)
    tl.store(chosen_out + rows, chosen, mask=inside & mine)


@triton.jit
def gradient_kernel(
    hidden, weight, bias, targets, log_sums, constants, pulls, entropy_pulls, out,
    row_start, row_end, word_start, word_end, hidden_row, hidden_col, weight_row, weight_col, out_row,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, TEMPERATURE: tl.constexpr, WIDTH: tl.constexpr,
    WITH_BIAS: tl.constexpr, ROUND: tl.constexpr, TOKENS: tl.constexpr, WORDS: tl.constexpr, INNER: tl.constexpr,
    GROUP: tl.constexpr, WITH_ENTROPY: tl.constexpr,
):  # fmt: skip
    """``p (constant - h z) + g onehot`` through the logit transform, for one tile of rows and words."""
    row_blocks, word_blocks = tl.cdiv(row_end - row_start, TOKENS), tl.cdiv(word_end - word_start, WORDS)
    row_block, word_block = _place(row_blocks, word_blocks, GROUP)
    rows = row_start + row_block * TOKENS + tl.arange(0, TOKENS)
    words = word_start + word_block * WORDS + tl.arange(0, WORDS)
    inside = rows < row_end
    logits = _logits(
        hidden, weight, bias, rows, words, row_end, word_end, hidden_row, hidden_col, weight_row, weight_col,
        SCALE, SOFTCAP, TEMPERATURE, WIDTH, WITH_BIAS, ROUND, TOKENS, WORDS, INNER,
    )  # fmt: skip
    # beyond the last word: anything finite, since it is not stored
    logits = tl.where(words[None, :] < word_end, logits, 0.0)
    factor = tl.load(constants + rows, mask=inside, other=0.0)[:, None]
    if WITH_ENTROPY:
        factor = factor - tl.load(entropy_pulls + rows, mask=inside, other=0.0)[:, None] * logits
    log_sum = tl.load(log_sums + rows, mask=inside, other=0.0)
    found = tl.exp(logits - log_sum[:, None]) * factor
    target = tl.load(targets + rows, mask=inside, other=-1)
    pull = tl.load(pulls + rows, mask=inside, other=0.0)
    found += tl.where(words[None, :] == target[:, None], pull[:, None], 0.0)
    if SOFTCAP > 0.0:  # d softcap*tanh(x/softcap) = 1 - tanh^2
        bounded = logits * (TEMPERATURE / SOFTCAP)
        found *= 1.0 - bounded * bounded
    found *= SCALE / TEMPERATURE
    place = (rows - row_start)[:, None].to(tl.int64) * out_row + (words - word_start)[None, :]
    tl.store(out + place, found.to(out.dtype.element_ty), mask=inside[:, None] & (words[None, :] < word_end))


_WIDE, _NARROW = Tiles(words=256), Tiles(words=128)
# stages x inner x (rows + words) x bytes of a bfloat16
_WIDE_NEEDS_BYTES = 3 * 64 * (128 + 256) * 2


def tiles_for(device: torch.device) -> Tiles:
    """Tiles of 256 words where a device's shared memory has room for three stages of them, else of 128."""
    if device.type != "cuda":
        return _NARROW
    room = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return _WIDE if room >= _WIDE_NEEDS_BYTES else _NARROW


class TritonHead:
    """The two passes over the logits for CUDA."""

    def __init__(self, inputs: HeadInputs) -> None:
        self._inputs = inputs
        self._tiles = inputs.options.tiles or tiles_for(inputs.hidden.device)

    def statistics(self) -> tuple[Tensor, Tensor, Tensor]:
        inputs, tiles = self._inputs, self._tiles
        tokens, vocab = len(inputs.hidden), len(inputs.weight)
        span = tiles.words * tiles.words_per_program
        parts = -(-vocab // span)
        largest, total, weighted = torch.empty((3, parts, tokens), dtype=torch.float32, device=inputs.hidden.device)
        chosen = torch.zeros(tokens, dtype=torch.float32, device=inputs.hidden.device)
        if tokens:
            grid = (-(-tokens // tiles.tokens) * parts,)
            statistics_kernel[grid](
                *self._tensors(), largest, total, weighted, chosen, tokens, vocab, *self._strides(),
                **self._constants(), PER_PROGRAM=tiles.words_per_program,
            )  # fmt: skip
        top = largest.amax(dim=0)
        shrunk = (largest - top).exp()  # each part's numbers relative to the largest logit of all
        sums = total * shrunk
        whole = sums.sum(dim=0)
        # sum_v p_v z_v with z relative to the largest: no cancellation of large numbers
        mean = (weighted * shrunk + sums * (largest - top)).sum(dim=0) / whole
        log_total = whole.log()
        return chosen - top - log_total, log_total - mean, log_total + top

    def gradient(self, pull: Pull, rows: slice, words: slice) -> Tensor:
        inputs, tiles = self._inputs, self._tiles
        count, width = rows.stop - rows.start, words.stop - words.start
        out = torch.empty((count, width), dtype=inputs.hidden.dtype, device=inputs.hidden.device)
        pulled = pull.entropies if pull.entropies is not None else pull.logprobs
        grid = (-(-count // tiles.tokens) * -(-width // tiles.words),)
        gradient_kernel[grid](
            *self._tensors(), pull.log_sums, pull.constant(slice(None)), pull.logprobs.contiguous(),
            pulled.contiguous(), out, rows.start, rows.stop, words.start, words.stop, *self._strides(), out.stride(0),
            **self._constants(), WITH_ENTROPY=pull.entropies is not None,
        )  # fmt: skip
        return out

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        inputs = self._inputs
        bias = inputs.targets if inputs.bias is None else inputs.bias  # never read without a bias
        return inputs.hidden, inputs.weight, bias, inputs.targets

    def _strides(self) -> tuple[int, ...]:
        return (*self._inputs.hidden.stride(), *self._inputs.weight.stride())

    def _constants(self) -> dict[str, int | float | bool]:
        options, tiles = self._inputs.options, self._tiles
        return {
            "SCALE": options.scale,
            "SOFTCAP": options.softcap or 0.0,
            "TEMPERATURE": options.temperature,
            "WIDTH": self._inputs.hidden.shape[1],
            "WITH_BIAS": self._inputs.bias is not None,
            "ROUND": not options.float32,
            "TOKENS": tiles.tokens,
            "WORDS": tiles.words,
            "INNER": tiles.inner,
            "GROUP": tiles.group,
            "num_warps": tiles.warps,
            "num_stages": tiles.stages,
        }
