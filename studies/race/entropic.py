"""Proportional-integral control of the entropy by likely tokens (EntroPIC, Yang et al. 2025, arXiv 2511.15248).

    magicrl train tiny --set algorithm.loss=studies/race/entropic.py:ROW --set entropy.target=0.2 \\
        --set entropy.controller=studies/race/entropic.py:make

control = clip(K_p e + K_i sum e, -1, 1) with e = H - target. Tokens that are likely under the policy weigh 1 +
control where A > 0 and 1 - control where A < 0: too much entropy, and the likely right ones count for more. No
gradient of the entropy is needed. K_p = 1 is the released code's, as is K_i = 0.01 (``entropy.step``); the paper's
weights are per token and the code's a mean over the likely ones. The controller moves once a training step. The
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
    """``control`` of the entropy; the bonus is always 0."""

    target: float
    k_p: float
    k_i: float
    total: float = 0.0  # of the errors of the steps before

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
    """``entropy.target`` (default 0.2), ``step`` as K_i."""
    return ProportionalIntegral(0.2 if s.target is None else s.target, k_p=1.0, k_i=0.01 if s.step is None else s.step)


def surrogate(s: SurrogateInputs, *, threshold: float) -> Surrogate:
    """PPO's clip, and control * rho |A| where pi > ``threshold``."""
    usual = clipped_ratio(s)
    likely = s.logprobs.detach() > torch.tensor(threshold, dtype=s.ratio.dtype).log()
    added = s.coefficients["control"] * s.ratio * s.advantages.abs()
    return Surrogate(usual.values + torch.where(likely & s.loss_mask, added, 0.0), usual.clipped)


ROW = LossRow(surrogate=partial(surrogate, threshold=0.95), clip=(0.2, 0.2))
