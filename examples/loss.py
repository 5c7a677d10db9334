"""A loss of one's own: PPO's clip on advantages that are normalised over the whole mini-batch.

    magicrl train tiny --set algorithm.loss=examples/loss.py:ROW

A row has a surrogate (what to maximise at each token) and says what it needs. ``statistics`` sees the whole mini-batch
once, before it is cut into micro-batches or dealt to ranks; its result is the same for all of them.
"""

from __future__ import annotations

import numpy as np
import torch

from magicrl.algorithms.losses import LossRow, Surrogate, SurrogateInputs, global_tokens
from magicrl.records import TrainBatch


def mean_and_deviation(batch: TrainBatch) -> dict[str, float]:
    """Of the advantages of all loss tokens."""
    advantages = np.array([sample.advantage for sample in batch.samples])
    lengths = np.array([sample.num_loss_tokens for sample in batch.samples])
    mean = float(np.average(advantages, weights=lengths))
    return {"mean": mean, "deviation": float(np.sqrt(np.average((advantages - mean) ** 2, weights=lengths)))}


def surrogate(s: SurrogateInputs) -> Surrogate:
    """min(rho A', clip(rho) A') with A' the normalised advantage; marks the tokens whose gradient the clip takes."""
    advantages = (s.advantages - s.statistics["mean"]) / (s.statistics["deviation"] + 1e-6)
    bounded = s.ratio.clamp(1 - s.clip_low, 1 + s.clip_high)
    values = torch.minimum(s.ratio * advantages, bounded * advantages)
    return Surrogate(values, clipped=values != s.ratio * advantages)


ROW = LossRow(
    surrogate=surrogate,
    reducer=global_tokens,
    clip=(0.2, 0.28),
    needs=("old_logprobs",),  # for rho; further: "ref_logprobs", "entropy"
    statistics=mean_and_deviation,
)
