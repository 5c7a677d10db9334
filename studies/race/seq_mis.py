"""Masked importance sampling of whole responses: one weight per response, 0 above the cap.

    magicrl train tiny --set algorithm.correction=studies/race/seq_mis.py:of_responses --set algorithm.correction_cap=3

The weight is the product of pi_old / pi_sampler over the response's tokens (TRL 1.16, ``sequence_mask``, whose cap is
3; Liu et al. 2025, "When speed kills stability"). The built-in ``mis`` masks tokens one by one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from magicrl.algorithms.losses import MAX_LOG_RATIO, CorrectionInputs, needs


@needs("old_logprobs")
def of_responses(c: CorrectionInputs) -> Tensor:
    """Return the product of pi_old / pi_sampler over the token's response, 0 if it is above ``cap``, ``[tokens]``."""
    assert c.sample_index is not None
    gaps = c.old_logprobs - c.sampler_logprobs  # 0 at tokens without loss
    totals = torch.zeros_like(gaps).index_add(0, c.sample_index, gaps)[c.sample_index]
    weights = totals.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return weights.masked_fill(weights > c.cap, 0.0)
