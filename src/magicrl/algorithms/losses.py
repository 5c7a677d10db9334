"""The loss of a micro-batch (Eq. 3.1), and the table of methods: surrogates, rows, reducers, k3, sampler corrections.

Tokens are packed: all arrays are 1-D over the response tokens of a micro-batch, and ``sample_index`` says
which response a token belongs to. A response is never split over two micro-batches.

A recipe names a row (``algorithm.loss``), a reducer and a correction by `magicrl.registry`: those of this page by their
names, a user's own as ``file.py:name``. A row, and any function of this page's kinds, declares what it needs, so that a
pass over the samples that nobody needs is not made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
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


def clipped_ratio(s: SurrogateInputs) -> Surrogate:
    """min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A); clipped = the tokens whose gradient that zeroes."""
    # By the minimum the clip only takes from the objective: a token that moved the wrong way keeps the gradient that
    # leads it back.
    bounded = s.ratio.clamp(1 - s.clip_low, 1 + s.clip_high)
    values = torch.minimum(s.ratio * s.advantages, bounded * s.advantages)
    too_high = (s.advantages > 0) & (s.ratio > 1 + s.clip_high)
    too_low = (s.advantages < 0) & (s.ratio < 1 - s.clip_low)
    return Surrogate(values, too_high | too_low)


def clipped_weight(s: SurrogateInputs) -> Surrogate:
    """stop_gradient(clip(rho)) * A * log pi (CISPO): every token keeps a gradient, its weight is bounded."""
    # a token whose ratio left the bounds still learns, through log pi
    weight = s.ratio.detach().clamp(1 - s.clip_low, 1 + s.clip_high)
    return Surrogate(weight * s.advantages * s.logprobs, weight != s.ratio.detach())


def policy_gradient(s: SurrogateInputs) -> Surrogate:
    """rho * A: the vanilla policy gradient; its gradient at theta_k is that of A * log pi."""
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


def constant(r: ReducerInputs) -> Tensor:
    """Sum over tokens / (T * responses): a constant instead of the lengths."""
    if r.max_tokens is None or r.max_tokens < 1:
        raise ValueError(f"the reducer 'constant' needs max_tokens, the response-length limit; got {r.max_tokens}")
    return torch.full_like(r.lengths_N, 1.0 / (r.max_tokens * len(r.lengths_N)))


def sequence_sum(r: ReducerInputs) -> Tensor:
    """Sum over a response's tokens, mean over its group, then over groups."""
    # each group weighs the same, however many of its responses were judged
    groups, index, members = torch.unique(r.group_index_N, return_inverse=True, return_counts=True)
    return 1.0 / (len(groups) * members[index].to(torch.float64))


def response_mean(r: ReducerInputs) -> Tensor:
    """Mean over a response's tokens, then over its group, then over groups."""
    return torch.where(r.lengths_N > 0, sequence_sum(r) / r.lengths_N.clamp(min=1), torch.zeros_like(r.lengths_N))


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
# The vanilla policy gradient.
PG = LossRow(surrogate=policy_gradient, reducer=sequence_sum)
# CISPO (MiniMax 2025): the clip bounds a token's weight and never its gradient.
# 1 - eps_low = 0 is no lower bound, as rho is positive
CISPO = LossRow(surrogate=clipped_weight, reducer=global_tokens, clip=(1.0, 4.0))
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


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Per-token k3 = r - log r - 1 with r = pi_ref / pi_theta, in nats (section 2).

    Its mean over tokens drawn from pi_theta is KL(pi_theta || pi_ref); it is never negative. Computed as
    expm1(d) - d, which keeps its digits when the two policies nearly agree.

    Args:
        logprobs: ``[tokens]`` of the policy in training; gradients flow through these.
        ref_logprobs: ``[tokens]`` of the frozen reference.
    """
    # from above alone: expm1 of a very negative number is -1, and the linear term must keep its gradient
    log_r = (ref_logprobs - logprobs).clamp(max=MAX_LOG_RATIO)
    return log_r.expm1() - log_r


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
        batch_mask: which loss tokens of a whole mini-batch stay in the policy term, from their
            log pi_old - log pi_sampler and the recipe's ``second_moment``; None: all.
        needs: as a row's. What ``batch_mask`` reads is taken before the update anyway.
    """

    name: str
    weights: Callable[[CorrectionInputs], Tensor]
    batch_mask: Callable[[Tensor, float], Tensor] | None = None
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


def second_moment_mask(log_weights: Tensor, threshold: float) -> Tensor:
    """Which tokens M2PO keeps: the largest (log weight)^2 leave until the mean of the others is at most ``threshold``.

    As few as possible leave, and a whole mini-batch is looked at together: a clip at 1 +- eps would cut rare tokens,
    which are where stale data teaches most. Positive and negative log weights do not cancel in a square, as they
    would in an estimate of the KL (Zheng et al. 2025, arXiv 2510.01161).

    Args:
        log_weights: ``[tokens]`` log pi_old - log pi_sampler of every token of a mini-batch, in any order.
        threshold: tau_M2, > 0; the paper's value is 0.04.

    Returns:
        ``[tokens]`` bool. Of equal squares the later ones in the order given leave first.

    Example: squares 0.01, 0.09, 0.01 have the mean 0.0367 and all stay at 0.04; with 0.25 for 0.09 (mean 0.09) that
    token leaves.
    """
    squares = log_weights.detach().to(torch.float64).square()
    rising, order = squares.sort(stable=True)
    means = rising.cumsum(0) / torch.arange(1, len(rising) + 1, device=rising.device, dtype=torch.float64)
    kept = torch.zeros(len(squares), dtype=torch.bool, device=squares.device)
    # means of a rising sequence rise: those at or below the threshold are a prefix. NaN compares false and leaves.
    kept[order[means <= threshold]] = True
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


# --- the loss, the same for every row ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """A micro-batch as the loss sees it, ``[tokens]`` each as in `SurrogateInputs`.

    ``old_logprobs`` is None with one SGD step a training step, where rho is exactly 1; ``sampler_logprobs`` where there
    was no engine (supervised training). A token that ``policy_mask`` leaves out of the policy term stays in the entropy
    and KL terms and in every denominator. Log-probs are float32 or float64.
    """

    logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor
    sample_index: Tensor
    old_logprobs: Tensor | None = None
    sampler_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    group_index: Tensor | None = None
    policy_version: Tensor | None = None
    policy_mask: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutputs:
    """What the loss of one micro-batch gives.

    Attributes:
        loss: 0-d with gradient: this micro-batch's additive share of the mini-batch's loss.
        clipped: ``[tokens]`` bool.
        ratio: ``[tokens]`` rho (the response's for sequence-level rows), without gradient.
        metrics: sums that add over micro-batches.
    """

    loss: Tensor
    clipped: Tensor
    ratio: Tensor
    metrics: LossMetrics


def loss_terms(
    row: LossRow,
    inputs: LossInputs,
    token_weights: Tensor,
    *,
    alpha: float = 0.0,
    beta: float = 0.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    coefficients: Mapping[str, float] = MappingProxyType({}),
    statistics: Mapping[str, Any] = MappingProxyType({}),
    correction: Correction = NONE,
    correction_cap: float = 2.0,
) -> LossOutputs:
    """A micro-batch's share of Eq. 3.1: sum of w * [-(policy + alpha * H) + beta * k3].

    All three terms take the same weights, so a response whose advantage is 0 (a masked one) still
    counts in the denominator and in the entropy and KL terms. With alpha or beta 0 these are only measured.

    Args:
        row: a row of ``LOSSES``.
        inputs: the micro-batch.
        token_weights: ``[tokens]`` weights of the whole mini-batch's reducer: ``response_weights`` of this
            micro-batch's responses, indexed by ``sample_index``.

    Raises:
        ValueError: a term is asked for whose inputs are missing.
    """
    _check(row, inputs, alpha=alpha, beta=beta, correction=correction)
    mask, own = inputs.loss_mask, _loss_tokens_only(inputs)
    assert own.old_logprobs is not None
    weights = torch.where(mask, token_weights, 0.0).to(own.logprobs.dtype)
    ratio = _ratio(own.logprobs, own.old_logprobs, inputs, row.ratio_level)
    shared: dict[str, Any] = {name: getattr(own, name) for name in CorrectionInputs._fields if name != "cap"}
    surrogate = row.surrogate(
        SurrogateInputs(
            ratio=ratio,
            logprobs=own.logprobs,
            advantages=own.advantages.to(own.logprobs.dtype),
            clip_low=clip_low,
            clip_high=clip_high,
            ref_logprobs=own.ref_logprobs,
            entropy=own.entropy,
            coefficients=coefficients,
            statistics=statistics,
            **shared,
        )
    )
    corrected = correction_weights(correction, CorrectionInputs(cap=correction_cap, **shared))
    kl = None if own.ref_logprobs is None else k3(own.logprobs, own.ref_logprobs)

    # the correction weighs the policy term alone: what it leaves out stays in T_k and in the entropy and KL terms
    policy_loss = -(weights * corrected * surrogate.values).sum()
    loss = policy_loss
    if alpha and own.entropy is not None:
        loss = loss - alpha * (weights * own.entropy).sum()
    if beta and kl is not None:
        loss = loss + beta * (weights * kl).sum()

    clipped = surrogate.clipped & mask
    per_token = {"clipped": clipped, "ratio": ratio, "entropy": own.entropy, "kl": kl, "correction": corrected}
    metrics = _measure(own, {"loss": loss, "policy_loss": policy_loss}, per_token, corrected_by=correction)
    return LossOutputs(loss=loss, clipped=clipped, ratio=ratio.detach(), metrics=metrics)


def _loss_tokens_only(inputs: LossInputs) -> LossInputs:
    """The inputs with 0 at every token without loss, and all of the policies that the ratios compare."""

    # A select, not a product: whatever stands at a token without loss (even inf) must not reach the sum.
    def select(values: Tensor | None, otherwise: Tensor | None = None) -> Tensor | None:
        return otherwise if values is None else torch.where(inputs.loss_mask, values, 0.0)

    logprobs = torch.where(inputs.loss_mask, inputs.logprobs, 0.0)
    # one SGD step: the policy is its own denominator, so rho is exactly 1 and its gradient is that of log pi
    old = select(inputs.old_logprobs, logprobs.detach())
    return replace(
        inputs,
        logprobs=logprobs,
        old_logprobs=old,
        sampler_logprobs=select(inputs.sampler_logprobs, old),
        ref_logprobs=select(inputs.ref_logprobs),
        entropy=select(inputs.entropy),
    )


def _check(row: LossRow, inputs: LossInputs, *, alpha: float, beta: float, correction: Correction) -> None:
    tokens = inputs.logprobs.shape
    for name in (each.name for each in fields(inputs)):
        value = getattr(inputs, name)
        assert value is None or value.shape == tokens, f"{name} has shape {tuple(value.shape)}, not {tuple(tokens)}"
    assert inputs.logprobs.dtype in (torch.float32, torch.float64), f"log-probs must not be {inputs.logprobs.dtype}"
    if alpha and inputs.entropy is None:
        raise ValueError(f"alpha = {alpha} needs the policy's entropies")
    if beta and inputs.ref_logprobs is None:
        raise ValueError(f"beta = {beta} needs the reference's log-probs")
    if correction is not NONE and inputs.sampler_logprobs is None:
        raise ValueError(f"correction {correction.name!r} needs the sampler's log-probs")
    if "ref_logprobs" in row.needs and inputs.ref_logprobs is None:
        raise ValueError("the loss needs the reference's log-probs")


def _ratio(logprobs: Tensor, old_logprobs: Tensor, inputs: LossInputs, level: Literal["token", "sequence"]) -> Tensor:
    """rho of every token, or the geometric mean of its response's."""
    log_ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if level == "sequence":
        log_ratio = _response_mean(log_ratio, inputs.loss_mask, inputs.sample_index)
    return log_ratio.exp()


def _response_mean(values: Tensor, mask: Tensor, sample_index: Tensor) -> Tensor:
    """Each token gets the mean of ``values`` over the loss tokens of its response."""
    # There are at most as many responses as tokens: no need to ask the device how many.
    zeros = torch.zeros_like(values)
    totals = zeros.index_add(0, sample_index, torch.where(mask, values, 0.0))
    counts = zeros.detach().index_add(0, sample_index, mask.to(values.dtype))
    return (totals / counts.clamp(min=1))[sample_index]


@torch.no_grad()
def _measure(
    own: LossInputs,
    losses: Mapping[str, Tensor],
    per_token: Mapping[str, Tensor | None],
    *,
    corrected_by: Correction,
) -> LossMetrics:
    """Sums and extremes over the loss tokens, in float64 so that their order does not show."""
    mask, ratio, corrected = own.loss_mask, per_token["ratio"], per_token["correction"]
    assert own.old_logprobs is not None
    assert own.sampler_logprobs is not None
    assert ratio is not None
    log_gap = own.old_logprobs - own.sampler_logprobs

    def known(values: Tensor, nothing: float = 0.0) -> Tensor:
        return torch.where(mask, values.to(torch.float64), nothing)

    def padded(values: Tensor, nothing: float) -> Tensor:
        # One entry more than there are tokens, so that an empty micro-batch has extremes too.
        return torch.nn.functional.pad(known(values, nothing), (0, 1), value=nothing)

    summed = {
        **per_token,
        "kl_tokens": None if per_token["kl"] is None else mask,
        "sampler_gap": log_gap.abs(),
        # k3 with r = pi_old / pi_sampler: the sampler drew the tokens, so its mean is KL(sampler || learner)
        "sampler_kl": log_gap.clamp(max=MAX_LOG_RATIO).expm1() - log_gap,
        "corrected": None if corrected_by is NONE else corrected != log_gap.exp(),
    }
    nothing = torch.zeros((), dtype=torch.float64, device=mask.device)
    return LossMetrics(
        sums={
            "tokens": mask.sum().to(torch.float64),
            **{name: loss.detach().to(torch.float64) for name, loss in losses.items()},
            **{name: nothing if values is None else known(values).sum() for name, values in summed.items()},
        },
        maxima={"ratio": padded(ratio, 0.0).max(), "sampler_gap": padded(log_gap.abs(), 0.0).max()},
        minima={"ratio": padded(ratio, torch.inf).min()},
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LossMetrics:
    """Sums and extremes over the loss tokens of one or more micro-batches.

    0-d float64 tensors without gradient, left on their device: reading costs one synchronisation a mini-batch.

    Attributes:
        sums: add over micro-batches: ``loss``, ``policy_loss`` (already weighted shares), and plain sums over
            loss tokens: ``tokens``, ``clipped``, ``ratio``, ``entropy``, ``kl``, ``kl_tokens`` (those with a
            reference), ``sampler_gap``, ``sampler_kl``, ``correction``, ``corrected``.
        maxima: ``ratio``, ``sampler_gap``.
        minima: ``ratio``.
    """

    sums: Mapping[str, Tensor]
    maxima: Mapping[str, Tensor]
    minima: Mapping[str, Tensor]

    @staticmethod
    def merge(parts: Sequence[LossMetrics]) -> LossMetrics:
        """The metrics of all parts together, in any order of the parts."""
        assert parts, "nothing to merge"
        first = parts[0]
        return LossMetrics(
            sums={k: torch.stack([p.sums[k] for p in parts]).sum() for k in first.sums},
            maxima={k: torch.stack([p.maxima[k] for p in parts]).max() for k in first.maxima},
            minima={k: torch.stack([p.minima[k] for p in parts]).min() for k in first.minima},
        )

    def values(self) -> dict[str, float]:
        """Readable numbers: means are over the loss tokens merged so far.

        ``clip_ratio`` is the share of clipped tokens, ``sampler_gap_*`` the absolute difference of old and
        sampler log-probs, ``sampler_kl`` the k3 estimate of KL(sampler || learner), ``corrected_ratio`` the
        share of tokens that a sampler correction capped or masked. ``kl`` is there only with a reference.
        """
        total = {k: float(v) for k, v in self.sums.items()}
        tokens = max(total["tokens"], 1.0)
        kl = {"kl": total["kl"] / total["kl_tokens"]} if total["kl_tokens"] else {}
        return {
            "loss": total["loss"],
            "policy_loss": total["policy_loss"],
            "entropy": total["entropy"] / tokens,
            **kl,
            "clip_ratio": total["clipped"] / tokens,
            "ratio_mean": total["ratio"] / tokens,
            "ratio_max": float(self.maxima["ratio"]),
            "ratio_min": float(self.minima["ratio"]),
            "sampler_gap_mean": total["sampler_gap"] / tokens,
            "sampler_gap_max": float(self.maxima["sampler_gap"]),
            "sampler_kl": total["sampler_kl"] / tokens,
            "correction_mean": total["correction"] / tokens,
            "corrected_ratio": total["corrected"] / tokens,
            "tokens": total["tokens"],
        }
