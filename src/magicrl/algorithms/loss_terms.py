"""The loss of a micro-batch (Eq. 3.1) for any row of `magicrl.algorithms.losses`: k3, weighted sums, metrics.

Tokens are packed: all arrays are 1-D over the response tokens of a micro-batch, and ``sample_index`` is the response of
each token. A response is never split over two micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from magicrl.algorithms.losses import LOSSES, LossRow, Surrogate
from magicrl.algorithms.token_weights import (
    MAX_LOG_RATIO,
    NONE,
    NOT_GIVEN,
    Correction,
    LossInputs,
    correction_weights,
    mean_of_response,
)


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return k3 = r - log r - 1 per token with r = pi_ref / pi_theta, in nats (section 2).

    Its mean over tokens sampled from pi_theta is KL(pi_theta || pi_ref), and it is never negative. It is computed as
    expm1(d) - d, which stays precise when the two policies nearly agree.

    Args:
        logprobs: ``[tokens]`` of the policy in training, with gradient.
        ref_logprobs: ``[tokens]`` of the frozen reference model.
    """
    # Clamped only from above: expm1 of a very negative number is -1, and the linear term must keep its gradient.
    log_r = (ref_logprobs - logprobs).clamp(max=MAX_LOG_RATIO)
    return log_r.expm1() - log_r


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutputs:
    """Loss and metrics of one micro-batch.

    Attributes:
        loss: 0-d with gradient: the micro-batch's additive share of the mini-batch's loss.
        clipped: ``[tokens]`` bool.
        metrics: Sums that add up over micro-batches.
    """

    loss: Tensor
    clipped: Tensor
    metrics: LossMetrics


def loss_terms(
    row: LossRow,
    inputs: LossInputs,
    token_weights: Tensor,
    *,
    alpha: float = 0.0,
    beta: float = 0.0,
    teacher: float = 0.0,
    correction: Correction = NONE,
    named: str = "algorithm.loss",
) -> LossOutputs:
    """Return a micro-batch's share of Eq. 3.1: the sum of w * [-(policy + alpha * H) + beta * k3].

    All three terms have the same weights. A response with advantage 0 (a masked one) thus still counts in the
    denominator and in the entropy and KL terms. With alpha or beta 0 these terms are only measured.

    Args:
        row: A row of ``LOSSES``, or a custom one.
        inputs: The micro-batch. ``ratio`` is computed here.
        token_weights: ``[tokens]`` reducer weights of the whole mini-batch: its ``response_weights``, indexed by
            ``sample_index``.
        alpha: Coefficient of the entropy.
        beta: Coefficient of k3.
        teacher: Weight of (log pi_teacher - log pi_old), which is added to each token's advantage.
        correction: Sampler correction.
        named: Setting and value that named the row, for errors.

    Raises:
        ValueError: The inputs of a requested term are missing, or the surrogate did not return a number with gradient
            per token.
    """
    _check(row, inputs, alpha=alpha, beta=beta, teacher=teacher, correction=correction)
    mask, own = inputs.loss_mask, _loss_tokens_only(inputs)
    weights = torch.where(mask, token_weights, 0.0).to(own.logprobs.dtype)
    log_ratio = (own.logprobs - own.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if row.ratio_level == "sequence":
        # The geometric mean over the response takes the place of each token's ratio.
        log_ratio = mean_of_response(log_ratio, mask, own.sample_index)
    ratio = log_ratio.exp()
    advantages = own.advantages.to(own.logprobs.dtype)
    if teacher and own.teacher_logprobs is not None:
        advantages = advantages + teacher * (own.teacher_logprobs - own.old_logprobs)
    given = own._replace(advantages=advantages, ratio=ratio)
    custom = own.logprobs.requires_grad and row not in LOSSES.values()
    # An entropy that is only measured has no gradient. As a leaf it shows whether the surrogate expects one.
    leaf = None
    if custom and own.entropy is not None and not own.entropy.requires_grad and "entropy" not in row.needs:
        leaf = own.entropy.detach().requires_grad_()
    surrogate = row.surrogate(given if leaf is None else given._replace(entropy=leaf))
    parts = surrogate if isinstance(surrogate, Surrogate) else (surrogate,)
    got = [tuple(p.shape) if isinstance(p, Tensor) else type(p).__name__ for p in parts]
    if got != [tuple(ratio.shape)] * 2:
        raise ValueError(
            f"{named}: a surrogate must return Surrogate(values, clipped), two tensors with a number per token, shape "
            f"{tuple(ratio.shape)}, without a mean; got {', '.join(map(str, got))}"
        )
    # The whole loss can have a gradient from its entropy or KL term, which would then be all that is trained.
    if own.logprobs.requires_grad and not surrogate.values.requires_grad:
        raise ValueError(
            f"{named}: the loss has no gradient; compute it from logprobs or ratio without detach() or item()"
        )
    if custom:
        _check_gradient(given, leaf, surrogate.values, named)
    corrected = correction_weights(correction, given)
    kl = None if own.ref_logprobs is None else k3(own.logprobs, own.ref_logprobs)

    # The correction applies only to the policy term. Tokens that it excludes stay in T_k and in the entropy and KL
    # terms.
    policy_loss = -(weights * corrected * surrogate.values).sum()
    loss = policy_loss
    if alpha and own.entropy is not None:
        loss = loss - alpha * (weights * own.entropy).sum()
    if beta and kl is not None:
        loss = loss + beta * (weights * kl).sum()

    clipped = surrogate.clipped & mask
    per_token = {"clipped": clipped, "ratio": ratio, "entropy": own.entropy, "kl": kl, "correction": corrected}
    per_token["teacher_kl"] = None if own.teacher_logprobs is None else own.old_logprobs - own.teacher_logprobs
    metrics = _measure(own, {"loss": loss, "policy_loss": policy_loss}, per_token, corrected_by=correction)
    return LossOutputs(loss=loss, clipped=clipped, metrics=metrics)


def _check_gradient(given: LossInputs, leaf: Tensor | None, values: Tensor, named: str) -> None:
    """Raise ``ValueError`` for a custom surrogate with the sign of a loss, or with an entropy term without gradient.

    ``leaf`` is the entropy where it is only measured.
    """
    read = [given.logprobs] if leaf is None else [given.logprobs, leaf]
    slope, *of_entropy = torch.autograd.grad(values.sum(), read, retain_graph=True, materialize_grads=True)
    if any(found.any() for found in of_entropy):
        raise ValueError(
            f'{named}: the surrogate reads the entropy, which has no gradient here: set needs=("entropy",) in the row '
            "to train it, or read s.entropy.detach()"
        )
    advantages = given.advantages.sign()
    if not (advantages.min() < 0 < advantages.max()):
        return
    moved = advantages * slope  # a clipped token has no slope
    if moved.max() <= 0 and moved.min() < 0:
        raise ValueError(
            f"{named}: the surrogate lowers every token of positive advantage and raises those of negative advantage; "
            "its values are maximised, unlike a loss: change their sign"
        )


def _loss_tokens_only(inputs: LossInputs) -> LossInputs:
    """Return the inputs with 0 at tokens without loss, and with log-probs of all policies that the ratios compare."""

    # A select, not a product: a value at a token without loss (even inf) must not reach the sum.
    def select(values: Tensor) -> Tensor:
        return torch.where(inputs.loss_mask, values, 0.0)

    logprobs = select(inputs.logprobs)
    # With one update the policy is its own denominator: rho is exactly 1, and its gradient is that of log pi.
    old = logprobs.detach() if inputs.old_logprobs is NOT_GIVEN else select(inputs.old_logprobs)
    optional = {name: getattr(inputs, name) for name in ("ref_logprobs", "teacher_logprobs", "entropy")}
    return inputs._replace(
        logprobs=logprobs,
        old_logprobs=old,
        sampler_logprobs=old if inputs.sampler_logprobs is NOT_GIVEN else select(inputs.sampler_logprobs),
        **{name: select(values) for name, values in optional.items() if values is not None},
    )


def _check(
    row: LossRow, inputs: LossInputs, *, alpha: float, beta: float, teacher: float, correction: Correction
) -> None:
    tokens = inputs.logprobs.shape
    for name, value in inputs._asdict().items():
        if isinstance(value, Tensor) and value is not NOT_GIVEN:
            assert value.shape == tokens, f"{name} has shape {tuple(value.shape)}, not {tuple(tokens)}"
    assert inputs.logprobs.dtype in (torch.float32, torch.float64), f"log-probs must not be {inputs.logprobs.dtype}"
    if alpha and inputs.entropy is None:
        raise ValueError(f"alpha = {alpha} needs the policy's entropies")
    if beta and inputs.ref_logprobs is None:
        raise ValueError(f"beta = {beta} needs the reference's log-probs")
    if teacher and inputs.teacher_logprobs is None:
        raise ValueError(f"teacher = {teacher} needs the teacher's log-probs")
    if correction is not NONE and inputs.sampler_logprobs is NOT_GIVEN:
        raise ValueError(f"correction {correction.name!r} needs the sampler's log-probs")
    if "ref_logprobs" in row.needs and inputs.ref_logprobs is None:
        raise ValueError("the loss needs the reference's log-probs")


@torch.no_grad()
def _measure(
    own: LossInputs,
    losses: Mapping[str, Tensor],
    per_token: Mapping[str, Tensor | None],
    *,
    corrected_by: Correction,
) -> LossMetrics:
    """Return sums and extremes over the loss tokens, in float64 so that the order of addition does not matter."""
    mask, ratio, corrected = own.loss_mask, per_token["ratio"], per_token["correction"]
    assert ratio is not None
    log_gap = own.old_logprobs - own.sampler_logprobs

    def known(values: Tensor, nothing: float = 0.0) -> Tensor:
        return torch.where(mask, values.to(torch.float64), nothing)

    def padded(values: Tensor, nothing: float) -> Tensor:
        # One extra entry, so that an empty micro-batch has extremes too.
        return torch.nn.functional.pad(known(values, nothing), (0, 1), value=nothing)

    summed = {
        **per_token,
        "kl_tokens": None if per_token["kl"] is None else mask,
        "teacher_tokens": None if per_token["teacher_kl"] is None else mask,
        "sampler_gap": log_gap.abs(),
        # k3 with r = pi_old / pi_sampler. The sampler drew the tokens, so its mean is KL(sampler || learner).
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


_PARTS: tuple[tuple[Literal["correction", "loss"], str], ...] = (("correction", "correction"), ("loss", "policy_loss"))
"""Parts of the policy term in the order in which one's numbers enter the next, with their sums."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossMetrics:
    """Sums and extremes over the loss tokens of one or more micro-batches.

    They are 0-d float64 tensors without gradient on their device, so that reading them costs one synchronisation per
    mini-batch.

    Attributes:
        sums: Values that add up over micro-batches: ``loss`` and ``policy_loss`` (weighted shares), and plain sums over
            loss tokens: ``tokens``, ``clipped``, ``ratio``, ``entropy``, ``kl``, ``kl_tokens`` (tokens with a
            reference), ``teacher_kl`` (log pi_old - log pi_teacher), ``teacher_tokens``, ``sampler_gap``,
            ``sampler_kl``, ``correction``, ``corrected``.
        maxima: ``ratio``, ``sampler_gap``.
        minima: ``ratio``.
    """

    sums: Mapping[str, Tensor]
    maxima: Mapping[str, Tensor]
    minima: Mapping[str, Tensor]

    @staticmethod
    def merge(parts: Sequence[LossMetrics]) -> LossMetrics:
        """Merge the metrics of several parts, in any order."""
        assert parts, "nothing to merge"
        first = parts[0]
        return LossMetrics(
            sums={k: torch.stack([p.sums[k] for p in parts]).sum() for k in first.sums},
            maxima={k: torch.stack([p.maxima[k] for p in parts]).max() for k in first.maxima},
            minima={k: torch.stack([p.minima[k] for p in parts]).min() for k in first.minima},
        )

    def faulty(self) -> Literal["correction", "loss"] | None:
        """Return the part whose numbers are not finite although those of the models are; None if there is none."""
        total = {k: float(v) for k, v in self.sums.items()}
        if not all(math.isfinite(total[k]) for k in ("ratio", "entropy", "kl", "teacher_kl", "sampler_gap")):
            return None
        return next((part for part, key in _PARTS if not math.isfinite(total[key])), None)

    def values(self) -> dict[str, float]:
        """Return the metrics as numbers. Means are over the loss tokens merged so far.

        ``clip_ratio`` is the share of clipped tokens, ``sampler_gap_*`` the absolute difference of old and sampler
        log-probs, ``sampler_kl`` the k3 estimate of KL(sampler || learner), ``corrected_ratio`` the share of tokens
        that a sampler correction capped or masked. ``kl`` exists only with a reference model, ``teacher_kl`` (an
        estimate of KL(pi_old || teacher)) only with a teacher.
        """
        total = {k: float(v) for k, v in self.sums.items()}
        tokens = max(total["tokens"], 1.0)
        kl = {"kl": total["kl"] / total["kl_tokens"]} if total["kl_tokens"] else {}
        if total["teacher_tokens"]:
            kl["teacher_kl"] = total["teacher_kl"] / total["teacher_tokens"]
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
