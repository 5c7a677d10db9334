"""Sets of numbers as spans: from intervals, points and conditions, their unions and intersections."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations

from magicrl.verifiers.maths.answers import Answer, Group, Named, Quantity, RealSet, Several, Span
from magicrl.verifiers.maths.equality import number_value
from magicrl.verifiers.maths.expression import Expr, symbol

_MOST_SPANS = 100
PLUS_INFINITY, MINUS_INFINITY = symbol("inf"), Expr("neg", (symbol("inf"),))


def as_spans(answer: Answer) -> RealSet | None:
    """The set of numbers that an interval, a finite set or a number stands for."""
    if isinstance(answer, RealSet):
        return answer
    if isinstance(answer, Named):
        inner = as_spans(answer.value) if not isinstance(answer.value, Named) else None
        return None if inner is None else RealSet(inner.spans, answer.name)
    if isinstance(answer, Group) and answer.opening == "{":
        points = [item.expr for item in answer.items if isinstance(item, Quantity) and item.unit is None]
        return _points(points) if len(points) == len(answer.items) else None
    if isinstance(answer, Group) and len(answer.items) == 2 and {answer.opening, answer.closing} <= {"(", "["}:
        low, high = answer.items
        if isinstance(low, Quantity) and isinstance(high, Quantity) and low.unit is None and high.unit is None:
            return RealSet((Span(low.expr, answer.opening == "[", high.expr, answer.closing == "["),))
    return None


def _points(points: Sequence[Expr]) -> RealSet:
    return RealSet(tuple(Span(point, True, point, True) for point in points))


def united(items: Sequence[Answer | None], operations: Sequence[str]) -> Answer | None:
    r"""``A \cup B``, and ``A \setminus \{points\}``."""
    if (named := _of_names(items, operations)) is not None:
        return named
    sets = [as_spans(item) if item is not None else None for item in items]
    spans = [found.spans for found in sets if found is not None]
    if len(spans) != len(items):
        return None
    if set(operations) == {"cup"}:
        return RealSet(tuple(span for group in spans for span in group))
    if set(operations) == {"cap"}:
        return _common(spans)
    if list(operations) == ["setminus"]:
        return _without_points(spans[0], spans[1]) or _without_spans(spans[0], spans[1])
    return None


def _of_names(items: Sequence[Answer | None], operations: Sequence[str]) -> Quantity | None:
    r"""``A \cap B`` of sets that only have names."""
    formulas = [item.expr for item in items if isinstance(item, Quantity) and item.unit is None]
    kinds = set(operations)
    if len(formulas) != len(items) or len(kinds) != 1 or (kinds == {"setminus"} and len(items) > 2):
        return None
    if not all((one.op == "sym" and one.name.isupper()) or one.op == "set" for one in formulas):
        return None
    return Quantity(Expr("set", tuple(formulas), kinds.pop()))


def _common(groups: Sequence[Sequence[Span]]) -> RealSet | None:
    """What sets have in common; None where a bound has no value, or where that is nothing."""
    if any(bound.symbols for group in groups for span in group for bound in (span.low, span.high)):
        return None
    left = list(groups[0])
    for group in groups[1:]:
        both = [_both(one, other, points=True) for one in left for other in group]
        left = [span for span in both if span is not None]
    return RealSet(tuple(left)) if left else None


def _without_points(spans: Sequence[Span], points: Sequence[Span]) -> RealSet | None:
    """One span without points inside it."""
    if len(spans) != 1 or any(point.low != point.high for point in points):
        return None
    if not points or any(point.low.symbols for point in points):
        return None
    ordered = sorted(points, key=lambda point: _position(point.low))
    pieces: list[Span] = []
    rest = spans[0]
    for point in ordered:
        pieces.append(Span(rest.low, rest.low_closed, point.low, False))
        rest = Span(point.low, False, rest.high, rest.high_closed)
    return RealSet((*pieces, rest))


def _without_spans(spans: Sequence[Span], taken: Sequence[Span]) -> RealSet | None:
    """What is left of some spans without others; None where a bound has no value."""
    bounds = [bound for span in (*spans, *taken) for bound in (span.low, span.high)]
    if any(bound.symbols for bound in bounds) or len(spans) * len(taken) > _MOST_SPANS:
        return None
    left = list(spans)
    for hole in taken:
        if _position(hole.low) > _position(hole.high):
            return None
        below = Span(MINUS_INFINITY, False, hole.low, not hole.low_closed)
        above = Span(hole.high, not hole.high_closed, PLUS_INFINITY, False)
        pieces = [_both(span, side, points=True) for span in left for side in (below, above)]
        left = [piece for piece in pieces if piece is not None]
    return RealSet(tuple(left))


def _position(bound: Expr) -> Fraction | float:
    if bound == PLUS_INFINITY:
        return float("inf")
    if bound == MINUS_INFINITY:
        return float("-inf")
    value = number_value(bound)
    return 0 if value is None else value


def subject_set(item: Answer) -> RealSet | None:
    """A condition on one name as a set: an inequality, ``a = 1`` or ``a \\in R``."""
    if isinstance(item, RealSet):
        return item
    if isinstance(item, Named) and isinstance(item.value, RealSet):
        return RealSet(item.value.spans, item.name)
    if isinstance(item, Named) and isinstance(item.value, Quantity) and item.value.unit is None and item.symbol:
        point = item.value.expr
        return RealSet((Span(point, True, point, True),), item.name)
    return None


def unbounded(item: Answer) -> bool:
    """Whether a pair in brackets has an infinite bound: then it is an interval and no point."""
    found = as_spans(item) if isinstance(item, Group) else None
    return found is not None and any(span.low == MINUS_INFINITY or span.high == PLUS_INFINITY for span in found.spans)


def unequal(item: Answer, points: Sequence[Answer]) -> RealSet | None:
    r"""``x \\ne 1, 2``: the points after the first are left out too."""
    if not isinstance(item, RealSet) or len(item.spans) != 2 or item.spans[0].high != item.spans[1].low:
        return None
    if (item.spans[0].low, item.spans[1].high) != (MINUS_INFINITY, PLUS_INFINITY):
        return None
    others = [point.expr for point in points if isinstance(point, Quantity) and point.unit is None]
    if len(others) != len(points) or not others:
        return None
    line = Span(MINUS_INFINITY, False, PLUS_INFINITY, False)
    found = _without_points((line,), _points([item.spans[0].high, *others]).spans)
    return None if found is None else RealSet(found.spans, item.subject)


def alternatives(items: Sequence[Answer]) -> RealSet | None:
    """Intervals joined by "or" as their union, where they do not overlap."""
    sets = [as_spans(item) for item in items if isinstance(item, Group)]
    known = [one for one in sets if one is not None]
    return None if len(known) != len(items) or _overlap(known) else _union(known, "")


def joined_sets(sets: Sequence[RealSet], separators: Sequence[str]) -> Answer:
    """Conditions joined by ``or`` are a union; by ``and`` or a comma an intersection, if there is any."""
    subjects = {one.subject for one in sets}
    if len(subjects) != 1:
        return Several(tuple(sets))
    subject = subjects.pop()
    if not subject:  # intervals in a list are several answers, or a union that was written with "or"
        return Several(tuple(sets)) if "or" not in separators or _overlap(sets) else _union(sets, "")
    if all(separator == "or" for separator in separators):
        # of two conditions one of which holds the other, one is too many: a guess at either
        return Several(tuple(sets)) if _overlap(sets) else _union(sets, subject)
    common = list(sets[0].spans)
    for other in sets[1:]:
        pairs = [_both(one, span) for one in common for span in other.spans]
        common = [span for span in pairs if span is not None]
    return RealSet(tuple(common), subject) if common else _union(sets, subject)


def _overlap(sets: Sequence[RealSet]) -> bool:
    return any(
        _both(span, other) is not None
        for one, two in combinations(sets, 2)
        for span in one.spans
        for other in two.spans
    )


def _union(sets: Sequence[RealSet], subject: str) -> RealSet:
    return RealSet(tuple(span for one in sets for span in one.spans), subject)


def _both(one: Span, other: Span, *, points: bool = False) -> Span | None:
    """What two half-lines have in common, None when that is nothing, or (without ``points``) one point."""
    low, low_closed = max(
        ((one.low, one.low_closed), (other.low, other.low_closed)),
        key=lambda bound: (_position(bound[0]), not bound[1]),
    )
    high, high_closed = min(
        ((one.high, one.high_closed), (other.high, other.high_closed)),
        key=lambda bound: (_position(bound[0]), bound[1]),
    )
    single = points and low_closed and high_closed and _position(low) == _position(high)
    return Span(low, low_closed, high, high_closed) if single or _position(low) < _position(high) else None
