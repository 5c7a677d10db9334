"""A policy small enough to enumerate: every response of every prompt, with its exact probability.

Two prompts, three tokens (0 ends the response), at most three tokens. The sampling policy's probabilities
are multiples of 1/8, so that a group of 512 responses can hold every response exactly as often as it is
likely: a mean over the group is then an expectation, without any Monte-Carlo error.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from magicrl.records import (
    Completion,
    FinishReason,
    Outcome,
    Problem,
    RolloutGroup,
    RolloutRequest,
    SamplingParams,
    Verdict,
    frozen_floats,
    frozen_tokens,
)

PROMPTS = 2
TOKENS = 3
LIMIT = 3
GROUP = 8**LIMIT


@dataclass(frozen=True, kw_only=True)
class Path:
    """One possible response: its tokens, whether it was truncated, and the verifier's verdict on its text."""

    prompt: int
    tokens: tuple[int, ...]
    truncated: bool
    looks_correct: bool

    @property
    def reward(self) -> float:
        return float(self.looks_correct and not self.truncated)

    @property
    def states(self) -> list[int]:
        return [state_index(self.prompt, self.tokens[:t]) for t in range(len(self.tokens))]


def prefixes() -> list[tuple[int, ...]]:
    """Return contexts in which a token is chosen: without an end token, shorter than the limit."""
    return [p for length in range(LIMIT) for p in itertools.product(range(1, TOKENS), repeat=length)]


def state_index(prompt: int, prefix: tuple[int, ...]) -> int:
    return prompt * len(prefixes()) + prefixes().index(prefix)


NUM_STATES = PROMPTS * len(prefixes())


def paths() -> list[Path]:
    """Return all responses. About half of them are correct, including some truncated ones."""
    rng = np.random.default_rng(3)
    found: list[Path] = []
    for prompt in range(PROMPTS):
        for prefix in prefixes():
            for token in range(TOKENS):
                tokens = (*prefix, token)
                if token == 0 or len(tokens) == LIMIT:
                    looks = bool(rng.random() < 0.5)
                    found.append(Path(prompt=prompt, tokens=tokens, truncated=token != 0, looks_correct=looks))
    return found


def sampling_logits() -> Tensor:
    """Return ``[states, tokens]`` float64 logits. The probabilities of every row are eighths in some order."""
    rng = np.random.default_rng(4)
    eighths = [(4, 2, 2), (6, 1, 1), (4, 3, 1), (5, 2, 1)]
    rows = [rng.permutation(eighths[i % len(eighths)]) / 8 for i in range(NUM_STATES)]
    return torch.tensor(np.log(np.array(rows)), dtype=torch.float64)


def path_probability(logits: Tensor, path: Path) -> Tensor:
    table = torch.log_softmax(logits, dim=-1)
    return torch.stack([table[s, a] for s, a in zip(path.states, path.tokens, strict=True)]).sum().exp()


def expected_reward(logits: Tensor) -> Tensor:
    """Return J by enumeration, differentiable."""
    return torch.stack([path_probability(logits, p) * p.reward for p in paths()]).sum() / PROMPTS


def copies(path: Path) -> int:
    """Return how often the path occurs in a group of ``GROUP`` responses of the sampling policy."""
    exact = GROUP * float(path_probability(sampling_logits(), path))
    assert math.isclose(exact, round(exact)), f"{path} has probability {exact / GROUP}"
    return round(exact)


def exact_group(prompt: int) -> tuple[RolloutGroup, list[Verdict], list[Path]]:
    """Return the group of ``GROUP`` responses whose empirical distribution is the sampling policy."""
    table = torch.log_softmax(sampling_logits(), dim=-1)
    entropies = -(table.exp() * table).sum(-1)
    members = [p for p in paths() if p.prompt == prompt for _ in range(copies(p))]
    completions = tuple(
        Completion(
            tokens=frozen_tokens(p.tokens),
            text="",
            sampler_logprobs=frozen_floats([float(table[s, a]) for s, a in zip(p.states, p.tokens, strict=True)]),
            sampler_entropies=frozen_floats([float(entropies[s]) for s in p.states]),
            finish_reason=FinishReason.LENGTH if p.truncated else FinishReason.STOP,
            policy_version=0,
        )
        for p in members
    )
    request = RolloutRequest(
        draw=prompt,
        problem=Problem(id=f"p{prompt}", prompt="", references=("",), verifier="exact", source="tabular"),
        prompt_tokens=frozen_tokens([prompt]),
        group_size=GROUP,
        sampling=SamplingParams(temperature=1.0, max_tokens=LIMIT),
    )
    verdicts = [Verdict(outcome=Outcome.CORRECT if p.looks_correct else Outcome.WRONG, status="") for p in members]
    return RolloutGroup(request=request, completions=completions), verdicts, members
