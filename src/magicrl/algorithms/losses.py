"""The loss of a micro-batch (Eq. 3.1), the same for every row of the loss table.

Tokens are packed: all arrays are 1-D over the response tokens of a micro-batch, and ``sample_index`` says
which response a token belongs to. A response is never split over two micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from magicrl.algorithms import policy_losses
from magicrl.algorithms.corrections import Correction, correction_weights
from magicrl.algorithms.kl import k3
from magicrl.algorithms.loss_metrics import LossMetrics
from magicrl.algorithms.surrogates import LossRow, Surrogate, SurrogateInputs, nothing_clipped

MAX_LOG_RATIO = 20.0
"""log rho is held within +-20: e^20 is no ratio of two versions of one policy, and exp must not overflow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """A micro-batch as the loss sees it; every tensor is ``[tokens]``.

    Attributes:
        logprobs: policy in training, with gradient. float32 or float64.
        advantages: of the token's response.
        loss_mask: bool; False tokens have no part in anything.
        sample_index: row number of the token's response in this micro-batch, 0 and up.
        old_logprobs: the learner's before the step's first update; None with one SGD step a training step,
            where rho is exactly 1.
        sampler_logprobs: what the engine reported; None where there was no engine (supervised training).
        ref_logprobs: the frozen reference's; None without one.
        entropy: of the policy's full distribution at the token, with gradient if alpha > 0; None if not computed.
        group_index: group of the token's response, for losses that compare within a group.
        policy_version: version of the weights that sampled the token.
        policy_mask: bool; False tokens leave the policy term, and stay in the entropy and KL terms and in every
            denominator. None when every token is in it.
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
        policy: ``[tokens]`` surrogate before weights, with gradient; larger is better.
        clipped: ``[tokens]`` bool.
        ratio: ``[tokens]`` rho (the response's for sequence-level rows), without gradient.
        kl: ``[tokens]`` k3, or None without a reference.
        correction: ``[tokens]`` sampler-correction weights.
        metrics: sums that add over micro-batches.
    """

    loss: Tensor
    policy: Tensor
    clipped: Tensor
    ratio: Tensor
    kl: Tensor | None
    correction: Tensor
    metrics: LossMetrics


def log_likelihood(s: SurrogateInputs) -> Surrogate:
    """log pi: supervised training is the row without ratio, clip or advantage."""
    return Surrogate(s.logprobs, nothing_clipped(s))


def row_of(name: str) -> LossRow:
    """The ``ROW`` of the policy loss ``name``."""
    return import_module(f"{policy_losses.__name__}.{name}").ROW


LOSSES: Mapping[str, LossRow] = MappingProxyType(
    {name: row_of(name) for name in policy_losses.NAMES}
    | {"nll": LossRow(surrogate=log_likelihood, reducer="global_tokens")}
)
"""Loss rows by the name a recipe gives (``nll`` is supervised training's)."""


def loss_terms(
    row: LossRow,
    inputs: LossInputs,
    token_weights: Tensor,
    *,
    alpha: float = 0.0,
    beta: float = 0.0,
    policy_weight: float = 1.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    correction: Correction = "none",
    correction_cap: float = 2.0,
) -> LossOutputs:
    """A micro-batch's share of Eq. 3.1: sum of w * [-(policy_weight * policy + alpha * H) + beta * k3].

    All three terms take the same weights, so a response whose advantage is 0 (a masked one) still
    counts in the denominator and in the entropy and KL terms.

    Args:
        row: a row of ``LOSSES``.
        inputs: the micro-batch.
        token_weights: ``[tokens]`` weights of the whole mini-batch's reducer: ``response_weights`` of this
            micro-batch's responses, indexed by ``sample_index``.
        alpha: entropy coefficient; with 0 the entropy is only measured and its gradient never computed.
        beta: KL coefficient; with 0 the KL is only measured.
        policy_weight: factor on the policy term.
        clip_low: eps_low.
        clip_high: eps_high.
        correction: sampler correction of the policy term.
        correction_cap: its cap.

    Raises:
        ValueError: a term is asked for whose inputs are missing.
    """
    _check(inputs, alpha=alpha, beta=beta, correction=correction)
    mask, own = inputs.loss_mask, _loss_tokens_only(inputs)
    weights = torch.where(mask, token_weights, 0.0).to(own.logprobs.dtype)
    ratio = _ratio(own, inputs, row.ratio_level)
    advantages = inputs.advantages.to(own.logprobs.dtype)
    surrogate = row.surrogate(SurrogateInputs(ratio, own.logprobs, advantages, clip_low, clip_high))
    corrected = correction_weights(own.old, own.sampler, correction, correction_cap, inputs.policy_mask)

    policy_loss = -policy_weight * (weights * corrected * surrogate.values).sum()
    loss = policy_loss
    if alpha and own.entropy is not None:
        loss = loss - alpha * (weights * own.entropy).sum()
    if beta and own.kl is not None:
        loss = loss + beta * (weights * own.kl).sum()

    clipped = surrogate.clipped & mask
    return LossOutputs(
        loss=loss,
        policy=surrogate.values,
        clipped=clipped,
        ratio=ratio.detach(),
        kl=None if own.kl is None else own.kl.detach(),
        correction=corrected,
        metrics=_measure(mask, own, (loss, policy_loss), clipped, ratio, corrected, correction),
    )


class _LossTokens(NamedTuple):
    """The inputs with 0 at every token without loss; k3 in place of the reference's log-probs."""

    logprobs: Tensor
    old: Tensor
    sampler: Tensor
    entropy: Tensor | None
    kl: Tensor | None


def _loss_tokens_only(inputs: LossInputs) -> _LossTokens:
    # A select, not a product: whatever stands at a token without loss (even inf) must not reach the sum.
    def select(values: Tensor) -> Tensor:
        return torch.where(inputs.loss_mask, values, 0.0)

    logprobs = select(inputs.logprobs)
    old = logprobs.detach() if inputs.old_logprobs is None else select(inputs.old_logprobs)
    return _LossTokens(
        logprobs=logprobs,
        old=old,
        sampler=old if inputs.sampler_logprobs is None else select(inputs.sampler_logprobs),
        entropy=None if inputs.entropy is None else select(inputs.entropy),
        kl=None if inputs.ref_logprobs is None else k3(logprobs, select(inputs.ref_logprobs)),
    )


def _check(inputs: LossInputs, *, alpha: float, beta: float, correction: Correction) -> None:
    tokens = inputs.logprobs.shape
    for name in (
        "advantages",
        "loss_mask",
        "sample_index",
        "old_logprobs",
        "sampler_logprobs",
        "ref_logprobs",
        "entropy",
        "policy_mask",
    ):
        value = getattr(inputs, name)
        assert value is None or value.shape == tokens, f"{name} has shape {tuple(value.shape)}, not {tuple(tokens)}"
    assert inputs.logprobs.dtype in (torch.float32, torch.float64), f"log-probs must not be {inputs.logprobs.dtype}"
    if alpha and inputs.entropy is None:
        raise ValueError(f"alpha = {alpha} needs the policy's entropies")
    if beta and inputs.ref_logprobs is None:
        raise ValueError(f"beta = {beta} needs the reference's log-probs")
    if correction != "none" and inputs.sampler_logprobs is None:
        raise ValueError(f"correction {correction!r} needs the sampler's log-probs")


def _ratio(own: _LossTokens, inputs: LossInputs, level: Literal["token", "sequence"]) -> Tensor:
    """rho of every token, or the geometric mean of its response's."""
    log_ratio = (own.logprobs - own.old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
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
    mask: Tensor,
    own: _LossTokens,
    losses: tuple[Tensor, Tensor],
    clipped: Tensor,
    ratio: Tensor,
    corrected: Tensor,
    correction: Correction,
) -> LossMetrics:
    """Sums and extremes over the loss tokens, in float64 so that their order does not show."""

    def total(values: Tensor | None) -> Tensor:
        if values is None:
            return torch.zeros((), dtype=torch.float64, device=mask.device)
        return torch.where(mask, values.to(torch.float64), 0.0).sum()

    def known(values: Tensor, nothing: float) -> Tensor:
        # One entry more than there are tokens, so that an empty micro-batch has extremes too.
        return torch.nn.functional.pad(torch.where(mask, values.to(torch.float64), nothing), (0, 1), value=nothing)

    log_gap = own.old - own.sampler
    changed = (corrected != log_gap.exp()) & (correction != "none")
    return LossMetrics(
        sums={
            "loss": losses[0].detach().to(torch.float64),
            "policy_loss": losses[1].detach().to(torch.float64),
            "tokens": mask.sum().to(torch.float64),
            "clipped": total(clipped),
            "ratio": total(ratio),
            "entropy": total(own.entropy),
            "kl": total(own.kl),
            "kl_tokens": total(None if own.kl is None else torch.ones_like(own.kl)),
            "sampler_gap": total(log_gap.abs()),
            "sampler_kl": total(log_gap.clamp(max=MAX_LOG_RATIO).expm1() - log_gap),
            "correction": total(corrected),
            "corrected": total(changed),
        },
        maxima={"ratio": known(ratio, 0.0).max(), "sampler_gap": known(log_gap.abs(), 0.0).max()},
        minima={"ratio": known(ratio, torch.inf).min()},
    )
