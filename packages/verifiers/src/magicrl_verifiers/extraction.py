"""Where the answer is: after the reasoning, in the last box; and normalised equality of short answers.

Everything here reads what a model wrote. It takes linear time: no recursion, no regular expression that backtracks far.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from magicrl_verifiers.records import JudgeOptions, Reasoning, Verdict, make_verdict

OPEN_TAG = "<think>"
CLOSE_TAG = "</think>"

MAX_ANSWER_CHARS = 1_000_000
"""Longest answer part in characters; of a longer one only the tail is read."""

_BOX = r"\\(?:boxed|fbox)\s*"
_BARE = r"\\boxed(?: +|(?=-?\d))(?P<bare>[^\s{}$\\]{1,40})(?= ?\$)"  # $\boxed 12$ in MATH
_TOKEN = re.compile(_BOX + r"(?P<box>\{)|" + _BARE + r"|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)


def answer_part(response: str, reasoning: Reasoning) -> str | None:
    """Return the text after the reasoning, or None when the reasoning never ended.

    The text after the *last* ``</think>`` is the answer. A ``<think>`` that stays open means that no answer
    was given, even if there is a box inside it.
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


_INK = re.compile(r"\S")
_COMMAND = re.compile(r"(?P<escaped>\\\\)|" + _BOX + r"(?=\{)")
_JOINT = re.compile(
    r"(?:[\s$,;.&()/|]|\\[()\[\],;:! ]|\\q?quad|\\text\s*\{[^{}]{0,12}\}|and|or|else|also|maybe|perhaps|possibly|"
    r"alternatively|either|both){0,40}",
    re.DOTALL,
)
_NAME = re.compile(
    r"(?:(?:^|[\n$,;:.(\[&])\s*|(?<![\\A-Za-z])[A-Za-z]{2,}\s+)([A-Za-z](?:_(?:\w|\{\w{1,3}\}))?)\s*=[\s$]*\Z"
    r"|(?:\s|^)(?P<label>(?:\*\*)?(?:Part )?(?P<part>\([a-h]\))(?:\*\*)?:?)[\s$]*\Z"
)
"""A name before a box, ``x = \\boxed{2}``, or the label of a part of the problem, ``(a) \\boxed{2}``."""
_MAX_NAME = 40
_MAX_JOINT_CHARS = 4000
_MAX_BETWEEN = 60
_MAX_JOINT = 20


def _boxes(text: str) -> list[tuple[int, int, int]]:
    """Closed boxes in the order of their ends: where the command, the content and the closing brace begin.

    Empty ones are left out if there are others: ``\\boxed{}`` names the command.
    """
    stack: list[tuple[int, int] | None] = []
    found: list[tuple[int, int, int]] = []
    for token in _TOKEN.finditer(text):
        if token["box"]:
            stack.append((token.start(), token.end()))
        elif token["bare"]:
            found.append((token.start(), token.start("bare"), token.end()))
        elif token["open"]:
            stack.append(None)
        elif token["close"] and stack:
            opened = stack.pop()
            if opened is not None:
                found.append((*opened, token.start()))
    return [one for one in found if _INK.search(text, one[1], one[2])] or found


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


AFTER_HASHES = re.compile(r"(?:^|\s)####[ \t]*([^\n#]*?)\s*\Z")
"""The answer at the end of a solution of GSM8K: ``#### 7``."""


def marked_answer(text: str) -> str | None:
    """Return the marked answer of a solution: after a last ``####``, else in its last box; None without either.

    Boxes with nothing but ``and`` or commas between them are one answer.
    """
    found = AFTER_HASHES.search(text)
    if found:
        return found[1]
    if "boxed" not in text and "fbox" not in text:
        return None
    return ", ".join(joint_boxes(text) or ()) or last_box(text)


def joint_boxes(text: str, *, named: bool = False) -> tuple[str, ...] | None:
    r"""Return the last boxes of a text when nothing but ``and``, ``or`` or commas is between them; None if it is one.

    With ``named`` each may also have a name, which becomes part of it: ``x=2`` of ``x = \boxed{2}``.

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
        content, before = text[start:end].strip(), command
        if named and (name := _NAME.search(text, max(0, command - _MAX_NAME), command)) is not None:
            label = f"{name['part']} " if name["part"] else f"{name[1]}="
            content, before = (
                content if label[-1] == "=" in content else label + content,
                name.start("label" if name["part"] else 1),
            )
        run.append(content)
    return tuple(reversed(run)) if 1 < len(run) <= _MAX_JOINT else None


# --- Normalised equality ----------------------------------------------------------------------------------------------

_INTEGER = re.compile(r"([+-]?)0*(\d+)", re.ASCII)


def normalise(text: str) -> str:
    """Return one space between tokens, case folded, integers without sign ``+`` and leading zeros.

    Example:
        >>> normalise("  Left  007 -0 ")
        'left 7 0'
    """
    return " ".join(_normalise_token(token) for token in text.casefold().split())


def _normalise_token(token: str) -> str:
    match = _INTEGER.fullmatch(token)
    if match is None:
        return token
    sign, digits = match.groups()
    return f"-{digits}" if sign == "-" and digits != "0" else digits


class ExactVerifier:
    """The last box if there is one; with ``lenient`` else as many last tokens as the reference answer has.

    Example: to ``"L 7 S3 4 1 S4 2 3"`` with reference answer ``"3"`` it says matched (lenient).
    """

    def __init__(self, options: JudgeOptions) -> None:
        self._options = options

    def judge(self, references: Sequence[str], response: str) -> Verdict:
        start = time.perf_counter()
        answer = answer_part(response, self._options.reasoning)
        if answer is None:
            return make_verdict("no_answer", reason="the reasoning never ended", decided_by="extraction")
        box = last_box(answer)
        found: str | None = None
        for reference in references:
            candidate = box if box is not None else self._tail(answer, len(reference.split()))
            found = found if found is not None else candidate
            if candidate and normalise(candidate) == normalise(reference):
                seconds = time.perf_counter() - start
                return make_verdict("matched", decided_by="string", extracted=candidate, seconds=seconds)
        if not found or not found.strip():
            return make_verdict("no_answer", reason="no answer was found", decided_by="extraction")
        return make_verdict("mismatch", decided_by="string", extracted=found, seconds=time.perf_counter() - start)

    def _tail(self, answer: str, count: int) -> str | None:
        if self._options.extract == "box" or count == 0:
            return None
        # from the end: a response of 32K tokens is not split whole for its last one
        tail = answer.rsplit(maxsplit=count)[-count:]
        return " ".join(tail) or None
