"""Proportional-integral control of the entropy through likely tokens (EntroPIC, Yang et al. 2025, arXiv 2511.15248).

    magicrl train tiny --set algorithm.loss=studies/race/entropic.py:ROW --set entropy.target=0.2 \\
        --set entropy.controller=studies/race/entropic.py:make

control = clip(K_p e + K_i sum e, -1, 1) with e = H - target. Tokens that are likely under the policy have the weight
1 + control where A > 0 and 1 - control where A < 0. With too much entropy, the likely right ones count for more. No
gradient of the entropy is needed. K_p = 1 and K_i = 0.01 (``entropy.step``) are those of the released code. The paper's
weights are per token, the code's are a mean over the likely ones. The controller changes once per training step. The
threshold, 0.95, is ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch

from magicrl.algorithms.entropy import ControllerSettings
from magicrl.algorithms.losses import LossRow, Surrogate, SurrogateInputs, clipped_ratio


@dataclass
class ProportionalIntegral:
    """Controller of ``control``; the entropy bonus is always 0."""

    target: float
    k_p: float
    k_i: float
    total: float = 0.0  # sum of the errors of earlier steps

    def coefficient(self, entropy: float) -> float:
        return 0.0

    def coefficients(self, entropy: float) -> dict[str, float]:
        error = entropy - self.target
        return {"control": min(max(self.k_p * error + self.k_i * self.total, -1.0), 1.0)}

    def observe(self, entropy: float) -> None:
        self.total += entropy - self.target

    def state(self) -> dict[str, float | None]:
        return {"total": self.total}

    def restore(self, state: Mapping[str, float | None]) -> None:
        self.total = state["total"] or 0.0


def make(s: ControllerSettings) -> ProportionalIntegral:
    """Make it from ``entropy.target`` (default 0.2) and ``step`` as K_i."""
    return ProportionalIntegral(0.2 if s.target is None else s.target, k_p=1.0, k_i=0.01 if s.step is None else s.step)


def surrogate(s: SurrogateInputs, *, threshold: float) -> Surrogate:
    """Compute PPO's clip plus control * rho |A| where pi > ``threshold``."""
    usual = clipped_ratio(s)
    likely = s.logprobs.detach() > torch.tensor(threshold, dtype=s.ratio.dtype).log()
    added = s.coefficients["control"] * s.ratio * s.advantages.abs()
    return Surrogate(usual.values + torch.where(likely & s.loss_mask, added, 0.0), usual.clipped)


ROW = LossRow(surrogate=partial(surrogate, threshold=0.95), clip=(0.2, 0.2))
