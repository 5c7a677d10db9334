"""Supervised baseline of the showcase: rejection-sampling SFT on the correct responses of each step's kept groups.

magicrl train family --set algorithm.advantage=studies/own_samples.py:correct_only
"""

from __future__ import annotations

import torch
from torch import Tensor

from magicrl.algorithms.advantages import AdvantageInputs


def correct_only(a: AdvantageInputs) -> Tensor:
    """Return weights that make the policy gradient the gradient of the mean token loss of the correct responses.

    On-policy the ratio is 1, so that its gradient is that of the log-probability. The loss divides by the tokens of all
    responses. The weight turns that into the tokens of the correct ones.
    """
    right_N = (a.rewards_N > 0) & a.counted_N
    tokens = a.lengths_N[a.counted_N].sum()
    return torch.where(right_N, tokens / a.lengths_N[right_N].sum().clamp(min=1), 0.0)
