"""Rewards, group-relative advantages (Eq. 2.5), rejection of groups and mini-batches: from verdicts to training
samples.

``algorithm.advantage`` names a function of `AdvantageInputs`: one of this module's or a custom one.
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

from magicrl.algorithms.token_weights import as_numbers
from magicrl.records import FinishReason, Outcome, RolloutGroup, ScoredGroup, Verdict, frozen_floats, reward_earned
from magicrl.registry import check_call, resolve


def score_group(group: RolloutGroup, verdicts: Sequence[Verdict]) -> ScoredGroup:
    """Attach verdicts and rewards to a group (recipe, section 2).

    A response that ended by itself earns 1 if it is correct and 0 otherwise, or the score of a graded reward. A
    response truncated at T earns 0 whatever its verdict, or its score if that is lower: truncation must not pay. A
    response that was not judged, or that was aborted, is not counted. It is left out of the group's statistics and must
    not become a training sample.

    Args:
        group: The rollouts, ``G`` completions.
        verdicts: ``G`` verdicts in the same order.

    Raises:
        ValueError: The numbers of completions and verdicts differ (a verifier lost an item).
    """
    if len(verdicts) != len(group.completions):
        raise ValueError(
            f"draw {group.request.draw}: {len(group.completions)} completions but {len(verdicts)} verdicts; "
            "a verifier must answer every item once, in order"
        )
    pairs = list(zip(group.completions, verdicts, strict=True))
    counted = np.array(
        [
            # An aborted response is incomplete, so a verdict on its text means nothing.
            verdict.outcome is not Outcome.NOT_JUDGED and completion.finish_reason is not FinishReason.ABORTED
            for completion, verdict in pairs
        ],
        dtype=np.bool_,
    )
    # Read-only like all arrays of records, since metrics, filters and samples share it.
    counted.flags.writeable = False
    earned = np.array([verdict.earned(truncated=completion.truncated) for completion, verdict in pairs])
    parts = part_scores(group, verdicts)
    if parts:
        several = [bool(verdict.parts) for verdict in verdicts]
        earned = np.where(several, weighted_mean(list(parts.values()), counted), earned)
    rewards = frozen_floats(np.where(counted, earned, 0.0))
    return ScoredGroup(group=group, verdicts=tuple(verdicts), rewards=rewards, counted=counted)


Part: TypeAlias = tuple[float, NDArray[np.float64]]
"""Weight of one of several rewards, and its scores ``[G]``, NaN where it did not judge the response."""


def part_scores(group: RolloutGroup, verdicts: Sequence[Verdict]) -> dict[str, Part]:
    """Return the scores of each of several rewards by name; {} for a single reward. Truncation earns at most 0."""
    weights = {name: weight for verdict in verdicts for name, (weight, _) in verdict.parts.items()}
    found: dict[str, Part] = {}
    for name, weight in weights.items():
        scores = [verdict.parts.get(name, (weight, None))[1] for verdict in verdicts]
        earned = [
            math.nan if score is None else reward_earned(score, truncated=completion.truncated)
            for score, completion in zip(scores, group.completions, strict=True)
        ]
        found[name] = (weight, np.array(earned))
    return found


def weighted_mean(parts: Sequence[Part], counted: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the weighted mean ``[G]`` of several rewards.

    Where a reward did not judge a response, its part is the mean of that reward over the group, so that it moves the
    response neither up nor down. A reward that judged none of the group is left out with its weight.
    """
    total, weights = np.zeros(len(counted)), 0.0
    for weight, scores in parts:
        known = counted & ~np.isnan(scores)
        if known.any():
            total += weight * np.where(np.isnan(scores), scores[known].mean(), scores)
            weights += weight
    return total / weights if weights else total


AdvantageMask: TypeAlias = Literal["none", "before", "after"]

STD_EPSILON = 1e-6
"""Term added to the standard deviation, as in the released code."""


class AdvantageInputs(NamedTuple):
    """Responses of all surviving groups of a step, ``[N]``, group after group.

    Attributes:
        rewards_N: Rewards, including `overlong_penalty` if the recipe sets it. The rewards in ``groups`` exclude it.
        group_index_N: Group of each response, from 0.
        counted_N: bool. False for responses that were not judged. They do not become samples.
        truncated_N: bool.
        lengths_N: Number of tokens that the model sampled.
        mask: The recipe's ``advantage_mask``.
        normalise_std: Whether the loss row requires division by the standard deviation.
        k: The k of `pass_at_k_gradient`.
        groups: The records: problems, completions with log-probs and versions, verdicts.
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
        """Responses that enter a mean or a standard deviation, ``[N]`` bool. `before` excludes truncated ones."""
        return self.counted_N & ~self.truncated_N if self.mask == "before" else self.counted_N

    def given(self, advantages_N: Tensor) -> Tensor:
        """Return ``advantages_N`` with 0 for non-members. With the mask `after` truncated responses get 0 too."""
        kept = self.members_N & ~self.truncated_N if self.mask == "after" else self.members_N
        return torch.where(kept, advantages_N, 0.0)


Advantage: TypeAlias = Callable[[AdvantageInputs], Tensor]
"""Function that returns one advantage per response, ``[N]``, for all of its tokens. `AdvantageInputs.given` then sets
some to 0."""


# --- within each group -------------------------------------------------------------------------------------------


def over_groups(a: AdvantageInputs, of: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply ``of`` to the rewards of each group's members: ``[members]`` float64 in, one number per member out.

    The recipe's ``advantage_mask`` decides what happens to truncated responses (section 2):

    * ``none``: they are ordinary members with reward 0.
    * ``before``: they are not members, and get 0.
    * ``after``: they are members here, and get 0 at the end (`AdvantageInputs.given`).

    A group with fewer than two members, or with equal rewards, gets advantages of exactly 0, never NaN. A group is one
    draw of a prompt: two draws of a prompt are two groups.

    Returns:
        ``[N]`` float64.
    """
    rewards, members = a.rewards_N.to(torch.float64), a.members_N
    advantages = torch.zeros_like(rewards)
    # One group at a time: groups differ in size, and a step has at most a few hundred.
    for group in torch.unique(a.group_index_N):
        inside = members & (a.group_index_N == group)
        values = rewards[inside]
        # Equality is tested on the rewards, because a float mean may not cancel to exactly 0.
        if len(values) < 2 or values.min() == values.max():
            continue
        advantages[inside] = of(values)
    return advantages


def centred(values: Tensor) -> Tensor:
    """Return r - mean."""
    return values - values.mean()


def group_relative(a: AdvantageInputs) -> Tensor:
    """Return A = (r - mean) / (std + 1e-6) within each group (Eq. 2.5), or r - mean for rows such as Dr. GRPO.

    Example: rewards 1, 0, 0, 1 have mean 0.5 and unbiased std 0.577, so A is about +-0.866.
    """
    if not a.normalise_std:
        return over_groups(a, centred)
    # torch computes the unbiased standard deviation, as the released code does.
    return over_groups(a, lambda values: centred(values) / (values.std() + STD_EPSILON))


def leave_one_out(a: AdvantageInputs) -> Tensor:
    """Return r_i minus the mean of the other members: RLOO (Kool et al. 2019; Ahmadian et al. 2024, arXiv 2402.14740).

    This equals n / (n - 1) times r - mean. It is unbiased, because no response is in its own baseline.
    """
    return over_groups(a, lambda values: centred(values) * len(values) / (len(values) - 1))


def max_likelihood(a: AdvantageInputs) -> Tensor:
    """Return (r - mean) / mean: MaxRL (Tajwar et al. 2026, arXiv 2602.02710), an estimate of the gradient of the log
    pass rate.

    With K of n responses correct, a correct one gets n / K - 1 and a wrong one -1: the mean gradient of the correct
    ones, with the mean over all as baseline. A group without a correct response gets 0. The expectation is therefore
    the gradient of log p, expanded at 1, to order n - 1: (1 + (1-p) + ... + (1-p)^(n-2)) grad p. Rarely solved problems
    get the largest weight.

    Raises:
        ValueError: A reward is negative. A pass rate is never negative.
    """
    lowest = float(a.rewards_N[a.members_N].min()) if bool(a.members_N.any()) else 0.0
    if lowest < 0:
        raise ValueError(
            f'algorithm.advantage = "maxrl" divides by the mean reward, and one is {lowest:g}; give rewards of 0 and '
            "more, or take another advantage"
        )
    return over_groups(a, lambda values: centred(values) / values.mean())


def pass_at_k_gradient(a: AdvantageInputs) -> Tensor:
    """Return the unbiased gradient of pass@k (of max@k for graded rewards): the leave-one-out-minus-one form of PKPO.

    Walder and Karkhanis 2025, arXiv 2505.15201 (``sloo_minus_one``): over all sets of ``k`` members that contain i, the
    mean of what i adds to the best of the others. It is multiplied by n, because the reducers take a mean where the
    paper sums. No number is negative: a response that adds nothing to any set has no gradient. In a group with fewer
    than ``k`` members, k is their number.

    Example: one of four is correct and k = 2. The correct one adds 1 in each of its 3 pairs, out of 6: 4 * 3 / 6 = 2.
    """
    return over_groups(a, lambda values: max_at_k(values, min(a.k, len(values))))


def max_at_k(values: Tensor, k: int) -> Tensor:
    """Return what each of n values adds to the best of k - 1 others: the sum over sets of k, divided by C(n, k), times
    n.
    """
    rising, order = values.sort()
    # Value i adds to a set where it is the largest. It adds its distance to the second largest, j, which is second in
    # C(j, k - 2) of these sets.
    seconds = torch.tensor([math.comb(j, k - 2) for j in range(len(values))], dtype=torch.float64)
    added = (seconds * (rising[:, None] - rising)).tril(-1).sum(1)
    return torch.empty_like(values).index_copy(0, order, added * len(values) / math.comb(len(values), k))


# --- over the whole step -----------------------------------------------------------------------------------------
# The batch is all surviving groups of a step. It is not a mini-batch, so the split into updates changes nothing.


def batch_deviation(a: AdvantageInputs) -> Tensor:
    """Return (r - the group's mean) / the standard deviation of these over the batch: ScaleRL (arXiv 2510.13786).

    The standard deviation is the unbiased one. A group with a single correct response is not scaled up.
    """
    advantages = over_groups(a, centred)
    spread = advantages[a.members_N].std() if int(a.members_N.sum()) > 1 else advantages.new_zeros(())
    return advantages / (spread + STD_EPSILON)


def over_tokens(a: AdvantageInputs, values_N: Tensor) -> Tensor:
    """Return (value - mean) / (std + 1e-6), both over the tokens of all members. Long responses count more."""
    weights = torch.where(a.members_N, a.lengths_N, 0).to(torch.float64)
    total = weights.sum().clamp(min=1)
    apart = values_N.to(torch.float64) - (weights * values_N).sum() / total
    spread = ((weights * apart.square()).sum() / total).sqrt()
    return apart / (spread + STD_EPSILON)


def gdpo(a: AdvantageInputs) -> Tensor:
    """Return the weighted sum of each reward's group-relative advantages, normalised over the batch: GDPO (Liu et al.
    2026, arXiv 2601.05242).

    Each reward's scores are normalised within the group, A_k = (r_k - mean) / (std + 1e-6), over the responses that it
    judged; A = sum of w_k A_k; then (A - mean) / (std + 1e-6) over the batch. Different combinations of scores keep
    different advantages, also where their sums are equal. A group with a single reward has one part of weight 1.
    """
    columns = [part_scores(g.group, g.verdicts) or {"": (1.0, g.rewards.astype(np.float64))} for g in a.groups]
    absent = [(0.0, np.full(len(group.rewards), math.nan)) for group in a.groups]
    total = torch.zeros(len(a.rewards_N), dtype=torch.float64)
    for name in dict.fromkeys(name for parts in columns for name in parts):
        parts = [of.get(name, none) for of, none in zip(columns, absent, strict=True)]
        scores = torch.from_numpy(np.concatenate([scores for _, scores in parts]))
        weights = torch.tensor([weight for weight, scores in parts for _ in scores], dtype=torch.float64)
        known = a._replace(rewards_N=scores, counted_N=a.counted_N & ~scores.isnan(), normalise_std=True)
        total += weights * group_relative(known)
    members = total[a.members_N]
    spread = members.std() if len(members) > 1 else members.new_zeros(())
    return (total - members.mean()) / (spread + STD_EPSILON)


gdpo.by_parts = True  # pyright: ignore[reportFunctionMemberAccess]


def reinforce_pp(a: AdvantageInputs) -> Tensor:
    """Return rewards minus their batch mean, divided by their standard deviation: REINFORCE++ (Hu et al. 2025, arXiv
    2501.03262 v9).

    Mean and (population) standard deviation are over tokens, as in the paper's indexing. Its KL penalty inside the
    reward is left out, because the recipe's ``reference`` adds one to the loss. A group of equal rewards gets
    advantages here, and takes part with ``reject_zero_advantage = false``.
    """
    return over_tokens(a, a.rewards_N)


def reinforce_pp_baseline(a: AdvantageInputs) -> Tensor:
    """Return rewards minus their group mean, normalised as in `reinforce_pp`: REINFORCE++ with baseline (arXiv
    2501.03262 v9).
    """
    return over_tokens(a, over_groups(a, centred))


def advantage_of(reference: str) -> Advantage:
    """Return the function that ``algorithm.advantage`` names.

    Raises:
        ValueError: The name is unknown (the message lists the known ones), or does not name a function.
    """
    found = resolve("advantage", reference)
    if not callable(found):
        raise ValueError(f"advantage {reference!r} is a {type(found).__name__}; it must be a function")
    check_call(f"advantage {reference!r}", found, "AdvantageInputs")
    return cast(Advantage, found)


def reads_parts(advantage: Advantage) -> bool:
    """Return whether an advantage function reads each of several rewards alone, and not their sum."""
    return bool(getattr(advantage, "by_parts", False))


def overlong_penalty(lengths_N: Tensor, limits_N: Tensor, buffer: int) -> Tensor:
    """Return the soft penalty for long responses: 0 up to T - buffer tokens, then linear down to -1 at T.

    DAPO (Yu et al. 2025, arXiv 2503.14476, Eq. 13). ``limits_N`` is the T of each response.
    """
    return ((limits_N - buffer - lengths_N) / buffer).clamp(-1.0, 0.0)


class AdvantageError(ValueError):
    """What an advantage function returned is not a finite number per response."""


def scored_advantages(
    groups: Sequence[ScoredGroup],
    *,
    mask: AdvantageMask = "none",
    normalise_std: bool = True,
    advantage: Advantage = group_relative,
    k: int = 4,
    overlong_buffer: int | None = None,
) -> list[NDArray[np.float64]]:
    """Return the advantages of scored groups: one ``[G]`` float64 array per group, in the given order.

    Args:
        groups: The surviving groups.
        mask: How truncated responses enter their group's statistics.
        normalise_std: As in the loss row.
        advantage: The advantage function.
        k: The k of `pass_at_k_gradient`.
        overlong_buffer: Number of tokens before T over which `overlong_penalty` is added to the rewards. None adds
            nothing. The records keep their rewards, which decided the rejection.

    Raises:
        ValueError: The mask is unknown, or ``advantage`` did not return one finite number per response.
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
    # One call for all groups, so that a function may use statistics across groups.
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
    returned, responses = advantage(inputs), sum(sizes)
    found = as_numbers(returned)
    if found is None:
        kind = type(returned).__name__
        raise AdvantageError(
            f"an advantage must return {responses} numbers, one per response, as a tensor, an array or a list; got "
            f"{kind} ({returned!r:.60})"
        )
    # The values of non-members are arbitrary until `given` sets them to 0.
    if found.shape != (responses,) or not bool(found[inputs.members_N].isfinite().all()):
        raise AdvantageError(f"an advantage must return {responses} finite numbers, one per response; got {found}")
    return [part.numpy() for part in torch.split(inputs.given(found), sizes)]


MinibatchMode: TypeAlias = Literal["keep_n_sgd", "keep_d_t"]


class Signal(StrEnum):
    """Learning signal of a group's rewards. Only ``MIXED`` groups are kept."""

    MIXED = "mixed"
    ALL_CORRECT = "all_correct"
    ALL_WRONG = "all_wrong"
    TOO_FEW = "too_few"


def group_signal(group: ScoredGroup, mask: AdvantageMask = "none", *, by_parts: bool = False) -> Signal:
    """Return whether a group has a non-zero advantage, and if not, why.

    The test is max > min over the rewards that enter the group's mean. Float advantages are never compared. Under the
    mask ``before`` these are the rewards of the responses that were not truncated. With ``by_parts`` a group of several
    rewards is tested for each of them, because their sum may be equal where they are not.
    """
    members = group.counted & ~group.truncated if mask == "before" else group.counted
    # A single member equals its mean: A = 0, and the unbiased standard deviation is 0/0.
    if members.sum() < 2:
        return Signal.TOO_FEW
    parts = part_scores(group.group, group.verdicts) if by_parts else {}
    columns = [scores[members & ~np.isnan(scores)] for weight, scores in parts.values() if weight]
    if any(len(np.unique(values)) > 1 for values in columns or [group.rewards[members]]):
        return Signal.MIXED
    # Decided by verdict, because equal graded rewards need not mean correct.
    return Signal.ALL_CORRECT if group.correct[members].all() else Signal.ALL_WRONG


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejection:
    """Indices of the surviving groups, ascending, and the numbers of groups dropped, by reason.

    The other dropped groups have fewer than two counted members.

    Attributes:
        kept: Indices of the groups with different rewards.
        all_correct: Groups whose counted responses are all correct.
        all_wrong: Other groups with equal rewards (0 or another score).
    """

    kept: tuple[int, ...]
    all_correct: int
    all_wrong: int


def reject_zero_advantage(
    groups: Sequence[ScoredGroup], mask: AdvantageMask = "none", *, by_parts: bool = False
) -> Rejection:
    """Drop zero-advantage groups, which would still contribute through the entropy and KL terms."""
    signals = [group_signal(group, mask, by_parts=by_parts) for group in groups]
    return Rejection(
        kept=tuple(i for i, signal in enumerate(signals) if signal is Signal.MIXED),
        all_correct=signals.count(Signal.ALL_CORRECT),
        all_wrong=signals.count(Signal.ALL_WRONG),
    )


def split_minibatches(
    num_groups: int,
    *,
    num_parts: int,
    prompts_per_part: int,
    mode: MinibatchMode,
    rng: np.random.Generator,
) -> list[list[int]]:
    """Split the surviving groups of one pass over the rollout batch into mini-batches, one per update.

    Call it once for each of the N_reuse passes: every call draws a new split from ``rng``.

    * ``keep_n_sgd``: D_R / D_T parts, whatever was rejected. Their sizes differ by at most one group. With fewer groups
      than parts there is one part per group, never an empty one.
    * ``keep_d_t``: parts of D_T groups, the last one possibly smaller. Rejection then lowers the number of updates, as
      in the released code.

    Args:
        num_groups: Number of surviving groups.
        num_parts: D_R / D_T.
        prompts_per_part: D_T.
        mode: Which of the two stays as configured.
        rng: Random generator of the split.

    Returns:
        Group indices of each part, ascending within a part. Empty if no group survived.
    """
    if num_parts < 1 or prompts_per_part < 1:
        raise ValueError(f"mini-batches need num_parts and prompts_per_part >= 1, got {num_parts}, {prompts_per_part}")
    if num_groups == 0:
        return []
    # Groups are never split, because D_T counts prompts. Which groups share an update is random.
    order = rng.permutation(num_groups)
    if mode == "keep_n_sgd":
        parts = np.array_split(order, min(num_parts, num_groups))
    elif mode == "keep_d_t":
        parts = np.split(order, range(prompts_per_part, num_groups, prompts_per_part))
    else:
        raise ValueError(f"minibatch must be keep_n_sgd or keep_d_t, got {mode!r}")
    return [sorted(int(i) for i in part) for part in parts]
