"""A linear-softmax policy and its responses, as input of the slow reference of the losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from magicrl.selfcheck.slow_loss import Response

FEATURES = 5
VOCABULARY = 7


@dataclass(frozen=True, kw_only=True)
class LinearResponse(Response):
    """One response of a linear-softmax policy: token t has logits ``features[t] @ weights``."""

    features: Tensor
    tokens: Tensor


def log_softmax_policy(weights: Tensor, features: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probs of ``tokens`` and entropies, ``[T]`` each."""
    table = torch.log_softmax(features @ weights, dim=-1)
    return table.gather(-1, tokens[:, None])[:, 0], -(table.exp() * table).sum(-1)


def random_weights(seed: int = 0) -> Tensor:
    return torch.randn(FEATURES, VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def random_responses(seed: int, *, groups: int, members: int, drift: float = 0.15) -> list[LinearResponse]:
    """Return responses of 1 to 9 tokens with log-probs of nearby policies: ratios reach far beyond the clips."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    weights = random_weights()
    near = {name: weights + drift * normal(FEATURES, VOCABULARY) for name in ("old", "sampler", "ref")}
    responses: list[LinearResponse] = []
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
            # the last member simulates a masked response: advantage 0, tokens still counted
            advantage = 0.0 if member == members - 1 else float(normal(1))
            responses.append(
                LinearResponse(
                    features=features, tokens=tokens, group=group, advantage=advantage, mask=mask, **logprobs
                )
            )
    return responses
