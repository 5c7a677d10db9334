"""Evaluations and validation on scripted responses: correct answers, shown samples, the best step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from builders import completion, problem

from magicrl.config.schema import EvaluationConfig, LoggingConfig, RunConfig, TrainConfig
from magicrl.records import Completion, Episode, FinishReason, Message, Outcome, RolloutRequest, Verdict, frozen_tokens
from magicrl.rollout.protocol import RolloutEngine
from magicrl.training.curriculum import Validation, held_out_test
from magicrl.training.protocols import TrainingStopped
from magicrl.training.session import Session

RIGHT = Verdict(outcome=Outcome.CORRECT, status="matched")
JUDGE: Any = None
"""Never called: the responses come with their verdicts, as from an environment."""


class Scripted(RolloutEngine):
    """Engine that gives the same responses to every problem."""

    _max_context, _version = 64, 3

    def __init__(self, *completions: Completion) -> None:
        self.completions = completions
        self.requests: list[RolloutRequest] = []

    def generate(self, request: RolloutRequest) -> Sequence[Completion]:
        self.requests.append(request)
        return [self.completions[index % len(self.completions)] for index in request.indices]


def response(verdict: Verdict, observed: tuple[tuple[int, int], ...] = (), **further: Any) -> Completion:
    return completion(range(8), episode=Episode(observed=observed, answer="", verdict=verdict), **further)


def recipe(**settings: Any) -> TrainConfig:
    evaluation = EvaluationConfig(max_tokens=9, **settings)
    return TrainConfig.model_construct(evaluation=evaluation, run=RunConfig(), logging=LoggingConfig(samples=1))


def measured(engine: Scripted, *, start: bool = True, **settings: Any) -> dict[str, Any]:
    return held_out_test(
        "before" if start else "after",
        "sums",
        [replace(problem("p0"), context=(Message("system", "Be brief."),)), problem("p1")],
        recipe(**settings),
        (engine, JUDGE, lambda _: frozen_tokens([1])),
        lambda *_: None,
    )


def test_a_truncated_response_is_shown_as_wrong_and_observations_are_not_its_tokens() -> None:
    engine = Scripted(response(RIGHT, ((2, 3),), finish_reason=FinishReason.LENGTH), response(RIGHT))
    found = measured(engine, temperatures=(1.0,), samples=2, pass_at=())
    (sample,) = found["samples"]
    assert sample["prompt"].startswith("system: Be brief.\n\nuser: ")
    (shown,) = sample["responses"]
    assert (shown["outcome"], shown["status"], shown["tokens"]) == ("wrong", "truncated", 5)
    assert found["temperatures"]["1.0"]["accuracy"]["mean"] == 0.5


def test_a_test_samples_no_more_than_its_figures_need() -> None:
    settings: dict[str, Any] = {"temperatures": (0.0, 1.0), "samples": 2, "pass_at": (3,), "start_pass_at": 5}
    for start, most in ((True, 5), (False, 3)):
        engine = Scripted(response(RIGHT))
        found = measured(engine, start=start, **settings)
        assert [(r.sampling.temperature, r.group_size) for r in engine.requests] == [(0.0, 1)] * 2 + [(1.0, most)] * 2
        assert set(found["temperatures"]["1.0"]["pass_at"]) == {str(k) for k in {3, most}}


def test_pass_at_k_without_enough_verdicts_does_not_end_a_run() -> None:
    unjudged = Verdict(outcome=Outcome.NOT_JUDGED, status="timeout")
    engine = Scripted(*[response(RIGHT)] * 3, response(unjudged))
    found = measured(engine, temperatures=(1.0,), samples=4, pass_at=(2, 4))
    assert set(found["temperatures"]["1.0"]["pass_at"]) == {"2"}


def test_the_best_step_of_graded_rewards_is_that_of_the_highest_mean() -> None:
    validation = Validation(recipe(every=2, validation_samples=1), [problem("p0")], lambda *_: None)
    steps = {2: (Outcome.WRONG, 0.9), 4: (Outcome.CORRECT, 0.5)}
    for step, (outcome, score) in steps.items():
        engine = Scripted(response(Verdict(outcome=outcome, status="graded", score=score)))
        values = validation.measure(step, engine, JUDGE, lambda _: frozen_tokens([1]))
        assert values["validation/reward/mean"] == score
        assert values["validation/accuracy/mean"] == float(outcome is Outcome.CORRECT)
    assert validation.best == (2, 0.9)


def test_a_test_whose_greedy_episodes_are_all_truncated_is_reported() -> None:
    """A truncated episode has no reward, so only the other temperature has graded rewards."""
    cut = response(Verdict(outcome=Outcome.WRONG, status="wrong"), finish_reason=FinishReason.LENGTH)
    half = response(Verdict(outcome=Outcome.WRONG, status="graded", score=0.5))
    found = measured(Scripted(cut), temperatures=(0.0,))
    found["temperatures"] |= measured(Scripted(half), temperatures=(1.0,), samples=1, pass_at=())["temperatures"]
    told: list[str] = []
    session: Any = SimpleNamespace(_event_once=lambda _kind, message: told.append(message))
    Session._report_evaluation(session, "before", found)
    assert told == ["sums before training: mean reward 0.000 at temperature 0, 0.500 at temperature 1"]


FAILED = Verdict(outcome=Outcome.NOT_JUDGED, status="infrastructure_error", reason="status 503")


def test_a_validation_without_verdicts_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    validation = Validation(recipe(every=2, validation_samples=1), [problem("p0")], lambda *_: None)
    assert validation.measure(2, Scripted(response(FAILED)), JUDGE, lambda _: frozen_tokens([1])) == {}
    assert "step 2: no validation: no answer could be judged: status 503" in caplog.text
    assert validation.best is None
    assert validation.measure(4, Scripted(response(RIGHT)), JUDGE, lambda _: frozen_tokens([1]))
    assert validation.best == (4, 1.0)


def test_a_test_without_verdicts_stops_the_run_and_says_where_and_how_it_continues() -> None:
    with pytest.raises(TrainingStopped, match=r"test set 'sums' after training: .*status 503.*continue with --resume"):
        measured(Scripted(response(FAILED)), start=False, temperatures=(1.0,), samples=1, pass_at=())
