"""Helpers for environments: tool calls in a model's turn, optional packages, an event loop for coroutines."""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import re
import threading
from collections.abc import Coroutine
from typing import Any, TypeAlias, TypeVar, cast

Result = TypeVar("Result")
ToolCall: TypeAlias = tuple[str, dict[str, Any]]
"""Name of a tool, and the arguments that a model gave it."""


def package(module: str, extra: str) -> Any:
    """Import and return ``module`` of a package that the extra ``extra`` installs.

    Raises:
        ImportError: it cannot be imported; names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{error}; install the extra: pip install 'magicrl[{extra}]'") from error


@functools.cache
def adapter_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of the adapters in this process. It runs in a separate thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="environments", daemon=True).start()
    return loop


def wait(coroutine: Coroutine[Any, Any, Result], seconds: float | None = None) -> Result:
    """Run a coroutine in `adapter_loop` and return its result; ``TimeoutError`` after so many seconds by the clock."""
    return asyncio.run_coroutine_threadsafe(coroutine, adapter_loop()).result(seconds)


_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def read_turn(text: str) -> tuple[str | None, str, list[ToolCall]]:
    """Split a model's turn into reasoning, content and tool calls.

    A call is a JSON object with ``name`` and ``arguments`` (or ``parameters``), or a list of them, in the forms that
    chat templates require: between ``<tool_call>`` and ``</tool_call>`` (Qwen, SmolLM, Hermes), or as the whole content
    (Llama 3). Unreadable calls stay in the content.

    Returns:
        The reasoning before ``</think>`` (None without one), the other text, and the calls in order.
    """
    thought, closed, rest = text.partition("</think>")
    reasoning = thought.removeprefix("<think>").strip() if closed else None
    content = rest if closed else text
    marked = [_calls(body) for body in _CALL.findall(content)]
    if not marked and (whole := _calls(content)):
        return reasoning, "", whole
    if not all(marked):
        marked = []  # one call is unreadable: none is guessed
    if marked:
        content = _CALL.sub("", content)
    return reasoning, content.strip(), [call for calls in marked for call in calls]


def _calls(text: str) -> list[ToolCall]:
    """Read ``text`` as a call or a list of calls; return none if it is neither."""
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls = [read_call(one) for one in cast("list[Any]", found if isinstance(found, list) else [found])]
    return [call for call in calls if call is not None] if None not in calls else []


def read_call(found: Any) -> ToolCall | None:
    """Read a JSON value as a tool call; return None if it is none."""
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
    return name, cast("dict[str, Any]", arguments)
