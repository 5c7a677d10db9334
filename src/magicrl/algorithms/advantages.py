"""Group-relative advantages (Eq. 2.5) and the masks for truncated responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from magicrl.records import ScoredGroup

AdvantageMask: TypeAlias = Literal["none", "before", "after"]

STD_EPSILON = 1e-6
"""Added to the standard deviation, as the released code does."""


def group_advantages(
    rewards_N: Tensor,
    group_index_N: Tensor,
    *,
    counted_N: Tensor | None = None,
    truncated_N: Tensor | None = None,
    mask: AdvantageMask = "none",
    normalise_std: bool = True,
    eps: float = STD_EPSILON,
) -> Tensor:
    """A = (r - mean) / (std + eps) within each group; the same for every token of a response.

    The standard deviation is the unbiased one. What ``mask`` does to truncated responses (section 2):

    * ``none``: nothing, they are members with reward 0;
    * ``before``: mean and std over the others only, truncated ones get 0;
    * ``after``: mean and std over all, then truncated ones get 0.

    A group with one member or none left, or with equal rewards, has advantages of exactly 0, never NaN.

    Args:
        rewards_N: rewards.
        group_index_N: group of each response; any integers, in any order. A group is a draw, not a prompt.
        counted_N: bool; responses that were not judged are False and get 0. Default: all counted.
        truncated_N: bool; needed by ``before`` and ``after``.
        normalise_std: False leaves out the division (Dr.GRPO).

    Returns:
        ``[N]`` float64.

    Raises:
        ValueError: unknown mask, or a mask without ``truncated_N``.

    Example: rewards 1, 0, 0, 1 have mean 0.5 and unbiased std 0.577, so A is about +-0.866.
    """
    if mask not in ("none", "before", "after"):
        raise ValueError(f"advantage mask must be none, before or after, got {mask!r}")
    if mask != "none" and truncated_N is None:
        raise ValueError(f"advantage mask {mask!r} needs to know which responses were truncated")
    rewards = rewards_N.to(torch.float64)
    counted = torch.ones_like(rewards, dtype=torch.bool) if counted_N is None else counted_N.bool()
    truncated = torch.zeros_like(counted) if truncated_N is None else truncated_N.bool()
    members = counted & ~truncated if mask == "before" else counted

    groups, index = torch.unique(group_index_N, return_inverse=True)
    weight = members.to(torch.float64)
    zeros = torch.zeros(len(groups), dtype=torch.float64, device=rewards.device)
    count = zeros.index_add(0, index, weight)
    mean = zeros.index_add(0, index, weight * rewards) / count.clamp(min=1)
    centred = rewards - mean[index]
    variance = zeros.index_add(0, index, weight * centred**2) / (count - 1).clamp(min=1)

    # Equal rewards are recognised as such, not by a float that should have come out as 0.
    infinite = torch.full_like(zeros, torch.inf)
    low = infinite.scatter_reduce(0, index, torch.where(members, rewards, torch.inf), "amin")
    high = (-infinite).scatter_reduce(0, index, torch.where(members, rewards, -torch.inf), "amax")
    informative = (count >= 2) & (high > low)

    scale = (variance.sqrt() + eps)[index] if normalise_std else torch.ones_like(centred)
    kept = members & informative[index]
    if mask == "after":
        kept = kept & ~truncated
    return torch.where(kept, centred / scale, torch.zeros_like(centred))


def scored_advantages(
    groups: Sequence[ScoredGroup], *, mask: AdvantageMask = "none", normalise_std: bool = True
) -> list[NDArray[np.float64]]:
    """``group_advantages`` of records: one ``[G]`` float64 array a group, in the order given."""
    if not groups:
        return []
    sizes = [len(group.rewards) for group in groups]
    advantages = group_advantages(
        torch.from_numpy(np.concatenate([group.rewards for group in groups])),
        torch.repeat_interleave(torch.arange(len(groups)), torch.tensor(sizes)),
        counted_N=torch.from_numpy(np.concatenate([group.counted for group in groups])),
        truncated_N=torch.from_numpy(np.concatenate([group.truncated for group in groups])),
        mask=mask,
        normalise_std=normalise_std,
    )
    return [part.numpy() for part in torch.split(advantages, sizes)]
