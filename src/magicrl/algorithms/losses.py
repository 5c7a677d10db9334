"""Loss methods: surrogates, reducers, rows and sampler corrections. `loss_terms.py` computes the loss from a row.

Arrays are 1-D over the response tokens of a micro-batch, and ``sample_index`` is the response of each token.

A recipe names a row (``algorithm.loss``), a reducer and a correction through `magicrl.registry`: those of this module
by name, a custom one as ``file.py:name``. Rows and functions declare which extra inputs they need, so that no unused
forward pass is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from magicrl.records import TrainBatch
from magicrl.registry import BUILTINS, resolve

MAX_LOG_RATIO = 20.0
"""Bound of the log ratio of two policies. e^20 is not the ratio of two versions of one policy, and exp must not
overflow. It applies to rho, to the weights of m2po (those of tis and mis have a cap) and, upwards, to the ratio of k3.
"""

Need: TypeAlias = Literal["old_logprobs", "ref_logprobs", "entropy"]
"""Inputs that cost extra compute and must be declared: the learner's log-probs from before the first update (the
denominator of rho, free with one update per step), the reference model's log-probs, and the entropy with gradient. All
other fields of `SurrogateInputs` are always present."""
NEEDS: tuple[Need, ...] = ("old_logprobs", "ref_logprobs", "entropy")

F = TypeVar("F", bound=Callable[..., Any])


def needs(*what: Need) -> Callable[[F], F]:
    """Declare the inputs that a correction or a row's statistics read: ``@needs("old_logprobs")``."""

    def declared(function: F) -> F:
        function.__dict__["needs"] = what
        return function

    return declared


def needs_of(declared: object) -> tuple[Need, ...]:
    """Return the inputs that a row or a function declared, () if none.

    Raises:
        ValueError: It declares an unknown input.
    """
    found = tuple(getattr(declared, "needs", ()))
    unknown = [need for need in found if need not in NEEDS]
    if unknown:
        raise ValueError(f"needs has unknown inputs {', '.join(map(repr, unknown))}; known: {', '.join(NEEDS)}")
    return found


# --- inputs and outputs of a method -----------------------------------------------------------------------------


class SurrogateInputs(NamedTuple):
    """Inputs of a surrogate: ``[tokens]`` tensors, 0 at tokens without loss, and numbers of the whole update.

    Attributes:
        ratio: rho, or the geometric mean over the response (``ratio_level``), with gradient.
        logprobs: Log-probs of the policy in training, with gradient.
        advantages: Advantage of the token's response.
        clip_low: eps_low.
        clip_high: eps_high.
        old_logprobs: The learner's log-probs from before the step's first update. With one update per step: its own,
            detached.
        sampler_logprobs: Log-probs that the engine reported. ``old_logprobs`` without an engine.
        ref_logprobs: Log-probs of the frozen reference model. None without one (declare it with ``needs``).
        entropy: Entropy of the full distribution, with gradient if alpha is not 0 or the row needs it.
        loss_mask: bool, tokens that take part in the loss.
        policy_mask: bool, tokens that take part in the policy term. None means all.
        sample_index: Row of the token's response in this micro-batch.
        group_index: Its group. A group may be spread over micro-batches.
        policy_version: Version of the weights that sampled the token.
        coefficients: Further coefficients of the controller, by name.
        statistics: Result of the row's ``statistics`` for the whole mini-batch, the same on every rank.
    """

    ratio: Tensor
    logprobs: Tensor
    advantages: Tensor
    clip_low: float
    clip_high: float
    old_logprobs: Tensor
    sampler_logprobs: Tensor
    ref_logprobs: Tensor | None
    entropy: Tensor | None
    loss_mask: Tensor
    policy_mask: Tensor | None
    sample_index: Tensor
    group_index: Tensor | None
    policy_version: Tensor | None
    coefficients: Mapping[str, float]
    statistics: Mapping[str, Any]


class Surrogate(NamedTuple):
    """Objective per token (to be maximised), and the tokens where the clip acted, ``[tokens]`` each.

    The clip acts on a token whose ratio is outside its bounds on the side where the row limits it. Some rows then
    remove the token's gradient, others bound its weight (``cispo``, ``ce_gppo``).
    """

    values: Tensor
    clipped: Tensor


class ReducerInputs(NamedTuple):
    """Responses of a whole mini-batch, on all workers.

    Attributes:
        lengths_N: Loss tokens of each response.
        group_index_N: Group of each response, any integers.
        num_loss_tokens: T_k.
        max_tokens: Response-length limit T, if known.
    """

    lengths_N: Tensor
    group_index_N: Tensor
    num_loss_tokens: int
    max_tokens: int | None


Reducer: TypeAlias = Callable[[ReducerInputs], Tensor]
"""Function that returns the weight of every loss token of each response, ``[N]`` float64."""


class CorrectionInputs(NamedTuple):
    """Inputs of a correction, ``[tokens]`` without gradient. ``cap`` is the recipe's ``correction_cap``."""

    old_logprobs: Tensor
    sampler_logprobs: Tensor
    cap: float
    policy_mask: Tensor | None = None
    loss_mask: Tensor | None = None
    sample_index: Tensor | None = None
    group_index: Tensor | None = None
    policy_version: Tensor | None = None


# --- surrogates ----------------------------------------------------------------------------------------------


def nothing_clipped(s: SurrogateInputs) -> Tensor:
    """Return all False, ``[tokens]``."""
    return torch.zeros_like(s.ratio, dtype=torch.bool)


def past_the_clip(s: SurrogateInputs) -> tuple[Tensor, Tensor]:
    """Return where rho moved in the direction of the advantage past the clip: below 1 - eps_low and above 1 + eps_high,
    ``[tokens]``.
    """
    return (s.advantages < 0) & (s.ratio < 1 - s.clip_low), (s.advantages > 0) & (s.ratio > 1 + s.clip_high)


def clipped_ratio(s: SurrogateInputs) -> Surrogate:
    """Return min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A). Clipped tokens have no gradient."""
    # The minimum makes the objective a lower bound: a token that moved the wrong way keeps the gradient that leads it
    # back.
    bounded = s.ratio.clamp(1 - s.clip_low, 1 + s.clip_high)
    values = torch.minimum(s.ratio * s.advantages, bounded * s.advantages)
    too_low, too_high = past_the_clip(s)
    return Surrogate(values, too_low | too_high)


def clipped_weight(s: SurrogateInputs) -> Surrogate:
    """Return stop_gradient(clip(rho)) * A * log pi (CISPO). Every token keeps a gradient, and its weight is bounded."""
    # A token whose ratio is out of bounds still learns, through log pi.
    weight = s.ratio.detach().clamp(1 - s.clip_low, 1 + s.clip_high)
    return Surrogate(weight * s.advantages * s.logprobs, weight != s.ratio.detach())


def soft_gate(s: SurrogateInputs, *, tau_positive: float, tau_negative: float) -> Surrogate:
    """Return 4 / tau * sigmoid(tau (rho - 1)) * A with tau by the sign of A (SAPO). The gradient fades instead of being
    clipped.

    Its derivative by rho is 4 sigmoid (1 - sigmoid) A, which is A at rho = 1 for any tau.
    """
    tau = torch.full_like(s.advantages, tau_negative).masked_fill(s.advantages > 0, tau_positive)
    return Surrogate(4 / tau * torch.sigmoid(tau * (s.ratio - 1)) * s.advantages, nothing_clipped(s))


def gradient_preserving_clip(s: SurrogateInputs, *, beta_low: float, beta_high: float) -> Surrogate:
    """Return rho A, and beyond the clip beta (1 -+ eps) / stop_gradient(rho) * rho A (CE-GPPO, Eq. 8).

    A token without a gradient under PPO's clip gets the gradient at the bound times beta: ``beta_low`` where A < 0 and
    rho is too low, ``beta_high`` where A > 0 and rho is too high.
    """
    too_low, too_high = past_the_clip(s)
    bound = torch.full_like(s.ratio, beta_high * (1 + s.clip_high)).masked_fill(too_low, beta_low * (1 - s.clip_low))
    kept = torch.where(too_low | too_high, bound / s.ratio.detach() * s.ratio, s.ratio)
    return Surrogate(kept * s.advantages, too_low | too_high)


def flipped_ratio(s: SurrogateInputs, *, dual_clip: float) -> Surrogate:
    """Return rho A where A < 0, and A with weight 1 / rho, at most ``dual_clip``, where A > 0. 0 beyond the clip
    (ASPO).

    The flipped weight is rho / stop_gradient(rho^2), so that its gradient is that of log pi times 1 / rho: a good token
    that became less likely is raised more, not less. ``dual_clip`` bounds the weight and does not stop the gradient.
    """
    too_low, too_high = past_the_clip(s)
    rho = s.ratio.detach()
    weight = torch.where(s.advantages > 0, (1 / rho).clamp(max=dual_clip), rho)
    values = weight * (s.ratio / rho) * s.advantages
    return Surrogate(values.masked_fill(too_low | too_high, 0.0), too_low | too_high)


Divergence: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Divergence of two policies at each token, from its log-probs under the learner and under the sampler, ``[tokens]``.
"""


def binary_tv(logprobs: Tensor, sampler_logprobs: Tensor) -> Tensor:
    """Return |pi - mu|: the total variation of "this token or another" under the two policies (DPPO's Binary-TV)."""
    return (logprobs.exp() - sampler_logprobs.exp()).abs()


def binary_kl(logprobs: Tensor, sampler_logprobs: Tensor) -> Tensor:
    """Return mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)), in nats: KL(mu || pi) of the same two (DPPO's
    Binary-KL).
    """
    # 1 - p without cancellation. A token of probability 1 leaves 0 for the others, and 0 log 0 is 0.
    tiny = torch.finfo(logprobs.dtype).tiny
    others, sampler_others = ((-torch.expm1(values)).clamp(min=tiny) for values in (logprobs, sampler_logprobs))
    return sampler_logprobs.exp() * (sampler_logprobs - logprobs) + sampler_others * (sampler_others / others).log()


def divergence_mask(s: SurrogateInputs, *, divergence: Divergence) -> Surrogate:
    """Return rho A, and 0 for a token that moves away from the sampler's policy beyond a threshold (DPPO, Eq. 11 and
    12).

    Masked tokens: A > 0, more likely than when sampled, and a divergence above ``clip_high``; or A < 0, less likely,
    and a divergence above ``clip_low``. The paper's ratio is relative to the sampler too. With ``correction = "tis"``
    rho times the correction is that ratio.
    """
    now, then = s.logprobs.detach(), s.sampler_logprobs
    distance = divergence(now, then)
    too_high = (s.advantages > 0) & (now > then) & (distance > s.clip_high)
    too_low = (s.advantages < 0) & (now < then) & (distance > s.clip_low)
    return Surrogate((s.ratio * s.advantages).masked_fill(too_low | too_high, 0.0), too_low | too_high)


def unclipped_ratio(s: SurrogateInputs) -> Surrogate:
    """Return rho * A. With rho = 1 its gradient is the policy gradient, that of A * log pi.

    Off-policy this is the importance-weighted objective without a clip, and its gradient is rho times that of A * log
    pi.
    """
    return Surrogate(s.ratio * s.advantages, nothing_clipped(s))


def log_likelihood(s: SurrogateInputs) -> Surrogate:
    """Return log pi: SFT is the row without ratio, clip or advantage."""
    return Surrogate(s.logprobs, nothing_clipped(s))


# --- reducers: weights of the tokens of each response -----------------------------------------------------------
# Weights are computed for a whole mini-batch, before it is split into micro-batches or over workers. The loss is then a
# sum over tokens of weight times term, so it cannot depend on packing, order or the number of workers.


def global_tokens(r: ReducerInputs) -> Tensor:
    """Return 1/T_k: the same weight for all tokens."""
    return torch.full_like(r.lengths_N, 1.0 / r.num_loss_tokens)


# With all reducers except `global_tokens` each group has the same weight, however many of its responses were judged.
# With `global_tokens` the weight of a group is its number of tokens.


def constant(r: ReducerInputs) -> Tensor:
    """Return the weights of sum over a response's tokens / T, mean over its group, mean over groups: T instead of the
    lengths (Dr. GRPO).
    """
    if r.max_tokens is None or r.max_tokens < 1:
        raise ValueError(f"the reducer 'constant' needs max_tokens, the response-length limit; got {r.max_tokens}")
    return sequence_sum(r) / r.max_tokens


def sequence_sum(r: ReducerInputs) -> Tensor:
    """Return the weights of the sum over a response's tokens, mean over its group, mean over groups."""
    groups, index, members = torch.unique(r.group_index_N, return_inverse=True, return_counts=True)
    return 1.0 / (len(groups) * members[index].to(torch.float64))


def response_mean(r: ReducerInputs) -> Tensor:
    """Return the weights of the mean over a response's tokens, over its group, and over groups."""
    return torch.where(r.lengths_N > 0, sequence_sum(r) / r.lengths_N.clamp(min=1), torch.zeros_like(r.lengths_N))


def prompt_mean(r: ReducerInputs) -> Tensor:
    """Return the weights of the mean over all tokens of a group, then over groups: ScaleRL's prompt average (arXiv
    2510.13786).
    """
    groups, index = torch.unique(r.group_index_N, return_inverse=True)
    tokens = r.lengths_N.new_zeros(len(groups)).index_add(0, index, r.lengths_N)
    return 1.0 / (len(groups) * tokens[index].clamp(min=1))


# --- the table of methods --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class LossRow:
    """Definition of one method.

    Attributes:
        surrogate: The objective per token.
        reducer: Weights of the tokens, unless the recipe names another reducer.
        ratio_level: ``token``, or ``sequence`` for the geometric mean of a response's ratios.
        clip: The method's usual (eps_low, eps_high), or its thresholds. None if nothing is clipped. Recipes state their
            own.
        normalise_std: Whether advantages are divided by the group's standard deviation.
        needs: Inputs that cost extra compute and that the surrogate reads.
        statistics: Function of the whole mini-batch, called once before the update. Every call of the surrogate gets
            its numbers or arrays by name. With ``@needs("old_logprobs")`` its samples carry these.
    """

    surrogate: Callable[[SurrogateInputs], Surrogate]
    reducer: Reducer = global_tokens
    ratio_level: Literal["token", "sequence"] = "token"
    clip: tuple[float, float] | None = None
    normalise_std: bool = True
    needs: tuple[Need, ...] = ("old_logprobs",)
    statistics: Callable[[TrainBatch], Mapping[str, Any]] | None = None


# MAGIC, Eq. 3.1 of the report: the clipped ratio, averaged over all tokens of the mini-batch.
MAGIC = LossRow(surrogate=clipped_ratio, reducer=global_tokens, clip=(0.2, 0.2))
# DAPO (Yu et al. 2025): a higher upper clip.
DAPO = LossRow(surrogate=clipped_ratio, reducer=global_tokens, clip=(0.2, 0.28))
# Dr. GRPO (Liu et al. 2025): a constant denominator, and advantages without division by the standard deviation.
DR_GRPO = LossRow(surrogate=clipped_ratio, reducer=constant, clip=(0.2, 0.2), normalise_std=False)
# GRPO (Shao et al. 2024): mean over each response first.
GRPO = LossRow(surrogate=clipped_ratio, reducer=response_mean, clip=(0.2, 0.2))
# GSPO (Zheng et al. 2025): the ratio of the whole response.
GSPO = LossRow(surrogate=clipped_ratio, reducer=response_mean, ratio_level="sequence", clip=(3e-4, 4e-4))
# PPO (Schulman et al. 2017): sum over each response.
PPO = LossRow(surrogate=clipped_ratio, reducer=sequence_sum, clip=(0.2, 0.2))
# rho * A: the policy gradient with one update per step, the unclipped importance-weighted objective with several.
PG = LossRow(surrogate=unclipped_ratio, reducer=sequence_sum)
# CISPO (MiniMax 2025): the clip bounds a token's weight and never its gradient. 1 - eps_low = 0 is no lower bound,
# because rho is positive.
CISPO = LossRow(surrogate=clipped_weight, reducer=global_tokens, clip=(1.0, 4.0))
# Loss of ScaleRL (Khatri et al. 2025, arXiv 2510.13786): CISPO with a mean over each prompt first. The rest of that
# method are settings (docs/guides/custom-parts.md).
SCALERL = LossRow(surrogate=clipped_weight, reducer=prompt_mean, clip=(1.0, 4.0))
# SAPO (Gao et al. 2025, arXiv 2511.20347): a soft gate with the paper's temperatures, mean over responses.
SAPO = LossRow(surrogate=partial(soft_gate, tau_positive=1.0, tau_negative=1.05), reducer=response_mean)
# CE-GPPO (Su et al. 2025, arXiv 2509.20712, Eq. 8): clipped tokens keep a bounded gradient. The betas are the released
# ones.
CE_GPPO = LossRow(surrogate=partial(gradient_preserving_clip, beta_low=0.75, beta_high=1.0), clip=(0.2, 0.2))
# ASPO (Wang et al. 2025, arXiv 2510.06062): positive tokens have weight 1 / rho. The paper gives no bound of that
# weight, so this uses 3 as in dual-clip PPO (Ye et al. 2020, arXiv 1912.09729).
ASPO = LossRow(surrogate=partial(flipped_ratio, dual_clip=3.0), clip=(0.2, 0.2))
# DPPO (Qi et al. 2026, arXiv 2602.04879, Eq. 11 to 14): the clip pair are thresholds of a divergence from the sampler's
# policy. The values are those of public implementations.
DPPO = LossRow(surrogate=partial(divergence_mask, divergence=binary_tv), clip=(0.2, 0.2))
DPPO_KL = LossRow(surrogate=partial(divergence_mask, divergence=binary_kl), clip=(0.05, 0.05))
# SFT: the mean negative log-likelihood.
NLL = LossRow(surrogate=log_likelihood, reducer=global_tokens, needs=())

LOSSES: Mapping[str, LossRow] = MappingProxyType(
    {name: globals()[reference.rpartition(":")[2]] for name, reference in BUILTINS["loss"].items()}
)
"""Built-in rows by the names that recipes use."""


def loss_row(reference: str) -> LossRow:
    """Return the row that ``algorithm.loss`` names.

    Raises:
        ValueError: The name is unknown (the message lists the known ones), or does not name a row.
    """
    row = resolve("loss", reference)
    if not isinstance(row, LossRow):
        raise ValueError(
            f"loss {reference!r} is a {type(row).__name__}; it must be a magicrl.algorithms.losses.LossRow"
        )
    needs_of(row)
    needs_of(row.statistics)
    return row


def reducer_of(reference: str) -> Reducer:
    """Return the function that ``algorithm.reducer`` names. Raises as `loss_row`."""
    reducer = resolve("reducer", reference)
    if not callable(reducer):
        raise ValueError(f"reducer {reference!r} is a {type(reducer).__name__}; it must be a function of ReducerInputs")
    return cast(Reducer, reducer)


def response_weights(
    reducer: Reducer,
    lengths_N: Tensor,
    group_index_N: Tensor,
    *,
    num_loss_tokens: int,
    max_tokens: int | None = None,
) -> Tensor:
    """Return the weight of every loss token of each response of a mini-batch.

    Args:
        reducer: The reducer.
        lengths_N: Loss tokens of each response, for all responses of the mini-batch on all workers.
        group_index_N: Group of each response, any integers.
        num_loss_tokens: T_k. Must equal the sum of ``lengths_N``, which guards against passing one worker's share.
        max_tokens: T, the response-length limit. Required by ``constant``.

    Returns:
        ``[N]`` float64.

    Raises:
        ValueError: There are no loss tokens, or the weights are not ``[N]`` finite numbers.

    Example: lengths 3, 5, 4, 2 in two groups of two. ``global_tokens`` gives 1/14 each; ``response_mean`` 1/12, 1/20,
    1/16, 1/8; ``sequence_sum`` 1/4 each; ``constant`` with T = 8 1/32 each.
    """
    lengths = lengths_N.to(torch.float64)
    assert int(lengths.sum()) == num_loss_tokens, f"lengths sum to {int(lengths.sum())}, not to T_k = {num_loss_tokens}"
    if num_loss_tokens == 0:
        raise ValueError("a mini-batch without loss tokens has no loss; skip it")
    weights = reducer(ReducerInputs(lengths, group_index_N, num_loss_tokens, max_tokens)).to(torch.float64)
    if weights.shape != lengths.shape or not bool(weights.isfinite().all()):
        raise ValueError(f"a reducer must return {len(lengths)} finite weights, one per response; got {weights}")
    return weights


# --- sampler corrections ---------------------------------------------------------------------------------------
# The policy that sampled a token differs from the one that learns from it: two engines compute differently, and in
# asynchronous training the sampler's weights are older. The loss is decoupled: rho compares the policy in training with
# the *proximal* policy, the learner just before its update. These weights compare the proximal policy with the
# *behaviour* policy that sampled, per token (Hilton et al. 2021, arXiv 2110.00641; AReaL, arXiv 2505.24298).


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """Importance weights of the policy term, per token.

    Attributes:
        name: Name in error messages.
        weights: Function that returns the ``[tokens]`` factors of the policy term.
        batch_mask: Function that selects the loss tokens of a whole mini-batch that stay in the policy term. Its
            arguments are their log pi_old - log pi_sampler, their advantages (both ``[tokens]`` float64) and the
            recipe's ``second_moment``. None means that all tokens stay.
        needs: As in `LossRow`. The inputs of ``batch_mask`` are computed before the update in any case.
    """

    name: str
    weights: Callable[[CorrectionInputs], Tensor]
    batch_mask: Callable[[Tensor, Tensor, float], Tensor] | None = None
    needs: tuple[Need, ...] = ()


def uncorrected(c: CorrectionInputs) -> Tensor:
    """Return 1 everywhere."""
    return torch.ones_like(c.old_logprobs)


def truncated_weights(c: CorrectionInputs) -> Tensor:
    """Return pi_old / pi_sampler, at most ``cap``."""
    return (c.old_logprobs - c.sampler_logprobs).exp().clamp(max=c.cap)


def masked_weights(c: CorrectionInputs) -> Tensor:
    """Return pi_old / pi_sampler, 0 above ``cap``."""
    weights = (c.old_logprobs - c.sampler_logprobs).exp()
    return torch.where(weights > c.cap, torch.zeros_like(weights), weights)


def whole_weights(c: CorrectionInputs) -> Tensor:
    """Return pi_old / pi_sampler unchanged, after `second_moment_mask` has removed the worst tokens."""
    if c.policy_mask is None:
        raise ValueError("correction 'm2po' needs the mini-batch's second-moment mask (policy_mask)")
    return (c.old_logprobs - c.sampler_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def second_moment_mask(log_weights: Tensor, advantages: Tensor, threshold: float) -> Tensor:
    """Return which tokens M2PO keeps in the policy term (Zheng et al. 2025, arXiv 2510.01161, Algorithm 1).

    Only tokens whose ratio moved with the advantage can leave: A > 0 and ratio > 1, or A < 0 and ratio < 1, the two
    cases on which PPO's clip acts. Of these, the tokens with the largest (log ratio)^2 leave, as few as possible, until
    the mean of the others is at most ``threshold``. All other tokens stay and are not in the mean. A clip at 1 +- eps
    would remove rare tokens, from which stale data teaches most. In a square, positive and negative log ratios cannot
    cancel, as they would in an estimate of the KL.

    Args:
        log_weights: ``[tokens]`` log pi_old - log pi_sampler of every loss token of a mini-batch, in any order.
        advantages: ``[tokens]`` advantage of each token's response.
        threshold: tau_M2, > 0. The paper uses 0.04.

    Returns:
        ``[tokens]`` bool. Of equal squares the later ones in the given order leave first.

    Example: with positive advantages, log ratios 0.1, 0.3, 0.1 have squares of mean 0.0367, and all stay at 0.04. With
    0.5 instead of 0.3 (mean 0.09) that token leaves. With -0.5 all stay, because its ratio moved against its advantage.
    """
    log_weights, advantages = log_weights.detach().to(torch.float64), advantages.to(torch.float64)
    # NaN compares false, so a token without a ratio is a candidate, and its mean lets it leave.
    moved = ~(log_weights * advantages <= 0)
    rising, order = log_weights[moved].square().sort(stable=True)
    means = rising.cumsum(0) / torch.arange(1, len(rising) + 1, device=rising.device, dtype=torch.float64)
    below = torch.zeros(len(rising), dtype=torch.bool, device=rising.device)
    # Running means of a rising sequence rise, so those at or below the threshold are a prefix.
    below[order[means <= threshold]] = True
    kept = torch.ones(len(log_weights), dtype=torch.bool, device=log_weights.device)
    kept[moved] = below
    return kept


NONE = Correction(name="none", weights=uncorrected)
TIS = Correction(name="tis", weights=truncated_weights, needs=("old_logprobs",))
MIS = Correction(name="mis", weights=masked_weights, needs=("old_logprobs",))
M2PO = Correction(name="m2po", weights=whole_weights, batch_mask=second_moment_mask, needs=("old_logprobs",))


def correction_of(reference: str) -> Correction:
    """Return the correction that ``algorithm.correction`` names: a `Correction`, or one made from a function of
    `CorrectionInputs`.

    Raises:
        ValueError: As `loss_row`.
    """
    found = resolve("correction", reference)
    if isinstance(found, Correction):
        return found
    if not callable(found):
        raise ValueError(
            f"correction {reference!r} is a {type(found).__name__}; it must be a function of CorrectionInputs or a "
            "magicrl.algorithms.losses.Correction"
        )
    weights = cast("Callable[[CorrectionInputs], Tensor]", found)
    return Correction(name=reference, weights=weights, needs=needs_of(weights))


def correction_weights(correction: Correction, inputs: CorrectionInputs) -> Tensor:
    """Return the importance weights pi_old / pi_sampler of the policy term, ``[tokens]`` without gradient, 0 where
    ``policy_mask`` is False.

    They apply in synchronous mode too, where kernels and precision still differ.

    Raises:
        ValueError: ``m2po`` has no mask.
    """
    weights = correction.weights(inputs._replace(old_logprobs=inputs.old_logprobs.detach()))
    return weights if inputs.policy_mask is None else torch.where(inputs.policy_mask, weights, 0.0)
