"""What an engine does once it has new weights: show that it samples with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from magicrl.records import RolloutGroup, RolloutRequest


class WeightCheck(Protocol):
    """Compares what an engine reports after ``load_weights`` with what the learner computes for the same tokens.

    An engine that was made with one answers ``requests`` each time and hands the answers to ``compare`` before it
    serves anything else.
    """

    @property
    def requests(self) -> Sequence[RolloutRequest]:
        """A few short requests, the same every time."""
        ...

    def compare(self, answers: Mapping[str, Sequence[RolloutGroup]], version: int) -> None:
        """
        Args:
            answers: groups of ``requests`` in their order, by the name of the engine or replica that made them.
            version: of the weights that were loaded.

        Raises:
            RuntimeError: an engine samples with other weights than the learner's.
        """
        ...
