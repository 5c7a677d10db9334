r"""Families of answers: ``k\pi`` and ``n\pi`` are one, when the letter is known to be a parameter."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import permutations

from magicrl.verifiers.maths.answers import Answer, Domain, Equation, Family, Group, Matrix, Named, Quantity, Several
from magicrl.verifiers.maths.equality import same_value
from magicrl.verifiers.maths.expression import Expr, difference, number, rename, substitute
from magicrl.verifiers.maths.progressions import same_progressions

Same = Callable[[Answer, Answer], "bool | None"]

_CONSTANT = re.compile(r"C(?:_\d)?|c_\d")
_PARAMETERS = frozenset("knmljtzpq")


def same_family(gold: Answer, answer: Answer, same: Same) -> bool | None:
    r"""Compare with the parameters of the answer renamed to the gold's.

    A parameter is a letter that a clause declares (``for some integer t``), or one whose multiple of pi is added
    (``x + k\pi``). Both sides must have one; all other letters must be the same.
    """
    gold, answer = _outermost(gold), _outermost(answer)
    plain_gold, plain_answer = _value(gold), _value(answer)
    if isinstance(plain_gold, Domain) and isinstance(answer, Family):
        return _everything(plain_gold, answer)
    if isinstance(plain_answer, Domain) and isinstance(gold, Family):
        return _everything(plain_answer, gold)
    domains = {one.domain for one in (gold, answer) if isinstance(one, Family) and one.domain}
    if len(domains) > 1 and domains != {"R", "C"}:
        return False  # whole numbers are not all numbers
    if same(plain_gold, plain_answer) is True:
        return True
    left, right = _parameters(gold), _parameters(answer)
    gold_names, answer_names = names_of(plain_gold), names_of(plain_answer)
    # where one side declares its parameter, the other's is the letter that it alone has
    left = left or (gold_names - answer_names if len(gold_names - answer_names) == 1 else frozenset())
    right = right or (answer_names - gold_names if len(answer_names - gold_names) == 1 else frozenset())
    left, right = left & gold_names, right & answer_names
    bound = arguments_of(plain_gold) | arguments_of(plain_answer)
    left, right = left - bound, right - bound  # f(n) = n for all n: the n is f's, no parameter
    if len(left) != 1 or len(right) != 1 or gold_names - left != answer_names - right:
        return False
    (one,), (other,) = left, right
    if one != other and same(plain_gold, renamed(plain_answer, {other: one})) is True:
        return True
    if domains and domains != {"Z"}:
        return False
    if isinstance(plain_gold, Named) and isinstance(plain_answer, Named) and plain_gold.name != plain_answer.name:
        return False
    return same_progressions(plain_gold, plain_answer, one, other)


def _outermost(answer: Answer) -> Answer:
    """A name inside the declaration: ``x = 2k`` for whole k, not x the family."""
    if isinstance(answer, Named) and isinstance(answer.value, Family):
        inner = answer.value
        named = Named(answer.name, answer.arguments, inner.answer, answer.symbol)
        return Family(named, inner.parameters, inner.domain)
    return answer


def _value(answer: Answer) -> Answer:
    return answer.answer if isinstance(answer, Family) else answer


def _everything(domain: Domain, family: Family) -> bool:
    """``n, n \\in \\mathbb{Z}`` are the integers."""
    value = family.answer.value if isinstance(family.answer, Named) else family.answer
    if not isinstance(value, Quantity) or value.unit is not None or value.expr.op != "sym":
        return False
    return value.expr.name in family.parameters and family.domain == domain.name


def arguments_of(answer: Answer) -> frozenset[str]:
    """The letters that a function is given as a function of."""
    return frozenset(answer.arguments) if isinstance(answer, Named) else frozenset()


def same_constants(gold: Answer, answer: Answer, same: Same) -> bool:
    """``f(x) = cx`` and ``f(x) = kx``: letters that are no argument of a named function are constants of any name.

    Only letters that one side alone has are renamed, and all on both sides must pair off.
    """
    arguments, given = arguments_of(gold), arguments_of(answer)
    if isinstance(answer, Named) and arguments and arguments != given:
        return False
    # y(x) = C e^x for y = C e^x: only what looks like a constant is one
    left, right = names_of(gold), names_of(answer)
    ours, theirs = sorted(left - right), sorted(right - left)
    if not 1 <= len(ours) == len(theirs) <= 3 or set(ours + theirs) & (arguments | given):
        return False
    if _parametric(gold) and _parametric(answer) and len(ours) == 1:
        return same(gold, renamed(answer, {theirs[0]: ours[0]})) is True
    variables = any(name.islower() for name in left & right)
    variables = variables and not any(_CONSTANT.fullmatch(name) for name in left & right)
    if not arguments and not (variables and all(_CONSTANT.fullmatch(name) for name in ours)):
        return False  # x + C: a C that only one side has, beside a variable, is a constant of integration
    return any(
        same(gold, renamed(answer, dict(zip(chosen, ours, strict=True)))) is True for chosen in permutations(theirs)
    )


def _parametric(answer: Answer) -> bool:
    """``x = 1 + 2t, y = 3 - t``: coordinates, each a formula of one letter."""
    names = [item.name for item in answer.items if isinstance(item, Named)] if isinstance(answer, Several) else []
    coordinates = len(names) > 1 and (names == list("xyz"[: len(names)]))
    return (
        isinstance(answer, Several) and coordinates and len(names) == len(answer.items) and len(names_of(answer)) == 1
    )


def periodic_parameters(answer: Answer) -> frozenset[str]:
    r"""Letters whose multiple of pi (or of 360 degrees) is added, in every part of the answer."""
    found: list[frozenset[str]] = []
    for part in _formulas(answer):
        found.append(frozenset(name for name in part.symbols if name in _PARAMETERS and _steps_by_pi(part, name)))
    return frozenset.intersection(*found) if found else frozenset()


def _steps_by_pi(part: Expr, name: str) -> bool:
    """Whether raising the letter by one adds a rational multiple of pi, whatever the letter is."""
    steps = [substitute(part, name, number(value)) for value in (0, 1, 2)]
    first, second = difference(steps[1], steps[0]), difference(steps[2], steps[1])
    if same_value(first, second) is not True or first.symbols - part.symbols:
        return False
    return part.holds("const", "pi") and any(
        same_value(first, Expr("div", (Expr("mul", (number(top), Expr("const", name="pi"))), number(bottom)))) is True
        for top, bottom in (
            (1, 1),
            (2, 1),
            (1, 2),
            (4, 1),
            (1, 3),
            (2, 3),
            (1, 4),
            (1, 6),
            (3, 1),
            (6, 1),
            (1, 5),
            (2, 5),
        )
    )


def _parameters(answer: Answer) -> frozenset[str]:
    return answer.parameters if isinstance(answer, Family) else periodic_parameters(answer)


def names_of(answer: Answer) -> frozenset[str]:
    """The letters in the formulas of an answer."""
    return frozenset().union(*(part.symbols for part in _formulas(answer)))


def _formulas(answer: Answer) -> list[Expr]:
    if isinstance(answer, Quantity):
        return [answer.expr]
    if isinstance(answer, Several | Group):
        return [part for item in answer.items for part in _formulas(item)]
    if isinstance(answer, Named):
        return _formulas(answer.value)
    if isinstance(answer, Family):
        return _formulas(answer.answer)
    if isinstance(answer, Matrix):
        return [part for row in answer.rows for item in row for part in _formulas(item)]
    if isinstance(answer, Equation):
        return [answer.left, answer.right]
    return []


def renamed(answer: Answer, names: dict[str, str]) -> Answer:
    """The answer with letters renamed."""
    if isinstance(answer, Quantity):
        return Quantity(rename(answer.expr, names), answer.unit)
    if isinstance(answer, Several):
        return Several(tuple(renamed(item, names) for item in answer.items), answer.signs)
    if isinstance(answer, Group):
        return Group(answer.opening, answer.closing, tuple(renamed(item, names) for item in answer.items))
    if isinstance(answer, Named):
        return Named(answer.name, answer.arguments, renamed(answer.value, names), answer.symbol)
    if isinstance(answer, Matrix):
        return Matrix(tuple(tuple(renamed(item, names) for item in row) for row in answer.rows))
    if isinstance(answer, Equation):
        return Equation(rename(answer.left, names), rename(answer.right, names))
    return answer
