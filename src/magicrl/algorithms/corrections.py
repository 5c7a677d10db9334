"""Weights that correct for the sampler: the engine's distribution is not exactly the learner's."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

Correction: TypeAlias = Literal["none", "tis", "mis"]


def correction_weights(old_logprobs: Tensor, sampler_logprobs: Tensor, kind: Correction, cap: float) -> Tensor:
    """Token-level importance weights pi_old / pi_sampler, without gradient.

    ``tis`` truncates the weight at ``cap``; ``mis`` masks (sets to 0) the tokens whose weight exceeds it;
    ``none`` is 1 everywhere. They multiply the policy term only, and they also apply in synchronous mode,
    where kernels and precision still differ between engine and learner.

    Args:
        old_logprobs: ``[tokens]`` the learner's, before the step's first update.
        sampler_logprobs: ``[tokens]`` what the engine reported.
        cap: largest weight, > 1.

    Raises:
        ValueError: unknown kind, or a cap of 1 or less.
    """
    if kind == "none":
        return torch.ones_like(old_logprobs.detach())
    if cap <= 1:
        raise ValueError(f"correction cap must be above 1, got {cap}")
    weights = (old_logprobs.detach() - sampler_logprobs).exp()
    if kind == "tis":
        return weights.clamp(max=cap)
    if kind == "mis":
        return torch.where(weights > cap, torch.zeros_like(weights), weights)
    raise ValueError(f"correction must be none, tis or mis, got {kind!r}")
