"""Equations and orders: the same relation written in another way."""

from __future__ import annotations

from magicrl.verifiers.maths.answers import Equation, Order
from magicrl.verifiers.maths.equality import constant_ratio, same_value
from magicrl.verifiers.maths.expression import Expr, difference, number, substitute


def same_equation(gold: Equation, answer: Equation) -> bool | None:
    """Whether two equations differ by a constant factor only: ``x = y/2`` is ``2x - y = 0``."""
    one, other = difference(gold.left, gold.right), difference(answer.left, answer.right)
    ratio = constant_ratio(one, other)
    return None if ratio is None else ratio != 0


def same_order(gold: Order, answer: Order) -> bool | None:
    """The same chain part by part, or one inequality times a constant of the right sign."""
    if gold.relations == answer.relations and len(gold.parts) == len(answer.parts):
        verdicts = [same_value(one, other) for one, other in zip(gold.parts, answer.parts, strict=True)]
        if all(verdict is True for verdict in verdicts):
            return True
    if len(gold.parts) != 2 or len(answer.parts) != 2:
        return False if len(gold.parts) != len(answer.parts) or gold.relations == answer.relations else None
    if gold.relations != answer.relations:
        return False
    ratio = constant_ratio(difference(*gold.parts), difference(*answer.parts))
    if ratio is None:
        return None
    return ratio != 0 if gold.relations == ("!=",) else ratio > 0


def solves(gold: Equation, answer: Expr) -> bool | None:
    """Whether a formula is the one name of the equation that it does not hold, and the equation has it once.

    Example: to ``r sin(t) = 3`` the answer ``3/sin(t)``. With two names missing the answer says too little.
    """
    names = gold.left.symbols | gold.right.symbols
    missing = names - answer.symbols
    if len(missing) != 1 or not answer.symbols <= names:
        return False
    (name,) = missing
    whole = difference(gold.left, gold.right)
    put_in = substitute(whole, name, answer)
    if same_value(put_in, number(0)) is not True:
        return False
    # linear in the name: equal steps make equal differences, so that there is no second solution
    steps = [substitute(whole, name, number(value)) for value in (-2, 1, 4)]
    linear = same_value(difference(steps[1], steps[0]), difference(steps[2], steps[1]))
    return linear is True
