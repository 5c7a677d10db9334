"""Near duplicates: by shingles (MinHash, each candidate pair then compared exactly), or by the cosine of embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from rensa import RMinHash  # pyright: ignore[reportAttributeAccessIssue]

from magicrl.pipeline.embedders import Matrix
from magicrl.pipeline.guard import are_different
from magicrl.pipeline.pipeline_schema import NearSettings
from magicrl.pipeline.texts import U64, Texts, jaccard, mixed, shingles

Numbers = NDArray[np.int64]
Similarity = Callable[[int, int], float | None]
"""Of two documents, by number; None when they are not duplicates."""

_HEADS = 16
"""Most kept documents of one bucket that a further member is compared with: a bucket of n costs no more than 16 n."""


class Links:
    """Documents dropped by one stage: ``found`` holds (dropped, kept, similarity).

    Args:
        alive: which documents the earlier stages left.
        rank: of each document; the lower stays.
    """

    def __init__(self, alive: NDArray[np.bool_], rank: Numbers) -> None:
        self.alive = alive.copy()
        self.rank = rank
        self.guarded = 0  # pairs that were alike and are different problems
        self.found: list[tuple[int, int, float]] = []

    def drop(self, dropped: int, kept: int, similarity: float) -> None:
        """``dropped`` goes for ``kept``, which may go for another one later."""
        assert self.alive[dropped]
        assert dropped != kept
        self.alive[dropped] = False
        self.found.append((dropped, kept, similarity))

    def resolve(self, bucket: Sequence[int], similarity: Similarity) -> None:
        """Drop the duplicates among the documents of a bucket; the best of each pair stays."""
        heads: list[int] = []
        for document in sorted((d for d in bucket if self.alive[d]), key=lambda d: int(self.rank[d])):
            for head in heads:
                found = similarity(head, document)
                if found is not None:
                    self.drop(document, head, found)
                    break
            else:
                # the first ones are the best of the bucket, the last ones the likeliest neighbours
                if len(heads) == _HEADS:
                    del heads[_HEADS // 2]
                heads.append(document)


def buckets(keys: U64, members: Numbers) -> Iterator[Numbers]:
    """Members with equal keys, where there are at least two, in the order of the keys."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    edges = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1], [True]]))
    for place in np.flatnonzero(np.diff(edges) > 1):
        yield members[order[edges[place] : edges[place + 1]]]


_CHUNK = 8192
_CACHED = 50_000
_CHECKED = 2_000_000


def bands_of(texts: Texts, settings: NearSettings) -> U64:
    """``[bands, documents]`` 64-bit keys; two texts are candidates where a band's keys agree."""
    keys = np.empty((settings.permutations // settings.rows, len(texts)), dtype=np.uint64)
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
    return keys


def link_near(
    links: Links, texts: Texts, raw: Texts, bands: U64, numbers: U64, settings: NearSettings, *, guard: bool
) -> None:
    """Drop near duplicates, band by band; each candidate pair is compared exactly.

    Args:
        texts, raw: canonical and as they came.
        bands: from ``bands_of``.
        numbers: ``[documents]`` keys of the numbers in the texts; with ``guard`` texts of different keys are not
            compared at all.
    """

    @lru_cache(_CACHED)
    def shingles_of(number: int) -> U64:
        return np.unique(shingles([texts[number]], settings.shingle_characters, settings.seed)[0])

    @lru_cache(_CHECKED)  # a pair may meet in every band, and the guard is slow
    def similarity(kept: int, other: int) -> float | None:
        found = jaccard(shingles_of(kept), shingles_of(other))
        if found < settings.similarity:
            return None
        if guard and are_different(raw[kept], raw[other]):
            links.guarded += 1
            return None
        return found

    for band in bands:
        members = np.flatnonzero(links.alive)
        keys = mixed(band[members] ^ numbers[members], 0) if guard else np.asarray(band[members])
        for bucket in buckets(keys, members):
            links.resolve(bucket.tolist(), similarity)


_TILE = 1024
_BLOCK = 16384
"""Most texts that are compared each with each; a larger block is split by nearness to some of its members."""
_TRIED = 8


def link_neighbours(
    links: Links, raw: Texts, vectors: NDArray[np.float16], numbers: U64, *, similarity: float, guard: bool
) -> None:
    """Drop the documents whose vector is near a better document's.

    Args:
        raw: the texts, by document number.
        vectors: ``[alive documents, d]``, unit length.
        numbers: ``[documents]``; with ``guard`` texts of different ones are not compared, and texts that are different
            problems are kept apart.
        similarity: least cosine.
    """
    members = np.flatnonzero(links.alive)

    def settle(document: int, near: Numbers, scores: Matrix) -> None:
        for place in np.argsort(-scores, kind="stable")[:_TRIED]:
            kept = int(near[place])
            if guard and are_different(raw[document], raw[kept]):
                links.guarded += 1
                continue
            links.drop(document, kept, float(scores[place]))
            return

    keys = numbers[members] if guard else np.zeros(len(members), dtype=np.uint64)
    for block in buckets(keys, np.arange(len(members))):
        ranked = block[np.argsort(links.rank[members[block]], kind="stable")]
        for part in _parts(ranked, vectors):
            rows = part[links.alive[members[part]]]
            for place, near, scores in _near_rows(vectors[rows].astype(np.float32), similarity):
                others = members[rows[near]]
                left = links.alive[others]
                settle(int(members[rows[place]]), others[left], scores[left])


def _parts(block: Numbers, vectors: NDArray[np.float16]) -> Sequence[Numbers]:
    """Overlapping parts: each row goes with the two of some evenly spaced ones that it is nearest to."""
    if len(block) <= _BLOCK:
        return [block]
    centres = 4 * -(-len(block) // _BLOCK)
    chosen = vectors[block[np.linspace(0, len(block) - 1, centres).astype(np.int64)]].astype(np.float32)
    nearest = np.empty((len(block), 2), dtype=np.int64)
    for first in range(0, len(block), _TILE):
        scores = vectors[block[first : first + _TILE]].astype(np.float32) @ chosen.T
        nearest[first : first + _TILE] = np.argsort(-scores, axis=1, kind="stable")[:, :2]
    return [block[(nearest == centre).any(axis=1)] for centre in range(centres)]


def _near_rows(vectors: Matrix, similarity: float) -> Iterable[tuple[int, Numbers, Matrix]]:
    """Each row that has near ones before it, with these and their cosines."""
    for first in range(0, len(vectors), _TILE):
        scores = vectors[first : first + _TILE] @ vectors[: first + _TILE].T
        near_rows, near = np.nonzero(scores >= similarity)
        before = near < near_rows + first
        near_rows, near = near_rows[before], near[before]
        for row in np.unique(near_rows):
            columns = near[near_rows == row]
            yield int(row) + first, columns, scores[row, columns]
