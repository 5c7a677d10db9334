"""KL3 trust region: one number bounds the ratio on both sides (ATR-GRPO, Wu et al. 2026, arXiv 2602.05494).

    magicrl train tiny --set algorithm.loss=studies/race/kl3.py:ROW --set algorithm.clip_low=0.2

A token is clipped if rho - 1 - log rho exceeds delta. This is an interval of rho whose ends are values of Lambert's W,
with the upper end further from 1. ``clip_low`` states delta by the lower end; ``clip_high`` is not read.
"""

from __future__ import annotations

import math

from scipy.special import lambertw

from magicrl.algorithms.losses import LossRow, Surrogate, SurrogateInputs, clipped_ratio


def upper_end(clip_low: float) -> float:
    """Return eps_high of the region whose lower end is 1 - ``clip_low``; 0 < clip_low < 1.

    Example: 0.2 gives 0.2308.
    """
    if not 0 < clip_low < 1:
        raise ValueError(f"algorithm.clip_low of the KL3 region must lie between 0 and 1, got {clip_low}")
    delta = -clip_low - math.log1p(-clip_low)
    # rho - log rho = 1 + delta, so -rho exp(-rho) = -exp(-1 - delta). Branch -1 has the solution above 1.
    return float(-lambertw(-math.exp(-1 - delta), -1).real) - 1


def surrogate(s: SurrogateInputs) -> Surrogate:
    """Compute min(rho A, clip(rho) A) with the ends of the region."""
    return clipped_ratio(s._replace(clip_high=upper_end(s.clip_low)))


ROW = LossRow(surrogate=surrogate, clip=(0.2, upper_end(0.2)))
