"""The bound on staleness as the learner sees it: ages of tokens by hand, and what happens when an engine breaks it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from magicrl.records import Completion, FinishReason, Problem, frozen_floats, frozen_tokens
from magicrl.rollout.protocol import Capabilities
from magicrl.training.metrics import StalenessMeter
from magicrl.training.protocols import TrainingStopped


def completion(version: int, spans: tuple[tuple[int, int], ...] = ()) -> Completion:
    return Completion(
        tokens=frozen_tokens([1, 2, 3, 4]),
        text="",
        sampler_logprobs=frozen_floats([-1.0] * 4),
        sampler_entropies=None,
        finish_reason=FinishReason.LENGTH,
        policy_version=version,
        version_spans=spans,
    )


def buffer(*completions: Completion) -> list[Any]:
    problem = Problem(id="sum-3", prompt="", golds=("1",), verifier="exact", source="test")
    request = SimpleNamespace(problem=problem, draw=7)
    return [SimpleNamespace(group=SimpleNamespace(request=request, completions=completions))]


def meter(most: int, versions: list[int]) -> StalenessMeter:
    """One that has seen an engine serve these versions, a step each."""
    found = StalenessMeter(most)
    for version in versions:
        found.begin_step(SimpleNamespace(policy_version=version, capabilities=Capabilities()))  # pyright: ignore[reportArgumentType]
    return found


def test_ages_are_steps_however_many_updates_a_step_makes() -> None:
    """Two updates a step, and a step that made none: of versions 0, 2, 2, 4, 6 the newest three count."""
    seen = meter(2, [0, 2, 2, 4, 6])
    groups = buffer(completion(6), completion(2, ((2, 1), (4, 2), (6, 1))))
    seen.check(groups)
    values = seen.metrics(groups, {(7, 0): frozen_floats([-1.5] * 4), (7, 1): frozen_floats([0.0] * 4)})
    assert values["staleness/mean"] == (0 * 4 + 2 + 1 + 1 + 0) / 8
    assert values["staleness/max"] == 2
    assert values["staleness/begun/mean"] == 1.0
    assert values["staleness/older/ratio"] == 3 / 8
    assert values["staleness/spanning/ratio"] == 0.5
    assert [values[f"staleness/share_{n}/ratio"] for n in range(3)] == [5 / 8, 2 / 8, 1 / 8]
    assert values["staleness/fresh_gap/mean"] == pytest.approx(0.5), "of the responses of version 6 alone"


@pytest.mark.parametrize(
    "response",
    [completion(2), completion(2, ((2, 1), (4, 3))), completion(4, ((4, 3), (9, 1)))],
    ids=["begun too long ago", "its first token is too old", "a version that was never served"],
)
def test_tokens_of_other_versions_stop_the_run_and_are_named(response: Completion) -> None:
    seen = meter(1, [0, 2, 4, 6])
    with pytest.raises(TrainingStopped, match=r"response 2 to problem 'sum-3' .* version [29], .*versions 4, 6 alone"):
        seen.check(buffer(completion(6), response))


def test_the_bound_holds_over_a_resume() -> None:
    seen, resumed = meter(2, [0, 1, 2]), StalenessMeter(2)
    resumed.restore(seen.state())
    resumed.begin_step(SimpleNamespace(policy_version=3, capabilities=Capabilities()))  # pyright: ignore[reportArgumentType]
    resumed.check(buffer(completion(1)))
    with pytest.raises(TrainingStopped, match="versions 1, 2, 3 alone"):
        resumed.check(buffer(completion(0)))


def test_a_synchronous_run_has_no_bound_to_check() -> None:
    meter(0, [0, 1]).check(buffer(completion(5)))
