"""A reducer of one's own: a response weighs as the square root of its length, between GRPO and DAPO.

    magicrl train tiny --set algorithm.reducer=examples/reducer.py:square_root

It is given all responses of a mini-batch, on all workers, and gives what each of their tokens weighs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from magicrl.algorithms.losses import ReducerInputs


def square_root(r: ReducerInputs) -> Tensor:
    """Token weights 1/sqrt(length), scaled so that those of the mini-batch's tokens sum to 1."""
    weights = torch.where(r.lengths_N > 0, r.lengths_N.clamp(min=1).rsqrt(), 0.0)
    return weights / (weights * r.lengths_N).sum()
