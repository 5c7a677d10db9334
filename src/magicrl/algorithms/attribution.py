"""Attribution of an AdamW step to the current gradient, and the gain of a group from a step."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def own_step(
    first_before: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    step: int,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
) -> Tensor:
    """Return the part of an AdamW step (Loshchilov and Hutter, 2019) that comes from its own (clipped) gradient,
    ``[P]``.

    The rest of the step comes from weight decay and, through the first moment, from the gradients of earlier steps.

    Args:
        first_before: First moment before the step (zeros before the first step), ``[P]``.
        first: First moment after the step, ``[P]``.
        second: Second moment after the step, ``[P]``.
        step: Step of the optimizer, from 1.
        learning_rate: Learning rate of this step.
        betas: Decay rates of the two moments.
        eps: Term added to the root of the second moment.
    """
    rate = learning_rate / (1 - betas[0] ** step)
    root = (second / (1 - betas[1] ** step)).sqrt() + eps
    return -rate * (first - betas[0] * first_before) / root


def gain_weights(rewards: Tensor, counted: Tensor, lengths: Tensor) -> Tensor:
    """Return the weight of each token's log-prob in its group's gain: (r - mean r) / tokens of the group.

    The gain says how far the tokens of better responses rose relative to those of worse ones, in nats per token times
    reward. Rewards and lengths are ``[G]``. The result is ``[G]``: one weight for all tokens of a response, and 0 for a
    response that is not counted.
    """
    centred = torch.where(counted, rewards - rewards[counted].mean(), 0.0) if counted.any() else 0 * rewards
    return centred / lengths[counted].sum().clamp(min=1)


def dot(one: Tensor, other: Tensor) -> float:
    """Return the inner product of two vectors in float64. It works in parts, because a float64 copy of a whole gradient
    takes gigabytes.
    """
    parts = zip(one.split(1 << 24), other.split(1 << 24), strict=True)
    return float(sum(float(a.double() @ b.double()) for a, b in parts))


def cosine(one: Tensor, other: Tensor) -> float | None:
    """Return the cosine of the angle between two vectors, None if one of them is zero."""
    norms = math.sqrt(dot(one, one) * dot(other, other))
    return dot(one, other) / norms if norms else None
