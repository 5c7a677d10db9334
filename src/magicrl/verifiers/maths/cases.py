"""Definitions by cases: the same values under the same conditions, in any order."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

from magicrl.verifiers.maths.answers import Answer, Piecewise, Quantity
from magicrl.verifiers.maths.equality import same_value
from magicrl.verifiers.maths.expression import Expr, difference
from magicrl.verifiers.maths.spans import MINUS_INFINITY, PLUS_INFINITY, subject_set

Same = Callable[[Answer, Answer], "bool | None"]
_MOST_PIECES = 6


def same_cases(gold: Answer, answer: Answer, same: Same) -> bool | None:
    """The same function; where a condition is not about a letter's size, the same cases in any order."""
    sides = [_formula(one) for one in (gold, answer)]
    if sides[0] is not None and sides[1] is not None:
        return same_value(sides[0], sides[1])
    return _same_pieces(gold, answer, same) if isinstance(gold, Piecewise) and isinstance(answer, Piecewise) else False


def _formula(answer: Answer) -> Expr | None:
    """A definition by cases as one formula; None where a value is none, or a condition is no set of real numbers."""
    if isinstance(answer, Quantity):
        return answer.expr if answer.unit is None else None
    args: list[Expr] = []
    for value, condition in answer.pieces if isinstance(answer, Piecewise) else ():
        where = None if condition is None else subject_set(condition)
        if not isinstance(value, Quantity) or value.unit is not None or (where is None) != (condition is None):
            return None
        if where is None:
            args += [value.expr, Expr("bounds")]
        for span in where.spans if where is not None else ():
            subject = Expr("sym", name=where.subject if where is not None else "")
            low = () if span.low == MINUS_INFINITY else (_bound(subject, span.low, span.low_closed),)
            high = () if span.high == PLUS_INFINITY else (_bound(span.high, subject, span.high_closed),)
            args += [value.expr, Expr("bounds", (*low, *high))]
    return Expr("cases", tuple(args)) if args else None


def _bound(above: Expr, below: Expr, closed: bool) -> Expr:
    return Expr("bound", (difference(above, below),), "closed" if closed else "open")


def _same_pieces(gold: Piecewise, answer: Piecewise, same: Same) -> bool | None:
    """Whether every case of one is a case of the other; "otherwise" may stand for the one condition left over."""
    if len(gold.pieces) != len(answer.pieces) or len(gold.pieces) > _MOST_PIECES:
        return False
    unknown = False
    for order in permutations(answer.pieces):
        verdicts = [_same_case(one, other, same) for one, other in zip(gold.pieces, order, strict=True)]
        if all(verdict is True for verdict in verdicts):
            return True
        unknown = unknown or False not in verdicts
    return None if unknown else False


def _same_case(gold: tuple[Answer, Answer | None], answer: tuple[Answer, Answer | None], same: Same) -> bool | None:
    value = same(gold[0], answer[0])
    if value is not True or gold[1] is None or answer[1] is None:
        return value  # all other cases agree, so that "otherwise" is what is left
    return same(gold[1], answer[1])
