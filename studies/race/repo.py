"""Advantages rescaled by the token's log-prob (REPO-R, Petrenko et al. 2026, arXiv 2603.11682).

    magicrl train tiny --set algorithm.loss=studies/race/repo.py:ROW --set entropy.controller=studies/race/repo.py:make

A (1 - zeta log pi) where A > 0: a rare right token counts for more. A (1 + zeta log pi) where A < 0, at most 0: a rare
wrong token counts for less. zeta doubles while entropy is below its target and halves above it. The target is the run's
first entropy, or ``entropy.target``. zeta starts at ``entropy.step`` (0.01) and stays in [0.001, ``entropy.maximum``
(1)]; these values are ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from magicrl.algorithms.entropy import ControllerSettings
from magicrl.algorithms.losses import LossRow, Surrogate, SurrogateInputs, clipped_ratio

SMALLEST = 0.001


@dataclass
class Doubling:
    """Controller of ``zeta``; the entropy bonus is always 0."""

    target: float | None
    zeta: float
    largest: float

    def coefficient(self, entropy: float) -> float:
        return 0.0

    def coefficients(self, entropy: float) -> dict[str, float]:
        return {"zeta": self.zeta}

    def observe(self, entropy: float) -> None:
        if self.target is None:
            self.target = entropy
        elif entropy != self.target:
            factor = 2.0 if entropy < self.target else 0.5
            self.zeta = min(max(self.zeta * factor, SMALLEST), self.largest)

    def state(self) -> dict[str, float | None]:
        return {"zeta": self.zeta, "target": self.target}

    def restore(self, state: Mapping[str, float | None]) -> None:
        self.zeta, self.target = state["zeta"] or SMALLEST, state["target"]


def make(s: ControllerSettings) -> Doubling:
    """Make it from ``entropy.target``, ``step`` as the first zeta and ``maximum`` as the largest one."""
    return Doubling(s.target, 0.01 if s.step is None else s.step, 1.0 if s.maximum is None else s.maximum)


def rescaled(advantages: Tensor, logprobs: Tensor, zeta: float) -> Tensor:
    """Return the rescaled advantages with unchanged signs, ``[tokens]``.

    Example: with zeta 0.1 and log pi = -2, 1 becomes 1.2 and -1 becomes -0.8.
    """
    factor = 1 - torch.sign(advantages) * zeta * logprobs
    return advantages * factor.clamp(min=0)


def surrogate(s: SurrogateInputs) -> Surrogate:
    """Compute PPO's clip on the rescaled advantages."""
    return clipped_ratio(s._replace(advantages=rescaled(s.advantages, s.logprobs.detach(), s.coefficients["zeta"])))


ROW = LossRow(surrogate=surrogate, clip=(0.2, 0.2))
