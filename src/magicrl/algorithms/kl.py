"""The KL estimator of the loss and of the monitor."""

from __future__ import annotations

from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Above this the reference is e^20 times likelier than the policy that sampled the token: not a
measurement but a broken batch. The exponential is held there so that it cannot overflow."""


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Per-token k3 = r - log r - 1 with r = pi_ref / pi_theta, in nats (section 2).

    Its mean over tokens drawn from pi_theta is KL(pi_theta || pi_ref); it is never negative. Computed as
    expm1(d) - d, which keeps its digits when the two policies nearly agree.

    Args:
        logprobs: ``[tokens]`` of the policy in training; gradients flow through these.
        ref_logprobs: ``[tokens]`` of the frozen reference.
    """
    log_r = (ref_logprobs - logprobs).clamp(max=MAX_LOG_RATIO)
    return log_r.expm1() - log_r
