"""Draw tokens from logits, with their exact log-probabilities and the distribution's entropy.

Random numbers are a pure function of (run seed, draw, sample, position): Philox-4x32 with ten rounds (Salmon, Moraes,
Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC11), keyed by the run seed, its counter holding the other
three. So a token does not depend on the batch or on what was generated before, and a resumed run needs no state.

Inverse transform sampling takes the first token whose cumulative probability exceeds that number. Over a large
vocabulary a whole cumulative sum would cost more than the softmax, so the search has two levels: sums of blocks first,
then the cumulative sum inside the one block that is hit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from magicrl.models import cpu_kernels
from magicrl.models.head import softmax_statistics

# the paper's constants; the key's steps are the golden ratio and sqrt(3) - 1 as 32-bit fractions
# words of 32 bits lie in uint64, so that the high half of a product is not lost
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)

Words = NDArray[np.uint64]


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Ten rounds of Philox-4x32 on arrays of 32-bit words (held as uint64), broadcast against each other."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high, low = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (low >> _32) ^ c1 ^ k0, low & _LOW, (high >> _32) ^ c3 ^ k1, high & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def _words(value: ArrayLike) -> Words:
    return np.asarray(value).astype(np.uint64)


def uniforms(seed: ArrayLike, draw: ArrayLike, sample: ArrayLike, position: ArrayLike) -> NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for every (seed, draw, sample, position), broadcast.

    ``seed`` and ``draw`` may have 64 bits, ``sample`` and ``position`` 32; none may be negative.
    """
    seeds, draws = _words(seed), _words(draw)
    counter = (_words(position), _words(sample), draws & _LOW, draws >> _32)
    first, second, *_ = philox4x32(counter, (seeds & _LOW, seeds >> _32))
    # 27 and 26 bits of two words: the 53 that a float64 holds exactly
    bits: Any = ((first >> np.uint64(5)) << np.uint64(26)) | (second >> np.uint64(6))
    return np.asarray(bits, dtype=np.float64) * 2.0**-53


_BLOCK = 256
_CHUNK_ELEMENTS = 1 << 18  # logits handled at once: the passes over them then stay in the cache


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledTokens:
    """One token a row."""

    tokens: Tensor  # ``[R]`` int64
    logprobs: Tensor  # ``[R]`` natural log-probability of the token at tau (at 1 where tau is 0)
    entropies: Tensor  # ``[R]`` entropy in nats of the whole distribution, at the same temperature

    def on_host(self) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[Any]]:
        """Tokens, log-probs and entropies as numpy, fetched from a device in one piece: each fetch waits for it."""
        parts = (self.tokens, self.logprobs, self.entropies)
        if self.tokens.device.type == "cpu":
            tokens, logprobs, entropies = (part.numpy() for part in parts)
        else:
            # float64 holds token ids and float32 values exactly, so one copy carries all three
            tokens, logprobs, entropies = torch.stack([part.double() for part in parts]).cpu().numpy()
        return tokens.astype(np.int64, copy=False), logprobs, entropies


def sample_tokens(
    logits: Tensor,
    temperature: NDArray[np.float64],
    uniforms: NDArray[np.float64],
    valid_vocab: int,
    *,
    exact: bool = False,
) -> SampledTokens:
    """Sample one token for each row of ``logits``.

    Args:
        logits: ``[R, V]`` of any float type; computed in float32, float64 if they are float64.
        temperature: ``[R]`` tau; 0 takes the most likely token and reports its log-prob at tau = 1.
        uniforms: ``[R]`` numbers in [0, 1), one a row.
        valid_vocab: tokens from here on are padding and have probability 0.
        exact: log-probs and entropies are computed as the learner's head does, bit for bit.
    """
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    greedy = temperature == 0.0
    tau = np.where(greedy, 1.0, temperature)
    # the learner divides
    factor = tau if exact else 1.0 / tau
    scale = None if bool((tau == 1.0).all()) else torch.from_numpy(factor).to(logits.device, dtype)[:, None]
    points = torch.from_numpy(uniforms).to(logits.device)
    picks = torch.from_numpy(greedy).to(logits.device) if greedy.any() else None
    if not exact and cpu_kernels.has_kernels(logits.dtype, logits.device, _BLOCK) and logits.stride(1) == 1:
        return _sample_by_kernel(logits[:, :valid_vocab], torch.from_numpy(factor).float(), points, picks)
    rows = max(1, _CHUNK_ELEMENTS // valid_vocab) if logits.device.type == "cpu" else len(logits)
    parts = [
        _sample_chunk(
            logits[start : start + rows, :valid_vocab].to(dtype),
            None if scale is None else scale[start : start + rows],
            points[start : start + rows],
            None if picks is None else picks[start : start + rows],
            exact,
        )
        for start in range(0, len(logits), rows)
    ]
    tokens, logprobs, entropies = parts[0] if len(parts) == 1 else (torch.cat(p) for p in zip(*parts, strict=True))
    return SampledTokens(tokens=tokens, logprobs=logprobs, entropies=entropies)


def _sample_by_kernel(logits: Tensor, factor: Tensor, points: Tensor, greedy: Tensor | None) -> SampledTokens:
    """The same of bfloat16 logits with all rows' weights summed up in one pass; none but the hit block's is written."""
    largest, blocks, moments = cpu_kernels.softmax_sums(logits, factor, _BLOCK)
    total = blocks.sum(-1)

    def below(columns: Tensor) -> Tensor:
        return logits.gather(-1, columns).float() * factor[:, None] - largest[:, None]

    tokens = _chosen(logits, lambda columns: below(columns).exp(), blocks, points * total, greedy)
    logprobs = below(tokens[:, None])[:, 0] - total.log()
    entropies = total.log() - moments / total
    return SampledTokens(tokens=tokens, logprobs=logprobs.float(), entropies=entropies.float())


def _sample_chunk(
    logits: Tensor, scale: Tensor | None, points: Tensor, greedy: Tensor | None, exact: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, log-probs and entropies of ``[r, V]`` logits in working precision."""
    if scale is not None:
        logits = logits / scale if exact else logits * scale
    shifted = logits - logits.amax(-1, keepdim=True)
    # H = log Z - (1/Z) sum_i w_i log w_i, where Z = sum_i w_i and log w_i = shifted
    weights = shifted.exp()  # unnormalised probabilities, the largest is 1
    blocks = _block_sums(weights)
    total = blocks.sum(-1)
    if exact:
        tokens = _chosen(logits, partial(weights.gather, -1), blocks, points * total, greedy)
        logprobs, entropies, _ = softmax_statistics(shifted, weights, tokens, exact=True)
        return tokens, logprobs, entropies
    # in place: one table of [r, V] less; `shifted` is gone from here on
    products = shifted.mul_(weights)
    moment = products.sum(-1)
    # logits of -inf: weight 0, nothing towards the entropy; a device is not waited for to see whether there are any
    if logits.device.type != "cpu" or bool(moment.isnan().any()):
        moment = torch.where(weights > 0, products, 0.0).sum(-1)
    tokens = _chosen(logits, partial(weights.gather, -1), blocks, points * total, greedy)
    log_total = total.log()
    # not taken from `shifted`, which was overwritten
    chosen = weights.gather(-1, tokens[:, None])[:, 0].log()
    return tokens, chosen - log_total.to(chosen.dtype), (log_total - moment / total).to(chosen.dtype)


def _chosen(
    logits: Tensor, weights_at: Callable[[Tensor], Tensor], blocks: Tensor, target: Tensor, greedy: Tensor | None
) -> Tensor:
    tokens = _search(weights_at, logits.shape[1], blocks, target)
    return tokens if greedy is None else torch.where(greedy, logits.argmax(-1), tokens)


def _block_sums(weights: Tensor) -> Tensor:
    """``[r, blocks]`` float64 sums of ``_BLOCK`` neighbours each."""
    rows, vocab = weights.shape
    whole = vocab // _BLOCK * _BLOCK
    sums = weights[:, :whole].unflatten(1, (-1, _BLOCK)).sum(-1) if whole else weights.new_empty(rows, 0)
    if whole < vocab:
        sums = torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True)], dim=-1)
    return sums.double()


def _search(weights_at: Callable[[Tensor], Tensor], vocab: int, blocks: Tensor, target: Tensor) -> Tensor:
    """First token whose cumulative weight exceeds ``target``; never one of weight 0.

    ``weights_at`` gives the weights of columns ``[r, c]``.
    """
    cumulative = blocks.cumsum(-1)
    block = _first_above(cumulative, target)[:, None]
    # what is left of the target inside the block
    rest = target - (cumulative.gather(-1, block) - blocks.gather(-1, block))[:, 0]
    width = min(_BLOCK, vocab)
    columns = block * _BLOCK + torch.arange(width, device=blocks.device)
    inside = weights_at(columns.clamp(max=vocab - 1)).double()
    inside = inside.masked_fill(columns >= vocab, 0.0) if vocab % width else inside
    return block[:, 0] * _BLOCK + _first_above(inside.cumsum(-1), rest)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """First index with ``cumulative > target``.

    There the cumulative sum has just risen, so the entry itself is positive. Rounding can leave ``target``
    at or above the last sum; then the last index at which the sum rose is taken, the target being cut to just below.
    """
    last = cumulative[:, -1]
    below = torch.minimum(target.clamp(min=0.0), torch.nextafter(last, torch.zeros_like(last)))
    index = torch.searchsorted(cumulative, below[:, None], right=True)[:, 0]
    return index.clamp_(max=cumulative.shape[1] - 1)  # out of range for NaN only, which the caller reports
