"""Dr. GRPO (Liu et al. 2025): a constant denominator, and advantages that are not divided by the deviation."""

from __future__ import annotations

from magicrl.algorithms.surrogates import LossRow, clipped_ratio

ROW = LossRow(surrogate=clipped_ratio, reducer="constant", clip=(0.2, 0.2), normalise_std=False)
