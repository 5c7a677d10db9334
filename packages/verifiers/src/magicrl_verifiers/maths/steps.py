"""Proofs that two formulas with floor, ceiling, remainder, gcd or lcm are equal.

Such functions may differ at one number in a thousand, so random points prove nothing. Two proofs are tried. The
formulas are equal if they are equal with every step function replaced by a letter, the same letter for the same
function of equal arguments. Otherwise, for one letter, each step function of a linear argument is periodic, up to a
polynomial: agreement at enough points of every piece of enough periods is a proof.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import pairwise
from math import gcd, lcm

from flint import fmpq

from magicrl_verifiers.maths.answers import Expr, mapped, symbol
from magicrl_verifiers.maths.values import Enclosure, UnclearError, UndefinedError

Same = Callable[[Expr, Expr], "bool | None"]
Line = tuple[Fraction, Fraction]
"""Step and start of a linear formula."""

_STEPS = frozenset(("floor", "ceil", "mod", "gcd", "lcm"))
_DIVISORS = frozenset(("gcd", "lcm"))
_MOST_ATOMS = 12
_MOST_DEGREE = 4
_MOST_POINTS = 3000
_BITS = 64


class _NoProofError(Exception):
    pass


def has_steps(tree: Expr) -> bool:
    """Return whether a formula has a step function of a letter."""
    return _is_step(tree) or any(map(has_steps, tree.args))


def proven(reference: Expr, answer: Expr, same: Same, *, counted: bool) -> bool:
    """Return whether two formulas are proven equal, for whole numbers if ``counted``, else for real ones."""
    return _same_atoms(reference, answer, same) or _same_pieces(reference, answer, counted=counted)


def _is_step(tree: Expr) -> bool:
    return tree.op == "fn" and tree.name in _STEPS and bool(tree.symbols)


def _same_atoms(reference: Expr, answer: Expr, same: Same) -> bool:
    known: list[tuple[Expr, Expr]] = []

    def lettered(tree: Expr) -> Expr:
        if not _is_step(tree):
            return mapped(tree, lettered)
        for atom, letter in known:
            if (atom.name, len(atom.args)) != (tree.name, len(tree.args)):
                continue
            if all(same(one, two) is True for one, two in zip(atom.args, tree.args, strict=True)):
                return letter
        known.append((tree, symbol(f"#{len(known)}")))
        return known[-1][1]

    left, right = lettered(reference), lettered(answer)
    return len(known) <= _MOST_ATOMS and same(left, right) is True


def _same_pieces(reference: Expr, answer: Expr, *, counted: bool) -> bool:
    names = reference.symbols | answer.symbols
    if len(names) != 1:
        return False
    (name,) = names
    counted = counted or any(tree.holds("fn", step) for tree in (reference, answer) for step in _DIVISORS)
    try:
        degree = max(_degree(tree, name, counted) for tree in (reference, answer))
        if degree > _MOST_DEGREE:
            return False
        atoms = [atom for tree in (reference, answer) for atom in _atoms(tree)]
        points = _whole(atoms, name, degree) if counted else _real(atoms, name, degree)
        return all(_at(reference, name, at) == _at(answer, name, at) for at in points)
    except _NoProofError:
        return False


def _at(tree: Expr, name: str, place: Fraction) -> fmpq:
    try:
        value = Enclosure(_BITS, real=True).value(tree, {name: fmpq(place.numerator, place.denominator)})
    except (UndefinedError, UnclearError):
        raise _NoProofError from None
    if not isinstance(value, fmpq):
        raise _NoProofError
    return value


def _atoms(tree: Expr) -> Iterator[Expr]:
    if _is_step(tree) or _alternates(tree):
        yield tree
    else:
        for part in tree.args:
            yield from _atoms(part)


def _alternates(tree: Expr) -> bool:
    return (
        tree.op == "pow"
        and bool(tree.args[1].symbols)
        and tree.args[0] == Expr("neg", (Expr("num", value=Fraction(1)),))
    )


def _degree(tree: Expr, name: str, counted: bool) -> int:
    """Return the degree of the polynomial that a formula is on each piece."""
    if not tree.symbols:
        _at(tree, name, Fraction(0))  # a rational number
        return 0
    if tree.op == "sym":
        return 1
    if _is_step(tree):
        return 0 if tree.name == "gcd" else 1
    if _alternates(tree) and counted:
        return 0
    degrees = [_degree(part, name, counted) for part in tree.args]
    if tree.op in ("add", "neg"):
        return max(degrees)
    if tree.op == "mul":
        return sum(degrees)
    if tree.op == "div" and degrees[1] == 0 and not tree.args[1].symbols:
        return degrees[0]
    if tree.op == "pow" and not tree.args[1].symbols:
        exponent = _at(tree.args[1], name, Fraction(0))
        if exponent.denominator == 1 and 0 <= exponent <= _MOST_DEGREE:
            return degrees[0] * int(exponent.numerator)
    raise _NoProofError


def _line(tree: Expr, name: str) -> Line:
    if _degree(tree, name, False) > 1 or has_steps(tree):
        raise _NoProofError
    start, after = (_fraction(_at(tree, name, Fraction(place))) for place in (0, 1))
    return after - start, start


def _fraction(value: fmpq) -> Fraction:
    return Fraction(int(value.numerator), int(value.denominator))


def _inner(atom: Expr, name: str) -> Line:
    """Return the linear formula inside a floor, a ceiling or a remainder."""
    step, start = _line(atom.args[0], name)
    if atom.name != "mod":
        return step, start
    if atom.args[1].symbols:
        raise _NoProofError
    modulus = _fraction(_at(atom.args[1], name, Fraction(0)))
    if not modulus:
        raise _NoProofError
    return step / modulus, start / modulus


def _whole(atoms: list[Expr], name: str, degree: int) -> Iterator[Fraction]:
    """Return the whole numbers of enough periods."""
    period = 1
    for atom in atoms:
        if atom.op == "pow":
            period = lcm(period, 2)
        elif atom.name in _DIVISORS:
            period = lcm(period, _divisor(atom, name))
        else:
            period = lcm(period, _inner(atom, name)[0].denominator)
        if period * (degree + 1) > _MOST_POINTS:
            raise _NoProofError
    return map(Fraction, range(1, period * (degree + 1) + 1))


def _divisor(atom: Expr, name: str) -> int:
    """Return a multiple of every common divisor of two linear formulas, by Euclid's algorithm."""
    lines = [_line(part, name) for part in atom.args]
    if any(number.denominator != 1 for line in lines for number in line) or len(lines) != 2:
        raise _NoProofError
    (a, b), (c, d) = lines
    if atom.name == "lcm" and a and c:
        raise _NoProofError
    while a and c:
        if abs(a) < abs(c):
            (a, b), (c, d) = (c, d), (a, b)
        times = a // c
        a, b = a - times * c, b - times * d
    constant = b if not a else d
    if not constant:
        raise _NoProofError
    return abs(int(constant))


def _real(atoms: list[Expr], name: str, degree: int) -> Iterator[Fraction]:
    """Yield every break, and enough points between two breaks, of enough periods."""
    inner = [line for atom in atoms for line in [_inner(atom, name)] if line[0]]
    if not inner:
        raise _NoProofError
    periods = [1 / abs(step) for step, _ in inner]
    whole = Fraction(lcm(*(one.numerator for one in periods)), gcd(*(one.denominator for one in periods)))
    if sum(int(whole / one) + 1 for one in periods) * (degree + 2) ** 2 > _MOST_POINTS:
        raise _NoProofError
    breaks = {
        (offset - start) / step % whole
        for (step, start), one in zip(inner, periods, strict=True)
        for offset in range(int(whole / one))
    }
    ordered = sorted(breaks)
    within = [low + (high - low) * Fraction(part, degree + 2) for low, high in pairwise([*ordered, ordered[0] + whole])
              for part in range(1, degree + 2)]  # fmt: skip
    for turn in range(degree + 1):
        yield from (place + turn * whole for place in (*ordered, *within))
