"""Tasksets of ``verifiers`` with the real package. `toy_taskset.py` in this folder uses the package's interface."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from magicrl.records import Message, Problem

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("pydantic_config") is None, reason="no extra `verifiers`"),
]
FILE = str(Path(__file__).with_name("toy_taskset.py"))


def problems(**options: Any) -> list[Problem]:
    from magicrl.environments.verifiers_adapter import tasks

    # as they arrive at a worker
    return [replace(found, extra=json.loads(json.dumps(asdict(found)["extra"]))) for found in tasks(FILE, **options)]


def begun(problem: Problem) -> Any:
    from magicrl.environments.verifiers_adapter import VerifiersEnvironment

    environment = VerifiersEnvironment()
    environment.reset(problem)
    return environment


def test_a_task_of_one_turn_is_judged_by_its_own_reward() -> None:
    first, second = problems()
    assert (first.prompt, first.references, first.environment) == ("What does a apple cost?", ("3",), "verifiers")
    assert first.context == (Message("system", "Be brief."),)
    assert len({first.id, second.id}) == 2
    step = begun(first).step("<think>4, no</think>3")
    assert (step.done, step.reward, step.metrics) == (True, 1.0, {"right": 1.0, "tool_results": 0.0})
    assert begun(second).step("3").reward == 0.0


def test_a_call_of_a_tool_is_answered_by_the_tasksets_server() -> None:
    from magicrl.environments.verifiers_adapter import VerifiersEnvironment

    problem = problems(tools=True)[1]
    (tool,) = VerifiersEnvironment.tools_of(problem)
    assert tool["function"]["name"] == "shop_price"
    assert tool["function"]["parameters"]["required"] == ["item"]
    asked = [begun(problem), begun(problem)]
    call = '<tool_call>{"name": "shop_price", "arguments": {"item": "pear"}}</tool_call>'
    assert [one.step(call).observation for one in asked] == ["4", "4"]
    assert "unknown tool" in asked[0].step('<tool_call>{"name": "steal", "arguments": {}}</tool_call>').observation
    # arguments that the tool's schema rejects are the model's mistake, which it reads
    assert "item" in asked[0].step('<tool_call>{"name": "shop_price", "arguments": {}}</tool_call>').observation
    steps = [one.step("4") for one in asked]
    assert [(step.reward, step.metrics["tool_results"]) for step in steps] == [(1.0, 3.0), (1.0, 1.0)]


def test_an_environment_of_its_own_goes_on_for_several_turns() -> None:
    first, second = problems(game=True, limit=2)
    assert (first.prompt, first.context) == ("Guess the price.", (Message("system", "Be brief."),))
    game = begun(second)
    assert game.step("5").observation == "Less."
    assert game.step("3").observation == "More."
    step = game.step("4")
    assert (step.done, step.reward) == (True, 1.0)


def test_a_failure_of_the_environment_is_an_error_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from magicrl.environments import verifiers_adapter

    first, second = problems(game=True)
    other = begun(second)
    with pytest.raises(RuntimeError, match="the shop burnt down"):
        begun(first).step("raise")
    monkeypatch.setattr(verifiers_adapter, "STEP_SECONDS", 0.5)
    hanging = begun(first)
    with pytest.raises(TimeoutError, match=r"said nothing for 0\.5 s"):
        hanging.step("hang")
    assert other.step("4").reward == 1.0


def test_a_problem_that_opens_otherwise_than_it_was_read_is_refused() -> None:
    problem = problems()[0]
    row = dict(problem.extra["verifiers"])
    row["task"] = {**row["task"], "prompt": "What does a plum cost?"}
    with pytest.raises(RuntimeError, match="not deterministic"):
        begun(replace(problem, extra={"verifiers": row}))
    with pytest.raises(ValueError, match="is no task of a taskset"):
        begun(replace(problem, extra={}))


@pytest.mark.parametrize(
    ("taskset", "options", "told"),
    [
        ("no-such-taskset", {}, "taskset 'no-such-taskset' not found"),
        ("nowhere.py", {}, "there is no file"),
        (FILE, {"prices": 3}, "prices"),
        (FILE, {"config": "{"}, "options.config is no JSON"),
        (FILE, {"config": '{"id": "user-sim"}'}, "2 seats without a model"),
    ],
)
def test_a_mistake_in_the_recipe_is_told(taskset: str, options: dict[str, Any], told: str) -> None:
    from magicrl.environments.verifiers_adapter import tasks

    with pytest.raises(ValueError, match=told):
        list(tasks(taskset, **options))


def test_it_plays_in_a_worker_and_what_fails_there_is_not_judged() -> None:
    from magicrl.config.schema import EnvironmentConfig
    from magicrl.environments.pool import EnvironmentPool
    from magicrl.records import Verdict

    first, second = problems(game=True)
    pool = EnvironmentPool(EnvironmentConfig())
    try:
        plays = [pool.begin(first), pool.begin(second)]
        assert [step.observation for step in pool.steps([(play, "5") for play in plays])] == ["Less.", "Less."]
        raised, judged = pool.steps([(plays[0], "raise"), (plays[1], "4")])
        assert isinstance(raised, Verdict)
        assert "the shop burnt down" in raised.reason
        assert not isinstance(judged, Verdict)
        assert judged.reward == 1.0
        # a reward that is not a number counts as not judged
        (nonsense,) = pool.steps([(pool.begin(problems()[0]), "nonsense")])
        assert isinstance(nonsense, Verdict)
        assert "nan" in nonsense.reason
    finally:
        pool.close()
