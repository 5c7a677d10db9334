"""Which requests start first: those whose problems had the longest responses when they were last drawn.

Where a step has more responses than rows, a long response that starts late is what the whole step waits for. Starting
the long ones first (Graham's LPT rule, 1969) costs nothing and changes no result: a sample's random numbers depend on
its draw, index and position alone, groups are used in the order of their draws, and none is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class PastLengths:
    """Mean response length of every problem's last draw in this run, by ``Problem.key``."""

    def __init__(self) -> None:
        self._means: dict[str, float] = {}

    def saw(self, problem: str, mean_tokens: float) -> None:
        """Remember how long the responses of this draw are on average."""
        self._means[problem] = mean_tokens

    def longest_first(self, problems: Sequence[str]) -> list[int]:
        """Places in ``problems`` by falling expected length; of equal ones the first comes first.

        A problem that was not drawn before is expected to take the mean of those in ``problems`` that were: it must
        neither wait for all of them nor push the long ones back.
        """
        known = [self._means[name] for name in problems if name in self._means]
        middle = sum(known) / len(known) if known else 0.0
        return sorted(range(len(problems)), key=lambda place: -self._means.get(problems[place], middle))

    def state(self) -> dict[str, float]:
        """JSON values."""
        return dict(self._means)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Inverse of ``state``."""
        self._means = {name: float(mean) for name, mean in state.items()}
