"""Responses rejected by their advantage's sign to hold entropy in a band (Entrocraft, Li et al. 2026, 2604.26326).

    magicrl train tiny --set algorithm.loss=studies/race/entrocraft.py:ROW \\
        --set entropy.controller=studies/race/entrocraft.py:make --set entropy.target=0.2

Above target + D responses with A < 0 are left out of the policy term, below target - D those with A > 0: what is
learned of right answers lowers the entropy, what is learned of wrong ones raises it. D is ``entropy.step`` (0.05: the
released band is 0.1 wide; there it also falls by 0.2 over the run, here it stands). Rejected responses stay in T_k.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from magicrl.algorithms.entropy import ControllerSettings
from magicrl.algorithms.losses import LossRow, Surrogate, SurrogateInputs, clipped_ratio


@dataclass
class Band:
    """``sign``: +1 keeps responses with A > 0 alone, -1 those with A < 0 alone, 0 all."""

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
    """``entropy.target`` (default 0.2), ``step`` as half the width."""
    return Band(0.2 if s.target is None else s.target, 0.05 if s.step is None else s.step)


def surrogate(s: SurrogateInputs) -> Surrogate:
    """PPO's clip on the advantages that are kept."""
    rejected = s.advantages * s.coefficients["sign"] < 0
    return clipped_ratio(s._replace(advantages=s.advantages.masked_fill(rejected, 0.0)))


ROW = LossRow(surrogate=surrogate, clip=(0.2, 0.2))
