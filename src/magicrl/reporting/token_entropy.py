"""Where a policy is uncertain: entropy by position in the response, its concentration on few tokens, and those tokens.

Pure functions on token ids and entropies, no drawing. The entropy of a token is that of the distribution from which it
was drawn, in nats: a token of high entropy is one at which the policy could have gone on differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]

MOST_BINS = 24
LEAST_TOKENS = 8
"""Tokens below which a bin of positions, or a token of the vocabulary, says too little to be shown."""
SHARES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Shares of the tokens at which the concentration is read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """The responses of one step (or evaluation): ids and entropies of all tokens, one behind the other.

    Attributes:
        ids: [tokens].
        entropies: [tokens], nats.
        lengths: [responses], tokens of each; they add up to ``len(ids)``.
    """

    ids: NDArray[np.int64]
    entropies: Floats
    lengths: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionBin:
    """Positions ``first`` to ``last`` (from 1) of the responses: mean entropy, and how many tokens it is a mean of."""

    first: int
    last: int
    mean: float
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenShare:
    """One token of the vocabulary: how often it was drawn, its mean entropy, its share of all entropy."""

    token: int
    count: int
    mean: float
    share: float


def recorded(responses: Sequence[tuple[Sequence[int], Sequence[float]]]) -> Recorded | None:
    """(ids, entropies) of each response as one; None where there is no token.

    Raises:
        ValueError: a response with another number of entropies than tokens.
    """
    for ids, entropies in responses:
        if len(ids) != len(entropies):
            raise ValueError(f"a response of {len(ids)} tokens has {len(entropies)} entropies")
    if not any(len(ids) for ids, _ in responses):
        return None
    return Recorded(
        ids=np.concatenate([np.asarray(ids, dtype=np.int64) for ids, _ in responses]),
        entropies=np.concatenate([np.asarray(values, dtype=np.float64) for _, values in responses]),
        lengths=np.array([len(ids) for ids, _ in responses], dtype=np.int64),
    )


def bin_edges(longest: int, bins: int = MOST_BINS) -> list[int]:
    """First positions of at most ``bins`` bins of equal width over 1 to ``longest``, and one behind the last.

    Example:
        >>> bin_edges(10, 4)
        [1, 4, 7, 10, 11]
    """
    width = -(-longest // bins)
    return [*range(1, longest + 1, width), longest + 1]


def by_position(data: Recorded, edges: Sequence[int]) -> list[PositionBin]:
    """Mean entropy over all tokens in each bin of positions; bins of fewer than ``LEAST_TOKENS`` tokens are left out.

    Late bins hold only the responses that are so long.
    """
    starts = np.cumsum(data.lengths) - data.lengths
    positions = np.arange(len(data.ids)) - np.repeat(starts, data.lengths) + 1
    slots = np.searchsorted(np.asarray(edges), positions, side="right") - 1
    counts = np.bincount(slots, minlength=len(edges) - 1)
    sums = np.bincount(slots, weights=data.entropies, minlength=len(edges) - 1)
    return [
        PositionBin(first=edges[i], last=edges[i + 1] - 1, mean=float(sums[i] / counts[i]), tokens=int(counts[i]))
        for i in range(len(edges) - 1)
        if counts[i] >= LEAST_TOKENS
    ]


def concentration(data: Recorded, shares: Sequence[float] = SHARES) -> list[tuple[float, float]]:
    """(share of the tokens, share of all entropy that the most uncertain so many of them hold) pairs.

    Empty where there is no entropy at all.
    """
    total = float(data.entropies.sum())
    if total <= 0:
        return []
    held = np.cumsum(np.sort(data.entropies)[::-1]) / total
    count = len(held)
    return [(share, float(held[min(count, max(1, round(share * count))) - 1])) for share in shares]


def threshold(data: Recorded, share: float) -> float:
    """The entropy that the most uncertain ``share`` of the tokens have at least."""
    return float(np.quantile(data.entropies, 1 - share))


def token_shares(data: Recorded) -> list[TokenShare]:
    """Every drawn token of the vocabulary, the one that holds most of all entropy first."""
    tokens, inverse, counts = np.unique(data.ids, return_inverse=True, return_counts=True)
    sums = np.bincount(inverse, weights=data.entropies, minlength=len(tokens))
    total = float(sums.sum())
    order = np.argsort(-sums, kind="stable")
    return [
        TokenShare(
            token=int(tokens[i]),
            count=int(counts[i]),
            mean=float(sums[i] / counts[i]),
            share=float(sums[i] / total) if total > 0 else 0.0,
        )
        for i in order
    ]


def most_uncertain(shares: Sequence[TokenShare], most: int) -> list[TokenShare]:
    """The tokens of highest mean entropy among those drawn at least ``LEAST_TOKENS`` times."""
    often = [share for share in shares if share.count >= LEAST_TOKENS]
    return sorted(often, key=lambda share: (-share.mean, share.token))[:most]


def mean_entropy(data: Recorded) -> float:
    """Nats per token over all tokens."""
    return float(data.entropies.mean())
