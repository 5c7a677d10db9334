"""Math-Verify behind two functions: parse an answer, compare two parsed ones. Loaded in workers only.

Its own time-outs are off: they use ``signal.alarm`` and measure the machine's load. The worker is killed instead.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import math_verify
import sympy
from latex2sympy2_extended import NormalizationConfig
from sympy.core.random import seed as seed_sympy

logging.getLogger("math_verify").setLevel(logging.CRITICAL)
logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)

Expression = sympy.Basic | sympy.MatrixBase

_UNFINISHED = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit)
"""Slow to evaluate without being out of reach."""

_WHOLE = (
    math_verify.LatexExtractionConfig(
        # units off: it would take any last letter for one
        normalization_config=NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="last"
        )
    ),
)
_BLANKS = re.compile(r"[ \t]{2,}")
_DIGITS = 50
_EXACT_TOLERANCE = 1e-30
_FLOAT_TOLERANCE = 1e-5


def reset_randomness() -> None:
    """Sympy probes some identities at random points; the same points for every item."""
    seed_sympy(0)


def parse_formula(latex: str) -> list[Any]:
    """The expressions that Math-Verify reads in ``latex``, which is taken as one answer; empty when it reads none.

    The box around it keeps Math-Verify from picking a part or altering it (RECIPE section 8, step 4).
    """
    return _parse(f"\\boxed{{{latex}}}")


def parse_prose(text: str) -> tuple[list[Any], str | None]:
    """The expressions found in running text by Math-Verify's own patterns, and the text of the first."""
    found = math_verify.parse(_BLANKS.sub(" ", text), parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    source = next((item for item in found if isinstance(item, str)), None)
    return [item for item in found if not isinstance(item, str)], source


def _parse(text: str) -> list[Any]:
    found = math_verify.parse(text, extraction_config=_WHOLE, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    return [item for item in found if not isinstance(item, str)]


def evaluates(parsed: list[Any]) -> bool:
    """Whether numbers among the expressions can be computed at all; a gold like 10^{10^{10^{10}}} cannot.

    Called for golds, in the phase where an exhausted worker is the gold's fault and not the answer's.
    """
    numbers = [item for item in parsed if isinstance(item, sympy.Expr) and not item.has(*_UNFINISHED)]
    return all(number.evalf(15) is not sympy.nan for number in numbers if number.is_number)


def equivalent(gold: list[Any], answer: list[Any]) -> bool:
    """Whether Math-Verify holds any pair for equal, and exact numbers agree to more than its six decimals."""
    return any(
        math_verify.verify(left, right, timeout_seconds=None) and _numbers_agree(left, right)
        for left in gold
        for right in answer
    )


def _numbers_agree(gold: Any, answer: Any) -> bool:
    """Undo Math-Verify's absolute rounding: 1/2004! and 1/2006! are both 0.000000 there.

    Two exact numbers must agree to 30 digits; a decimal approximation to a relative 1e-5.
    """
    if not (isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr)):
        return True
    if not (gold.is_number and answer.is_number):
        return True
    left, right = gold.evalf(_DIGITS), answer.evalf(_DIGITS)
    if not (left.is_Number and right.is_Number and left.is_finite and right.is_finite):
        return True
    exact = not (gold.has(sympy.Float) or answer.has(sympy.Float))
    tolerance = _EXACT_TOLERANCE if exact else _FLOAT_TOLERANCE
    return bool(abs(left - right) <= tolerance * max(abs(left), abs(right)))
