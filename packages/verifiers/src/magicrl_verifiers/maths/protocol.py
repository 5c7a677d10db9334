"""The pool's end of the maths verifier: it also compares an accepted answer with the problem.

It runs in the calling process, so it loads neither sympy nor Math-Verify.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from magicrl_verifiers.isolated import IsolatedProtocol
from magicrl_verifiers.records import Problem, Verdict, make_verdict
from magicrl_verifiers.workers import Item

_SPELLINGS = (
    (re.compile(r"\\text ?\{[^{}]*\}|\\(?:left|right|[,;:!])|\^\{?\\circ\}?|[${}°]"), ""),
    (re.compile(r"\\times|\\cdot|[×·⋅]"), "*"),
    (re.compile(r"\\div|÷"), "/"),
    (re.compile(r"[−–]"), "-"),
)
_SPACED = re.compile(r" ?([-+*/^]) ?")
_NUMBER = re.compile(r"[-+]?[\d,]*\.?\d+")
_COMPUTATION = re.compile(r"(?:[\d.()+*/^!-]|\\sqrt)+")
_PART = re.compile(r"\d+(?:\.\d+)?|[-+*/^!]|\\sqrt")
_OPERATION = re.compile(r"(?<=[\d)!])[-+*/^!]|\\sqrt")
_NO_OPERATION = re.compile(r"-?[\d.]+\*10\^-?\d+")
"""Scientific notation is a number."""
_FRACTION = re.compile(r"-?\d+/\d+")


class MathsProtocol(IsolatedProtocol):
    """Items of the maths verifier. An answer that only repeats the problem's own computation is wrong."""

    def read(self, item: Item, message: Mapping[str, Any], seconds: float) -> Verdict:
        verdict = super().read(item, message, seconds)
        if not (verdict.correct and verdict.extracted and repeats_problem(item.problem, verdict.extracted)):
            return verdict
        reason = "the answer repeats the problem's computation and does not give its result"
        return make_verdict(
            "mismatch",
            reason=reason,
            decided_by=verdict.decided_by,
            extracted=verdict.extracted,
            seconds=verdict.seconds,
        )


def repeats_problem(problem: Problem, answer: str) -> bool:
    """Return whether ``answer`` is a computation of the problem, in any order, in place of the number that it gives.

    ``5 + 8`` has the value of the correct answer to "What is 5 + 8?". A policy would learn to copy it.
    """
    answer = _spelled(answer)
    references = [_spelled(reference) for reference in problem.references]
    if not (_COMPUTATION.fullmatch(answer) and _OPERATION.search(answer)) or _NO_OPERATION.fullmatch(answer):
        return False
    if not all(map(_NUMBER.fullmatch, references)):
        return False
    # 3/4 is a number too, unless a whole number is expected
    if _FRACTION.fullmatch(answer) and any("." in reference for reference in references):
        return False
    parts = sorted(_PART.findall(answer))
    return any(parts == sorted(_PART.findall(stated)) for stated in _COMPUTATION.findall(_spelled(problem.prompt)))


def _spelled(text: str) -> str:
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    # First one space is left of a run: a pattern with any number of them takes the square of the run's length.
    return _SPACED.sub(r"\1", " ".join(text.split()))
