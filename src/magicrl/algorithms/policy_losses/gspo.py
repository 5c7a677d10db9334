"""GSPO (Zheng et al. 2025): the ratio is the response's, the geometric mean of its tokens'."""

from __future__ import annotations

from magicrl.algorithms.surrogates import LossRow, clipped_ratio

ROW = LossRow(surrogate=clipped_ratio, reducer="response_mean", ratio_level="sequence", clip=(3e-4, 4e-4))
