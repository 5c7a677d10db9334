"""A custom correction for the gap between sampler and learner: one truncated importance weight per response.

    magicrl train tiny --set algorithm.correction=examples/correction.py:of_responses

The function receives the tokens of a micro-batch (responses are never split) and returns the factor of each token's
policy term. ``cap`` is ``algorithm.correction_cap``.
"""

from __future__ import annotations

from torch import Tensor

from magicrl.algorithms.losses import LossInputs, mean_of_response


def of_responses(c: LossInputs) -> Tensor:
    """Return min(cap, exp(mean of log pi_old - log pi_sampler over the loss tokens of the response))."""
    gaps = c.old_logprobs - c.sampler_logprobs  # 0 at tokens without loss
    return mean_of_response(gaps, c.loss_mask, c.sample_index).exp().clamp(max=c.cap)
