"""A clip that adapts until right answers have their share of the objective (BAPO, Xi et al. 2025, arXiv 2510.18927).

    magicrl train tiny --set algorithm.loss=studies/race/bapo.py:ROW

The bounds of rho start at 0.6 and 1.2. While tokens with A > 0 have less than ``share`` of sum |A clip(rho)|, the
upper bound rises by 0.05 up to 3.0, then the lower one by 0.02 up to 0.9. This is the paper's order; the released code
has the other one. As in that code, each micro-batch has a separate search. ``clip_low`` and ``clip_high`` are not read.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from magicrl.algorithms.losses import LossRow, Surrogate, SurrogateInputs, clipped_ratio

LOWER = (0.6, 0.9, 0.02)  # start, end, step
UPPER = (1.2, 3.0, 0.05)


def positive_share(ratio: Tensor, advantages: Tensor, lower: float, upper: float) -> float:
    """Return the share of sum |A clip(rho)| from tokens with A > 0; 1 without any other token.

    rho is bounded where the clip removes its gradient.
    """
    bounded = torch.where(advantages > 0, ratio.clamp(max=upper), ratio.clamp(min=lower))
    weights = (bounded * advantages).abs()
    total = float(weights.sum())
    return float(weights[advantages > 0].sum()) / total if total else 1.0


def search(ratio: Tensor, advantages: Tensor, share: float) -> tuple[float, float]:
    """Return the first bounds of rho (lower, upper) at which the share is reached, or else the last ones."""
    (lower, last_lower, low_step), (upper, last_upper, high_step) = LOWER, UPPER
    while positive_share(ratio, advantages, lower, upper) < share:
        if upper < last_upper:
            upper = min(round(upper + high_step, 10), last_upper)
        elif lower < last_lower:
            lower = min(round(lower + low_step, 10), last_lower)
        else:
            break
    return lower, upper


def surrogate(s: SurrogateInputs, *, share: float) -> Surrogate:
    """Compute PPO's clip with the bounds of the search."""
    lower, upper = search(s.ratio.detach(), s.advantages, share)
    return clipped_ratio(s._replace(clip_low=1 - lower, clip_high=upper - 1))


ROW = LossRow(surrogate=partial(surrogate, share=0.4))  # the paper's
HALF = LossRow(surrogate=partial(surrogate, share=0.5))
THIRD = LossRow(surrogate=partial(surrogate, share=0.3))
