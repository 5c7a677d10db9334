"""What dedup found: who is kept, who is dropped, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from magicrl.pipeline.dedup.settings import Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class Duplicate:
    """A dropped document.

    Attributes:
        id: of the dropped document.
        kept: id of the copy that stays in its place.
        stage: which stage found it.
        similarity: of the pair that the stage found, in 0..1: 1 (exact, disguised), Jaccard (near), cosine (embedding).
        twin: the other document of that pair; it is ``kept`` itself, or was dropped for it in turn.
    """

    id: str
    kept: str
    stage: Stage
    similarity: float
    twin: str


@dataclass(frozen=True, kw_only=True)
class DuplicateClusters:
    """All duplicates of one call.

    Attributes:
        documents: how many were read.
        dropped: in the order of the input.
        pairs_guarded: by stage, pairs that were similar enough and differ in a number, a formula or a deciding word.
    """

    documents: int
    dropped: tuple[Duplicate, ...]
    pairs_guarded: Mapping[Stage, int]

    @cached_property
    def by_id(self) -> Mapping[str, Duplicate]:
        """The dropped documents by id; whoever is not in it is kept."""
        return {duplicate.id: duplicate for duplicate in self.dropped}

    def is_kept(self, document: str) -> bool:
        """Whether the document stays."""
        return document not in self.by_id

    def clusters(self) -> Iterator[tuple[str, tuple[Duplicate, ...]]]:
        """Each kept document that has copies, with them, in the order of the first copy dropped."""
        members: dict[str, list[Duplicate]] = {}
        for duplicate in self.dropped:
            members.setdefault(duplicate.kept, []).append(duplicate)
        for kept, copies in members.items():
            yield kept, tuple(copies)
