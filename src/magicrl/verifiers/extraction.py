"""Where the answer is: after the reasoning, in the last box. Linear in the text, whatever it holds.

Everything here reads what a model wrote: no recursion, no regular expression that can backtrack far.
"""

from __future__ import annotations

import re

from magicrl.verifiers.base import Reasoning

OPEN_TAG = "<think>"
CLOSE_TAG = "</think>"

MAX_ANSWER_CHARS = 1_000_000
"""Of a longer answer part only the tail is read."""

_TOKEN = re.compile(r"\\(?:boxed|fbox)\s*(?P<box>\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)


def answer_part(response: str, reasoning: Reasoning) -> str | None:
    """The text after the reasoning, or None when the reasoning never ended (RECIPE section 8, step 1).

    The text after the *last* ``</think>`` is the answer. A ``<think>`` that stays open means that no answer
    was given, even if a box stands inside it.
    """
    if reasoning != "none":
        close = response.rfind(CLOSE_TAG)
        if close < 0 and reasoning == "required":
            return None
        start = close + len(CLOSE_TAG) if close >= 0 else 0
        if response.find(OPEN_TAG, start) >= 0:
            return None
        response = response[start:]
    return response[-MAX_ANSWER_CHARS:]


def last_box(text: str) -> str | None:
    r"""Content of the last closed ``\boxed{...}`` or ``\fbox{...}``, or None if there is none.

    Braces are balanced as TeX does (``\{`` and ``\}`` are characters); of nested boxes the innermost last one
    counts. A box that is never closed is no box.

    Example:
        >>> last_box(r"first \boxed{1}, no: \boxed{\frac{1}{2}}.")
        '\\frac{1}{2}'
    """
    stack: list[int] = []  # where each open brace's content starts; negative: a plain brace
    best: tuple[int, int] | None = None
    for token in _TOKEN.finditer(text):
        if token["box"]:
            stack.append(token.end())
        elif token["open"]:
            stack.append(-1)
        elif token["close"] and stack:
            start = stack.pop()
            if start > 0 and (best is None or start > best[0]):
                best = (start, token.start())
    return None if best is None else text[best[0] : best[1]]
