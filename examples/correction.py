"""A sampler correction of one's own: one truncated weight a response, the geometric mean of its tokens'.

    magicrl train tiny --set algorithm.correction=examples/correction.py:of_responses

It is given the tokens of a micro-batch, in which responses are whole, and gives what each token's policy term is
multiplied by. ``cap`` is ``algorithm.correction_cap``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from magicrl.algorithms.losses import CorrectionInputs, needs


@needs("old_logprobs")  # the learner's log-probs from before the step's first update
def of_responses(c: CorrectionInputs) -> Tensor:
    """min(cap, exp(mean of log pi_old - log pi_sampler over the response's loss tokens))."""
    gaps = c.old_logprobs - c.sampler_logprobs  # 0 at tokens without loss
    zeros = torch.zeros_like(gaps)
    totals = zeros.index_add(0, c.sample_index, gaps)
    lengths = zeros.index_add(0, c.sample_index, c.loss_mask.to(gaps.dtype))
    return (totals / lengths.clamp(min=1)).exp().clamp(max=c.cap)[c.sample_index]
