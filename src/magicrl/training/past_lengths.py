"""Which requests start first: those whose problems had the longest responses when they were last drawn.

Where a step has more responses than rows, a long response that starts late is what the whole step waits for. Starting
the long ones first (Graham's LPT rule, 1969) costs nothing and changes no result: a sample's random numbers depend on
its draw, index and position alone, groups are used in the order of their draws, and none is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from magicrl.records import RolloutGroup, RolloutRequest


class PastLengths:
    """Mean response length of every problem's last draw in this run."""

    def __init__(self) -> None:
        self._means: dict[str, float] = {}

    def saw(self, group: RolloutGroup) -> None:
        """Remember how long this group's responses are."""
        self._means[group.request.problem.id] = group.num_tokens / len(group.completions)

    def longest_first(self, requests: Sequence[RolloutRequest]) -> list[RolloutRequest]:
        """``requests`` by falling expected length; equal ones stay in their order.

        A problem that was not drawn before is expected to take the mean of those in ``requests`` that were: it must
        neither wait for all of them nor push the long ones back.
        """
        known = [self._means[r.problem.id] for r in requests if r.problem.id in self._means]
        middle = sum(known) / len(known) if known else 0.0
        return sorted(requests, key=lambda r: -self._means.get(r.problem.id, middle))

    def state(self) -> dict[str, float]:
        """JSON values."""
        return dict(self._means)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Inverse of ``state``."""
        self._means = {name: float(mean) for name, mean in state.items()}
