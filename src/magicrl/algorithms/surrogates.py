"""What tells one policy loss from another: a per-token surrogate, a reducer, a ratio level.

The losses that a recipe can name are the files of ``policy_losses``, each with a ``LossRow`` of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from magicrl.algorithms.reducers import Reducer


class Surrogate(NamedTuple):
    """Per-token objective (to be maximised) and where the clip acted, both ``[tokens]``."""

    values: Tensor
    clipped: Tensor


class SurrogateInputs(NamedTuple):
    """What a surrogate may read: ``[tokens]`` tensors and the clip pair."""

    ratio: Tensor
    logprobs: Tensor
    advantages: Tensor
    clip_low: float
    clip_high: float


def nothing_clipped(s: SurrogateInputs) -> Tensor:
    """All False, ``[tokens]``."""
    return torch.zeros_like(s.ratio, dtype=torch.bool)


def clipped_ratio(s: SurrogateInputs) -> Surrogate:
    """min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A); clipped = the tokens whose gradient that zeroes."""
    bounded = s.ratio.clamp(1 - s.clip_low, 1 + s.clip_high)
    values = torch.minimum(s.ratio * s.advantages, bounded * s.advantages)
    too_high = (s.advantages > 0) & (s.ratio > 1 + s.clip_high)
    too_low = (s.advantages < 0) & (s.ratio < 1 - s.clip_low)
    return Surrogate(values, too_high | too_low)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossRow:
    """One method.

    Attributes:
        surrogate: the per-token objective.
        reducer: how tokens weigh, see ``response_weights``.
        ratio_level: ``token``, or ``sequence`` for the geometric mean of a response's ratios.
        clip: the method's usual (eps_low, eps_high); None where nothing is clipped. A recipe states its own.
        normalise_std: whether its advantages are divided by the group's standard deviation.
    """

    surrogate: Callable[[SurrogateInputs], Surrogate]
    reducer: Reducer
    ratio_level: Literal["token", "sequence"] = "token"
    clip: tuple[float, float] | None = None
    normalise_std: bool = True
