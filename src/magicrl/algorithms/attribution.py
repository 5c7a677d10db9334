"""Where an update came from: AdamW's step by origin, and what each token's share of the gradient did.

A mini-batch's loss depends on the weights through the log-prob and the entropy of each of its tokens alone. With a and
b its derivatives by those two, g_t = a_t grad(logp_t) + b_t grad(H_t) is token t's share of the gradient g = sum_t g_t,
whatever the loss. Its inner product with any direction v needs no gradient of a single token: it is a_t and b_t times
the derivatives of logp_t and H_t along v.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class StepParts(NamedTuple):
    """One AdamW step as a sum, ``[P]`` each.

    Attributes:
        own: by this mini-batch's (clipped) gradient; minus ``scale`` times it.
        momentum: by the gradients of former steps, through the first moment.
        decay: by weight decay.
        scale: what AdamW multiplies a gradient by; its second moment is that after this gradient.
    """

    own: Tensor
    momentum: Tensor
    decay: Tensor
    scale: Tensor

    @property
    def whole(self) -> Tensor:
        """The step itself."""
        return self.own + self.momentum + self.decay


def adamw_parts(
    weight: Tensor,
    first_before: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    step: int,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> StepParts:
    """What made up an AdamW step (Loshchilov and Hutter, 2019), from its moments before and after; ``[P]`` each.

    Args:
        weight: before the step.
        first_before: first moment before it (zeros before the first step).
        first: first moment after it.
        second: second moment after it.
        step: of the optimizer, from 1.
        learning_rate: of this step.
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled.
    """
    rate = learning_rate / (1 - betas[0] ** step)
    root = (second / (1 - betas[1] ** step)).sqrt() + eps
    return StepParts(
        own=-rate * (first - betas[0] * first_before) / root,
        momentum=-rate * betas[0] * first_before / root,
        decay=-learning_rate * weight_decay * weight,
        scale=rate * (1 - betas[0]) / root,
    )


def token_shares(by_logprob: Tensor, by_entropy: Tensor, logprob_along: Tensor, entropy_along: Tensor) -> Tensor:
    """<g_t, v> of each token: the loss's derivatives by its log-prob and entropy times theirs along v; ``[T]`` each."""
    return by_logprob * logprob_along + by_entropy * entropy_along


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
