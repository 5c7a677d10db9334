"""The part of AdamW's step that is this gradient's own, and what a group gains by a step."""

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
    """Return the part of an AdamW step (Loshchilov and Hutter, 2019) that its own (clipped) gradient gives, ``[P]``.

    The rest of the step comes from the gradients of earlier steps, through the first moment, and from weight decay.

    Args:
        first_before: First moment before the step (zeros before the first step), ``[P]``.
        first: First moment after the step, ``[P]``.
        second: Second moment after the step, ``[P]``.
        step: Step of the optimizer, from 1.
        learning_rate: Learning rate of this step.
        betas: Decay of the two moments.
        eps: Added to the root of the second moment.
    """
    rate = learning_rate / (1 - betas[0] ** step)
    root = (second / (1 - betas[1] ** step)).sqrt() + eps
    return -rate * (first - betas[0] * first_before) / root


def gain_weights(rewards: Tensor, counted: Tensor, lengths: Tensor) -> Tensor:
    """What a group's gain weighs each token's log-prob by: (r - mean r) / tokens of the group.

    The gain is how far better responses' tokens rose over worse ones', in nats a token times reward. Rewards and
    lengths are ``[G]``; the result is ``[G]``, the same for all tokens of a response and 0 where it does not count.
    """
    centred = torch.where(counted, rewards - rewards[counted].mean(), 0.0) if counted.any() else 0 * rewards
    return centred / lengths[counted].sum().clamp(min=1)


def dot(one: Tensor, other: Tensor) -> float:
    """Inner product of two vectors in float64, a part at a time: whole copies of a model's gradient take gigabytes."""
    parts = zip(one.split(1 << 24), other.split(1 << 24), strict=True)
    return float(sum(float(a.double() @ b.double()) for a, b in parts))


def cosine(one: Tensor, other: Tensor) -> float | None:
    """Of the angle between two vectors; None where one has no length."""
    norms = math.sqrt(dot(one, one) * dot(other, other))
    return dot(one, other) / norms if norms else None
