"""When two problems are the same, and which values a record keeps in any case."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from builders import completion, problem, request

from magicrl.algorithms.advantages import score_group
from magicrl.records import (
    FinishReason,
    Message,
    Outcome,
    RolloutGroup,
    Verdict,
    frozen_floats,
    frozen_tokens,
    reward_earned,
)


def test_a_record_keeps_its_numbers_when_their_source_is_written_into() -> None:
    tokens, floats = np.arange(3, dtype=np.int32), np.zeros(3, dtype=np.float32)
    kept, values = frozen_tokens(tokens), frozen_floats(floats)
    tokens[0], floats[0] = 9, 9.0
    assert kept.tolist() == [0, 1, 2]
    assert values.tolist() == [0.0, 0.0, 0.0]
    assert not kept.flags.writeable
    assert tokens.flags.writeable


def test_earlier_turns_make_another_problem() -> None:
    one = problem("a", "What is 2 + 3?")
    asked = [replace(one, key="", context=(Message(role, "Be brief."),)) for role in ("system", "user")]
    assert len({found.key for found in (one, *asked)}) == 3


def test_templates_of_two_sources_are_two_clusters() -> None:
    first, same, other = (problem(p, p, template="t", source=s) for p, s in (("a", "x"), ("b", "x"), ("c", "y")))
    assert first.cluster == same.cluster != other.cluster


def test_a_truncated_response_is_not_right_and_a_punishment_stays() -> None:
    ended, cut = completion([1]), completion([1], finish_reason=FinishReason.LENGTH)
    right = Verdict(outcome=Outcome.CORRECT, status="matched")
    scored = score_group(RolloutGroup(request=request(0, [0], size=2), completions=(ended, cut)), [right, right])
    assert scored.correct.tolist() == [True, False]
    assert [reward_earned(reward, truncated=True) for reward in (0.5, -0.5)] == [0.0, -0.5]
