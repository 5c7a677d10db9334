"""Sets of real numbers: are two unions of spans the same set?"""

from __future__ import annotations

from collections.abc import Sequence

from magicrl.verifiers.maths.answers import RealSet, Span
from magicrl.verifiers.maths.evaluation import Value
from magicrl.verifiers.maths.expression import Expr
from magicrl.verifiers.maths.probing import number_value, real_number, same_value


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
    end: Value = None
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


def _place(bound: Expr) -> Value | None:
    if bound.op == "const" and bound.name == "inf":
        return float("inf")
    if bound.op == "neg" and bound.args[0].op == "const" and bound.args[0].name == "inf":
        return float("-inf")
    value = number_value(bound)
    return None if value is None else real_number(value)
