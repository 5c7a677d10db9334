"""Rejection sampling, refill, and the split of the survivors into mini-batches (recipe, section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypeAlias

import numpy as np

from magicrl.algorithms.advantages import AdvantageMask
from magicrl.records import ScoredGroup

MinibatchMode: TypeAlias = Literal["keep_n_sgd", "keep_d_t"]


class Signal(StrEnum):
    """What a group's rewards can teach. Only ``MIXED`` groups are kept."""

    MIXED = "mixed"
    ALL_CORRECT = "all_correct"
    ALL_WRONG = "all_wrong"
    TOO_FEW = "too_few"


def group_signal(group: ScoredGroup, mask: AdvantageMask = "none") -> Signal:
    """Whether a group has any non-zero advantage, and if not, why.

    Decided by max = min over the rewards that enter the group's mean, never by comparing float
    advantages. Under the mask ``before`` those are the rewards of the responses that were not truncated.
    """
    members = group.counted & ~group.truncated if mask == "before" else group.counted
    rewards = group.rewards[members]
    if len(rewards) < 2:
        return Signal.TOO_FEW
    low, high = float(rewards.min()), float(rewards.max())
    if high > low:
        return Signal.MIXED
    return Signal.ALL_CORRECT if low > 0 else Signal.ALL_WRONG


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejection:
    """Outcome of rejection sampling on one step's groups.

    Attributes:
        kept: indices of the surviving groups, ascending.
        all_correct: groups dropped because every counted reward is 1.
        all_wrong: groups dropped because every counted reward is 0.
        too_few: groups dropped because fewer than two members count.
    """

    kept: tuple[int, ...]
    all_correct: int
    all_wrong: int
    too_few: int

    @property
    def rejected(self) -> int:
        return self.all_correct + self.all_wrong + self.too_few


def reject_zero_advantage(groups: Sequence[ScoredGroup], mask: AdvantageMask = "none") -> Rejection:
    """Drop groups without signal: through the entropy and KL terms they would still weigh in."""
    signals = [group_signal(group, mask) for group in groups]
    return Rejection(
        kept=tuple(i for i, signal in enumerate(signals) if signal is Signal.MIXED),
        all_correct=signals.count(Signal.ALL_CORRECT),
        all_wrong=signals.count(Signal.ALL_WRONG),
        too_few=signals.count(Signal.TOO_FEW),
    )


def select_refill(groups: Sequence[ScoredGroup], wanted: int, mask: AdvantageMask = "none") -> list[int]:
    """Indices of the first ``wanted`` groups with signal, by the order in which they were issued.

    Give it every group issued so far, finished in whatever order: the order of finishing would favour
    short responses, so the caller waits for a whole round before it selects.
    """
    if wanted < 0:
        raise ValueError(f"cannot select {wanted} groups")
    in_issue_order = sorted(range(len(groups)), key=lambda i: groups[i].group.request.draw)
    good = [i for i in in_issue_order if group_signal(groups[i], mask) is Signal.MIXED]
    return good[:wanted]


def split_minibatches(
    num_groups: int,
    *,
    num_parts: int,
    prompts_per_part: int,
    mode: MinibatchMode,
    rng: np.random.Generator,
) -> list[list[int]]:
    """Split the surviving groups of one pass into the groups of its SGD steps.

    Call it once for each of the N_reuse passes: every call draws a new split from ``rng``.

    * ``keep_n_sgd``: D_R/D_T parts whose sizes differ by at most one group, whatever was rejected;
      fewer groups than parts give one part a group, never an empty one.
    * ``keep_d_t``: parts of D_T groups, the last one perhaps smaller, so that rejection lowers the number
      of SGD steps, as in the released code.

    Args:
        num_groups: survivors.
        num_parts: D_R / D_T.
        prompts_per_part: D_T.
        mode: which of the two stays as configured.
        rng: source of the draw; its state belongs in the checkpoint.

    Returns:
        Group indices of each part, ascending within a part; no parts when nothing survived.
    """
    if num_parts < 1 or prompts_per_part < 1:
        raise ValueError(f"mini-batches need num_parts and prompts_per_part >= 1, got {num_parts}, {prompts_per_part}")
    if num_groups == 0:
        return []
    order = rng.permutation(num_groups)
    if mode == "keep_n_sgd":
        parts = np.array_split(order, min(num_parts, num_groups))
    elif mode == "keep_d_t":
        parts = np.split(order, range(prompts_per_part, num_groups, prompts_per_part))
    else:
        raise ValueError(f"minibatch must be keep_n_sgd or keep_d_t, got {mode!r}")
    return [sorted(int(i) for i in part) for part in parts]
