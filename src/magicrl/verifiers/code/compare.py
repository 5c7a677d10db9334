"""Whether an output is the expected one, decided outside of the sandbox on plain data.

Text: tokens between ASCII white space, byte for byte; a token that is expected as a decimal fraction may differ by
the float tolerance. Values: Python's ``==`` on exact plain types; lists and tuples are one in JSON.
"""

from __future__ import annotations

import collections
import math
import re
from typing import Any

DEFAULT_TOLERANCE = 1e-6
"""Of floats, absolute or relative, where a problem states none: what contests usually grant."""
MAX_NUMBER_CHARS = 400

_FRACTION = re.compile(rb"[+-]?(\d+\.\d*|\.\d+|\d+(?:\.\d*)?[eE][+-]?\d+|\.\d+[eE][+-]?\d+)", re.ASCII)
_NUMBER = re.compile(rb"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)


def same_text(output: bytes, expected: bytes, tolerance: float | None = None, *, fold_case: bool = False) -> bool:
    """Equal token by token.

    Args:
        tolerance: of fractions; None: `DEFAULT_TOLERANCE` where the expected token has a point or an exponent.
            A stated one also covers expected integers.
        fold_case: letters of either case are one (``YES`` and ``yes``).
    """
    if output == expected:
        return True
    wanted = expected.split()
    found = output.split(None, len(wanted))  # a flood of output is never cut up whole
    if len(found) != len(wanted):
        return False
    if fold_case:
        found, wanted = [token.lower() for token in found], [token.lower() for token in wanted]
    return all(a == b or close_tokens(a, b, tolerance) for a, b in zip(found, wanted, strict=True))


def close_tokens(found: bytes, wanted: bytes, tolerance: float | None) -> bool:
    """Whether two tokens are numbers that differ by no more than the tolerance."""
    if len(found) > MAX_NUMBER_CHARS or len(wanted) > MAX_NUMBER_CHARS:
        return False
    if tolerance == 0 or not (_FRACTION if tolerance is None else _NUMBER).fullmatch(wanted):
        return False
    if not _NUMBER.fullmatch(found):
        return False
    return close(float(found), float(wanted), DEFAULT_TOLERANCE if tolerance is None else tolerance)


def close(found: float, wanted: float, tolerance: float) -> bool:
    """Finite and within the tolerance, absolute or relative to the expected value; or equal."""
    if found == wanted:
        return True
    if not (math.isfinite(found) and math.isfinite(wanted)):
        return False
    return abs(found - wanted) <= tolerance * max(1.0, abs(wanted))


def same_lines(output: bytes, expected: bytes) -> bool:
    """Equal line by line, but for white space at ends of lines and of the text."""
    return [line.rstrip() for line in output.rstrip().split(b"\n")] == [
        line.rstrip() for line in expected.rstrip().split(b"\n")
    ]


def same_value(found: Any, wanted: Any, tolerance: float | None, *, strict: bool) -> bool:
    """Whether two plain values are equal.

    Args:
        tolerance: of floats; None: the default where ``wanted`` is a float, and none at all with ``strict``.
        strict: Python's own ``==`` (assertions); else as JSON sees it: a tuple is a list, and a dictionary's keys
            may be texts of integers.
    """
    if strict and tolerance is None:
        return bool(found == wanted)
    waiting = collections.deque([(found, wanted)])
    while waiting:
        a, b = waiting.pop()
        if not strict:
            a, b = _as_json(a), _as_json(b)
        if isinstance(b, list | tuple) and isinstance(a, list | tuple):
            if (strict and type(a) is not type(b)) or len(a) != len(b):
                return False
            waiting.extend(zip(a, b, strict=True))
        elif isinstance(b, dict) and isinstance(a, dict):
            keys = a if a.keys() == b.keys() or strict else {str(key): item for key, item in a.items()}
            if keys.keys() != b.keys():
                return False
            waiting.extend((keys[key], b[key]) for key in b)
        elif not _same_leaf(a, b, tolerance):
            return False
    return True


def _as_json(value: Any) -> Any:
    if isinstance(value, tuple | collections.deque | range) or hasattr(value, "__next__"):
        return list(value)
    return value


def _same_leaf(a: Any, b: Any, tolerance: float | None) -> bool:
    if a == b:
        return True
    numbers = isinstance(a, int | float) and isinstance(b, int | float)
    if not numbers or isinstance(a, bool) or isinstance(b, bool):
        return False
    if tolerance is None and not isinstance(b, float):
        return False
    try:
        return close(float(a), float(b), DEFAULT_TOLERANCE if tolerance is None else tolerance)
    except OverflowError:
        return False
