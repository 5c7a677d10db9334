"""Who is dropped for whom, while stages run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

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
