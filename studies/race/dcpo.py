"""Clip bounds that depend on the token's old probability q (dynamic clip of DCPO, Yang et al. 2025, arXiv 2509.02333).

    magicrl train tiny --set algorithm.loss=studies/race/dcpo.py:ROW

rho q stays within about eps of q, so that a rare token may gain much and a frequent one little. ``clip_low`` and
``clip_high`` are the paper's two eps. Its smoothed advantages and its mean over responses are not part of this row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from magicrl.algorithms.losses import LossRow, Surrogate, SurrogateInputs

R_MAX = 10.0
"""Largest upper bound, as in the released code."""


def bounds(q: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """Return 0.5 + 0.5 sqrt(max(1 - 4 eps_low / q, 0)) and 0.5 + 0.5 sqrt(1 + 4 eps_high / q), at most ``R_MAX``.

    Example: q = 0.01 with eps_high = 0.2 may become 5 times as likely, and with eps_low = 0.16 half as likely.
    """
    low = 0.5 + 0.5 * (1 - 4 * clip_low / q).clamp(min=0).sqrt()
    high = 0.5 + 0.5 * (1 + 4 * clip_high / q).sqrt()
    return low, high.clamp(max=R_MAX)


def surrogate(s: SurrogateInputs) -> Surrogate:
    """Compute min(rho A, clip(rho) A); ``clipped`` are the tokens whose gradient becomes zero."""
    low, high = bounds(s.old_logprobs.exp().clamp(min=torch.finfo(s.ratio.dtype).tiny), s.clip_low, s.clip_high)
    values = torch.minimum(s.ratio * s.advantages, s.ratio.clamp(low, high) * s.advantages)
    clipped = ((s.advantages < 0) & (s.ratio < low)) | ((s.advantages > 0) & (s.ratio > high))
    return Surrogate(values, clipped)


ROW = LossRow(surrogate=surrogate, clip=(0.16, 0.2))
