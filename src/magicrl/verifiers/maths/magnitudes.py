"""Quantities, ratios and times: numbers compared with what stands beside them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from magicrl.verifiers.maths import equality
from magicrl.verifiers.maths.answers import Answer, Clock, Quantity, Ratio, Text
from magicrl.verifiers.maths.equality import number_value, same_value
from magicrl.verifiers.maths.expression import Expr, number, symbol, without_degrees
from magicrl.verifiers.maths.phrases import is_month
from magicrl.verifiers.maths.units import Unit, in_base_units, singular

_HALF_TURN = Expr("div", (symbol("pi"), number(180)))


def any_of(*verdicts: bool | None) -> bool | None:
    """True where one is true, None where one is unknown."""
    return True if True in verdicts else None if None in verdicts else False


def all_of(verdicts: Sequence[bool | None]) -> bool | None:
    """False where one is false, None where one is unknown."""
    return False if False in verdicts else None if None in verdicts else True


def as_value(value: Quantity) -> Expr | None:
    """The value of a quantity without a unit, or of a percentage."""
    if value.unit is not None and value.unit.kind == "percent":
        return Expr("div", (value.expr, number(100)))
    return value.expr if value.unit is None else None


def numbered(text: Text, other: Quantity) -> bool:
    """``Day 15`` is the 15th day."""
    if len(text.words) != 2 or not text.words[1].isdigit() or is_month(text.words[0]):
        return False
    named = other.unit is not None and other.unit.kind == "noun" and other.unit.noun == singular(text.words[0])
    return named and same_value(number(int(text.words[1][:30])), other.expr) is True


def same_quantity(gold: Quantity, answer: Quantity) -> bool | None:
    left, right = gold.unit, answer.unit
    if left is not None and left.kind == "none":
        left = None
    if right is not None and right.kind == "none":
        right = None
    if left is None and right is None:
        verdict = same_number(gold.expr, answer.expr)
        return True if verdict is False and degrees_left_out(gold.expr, answer.expr) else verdict
    if left is not None and right is not None:
        return _both_units(gold.expr, left, answer.expr, right)
    unit = left or right
    assert unit is not None
    if unit.kind == "percent":
        with_sign, without = (gold, answer) if left else (answer, gold)
        hundredth = Expr("div", (with_sign.expr, number(100)))
        share = number_value(gold.expr) if with_sign is answer else None
        if share is not None and abs(share) < 1:
            return same_number(gold.expr, hundredth)  # 0.25 is no 0.25%
        return any_of(same_number(with_sign.expr, without.expr), same_number(hundredth, without.expr))
    if unit.kind == "degree":
        with_sign, without = (gold, answer) if left else (answer, gold)
        if with_sign.expr.holds("const", "pi"):
            return same_number(Expr("mul", (with_sign.expr, _HALF_TURN)), without.expr)
        plain = same_number(with_sign.expr, without_degrees(without.expr))
        if plain is not True and without.expr.holds("const", "pi"):
            return same_number(Expr("mul", (with_sign.expr, _HALF_TURN)), without.expr)
        return plain
    if unit.kind == "unit":  # 10 \\mathrm{m}/\\mathrm{s} against 10m/s
        with_unit, without = (gold, answer) if left else (answer, gold)
        based = in_base_units(without.expr, None)
        if based is not None and not with_unit.expr.symbols:
            return same_value(in_base_units(with_unit.expr, unit) or with_unit.expr, based)
        if unit.noun and without.expr.symbols.issuperset(unit.noun):
            letters = [symbol(letter) for letter in unit.noun]  # "2 pi hr" is no hours
            return same_value(Expr("mul", (with_unit.expr, *letters)), without.expr)
    return same_number(gold.expr, answer.expr)


def _both_units(gold: Expr, left: Unit, answer: Expr, right: Unit) -> bool | None:
    if left.kind == right.kind == "unit":
        if any((left.dimension, right.dimension) == ((("L", n),), (("any", n),)) for n in (1, 2, 3)):
            return same_number(gold, answer)  # "square units" says no more than no unit
        if left.dimension != right.dimension:
            return False
        if left.factor == right.factor:
            return same_number(gold, answer)
        return same_value(Expr("mul", (number(left.factor), gold)), Expr("mul", (number(right.factor), answer)))
    if left.kind != right.kind:
        angle = {left.kind, right.kind} == {"degree", "unit"} and () in (left.dimension, right.dimension)
        if not angle:
            return False
        as_radians = [Expr("mul", (tree, _HALF_TURN)) if unit.kind == "degree" else tree
                      for tree, unit in ((gold, left), (answer, right))]  # fmt: skip
        return same_value(as_radians[0], as_radians[1])
    if left.noun != right.noun and (left.kind == "noun" or (left.kind == "percent" and left.noun and right.noun)):
        return False
    return same_number(gold, answer)


def degrees_left_out(gold: Expr, answer: Expr) -> bool:
    """``180 - a`` for an angle ``180^\\circ - a``: one side alone has degree signs, and the other no pi."""
    for one, other in ((gold, answer), (answer, gold)):
        bare = without_degrees(one)
        if bare != one and bare.symbols and not other.holds("const", "pi"):
            return same_value(bare, other) is True
    return False


def same_number(gold: Expr, answer: Expr) -> bool | None:
    """Equal formulas, or a decimal that is the other's value to six or more significant digits."""
    verdict = same_value(gold, answer)
    if verdict is False and (equality.approximates(answer, gold) or equality.approximates(gold, answer)):
        return True
    return verdict


def same_ratio(gold: Answer, answer: Answer) -> bool | None:
    if isinstance(gold, Clock) and isinstance(answer, Clock):
        if _times(gold) & _times(answer):
            return True
        if gold.ratio is None or answer.ratio is None:
            return False
        gold, answer = gold.ratio, answer.ratio
    left = gold.ratio if isinstance(gold, Clock) else gold
    right = answer.ratio if isinstance(answer, Clock) else answer
    if left is None or right is None:
        return False
    if isinstance(left, Ratio) and isinstance(right, Ratio):
        if len(left.parts) != len(right.parts):
            return False
        pairs = combinations(zip(left.parts, right.parts, strict=True), 2)
        return all_of([same_value(_cross(a, d), _cross(c, b)) for (a, b), (c, d) in pairs])
    ratio, other = (left, right) if isinstance(left, Ratio) else (right, left)
    if isinstance(ratio, Ratio) and len(ratio.parts) == 2 and isinstance(other, Quantity) and other.unit is None:
        return same_value(Expr("div", ratio.parts), other.expr)
    return False


def _cross(one: Expr, other: Expr) -> Expr:
    return Expr("mul", (one, other))


def _times(clock: Clock) -> set[int]:
    """Seconds after midnight; noon and midnight as people write them."""
    hours = clock.seconds // 3600
    if clock.half == "":
        return {clock.seconds}
    if not 1 <= hours <= 12:
        return set()
    return {clock.seconds % (12 * 3600) + (12 * 3600 if clock.half == "pm" else 0)}
