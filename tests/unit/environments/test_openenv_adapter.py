"""Servers of OpenEnv: the package's own (0.10, in a separate virtual environment), and a scripted one for failures."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.server import Server, ServerConnection, serve

from magicrl.environments import openenv_adapter
from magicrl.environments.openenv_adapter import OpenEnvEnvironment, seeds
from magicrl.records import Problem

PYTHON = Path(sys.prefix) / "openenv-server" / "bin" / "python"
real = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no servers of OpenEnv: make .venv/.environments"),
]


def problems(server: str, **options: Any) -> list[Problem]:
    """Return problems of a server, as they are after they were written and read."""
    given: dict[str, Any] = {"episodes": 3, **options}
    found = seeds(server, **given)
    return [replace(problem, extra=json.loads(json.dumps(asdict(problem)["extra"]))) for problem in found]


def begun(problem: Problem) -> OpenEnvEnvironment:
    environment = OpenEnvEnvironment()
    environment.reset(problem)
    return environment


# With servers of the package.


@pytest.fixture(scope="module")
def address() -> Iterator[Callable[[str], str]]:
    """Start an app of `openenv_servers.py` at its first use, and return its address."""
    running: dict[str, tuple[subprocess.Popen[bytes], str]] = {}

    def start(app: str) -> str:
        if app not in running:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            file = Path(__file__).with_name("openenv_servers.py")
            process = subprocess.Popen([str(PYTHON), str(file), app, str(port)], env={"PATH": "/usr/bin:/bin"})
            running[app] = process, f"http://127.0.0.1:{port}"
            for _ in range(600):
                with suppress(OSError), urllib.request.urlopen(f"{running[app][1]}/schema") as reply:
                    reply.read()
                    break
                assert process.poll() is None, "the server ended"
                time.sleep(0.2)
        return running[app][1]

    yield start
    for process, _ in running.values():
        process.kill()
        process.wait()


class TestServers:
    """The package's own servers."""

    pytestmark = real

    def test_a_seed_is_a_problem_and_a_session_its_episode(self, address: Callable[[str], str]) -> None:
        found = problems(address("numbers"), prompt="Answer with a number.", first_seed=7)
        assert [problem.extra["openenv"]["reset"] for problem in found] == [{"seed": 7}, {"seed": 8}, {"seed": 9}]
        assert found[0].prompt == "Answer with a number.\nA number from 1 to 9."
        assert (found[0].environment, len({problem.id for problem in found})) == ("openenv", 3)
        games = [begun(found[0]), begun(found[0])]  # seed 7 gives 6; the sessions are independent
        assert [game.step("5").observation for game in games] == ["more", "more"]
        assert games[0].step(" 7 ").observation == "less"
        last = games[0].step("6")
        assert (last.done, last.observation) == (True, "")
        assert last.reward == pytest.approx(1.2)
        assert last.metrics == {"steps": 3.0, "refused": 0.0}
        assert games[1].step("6").reward == pytest.approx(1.1)

    def test_a_turn_that_is_no_action_costs_a_turn(self, address: Callable[[str], str]) -> None:
        game = begun(problems(address("numbers"))[0])
        assert "does not fit" in game.step("seven").observation
        for _ in range(4):
            assert not game.step("0").done
        last = game.step("0")
        assert (last.done, last.metrics) == (True, {"steps": 6.0, "refused": 1.0})
        assert last.reward == pytest.approx(0.5)

    def test_actions_that_are_calls_of_tools(self, address: Callable[[str], str]) -> None:
        problem = problems(address("shop"), episodes=1)[0]
        assert problem.prompt == "Buy an apple."
        assert [tool["function"]["name"] for tool in OpenEnvEnvironment.tools_of(problem)] == ["price", "pay"]
        shop = begun(problem)
        assert shop.step("3").observation == "A turn must call one tool, this one calls 0."
        assert shop.step('<tool_call>{"name": "price", "arguments": {"item": "apple"}}</tool_call>').observation == "3"
        assert "steal" in shop.step('{"name": "steal", "arguments": {}}').observation
        last = shop.step('{"name": "pay", "arguments": {"amount": 3}}')
        assert (last.done, last.reward, last.metrics) == (True, 1.0, {"steps": 4.0, "refused": 1.0})

    def test_an_action_as_json_and_an_observation_field(self, address: Callable[[str], str]) -> None:
        game = begun(problems(address("numbers"), action="json", observation="text")[0])
        assert game.step("5").observation == "The action must be a JSON object"
        assert game.step('{"guess": 1}').observation == "more"

    def test_a_failure_of_the_environment_is_an_error_and_others_continue(self, address: Callable[[str], str]) -> None:
        found = problems(address("numbers"))
        other = begun(found[0])
        with pytest.raises(RuntimeError, match="the number is lost"):
            begun(found[1]).step("99")
        assert not other.step("1").done

    def test_a_server_with_too_few_sessions(self, address: Callable[[str], str]) -> None:
        problem = problems(address("narrow"), episodes=1)[0]
        first = begun(problem)
        # the server's reason, or the end of the connection, whichever comes first
        with pytest.raises((RuntimeError, ConnectionError), match=r"CAPACITY_REACHED|max_concurrent_envs"):
            begun(problem)
        assert not first.step("1").done

    def test_it_plays_in_a_worker_and_a_failure_there_is_not_judged(self, address: Callable[[str], str]) -> None:
        from magicrl.config.schema import EnvironmentConfig
        from magicrl.environments.pool import EnvironmentPool
        from magicrl.records import Verdict

        problem = problems(address("numbers"), first_seed=7, episodes=1)[0]
        pool = EnvironmentPool(EnvironmentConfig())
        try:
            plays = [pool.begin(problem), pool.begin(problem)]
            assert [getattr(step, "observation", step) for step in pool.steps([(play, "5") for play in plays])] == [
                "more",
                "more",
            ]
            raised, judged = pool.steps([(plays[0], "99"), (plays[1], "6")])
            assert isinstance(raised, Verdict)
            assert "the number is lost" in raised.reason
            assert not isinstance(judged, Verdict)
            assert judged.reward == pytest.approx(1.1)
        finally:
            pool.close()


# With a scripted server.


@pytest.fixture
def scripted() -> Iterator[Callable[[list[Any]], str]]:
    """Serve these replies on every session, then close it. A number is a pause in seconds."""
    servers: list[Server] = []

    def start(replies: list[Any]) -> str:
        def play(connection: ServerConnection) -> None:
            for reply in replies:
                connection.recv()
                if isinstance(reply, float):
                    time.sleep(reply)
                else:
                    connection.send(json.dumps(reply))

        servers.append(serve(play, "127.0.0.1", 0))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].socket.getsockname()[1]}"

    yield start
    for server in servers:
        server.shutdown()


def observed(reward: float | None = None, *, done: bool = False, **observation: Any) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}


def problem_of(server: str, **row: Any) -> Problem:
    known = {"server": server, "action": "move", "observation": "", "tools": None, "reset": {"seed": 1}}
    extra = {"openenv": known | {"opening": "Begin."} | row}
    return Problem(id="p", prompt="Begin.", references=(), verifier="exact", source="s", extra=extra)


def test_rewards_of_steps_are_added_and_metadata_is_not_shown(scripted: Callable[[list[Any]], str]) -> None:
    replies = [observed(text="Begin.", metadata={"x": 1}), observed(0.25, text="on"), observed(0.5, done=True, text="")]
    game = begun(problem_of(scripted(replies)))
    assert game.step("left").observation == "on"
    last = game.step("left")
    assert (last.reward, last.metrics) == (0.75, {"steps": 2.0, "refused": 0.0})


def test_without_a_reward_the_problems_verifier_judges(scripted: Callable[[list[Any]], str]) -> None:
    game = begun(problem_of(scripted([observed(text="Begin."), observed(done=True, text="")])))
    assert game.step("left").reward is None


def test_several_fields_are_shown_as_json(scripted: Callable[[list[Any]], str]) -> None:
    opening = '{"board": [1], "text": "Begin."}'
    game = begun(
        problem_of(scripted([observed(board=[1], text="Begin."), observed(board=[], text="é")]), opening=opening)
    )
    assert game.step("left").observation == '{"board": [], "text": "é"}'


def test_an_action_that_the_schema_refuses_costs_a_turn(scripted: Callable[[list[Any]], str]) -> None:
    refused = {"type": "error", "data": {"code": "VALIDATION_ERROR", "message": "bad"}}
    game = begun(problem_of(scripted([observed(text="Begin."), refused, observed(1.0, done=True, text="")])))
    assert "does not fit" in game.step("left").observation
    assert game.step("up").metrics == {"steps": 2.0, "refused": 1.0}


def test_other_errors_of_the_server_are_errors(scripted: Callable[[list[Any]], str]) -> None:
    failed = {"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "the board is lost"}}
    game = begun(problem_of(scripted([observed(text="Begin."), failed])))
    with pytest.raises(RuntimeError, match="EXECUTION_ERROR: the board is lost"):
        game.step("left")


def test_a_server_that_ends_or_hangs(scripted: Callable[[list[Any]], str], monkeypatch: pytest.MonkeyPatch) -> None:
    game = begun(problem_of(scripted([observed(text="Begin.")])))
    with pytest.raises(ConnectionError, match="max_concurrent_envs"):
        game.step("left")
    monkeypatch.setattr(openenv_adapter, "WAIT_SECONDS", 0.2)
    hanging = begun(problem_of(scripted([observed(text="Begin."), 2.0])))
    with pytest.raises(TimeoutError):
        hanging.step("left")


def test_an_environment_that_opens_differently_is_refused(scripted: Callable[[list[Any]], str]) -> None:
    with pytest.raises(RuntimeError, match="does not follow its seed"):
        begun(problem_of(scripted([observed(text="Something else.")])))


def test_a_problem_of_another_source_is_refused() -> None:
    with pytest.raises(ValueError, match='read it with source = "openenv"'):
        begun(Problem(id="p", prompt="", references=("1",), verifier="exact", source="s"))


@pytest.mark.parametrize(
    ("server", "options", "message"),
    [
        ("http://127.0.0.1:9", {}, "is it running"),
        ("127.0.0.1:9", {}, "options.server must be an address such as http://127.0.0.1:8000"),
        ("http://127.0.0.1:9", {"reset": "[]"}, "options.reset must be a JSON object"),
    ],
)
def test_a_mistake_in_the_recipe_is_an_error(server: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(seeds(server, episodes=1, **options))
