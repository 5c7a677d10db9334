"""Entropy over the likelier tokens, with a coefficient adapted by two bounds (AEnt, Shen 2025, arXiv 2509.03493).

    magicrl train tiny --set model.entropy_clamp=0.2 --set entropy.controller=studies/race/aent.py:make

The bonus is always added. It uses the entropy of the policy over its likelier tokens, renormalised;
``model.entropy_clamp`` is the share of the vocabulary that is left out. c rises by D times the distance of the entropy
below the lower bound and falls by D times its distance above the upper one, within [1e-5, 0.01]. It starts at 0.001.
The bounds are a third and five thirds of the target; at 0.3 they are 0.1 and 0.5, as in the released code (AReaL). That
code adapts c by the clamped entropy of the update. Here it is adapted by the sampler's entropy over all tokens, which
controllers receive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from magicrl.algorithms.entropy import ControllerSettings


@dataclass
class BetweenBounds:
    """Coefficient ``c`` that applies at every step."""

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
    """Make it from ``entropy.target`` (default 0.3), ``step`` as D (0.001) and ``maximum`` of c (0.01)."""
    target, step, largest = (
        own if value is None else value
        for value, own in zip((s.target, s.step, s.maximum), (0.3, 0.001, 0.01), strict=True)
    )
    return BetweenBounds(target / 3, target * 5 / 3, step, largest)
