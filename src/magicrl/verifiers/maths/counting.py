"""Numbers of choices and other small trees that notation stands for."""

from __future__ import annotations

from magicrl.verifiers.maths.expression import Expr, function, number, symbol


def chosen(letter: str, subscript: str, script: Expr) -> Expr | None:
    """``C_n^k`` things chosen and ``A_5^2`` arranged, as some write them; None where it is a power."""
    top = number(int(subscript)) if subscript.isdigit() else symbol(subscript)
    if top.op == "num" and script.op == "num" and script.value > top.value:
        return None
    if letter == "A":
        if top.op != "num" or script.op != "num":
            return None
        return Expr("mul", (function("binomial", top, script), function("factorial", script)))
    return function("binomial", top, script)


def times(left: Expr, right: Expr) -> Expr:
    """A product, flat, so that a long one is no deep tree."""
    return Expr("mul", (*left.args, right) if left.op == "mul" else (left, right))


def mixed_value(whole: Expr, top: Expr, bottom: Expr) -> Expr | None:
    if not (top.op == bottom.op == "num" and 0 < top.value < bottom.value):
        return None
    if top.decimals or bottom.decimals or whole.decimals:
        return None
    return number(whole.value + top.value / bottom.value)


def counted(letter: str, first: Expr, second: Expr) -> Expr:
    """The number of choices (``C``) or of arrangements in order (``P``, ``A``) of so many things."""
    choices = function("binomial", first, second)
    return choices if letter == "C" else Expr("mul", (choices, function("factorial", second)))
