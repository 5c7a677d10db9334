"""Entropy over the likelier words, its coefficient moved by two bounds (AEnt, Shen 2025, arXiv 2509.03493).

    magicrl train tiny --set model.entropy_clamp=0.2 --set entropy.controller=studies/race/aent.py:make

The bonus is always paid, with the entropy of the policy over its likelier words, divided by their sum;
``model.entropy_clamp`` is the share of the vocabulary that is left out. c rises by D times what the entropy lacks of
the lower bound and falls by D times what it has above the upper one, within [1e-5, 0.01]; it starts at 0.001. Bounds
are a third and five thirds of the target: 0.1 and 0.5, the released code's (AReaL), at 0.3. That code moves c by the
clamped entropy of the update; here it is moved by the sampler's over all words, which controllers are told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from magicrl.algorithms.entropy import ControllerSettings


@dataclass
class BetweenBounds:
    """``c``, paid at every step."""

    low: float
    high: float
    step: float
    largest: float
    least: float = 1e-5
    c: float = 0.001

    def coefficient(self, entropy: float) -> float:
        return self.c

    def observe(self, entropy: float) -> None:
        moved = self.c - self.step * (min(0.0, entropy - self.low) + max(0.0, entropy - self.high))
        self.c = min(max(moved, self.least), self.largest)

    def state(self) -> dict[str, float | None]:
        return {"c": self.c}

    def restore(self, state: Mapping[str, float | None]) -> None:
        self.c = state["c"] or self.least


def make(s: ControllerSettings) -> BetweenBounds:
    """``entropy.target`` (default 0.3), ``step`` as D (0.001), ``maximum`` of c (0.01)."""
    target, step, largest = (
        own if value is None else value
        for value, own in zip((s.target, s.step, s.maximum), (0.3, 0.001, 0.01), strict=True)
    )
    return BetweenBounds(target / 3, target * 5 / 3, step, largest)
