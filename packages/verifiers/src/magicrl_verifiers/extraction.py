"""Where the answer is: after the reasoning, in the last box. Linear in the text, whatever it holds.

Everything here reads what a model wrote: no recursion, no regular expression that can backtrack far.
"""

from __future__ import annotations

import re

from magicrl_verifiers.records import Reasoning

OPEN_TAG = "<think>"
CLOSE_TAG = "</think>"

MAX_ANSWER_CHARS = 1_000_000
"""Of a longer answer part only the tail is read."""

_BOX = r"\\(?:boxed|fbox)\s*"
_TOKEN = re.compile(_BOX + r"(?P<box>\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)


def answer_part(response: str, reasoning: Reasoning) -> str | None:
    """The text after the reasoning, or None when the reasoning never ended (RECIPE section 8, step 1).

    The text after the *last* ``</think>`` is the answer. A ``<think>`` that stays open means that no answer
    was given, even if a box stands inside it.
    """
    if reasoning != "none":
        # the last one: a response may name the tag within its reasoning
        close = response.rfind(CLOSE_TAG)
        if close < 0 and reasoning == "required":
            return None
        start = close + len(CLOSE_TAG) if close >= 0 else 0
        # it began to reason again and never came to an end
        if response.find(OPEN_TAG, start) >= 0:
            return None
        response = response[start:]
    return response[-MAX_ANSWER_CHARS:]


_COMMAND = re.compile(r"(?P<escaped>\\\\)|" + _BOX + r"(?=\{)")
_JOINT = re.compile(r"(?:[\s$,;.&]|\\[()\[\],;:! ]|\\q?quad|\\text\s*\{[^{}]{0,12}\}|and|or){0,40}", re.DOTALL)
_MAX_JOINT_CHARS = 4000
_MAX_BETWEEN = 60
_MAX_JOINT = 20


def _boxes(text: str) -> list[tuple[int, int, int]]:
    """Closed boxes in the order of their ends: where the command, the content and the closing brace begin."""
    stack: list[tuple[int, int] | None] = []
    found: list[tuple[int, int, int]] = []
    for token in _TOKEN.finditer(text):
        if token["box"]:
            stack.append((token.start(), token.end()))
        elif token["open"]:
            stack.append(None)
        elif token["close"] and stack:
            opened = stack.pop()
            if opened is not None:
                found.append((*opened, token.start()))
    return found


def last_box(text: str) -> str | None:
    r"""Content of the last closed ``\boxed{...}`` or ``\fbox{...}``, or None if there is none.

    Braces are balanced as TeX does (``\{`` and ``\}`` are characters). A box inside another one only marks a part
    of it: the content is the outer box's, without the commands of the inner ones. A box that is never closed is no box.

    Example:
        >>> last_box(r"first \boxed{1}, no: \boxed{\frac{1}{2}}.")
        '\\frac{1}{2}'
    """
    boxes = _boxes(text)
    if not boxes:
        return None
    command, start, end = max(boxes)
    close = end
    for outer, inside, its_end in boxes:  # in the order of their ends: from the inside outwards
        if outer < command and close < its_end:
            if text[inside:command].strip() or text[close + 1 : its_end].strip():
                start, end = inside, its_end
            command, close = outer, its_end
    return _COMMAND.sub(lambda match: match["escaped"] or "", text[start:end])


def joint_boxes(text: str) -> tuple[str, ...] | None:
    r"""The last boxes of a text when nothing but ``and``, ``or`` or commas stands between them; None if it is one.

    Example:
        >>> joint_boxes(r"$\boxed{1}$ and $\boxed{2}$")
        ('1', '2')
    """
    text = text[-_MAX_JOINT_CHARS:]
    run: list[str] = []
    before: int | None = None
    for command, start, end in reversed(_boxes(text)):
        if before is not None and (before - end > _MAX_BETWEEN or not _JOINT.fullmatch(text, end + 1, before)):
            break
        run.append(text[start:end].strip())
        before = command
    return tuple(reversed(run)) if 1 < len(run) <= _MAX_JOINT else None
