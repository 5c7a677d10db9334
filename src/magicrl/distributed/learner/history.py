"""What a rebuild of the learner starts from and repeats."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from magicrl.records import TrainBatch
from magicrl.training.protocols import Controls

Base: TypeAlias = "Mapping[str, Any] | tuple[Path, Mapping[str, Any]] | None"


class History:
    """The last state known outside the ranks, and the updates made since.

    The batches are those that the loop made anyway; keeping them costs their tokens and log-probs, about 20 bytes a
    response token.

    Args:
        limit: updates after which a state should be taken; None: never.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self.base: Base = None
        self.updates: list[tuple[TrainBatch, Controls]] = []

    @property
    def long(self) -> bool:
        """Whether a state should be taken now."""
        return self._limit is not None and len(self.updates) >= self._limit

    def made(self, batch: TrainBatch, controls: Controls) -> None:
        """An update was made."""
        self.updates.append((batch, controls))

    def known(self, base: Base) -> None:
        """The present state is ``base``: a gathered one, a folder of shards with what belongs to it, or the start."""
        self.base = base
        self.updates.clear()
