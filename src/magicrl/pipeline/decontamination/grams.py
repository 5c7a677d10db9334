"""Word n-grams of many texts, and which test problems share them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from magicrl.pipeline.similarity.shingles import U64, mixed, runs

Tokens = Sequence[str]


def masked(tokens: Tokens) -> list[str]:
    """The tokens with every number as ``#``."""
    return ["#" if token[0].isdigit() else token for token in tokens]


class GramIndex:
    """Test problems by their n-grams.

    A problem of fewer than n words is one gram of its own length. A gram that several problems share weighs as much
    less, so that *Find the remainder when N is divided by* does not count.

    Args:
        references: canonical tokens of each.
        length: n.
        least: shortest problem, in tokens, that is looked for at all.
    """

    def __init__(self, references: Sequence[Tokens], *, length: int, least: int) -> None:
        self._count = len(references)
        self._length = length
        self._lengths = sorted({min(length, len(r)) for r in references if len(r) >= least})
        sets = [
            set(self._grams([r], min(length, len(r)))[0].tolist()) if len(r) >= least else set() for r in references
        ]
        frequency: Counter[int] = Counter(gram for grams in sets for gram in grams)
        pairs = sorted((gram, reference) for reference, grams in enumerate(sets) for gram in grams)
        self._keys = np.asarray([gram for gram, _ in pairs], dtype=np.uint64)
        self._owners = np.asarray([owner for _, owner in pairs], dtype=np.int64)
        self._weights = np.asarray([1.0 / frequency[gram] for gram, _ in pairs], dtype=np.float64)
        self._totals = np.maximum(np.bincount(self._owners, self._weights, self._count), 1e-12)

    def overlaps(self, texts: Sequence[Tokens], least: float) -> list[dict[int, float]]:
        """By text: test problems of whose n-grams, by weight, it holds at least this share."""
        found: list[dict[int, float]] = [{} for _ in texts]
        if not len(self._keys):
            return found
        rows: list[NDArray[np.int64]] = []
        grams: list[U64] = []
        for length in self._lengths:
            hashes, starts = self._grams(texts, length)
            known = np.isin(hashes, self._keys)
            rows.append(np.repeat(np.arange(len(texts)), np.diff(starts))[known])
            grams.append(hashes[known])
        pairs = np.unique(np.stack([np.concatenate(rows).astype(np.uint64), np.concatenate(grams)]), axis=1)
        scores: Counter[tuple[int, int]] = Counter()
        left = np.searchsorted(self._keys, pairs[1], side="left")
        right = np.searchsorted(self._keys, pairs[1], side="right")
        for row, first, last in zip(pairs[0].tolist(), left.tolist(), right.tolist(), strict=True):
            for place in range(first, last):
                scores[int(row), int(self._owners[place])] += self._weights[place]  # type: ignore[assignment]
        for (row, owner), weight in scores.items():
            share = float(weight / self._totals[owner])
            if share >= least:
                found[row][owner] = min(share, 1.0)
        return found

    def _grams(self, texts: Sequence[Tokens], length: int) -> tuple[U64, NDArray[np.int64]]:
        words = np.asarray([crc32(t.encode("utf-8", "surrogatepass")) for text in texts for t in text], dtype=np.uint64)
        sizes = np.asarray([len(text) for text in texts], dtype=np.int64)
        return runs(mixed(words, 7), sizes, length, seed=length)
