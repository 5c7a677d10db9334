"""An adapter of OpenEnv (0.10): seeds of an environment server as problems, and its sessions to play them.

    [[data.train]]
    source = "openenv"
    environment = "openenv"
    options = { server = "http://127.0.0.1:8000", episodes = 200, prompt = "Guess the number." }

An episode is one session on the server, from its first turn to its last. The turns of a batch alternate, so the server
must allow as many sessions at once as there are responses (``max_concurrent_envs``). The server's WebSocket messages
are read here, not with the package's client: it requires an older ``mcp`` than vLLM and ``verifiers`` do.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, cast
from urllib.request import urlopen

from magicrl.environments.base import Step
from magicrl.environments.packages import package, read_turn
from magicrl.records import Problem

_client = package("websockets.sync.client", "openenv")
_exceptions = package("websockets.exceptions", "openenv")

WAIT_SECONDS = 60.0
"""Longest time for a server's reply, by the clock."""
_TOOL_ACTIONS = ("Action", "CallToolAction", "ListToolsAction")
"""Names of the action schemas of servers whose actions are calls of tools."""


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
    """Yield one problem per seed of an environment server. These are the options of a recipe's source.

    Args:
        server: address of the server, ``http://HOST:PORT``.
        episodes: number of problems; ``reset`` of the server gets the seeds from ``first_seed`` on.
        first_seed: the first seed.
        reset: JSON object with further arguments of the environment's ``reset``.
        prompt: text before the first observation.
        action: field of the action that gets a turn's text; ``json``: a turn must be the whole action as JSON.
            Default: the one field that the action's schema requires, or ``json`` if it requires none or several.
        observation: field of an observation that the model reads. Default: its only field, or all of it as JSON.

    Raises:
        ValueError: the server cannot be reached or refuses, or an option is wrong.
    """
    arguments = _object("options.reset", reset)
    address = server.rstrip("/")
    if not address.startswith(("http://", "https://")):
        raise ValueError(f"options.server must be an address such as http://127.0.0.1:8000, got {server!r}")
    try:
        with urlopen(f"{address}/schema", timeout=WAIT_SECONDS) as reply:
            schema: Any = json.load(reply)["action"]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"openenv server {server}: {address}/schema gives no schema ({error}); is it running?"
        ) from error
    fields: list[str] = [name for name in schema.get("required", ()) if name != "metadata"]
    row: dict[str, Any] = {"server": address, "observation": observation, "tools": None}
    row["action"] = action or (fields[0] if len(fields) == 1 else "json")
    for seed in range(first_seed, first_seed + episodes):
        row |= {"reset": {**arguments, "seed": seed}}
        try:
            session = ServerSession(row)
            row |= {"opening": session.begin()}
            if schema.get("title") in _TOOL_ACTIONS and row["tools"] is None:
                row |= {"tools": session.listed_tools()}  # the same for all seeds
            session.close()
        except (RuntimeError, OSError, ValueError, KeyError) as error:
            raise ValueError(f"openenv server {server}, seed {seed}: {error}") from error
        name = address.rpartition("/")[2]
        yield Problem(
            id=f"{name}-{seed}",
            prompt="\n".join(part for part in (prompt, row["opening"]) if part),
            references=(),
            verifier="exact",
            source=name,
            environment="openenv",
            extra={"openenv": dict(row)},
        )


class OpenEnvEnvironment:
    """Plays a problem of `seeds`. A turn is an action; the reward is the sum of the steps' rewards.

    A turn that is no valid action costs a turn, and the model reads what is wrong. If no step gave a reward, the
    problem's verifier judges the last turn. Metrics: ``steps``, and ``refused``, the turns that were no valid action.
    """

    right_from = 1.0

    def __init__(self) -> None:
        self._session: ServerSession | None = None
        self._rewards: list[float] = []
        self._steps = self._refused = 0

    @staticmethod
    def tools_of(problem: Problem) -> Sequence[Mapping[str, Any]]:
        """Return JSON schemas of the server's tools, if its actions are calls of tools."""
        return problem.extra["openenv"]["tools"] or ()

    def reset(self, problem: Problem) -> None:
        """Begin the session.

        Raises:
            ValueError: the problem was not made by `seeds`.
            RuntimeError: the server failed, or opens differently from when its problems were read.
            ConnectionError, TimeoutError: the server does not answer.
        """
        row: Any = problem.extra.get("openenv")
        if row is None:
            raise ValueError(f'problem {problem.id!r} is no seed of a server; read it with source = "openenv"')
        self._session = session = ServerSession(row)
        weakref.finalize(self, session.close).atexit = False
        if session.begin() != row["opening"]:
            raise RuntimeError("the environment opens in another way than before: it does not follow its seed")

    def step(self, text: str) -> Step:
        """Pass the turn to the server; ``RuntimeError``, ``ConnectionError`` or ``TimeoutError`` if it fails."""
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
    """A model's turn that is no valid action; the message says why."""


class ServerSession:
    """A session of an environment server. ``row`` is what `seeds` put into the problem."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self._row = row
        address = row["server"].replace("http", "ws", 1) + "/ws"  # https becomes wss
        self._closing = ExitStack()
        connection = _client.connect(address, open_timeout=WAIT_SECONDS, max_size=None)
        self._socket: Any = self._closing.enter_context(connection)

    def begin(self) -> str:
        """Reset the environment and return its first observation."""
        return self._text(self._ask("reset", self._row["reset"])["observation"])

    def listed_tools(self) -> list[dict[str, Any]]:
        """Return the server's tools in the form that chat templates take."""
        listed = self._ask("step", {"type": "list_tools"})["observation"]["tools"]
        shown: list[dict[str, Any]] = []
        for tool in listed:
            function = {"name": tool["name"], "description": tool.get("description") or ""}
            shown.append({"type": "function", "function": function | {"parameters": tool["input_schema"]}})
        return shown

    def action(self, text: str) -> dict[str, Any]:
        """Return the action of a turn.

        Raises:
            RefusedAction: it is none.
        """
        _, content, calls = read_turn(text)
        if self._row["tools"] is not None:
            if len(calls) != 1:
                raise RefusedAction(f"A turn must call one tool, this one calls {len(calls)}.")
            name, arguments = calls[0]
            return {"type": "call_tool", "tool_name": name, "arguments": arguments}
        if self._row["action"] != "json":
            return {self._row["action"]: content}
        try:
            return _object("The action", content)
        except ValueError as error:
            raise RefusedAction(str(error)) from None

    def act(self, action: Mapping[str, Any]) -> tuple[str, float | None, bool]:
        """Return the observation, the reward and whether the episode has ended.

        Raises:
            RefusedAction: the server's schema does not accept the action.
            RuntimeError: the environment failed.
        """
        reply = self._ask("step", action)
        return self._text(reply["observation"]), reply.get("reward"), reply.get("done") is True

    def close(self) -> None:
        """End the session. A second call does nothing."""
        self._closing.close()

    def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message and return the data of the reply."""
        try:
            self._socket.send(json.dumps({"type": kind, "data": data}))
            reply = json.loads(self._socket.recv(timeout=WAIT_SECONDS))
        except _exceptions.ConnectionClosed as error:
            raise ConnectionError(
                "the server closed the session: it ended, or it has as many sessions as it allows; allow one for each "
                "response of a batch: max_concurrent_envs = rollout_batch x group_size"
            ) from error
        if reply["type"] != "error":
            return reply["data"]
        code, message = reply["data"].get("code"), reply["data"].get("message")
        if code == "VALIDATION_ERROR" and kind == "step":
            raise RefusedAction("The action does not fit the environment's schema.")
        raise RuntimeError(f"the server reports {code}: {message}")

    def _text(self, observation: Mapping[str, Any]) -> str:
        """Return what the model reads of an observation."""
        if "tool_name" in observation:
            if observation.get("error"):
                return f"error: {observation['error']['message']}"
            result: Any = observation.get("result")
            if isinstance(result, dict) and "content" in result:  # as MCP returns it
                parts = cast("dict[str, Any]", result)["content"]
                return "\n".join(part.get("text", "") for part in parts)
            return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        field = self._row["observation"]
        if field and field not in observation:
            raise ValueError(f"options.observation is {field!r}, and an observation has {sorted(observation)}")
        said = {field: observation[field]} if field else {k: v for k, v in observation.items() if k != "metadata"}
        shown = next(iter(said.values())) if len(said) == 1 else said
        return shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)


def _object(what: str, text: str) -> dict[str, Any]:
    """Return the JSON object in ``text``."""
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{what} must be a JSON object")
    return cast("dict[str, Any]", found)
