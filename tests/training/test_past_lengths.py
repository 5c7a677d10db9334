"""Who starts first: by past lengths, and nothing else changes for it."""

from __future__ import annotations

import json

import numpy as np

from magicrl.records import (
    Completion,
    FinishReason,
    Problem,
    RolloutGroup,
    RolloutRequest,
    SamplingParams,
    frozen_floats,
    frozen_tokens,
)
from magicrl.training.past_lengths import PastLengths


def request(draw: int, name: str) -> RolloutRequest:
    return RolloutRequest(
        draw=draw,
        problem=Problem(id=name, prompt="", golds=("1",), verifier="exact", source="test"),
        prompt_tokens=frozen_tokens([1]),
        group_size=2,
        sampling=SamplingParams(temperature=1.0, max_tokens=100),
    )


def group(draw: int, name: str, *lengths: int) -> RolloutGroup:
    completions = tuple(
        Completion(
            tokens=frozen_tokens(np.zeros(n)),
            text="",
            sampler_logprobs=frozen_floats(np.zeros(n)),
            sampler_entropies=None,
            finish_reason=FinishReason.STOP,
            policy_version=0,
        )
        for n in lengths
    )
    return RolloutGroup(request=request(draw, name), completions=completions)


def test_the_longest_first_and_the_unknown_in_their_middle() -> None:
    lengths = PastLengths()
    unknown = [request(0, "a"), request(1, "b")]
    assert lengths.longest_first(unknown) == unknown, "nothing is known: the order of issue"
    for seen in (group(0, "short", 2, 4), group(1, "long", 50, 70), group(2, "middling", 29, 31)):
        lengths.saw(seen)
    asked = [request(n, name) for n, name in enumerate(("new", "short", "middling", "long", "newer"))]
    # the known are expected to take 3, 30 and 60, so that new ones (31) come between the last two
    assert [r.problem.id for r in lengths.longest_first(asked)] == ["long", "new", "newer", "middling", "short"]
    lengths.saw(group(9, "short", 80, 90))
    assert lengths.longest_first(asked)[0].problem.id == "short", "the last draw counts"


def test_it_goes_through_a_checkpoint() -> None:
    lengths, again = PastLengths(), PastLengths()
    lengths.saw(group(0, "a", 1, 2))
    again.restore(json.loads(json.dumps(lengths.state())))
    assert again.state() == lengths.state() == {"a": 1.5}
