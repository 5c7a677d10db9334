"""PPO (Schulman et al. 2017): the clipped ratio, summed over each response."""

from __future__ import annotations

from magicrl.algorithms.surrogates import LossRow, clipped_ratio

ROW = LossRow(surrogate=clipped_ratio, reducer="sequence_sum", clip=(0.2, 0.2))
