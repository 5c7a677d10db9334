"""An upper clip that follows the entropy (report on MAI-Thinking-1, Microsoft AI, June 2026).

    magicrl train tiny --set algorithm.loss=studies/race/mai_clip.py:ROW \\
        --set entropy.controller=studies/race/mai_clip.py:make --set entropy.target=0.3

rho is clipped to [1 - eps, 1 / (1 - eps) + k], with k <- clip(k + D sign(target - H), 0, k_max) once per step. Below
the target the upper bound rises, above it falls. eps is ``clip_low`` (0.6), D ``entropy.step`` (0.25), k_max
``entropy.maximum`` (2.5). ADAPO (arXiv 2603.11682) changes the same bound; its rule could not be established.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from magicrl.algorithms.entropy import ControllerSettings
from magicrl.algorithms.losses import LossRow, Surrogate, SurrogateInputs, clipped_ratio


@dataclass
class Relaxation:
    """Controller of k; the entropy bonus is always 0."""

    target: float
    step: float
    largest: float
    k: float = 0.0

    def coefficient(self, entropy: float) -> float:
        return 0.0

    def coefficients(self, entropy: float) -> dict[str, float]:
        return {"k": self.k}

    def observe(self, entropy: float) -> None:
        direction = (entropy < self.target) - (entropy > self.target)
        self.k = min(max(self.k + self.step * direction, 0.0), self.largest)

    def state(self) -> dict[str, float | None]:
        return {"k": self.k}

    def restore(self, state: Mapping[str, float | None]) -> None:
        self.k = state["k"] or 0.0


def make(s: ControllerSettings) -> Relaxation:
    """Make it from ``entropy.target``, ``step`` and ``maximum``; the report's values are 0.3, 0.25 and 2.5."""
    given = (s.target, s.step, s.maximum)
    return Relaxation(*(own if value is None else value for value, own in zip(given, (0.3, 0.25, 2.5), strict=True)))


def surrogate(s: SurrogateInputs) -> Surrogate:
    """Compute PPO's clip with the adapted bound."""
    return clipped_ratio(s._replace(clip_high=1 / (1 - s.clip_low) + s.coefficients["k"] - 1))


ROW = LossRow(surrogate=surrogate, clip=(0.6, 1.5))
