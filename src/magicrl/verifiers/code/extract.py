"""The program in a response: the last fenced block after the reasoning. Linear, no backtracking."""

from __future__ import annotations

import re

from magicrl.verifiers.base import Reasoning
from magicrl.verifiers.extraction import answer_part

_FENCE = re.compile(r"^[ \t]{0,8}(`{3,}|~{3,})[ \t]*([^\s`]*)[^\n]*$", re.MULTILINE)
_PYTHON = {"python", "python3", "py", "py3", "python2"}


def program_in(response: str, reasoning: Reasoning) -> str | None:
    """The text of the last closed fenced block after the reasoning; one that is marked as Python goes first.

    A block that stays open is no block: the response was cut. Blocks of output or of shell commands that follow the
    program do not hide it, since they are not marked as Python. None if there is no block or the reasoning never ended.

    Example:
        >>> program_in("```python\\nprint(1)\\n```\\nIt prints\\n```\\n1\\n```", "auto")
        'print(1)\\n'
    """
    text = answer_part(response, reasoning)
    if text is None:
        return None
    best: str | None = None
    last: str | None = None
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opened is None:
            opened = fence
        elif fence[1][0] == opened[1][0] and len(fence[1]) >= len(opened[1]) and not fence[2]:
            last = text[opened.end() + 1 : fence.start()]
            if opened[2].lower() in _PYTHON:
                best = last
            opened = None
        elif fence[2].lower() in _PYTHON:
            opened = fence  # a block that was never closed, and a new one
    return last if best is None else best
