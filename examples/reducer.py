"""A custom reducer: the weight of a response grows with the square root of its length, between GRPO and DAPO.

    magicrl train tiny --set algorithm.reducer=examples/reducer.py:square_root

The function receives all responses of a mini-batch, on all workers, and returns the weight of their tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from magicrl.algorithms.losses import ReducerInputs


def square_root(r: ReducerInputs) -> Tensor:
    """Return token weights 1/sqrt(length), scaled so that the weights of all tokens of the mini-batch sum to 1."""
    weights = torch.where(r.lengths_N > 0, r.lengths_N.clamp(min=1).rsqrt(), 0.0)
    return weights / (weights * r.lengths_N).sum()
