"""A slow second opinion on every loss: loops over groups, responses and tokens, one scalar at a time, in float64.

Written from the papers' formulas and not from the library: no packing, no weights, no table. The tests and
`identities.py` hold the library against it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FEATURES = 5
VOCABULARY = 7


@dataclass(frozen=True, kw_only=True)
class Response:
    """One response of a linear-softmax policy: token t has logits ``features[t] @ weights``."""

    features: Tensor
    tokens: Tensor
    group: int
    advantage: float
    old: Tensor
    sampler: Tensor
    ref: Tensor
    mask: Tensor


def log_softmax_policy(weights: Tensor, features: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs of ``tokens`` and entropies, ``[T]`` each."""
    table = torch.log_softmax(features @ weights, dim=-1)
    return table.gather(-1, tokens[:, None])[:, 0], -(table.exp() * table).sum(-1)


def random_weights(seed: int = 0) -> Tensor:
    return torch.randn(FEATURES, VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def random_responses(seed: int, *, groups: int, members: int, drift: float = 0.15) -> list[Response]:
    """Responses of 1 to 9 tokens with log-probs of nearby policies: ratios reach well beyond the clips."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    weights = random_weights()
    near = {name: weights + drift * normal(FEATURES, VOCABULARY) for name in ("old", "sampler", "ref")}
    responses: list[Response] = []
    for group in range(groups):
        for member in range(members):
            length = int(torch.randint(1, 10, (1,), generator=generator))
            features = normal(length, FEATURES)
            tokens = torch.randint(0, VOCABULARY, (length,), generator=generator)
            mask = torch.rand(length, generator=generator) > 0.1
            mask[0] = True
            logprobs: dict[str, Any] = {
                name: log_softmax_policy(value, features, tokens)[0] for name, value in near.items()
            }
            # The last member plays a masked response: advantage 0, tokens still counted.
            advantage = 0.0 if member == members - 1 else float(normal(1))
            responses.append(
                Response(features=features, tokens=tokens, group=group, advantage=advantage, mask=mask, **logprobs)
            )
    return responses


def reference_loss(
    name: str,
    weights: Tensor,
    responses: list[Response],
    *,
    alpha: float,
    beta: float,
    clip_low: float,
    clip_high: float,
    max_tokens: int,
    correction: str = "none",
    cap: float = 2.0,
) -> Tensor:
    """The loss of method ``name`` on a whole mini-batch."""
    groups = sorted({r.group for r in responses})
    all_tokens = sum(int(r.mask.sum()) for r in responses)
    total = torch.zeros((), dtype=torch.float64)
    for group in groups:
        members = [r for r in responses if r.group == group]
        for response in members:
            inner = torch.zeros((), dtype=torch.float64)
            length = int(response.mask.sum())
            for objective in _token_objectives(
                name, weights, response, clip_low=clip_low, clip_high=clip_high, correction=correction, cap=cap,
                alpha=alpha, beta=beta,
            ):  # fmt: skip
                inner = inner + objective
            if name in ("magic", "dapo", "cispo", "nll", "ce_gppo", "aspo", "dppo", "dppo_kl"):
                total = total + inner / all_tokens
            elif name == "scalerl":
                total = total + inner / sum(int(r.mask.sum()) for r in members) / len(groups)
            elif name in ("grpo", "gspo", "sapo"):
                total = total + inner / length / len(members) / len(groups)
            elif name in ("pg", "ppo"):
                total = total + inner / len(members) / len(groups)
            elif name == "dr_grpo":
                total = total + inner / max_tokens / len(responses)
            else:
                raise ValueError(f"the reference does not know {name!r}")
    return -total


def _token_objectives(
    name: str,
    weights: Tensor,
    response: Response,
    *,
    clip_low: float,
    clip_high: float,
    correction: str,
    cap: float,
    alpha: float,
    beta: float,
) -> list[Tensor]:
    """For each loss token: corrected policy term + alpha * H - beta * k3."""
    logprobs, entropies = log_softmax_policy(weights, response.features, response.tokens)
    steps = [t for t in range(len(response.tokens)) if bool(response.mask[t])]
    log_ratios = [logprobs[t] - response.old[t] for t in steps]
    geometric = torch.exp(sum(log_ratios[1:], start=log_ratios[0]) / len(steps))
    objectives: list[Tensor] = []
    for t, log_ratio in zip(steps, log_ratios, strict=True):
        ratio = geometric if name == "gspo" else torch.exp(log_ratio)
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
                distance = mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
            beyond = (a > 0 and pi > mu and distance > clip_high) or (a < 0 and pi < mu and distance > clip_low)
            policy = logprobs[t] * 0.0 if beyond else ratio * a
        else:
            bounded_ratio = torch.clip(ratio, 1 - clip_low, 1 + clip_high)
            unclipped_is_less = float((ratio * a).detach()) <= float((bounded_ratio * a).detach())
            policy = ratio * a if unclipped_is_less else bounded_ratio * a
        weight = float(torch.exp(response.old[t] - response.sampler[t]))
        if correction == "tis":
            policy = min(weight, cap) * policy
        elif correction == "mis":
            policy = (weight if weight <= cap else 0.0) * policy
        r = torch.exp(response.ref[t] - logprobs[t])
        objectives.append(policy + alpha * entropies[t] - beta * (r - torch.log(r) - 1))
    return objectives
