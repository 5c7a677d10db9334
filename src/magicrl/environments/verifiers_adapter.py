"""An adapter of Prime Intellect's ``verifiers`` (v1, wheel 0.4): tasks of a taskset as problems, and their environment.

    [[data.train]]
    source = "verifiers"
    environment = "verifiers"
    options = { taskset = "reverse-text" }

The data of an episode is in ``Problem.extra["verifiers"]``. The environment runs in the worker that plays the episode,
and starts its tool servers and sandboxes there, by its own configuration.

The package drives an episode itself (`Env.run_episode`): setup, tool servers, the other side of a conversation, stops,
rewards, metrics. It calls the model at an OpenAI-compatible endpoint. Here `Stage` is that endpoint: a call waits in it
for the model's turn. The package's harness, a program that it starts for each episode, is replaced by `TurnHarness`,
which runs the same loop of turns and tool calls in this process.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import os
import queue
import sys
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from itertools import count, islice
from pathlib import Path
from typing import Any, TypeAlias

from magicrl.environments.base import Step
from magicrl.environments.packages import adapter_loop, package, read_turn, wait
from magicrl.records import Message, Problem

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
START_SECONDS = 120.0
"""Longest time to an episode's first call, by the clock: it may start tool servers."""
STEP_SECONDS = 60.0
"""Longest time from a turn to the environment's answer, by the clock."""
Call: TypeAlias = tuple[tuple[Mapping[str, Any], ...], tuple[Mapping[str, Any], ...]]
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
        choice = {"index": 0, "message": turn, "finish_reason": "tool_calls" if "tool_calls" in turn else "stop"}
        reply = {"id": "turn", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]}
        return web.json_response(reply)


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


def tasks(taskset: str, *, config: str = "{}", limit: int | None = None, **fields: Any) -> Iterator[Problem]:
    """Yield the tasks of a v1 taskset as problems. This is a source for recipes, with these options.

    Args:
        taskset: id of an installed taskset (``reverse-text``), or a ``.py`` file with one.
        config: JSON of the package's ``[env]`` block, for settings beyond fields of the taskset: an environment's
            ``id``, its seats, nested settings.
        limit: number of tasks to read; required for an endless taskset.
        **fields: settings of the taskset.

    Raises:
        ValueError: there is no such taskset, its settings are wrong, or a task cannot be a problem; says why.
    """
    name, folder = _located(taskset)
    try:
        settings: Any = json.loads(config)
    except ValueError as error:
        raise ValueError(f"options.config is no JSON: {error}") from None
    if not isinstance(settings, dict):
        raise ValueError(f"options.config must be a JSON object, got {config[:60]!r}")
    settings = {**settings, "taskset": {**settings.get("taskset", {}), **fields, "id": name}}
    with _children_find(folder):
        try:
            acting = Stage(settings)
        except (ImportError, AttributeError, TypeError) as error:
            raise ValueError(f"verifiers, taskset {taskset!r}: {error}") from error
        try:
            yield from _read(acting, taskset, limit, {"config": settings, "folder": folder})
        finally:
            acting.close()


def _read(acting: Stage, taskset: str, limit: int | None, row: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the problems of a taskset that is ready to play."""
    if limit is None and not acting.env.taskset.bounded:
        raise ValueError(f"taskset {taskset!r} is endless; say in options.limit how many tasks to read")
    tools: Sequence[Mapping[str, Any]] | None = None
    for task in islice(iter(acting.env.taskset), limit):
        try:
            opening = None if tools is None else _stated(acting, task)
            # the first task has the tools of all, since they belong to the kind of task
            if opening is None:
                opening, tools = _opened(acting, task)
            yield _problem(acting, task, opening, {**row, "tools": list(tools or ())})
        except (RuntimeError, TimeoutError, ValueError) as error:
            raise ValueError(f"taskset {taskset!r}, task {task.data.idx}: {error}") from error


class VerifiersEnvironment:
    """An environment for problems of `tasks`: the package's environment answers, and its rewards judge.

    An observation is the text of the environment's messages: results of tools, or the words of its user.
    """

    time_limit = 60.0
    right_from = 1.0

    def __init__(self) -> None:
        self._episode: StageEpisode | None = None

    @staticmethod
    def tools_of(problem: Problem) -> Sequence[Mapping[str, Any]]:
        """Return JSON schemas of the tools of the problem's task."""
        return problem.extra["verifiers"]["tools"]

    def reset(self, problem: Problem) -> None:
        """Begin the episode.

        Raises:
            ValueError: the problem is none of `tasks`.
            RuntimeError: the environment failed, or began otherwise than when its tasks were read.
            TimeoutError: it did not begin in time.
        """
        row: Any = problem.extra.get("verifiers")
        if row is None:
            raise ValueError(f'problem {problem.id!r} is no task of a taskset; read it with source = "verifiers"')
        _reachable(row["folder"])
        with _children_find(row["folder"]):
            acting = stage(json.dumps(row["config"], sort_keys=True))
            self._episode = episode = acting.play(acting.task(row["task"]))
            weakref.finalize(self, episode.cancel).atexit = False
            first = episode.next(START_SECONDS)
        if isinstance(first, Step) or _digest(first[0]) != row["opening"]:
            raise RuntimeError("the environment opens in another way than before: it is not deterministic")

    def step(self, text: str) -> Step:
        """Pass the turn to the environment; ``RuntimeError`` or ``TimeoutError`` if it fails or does not answer."""
        assert self._episode is not None, "reset comes first"
        self._episode.answer(text)
        said = self._episode.next(STEP_SECONDS)
        if isinstance(said, Step):
            return said
        return Step(observation="\n".join(content(message) for message in said[0]))


def _located(taskset: str) -> tuple[str, str]:
    """Return name and folder of a taskset; the folder of a file becomes importable, an installed one has none."""
    if not taskset.endswith(".py"):
        return taskset, ""
    path = Path(taskset).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"taskset {taskset!r}: there is no file {path}")
    _reachable(str(path.parent))
    return path.stem, str(path.parent)


def _reachable(folder: str) -> None:
    """Make modules of ``folder`` importable, after all installed ones."""
    if folder and folder not in sys.path:
        sys.path.append(folder)


@contextmanager
def _children_find(folder: str) -> Generator[None]:
    """Let tool servers that are started inside this context find modules of ``folder``."""
    before = os.environ.get("PYTHONPATH")
    if folder:
        os.environ["PYTHONPATH"] = os.pathsep.join([before, folder] if before else [folder])
    try:
        yield
    finally:
        # other processes must not find them: a module there may have the name of a standard one
        if before is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = before


def _stated(acting: Stage, task: Any) -> Sequence[Mapping[str, Any]] | None:
    """Return the opening messages of the task; None if its environment decides."""
    if not isinstance(acting.env, vf.SingleAgentEnv) or not isinstance(task.data.prompt, str):
        return None
    system = task.data.system_prompt
    before = [{"role": "system", "content": system}] if system else []
    return [*before, {"role": "user", "content": task.data.prompt}]


def _opened(acting: Stage, task: Any) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
    """Play an episode up to its first call, and return the opening messages and the tools."""
    episode = acting.play(task)
    try:
        first = episode.next(START_SECONDS)
    finally:
        episode.cancel()
    if isinstance(first, Step):
        raise ValueError("its environment ended without a call of the model")
    return first


def _problem(acting: Stage, task: Any, opening: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> Problem:
    data = task.data.model_dump(mode="json")
    if acting.task(data).data != task.data:
        raise ValueError("its data cannot be stored as JSON (a field has no JSON form, or is left out)")
    *before, last = [Message(message["role"], content(message)) for message in opening]
    if last.role != "user":
        raise ValueError(
            f"its conversation opens with a message of role {last.role!r}; the last one must be the user's"
        )
    answer = getattr(task.data, "answer", None)
    name = acting.env.taskset.config.id
    return Problem(
        id=f"{name}-{task.data.idx}",
        prompt=last.content,
        context=tuple(before),
        references=(answer,) if isinstance(answer, str) else (),
        verifier="exact",
        source=name,
        environment="verifiers",
        extra={"verifiers": {**row, "task": data, "opening": _digest(opening)}},
    )


def _digest(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a checksum of roles and texts, 16 hex digits."""
    text = json.dumps([[message["role"], content(message)] for message in messages])
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
