"""Advantages and losses once more, slowly: loops over groups, responses and tokens, one scalar at a time.

The formulas are those of the papers. Nothing here comes from `magicrl.algorithms`: no packing, no token weights, no
table of methods. ``magicrl selfcheck`` and the tests compare the library with it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

REDUCERS = {
    **dict.fromkeys(("magic", "dapo", "cispo", "nll", "ce_gppo", "aspo", "dppo", "dppo_kl"), "all tokens"),
    **dict.fromkeys(("grpo", "gspo", "sapo"), "response mean"),
    **dict.fromkeys(("pg", "ppo"), "response sum"),
    "scalerl": "group mean",
    "dr_grpo": "constant",
}
"""Reducer of each loss."""
NOT_DIVIDED = frozenset({"dr_grpo"})
"""Losses whose advantages are not divided by the group's standard deviation."""
WHOLE_RATIO = frozenset({"gspo"})
"""Losses with one ratio per response, the geometric mean over its tokens."""
CAP = 2.0
"""Largest weight of a correction."""
Model = TypeVar("Model", bound=PreTrainedModel)


def in_own_precision(model: Model) -> Model:
    """Let every RMSNorm of ``model`` compute in the precision of its input, and return the model.

    transformers' RMSNorm computes in float32 whatever its input. Layouts that compute a prompt once or many times would
    then round the gradient differently, at 1e-6, which would hide any smaller error.
    """

    def norm(self: Any, hidden: Tensor) -> Tensor:
        return self.weight * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(norm, module)
    return model


@dataclass(frozen=True, kw_only=True)
class Response:
    """A response to learn from.

    Attributes:
        group: Number of its group.
        advantage: Advantage of all its tokens.
        old: Log-probs of its tokens before the update, ``[T]``.
        sampler: Log-probs that the engine reported, ``[T]``.
        ref: Log-probs of the reference model, ``[T]``.
        mask: Tokens that take part in the loss, ``[T]`` bool.
    """

    group: int
    advantage: float
    old: Tensor
    sampler: Tensor
    ref: Tensor
    mask: Tensor


def reference_advantages(
    rewards: Sequence[float | None], truncated: Sequence[bool], *, mask: str, divide: bool, epsilon: float = 1e-6
) -> list[float] | None:
    """Return the advantages of one group, or None if its rewards are all equal or fewer than two.

    Args:
        rewards: Rewards; None for a response that was not judged, which is no member.
        truncated: Which responses were truncated.
        mask: ``before`` leaves truncated responses out of the mean, ``after`` sets their advantage to 0 afterwards.
        divide: Whether to divide by the unbiased standard deviation.
        epsilon: Term added to it.
    """
    pairs = list(zip(rewards, truncated, strict=True))
    members = [reward for reward, cut in pairs if reward is not None and not (mask == "before" and cut)]
    if len(set(members)) < 2:
        return None
    mean = sum(members) / len(members)
    spread = math.sqrt(sum((reward - mean) ** 2 for reward in members) / (len(members) - 1)) + epsilon
    return [
        0.0 if reward is None or (cut and mask != "none") else (reward - mean) / (spread if divide else 1.0)
        for reward, cut in pairs
    ]


def slow_scores(model: PreTrainedModel, start: Any, tokens: Any, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log-probs of a response's tokens and their entropies, ``[T]`` each: one response, no packing, no cache."""
    row = torch.tensor([*(int(token) for token in start), *(int(token) for token in tokens)])
    logits = model(row[None]).logits[0, len(start) - 1 : -1]
    table = (logits / temperature).log_softmax(-1)
    return table.gather(-1, row[len(start) :, None])[:, 0], -(table.exp() * table).sum(-1)


def reference_loss(
    name: str,
    responses: Sequence[Response],
    scored: Sequence[tuple[Tensor, Tensor]],
    *,
    alpha: float,
    beta: float,
    clip_low: float,
    clip_high: float,
    max_tokens: int,
    correction: str = "none",
) -> Tensor:
    """Return the loss of method ``name`` on a whole mini-batch.

    Args:
        name: Row of the loss table.
        responses: All responses of the mini-batch.
        scored: Log-probs of each one's tokens and their entropies, ``[T]`` each, with gradient.
        alpha: Coefficient of the entropy.
        beta: Coefficient of k3.
        clip_low: eps_low.
        clip_high: eps_high.
        max_tokens: Response limit T.
        correction: ``none``, ``tis`` or ``mis``, with a cap of `CAP`.
    """
    groups = len({r.group for r in responses})
    all_tokens = sum(int(r.mask.sum()) for r in responses)
    total = torch.zeros((), dtype=torch.float64)
    for response, (logprobs, entropies) in zip(responses, scored, strict=True):
        members = [r for r in responses if r.group == response.group]
        inner = torch.zeros((), dtype=torch.float64)
        length = max(1, int(response.mask.sum()))
        for objective in _token_objectives(
            name, response, logprobs, entropies, clip_low=clip_low, clip_high=clip_high, correction=correction,
            alpha=alpha, beta=beta,
        ):  # fmt: skip
            inner = inner + objective
        denominators = {
            "all tokens": all_tokens,
            "response mean": length * len(members) * groups,
            "response sum": len(members) * groups,
            "group mean": sum(int(r.mask.sum()) for r in members) * groups,
            "constant": max_tokens * len(members) * groups,
        }
        total = total + inner / denominators[REDUCERS[name]]
    return -total


def _token_objectives(
    name: str,
    response: Response,
    logprobs: Tensor,
    entropies: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    correction: str,
    alpha: float,
    beta: float,
) -> list[Tensor]:
    """Return for each loss token: corrected policy term + alpha * H - beta * k3."""
    steps = [t for t in range(len(logprobs)) if bool(response.mask[t])]
    if not steps:
        return []
    log_ratios = [logprobs[t] - response.old[t] for t in steps]
    geometric = torch.exp(sum(log_ratios[1:], start=log_ratios[0]) / len(steps))
    objectives: list[Tensor] = []
    for t, log_ratio in zip(steps, log_ratios, strict=True):
        ratio = geometric if name in WHOLE_RATIO else torch.exp(log_ratio)
        a, value = response.advantage, float(ratio.detach())
        if name == "nll":
            policy = logprobs[t]
        elif name == "pg":
            policy = ratio * a
        elif name in ("cispo", "scalerl"):
            bounded = min(max(value, 1 - clip_low), 1 + clip_high)
            policy = bounded * a * logprobs[t]
        elif name == "sapo":
            tau = 1.0 if a > 0 else 1.05
            policy = a * 4 / tau / (1 + torch.exp(-tau * (ratio - 1)))
        elif name == "ce_gppo" and a < 0 and value < 1 - clip_low:
            policy = a * 0.75 * (1 - clip_low) * ratio / value
        elif name == "ce_gppo" and a > 0 and value > 1 + clip_high:
            policy = a * 1.0 * (1 + clip_high) * ratio / value
        elif name == "ce_gppo":
            policy = ratio * a
        elif name == "aspo":
            beyond = (a < 0 and value < 1 - clip_low) or (a > 0 and value > 1 + clip_high)
            weight = min(1 / value, 3.0) if a > 0 else value
            policy = logprobs[t] * 0.0 if beyond else a * weight * ratio / value
        elif name in ("dppo", "dppo_kl"):
            pi, mu = float(torch.exp(logprobs[t].detach())), float(torch.exp(response.sampler[t]))
            distance = abs(pi - mu)
            if name == "dppo_kl":
                # 1 - p without cancellation, for a token of probability 1
                log_pi, log_mu = float(logprobs[t].detach()), float(response.sampler[t])
                others = max(-math.expm1(log_pi), sys.float_info.min)
                sampler_others = max(-math.expm1(log_mu), sys.float_info.min)
                distance = mu * (log_mu - log_pi) + sampler_others * math.log(sampler_others / others)
            beyond = (a > 0 and pi > mu and distance > clip_high) or (a < 0 and pi < mu and distance > clip_low)
            policy = logprobs[t] * 0.0 if beyond else ratio * a
        else:
            assert name in ("magic", "dapo", "grpo", "dr_grpo", "gspo", "ppo"), name
            bounded_ratio = torch.clip(ratio, 1 - clip_low, 1 + clip_high)
            unclipped_is_less = float((ratio * a).detach()) <= float((bounded_ratio * a).detach())
            policy = ratio * a if unclipped_is_less else bounded_ratio * a
        weight = float(torch.exp(response.old[t] - response.sampler[t]))
        if correction == "tis":
            policy = min(weight, CAP) * policy
        elif correction == "mis":
            policy = (weight if weight <= CAP else 0.0) * policy
        r = torch.exp(response.ref[t] - logprobs[t])
        objectives.append(policy + alpha * entropies[t] - beta * (r - torch.log(r) - 1))
    return objectives
