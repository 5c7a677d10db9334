r"""Answers by a rule: lists with dots, arithmetic progressions, families with parameters.

The items shown of ``1, 3, \ldots, 2n-1`` or ``a_1 + a_2 + \cdots + a_n`` must be one formula at the places 0, 1, ...
in which only whole numbers, or subscripts, grow by a constant step; the last item gives the end.
``k\pi`` and ``n\pi`` are one family where the letter is known to be a parameter, and ``\frac\pi3 + 2k\pi`` and
``\frac{7\pi}3 - 2n\pi`` one set of numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import permutations
from math import gcd, lcm

from magicrl_verifiers.maths.answers import (
    Brackets,
    Dotted,
    Expr,
    Family,
    Named,
    Quantity,
    RealSet,
    Several,
    Shape,
    complete,
    formulas,
    mapped,
    names_of,
    numeral,
    put,
    rename,
    substitute,
    symbol,
    unitless,
)
from magicrl_verifiers.maths.equality import linear, number_value, rational_value, same_value

PLACE = "#j"
_MOST_ITEMS = 99
_INDEX = re.compile(r"(?P<stem>[A-Za-z]+)_(?:(?P<number>\d{1,4})|(?P<letter>[a-z])(?P<shift>[+-]\d{1,3})?)")


def continued(first: Sequence[Expr], last: Sequence[Expr]) -> Dotted | None:
    """Return the rule of two or more items before the dots and those after them (none: no end); None without a rule."""
    # a_1, a_2 grow in their subscripts, so they become functions of them
    before = [indexed(item) for item in first]
    after = [indexed(item) for item in last]
    item = _rule(before[0], before[1]) if len(before) > 1 else None
    if item is None or any(same_value(_at(item, numeral(at)), shown) is not True for at, shown in enumerate(before)):
        return None
    if not after:
        return Dotted(item, None)
    end = _place(item, after[-1])
    if end is None or same_value(_at(item, end), after[-1]) is not True:
        return None
    # every item after the dots must follow the rule, counted from the end
    for back, shown in enumerate(reversed(after)):
        if same_value(_at(item, end - numeral(back)), shown) is not True:
            return None
    return Dotted(item, end)


def expanded(dotted: Dotted) -> list[Shape] | None:
    """Return all items of a list of numbers; None if there are letters, no end, or too many items."""
    end = None if dotted.last is None else rational_value(dotted.last)
    if end is None or end.denominator != 1 or not 0 <= end <= _MOST_ITEMS:
        return None
    return [Quantity(_at(dotted.item, numeral(place))) for place in range(int(end) + 1)]


def series(kind: str, before: Sequence[Expr], last: Expr, place: str) -> Expr | None:
    """Return a sum or product with dots between ``before`` and ``last``."""
    # 1 + 1 + 2 + 4 + ...: the rule may begin after the first items
    for start in range(len(before)):
        found = continued(before[start:], [last])
        if found is not None and found.last is not None:
            body = put(found.item, Expr("sym", name=PLACE), Expr("sym", name=place))
            whole = Expr("series", (numeral(0), found.last, body), f"{kind} {place}")
            parts = (*(indexed(item) for item in before[:start]), whole)
            return whole if start == 0 else Expr("add" if kind == "sum" else "mul", parts)
    return None


def indexed(tree: Expr) -> Expr:
    """Turn subscripted names into functions of their subscripts."""
    match = _INDEX.fullmatch(tree.name) if tree.op == "sym" else None
    if match is None:
        return mapped(tree, indexed)
    index = numeral(int(match["number"])) if match["number"] else Expr("sym", name=match["letter"])
    return Expr("apply", (index + numeral(int(match["shift"])) if match["shift"] else index,), match["stem"] + "_")


def _at(item: Expr, place: Expr) -> Expr:
    return substitute(item, PLACE, place)


def _rule(first: Expr, second: Expr) -> Expr | None:
    """Return the formula that is ``first`` at place 0 and ``second`` at place 1."""
    if first == second:
        return first
    if _whole(first) and _whole(second):
        return _linear(first, second - first)
    if first.op == second.op and first.name == second.name and len(first.args) == len(second.args) and first.args:
        parts = complete(_rule(one, other) for one, other in zip(first.args, second.args, strict=True))
        return None if parts is None else Expr(first.op, tuple(parts), first.name)
    return None


def _linear(first: Expr, step: Expr) -> Expr:
    return first + step * Expr("sym", name=PLACE)


def _whole(tree: Expr) -> bool:
    """Return whether a formula may grow from item to item: a number or an index such as ``k-1``."""
    if tree.op == "num":
        return True
    return tree.op in ("sym", "add", "neg") and all(_whole(part) for part in tree.args)


def _place(item: Expr, last: Expr) -> Expr | None:
    """Return the place of the last item, from a number that grows in the rule."""
    if item.op == "add" and len(item.args) == 2 and item.args[1].op == "mul" and item.args[1].args[-1].name == PLACE:
        start, step = item.args[0], item.args[1].args[0]
        return (last - start) / step
    if PLACE not in item.symbols or len(item.args) != len(last.args) or (item.op, item.name) != (last.op, last.name):
        return None
    for part, shown in zip(item.args, last.args, strict=True):
        if PLACE in part.symbols:
            return _place(part, shown)
    return None


def counting(answer: Shape) -> tuple[str, ...]:
    r"""Return the names of the domain that ``1, 2, 3, \\ldots`` or ``n \\ge 1`` is; no names for other answers."""
    if isinstance(answer, Named):
        answer = answer.value
    if isinstance(answer, Brackets) and answer.opening == "{" and len(answer.items) == 1:
        (answer,) = answer.items
    if isinstance(answer, Dotted) and answer.last is None:
        for first, names in _COUNTED.items():
            if same_value(answer.item, _linear(numeral(first), numeral(1))) is True:
                return names
    if isinstance(answer, RealSet) and answer.subject in ("n", "m", "k") and len(answer.spans) == 1:
        (span,) = answer.spans
        low = rational_value(span.low) if span.low_closed and span.high == symbol("inf") else None
        return () if low is None or low.denominator != 1 else _COUNTED.get(int(low), ())
    return ()


_COUNTED = {0: ("N0", "Z+0"), 1: ("N", "Z+")}


_MOST_CLASSES = 120
Line = tuple[Expr, Expr]
"""First member and step."""


def same_progressions(reference: Shape, answer: Shape, ours: str, theirs: str) -> bool:
    """Return whether two lists of formulas, each linear in its whole parameter, have the same values."""
    left, right = _lines(reference, ours), _lines(answer, theirs)
    if not left or not right:
        return False
    unit = left[0][1]
    steps = complete(_ratio(step, unit) for _, step in (*left, *right))
    if steps is None:
        return False
    # the least common multiple of fractions is a period of all progressions
    common = Fraction(lcm(*(step.numerator for step in steps)), gcd(*(step.denominator for step in steps)))
    turns = [int(abs(common / step)) for step in steps]
    if sum(turns) > _MOST_CLASSES:
        return False
    # one member of each class modulo the common period
    one, other = (
        [
            start + numeral(turn) * step
            for (start, step), count in zip(lines, counts, strict=True)
            for turn in range(count)
        ]
        for lines, counts in ((left, turns[: len(left)]), (right, turns[len(left) :]))
    )
    period = numeral(common) * unit
    met = all(
        any(_congruent(a, b, period) for b in mine) for mine, yours in ((other, one), (one, other)) for a in yours
    )
    # the counts must agree, too: two members of one class would be a repetition
    return len(one) == len(other) and met


def _lines(answer: Shape, name: str) -> list[Line] | None:
    if isinstance(answer, Named):
        return _lines(answer.value, name)
    if isinstance(answer, Several) or (isinstance(answer, Brackets) and answer.opening == "{"):
        found = [_lines(item, name) for item in answer.items]
        return None if None in found else [line for lines in found for line in lines or ()]
    if not isinstance(answer, Quantity) or answer.unit is not None or answer.expr.symbols != frozenset((name,)):
        return None
    found = linear(answer.expr, name)
    return None if found is None or number_value(found[1]) in (None, 0) else [found]


def _ratio(step: Expr, unit: Expr) -> Fraction | None:
    """Return the exact ratio of two steps if it is a small fraction."""
    ratio = step / unit
    if (exact := rational_value(ratio)) is not None:
        return exact
    value = number_value(ratio)
    if value is None or abs(value) > 10**6:
        return None
    # a guess from 1000 bits, which is then proven
    guess = value.limit_denominator(1000)
    return guess if same_value(numeral(guess) * unit, step) is True else None


def _congruent(one: Expr, other: Expr, period: Expr) -> bool:
    apart = one - other
    turns = number_value(apart / period)
    if turns is None or abs(turns) > 10**6:
        return False
    return same_value(apart, numeral(round(turns)) * period) is True


Same = Callable[[Shape, Shape], "bool | None"]

_CONSTANT = re.compile(r"C(?:_\d)?|c_\d")
_MOST_CONSTANTS = 3
_ADDED = frozenset(("C", "K", "c", "k", "D", "A"))
"""Letters of a constant of integration in an answer; in a reference answer only C."""
_PARAMETERS = frozenset("knmljtzpq")


def same_family(reference: Shape, answer: Shape, same: Same) -> bool | None:
    r"""Compare two families, with the parameter of the answer renamed to that of the reference answer.

    A parameter is a letter that a clause declares (``for some integer t``), or one whose multiple of pi is added
    (``x + k\pi``). Both sides must have one; all other letters must be the same.
    """
    (plain_reference, left, domain), (plain_answer, right, other_domain) = _declared(reference), _declared(answer)
    domains = {domain, other_domain} - {""}
    if len(domains) > 1 and domains != {"R", "C"}:
        return False  # whole numbers are not all numbers
    interval = isinstance(plain_reference, Brackets) or (
        isinstance(plain_reference, RealSet) and not plain_reference.subject
    )
    if interval and isinstance(plain_answer, RealSet) and not domains <= {"R", "C"}:
        return False  # [2, 5) is not 2 <= n < 5 for an integer n
    if same(plain_reference, plain_answer) is True:
        return True
    reference_names, answer_names = names_of(plain_reference), names_of(plain_answer)
    # if one side declares its parameter, that of the other side is the letter that only it has
    left = left or (reference_names - answer_names if len(reference_names - answer_names) == 1 else frozenset())
    right = right or (answer_names - reference_names if len(answer_names - reference_names) == 1 else frozenset())
    left, right = left & reference_names, right & answer_names
    bound = arguments_of(plain_reference) | arguments_of(plain_answer)
    left, right = left - bound, right - bound  # in "f(n) = n for all n" the n is the argument, no parameter
    if len(left) != 1 or len(right) != 1 or reference_names - left != answer_names - right:
        return False
    (one,), (other,) = left, right
    if one != other and same(plain_reference, rename(plain_answer, {other: one})) is True:
        return True
    if domains and domains != {"Z"}:
        return False
    if (
        isinstance(plain_reference, Named)
        and isinstance(plain_answer, Named)
        and plain_reference.name != plain_answer.name
    ):
        return False
    return same_progressions(plain_reference, plain_answer, one, other)


def _declared(answer: Shape) -> tuple[Shape, frozenset[str], str]:
    """Split an answer, also ``x = 2k for integer k``, into the rest, the parameters, and their domain."""
    if isinstance(answer, Named) and isinstance(inner := answer.value, Family):
        return replace(answer, value=inner.answer), inner.parameters, inner.domain
    if isinstance(answer, Family):
        return answer.answer, answer.parameters, answer.domain
    return answer, periodic_parameters(answer), ""


def arguments_of(answer: Shape) -> frozenset[str]:
    """Return the arguments of a function that an answer defines."""
    return frozenset(answer.arguments) if isinstance(answer, Named) else frozenset()


def same_constants(reference: Shape, answer: Shape, same: Same) -> bool:
    """Compare ``f(x) = cx`` with ``f(x) = kx``: letters that are no argument of the function are arbitrary constants.

    Only letters that one side lacks are renamed, and there must be as many on both sides.
    """
    arguments, given = arguments_of(reference), arguments_of(answer)
    if isinstance(answer, Named) and arguments and arguments != given:
        return False
    # y(x) = C e^x for y = C e^x: only letters that look like constants are renamed
    left, right = names_of(reference), names_of(answer)
    ours, theirs = sorted(left - right), sorted(right - left)
    numbered = sorted(name for name in left if _CONSTANT.fullmatch(name)) if left == right else []
    if 1 < len(numbered) <= _MOST_CONSTANTS:  # C_1 and C_2 exchanged
        return _same_renamed(reference, answer, numbered, numbered, same)
    if not 1 <= len(ours) == len(theirs) <= _MOST_CONSTANTS or set(ours + theirs) & (arguments | given):
        return False
    # x = 1 + 2t, y = 3 - t: the only letter in coordinates is a parameter
    parts = reference.items if isinstance(reference, Several) and len(left) == 1 else ()
    if parts and all(isinstance(part, Named) and part.name in ("x", "y", "z") for part in parts):
        return same(reference, rename(answer, {theirs[0]: ours[0]})) is True
    variables = any(name.islower() for name in left & right)
    variables = variables and not any(_CONSTANT.fullmatch(name) for name in left & right)
    if not arguments and not (variables and all(_CONSTANT.fullmatch(name) for name in ours)):
        return False  # x + C: a C next to a variable is a constant of integration
    return _same_renamed(reference, answer, ours, theirs, same)


def _same_renamed(reference: Shape, answer: Shape, ours: Sequence[str], theirs: Sequence[str], same: Same) -> bool:
    """Return whether some renaming of the letters of the answer makes the two equal."""
    return any(
        same(reference, rename(answer, dict(zip(chosen, ours, strict=True)))) is True for chosen in permutations(theirs)
    )


def periodic_parameters(answer: Shape) -> frozenset[str]:
    r"""Return the letters that add a multiple of pi (or of 360 degrees) in every part of the answer."""
    found = [
        frozenset(name for name in part.symbols & _PARAMETERS if _steps_by_pi(part, name)) for part in formulas(answer)
    ]
    return frozenset.intersection(*found) if found else frozenset()


def _steps_by_pi(part: Expr, name: str) -> bool:
    """Return whether a step of the letter adds a positive rational multiple of pi."""
    found = linear(part, name) if part.holds("const", "pi") else None
    return found is not None and not found[1].symbols and (_ratio(found[1], symbol("pi")) or 0) > 0


def same_antiderivative(reference: Shape, answer: Shape) -> bool:
    r"""Compare ``\ln|2x| + C`` with ``\ln|x| + C``: functions of one variable that differ by a constant.

    The reference adds ``C``; the answer adds a constant of any usual name, times a number.
    """
    left, right = unitless(reference), unitless(answer)
    added = [name for name in right.symbols if name in _ADDED] if left is not None and right is not None else []
    if left is None or right is None or len(added) != 1 or len(left.symbols) != 2 or "C" not in left.symbols:
        return False
    (variable,), (constant,) = left.symbols - {"C"}, added
    ours, theirs = linear(left, "C"), linear(right, constant)
    if not variable.islower() or right.symbols != frozenset((variable, constant)) or ours is None or theirs is None:
        return False
    scale = substitute(theirs[1], variable, numeral(1))
    if same_value(ours[1], numeral(1)) is not True or number_value(scale) in (None, 0):
        return False
    if same_value(theirs[1], scale) is not True:
        return False
    gap = ours[0] - theirs[0]
    return any(same_value(gap, substitute(gap, variable, numeral(place))) is True for place in (1, 2))
