r"""Arithmetic progressions over the integers: ``\frac\pi3 + 2k\pi`` and ``\frac{7\pi}3 - 2n\pi`` are one set."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm

from magicrl.verifiers.maths.answers import Answer, Group, Named, Quantity, Several
from magicrl.verifiers.maths.equality import number_value, rational_value, same_value
from magicrl.verifiers.maths.expression import Expr, difference, number, substitute

_MOST_CLASSES = 60
Line = tuple[Expr, Expr]
"""First member and step."""


def same_progressions(gold: Answer, answer: Answer, ours: str, theirs: str) -> bool:
    """Whether two lists of formulas, each linear in its whole parameter, have the same values."""
    left, right = _lines(gold, ours), _lines(answer, theirs)
    if not left or not right:
        return False
    unit = left[0][1]
    steps = [_ratio(step, unit) for _, step in (*left, *right)]
    known = [step for step in steps if step]
    if len(known) != len(steps):
        return False
    common = Fraction(lcm(*(step.numerator for step in known)), gcd(*(step.denominator for step in known)))
    period = Expr("mul", (number(abs(common)), unit))
    sides = [_classes(lines, known[start : start + len(lines)], abs(common))
             for lines, start in ((left, 0), (right, len(left)))]  # fmt: skip
    one, other = sides
    if one is None or other is None or len(one) != len(other):
        return False
    return all(any(_congruent(a, b, period) for b in other) for a in one) and all(
        any(_congruent(a, b, period) for b in one) for a in other
    )


def _lines(answer: Answer, name: str) -> list[Line] | None:
    if isinstance(answer, Named):
        return _lines(answer.value, name)
    if isinstance(answer, Several) or (isinstance(answer, Group) and answer.opening == "{"):
        found: list[Line] = []
        for item in answer.items:
            lines = _lines(item, name)
            if lines is None:
                return None
            found += lines
        return found
    if not isinstance(answer, Quantity) or answer.unit is not None or answer.expr.symbols != frozenset((name,)):
        return None
    at = [substitute(answer.expr, name, number(value)) for value in (0, 1, 2, -3)]
    step = difference(at[1], at[0])
    if number_value(step) in (None, 0) or same_value(step, difference(at[2], at[1])) is not True:
        return None
    return [(at[0], step)] if same_value(Expr("mul", (number(3), step)), difference(at[0], at[3])) is True else None


def _ratio(step: Expr, unit: Expr) -> Fraction | None:
    """The exact ratio of two steps, if it is a small fraction."""
    ratio = Expr("div", (step, unit))
    if (exact := rational_value(ratio)) is not None:
        return exact
    value = number_value(ratio)
    if value is None or abs(value) > 10**6:
        return None
    guess = value.limit_denominator(1000)
    return guess if same_value(Expr("mul", (number(guess), unit)), step) is True else None


def _classes(lines: Sequence[Line], steps: Sequence[Fraction], common: Fraction) -> list[Expr] | None:
    """One member of each class modulo the common period."""
    found: list[Expr] = []
    for (start, step), size in zip(lines, steps, strict=True):
        count = abs(common / size)
        if count.denominator != 1 or len(found) + count > _MOST_CLASSES:
            return None
        found += [Expr("add", (start, Expr("mul", (number(turn), step)))) for turn in range(int(count))]
    return found


def _congruent(one: Expr, other: Expr, period: Expr) -> bool:
    apart = difference(one, other)
    turns = number_value(Expr("div", (apart, period)))
    if turns is None or abs(turns) > 10**6:
        return False
    return same_value(apart, Expr("mul", (number(round(turns)), period))) is True
