"""Corrections for the sampler: the policy that sampled a token is not exactly the one that learns from it.

Two engines compute in two ways, and in asynchronous training the sampler's weights are older. The loss is decoupled:
rho compares the policy in training with the *proximal* policy, the learner just before its update, and these weights
compare the proximal with the *behaviour* policy that sampled, token by token (Hilton et al. 2021, arXiv 2110.00641;
AReaL, arXiv 2505.24298).
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

Correction: TypeAlias = Literal["none", "tis", "mis", "m2po"]

MAX_LOG_WEIGHT = 20.0
"""log weights are held within +-20, as ratios are: exp must not overflow."""


def correction_weights(
    old_logprobs: Tensor, sampler_logprobs: Tensor, kind: Correction, cap: float, policy_mask: Tensor | None = None
) -> Tensor:
    """Token-level importance weights pi_old / pi_sampler, without gradient.

    ``tis`` truncates the weight at ``cap``; ``mis`` masks (sets to 0) the tokens whose weight exceeds it; ``m2po``
    takes the weights as they are and masks the tokens that `second_moment_mask` left out; ``none`` is 1 everywhere.
    They multiply the policy term only, and they also apply in synchronous mode, where kernels and precision still
    differ between engine and learner.

    Args:
        old_logprobs: ``[tokens]`` the learner's, before the step's first update.
        sampler_logprobs: ``[tokens]`` what the engine reported.
        kind: the correction.
        cap: largest weight, > 1, of ``tis`` and ``mis``.
        policy_mask: ``[tokens]`` bool, False for tokens that are left out; ``m2po`` needs it, every kind obeys it.

    Raises:
        ValueError: unknown kind, a cap of 1 or less, or ``m2po`` without its mask.
    """
    weights = _weights(old_logprobs.detach(), sampler_logprobs, kind, cap, masked=policy_mask is not None)
    return weights if policy_mask is None else torch.where(policy_mask, weights, 0.0)


def _weights(old: Tensor, sampler: Tensor, kind: Correction, cap: float, *, masked: bool) -> Tensor:
    if kind == "none":
        return torch.ones_like(old)
    if kind in ("tis", "mis") and cap <= 1:
        raise ValueError(f"correction cap must be above 1, got {cap}")
    if kind == "tis":
        return (old - sampler).exp().clamp(max=cap)
    if kind == "mis":
        weights = (old - sampler).exp()
        return torch.where(weights > cap, torch.zeros_like(weights), weights)
    if kind == "m2po":
        if not masked:
            raise ValueError("correction 'm2po' needs the mini-batch's second-moment mask (policy_mask)")
        return (old - sampler).clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()
    raise ValueError(f"correction must be none, tis, mis or m2po, got {kind!r}")


def second_moment_mask(log_weights: Tensor, threshold: float) -> Tensor:
    """Which tokens M2PO keeps: the largest (log weight)^2 leave until the mean of the others is at most ``threshold``.

    As few as possible leave, and a whole mini-batch is looked at together: a clip at 1 +- eps would cut rare tokens,
    which are where stale data teaches most. Positive and negative log weights do not cancel in a square, as they
    would in an estimate of the KL (Zheng et al. 2025, arXiv 2510.01161).

    Args:
        log_weights: ``[tokens]`` log pi_old - log pi_sampler of every token of a mini-batch, in any order.
        threshold: tau_M2, > 0; the paper's value is 0.04.

    Returns:
        ``[tokens]`` bool. Of equal squares the later ones in the order given leave first.

    Example: squares 0.01, 0.09, 0.01 have the mean 0.0367 and all stay at 0.04; with 0.25 for 0.09 (mean 0.09) that
    token leaves.

    Raises:
        ValueError: the threshold is not positive.
    """
    if threshold <= 0:
        raise ValueError(f"the second moment's threshold must be positive, got {threshold}")
    squares = log_weights.detach().to(torch.float64).square()
    rising, order = squares.sort(stable=True)
    means = rising.cumsum(0) / torch.arange(1, len(rising) + 1, device=rising.device, dtype=torch.float64)
    kept = torch.zeros(len(squares), dtype=torch.bool, device=squares.device)
    # means of a rising sequence rise: those at or below the threshold are a prefix. NaN compares false and leaves.
    kept[order[means <= threshold]] = True
    return kept
