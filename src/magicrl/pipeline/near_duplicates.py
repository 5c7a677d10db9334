"""Near duplicates: by shingles (MinHash, each candidate pair then compared exactly), or by the cosine of embeddings."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rensa import RMinHash  # pyright: ignore[reportAttributeAccessIssue]

from magicrl.files import whole_file
from magicrl.pipeline.embedders import Embedder, Matrix
from magicrl.pipeline.guard import are_different
from magicrl.pipeline.pipeline_schema import NearSettings
from magicrl.pipeline.texts import U64, Texts, jaccard, mixed, shingles

LINK = np.dtype([("dropped", np.int64), ("kept", np.int64), ("similarity", np.float32)])
Similarity = Callable[[int, int], float | None]
"""Of two documents, by number; None when they are not duplicates."""

_HEADS = 16
"""Most kept documents of one bucket that a further member is compared with: a bucket of n costs no more than 16 n."""


class Links:
    """Documents dropped by one stage.

    Args:
        count: of all documents.
        alive: which of them the earlier stages left.
        rank: of each document; the lower stays.
    """

    def __init__(self, count: int, alive: NDArray[np.bool_], rank: NDArray[np.int64]) -> None:
        assert len(alive) == len(rank) == count
        self.alive = alive.copy()
        self.rank = rank
        self.guarded = 0
        self._links: list[tuple[int, int, float]] = []

    def drop(self, dropped: int, kept: int, similarity: float) -> None:
        """``dropped`` goes for ``kept``, which may go for another one later."""
        assert self.alive[dropped]
        assert dropped != kept
        self.alive[dropped] = False
        self._links.append((dropped, kept, similarity))

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

    def as_array(self) -> NDArray[np.void]:
        """The links in the order in which they were found."""
        return np.asarray(self._links, dtype=LINK)


def buckets(keys: NDArray[np.uint64], members: NDArray[np.int64]) -> Iterable[NDArray[np.int64]]:
    """Members with equal keys, where there are at least two, in the order of the keys."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    edges = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1], [True]]))
    for place in np.flatnonzero(np.diff(edges) > 1):
        yield members[order[edges[place] : edges[place + 1]]]


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


CHUNK = 4096
_TILE = 1024
_BLOCK = 16384
"""Most texts that are compared each with each; a larger block is split by nearness to some of its members."""
_TRIED = 8


class Vectors:
    """Vectors in files of ``CHUNK`` rows, half precision; rows that are there are not made again."""

    def __init__(self, folder: Path, count: int) -> None:
        self._folder = folder
        self._count = count
        folder.mkdir(parents=True, exist_ok=True)

    def fill(self, open_embedder: Callable[[], Embedder], texts: Callable[[int, int], Sequence[str]]) -> None:
        """Embed what is missing; ``texts(first, last)`` are the rows' texts."""
        missing = [first for first in range(0, self._count, CHUNK) if not self._path(first).is_file()]
        if not missing:
            return
        embedder = open_embedder()
        try:
            for first in missing:
                rows = embedder.embed(texts(first, min(first + CHUNK, self._count)))
                with whole_file(self._path(first)) as file:
                    np.save(file, rows.astype(np.float16))
        finally:
            embedder.close()

    def load(self) -> NDArray[np.float16]:
        """All of them, ``[count, d]``: d · 2 bytes a text in memory."""
        parts = [np.load(self._path(first)) for first in range(0, self._count, CHUNK)]
        return np.concatenate(parts) if parts else np.zeros((0, 1), dtype=np.float16)

    def _path(self, first: int) -> Path:
        return self._folder / f"{first:010d}.npy"


class NeighbourSearch:
    """Drops the documents whose vector is near a better document's.

    Args:
        links: what is alive and who is better.
        raw: the texts, by document number.
        rows: ``[documents]`` row of each document in ``vectors``; -1 for one without.
        vectors: ``[rows, d]``, unit length.
        similarity: least cosine.
        guard: keep texts apart that are different problems.
    """

    def __init__(
        self,
        links: Links,
        raw: Texts,
        rows: NDArray[np.int64],
        vectors: NDArray[np.float16],
        *,
        similarity: float,
        guard: bool,
    ) -> None:
        self._links = links
        self._raw = raw
        self._rows = rows
        self._vectors = vectors
        self._similarity = similarity
        self._guard = guard

    def run(self, numbers: U64) -> None:
        """Over all documents alive; with the guard, texts of different ``numbers`` are not compared."""
        members = np.flatnonzero(self._links.alive)
        keys = numbers[members] if self._guard else np.zeros(len(members), dtype=np.uint64)
        for block in buckets(keys, members):
            ranked = block[np.argsort(self._links.rank[block], kind="stable")]
            for part in self._parts(ranked):
                self._search(part[self._links.alive[part]])

    def _parts(self, block: NDArray[np.int64]) -> Sequence[NDArray[np.int64]]:
        """Overlapping parts: each text goes with the two of some evenly spaced members that it is nearest to."""
        if len(block) <= _BLOCK:
            return [block]
        centres = 4 * -(-len(block) // _BLOCK)
        chosen = self._of(block[np.linspace(0, len(block) - 1, centres).astype(np.int64)])
        nearest = np.empty((len(block), 2), dtype=np.int64)
        for first in range(0, len(block), _TILE):
            scores = self._of(block[first : first + _TILE]) @ chosen.T
            nearest[first : first + _TILE] = np.argsort(-scores, axis=1, kind="stable")[:, :2]
        return [block[(nearest == centre).any(axis=1)] for centre in range(centres)]

    def _search(self, block: NDArray[np.int64]) -> None:
        """Best document first: each is compared with the better ones that are still there."""
        vectors = self._of(block)
        for first in range(0, len(block), _TILE):
            tile = slice(first, first + _TILE)
            scores = vectors[tile] @ vectors[: first + _TILE].T
            near_rows, near_columns = np.nonzero(scores >= self._similarity)
            better = near_columns < near_rows + first
            near_rows, near_columns = near_rows[better], near_columns[better]
            for row in np.unique(near_rows):
                self._settle(block, int(row) + first, near_columns[near_rows == row], scores[row])

    def _settle(self, block: NDArray[np.int64], place: int, near: NDArray[np.int64], scores: Matrix) -> None:
        near = near[self._links.alive[block[near]]]
        for column in near[np.argsort(-scores[near], kind="stable")][:_TRIED]:
            document, kept = int(block[place]), int(block[column])
            if self._guard and are_different(self._raw[document], self._raw[kept]):
                self._links.guarded += 1
                continue
            self._links.drop(document, kept, float(scores[column]))
            return

    def _of(self, block: NDArray[np.int64]) -> Matrix:
        return self._vectors[self._rows[block]].astype(np.float32)
