"""OpenEnv (``openenv-core``, wheel 0.3): seeds of an environment server as problems, its sessions to play them.

    [[data.train]]
    source = "openenv"
    environment = "openenv"
    options = { server = "http://127.0.0.1:8000", episodes = 200, prompt = "Guess the number." }

``server`` is the address of a running server, or ``file.py:app`` (``module:app``), an app of ``create_app`` that every
worker serves for itself. An episode is one session of it: the server has to allow as many at once as a worker plays
(``max_concurrent_envs``).
"""

from __future__ import annotations

import asyncio
import functools
import json
import threading
import time
import weakref
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from magicrl.environments.base import Step
from magicrl.environments.packages import ToolCall, event_loop, package, read_turn, wait
from magicrl.records import Problem
from magicrl.registry import resolve

_client = package("openenv.core.generic_client", "openenv")
_requests = package("requests", "openenv")
_uvicorn = package("uvicorn", "openenv")
_closed = package("websockets.exceptions", "openenv")

WAIT_SECONDS = 60.0
"""By the clock, for a server's reply."""
_TOOL_ACTIONS = ("Action", "CallToolAction", "ListToolsAction")


def seeds(
    server: str,
    *,
    episodes: int,
    first_seed: int = 0,
    reset: str = "{}",
    prompt: str = "",
    action: str = "",
    observation: str = "",
) -> Iterator[Problem]:
    """Problems of an environment server, a seed each; a source of a recipe, with these options.

    Args:
        server: its address, or ``file.py:app``.
        episodes: how many problems; ``reset`` gets the seeds from ``first_seed`` on.
        first_seed: the first of them.
        reset: JSON object of further arguments of the environment's ``reset``.
        prompt: stands before the first observation.
        action: the field of the action that gets a turn's text; ``json``: a turn must be the whole action as JSON.
            Default: the one field that the action's schema requires; ``json`` where there is none, or several.
        observation: the field of an observation that the model reads. Default: all of it as JSON, or its only field.

    Raises:
        ValueError: the server cannot be reached or refuses, or an option is wrong; says why.
    """
    arguments = _object("options.reset", reset)
    path, _, app = server.rpartition(":")
    if path.endswith(".py"):
        server = f"{Path(path).expanduser().resolve()}:{app}"  # workers and a resumed run may stand elsewhere
    try:
        schema: Any = _requests.get(f"{_address(server)}/schema", timeout=WAIT_SECONDS).json()["action"]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"openenv server {server!r} does not tell its schema: {error}") from error
    calls = schema.get("title") in _TOOL_ACTIONS
    fields: list[str] = [name for name in schema.get("required", ()) if name != "metadata"]
    known: dict[str, Any] = {"server": server, "action": action, "observation": observation, "tools": None}
    if not action:
        known["action"] = fields[0] if len(fields) == 1 else "json"
    for seed in range(first_seed, first_seed + episodes):
        row = {**known, "reset": {**arguments, "seed": seed}}
        try:
            session = Session(row)
            row["opening"] = session.begin()
            if calls:
                # the same for all seeds; asked once
                known["tools"] = row["tools"] = known["tools"] or session.listed_tools()
            session.close()
        except (RuntimeError, OSError, ValueError, KeyError) as error:
            raise ValueError(f"openenv server {server!r}, seed {seed}: {error}") from error
        text = "\n".join(part for part in (prompt, row["opening"]) if part)
        name = server.rpartition("/")[2]
        yield Problem(
            id=f"{name}-{seed}",
            prompt=text,
            golds=(),
            verifier="exact",
            source=name,
            environment="openenv",
            extra={"openenv": row},
        )


class OpenEnvEnvironment:
    """Plays a problem of `seeds`: a turn is an action, rewards of the steps are summed.

    A turn that is no action costs a turn: the model reads what is wrong with it. Where no step gave a reward, the
    problem's verifier judges the last turn. Metrics: ``steps``, and ``refused``, turns that were no action.
    """

    right_from = 1.0

    def __init__(self) -> None:
        self._session: Session | None = None
        self._rewards: list[float] = []
        self._steps = self._refused = 0

    @staticmethod
    def tools_of(problem: Problem) -> Sequence[Mapping[str, Any]]:
        """JSON schemas of the server's tools, where its actions are calls of tools."""
        return problem.extra["openenv"]["tools"] or ()

    def reset(self, problem: Problem) -> None:
        """Begin the session.

        Raises:
            ValueError: the problem is none of `seeds`.
            RuntimeError: the server failed, or opened in another way than when its problems were read.
            ConnectionError, TimeoutError: it is not there.
        """
        row: Any = problem.extra.get("openenv")
        if row is None:
            raise ValueError(f'problem {problem.id!r} is no seed of a server; read it with source = "openenv"')
        self._session = Session(row)
        weakref.finalize(self, self._session.close).atexit = False
        if self._session.begin() != row["opening"]:
            raise RuntimeError("the environment opens in another way than before: it does not follow its seed")

    def step(self, text: str) -> Step:
        """Act; ``RuntimeError``, ``ConnectionError`` or ``TimeoutError`` where the server fails."""
        assert self._session is not None, "reset comes first"
        self._steps += 1
        try:
            observed, reward, done = self._session.act(self._session.action(text))
        except RefusedAction as refusal:
            self._refused += 1
            return Step(observation=str(refusal))
        if reward is not None:
            self._rewards.append(float(reward))
        if not done:
            return Step(observation=observed)
        self._session.close()
        metrics = {"steps": float(self._steps), "refused": float(self._refused)}
        return Step(reward=sum(self._rewards) if self._rewards else None, done=True, metrics=metrics)


class RefusedAction(ValueError):
    """What a model wrote is no action; says why."""


class Session:
    """One session of an environment server: ``row`` says which server, and what of actions and observations is text."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self._row = row
        self._client = _client.GenericEnvClient(_address(row["server"]), message_timeout_s=WAIT_SECONDS)

    def begin(self) -> str:
        """The first observation."""
        return self._text(self._ask(self._client.reset(**self._row["reset"])).observation)

    def listed_tools(self) -> list[dict[str, Any]]:
        """The server's tools as chat templates want them."""
        listed = self._ask(self._client.step({"type": "list_tools"})).observation["tools"]
        shown: list[dict[str, Any]] = []
        for tool in listed:
            function = {
                "name": tool["name"],
                "description": tool.get("description") or "",
                "parameters": tool["input_schema"],
            }
            shown.append({"type": "function", "function": function})
        return shown

    def action(self, text: str) -> dict[str, Any]:
        """The action that a turn is.

        Raises:
            RefusedAction: it is none.
        """
        turn = read_turn(text)
        if self._row["tools"] is not None:
            if len(turn.calls) != 1:
                raise RefusedAction(f"A turn must call one tool, this one calls {len(turn.calls)}.")
            call: ToolCall = turn.calls[0]
            return {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}
        if self._row["action"] != "json":
            return {self._row["action"]: turn.content}
        try:
            return _object("The action", turn.content)
        except ValueError as error:
            raise RefusedAction(str(error)) from None

    def act(self, action: Mapping[str, Any]) -> tuple[str, float | None, bool]:
        """Observation, reward and end after an action.

        Raises:
            RefusedAction: the server's schema refuses it.
            RuntimeError: the environment failed.
        """
        try:
            result = self._ask(self._client.step(action))
        except RuntimeError as error:
            if "VALIDATION_ERROR" in str(error):
                raise RefusedAction("The action does not fit the environment's schema.") from None
            raise
        return self._text(result.observation), result.reward, result.done is True

    def close(self) -> None:
        """End the session, some time from now; twice does no harm."""
        # without waiting: garbage is collected in any thread, the server's too
        asyncio.run_coroutine_threadsafe(self._client.close(), event_loop())

    def _ask(self, call: Coroutine[Any, Any, Any]) -> Any:
        """The server's reply."""
        try:
            return wait(call, WAIT_SECONDS)
        except _closed.ConnectionClosed as error:
            told = "the server closed the session; it has as many as it allows (max_concurrent_envs), or went away"
            raise ConnectionError(told) from error

    def _text(self, observation: Any) -> str:
        """What the model reads of an observation."""
        if "tool_name" in observation:
            return _result(observation)
        field = self._row["observation"]
        if field and field not in observation:
            raise ValueError(f"an observation has no {field!r}; it has {sorted(observation)}")
        values = [observation[field]] if field else list(observation.values())
        if len(values) == 1:
            return values[0] if isinstance(values[0], str) else json.dumps(values[0], ensure_ascii=False)
        return json.dumps(observation, ensure_ascii=False)


def _result(observation: Mapping[str, Any]) -> str:
    """What a tool returned, or why the call failed."""
    if observation.get("error"):
        return f"error: {observation['error']['message']}"
    result: Any = observation.get("result")
    if isinstance(result, dict) and "content" in result:  # as MCP gives it
        parts = cast("dict[str, Any]", result)["content"]
        return "\n".join(part.get("text", "") for part in parts)
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


def _object(what: str, text: str) -> dict[str, Any]:
    """The JSON object in ``text``."""
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{what} must be a JSON object")
    return cast("dict[str, Any]", found)


@functools.cache
def _address(server: str) -> str:
    """Where the server listens; an app is served from a thread of this process."""
    if "://" in server:
        return server.rstrip("/")
    app = resolve("environment", server)
    running = _uvicorn.Server(_uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical"))
    threading.Thread(target=running.run, name="openenv", daemon=True).start()
    end = time.monotonic() + WAIT_SECONDS
    while not running.started:
        if time.monotonic() > end:
            raise ConnectionError(f"the app {server!r} did not start within {WAIT_SECONDS:g} s")
        time.sleep(0.01)
    return f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
