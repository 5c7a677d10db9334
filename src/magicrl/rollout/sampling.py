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
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from magicrl.models import cpu_kernels
from magicrl.models.head import softmax_statistics

# The paper's constants. The steps of the key are the golden ratio and sqrt(3) - 1 as 32-bit fractions.
# Words of 32 bits are held in uint64, so that the high half of a product is not lost.
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)

Words = NDArray[np.uint64]


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Run ten rounds of Philox-4x32 on arrays of 32-bit words (held as uint64), broadcast against each other."""
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
    """Return one number in [0, 1) with 53 random bits for every (seed, draw, sample, position), broadcast.

    ``seed`` and ``draw`` may have 64 bits, ``sample`` and ``position`` 32; none may be negative.
    """
    seeds, draws = _words(seed), _words(draw)
    counter = (_words(position), _words(sample), draws & _LOW, draws >> _32)
    first, second, *_ = philox4x32(counter, (seeds & _LOW, seeds >> _32))
    # 27 and 26 bits of two words: the 53 that a float64 holds exactly
    bits: Any = ((first >> np.uint64(5)) << np.uint64(26)) | (second >> np.uint64(6))
    return np.asarray(bits, dtype=np.float64) * 2.0**-53


_BLOCK = 256
_LIKELY = 256  # most likely tokens in which top-p is sought first
_CHUNK_ELEMENTS = 1 << 18  # logits handled at once: the passes over them then stay in the cache

Sampled = tuple[Tensor, Tensor, Tensor]
"""Tokens, log-probs and entropies, as `sample_tokens` returns them."""


def on_host(sampled: Sampled) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[Any]]:
    """Return tokens, log-probs and entropies as numpy, in one copy from the device, since each copy waits for it."""
    if sampled[0].device.type == "cpu":
        tokens, logprobs, entropies = (part.numpy() for part in sampled)
    else:
        # float64 holds token ids and float32 values exactly
        tokens, logprobs, entropies = torch.stack([part.double() for part in sampled]).cpu().numpy()
    return tokens.astype(np.int64, copy=False), logprobs, entropies


def sample_tokens(
    logits: Tensor,
    temperature: NDArray[np.float64],
    uniforms: NDArray[np.float64],
    valid_vocab: int,
    *,
    exact: bool = False,
) -> Sampled:
    """Sample one token for each row of ``logits``.

    Args:
        logits: ``[R, V]`` of any float type; computed in float32, float64 if they are float64.
        temperature: ``[R]`` tau; 0 takes the most likely token and reports its log-prob at tau = 1.
        uniforms: ``[R]`` numbers in [0, 1), one per row.
        valid_vocab: tokens from here on are padding and have probability 0.
        exact: compute log-probs and entropies as the learner's head does, bit for bit.

    Returns:
        ``[R]`` int64 tokens, ``[R]`` their natural log-probs at tau (at 1 where tau is 0), and ``[R]`` entropies in
        nats of the whole distribution at the same temperature.
    """
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    greedy = temperature == 0.0
    tau = np.where(greedy, 1.0, temperature)
    points = torch.from_numpy(uniforms).to(logits.device)
    picks = torch.from_numpy(greedy).to(logits.device) if greedy.any() else None
    if cpu_kernels.has_kernels(logits.dtype, logits.device, _BLOCK) and logits.stride(1) == 1:
        return _sample_by_kernel(logits[:, :valid_vocab], torch.from_numpy(1.0 / tau).float(), points, picks)
    # Without kernels the learner divides by tau.
    factor = torch.from_numpy(tau if exact else 1.0 / tau)
    scale = None if bool((tau == 1.0).all()) else factor.to(logits.device, dtype)[:, None]
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
    if len(parts) == 1:
        return parts[0]
    tokens, logprobs, entropies = (torch.cat(part) for part in zip(*parts, strict=True))
    return tokens, logprobs, entropies


def likely_tokens(
    logits: Tensor, temperature: NDArray[np.float64], top_p: NDArray[np.float64], top_k: NDArray[np.int64]
) -> Tensor:
    """Return the logits with -inf for the tokens that top-k, and then top-p, exclude.

    A token as likely as the last one that is kept is kept, too.

    Args:
        logits: ``[R, V]`` of any float type.
        temperature: ``[R]`` tau, which applies before both; 0 counts as 1.
        top_p: ``[R]`` in (0, 1]: keep the fewest most likely tokens that together have this probability.
        top_k: ``[R]``: keep this many; 0: all.

    Returns:
        ``[R, V]`` in float32, float64 if the logits are float64.
    """
    scaled = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
    taus, shares = (torch.from_numpy(a).to(scaled)[:, None] for a in (np.where(temperature > 0, temperature, 1), top_p))
    counts = torch.from_numpy(np.where(top_k > 0, top_k, logits.shape[1])).to(logits.device)[:, None]
    whole = (scaled / taus).logsumexp(-1, keepdim=True)
    size = max(_LIKELY, int(top_k.max()))
    while True:
        size = min(size, logits.shape[1])
        values = scaled.topk(size).values
        places = torch.arange(size, device=logits.device)
        weights = (values / taus - whole).exp().masked_fill(places >= counts, 0.0)
        total = torch.where(counts <= size, weights.sum(-1, keepdim=True), 1.0)
        kept = (weights.cumsum(-1) - weights < shares * total) & (places < counts)
        if size == logits.shape[1] or not bool((kept[:, -1:] & (counts > size) & (shares < 1)).any()):
            break
        size *= 8
    last = values.gather(-1, (kept.sum(-1, keepdim=True) - 1).clamp(min=0))  # NaN keeps none, and is reported later
    last = last.masked_fill((shares == 1) & (counts >= logits.shape[1]), -torch.inf)
    return scaled.masked_fill(scaled < last, -torch.inf)


def _sample_by_kernel(logits: Tensor, factor: Tensor, points: Tensor, greedy: Tensor | None) -> Sampled:
    """Sample from bfloat16 logits: one pass sums the weights and writes only those of the chosen block."""
    largest, blocks, log_totals, entropies = cpu_kernels.softmax_sums(logits, factor, _BLOCK)

    def below(columns: Tensor) -> Tensor:
        return logits.gather(-1, columns).float() * factor[:, None] - largest[:, None]

    tokens = _chosen(logits, lambda columns: below(columns).exp(), blocks, points * blocks.sum(-1), greedy)
    logprobs = below(tokens[:, None])[:, 0] - log_totals
    return tokens, logprobs.float(), entropies.float()


def _sample_chunk(logits: Tensor, scale: Tensor | None, points: Tensor, greedy: Tensor | None, exact: bool) -> Sampled:
    """Sample from ``[r, V]`` logits in working precision."""
    if scale is not None:
        logits = logits / scale if exact else logits * scale
    shifted = logits - logits.amax(-1, keepdim=True)
    # H = log Z - (1/Z) sum_i w_i log w_i, where Z = sum_i w_i and log w_i = shifted
    weights = shifted.exp()  # unnormalised probabilities, the largest is 1
    vocab = weights.shape[1]
    whole = vocab // _BLOCK * _BLOCK
    # Sums of blocks of neighbours, ``[r, blocks]``.
    sums = [weights[:, :whole].unflatten(1, (-1, _BLOCK)).sum(-1)] if whole else []
    if whole < vocab:
        sums.append(weights[:, whole:].sum(-1, keepdim=True))
    blocks = (sums[0] if len(sums) == 1 else torch.cat(sums, dim=-1)).double()
    total = blocks.sum(-1)
    if exact:
        tokens = _chosen(logits, partial(weights.gather, -1), blocks, points * total, greedy)
        logprobs, entropies, _ = softmax_statistics(shifted, weights, tokens, exact=True)
        return tokens, logprobs, entropies
    # in place: one table of [r, V] less; `shifted` is gone from here on
    products = shifted.mul_(weights)
    moment = products.sum(-1)
    # a logit of -inf has weight 0 and adds nothing to the entropy; testing for one would wait for the device
    if logits.device.type != "cpu" or bool(moment.isnan().any()):
        moment = torch.where(weights > 0, products, 0.0).sum(-1)
    tokens = _chosen(logits, partial(weights.gather, -1), blocks, points * total, greedy)
    log_total = total.log()
    # from the weights, since `shifted` was overwritten
    chosen = weights.gather(-1, tokens[:, None])[:, 0].log()
    return tokens, chosen - log_total.to(chosen.dtype), (log_total - moment / total).to(chosen.dtype)


def _chosen(
    logits: Tensor, weights_at: Callable[[Tensor], Tensor], blocks: Tensor, target: Tensor, greedy: Tensor | None
) -> Tensor:
    """Return the first token whose cumulative weight exceeds ``target``, or (``greedy``) the most likely one.

    The first never has weight 0.

    ``weights_at`` returns the weights of columns ``[r, c]``.
    """
    vocab = logits.shape[1]
    columns = torch.arange(min(_BLOCK, vocab), device=blocks.device)
    if vocab <= _BLOCK:
        # Nothing lies before the only block. Half of the operations of a tiny model's sampling are saved.
        tokens = _first_above(weights_at(columns.expand(len(blocks), -1)).double().cumsum(-1), target)
    else:
        cumulative = blocks.cumsum(-1)
        block = _first_above(cumulative, target)[:, None]
        # the remainder of the target inside the block
        rest = target - (cumulative.gather(-1, block) - blocks.gather(-1, block))[:, 0]
        columns = block * _BLOCK + columns
        inside = weights_at(columns.clamp(max=vocab - 1)).double()
        inside = inside.masked_fill(columns >= vocab, 0.0) if vocab % _BLOCK else inside
        tokens = block[:, 0] * _BLOCK + _first_above(inside.cumsum(-1), rest)
    return tokens if greedy is None else torch.where(greedy, logits.argmax(-1), tokens)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """Return the first index with ``cumulative > target``.

    The cumulative sum has just risen there, so the entry itself is positive. Rounding can leave ``target`` at or above
    the last sum. The target is then lowered to just below it, which gives the last index at which the sum rose.
    """
    last = cumulative[:, -1]
    below = torch.minimum(target.clamp(min=0.0), torch.nextafter(last, torch.zeros_like(last)))
    index = torch.searchsorted(cumulative, below[:, None], right=True)[:, 0]
    return index.clamp_(max=cumulative.shape[1] - 1)  # out of range for NaN only, which the caller reports
