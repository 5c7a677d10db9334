"""MAGIC (Eq. 3.1 of the report): the clipped ratio, averaged over all tokens of the mini-batch."""

from __future__ import annotations

from magicrl.algorithms.surrogates import LossRow, clipped_ratio

ROW = LossRow(surrogate=clipped_ratio, reducer="global_tokens", clip=(0.2, 0.2))
