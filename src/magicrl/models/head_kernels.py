# pyright: basic, reportAttributeAccessIssue=false, reportMissingImports=false
"""The Triton kernels of ``head_triton.py``. Imported only where Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl

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
    WITH_BIAS: tl.constexpr, TOKENS: tl.constexpr, WORDS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """One tile of transformed logits ``[TOKENS, WORDS]`` in float32; far below all others beyond the last word."""
    inner = tl.arange(0, INNER)
    total = tl.zeros((TOKENS, WORDS), dtype=tl.float32)
    for start in range(0, WIDTH, INNER):
        column = start + inner
        left = tl.load(
            hidden + rows[:, None].to(tl.int64) * hidden_row + column[None, :] * hidden_col,
            mask=(rows[:, None] < row_end) & (column[None, :] < WIDTH), other=0.0,
        )  # fmt: skip
        right = tl.load(
            weight + words[None, :].to(tl.int64) * weight_row + column[:, None] * weight_col,
            mask=(words[None, :] < word_end) & (column[:, None] < WIDTH), other=0.0,
        )  # fmt: skip
        total = tl.dot(left, right, total, input_precision="ieee")
    # the product is rounded as a matrix product of this dtype rounds it, so that both backends mean one model
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
def statistics(
    hidden, weight, bias, targets, largest_out, total_out, weighted_out, chosen_out, tokens, vocab,
    hidden_row, hidden_col, weight_row, weight_col,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, TEMPERATURE: tl.constexpr, WIDTH: tl.constexpr,
    WITH_BIAS: tl.constexpr, TOKENS: tl.constexpr, WORDS: tl.constexpr, INNER: tl.constexpr,
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
            SCALE, SOFTCAP, TEMPERATURE, WIDTH, WITH_BIAS, TOKENS, WORDS, INNER,
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
def gradient(
    hidden, weight, bias, targets, log_sums, constants, pulls, entropy_pulls, out,
    row_start, row_end, word_start, word_end, hidden_row, hidden_col, weight_row, weight_col, out_row,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, TEMPERATURE: tl.constexpr, WIDTH: tl.constexpr,
    WITH_BIAS: tl.constexpr, TOKENS: tl.constexpr, WORDS: tl.constexpr, INNER: tl.constexpr,
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
        SCALE, SOFTCAP, TEMPERATURE, WIDTH, WITH_BIAS, TOKENS, WORDS, INNER,
    )  # fmt: skip
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
