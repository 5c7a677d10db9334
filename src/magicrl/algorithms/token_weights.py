"""Inputs of the loss, and weights of its tokens: reducers, and corrections of the sampler's policy.

Arrays are as in `magicrl.algorithms.losses`, which has the rows of the loss itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from magicrl.registry import check_call, resolve

MAX_LOG_RATIO = 20.0
"""Bound of the log ratio of two policies. e^20 is not the ratio of two versions of one policy, and exp must not
overflow. It applies to rho, to the weights of m2po (those of tis and mis have a cap) and, upwards, to the ratio of k3.
"""

Need: TypeAlias = Literal["old_logprobs", "ref_logprobs", "entropy"]
"""Inputs that cost extra compute and must be declared: the reference model's log-probs, the entropy with gradient and,
for a row's statistics, the learner's log-probs from before the first update. All other fields of `LossInputs` are
always present."""
NEEDS: tuple[Need, ...] = ("old_logprobs", "ref_logprobs", "entropy")

NOT_GIVEN = torch.empty(0)
"""Stands for the tensors that `loss_terms` fills in before it calls a surrogate or a correction."""


class LossInputs(NamedTuple):
    """``[tokens]`` tensors of a micro-batch, and numbers of the whole update. Log-probs are float32 or float64.

    Surrogates and corrections get 0 at tokens without loss.

    Attributes:
        logprobs: Log-probs of the policy in training, with gradient.
        advantages: Advantage of the token's response.
        loss_mask: bool, tokens that take part in the loss.
        sample_index: Row of the token's response in this micro-batch.
        old_logprobs: The learner's log-probs from before the step's first update. Default: ``logprobs``, detached, as
            with one update per step.
        sampler_logprobs: Log-probs that the engine reported. Default: ``old_logprobs`` (without an engine).
        ref_logprobs: Log-probs of the frozen reference model. None without one (declare it with ``needs``).
        teacher_logprobs: Log-probs of the teacher. None without one.
        entropy: Entropy of the full distribution, with gradient if alpha is not 0 or the row needs it.
        group_index: Group of the token's response. A group may be spread over micro-batches.
        policy_version: Version of the weights that sampled the token.
        policy_mask: bool, tokens that take part in the policy term. None means all. A token that it excludes stays in
            the entropy and KL terms and in every denominator.
        ratio: rho, or the geometric mean over the response (``ratio_level``), with gradient. `loss_terms` computes it,
            and clamps its logarithm (`MAX_LOG_RATIO`).
        clip_low: eps_low.
        clip_high: eps_high.
        cap: The recipe's ``correction_cap``.
        coefficients: Further coefficients of the controller, by name.
        statistics: Result of the row's ``statistics`` for the whole mini-batch, the same on every rank.
    """

    logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor
    sample_index: Tensor
    old_logprobs: Tensor = NOT_GIVEN
    sampler_logprobs: Tensor = NOT_GIVEN
    ref_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    group_index: Tensor | None = None
    policy_version: Tensor | None = None
    policy_mask: Tensor | None = None
    ratio: Tensor = NOT_GIVEN
    clip_low: float = 0.2
    clip_high: float = 0.2
    cap: float = 2.0
    coefficients: Mapping[str, float] = MappingProxyType({})
    statistics: Mapping[str, Any] = MappingProxyType({})


F = TypeVar("F", bound=Callable[..., Any])


def needs(*what: Need) -> Callable[[F], F]:
    """Declare the inputs that a row's statistics or a correction read: ``@needs("old_logprobs")``."""

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


# --- reducers: weights of the tokens of each response -----------------------------------------------------------
# Weights are computed for a whole mini-batch, before it is split into micro-batches or over workers. The loss is then a
# sum over tokens of weight times term, so it cannot depend on packing, order or the number of workers.


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


def reducer_of(reference: str) -> Reducer:
    """Return the function that ``algorithm.reducer`` names. Raises as `loss_row`."""
    reducer = resolve("reducer", reference)
    if not callable(reducer):
        raise ValueError(f"reducer {reference!r} is a {type(reducer).__name__}; it must be a function of ReducerInputs")
    check_call(f"reducer {reference!r}", reducer, "ReducerInputs")
    return cast(Reducer, reducer)


def response_weights(
    reducer: Reducer,
    lengths_N: Tensor,
    group_index_N: Tensor,
    *,
    num_loss_tokens: int,
    max_tokens: int | None = None,
    named: str = "algorithm.reducer",
) -> Tensor:
    """Return the weight of every loss token of each response of a mini-batch.

    Args:
        reducer: The reducer.
        lengths_N: Loss tokens of each response, for all responses of the mini-batch on all workers.
        group_index_N: Group of each response, any integers.
        num_loss_tokens: T_k. Must equal the sum of ``lengths_N``, which guards against passing one worker's share.
        max_tokens: T, the response-length limit. Required by ``constant``.
        named: Setting and value that named the reducer, for errors.

    Returns:
        ``[N]`` float64.

    Raises:
        ValueError: There are no loss tokens, or the weights are not ``[N]`` finite numbers >= 0, or no token has a
            weight.

    Example: lengths 3, 5, 4, 2 in two groups of two. ``global_tokens`` gives 1/14 each; ``response_mean`` 1/12, 1/20,
    1/16, 1/8; ``sequence_sum`` 1/4 each; ``constant`` with T = 8 1/32 each.
    """
    lengths = lengths_N.to(torch.float64)
    assert int(lengths.sum()) == num_loss_tokens, f"lengths sum to {int(lengths.sum())}, not to T_k = {num_loss_tokens}"
    if num_loss_tokens == 0:
        raise ValueError("a mini-batch without loss tokens has no loss; skip it")
    given = ReducerInputs(lengths, group_index_N, num_loss_tokens, max_tokens)
    returned: object = reducer(given)
    weights = as_numbers(returned)
    # A negative weight unlearns what the advantage rewards. With 0 for all, only weight decay would move the policy.
    if (
        weights is None
        or weights.shape != lengths.shape
        or not bool((weights.isfinite() & (weights >= 0)).all())
        or not bool((weights * lengths).any())
    ):
        raise ValueError(
            f"{named}: a reducer must return {len(lengths)} finite weights >= 0, not all 0, one per response; got "
            f"{returned!r:.200}"
        )
    return weights


def as_numbers(returned: object) -> Tensor | None:
    """Return a tensor, an array or a list of numbers as float64; None for anything else, such as a comparison."""
    try:
        if torch.as_tensor(returned).dtype == torch.bool:
            return None
        return torch.as_tensor(returned, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        return None


# --- sampler corrections ---------------------------------------------------------------------------------------
# The policy that sampled a token differs from the one that learns from it: two engines compute differently, and in
# asynchronous training the sampler's weights are older. The loss is decoupled: rho compares the policy in training with
# the *proximal* policy, the learner just before its update. These weights compare the proximal policy with the
# *behaviour* policy that sampled, per token (Hilton et al. 2021, arXiv 2110.00641; AReaL, arXiv 2505.24298).


def mean_of_response(values: Tensor, loss_mask: Tensor, sample_index: Tensor) -> Tensor:
    """Return for each token the mean of ``values`` over the loss tokens of its response, all ``[tokens]``."""
    # The number of tokens bounds that of responses: reading the exact number would synchronise with the device.
    zeros = torch.zeros_like(values)
    totals = zeros.index_add(0, sample_index, torch.where(loss_mask, values, 0.0))
    counts = zeros.detach().index_add(0, sample_index, loss_mask.to(values.dtype))
    return (totals / counts.clamp(min=1))[sample_index]


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
    weights: Callable[[LossInputs], Tensor]
    batch_mask: Callable[[Tensor, Tensor, float], Tensor] | None = None
    needs: tuple[Need, ...] = ()


def uncorrected(c: LossInputs) -> Tensor:
    """Return 1 everywhere."""
    return torch.ones_like(c.old_logprobs)


def truncated_weights(c: LossInputs) -> Tensor:
    """Return pi_old / pi_sampler, at most ``cap``."""
    return (c.old_logprobs - c.sampler_logprobs).exp().clamp(max=c.cap)


def masked_weights(c: LossInputs) -> Tensor:
    """Return pi_old / pi_sampler, 0 above ``cap``."""
    weights = (c.old_logprobs - c.sampler_logprobs).exp()
    return torch.where(weights > c.cap, torch.zeros_like(weights), weights)


def whole_weights(c: LossInputs) -> Tensor:
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
TIS = Correction(name="tis", weights=truncated_weights)
MIS = Correction(name="mis", weights=masked_weights)
M2PO = Correction(name="m2po", weights=whole_weights, batch_mask=second_moment_mask)


def correction_of(reference: str) -> Correction:
    """Return the correction that ``algorithm.correction`` names: a `Correction`, or one made from a function of
    `LossInputs`.

    Raises:
        ValueError: As `loss_row`.
    """
    found = resolve("correction", reference)
    if isinstance(found, Correction):
        needs_of(found)
        return found
    if not callable(found):
        raise ValueError(
            f"correction {reference!r} is a {type(found).__name__}; it must be a function of LossInputs or a "
            "magicrl.algorithms.losses.Correction"
        )
    check_call(f"correction {reference!r}", found, "LossInputs")
    weights = cast("Callable[[LossInputs], Tensor]", found)
    return Correction(name=reference, weights=weights, needs=needs_of(weights))


def correction_weights(correction: Correction, inputs: LossInputs) -> Tensor:
    """Return the importance weights pi_old / pi_sampler of the policy term, ``[tokens]`` without gradient, 0 where
    ``policy_mask`` is False.

    They apply in synchronous mode too, where kernels and precision still differ.

    Raises:
        ValueError: ``m2po`` has no mask, or the correction did not return one weight per token.
    """
    weights = cast(Any, correction.weights(inputs))
    shape = inputs.old_logprobs.shape
    # Another shape would be broadcast: a column of weights mixes all tokens with each other.
    if not isinstance(weights, Tensor) or weights.shape != shape:
        got = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        raise ValueError(f"correction {correction.name!r} must return a tensor of shape {tuple(shape)}; got {got}")
    weights = weights.detach()
    return weights if inputs.policy_mask is None else torch.where(inputs.policy_mask, weights, 0.0)
