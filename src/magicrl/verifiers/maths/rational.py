r"""Plain numbers, exactly: integers, decimals, fractions and mixed numbers as `fractions.Fraction`.

Floats would call 0.1 and 0.10000001 equal, or a tiny number zero. Sizes are bounded, so that no exponent can
explode.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_CHARS = 1000
MAX_EXPONENT = 1000

_UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)(?:\.\d*)?|\.\d+"
_DECIMAL = re.compile(rf"([+-]?)({_UNSIGNED})(?:(?:\\times ?10\^|[eE])\{{?([+-]?\d+)\}}?)?", re.ASCII)
_FRACTION = re.compile(
    r"([+-]?)(?:(\d+) ?)?"
    r"(?:\\frac(?:\{([+-]?\d+)\}\{([+-]?\d+)\}|(\d)(\d))|(?<!\d)(\d+)/(\d+))",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class PlainNumber:
    """A number literal.

    Attributes:
        value: what it says, exactly.
        grouped: it holds separators that could also be read as a list.
        decimals: digits after the decimal point as written.
    """

    value: Fraction
    grouped: bool
    decimals: int = 0


def plain_number(text: str) -> PlainNumber | None:
    r"""The number that ``text`` (in canonical notation) spells, or None when it is anything else.

    Example:
        >>> plain_number(r"1\frac{1}{2}").value
        Fraction(3, 2)
    """
    if len(text) > MAX_CHARS:
        return None
    if match := _DECIMAL.fullmatch(text):
        return _decimal(*match.groups())
    if match := _FRACTION.fullmatch(text):
        return _fraction(*match.groups())
    return None


def _decimal(sign: str, digits: str, exponent: str | None) -> PlainNumber | None:
    power = int(exponent) if exponent and len(exponent) < 8 else 0
    if exponent and (len(exponent) >= 8 or abs(power) > MAX_EXPONENT):
        return None
    grouped = "," in digits or " " in digits
    bare = digits.replace(",", "").replace(" ", "")
    value = Fraction("0" + bare.rstrip(".")) * Fraction(10) ** power
    decimals = len(bare.partition(".")[2]) if exponent is None else 0
    return PlainNumber(-value if sign == "-" else value, grouped, decimals)


def _fraction(sign: str, whole: str | None, *parts: str | None) -> PlainNumber | None:
    given = [part for part in parts if part is not None]
    numerator, denominator = int(given[0]), int(given[1])
    if denominator == 0:
        return None
    value = Fraction(numerator, denominator)
    if whole is not None:
        if not 0 < value < 1 or "-" in "".join(given):
            return None  # a product or a slip of the pen, not a mixed number
        value += int(whole)
    return PlainNumber(-value if sign == "-" else value, False)


def approximates(literal: PlainNumber, exact: Fraction) -> bool:
    """Whether a decimal is a non-terminating fraction, rounded or cut after six or more significant digits.

    Example: 0.0833333 is 1/12; 0.5000001 is not 1/2, which a decimal can say exactly.
    """
    rest = exact.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest != 1 and rounds(literal.value, literal.decimals, exact)


def rounds(decimal: Fraction, decimals: int, exact: Fraction) -> bool:
    """Whether a decimal is a value, rounded or cut after six or more significant digits."""
    unit = Fraction(1, 10**decimals)
    if not decimals or abs(decimal) < 100_000 * unit:
        return False
    distance = abs(decimal - exact)
    return 2 * distance <= unit or (distance < unit and abs(decimal) < abs(exact))
