"""Sets of real numbers: are two unions of spans the same set?"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import floor

from magicrl.verifiers.maths.answers import RealSet, Span
from magicrl.verifiers.maths.equality import number_value, same_value
from magicrl.verifiers.maths.expression import Expr


def same_set(gold: RealSet, answer: RealSet) -> bool | None:
    """Whether two unions of spans hold the same numbers; None when bounds cannot be put in order."""
    left, right = merged(gold.spans), merged(answer.spans)
    if left is None or right is None:
        if len(gold.spans) != len(answer.spans):
            return None
        left, right = list(gold.spans), list(answer.spans)
    if len(left) != len(right):
        return False
    verdicts = [_same_span(one, other) for one, other in zip(left, right, strict=True)]
    return False if False in verdicts else None if None in verdicts else True


def _same_span(gold: Span, answer: Span) -> bool | None:
    if (gold.low_closed, gold.high_closed) != (answer.low_closed, answer.high_closed):
        return False
    low, high = same_value(gold.low, answer.low), same_value(gold.high, answer.high)
    return False if low is False or high is False else None if low is None or high is None else True


def merged(spans: Sequence[Span]) -> list[Span] | None:
    """The spans in order, those that touch made one; None when bounds cannot be compared or are the wrong way."""
    keyed = [(_place(span.low), _place(span.high), span) for span in spans]
    known = [(low, high, span) for low, high, span in keyed if low is not None and high is not None]
    if len(known) != len(keyed):
        return None
    if any(low > high or (low == high and not (span.low_closed and span.high_closed)) for low, high, span in known):
        return None  # (5, 2) is no interval
    solid = sorted(known, key=lambda entry: (entry[0], not entry[2].low_closed))
    result: list[Span] = []
    end: Fraction | float = 0
    for low, high, span in solid:
        if result and (low < end or (low == end and (span.low_closed or result[-1].high_closed))):
            last = result[-1]
            if high > end or (high == end and span.high_closed):
                result[-1] = Span(last.low, last.low_closed, span.high, span.high_closed)
                end = high
        else:
            result.append(span)
            end = high
    return result


_MOST_MEMBERS = 60
_FROM = {"Z": None, "N": 1, "Z+": 1, "Z+0": 0, "N0": 0}


def whole_numbers(numbers: RealSet, domain: str) -> list[int] | None:
    """The whole numbers of a bounded set, in order; None when they are too many or a bound has no value."""
    if domain not in _FROM:
        return None
    least = _FROM[domain]
    found: set[int] = set()
    for span in numbers.spans:
        low, high = _place(span.low), _place(span.high)
        if low is None or high is None or high == float("inf") or (low == float("-inf") and least is None):
            return None
        first = least if low == float("-inf") else floor(low)
        assert first is not None
        if high - max(low, first) > 10 * _MOST_MEMBERS:
            return None
        for member in range(first if least is None else max(first, least), floor(high) + 1):
            above = member > low or (member == low and span.low_closed)
            if above and (member < high or (member == high and span.high_closed)):
                found.add(member)
            if len(found) > _MOST_MEMBERS:
                return None
    return sorted(found)


def _place(bound: Expr) -> Fraction | float | None:
    if bound.op == "const" and bound.name == "inf":
        return float("inf")
    if bound.op == "neg" and bound.args[0].op == "const" and bound.args[0].name == "inf":
        return float("-inf")
    return number_value(bound)
