"""Normalised equality, for answers that are one token or a few. Microseconds, in the calling process."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from magicrl_verifiers.extraction import answer_part, last_box
from magicrl_verifiers.records import JudgeOptions, Verdict, make_verdict

_INTEGER = re.compile(r"([+-]?)0*(\d+)", re.ASCII)


def normalise(text: str) -> str:
    """One space between tokens, case folded, integers without sign ``+`` and leading zeros.

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
