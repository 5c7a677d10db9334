"""Lists of messages, as chat data sets write them, as the turns before a prompt and the prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from magicrl.records import Message

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "tool": "tool",
}
"""Roles of the OpenAI form and of ShareGPT's (``from``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
    """A conversation up to its last user turn.

    Attributes:
        context: the turns before.
        prompt: the last user turn.
        answer: the assistant's turn after it, None without one.
    """

    context: tuple[Message, ...]
    prompt: str
    answer: str | None


def read_turns(value: Any) -> Turns | None:
    """The turns of a list of messages, ``{role, content}`` or ShareGPT's ``{from, value}``, or of its JSON text.

    None where the value is no such list but plain text, or nothing at all.

    Raises:
        ValueError: a message without a known role or text, or no user turn where the model is to go on.

    Example:
        >>> read_turns([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 3?"}]).prompt
        '2 + 3?'
    """
    if isinstance(value, str):
        value = _from_text(value)
    if not isinstance(value, list):
        return None
    messages = [_message(entry, number) for number, entry in enumerate(cast("list[Any]", value), start=1)]
    answer = messages.pop().content if len(messages) > 1 and messages[-1].role == "assistant" else None
    if not messages or messages[-1].role != "user":
        got = f"the role {messages[-1].role!r}" if messages else "no message"
        raise ValueError(f"must end in a user's message (or that and the assistant's answer), got {got}")
    if any(message.role == "system" for message in messages[1:]):
        raise ValueError("has a system message after its first message")
    return Turns(context=tuple(messages[:-1]), prompt=messages[-1].content, answer=answer)


def _from_text(text: str) -> Any:
    """The list of messages that a text is the JSON of; None for any other text."""
    start = text.lstrip()[:200]
    if not start.startswith("[") or ('"role"' not in start and '"from"' not in start):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _message(entry: Any, number: int) -> Message:
    if not isinstance(entry, Mapping):
        raise ValueError(f"must be text or a list of {{role, content}} messages, got {str(entry)[:40]!r} in it")
    fields = cast("Mapping[str, Any]", entry)
    said = fields.get("role", fields.get("from"))
    role = _ROLES.get(str(said).lower())
    if role is None:
        raise ValueError(f"message {number}: the role {said!r} is unknown; known: {', '.join(_ROLES)}")
    content: Any = fields.get("content", fields.get("value"))
    if isinstance(content, list):  # the parts of a multimodal message
        parts: list[Any] = content
        if all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
            content = "".join(part["text"] for part in parts)
    if not isinstance(content, str) or not content.strip():
        raise ValueError(f"message {number}: the content must be text, got {str(content)[:40]!r}")
    return Message(role, content)
