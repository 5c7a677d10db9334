"""Servers of OpenEnv against the real package: the apps of `toy_server.py` beside this file, over its own protocol."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from magicrl.records import Problem

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("openenv") is None, reason="no extra `openenv`"),
]
FILE = Path(__file__).with_name("toy_server.py")


def problems(app: str = "numbers", **options: Any) -> list[Problem]:
    from magicrl.environments.openenv_adapter import seeds

    found = seeds(f"{FILE}:{app}", **{"episodes": 3, **options})
    return [replace(problem, extra=json.loads(json.dumps(asdict(problem)["extra"]))) for problem in found]


def begun(problem: Problem) -> Any:
    from magicrl.environments.openenv_adapter import OpenEnvEnvironment

    environment = OpenEnvEnvironment()
    environment.reset(problem)
    return environment


def test_a_seed_is_a_problem_and_a_session_its_episode() -> None:
    found = problems(prompt="Answer with a number alone.", first_seed=7)
    assert [problem.extra["openenv"]["reset"] for problem in found] == [{"seed": 7}, {"seed": 8}, {"seed": 9}]
    assert found[0].prompt == "Answer with a number alone.\nA number from 1 to 9."
    assert (found[0].environment, len({problem.id for problem in found})) == ("openenv", 3)
    # seed 7 gives 6; two sessions at once do not meet
    games = [begun(found[0]), begun(found[0])]
    assert [game.step("5").observation for game in games] == ["more", "more"]
    assert games[0].step(" 7 ").observation == "less"
    last = games[0].step("6")
    assert (last.done, last.observation) == (True, "")
    assert last.reward == pytest.approx(1.2)
    assert last.metrics == {"steps": 3.0, "refused": 0.0}
    assert games[1].step("6").reward == pytest.approx(1.1)


def test_a_turn_that_is_no_action_costs_a_turn() -> None:
    game = begun(problems()[0])
    assert "does not fit" in game.step("seven").observation
    for _ in range(4):
        assert not game.step("0").done
    last = game.step("0")
    assert (last.done, last.metrics) == (True, {"steps": 6.0, "refused": 1.0})
    assert last.reward == pytest.approx(0.5)


def test_actions_that_are_calls_of_tools() -> None:
    from magicrl.environments.openenv_adapter import OpenEnvEnvironment

    problem = problems("shop", episodes=1)[0]
    assert problem.prompt == "Buy an apple."
    assert [tool["function"]["name"] for tool in OpenEnvEnvironment.tools_of(problem)] == ["price", "pay"]
    shop = begun(problem)
    assert shop.step("3").observation == "A turn must call one tool, this one calls 0."
    assert shop.step('<tool_call>{"name": "price", "arguments": {"item": "apple"}}</tool_call>').observation == "3"
    assert "steal" in shop.step('{"name": "steal", "arguments": {}}').observation
    last = shop.step('{"name": "pay", "arguments": {"amount": 3}}')
    assert (last.done, last.reward, last.metrics) == (True, 1.0, {"steps": 4.0, "refused": 1.0})


def test_an_action_as_json_and_an_observation_field() -> None:
    game = begun(problems(action="json", observation="text")[0])
    assert game.step("5").observation == "The action must be a JSON object"
    assert game.step('{"guess": 1}').observation == "more"


def test_a_failure_of_the_server_is_an_error_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from magicrl.environments import openenv_adapter

    found = problems()
    other = begun(found[0])
    with pytest.raises(RuntimeError, match="the number is lost"):
        begun(found[1]).step("99")
    monkeypatch.setattr(openenv_adapter, "WAIT_SECONDS", 0.5)
    hanging = begun(found[1])
    with pytest.raises(TimeoutError):
        hanging.step("98")
    assert not other.step("1").done


def test_a_server_with_too_few_sessions_and_one_that_opens_otherwise() -> None:
    problem = problems("narrow", episodes=1)[0]
    first = begun(problem)
    # by what comes first, the server's word or the end of the connection
    with pytest.raises((RuntimeError, ConnectionError), match=r"CAPACITY_REACHED|max_concurrent_envs"):
        begun(problem)
    assert not first.step("1").done
    row = {**problem.extra["openenv"], "server": f"{FILE}:numbers", "opening": "A number from 1 to 5."}
    with pytest.raises(RuntimeError, match="does not follow its seed"):
        begun(replace(problem, extra={"openenv": row}))


@pytest.mark.parametrize(
    ("server", "options", "told"),
    [
        ("http://127.0.0.1:9", {}, "does not tell its schema"),
        (f"{FILE}:nothing", {}, "has no 'nothing'"),
        (f"{FILE}:numbers", {"reset": "[]"}, "options.reset must be a JSON object"),
        (f"{FILE}:numbers", {"observation": "board"}, "has no 'board'"),
    ],
)
def test_a_mistake_in_the_recipe_is_told(server: str, options: dict[str, Any], told: str) -> None:
    from magicrl.environments.openenv_adapter import seeds

    with pytest.raises(ValueError, match=told):
        list(seeds(server, **{"episodes": 1, **options}))


def test_it_plays_in_a_worker_and_what_fails_there_is_not_judged() -> None:
    from magicrl.config.schema import EnvironmentConfig
    from magicrl.environments.pool import EnvironmentPool
    from magicrl.records import Verdict

    problem = problems(first_seed=7, episodes=1)[0]
    pool = EnvironmentPool(EnvironmentConfig())
    try:
        plays = [pool.begin(problem), pool.begin(problem)]
        assert [step.observation for step in pool.steps([(play, "5") for play in plays])] == ["more", "more"]
        raised, judged = pool.steps([(plays[0], "99"), (plays[1], "6")])
        assert isinstance(raised, Verdict)
        assert "the number is lost" in raised.reason
        assert not isinstance(judged, Verdict)
        assert judged.reward == pytest.approx(1.1)
    finally:
        pool.close()
