"""Remove the gradient of a few tokens with high covariance of log-prob and advantage (Clip-Cov, Cui et al. 2025).

    magicrl train tiny --set algorithm.loss=studies/race/clip_cov.py:ROW

arXiv 2505.22617. It is the negative control of the race: its users found it unstable at many updates per rollout. From
the tokens with 1 < (log pi - mean)(A - mean) < 5 that PPO's clip does not change, a random 0.0002 of the micro-batch's
tokens (at least one) lose their gradient.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from magicrl.algorithms.losses import LossRow, Surrogate, SurrogateInputs, clipped_ratio

BOUNDS = (1.0, 5.0)


def covariances(s: SurrogateInputs) -> Tensor:
    """Return (log pi - mean)(A - mean) with means over the loss tokens, ``[tokens]``; 0 at the others."""
    weights = s.loss_mask.to(s.ratio.dtype)
    tokens = weights.sum().clamp(min=1)
    logprobs = s.logprobs.detach()
    means = (logprobs * weights).sum() / tokens, (s.advantages * weights).sum() / tokens
    return (logprobs - means[0]) * (s.advantages - means[1]) * weights


def surrogate(s: SurrogateInputs, *, ratio: float) -> Surrogate:
    """Compute PPO's clip, with 0 at the drawn tokens."""
    usual = clipped_ratio(s)
    found = covariances(s)
    (eligible,) = torch.where((found > BOUNDS[0]) & (found < BOUNDS[1]) & ~usual.clipped & s.loss_mask)
    drawn = max(1, int(ratio * int(s.loss_mask.sum())))
    # The seed is the number of tokens, so that a resumed run draws the same tokens.
    order = torch.randperm(len(eligible), generator=torch.Generator().manual_seed(len(s.ratio)))
    chosen = torch.zeros_like(usual.clipped)
    chosen[eligible[order[:drawn].to(eligible.device)]] = True
    return Surrogate(usual.values.masked_fill(chosen, 0.0), usual.clipped | chosen)


ROW = LossRow(surrogate=partial(surrogate, ratio=2e-4), clip=(0.2, 0.2))
MORE = LossRow(surrogate=partial(surrogate, ratio=2e-3), clip=(0.2, 0.2))
MOST = LossRow(surrogate=partial(surrogate, ratio=2e-2), clip=(0.2, 0.2))
