"""What an adapter of another package needs: the package, a loop for its coroutines, tool calls in a model's turn."""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import re
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar, cast

Result = TypeVar("Result")


def package(module: str, extra: str) -> Any:
    """The imported ``module`` of a package that the extra ``extra`` installs.

    Raises:
        ImportError: it cannot be imported; names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{error}; install the extra: pip install 'magicrl[{extra}]'") from error


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    """The event loop of the adapters in this process, in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="environments", daemon=True).start()
    return loop


def wait(coroutine: Coroutine[Any, Any, Result], seconds: float | None = None) -> Result:
    """What a coroutine returns, run in `event_loop`; ``TimeoutError`` after so many seconds by the clock."""
    return asyncio.run_coroutine_threadsafe(coroutine, event_loop()).result(seconds)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool's name and the arguments that a model gave it."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of a model, taken apart.

    Attributes:
        reasoning: what stands before ``</think>``; None: nothing does.
        content: the rest, without its tool calls.
        calls: tool calls in their order.
    """

    reasoning: str | None
    content: str
    calls: tuple[ToolCall, ...]


_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def read_turn(text: str) -> Turn:
    """The turn in ``text``: reasoning, content and tool calls.

    A call is a JSON object with ``name`` and ``arguments`` (or ``parameters``), or several in a list, as chat templates
    ask for it: between ``<tool_call>`` and ``</tool_call>`` (Qwen, SmolLM, Hermes), or as all of the content (Llama 3).
    What cannot be read as a call stays content.
    """
    thought, closed, rest = text.partition("</think>")
    reasoning = thought.removeprefix("<think>").strip() if closed else None
    content = rest if closed else text
    marked = [_calls(body) for body in _CALL.findall(content)]
    if not marked and (whole := _calls(content)):
        return Turn(reasoning, "", tuple(whole))
    if not all(marked):
        marked = []  # one that cannot be read: none is guessed
    if marked:
        content = _CALL.sub("", content)
    return Turn(reasoning, content.strip(), tuple(call for calls in marked for call in calls))


def _calls(text: str) -> list[ToolCall]:
    """The call that ``text`` is, or the calls in its list; empty if it is neither."""
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls = [_call(one) for one in cast("list[Any]", found if isinstance(found, list) else [found])]
    return [call for call in calls if call is not None] if None not in calls else []


def _call(found: Any) -> ToolCall | None:
    """The call that a JSON value is."""
    if not isinstance(found, dict):
        return None
    given = cast("dict[str, Any]", found)
    name, arguments = given.get("name"), given.get("arguments", given.get("parameters"))
    if isinstance(arguments, str):  # as OpenAI's API writes them
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return ToolCall(name, cast("dict[str, Any]", arguments))
