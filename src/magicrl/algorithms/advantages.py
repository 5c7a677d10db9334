"""From verdicts to what the learner reads: rewards, group-relative advantages (Eq. 2.5), rejection, mini-batches.

``algorithm.advantage`` names a function of `AdvantageInputs`: one of those of this page, or a user's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple, TypeAlias, cast, get_args

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


class AdvantageInputs(NamedTuple):
    """The responses of all surviving groups of a step, ``[N]``, group after group.

    Attributes:
        rewards_N: the rewards, with `overlong_penalty` where the recipe asks for it; ``groups`` have them without.
        group_index_N: group of each response, 0 and up.
        counted_N: bool; responses that were not judged are False, and no sample is made of them.
        truncated_N: bool.
        lengths_N: tokens that the model wrote.
        mask: the recipe's ``advantage_mask``.
        normalise_std: whether the loss row wants a division by the deviation.
        k: of `pass_at_k`.
        groups: the records themselves: problems, completions with their log-probs and versions, verdicts.
    """

    rewards_N: Tensor
    group_index_N: Tensor
    counted_N: Tensor
    truncated_N: Tensor
    lengths_N: Tensor
    mask: AdvantageMask
    normalise_std: bool
    k: int
    groups: Sequence[ScoredGroup]

    @property
    def members_N(self) -> Tensor:
        """``[N]`` bool: who is in a mean and a deviation. The mask `before` leaves truncated responses out."""
        return self.counted_N & ~self.truncated_N if self.mask == "before" else self.counted_N

    def given(self, advantages_N: Tensor) -> Tensor:
        """``advantages_N`` of the members, 0 of all others; the mask `after` takes them from truncated responses."""
        kept = self.members_N & ~self.truncated_N if self.mask == "after" else self.members_N
        return torch.where(kept, advantages_N, 0.0)


Advantage: TypeAlias = Callable[[AdvantageInputs], Tensor]
"""Gives one number a response, ``[N]``, the same for all its tokens; `AdvantageInputs.given` makes 0 of some."""


# --- within each group -------------------------------------------------------------------------------------------


def over_groups(a: AdvantageInputs, of: Callable[[Tensor], Tensor]) -> Tensor:
    """``of`` the rewards of each group's members, ``[members]`` float64 to one number a member.

    What the recipe's ``advantage_mask`` does to truncated responses (section 2):

    * ``none``: nothing, they are members with reward 0;
    * ``before``: they are no members, and get 0;
    * ``after``: they are members here, and get 0 at the end (`AdvantageInputs.given`).

    A group with one member or none left, or with equal rewards, has advantages of exactly 0, never NaN. A group is a
    draw, not a prompt.

    Returns:
        ``[N]`` float64.
    """
    rewards, members = a.rewards_N.to(torch.float64), a.members_N
    advantages = torch.zeros_like(rewards)
    # one by one: members differ in number, and there are at most some hundred groups a step
    for group in torch.unique(a.group_index_N):
        inside = members & (a.group_index_N == group)
        values = rewards[inside]
        # Equal rewards are recognised as such, not by a float that should have come out as 0.
        if len(values) < 2 or values.min() == values.max():
            continue
        advantages[inside] = of(values)
    return advantages


def centred(values: Tensor) -> Tensor:
    """r - mean."""
    return values - values.mean()


def group_relative(a: AdvantageInputs) -> Tensor:
    """A = (r - mean) / (std + 1e-6) within each group (Eq. 2.5), or r - mean for rows like Dr. GRPO.

    Example: rewards 1, 0, 0, 1 have mean 0.5 and unbiased std 0.577, so A is about +-0.866.
    """
    if not a.normalise_std:
        return over_groups(a, centred)
    # torch's std is the unbiased one, as in the released code
    return over_groups(a, lambda values: centred(values) / (values.std() + STD_EPSILON))


def leave_one_out(a: AdvantageInputs) -> Tensor:
    """r_i minus the mean of the other members: RLOO (Kool et al. 2019; Ahmadian et al. 2024, arXiv 2402.14740).

    That is n / (n - 1) times r - mean, an unbiased estimate: no response is in its own baseline.
    """
    return over_groups(a, lambda values: centred(values) * len(values) / (len(values) - 1))


def max_likelihood(a: AdvantageInputs) -> Tensor:
    """(r - mean) / mean: MaxRL (Tajwar et al. 2026, arXiv 2602.02710), towards the gradient of the log pass rate.

    With K of n right a right response has n / K - 1 and a wrong one -1: the mean of the right ones' gradients, less the
    mean of all as a baseline. As a group without a right one has 0, the expectation is the gradient of log p, expanded
    at 1, to order n - 1: (1 + (1-p) + ... + (1-p)^(n-2)) grad p. Problems that are solved rarely weigh most.

    Raises:
        ValueError: a negative reward; a pass rate has none.
    """
    lowest = float(a.rewards_N[a.members_N].min()) if bool(a.members_N.any()) else 0.0
    if lowest < 0:
        raise ValueError(
            f'algorithm.advantage = "maxrl" divides by the mean reward, and one is {lowest:g}; give rewards of 0 and '
            "more, or take another advantage"
        )
    return over_groups(a, lambda values: centred(values) / values.mean())


def pass_at_k(a: AdvantageInputs) -> Tensor:
    """The unbiased gradient of pass@k, for graded rewards of max@k: PKPO's leave-one-out-minus-one form.

    Walder and Karkhanis 2025, arXiv 2505.15201 (``sloo_minus_one``): over all sets of ``k`` members with i in it, the
    mean of what i adds to the best of the others, n times as the reducers take a mean where the paper sums. All numbers
    are 0 or positive: what adds nothing to any set has no gradient. A group with fewer than ``k`` members is taken with
    as many as it has.

    Example: one of four right and k = 2: the right one adds 1 in all 3 of the 6 pairs that it is in, 4 * 3 / 6 = 2.
    """
    return over_groups(a, lambda values: max_at_k(values, min(a.k, len(values))))


def max_at_k(values: Tensor, k: int) -> Tensor:
    """What each of n values adds to the best of k - 1 others: sum over the sets of k, over C(n, k), times n."""
    rising, order = values.sort()
    # i adds to a set where it is the best of it, and then its distance to the second, which is j in C(j, k - 2) of them
    seconds = torch.tensor([math.comb(j, k - 2) for j in range(len(values))], dtype=torch.float64)
    added = (seconds * (rising[:, None] - rising)).tril(-1).sum(1)
    return torch.empty_like(values).index_copy(0, order, added * len(values) / math.comb(len(values), k))


# --- over the whole step -----------------------------------------------------------------------------------------
# All surviving groups of a step are the batch: not a mini-batch, so that the split into SGD steps changes nothing.


def batch_deviation(a: AdvantageInputs) -> Tensor:
    """(r - the group's mean) / the deviation of these over the batch's responses: ScaleRL (arXiv 2510.13786).

    The deviation is the unbiased one. A group with one right response weighs as its rewards do, not more.
    """
    advantages = over_groups(a, centred)
    spread = advantages[a.members_N].std() if int(a.members_N.sum()) > 1 else advantages.new_zeros(())
    return advantages / (spread + STD_EPSILON)


def over_tokens(a: AdvantageInputs, values_N: Tensor) -> Tensor:
    """(value - mean) / (std + 1e-6), both over the tokens of all members: a longer response counts more in them."""
    weights = torch.where(a.members_N, a.lengths_N, 0).to(torch.float64)
    total = weights.sum().clamp(min=1)
    apart = values_N.to(torch.float64) - (weights * values_N).sum() / total
    spread = ((weights * apart.square()).sum() / total).sqrt()
    return apart / (spread + STD_EPSILON)


def reinforce_pp(a: AdvantageInputs) -> Tensor:
    """Rewards less their mean over the batch, over its deviation: REINFORCE++ (Hu et al. 2025, arXiv 2501.03262 v9).

    Mean and deviation (the population's) are over tokens, as the paper indexes them; its KL penalty inside the reward
    is left out, the recipe's ``reference`` has its own. A group of equal rewards has an advantage here: it takes part
    with ``reject_zero_advantage = false``.
    """
    return over_tokens(a, a.rewards_N)


def reinforce_pp_baseline(a: AdvantageInputs) -> Tensor:
    """Rewards less their group's mean, then as `reinforce_pp`: REINFORCE++ with baseline (arXiv 2501.03262 v9)."""
    return over_tokens(a, over_groups(a, centred))


def advantage_of(reference: str) -> Advantage:
    """The function that ``algorithm.advantage`` names.

    Raises:
        ValueError: an unknown name (with the known ones), or what it names is no function.
    """
    found = resolve("advantage", reference)
    if not callable(found):
        raise ValueError(f"advantage {reference!r} is a {type(found).__name__}; it must be a function")
    return cast(Advantage, found)


def overlong_penalty(lengths_N: Tensor, limits_N: Tensor, buffer: int) -> Tensor:
    """The soft punishment of long responses: 0 up to T - buffer tokens, from there linearly to -1 at T.

    DAPO (Yu et al. 2025, arXiv 2503.14476, Eq. 13). ``limits_N`` is T of each response.
    """
    return ((limits_N - buffer - lengths_N) / buffer).clamp(-1.0, 0.0)


def scored_advantages(
    groups: Sequence[ScoredGroup],
    *,
    mask: AdvantageMask = "none",
    normalise_std: bool = True,
    advantage: Advantage = group_relative,
    k: int = 4,
    overlong_buffer: int | None = None,
) -> list[NDArray[np.float64]]:
    """The advantages of records: one ``[G]`` float64 array a group, in the order given.

    Args:
        groups: the surviving ones.
        mask: what a truncated response is to its group.
        normalise_std: of the loss row.
        advantage: the function.
        k: of `pass_at_k`.
        overlong_buffer: tokens before T in which `overlong_penalty` is added to the rewards; None: nowhere. The records
            keep their rewards, by which groups were rejected.

    Raises:
        ValueError: an unknown mask, or ``advantage`` gave something else than a finite number a response.
    """
    if mask not in get_args(AdvantageMask):
        raise ValueError(f"advantage mask must be none, before or after, got {mask!r}")
    if not groups:
        return []
    sizes = [len(group.rewards) for group in groups]
    rewards = torch.from_numpy(np.concatenate([group.rewards for group in groups]))
    lengths = torch.tensor([c.num_sampled for group in groups for c in group.group.completions])
    if overlong_buffer is not None:
        limits = torch.tensor([group.group.request.sampling.max_tokens for group in groups])
        limits_N = torch.repeat_interleave(limits, torch.tensor(sizes))
        rewards = rewards.to(torch.float64) + overlong_penalty(lengths, limits_N, overlong_buffer)
    # all groups in one call, so that a function may look across them
    inputs = AdvantageInputs(
        rewards_N=rewards,
        group_index_N=torch.repeat_interleave(torch.arange(len(groups)), torch.tensor(sizes)),
        counted_N=torch.from_numpy(np.concatenate([group.counted for group in groups])),
        truncated_N=torch.from_numpy(np.concatenate([group.truncated for group in groups])),
        lengths_N=lengths,
        mask=mask,
        normalise_std=normalise_std,
        k=k,
        groups=groups,
    )
    found = advantage(inputs).to(torch.float64)
    # who is no member may have been given anything
    if found.shape != (sum(sizes),) or not bool(found[inputs.members_N].isfinite().all()):
        raise ValueError(f"an advantage function must give {sum(sizes)} finite numbers, one a response; got {found}")
    found = inputs.given(found)
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
