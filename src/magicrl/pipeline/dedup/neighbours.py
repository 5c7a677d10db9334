"""Duplicates by the cosine of embeddings, among texts with the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from magicrl.files import whole_file
from magicrl.pipeline.dedup.links import Links, buckets
from magicrl.pipeline.similarity.embedders import Embedder
from magicrl.pipeline.similarity.guard import are_different
from magicrl.pipeline.similarity.hashed import Matrix
from magicrl.pipeline.similarity.shingles import U64
from magicrl.pipeline.similarity.texts import Texts

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
