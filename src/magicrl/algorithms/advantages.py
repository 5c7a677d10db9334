"""From verdicts to what the learner reads: rewards, group-relative advantages (Eq. 2.5), rejection, mini-batches.

``algorithm.advantage`` names a function of `AdvantageInputs`: `group_relative`, or a user's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from magicrl.records import FinishReason, Outcome, RolloutGroup, ScoredGroup, Verdict, frozen_floats
from magicrl.registry import resolve


def score_group(group: RolloutGroup, verdicts: Sequence[Verdict]) -> ScoredGroup:
    """Attach verdicts and rewards to a group (recipe, section 2).

    A completion that ended by itself earns 1 when it is correct and else 0, or the score of a graded reward; one cut at
    T earns 0 whatever the verifier says of its text (or its score, if that is less: being cut must not pay). A
    completion that was not judged, or that was aborted before its end, is not counted: it takes no part in the group's
    statistics and must not become a training sample.

    Args:
        group: the rollouts, ``G`` completions.
        verdicts: ``G`` verdicts in the same order.

    Raises:
        ValueError: the numbers of completions and verdicts differ (a verifier lost an item).
    """
    if len(verdicts) != len(group.completions):
        raise ValueError(
            f"draw {group.request.draw}: {len(group.completions)} completions but {len(verdicts)} verdicts; "
            "a verifier must answer every item once, in order"
        )
    pairs = list(zip(group.completions, verdicts, strict=True))
    counted = np.array(
        [
            # an aborted response has no end, so its text is neither right nor wrong
            verdict.outcome is not Outcome.NOT_JUDGED and completion.finish_reason is not FinishReason.ABORTED
            for completion, verdict in pairs
        ],
        dtype=np.bool_,
    )
    # read-only as all arrays of records: metrics, filters and samples share it
    counted.flags.writeable = False
    earned = [verdict.earned(truncated=completion.truncated) for completion, verdict in pairs]
    rewards = frozen_floats(np.where(counted, earned, 0.0))
    return ScoredGroup(group=group, verdicts=tuple(verdicts), rewards=rewards, counted=counted)


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
    # `after` masks at the end: there the truncated ones still pull the mean down
    members = counted & ~truncated if mask == "before" else counted

    advantages = torch.zeros_like(rewards)
    # one by one: members differ in number, and there are at most some hundred groups a step
    for group in torch.unique(group_index_N):
        inside = members & (group_index_N == group)
        values = rewards[inside]
        # Equal rewards are recognised as such, not by a float that should have come out as 0.
        if len(values) < 2 or values.min() == values.max():
            continue
        # torch's std is the unbiased one, as in the released code
        centred = values - values.mean()
        advantages[inside] = centred / (values.std() + eps) if normalise_std else centred
    return advantages.masked_fill(truncated, 0.0) if mask == "after" else advantages


class AdvantageInputs(NamedTuple):
    """The responses of all surviving groups of a step, ``[N]``, group after group.

    Attributes:
        rewards_N: the rewards.
        group_index_N: group of each response, 0 and up.
        counted_N: bool; responses that were not judged are False, and no sample is made of them.
        truncated_N: bool.
        mask: the recipe's ``advantage_mask``.
        normalise_std: whether the loss row wants a division by the deviation.
        groups: the records themselves: problems, completions with their log-probs and versions, verdicts.
    """

    rewards_N: Tensor
    group_index_N: Tensor
    counted_N: Tensor
    truncated_N: Tensor
    mask: AdvantageMask
    normalise_std: bool
    groups: Sequence[ScoredGroup]


Advantage: TypeAlias = Callable[[AdvantageInputs], Tensor]
"""Gives one number a response, ``[N]``, the same for all its tokens."""


def group_relative(a: AdvantageInputs) -> Tensor:
    """`group_advantages`."""
    return group_advantages(
        a.rewards_N,
        a.group_index_N,
        counted_N=a.counted_N,
        truncated_N=a.truncated_N,
        mask=a.mask,
        normalise_std=a.normalise_std,
    )


def advantage_of(reference: str) -> Advantage:
    """The function that ``algorithm.advantage`` names.

    Raises:
        ValueError: an unknown name (with the known ones), or what it names is no function.
    """
    found = resolve("advantage", reference)
    if not callable(found):
        raise ValueError(f"advantage {reference!r} is a {type(found).__name__}; it must be a function")
    return cast(Advantage, found)


def scored_advantages(
    groups: Sequence[ScoredGroup],
    *,
    mask: AdvantageMask = "none",
    normalise_std: bool = True,
    advantage: Advantage = group_relative,
) -> list[NDArray[np.float64]]:
    """The advantages of records: one ``[G]`` float64 array a group, in the order given.

    Raises:
        ValueError: ``advantage`` gave something else than a finite number a response.
    """
    if not groups:
        return []
    sizes = [len(group.rewards) for group in groups]
    # all groups in one call, so that a function of one's own may look across them
    inputs = AdvantageInputs(
        rewards_N=torch.from_numpy(np.concatenate([group.rewards for group in groups])),
        group_index_N=torch.repeat_interleave(torch.arange(len(groups)), torch.tensor(sizes)),
        counted_N=torch.from_numpy(np.concatenate([group.counted for group in groups])),
        truncated_N=torch.from_numpy(np.concatenate([group.truncated for group in groups])),
        mask=mask,
        normalise_std=normalise_std,
        groups=groups,
    )
    found = advantage(inputs).to(torch.float64)
    # no sample is made of what was not counted, so its number may be anything
    if found.shape != (sum(sizes),) or not bool(found[inputs.counted_N].isfinite().all()):
        raise ValueError(f"an advantage function must give {sum(sizes)} finite numbers, one a response; got {found}")
    return [part.numpy() for part in torch.split(found, sizes)]


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
    # one member is its own mean: A = 0, and the unbiased deviation is 0/0
    if len(rewards) < 2:
        return Signal.TOO_FEW
    low, high = float(rewards.min()), float(rewards.max())
    if high > low:
        return Signal.MIXED
    # by verdict: a graded reward may be the same for all and still not be right
    return Signal.ALL_CORRECT if group.correct[members].all() else Signal.ALL_WRONG


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejection:
    """Indices of the surviving groups, ascending, and how many were dropped because every counted reward is the same
    and every response right, the same otherwise (0, or another score), or because fewer than two members count."""

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
        rng: source of the draw.

    Returns:
        Group indices of each part, ascending within a part; no parts when nothing survived.
    """
    if num_parts < 1 or prompts_per_part < 1:
        raise ValueError(f"mini-batches need num_parts and prompts_per_part >= 1, got {num_parts}, {prompts_per_part}")
    if num_groups == 0:
        return []
    # groups stay whole, since D_T counts prompts; which of them meet in an update is drawn
    order = rng.permutation(num_groups)
    if mode == "keep_n_sgd":
        parts = np.array_split(order, min(num_parts, num_groups))
    elif mode == "keep_d_t":
        parts = np.split(order, range(prompts_per_part, num_groups, prompts_per_part))
    else:
        raise ValueError(f"minibatch must be keep_n_sgd or keep_d_t, got {mode!r}")
    return [sorted(int(i) for i in part) for part in parts]
