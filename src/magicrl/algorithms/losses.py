"""The table of methods: surrogates, reducers, rows, sampler corrections. What is done with a row: `loss_terms.py`.

Arrays are 1-D over the response tokens of a micro-batch, and ``sample_index`` says which response a token belongs to.

A recipe names a row (``algorithm.loss``), a reducer and a correction by `magicrl.registry`: those of this page by their
names, a user's own as ``file.py:name``. A row, and any function of this page's kinds, declares what it needs, so that a
pass over the samples that nobody needs is not made.
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
"""Log ratios of two policies are held within +-20: e^20 is no ratio of two versions of one policy, and exp must not
overflow. It holds for rho, for m2po's weights (those of tis and mis have a cap) and, upwards, for k3's ratio."""

Need: TypeAlias = Literal["old_logprobs", "ref_logprobs", "entropy"]
"""What is not there for nothing: the learner's log-probs from before the step's first update (rho's denominator; with
one update a step they are its own and cost nothing), the reference's log-probs, and the entropy's gradient. Everything
else that `SurrogateInputs` lists is always there."""
NEEDS: tuple[Need, ...] = ("old_logprobs", "ref_logprobs", "entropy")

F = TypeVar("F", bound=Callable[..., Any])


def needs(*what: Need) -> Callable[[F], F]:
    """Declare what a correction or a row's statistics read: ``@needs("old_logprobs")`` above the function."""

    def declared(function: F) -> F:
        function.__dict__["needs"] = what
        return function

    return declared


def needs_of(brought: object) -> tuple[Need, ...]:
    """What a row or a function declared; nothing if it declared nothing.

    Raises:
        ValueError: it declares something that there is not.
    """
    found = tuple(getattr(brought, "needs", ()))
    unknown = [need for need in found if need not in NEEDS]
    if unknown:
        raise ValueError(f"needs {', '.join(map(repr, unknown))}, which there is not; known: {', '.join(NEEDS)}")
    return found


# --- what a method is given, and what it gives ---------------------------------------------------------------


class SurrogateInputs(NamedTuple):
    """What a surrogate may read: ``[tokens]`` tensors, 0 at tokens without loss, and numbers of the whole update.

    Attributes:
        ratio: rho, or its response's geometric mean (``ratio_level``); with gradient.
        logprobs: policy in training, with gradient.
        advantages: of the token's response.
        clip_low: eps_low.
        clip_high: eps_high.
        old_logprobs: the learner's from before the step's first update; its own, detached, with one update a step.
        sampler_logprobs: what the engine reported; ``old_logprobs`` where there was no engine.
        ref_logprobs: the frozen reference's; None without one (``needs`` brings it).
        entropy: of the whole distribution; with gradient if alpha is not 0 or the row needs it.
        loss_mask: bool, which tokens have a part in the loss.
        policy_mask: bool, which tokens have a part in the policy term; None: all.
        sample_index: row of the token's response in this micro-batch.
        group_index: its group; a group may be spread over micro-batches.
        policy_version: version of the weights that sampled the token.
        coefficients: the controller's further coefficients, by name.
        statistics: what the row's ``statistics`` gave for the whole mini-batch, the same on every rank.
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
    """Per-token objective (to be maximised) and where the clip acted, both ``[tokens]``."""

    values: Tensor
    clipped: Tensor


class ReducerInputs(NamedTuple):
    """The responses of a whole mini-batch, on all workers: ``lengths_N`` in loss tokens, ``group_index_N`` any
    integers, ``num_loss_tokens`` T_k, ``max_tokens`` the response-length limit T if known."""

    lengths_N: Tensor
    group_index_N: Tensor
    num_loss_tokens: int
    max_tokens: int | None


Reducer: TypeAlias = Callable[[ReducerInputs], Tensor]
"""Gives the weight of every loss token of each response, ``[N]`` float64."""


class CorrectionInputs(NamedTuple):
    """What a correction may read, ``[tokens]`` without gradient; ``cap`` is the recipe's ``correction_cap``."""

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
    """All False, ``[tokens]``."""
    return torch.zeros_like(s.ratio, dtype=torch.bool)


def past_the_clip(s: SurrogateInputs) -> tuple[Tensor, Tensor]:
    """Where rho moved with the advantage and beyond the clip: below 1 - eps_low, above 1 + eps_high, ``[tokens]``."""
    return (s.advantages < 0) & (s.ratio < 1 - s.clip_low), (s.advantages > 0) & (s.ratio > 1 + s.clip_high)


def clipped_ratio(s: SurrogateInputs) -> Surrogate:
    """min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A); clipped = the tokens whose gradient that zeroes."""
    # By the minimum the clip only takes from the objective: a token that moved the wrong way keeps the gradient that
    # leads it back.
    bounded = s.ratio.clamp(1 - s.clip_low, 1 + s.clip_high)
    values = torch.minimum(s.ratio * s.advantages, bounded * s.advantages)
    too_low, too_high = past_the_clip(s)
    return Surrogate(values, too_low | too_high)


def clipped_weight(s: SurrogateInputs) -> Surrogate:
    """stop_gradient(clip(rho)) * A * log pi (CISPO): every token keeps a gradient, its weight is bounded."""
    # a token whose ratio left the bounds still learns, through log pi
    weight = s.ratio.detach().clamp(1 - s.clip_low, 1 + s.clip_high)
    return Surrogate(weight * s.advantages * s.logprobs, weight != s.ratio.detach())


def soft_gate(s: SurrogateInputs, *, tau_positive: float, tau_negative: float) -> Surrogate:
    """4 / tau * sigmoid(tau (rho - 1)) * A, tau by the sign of A (SAPO): in place of a clip the gradient fades.

    Its derivative by rho is 4 sigmoid (1 - sigmoid) A, 1 * A at rho = 1 whatever tau is.
    """
    tau = torch.full_like(s.advantages, tau_negative).masked_fill(s.advantages > 0, tau_positive)
    return Surrogate(4 / tau * torch.sigmoid(tau * (s.ratio - 1)) * s.advantages, nothing_clipped(s))


def gradient_preserving_clip(s: SurrogateInputs, *, beta_low: float, beta_high: float) -> Surrogate:
    """rho A, and beyond the clip beta (1 -+ eps) / stop_gradient(rho) * rho A (CE-GPPO, Eq. 8).

    A token that PPO's clip gives no gradient keeps that of the clip's bound times a beta: ``beta_low`` where A < 0 and
    rho is too low, ``beta_high`` where A > 0 and rho is too high.
    """
    too_low, too_high = past_the_clip(s)
    bound = torch.full_like(s.ratio, beta_high * (1 + s.clip_high)).masked_fill(too_low, beta_low * (1 - s.clip_low))
    kept = torch.where(too_low | too_high, bound / s.ratio.detach() * s.ratio, s.ratio)
    return Surrogate(kept * s.advantages, too_low | too_high)


def flipped_ratio(s: SurrogateInputs, *, dual_clip: float) -> Surrogate:
    """rho A where A < 0; where A > 0 the weight is 1 / rho, at most ``dual_clip``; 0 beyond the clip (ASPO).

    The flipped weight is rho / stop_gradient(rho^2), so that its gradient is that of log pi times 1 / rho: a good token
    that fell behind is raised more, not less. ``dual_clip`` bounds the weight and not the gradient's flow.
    """
    too_low, too_high = past_the_clip(s)
    rho = s.ratio.detach()
    weight = torch.where(s.advantages > 0, (1 / rho).clamp(max=dual_clip), rho)
    values = weight * (s.ratio / rho) * s.advantages
    return Surrogate(values.masked_fill(too_low | too_high, 0.0), too_low | too_high)


Divergence: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Of two policies at each token, from its log-probs under the learner and under the sampler, ``[tokens]``."""


def binary_tv(logprobs: Tensor, sampler_logprobs: Tensor) -> Tensor:
    """|pi - mu|: the total variation between "this token or another" under the two (DPPO's Binary-TV)."""
    return (logprobs.exp() - sampler_logprobs.exp()).abs()


def binary_kl(logprobs: Tensor, sampler_logprobs: Tensor) -> Tensor:
    """mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)), in nats: KL(mu || pi) of the same two (DPPO's Binary-KL)."""
    # 1 - p without its cancellation; a token of probability 1 leaves the others nothing, and 0 log 0 is 0
    tiny = torch.finfo(logprobs.dtype).tiny
    others, sampler_others = ((-torch.expm1(values)).clamp(min=tiny) for values in (logprobs, sampler_logprobs))
    return sampler_logprobs.exp() * (sampler_logprobs - logprobs) + sampler_others * (sampler_others / others).log()


def divergence_mask(s: SurrogateInputs, *, divergence: Divergence) -> Surrogate:
    """rho A, 0 where a token goes further away from the sampler's policy than a threshold (DPPO, Eq. 11 and 12).

    Masked: A > 0, more likely than it was sampled, and a divergence above ``clip_high``; A < 0, less likely, above
    ``clip_low``. The paper's ratio is against the sampler too: with ``correction = "tis"`` rho times the correction is.
    """
    now, then = s.logprobs.detach(), s.sampler_logprobs
    distance = divergence(now, then)
    too_high = (s.advantages > 0) & (now > then) & (distance > s.clip_high)
    too_low = (s.advantages < 0) & (now < then) & (distance > s.clip_low)
    return Surrogate((s.ratio * s.advantages).masked_fill(too_low | too_high, 0.0), too_low | too_high)


def unclipped_ratio(s: SurrogateInputs) -> Surrogate:
    """rho * A. With rho = 1 its gradient is the policy gradient, that of A * log pi.

    Off-policy it is the importance-weighted objective without a clip, and its gradient is rho times that of A * log pi.
    """
    return Surrogate(s.ratio * s.advantages, nothing_clipped(s))


def log_likelihood(s: SurrogateInputs) -> Surrogate:
    """log pi: supervised training is the row without ratio, clip or advantage."""
    return Surrogate(s.logprobs, nothing_clipped(s))


# --- reducers: how much each response's tokens weigh ----------------------------------------------------------
# The weights come from a whole mini-batch, before it is cut into micro-batches or spread over workers. The loss is
# then a plain sum over tokens of weight times term, so it cannot depend on packing, order or the number of workers.


def global_tokens(r: ReducerInputs) -> Tensor:
    """1/T_k: all tokens alike."""
    return torch.full_like(r.lengths_N, 1.0 / r.num_loss_tokens)


# One rule holds for all reducers but `global_tokens`: each group has the same weight, however many of its responses
# were judged. `global_tokens` gives each token the same weight, so that a group's weight is its number of tokens.


def constant(r: ReducerInputs) -> Tensor:
    """Sum over a response's tokens / T, mean over its group, then over groups: T in place of the lengths (Dr. GRPO)."""
    if r.max_tokens is None or r.max_tokens < 1:
        raise ValueError(f"the reducer 'constant' needs max_tokens, the response-length limit; got {r.max_tokens}")
    return sequence_sum(r) / r.max_tokens


def sequence_sum(r: ReducerInputs) -> Tensor:
    """Sum over a response's tokens, mean over its group, then over groups."""
    groups, index, members = torch.unique(r.group_index_N, return_inverse=True, return_counts=True)
    return 1.0 / (len(groups) * members[index].to(torch.float64))


def response_mean(r: ReducerInputs) -> Tensor:
    """Mean over a response's tokens, then over its group, then over groups."""
    return torch.where(r.lengths_N > 0, sequence_sum(r) / r.lengths_N.clamp(min=1), torch.zeros_like(r.lengths_N))


def prompt_mean(r: ReducerInputs) -> Tensor:
    """Mean over all tokens of a group, then over groups: ScaleRL's prompt average (arXiv 2510.13786)."""
    groups, index = torch.unique(r.group_index_N, return_inverse=True)
    tokens = r.lengths_N.new_zeros(len(groups)).index_add(0, index, r.lengths_N)
    return 1.0 / (len(groups) * tokens[index].clamp(min=1))


# --- the table of methods --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class LossRow:
    """One method.

    Attributes:
        surrogate: the per-token objective.
        reducer: how tokens weigh, unless the recipe names another.
        ratio_level: ``token``, or ``sequence`` for the geometric mean of a response's ratios.
        clip: the method's usual (eps_low, eps_high); None where nothing is clipped. A recipe states its own.
        normalise_std: whether its advantages are divided by the group's standard deviation.
        needs: what the surrogate reads of what costs something.
        statistics: of the whole mini-batch, taken once before the update and given to the surrogate everywhere:
            numbers or arrays by name. With ``@needs("old_logprobs")`` its samples carry these.
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
# Dr. GRPO (Liu et al. 2025): a constant denominator, and advantages that are not divided by the deviation.
DR_GRPO = LossRow(surrogate=clipped_ratio, reducer=constant, clip=(0.2, 0.2), normalise_std=False)
# GRPO (Shao et al. 2024): averaged over each response first.
GRPO = LossRow(surrogate=clipped_ratio, reducer=response_mean, clip=(0.2, 0.2))
# GSPO (Zheng et al. 2025): the ratio is the response's.
GSPO = LossRow(surrogate=clipped_ratio, reducer=response_mean, ratio_level="sequence", clip=(3e-4, 4e-4))
# PPO (Schulman et al. 2017): summed over each response.
PPO = LossRow(surrogate=clipped_ratio, reducer=sequence_sum, clip=(0.2, 0.2))
# rho * A: the policy gradient with one update per step, the unclipped importance-weighted objective with several.
PG = LossRow(surrogate=unclipped_ratio, reducer=sequence_sum)
# CISPO (MiniMax 2025): the clip bounds a token's weight and never its gradient.
# 1 - eps_low = 0 is no lower bound, as rho is positive
CISPO = LossRow(surrogate=clipped_weight, reducer=global_tokens, clip=(1.0, 4.0))
# ScaleRL's loss (Khatri et al. 2025, arXiv 2510.13786): CISPO, each prompt's tokens averaged first. The rest of that
# recipe are settings (docs/losses.md).
SCALERL = LossRow(surrogate=clipped_weight, reducer=prompt_mean, clip=(1.0, 4.0))
# SAPO (Gao et al. 2025, arXiv 2511.20347): a soft gate with the paper's temperatures, averaged over responses.
SAPO = LossRow(surrogate=partial(soft_gate, tau_positive=1.0, tau_negative=1.05), reducer=response_mean)
# CE-GPPO (Su et al. 2025, arXiv 2509.20712, Eq. 8): clipped tokens keep a bounded gradient; the released betas.
CE_GPPO = LossRow(surrogate=partial(gradient_preserving_clip, beta_low=0.75, beta_high=1.0), clip=(0.2, 0.2))
# ASPO (Wang et al. 2025, arXiv 2510.06062): positive tokens weigh 1 / rho. For want of a published bound of that weight
# it is dual-clip PPO's, 3 (Ye et al. 2020, arXiv 1912.09729).
ASPO = LossRow(surrogate=partial(flipped_ratio, dual_clip=3.0), clip=(0.2, 0.2))
# DPPO (Qi et al. 2026, arXiv 2602.04879, Eq. 11 to 14): the clip pair are thresholds of a divergence from the sampler's
# policy; the values are those of public implementations.
DPPO = LossRow(surrogate=partial(divergence_mask, divergence=binary_tv), clip=(0.2, 0.2))
DPPO_KL = LossRow(surrogate=partial(divergence_mask, divergence=binary_kl), clip=(0.05, 0.05))
# Supervised training: the mean negative log-likelihood.
NLL = LossRow(surrogate=log_likelihood, reducer=global_tokens, needs=())

LOSSES: Mapping[str, LossRow] = MappingProxyType(
    {name: globals()[reference.rpartition(":")[2]] for name, reference in BUILTINS["loss"].items()}
)
"""The rows above by the names that recipes give them."""


def loss_row(reference: str) -> LossRow:
    """The row that ``algorithm.loss`` names.

    Raises:
        ValueError: an unknown name (with the known ones), or what it names is no row.
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
    """The function that ``algorithm.reducer`` names. Raises as `loss_row`."""
    reducer = resolve("reducer", reference)
    if not callable(reducer):
        raise ValueError(f"reducer {reference!r} is a {type(reducer).__name__}; it must be a function of ReducerInputs")
    return cast(Reducer, reducer)


def response_weights(
    reducer: Reducer | str,
    lengths_N: Tensor,
    group_index_N: Tensor,
    *,
    num_loss_tokens: int,
    max_tokens: int | None = None,
) -> Tensor:
    """The weight of every loss token of each response of a mini-batch.

    Args:
        reducer: a function, or a reference to one.
        lengths_N: loss tokens of each response, all responses of the mini-batch on all workers.
        group_index_N: group of each; any integers.
        num_loss_tokens: T_k; must be the sum of ``lengths_N``, which guards against passing one worker's share.
        max_tokens: T, the response-length limit; needed by ``constant``.

    Returns:
        ``[N]`` float64.

    Raises:
        ValueError: unknown reducer, no loss tokens at all, or weights that are not ``[N]`` finite numbers.

    Example: lengths 3, 5, 4, 2 in two groups of two: ``global_tokens`` 1/14 each; ``response_mean`` 1/12,
    1/20, 1/16, 1/8; ``sequence_sum`` 1/4 each; ``constant`` with T = 8 1/32 each.
    """
    function = reducer_of(reducer) if isinstance(reducer, str) else reducer
    lengths = lengths_N.to(torch.float64)
    assert int(lengths.sum()) == num_loss_tokens, f"lengths sum to {int(lengths.sum())}, not to T_k = {num_loss_tokens}"
    if num_loss_tokens == 0:
        raise ValueError("a mini-batch without loss tokens has no loss; skip it")
    weights = function(ReducerInputs(lengths, group_index_N, num_loss_tokens, max_tokens)).to(torch.float64)
    if weights.shape != lengths.shape or not bool(weights.isfinite().all()):
        raise ValueError(f"a reducer must give {len(lengths)} finite weights, one a response; got {weights}")
    return weights


# --- sampler corrections ---------------------------------------------------------------------------------------
# The policy that sampled a token is not exactly the one that learns from it: two engines compute in two ways, and in
# asynchronous training the sampler's weights are older. The loss is decoupled: rho compares the policy in training with
# the *proximal* policy, the learner just before its update, and these weights compare the proximal with the *behaviour*
# policy that sampled, token by token (Hilton et al. 2021, arXiv 2110.00641; AReaL, arXiv 2505.24298).


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """Token-level importance weights of the policy term.

    Attributes:
        name: for errors.
        weights: ``[tokens]`` factors on the policy term.
        batch_mask: Function that selects the loss tokens of a whole mini-batch that stay in the policy term. Its
            arguments are their log pi_old - log pi_sampler, their advantages (both ``[tokens]`` float64) and the
            recipe's ``second_moment``. None: all tokens stay.
        needs: as a row's. What ``batch_mask`` reads is taken before the update anyway.
    """

    name: str
    weights: Callable[[CorrectionInputs], Tensor]
    batch_mask: Callable[[Tensor, Tensor, float], Tensor] | None = None
    needs: tuple[Need, ...] = ()


def uncorrected(c: CorrectionInputs) -> Tensor:
    """1 everywhere."""
    return torch.ones_like(c.old_logprobs)


def truncated_weights(c: CorrectionInputs) -> Tensor:
    """pi_old / pi_sampler, at most ``cap``."""
    return (c.old_logprobs - c.sampler_logprobs).exp().clamp(max=c.cap)


def masked_weights(c: CorrectionInputs) -> Tensor:
    """pi_old / pi_sampler, 0 above ``cap``."""
    weights = (c.old_logprobs - c.sampler_logprobs).exp()
    return torch.where(weights > c.cap, torch.zeros_like(weights), weights)


def whole_weights(c: CorrectionInputs) -> Tensor:
    """pi_old / pi_sampler as they are, where `second_moment_mask` left the worst out."""
    if c.policy_mask is None:
        raise ValueError("correction 'm2po' needs the mini-batch's second-moment mask (policy_mask)")
    return (c.old_logprobs - c.sampler_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def second_moment_mask(log_weights: Tensor, advantages: Tensor, threshold: float) -> Tensor:
    """Return which tokens M2PO keeps in the policy term (Zheng et al. 2025, arXiv 2510.01161, Algorithm 1).

    Only tokens whose ratio moved with the advantage can leave: A > 0 and ratio > 1, or A < 0 and ratio < 1, the two
    cases that PPO's clip acts on. Of these, those with the largest (log ratio)^2 leave until the mean of the others is
    at most ``threshold``. As few as possible leave. All other tokens stay and are not in the mean. A clip at 1 +- eps
    would remove rare tokens, from which stale data teaches most. Positive and negative log ratios cannot cancel in a
    square, as they would in an estimate of the KL.

    Args:
        log_weights: ``[tokens]`` log pi_old - log pi_sampler of every loss token of a mini-batch, in any order.
        advantages: ``[tokens]`` the advantage of each token's response.
        threshold: tau_M2, > 0; the paper's value is 0.04.

    Returns:
        ``[tokens]`` bool. Of equal squares the later ones in the order given leave first.

    Example: with positive advantages, log ratios 0.1, 0.3, 0.1 have squares of mean 0.0367, and all stay at 0.04. With
    0.5 in place of 0.3 (mean 0.09) that token leaves. With -0.5 all stay, since its ratio moved against its advantage.
    """
    log_weights, advantages = log_weights.detach().to(torch.float64), advantages.to(torch.float64)
    # NaN compares false, so that a token without a ratio is a candidate, and its mean lets it leave
    moved = ~(log_weights * advantages <= 0)
    rising, order = log_weights[moved].square().sort(stable=True)
    means = rising.cumsum(0) / torch.arange(1, len(rising) + 1, device=rising.device, dtype=torch.float64)
    below = torch.zeros(len(rising), dtype=torch.bool, device=rising.device)
    # means of a rising sequence rise: those at or below the threshold are a prefix
    below[order[means <= threshold]] = True
    kept = torch.ones(len(log_weights), dtype=torch.bool, device=log_weights.device)
    kept[moved] = below
    return kept


NONE = Correction(name="none", weights=uncorrected)
TIS = Correction(name="tis", weights=truncated_weights, needs=("old_logprobs",))
MIS = Correction(name="mis", weights=masked_weights, needs=("old_logprobs",))
M2PO = Correction(name="m2po", weights=whole_weights, batch_mask=second_moment_mask, needs=("old_logprobs",))


def correction_of(reference: str) -> Correction:
    """The correction that ``algorithm.correction`` names: a `Correction`, or a function of `CorrectionInputs`.

    Raises:
        ValueError: as `loss_row`.
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


def correction_weights(correction: Correction | str, inputs: CorrectionInputs) -> Tensor:
    """Importance weights pi_old / pi_sampler of the policy term, ``[tokens]`` without gradient, 0 where ``policy_mask``
    is False. They apply in synchronous mode too, where kernels and precision still differ.

    Raises:
        ValueError: unknown correction, or ``m2po`` without its mask.
    """
    if isinstance(correction, str):
        correction = correction_of(correction)
    weights = correction.weights(inputs._replace(old_logprobs=inputs.old_logprobs.detach()))
    return weights if inputs.policy_mask is None else torch.where(inputs.policy_mask, weights, 0.0)
