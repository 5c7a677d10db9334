"""Near duplicates: MinHash signatures (rensa), banded; each candidate pair is then compared exactly."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rensa import RMinHash  # pyright: ignore[reportAttributeAccessIssue]

from magicrl.files import whole_file
from magicrl.pipeline.dedup.links import Links, buckets
from magicrl.pipeline.dedup.settings import NearSettings
from magicrl.pipeline.similarity.guard import are_different
from magicrl.pipeline.similarity.shingles import U64, jaccard, mixed, shingles
from magicrl.pipeline.similarity.texts import Texts

_CHUNK = 8192
_CACHED = 50_000
_CHECKED = 2_000_000


def write_bands(path: Path, texts: Texts, settings: NearSettings) -> None:
    """Write ``[bands, documents]`` 64-bit keys; two texts are candidates where a band's keys agree."""
    bands = settings.permutations // settings.rows
    with whole_file(path) as file:
        keys = np.lib.format.open_memmap(file.name, mode="w+", dtype=np.uint64, shape=(bands, len(texts)))
        # a mapped file that finds no room later ends the process by a signal
        os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
        _fill_bands(keys, texts, settings)
        keys.flush()


def _fill_bands(keys: NDArray[np.uint64], texts: Texts, settings: NearSettings) -> None:
    for first, chunk in texts.chunks(_CHUNK):
        hashes, starts = shingles(chunk, settings.shingle_characters, settings.seed)
        matrix = RMinHash.digest_matrix_from_flat_token_hashes(
            hashes, starts.astype(np.uint64), settings.permutations, settings.seed
        )
        rows = np.asarray(matrix.to_rows(), dtype=np.uint64)
        for band in range(len(keys)):
            key = np.full(len(chunk), band, dtype=np.uint64)
            for column in range(band * settings.rows, (band + 1) * settings.rows):
                key = mixed(key ^ rows[:, column], 0)
            keys[band, first : first + len(chunk)] = key


class NearComparison:
    """Exact Jaccard similarity of shingles, and the guard, with what was computed lately at hand."""

    def __init__(self, texts: Texts, raw: Texts, settings: NearSettings, *, guard: bool) -> None:
        self._texts = texts
        self._raw = raw
        self._settings = settings
        self._guard = guard
        self._sets: OrderedDict[int, U64] = OrderedDict()
        self._refused: set[tuple[int, int]] = set()
        self.guarded = 0

    def __call__(self, kept: int, other: int) -> float | None:
        if (kept, other) in self._refused:
            return None
        similarity = jaccard(self._shingles(kept), self._shingles(other))
        if similarity >= self._settings.similarity:
            if not self._guard or not are_different(self._raw[kept], self._raw[other]):
                return similarity
            self.guarded += 1
        if len(self._refused) >= _CHECKED:
            self._refused.clear()  # bounds memory; the pairs are compared again
        self._refused.add((kept, other))
        return None

    def _shingles(self, number: int) -> U64:
        if number in self._sets:
            self._sets.move_to_end(number)
            return self._sets[number]
        hashes, _ = shingles([self._texts[number]], self._settings.shingle_characters, self._settings.seed)
        found = self._sets[number] = np.unique(hashes)
        if len(self._sets) > _CACHED:
            self._sets.popitem(last=False)
        return found


def link_near(
    links: Links,
    texts: Texts,
    raw: Texts,
    bands: NDArray[np.uint64],
    numbers: U64,
    settings: NearSettings,
    *,
    guard: bool,
) -> None:
    """Drop near duplicates, band by band.

    Args:
        texts, raw: canonical and as they came.
        bands: ``[bands, documents]`` from ``write_bands``.
        numbers: ``[documents]`` keys of the numbers in the texts; with ``guard`` texts of different keys are not
            compared at all.
    """
    comparison = NearComparison(texts, raw, settings, guard=guard)
    for band in bands:
        members = np.flatnonzero(links.alive)
        keys = mixed(band[members] ^ numbers[members], 0) if guard else np.asarray(band[members])
        for bucket in buckets(keys, members):
            links.resolve(bucket.tolist(), comparison)
    links.guarded += comparison.guarded
