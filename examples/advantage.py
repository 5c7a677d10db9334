"""An advantage of one's own: each response against the mean of the others of its group (leave-one-out, RLOO).

    magicrl train tiny --set algorithm.advantage=examples/advantage.py:leave_one_out

It is given the responses of all surviving groups of a step and gives one number a response.
"""

from __future__ import annotations

import torch
from torch import Tensor

from magicrl.algorithms.advantages import AdvantageInputs


def leave_one_out(a: AdvantageInputs) -> Tensor:
    """r_i minus the mean reward of the other judged members; 0 for what was not judged."""
    counted = a.counted_N.to(torch.float64)
    rewards = a.rewards_N.to(torch.float64) * counted
    zeros = torch.zeros(int(a.group_index_N.max()) + 1, dtype=torch.float64)
    totals = zeros.index_add(0, a.group_index_N, rewards)[a.group_index_N]
    others = zeros.index_add(0, a.group_index_N, counted)[a.group_index_N] - 1
    return torch.where(a.counted_N, rewards - (totals - rewards) / others.clamp(min=1), 0.0)
