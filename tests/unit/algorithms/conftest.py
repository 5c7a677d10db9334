"""Builders of records."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from magicrl.algorithms.advantages import score_group
from magicrl.records import (
    Completion,
    FinishReason,
    Outcome,
    Problem,
    RolloutGroup,
    RolloutRequest,
    SamplingParams,
    ScoredGroup,
    Verdict,
    frozen_floats,
    frozen_tokens,
)

OUTCOMES = {"c": Outcome.CORRECT, "w": Outcome.WRONG, "n": Outcome.NOT_JUDGED}
MakeGroup = Callable[..., ScoredGroup]


@pytest.fixture
def make_group() -> MakeGroup:
    """Return a builder: ``make_group("cwn", "..t", draw=3)`` has a letter per completion (correct, wrong, not judged).

    In the second text, ``t`` is truncated, ``a`` aborted and ``.`` ended.
    """
    ends = {".": FinishReason.STOP, "t": FinishReason.LENGTH, "a": FinishReason.ABORTED}

    def build(outcomes: str, finish: str | None = None, *, draw: int = 0, problem: str = "p") -> ScoredGroup:
        completions = tuple(
            Completion(
                tokens=frozen_tokens([1, 2]),
                text="",
                sampler_logprobs=frozen_floats([-1.0, -2.0]),
                sampler_entropies=None,
                finish_reason=ends[end],
                policy_version=0,
            )
            for end in (finish or "." * len(outcomes))
        )
        request = RolloutRequest(
            draw=draw,
            problem=Problem(
                id=f"#{problem}", key=problem, prompt="", references=("",), verifier="exact", source="test"
            ),
            prompt_tokens=frozen_tokens([0]),
            group_size=len(outcomes),
            sampling=SamplingParams(temperature=1.0, max_tokens=8),
        )
        verdicts = [Verdict(outcome=OUTCOMES[letter], status="") for letter in outcomes]
        return score_group(RolloutGroup(request=request, completions=completions), verdicts)

    return build
