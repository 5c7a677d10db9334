"""What a model replied, read: hostile input as everything that a model wrote."""

from __future__ import annotations

import json
import re
from itertools import islice
from typing import Any

_MOST_BRACES = 1000  # of a hostile answer each one may begin something that is parsed to its end


class UnreadableAnswer(ValueError):
    """A reply without what was asked for."""


def content_of(answer: Any) -> str:
    """The text of a chat answer's first choice.

    Raises:
        UnreadableAnswer: there is none.
    """
    try:
        content = answer["choices"][0]["message"]["content"]
    except (LookupError, TypeError):
        content = None
    if not isinstance(content, str):
        raise UnreadableAnswer("the answer holds no message with text")
    return content


def after_reasoning(text: str) -> str:
    """What stands behind the last ``</think>``.

    Raises:
        UnreadableAnswer: the reasoning never ended.
    """
    said = text.rpartition("</think>")[2]
    if "<think>" in said:
        raise UnreadableAnswer("the answer ends within its reasoning")
    return said


def json_objects(text: str) -> list[dict[str, Any]]:
    """Every JSON object in a text that is not within another one."""
    decoder, found, end = json.JSONDecoder(strict=False), list[dict[str, Any]](), 0
    for brace in islice(re.finditer("{", text), _MOST_BRACES):
        if brace.start() >= end:
            try:
                value, end = decoder.raw_decode(text, brace.start())
            except (ValueError, RecursionError):
                continue
            found.append(value)
    return found
