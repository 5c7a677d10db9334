"""Episodes of Prime Intellect's ``verifiers`` (v1, wheel 0.4), played one model call at a time inside this process.

The package drives an episode itself (`Env.run_episode`): setup, tool servers, the other side of a conversation, stops,
rewards, metrics. It calls the model at an OpenAI-compatible endpoint. Here `Stage` is that endpoint: a call waits in it
for the model's turn. The package's harness, a program that it starts for each episode, is replaced by `TurnHarness`,
which runs the same loop of turns and tool calls in this process.
"""

from __future__ import annotations

import asyncio
import functools
import json
import queue
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from itertools import count
from typing import Any, TypeAlias

from magicrl.environments.base import Step
from magicrl.environments.packages import adapter_loop, package, read_turn, wait

vf = package("verifiers.v1", "verifiers")
_loaders = package("verifiers.v1.utils.loaders", "verifiers")
_mcp = package("verifiers.v1.harnesses.utils.mcp", "verifiers")
_chat = package("verifiers.v1.dialects.chat", "verifiers")
_runtimes = package("verifiers.v1.runtimes", "verifiers")
_agents = package("verifiers.v1.configs.agent", "verifiers")
httpx = package("httpx", "verifiers")
web = package("aiohttp.web", "verifiers")

__all__ = ["TurnHarness"]  # the package finds a harness by this list of its module

_HARNESS = "magicrl_turns"
# the package takes a harness by the name of a module at the top level
sys.modules.setdefault(_HARNESS, sys.modules[__name__])


Messages: TypeAlias = tuple[Mapping[str, Any], ...]
Call: TypeAlias = tuple[Messages, tuple[Mapping[str, Any], ...]]
"""A call of the model: messages since the last turn (all of them in the first call), and tools as JSON schemas."""


class TurnHarness(vf.Harness[vf.HarnessConfig]):
    """The loop of the package's ``null`` harness without its process: turn, results, turn, until no tool is called."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Mapping[str, str],
        data: Any,
    ) -> Any:
        """Run one segment: from the prompt in ``data`` to the first turn that calls no tool."""
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [_chat.message_to_wire(message) for message in prompt or []]
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(httpx.AsyncClient(timeout=None))
            tools, dispatch, connections = await _mcp.connect_mcp({"mcpServers": servers}, stack)
            body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
            while True:
                headers = {"Authorization": f"Bearer {secret}"}
                reply = await http.post(f"{endpoint}/chat/completions", headers=headers, json=body)
                if reply.status_code != 200:
                    return _runtimes.ProgramResult(exit_code=1, stdout="", stderr=reply.text)
                message = reply.json()["choices"][0]["message"]
                messages.append({key: value for key, value in message.items() if value is not None})
                if not message.get("tool_calls"):
                    return _runtimes.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message["tool_calls"]:
                    name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
                    if name in dispatch:
                        content = await _mcp.call_mcp(connections, dispatch, name, arguments)
                    else:
                        content = f"error: unknown tool {name!r}"
                    messages.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": content})


class Stage:
    """An environment of the package, ready to play; made once per process and configuration (`stage`).

    Args:
        config: the package's ``[env]`` block: ``taskset``, and ``id`` and seats if the environment has them.

    Raises:
        ValueError: the package refuses the configuration, or the trained model would have several seats.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.env = _loaders.load_environment(_resolved(config))
        self._episodes: dict[str, StageEpisode] = {}
        self._numbers = count()
        self._stack = AsyncExitStack()
        self.client = wait(self._open())

    async def _open(self) -> Any:
        """Start the endpoint of the model, then the tools that the environment shares between episodes."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/chat/completions", self._called)
        runner = web.AppRunner(app, shutdown_timeout=1.0)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        await self._stack.enter_async_context(self.env.serving())
        port = runner.addresses[0][1]
        # a separate key variable: the package would otherwise send the user's key for its hosted models
        return vf.EvalClientConfig(base_url=f"http://127.0.0.1:{port}/v1", api_key_var="MAGICRL_NO_KEY")

    def close(self) -> None:
        """Stop the endpoint and the environment's servers."""
        wait(self._stack.aclose(), 10.0)

    def task(self, data: Mapping[str, Any]) -> Any:
        """Return the task of this row, made as the package's replay makes it."""
        kind = type(self.env.taskset).task_type()
        return kind(kind.data_type().model_validate(data), self.env.taskset.config.task)

    def play(self, task: Any) -> StageEpisode:
        """Begin an episode of ``task``."""
        name = f"episode-{next(self._numbers)}"
        episode = self._episodes[name] = StageEpisode(name)
        episode.running = asyncio.run_coroutine_threadsafe(self._play(task, episode), adapter_loop())
        return episode

    async def _play(self, task: Any, episode: StageEpisode) -> None:
        try:
            played = await self.env.run_episode(task, vf.ModelContext(model=episode.name, client=self.client))
            episode.events.put(_finished(played, episode.name))
        except Exception as error:  # noqa: BLE001 - another package's code; the caller raises it again
            episode.events.put(error)
        finally:
            del self._episodes[episode.name]
            episode.drop()

    async def _called(self, request: Any) -> Any:
        body = await request.json()
        episode = self._episodes.get(body["model"])
        if episode is None:
            return web.json_response({"error": {"message": "no such episode"}}, status=404)
        try:
            turn = await episode.asked(body)
        except ValueError as error:
            # a client error, which the package does not retry
            return web.json_response({"error": {"message": str(error)}}, status=400)
        return web.json_response(_completion(body["model"], turn))


class StageEpisode:
    """One episode: it returns the environment's calls and takes the model's turns."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.events: queue.SimpleQueue[Call | Step | Exception] = queue.SimpleQueue()
        self.running: Any = None
        self._reply: asyncio.Future[dict[str, Any]] | None = None
        self._messages: list[tuple[str, str]] = []
        self._turns = 0

    async def asked(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Emit the call and wait for the model's turn (in the event loop)."""
        messages: list[dict[str, Any]] = body["messages"]
        known, self._messages = self._messages, [(message["role"], content(message)) for message in messages]
        if self._messages[: len(known)] != known or len(messages) == len(known):
            raise ValueError(
                "the environment does not continue its conversation (another agent, a retry or a rewritten history); "
                "a response is one conversation: give further seats their own `model` and `client`"
            )
        self._reply = asyncio.get_running_loop().create_future()
        self.events.put((tuple(messages[len(known) :]), tuple(body.get("tools") or ())))
        message = await self._reply
        self._messages.append(("assistant", content(message)))
        return message

    def answer(self, text: str) -> None:
        """Give the model's turn to the waiting call."""
        reply = self._reply
        assert reply is not None, "no call waits for a turn"
        message = _message(text, self._turns)
        self._turns += 1
        adapter_loop().call_soon_threadsafe(reply.set_result, message)

    def next(self, seconds: float) -> Call | Step:
        """Return the next call of the model, or the last step of the episode.

        Raises:
            TimeoutError: nothing within ``seconds`` by the clock.
            RuntimeError: the environment failed; says how.
        """
        try:
            event = self.events.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(f"the environment said nothing for {seconds:g} s") from None
        if isinstance(event, Exception):
            raise RuntimeError(f"the environment failed: {type(event).__name__}: {event}") from event
        return event

    def drop(self) -> None:
        """Cancel a call that waits for a turn, which the server would keep forever (in the event loop)."""
        if self._reply is not None:
            self._reply.cancel()

    def cancel(self) -> None:
        """End the episode without a score."""
        self.running.cancel()


def content(message: Mapping[str, Any]) -> str:
    """Return the text of a message.

    Raises:
        ValueError: it holds something else, such as an image.
    """
    parts: Any = message.get("content") or ""
    if isinstance(parts, str):
        return parts
    if any(part.get("type") != "text" for part in parts):
        raise ValueError("a message holds an image; only text can be shown to the model")
    return "\n".join(part["text"] for part in parts)


@functools.cache
def stage(config: str) -> Stage:
    """Return the stage of this configuration (JSON) in this process."""
    return Stage(json.loads(config))


def _resolved(config: Mapping[str, Any]) -> Any:
    """Return the package's configuration, with `TurnHarness` in the only seat without a model."""
    raw = dict(config)
    found = _loaders.resolve_env_config(dict(raw))
    free = [name for name, seat in _agents.agent_config_fields(found).items() if seat.model is None]
    if len(free) != 1:
        raise ValueError(
            f"the environment of {found.taskset.id!r} has {len(free)} seats without a model ({', '.join(free)}); "
            "one is trained: give the others `model` and `client` in `config`"
        )
    seat: dict[str, Any] = dict(raw.get(free[0]) or {})
    # the package's default runtime is a hosted one; tasks that need a container name one
    raw[free[0]] = {"runtime": {"type": "subprocess"}, **seat, "harness": {"id": _HARNESS}}
    return _loaders.resolve_env_config(raw)


def _finished(played: Any, name: str) -> Step:
    """Return the last step of a played episode; ``RuntimeError`` if it failed or has no reward."""
    errors = [*played.errors, *(error for trace in played.traces if not trace.ok for error in trace.errors)]
    if not played.ok or errors:
        last = errors[-1] if errors else None
        raise RuntimeError(f"{last.type}: {last.message}" if last else "it ended without an error")
    (trace,) = [trace for trace in played.traces if trace.agent.config.model == name]
    rewards = {key: reward.value for key, reward in trace.rewards.items() if reward is not None}
    if not rewards or len(rewards) < len(trace.rewards):
        raise RuntimeError(f"the task gave no reward ({sorted(trace.rewards) or 'it has no @vf.reward'})")
    metrics = {key: float(value) for key, value in trace.metrics.items() if value is not None}
    return Step(reward=float(trace.reward), done=True, metrics={**metrics, **rewards})


def _message(text: str, number: int) -> dict[str, Any]:
    """Return turn ``number`` as the message of an OpenAI-compatible server. Ids depend only on their place."""
    reasoning, content, called = read_turn(text)
    calls = [
        {
            "id": f"call_{number}_{index}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for index, (name, arguments) in enumerate(called)
    ]
    return {
        "role": "assistant",
        "content": content,
        **({"reasoning_content": reasoning} if reasoning else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def _completion(model: str, message: Mapping[str, Any]) -> dict[str, Any]:
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if "tool_calls" in message else "stop"}
    return {"id": "turn", "object": "chat.completion", "created": 0, "model": model, "choices": [choice]}
