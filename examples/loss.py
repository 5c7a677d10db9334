"""A custom loss: PPO's clip with advantages that are normalised over the whole mini-batch.

    magicrl train tiny --set algorithm.loss=examples/loss.py:ROW

A row has a surrogate, which is maximised at each token, and names the inputs that it needs. ``statistics`` is called
once with the whole mini-batch, before it is split into micro-batches and ranks; all of them get the same result.
"""

from __future__ import annotations

import numpy as np
import torch

from magicrl.algorithms.losses import LossInputs, LossRow, Surrogate, global_tokens
from magicrl.records import TrainBatch


def mean_and_deviation(batch: TrainBatch) -> dict[str, float]:
    """Return mean and standard deviation of the advantages of all loss tokens."""
    advantages = np.array([sample.advantage for sample in batch.samples])
    lengths = np.array([sample.num_loss_tokens for sample in batch.samples])
    mean = float(np.average(advantages, weights=lengths))
    return {"mean": mean, "deviation": float(np.sqrt(np.average((advantages - mean) ** 2, weights=lengths)))}


def surrogate(s: LossInputs) -> Surrogate:
    """Return min(rho A', clip(rho) A') for the normalised advantage A', and which tokens were clipped."""
    advantages = (s.advantages - s.statistics["mean"]) / (s.statistics["deviation"] + 1e-6)
    bounded = s.ratio.clamp(1 - s.clip_low, 1 + s.clip_high)
    values = torch.minimum(s.ratio * advantages, bounded * advantages)
    return Surrogate(values, clipped=values != s.ratio * advantages)


ROW = LossRow(
    surrogate=surrogate,
    reducer=global_tokens,
    clip=(0.2, 0.28),
    statistics=mean_and_deviation,
)
