"""Reject responses by the sign of their advantage to keep entropy in a band (Entrocraft, Li et al. 2026, 2604.26326).

    magicrl train tiny --set algorithm.loss=studies/race/entrocraft.py:ROW \\
        --set entropy.controller=studies/race/entrocraft.py:make --set entropy.target=0.2

Above target + D, responses with A < 0 are left out of the policy term; below target - D, those with A > 0. Learning
from right answers lowers the entropy, learning from wrong ones raises it. D is ``entropy.step`` (0.05: the released
band is 0.1 wide; in the released code it also falls by 0.2 over the run, here it is constant). Rejected responses still
count in T_k.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from magicrl.algorithms.entropy import ControllerSettings
from magicrl.algorithms.losses import LossRow, Surrogate, SurrogateInputs, clipped_ratio


@dataclass
class Band:
    """Band of entropy. ``sign``: +1 keeps only responses with A > 0, -1 only those with A < 0, 0 all."""

    target: float
    half: float

    def coefficient(self, entropy: float) -> float:
        return 0.0

    def coefficients(self, entropy: float) -> dict[str, float]:
        return {"sign": float((entropy > self.target + self.half) - (entropy < self.target - self.half))}

    def observe(self, entropy: float) -> None:
        return None

    def state(self) -> dict[str, float | None]:
        return {}

    def restore(self, state: Mapping[str, float | None]) -> None:
        return None


def make(s: ControllerSettings) -> Band:
    """Make it from ``entropy.target`` (default 0.2) and ``step``, half the width of the band."""
    return Band(0.2 if s.target is None else s.target, 0.05 if s.step is None else s.step)


def surrogate(s: SurrogateInputs) -> Surrogate:
    """Compute PPO's clip on the remaining advantages."""
    rejected = s.advantages * s.coefficients["sign"] < 0
    return clipped_ratio(s._replace(advantages=s.advantages.masked_fill(rejected, 0.0)))


ROW = LossRow(surrogate=surrogate, clip=(0.2, 0.2))
