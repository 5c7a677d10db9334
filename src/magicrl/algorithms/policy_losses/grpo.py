"""GRPO (Shao et al. 2024): the clipped ratio, averaged over each response first."""

from __future__ import annotations

from magicrl.algorithms.surrogates import LossRow, clipped_ratio

ROW = LossRow(surrogate=clipped_ratio, reducer="response_mean", clip=(0.2, 0.2))
