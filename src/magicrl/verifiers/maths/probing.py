"""Are two formulas equal? Compared at points, with digits enough that two numbers are not equal by chance.

Formulas that differ at one point where both have a value are different, and that is final. Formulas that agree
exactly (in rational arithmetic) or to many digits at every point tried are equal; digits that agree are counted
again with four times as many, so that nothing is equal because it is small.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

from magicrl.verifiers.maths.evaluation import Evaluator, OutOfReachError, UndefinedError, Value
from magicrl.verifiers.maths.expression import Expr

_DIGITS = 50
_MORE_DIGITS = 200
_AGREE = 20
_AGREE_MORE = 100
_NEEDED = 4
_MAX_SYMBOLS = 12
_FLOAT_ERROR = 2**-52
_COUNTERS = frozenset("nkmpqrljNMK")
"""Names that mostly stand for whole numbers: their formulas are tried at whole numbers too."""


def same_value(gold: Expr, answer: Expr) -> bool | None:
    """Whether two formulas are equal wherever both are defined; None when that could not be found out.

    Example: ``x^2-1`` and ``(x-1)(x+1)`` are; ``sqrt(x^2)`` and ``x`` are not.
    """
    if gold == answer:
        return True
    infinite = gold.holds("const", "inf"), answer.holds("const", "inf")
    if any(infinite):
        return _same_infinity(gold, answer) if all(infinite) else False if _finite(gold, answer) else None
    names = gold.symbols | answer.symbols
    if len(names) > _MAX_SYMBOLS:
        return None
    for base in _log_bases(gold, answer):
        verdict = _same_number(gold, answer, base) if not names else _same_function(gold, answer, sorted(names), base)
        if verdict is not False:
            return verdict
    return False


def _log_bases(gold: Expr, answer: Expr) -> tuple[int, ...]:
    """A bare ``log`` is natural or decimal, the same on both sides."""
    return (0, 10) if gold.holds("fn", "log") or answer.holds("fn", "log") else (0,)


def _same_infinity(gold: Expr, answer: Expr) -> bool | None:
    left, right = _infinity(gold), _infinity(answer)
    return None if left is None or right is None else left == right


def _infinity(tree: Expr) -> int | None:
    if tree.op == "const" and tree.name == "inf":
        return 1
    if tree.op == "neg":
        inner = _infinity(tree.args[0])
        return None if inner is None else -inner
    return None


def _finite(*trees: Expr) -> bool:
    """Whether of two formulas one is plus or minus infinity and the other has a finite value."""
    return any(_infinity(tree) is not None for tree in trees)


@lru_cache(maxsize=16)
def _evaluator(digits: int, real: bool, base: int) -> Evaluator:
    return Evaluator(digits, real=real, log_base=base)


def number_value(tree: Expr, digits: int = _DIGITS) -> Value | None:
    """The value of a formula without symbols, or None when it has none in reach."""
    if tree.symbols:
        return None
    for real in (True, False):
        try:
            return _evaluator(digits, real, 0).value(tree, {})
        except UndefinedError:
            continue
        except (OutOfReachError, RecursionError):
            return None
    return None


def real_number(value: Value) -> Any | None:
    """A value as a real number that can be ordered; None when it is complex."""
    machine = _evaluator(_DIGITS, True, 0)
    return None if hasattr(value, "_mpc_") else machine.context.convert(machine.number(value))


def _same_number(gold: Expr, answer: Expr, base: int) -> bool | None:
    for real in (True, False):
        verdict = _agree_at(gold, answer, {}, real, base)
        if verdict is not None:
            return verdict
    return None


def _agree_at(gold: Expr, answer: Expr, point: Mapping[str, Fraction], real: bool, base: int) -> bool | None:
    """Whether both have the same value at a point; None when one of them has none."""
    try:
        left, right = (_reached(tree, point, _DIGITS, real, base) for tree in (gold, answer))
        if left is None:
            return None
        if right is None:
            return False  # the answer is beyond any gold's size: not equal, and not worth more time
        if isinstance(left, Fraction) and isinstance(right, Fraction):
            return left == right
        coarse = _evaluator(_DIGITS, real, base)
        a, b = coarse.number(left), coarse.number(right)
        if not _close(a, b, _DIGITS) and max(abs(a), abs(b)) > coarse.context.mpf(10) ** (12 - _DIGITS):
            return False
        fine = _evaluator(_MORE_DIGITS, real, base)
        c, d = fine.number(fine.value(gold, point)), fine.number(fine.value(answer, point))
        if _close(c, d, _MORE_DIGITS):
            return True
        return _vanishes(a, c) and _vanishes(b, d)
    except UndefinedError:
        return None


def _vanishes(coarse: Any, fine: Any) -> bool:
    """Whether a value is nought but for rounding: the error shrinks with the digits, 1/2004! does not."""
    ten = _evaluator(_MORE_DIGITS, True, 0).context.mpf(10)
    limit = abs(coarse) * ten ** (-_AGREE_MORE) if coarse != 0 else ten ** (20 - _MORE_DIGITS)
    return bool(abs(fine) <= limit)


def _reached(tree: Expr, point: Mapping[str, Fraction], digits: int, real: bool, base: int) -> Value | None:
    try:
        return _evaluator(digits, real, base).value(tree, point)
    except (OutOfReachError, RecursionError):
        return None


def _close(left: Any, right: Any, digits: int) -> bool:
    """Half of the digits agree: the other half is for cancellation."""
    return bool(abs(left - right) <= max(abs(left), abs(right)) * _tolerance(digits))


@lru_cache(maxsize=8)
def _tolerance(digits: int) -> Any:
    return _evaluator(digits, True, 0).context.mpf(10) ** (-_AGREE if digits == _DIGITS else -_AGREE_MORE)


def _same_function(gold: Expr, answer: Expr, names: list[str], base: int) -> bool | None:
    agreed = 0
    for points, real in _domains(names, gold, answer):
        if not real and agreed >= _NEEDED:
            break  # complex values are only asked where there are no real ones
        for point in points:
            verdict = _agree_at(gold, answer, point, real, base)
            if verdict is False:
                return False
            agreed += verdict is True
    return True if agreed >= _NEEDED else None


def _domains(names: list[str], gold: Expr, answer: Expr) -> Iterator[tuple[list[dict[str, Fraction]], bool]]:
    """Points to try: positive, of mixed sign, large, between 0 and 1, whole; then complex values if need be."""
    numbers = random.Random(20250101)
    imaginary = gold.holds("const", "i") or answer.holds("const", "i")

    whole_names = _whole_names(gold) | _whole_names(answer)

    def points(count: int, low: int, high: int, below: int) -> list[dict[str, Fraction]]:
        return [
            {name: Fraction(numbers.randint(low, high), 1 if name in whole_names else numbers.randint(1, below))
             for name in names}
            for _ in range(count)
        ]  # fmt: skip

    if imaginary:
        yield points(6, 1, 40, 13), False
        return
    steps = any(tree.holds("fn", name) for tree in (gold, answer) for name in ("floor", "ceil", "mod"))
    if steps and _COUNTERS.issuperset(names):  # between whole numbers nobody asks; each counts, a floor rises rarely
        every = [{names[0]: Fraction(value)} for value in range(1, 61)]
        some = [{name: Fraction(numbers.randint(1, 30)) for name in names} for _ in range(60)]
        yield every if len(names) == 1 else some, True
        return
    yield points(3, 1, 40, 13), True
    yield points(4, -40, 40, 13), True
    yield points(2, 1, 12, 13), True
    yield points(2, 100, 400, 7), True
    divisors = any(tree.holds("fn", name) for tree in (gold, answer) for name in ("gcd", "lcm"))
    whole = [{name: Fraction(numbers.randint(1, 9)) for name in names} for _ in range(5)]
    if divisors or any(name.split("_")[0] in _COUNTERS for name in names):
        yield whole, True
    yield points(5, 1, 40, 13), False


def approximates(decimal: Expr, exact: Expr) -> bool:
    """Whether a decimal literal is an irrational number, rounded or cut after six or more significant digits."""
    negative = decimal.op == "neg"
    literal = decimal.args[0] if negative else decimal
    if literal.op != "num" or not literal.decimals or exact.symbols:
        return False
    unit = Fraction(1, 10**literal.decimals)
    if literal.value < 100_000 * unit:
        return False
    value = number_value(exact)
    if value is None or isinstance(value, Fraction):
        return False
    machine = _evaluator(_DIGITS, True, 0)
    if hasattr(value, "_mpc_"):
        return False
    said = machine.number(-literal.value if negative else literal.value)
    step = machine.number(unit)
    distance: Any = abs(said - value)
    if literal.value >= 10**14 * unit and distance <= abs(value) * _FLOAT_ERROR:
        return True  # all digits of a double
    return bool(2 * distance <= step or (distance < step and abs(said) < abs(value)))


def _whole_names(tree: Expr) -> frozenset[str]:
    """Names that stand for whole numbers: in the exponent of a negative number, as n in (-1)^n, in bounds of sums."""
    found = frozenset[str]().union(*(_whole_names(part) for part in tree.args))
    if tree.op == "series":
        found = (found | tree.args[0].symbols | tree.args[1].symbols) - {tree.name.split()[1]}
    if tree.op == "fn" and tree.name == "factorial2":
        found |= tree.symbols
    if tree.op == "pow" and tree.args[1].symbols and tree.args[0].holds("neg") and not tree.args[0].symbols:
        found |= tree.args[1].symbols
    return found


def constant_ratio(one: Expr, other: Expr) -> Fraction | None:
    """The sign of ``one / other`` (1 or -1) where that is the same constant everywhere, 0 where it is none.

    None when too few points have a value. Both being nought everywhere counts as no constant.
    """
    names = sorted(one.symbols | other.symbols)
    if len(names) > _MAX_SYMBOLS or one.holds("const", "inf") or other.holds("const", "inf"):
        return None
    first: Any = None
    met = 0
    machine = _evaluator(_DIGITS, True, 0)
    for points, real in _domains(names, one, other):
        for point in points if real else ():
            try:
                left, right = machine.value(one, point), machine.value(other, point)
            except (UndefinedError, OutOfReachError, RecursionError):
                continue
            if left == 0 or right == 0:
                if left != right:
                    return Fraction(0)
                continue
            exact = isinstance(left, Fraction) and isinstance(right, Fraction)
            ratio = left / right if exact else machine.number(left) / machine.number(right)
            if first is None:
                first = ratio
            elif not _close(machine.number(first), machine.number(ratio), _DIGITS):
                return Fraction(0)
            met += 1
    if first is None or met < _NEEDED:
        return None
    return Fraction(1 if first > 0 else -1)
