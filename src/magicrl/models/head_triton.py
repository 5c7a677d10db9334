# pyright: basic, reportAttributeAccessIssue=false, reportMissingImports=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false
"""The head's two passes over the logits as Triton kernels. No logit of the forward pass reaches memory.

Import it only where Triton is installed. A program of the forward pass multiplies its rows with one tile of words after
the other and keeps three running numbers per row: the largest logit, the sum of exponentials, and their weighted sum of
logits. They are those of a softmax over the words so far. Programs share the vocabulary, and their numbers are combined
in float32 afterwards in a fixed order. The kernel of the backward pass multiplies again and writes the product's
gradient, rounded to the weights' dtype, for the two products that follow.

The kernels run on CUDA, and anywhere in Triton's interpreter (``TRITON_INTERPRET=1``), which is how they are tested
without a GPU.
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
    hidden, weight, bias, row_start, word_start, row_end, word_end, hidden_row, hidden_col, weight_row, weight_col,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, TEMPERATURE: tl.constexpr, WIDTH: tl.constexpr,
    WITH_BIAS: tl.constexpr, ROUND: tl.constexpr, TOKENS: tl.constexpr, WORDS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """One tile of transformed logits ``[TOKENS, WORDS]`` in float32; far below all others beyond the last word."""
    inner = tl.arange(0, INNER)
    total = tl.zeros((TOKENS, WORDS), dtype=tl.float32)
    # The start of a tile takes 64 bits, places within it 32: 64-bit places of a whole tile would fill the registers.
    hidden += row_start.to(tl.int64) * hidden_row
    weight += word_start.to(tl.int64) * weight_row
    row, word = tl.arange(0, TOKENS), tl.arange(0, WORDS)
    row_inside, word_inside = (row < row_end - row_start)[:, None], (word < word_end - word_start)[None, :]
    for start in range(0, WIDTH, INNER):
        column = start + inner
        left_mask, right_mask = row_inside, word_inside
        if WIDTH % INNER:
            left_mask, right_mask = left_mask & (column < WIDTH)[None, :], right_mask & (column < WIDTH)[:, None]
        left = tl.load(hidden + row[:, None] * hidden_row + column[None, :] * hidden_col, mask=left_mask, other=0.0)
        right = tl.load(weight + word[None, :] * weight_row + column[:, None] * weight_col, mask=right_mask, other=0.0)
        # No TF32, so that a float32 model is computed in float32.
        total = tl.dot(left, right, total, input_precision="ieee")
    if ROUND:  # as a matrix product of this dtype is rounded, so that both backends mean one model
        total = total.to(hidden.dtype.element_ty).to(tl.float32)
    if WITH_BIAS:
        total += tl.load(bias + word_start + word, mask=word < word_end - word_start, other=0.0)[None, :]
    if SCALE != 1.0:
        total *= SCALE
    if SOFTCAP > 0.0:
        # tanh from its exponential, because Triton has no tanh.
        doubled = tl.exp(-2.0 * tl.abs(total / SOFTCAP))
        bounded = (1.0 - doubled) / (1.0 + doubled) * SOFTCAP
        total = tl.where(total < 0, -bounded, bounded)
    if TEMPERATURE != 1.0:
        total /= TEMPERATURE
    return tl.where(word_inside, total, FAR_BELOW)


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
    for tile in range(PER_PROGRAM):
        start = first + tile * WORDS
        if start < vocab:
            logits = _logits(
                hidden, weight, bias, row_block * TOKENS, start, tokens, vocab,
                hidden_row, hidden_col, weight_row, weight_col,
                SCALE, SOFTCAP, TEMPERATURE, WIDTH, WITH_BIAS, ROUND, TOKENS, WORDS, INNER,
            )  # fmt: skip
            is_target = (start + tl.arange(0, WORDS))[None, :] == target[:, None]
            chosen += tl.sum(tl.where(is_target, logits, 0.0), axis=1)
            higher = tl.maximum(largest, tl.max(logits, axis=1))
            shrink = tl.exp(largest - higher)
            relative = logits - higher[:, None]
            powers = tl.exp(relative)
            # Sums relative to the old largest are converted to the new one.
            weighted = (weighted + total * (largest - higher)) * shrink + tl.sum(powers * relative, axis=1)
            total = total * shrink + tl.sum(powers, axis=1)
            largest = higher
    place = part.to(tl.int64) * tokens + rows
    tl.store(largest_out + place, largest, mask=inside)
    tl.store(total_out + place, total, mask=inside)
    tl.store(weighted_out + place, weighted, mask=inside)
    # Exactly one program has the target of a row.
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
    first_row, first_word = row_start + row_block * TOKENS, word_start + word_block * WORDS
    row, word = tl.arange(0, TOKENS), tl.arange(0, WORDS)
    rows, words = first_row + row, first_word + word
    inside = rows < row_end
    logits = _logits(
        hidden, weight, bias, first_row, first_word, row_end, word_end, hidden_row, hidden_col, weight_row, weight_col,
        SCALE, SOFTCAP, TEMPERATURE, WIDTH, WITH_BIAS, ROUND, TOKENS, WORDS, INNER,
    )  # fmt: skip
    # Past the last word any finite value will do, because it is not stored.
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
    out += (first_row - row_start).to(tl.int64) * out_row + (first_word - word_start)
    mask = inside[:, None] & (words[None, :] < word_end)
    tl.store(out + row[:, None] * out_row + word[None, :], found.to(out.dtype.element_ty), mask=mask)


_WIDE, _NARROW, _FLOAT32 = Tiles(words=256), Tiles(words=128), Tiles(tokens=64, words=128, inner=32)
# Why these, on an H100: 990 TFLOP/s in bfloat16, 67 in float32 outside the tensor cores, about 7 TB/s of its L2 cache,
# 65,536 registers and 227 KiB of shared memory a multiprocessor. Calculated, not measured:
# - A wide tile reads 48 KiB for 4.2 MFLOP, 85 FLOP a byte, so that the cache allows 600 TFLOP/s; a narrow one has 64
#   FLOP a byte, 450 TFLOP/s. Its sums are 128 registers of each of 256 threads, its three stages 144 KiB. At width 1536
#   the softmax takes a sixth of the product's time and the gradient's store an eighth: 1.2 of the four products' time
#   in all, 1.1 at width 3584.
# - In float32 the threads add up by themselves what they hold in registers: a tile of 128 x 256 spills thousands, one
#   of 64 x 128, with 32 sums a thread, none. It reads 24 KiB for 0.5 MFLOP: 21 FLOP a byte allow 150 TFLOP/s.
# stages x inner x (rows + words) x bytes of a bfloat16
_WIDE_NEEDS_BYTES = 3 * 64 * (128 + 256) * 2


def tiles_for(device: torch.device, dtype: torch.dtype, *, softcap: bool = False) -> Tiles:
    """Return the largest tiles for which a device has shared memory and registers. A soft cap takes more registers."""
    if dtype == torch.float32:
        return _FLOAT32
    if device.type != "cuda" or softcap:
        return _NARROW
    room = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return _WIDE if room >= _WIDE_NEEDS_BYTES else _NARROW


class TritonHead:
    """The two passes over the logits for CUDA."""

    whole = None  # logits never leave the kernels

    def __init__(self, inputs: HeadInputs) -> None:
        self._inputs = inputs
        options, hidden = inputs.options, inputs.hidden
        self._tiles = options.tiles or tiles_for(hidden.device, hidden.dtype, softcap=options.softcap is not None)

    def statistics(self) -> tuple[Tensor, Tensor, Tensor, None]:
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
        return chosen - top - log_total, log_total - mean, log_total + top, None

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
