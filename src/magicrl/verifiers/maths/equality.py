"""Are two formulas equal? Different only where an enclosure of their difference leaves out nought, and then surely.

Equal are numbers that are one rational number, or whose difference stays around nought with more bits than anything
in either formula could hide it behind; numbers too long to be written out, by their residues modulo four large primes
that depend on both formulas; and functions that are equal at enough points of every branch (`sampling`). What stays
open within `MOST_BITS` is not equal.
"""

from __future__ import annotations

import math
import random
import zlib
from fractions import Fraction
from functools import lru_cache
from itertools import product

from flint import acb, arb, fmpq, fmpz

from magicrl.verifiers.maths.expression import Expr
from magicrl.verifiers.maths.rational import rounds
from magicrl.verifiers.maths.sampling import domains
from magicrl.verifiers.maths.values import MOST_BITS, Enclosure, Point, Residues, UnclearError, UndefinedError, Value

_FIRST_BITS = 96
_SURE_BITS = 384
_AGREE = 64
_UNCLEAR_BITS = 4096
_STEP_BITS = 1024
_NEEDED = 4
_MAX_SYMBOLS = 12
_PRIMES = 4
_VALUE_BITS = 1200
_KEPT_BITS = 1000
_MOST_SIZE = 10**5
_FLOAT_ERROR = 2**-52


def same_value(gold: Expr, answer: Expr) -> bool | None:
    """Whether two formulas are equal wherever both are defined; None when that could not be found out.

    Example: ``x^2-1`` and ``(x-1)(x+1)`` are; ``sqrt(x^2)`` and ``x`` are not.
    """
    if gold == answer:
        return True
    infinite = gold.holds("const", "inf"), answer.holds("const", "inf")
    if any(infinite):
        left, right = _infinity(gold), _infinity(answer)
        if all(infinite):
            return None if left is None or right is None else left == right
        return None if left is None and right is None else False
    if len(gold.symbols | answer.symbols) > _MAX_SYMBOLS:
        return None
    functions = bool(gold.symbols | answer.symbols)
    if gold.holds("set") or answer.holds("set"):
        return _same_members(gold, answer)
    # a bare log is natural or decimal, the same on both sides
    for base in (0, 10) if gold.holds("fn", "log") or answer.holds("fn", "log") else (0,):
        verdict = _same_function(gold, answer, base) if functions else _same_number(gold, answer, base)
        if verdict is not False:
            return verdict
    return False


def _infinity(tree: Expr) -> int | None:
    if tree.op == "const" and tree.name == "inf":
        return 1
    if tree.op == "neg":
        inner = _infinity(tree.args[0])
        return None if inner is None else -inner
    return None


def _same_members(gold: Expr, answer: Expr) -> bool | None:
    """Whether two sets of sets with names have the same members, by all ways of being in some and not in others."""
    names = sorted(gold.symbols | answer.symbols)
    ways = [dict(zip(names, way, strict=True)) for way in product((False, True), repeat=len(names))]
    sides = [[_has(tree, way) for way in ways] for tree in (gold, answer)]
    return None if None in (*sides[0], *sides[1]) else sides[0] == sides[1]


def _has(tree: Expr, way: dict[str, bool]) -> bool | None:
    if tree.op == "sym":
        return way[tree.name]
    parts = [_has(part, way) for part in tree.args]
    if tree.op != "set" or None in parts:
        return None
    if tree.name == "setminus":
        return bool(parts[0] and not parts[1])
    return any(parts) if tree.name == "cup" else all(parts)


def _same_number(gold: Expr, answer: Expr, base: int) -> bool | None:
    for real in (True, False):
        verdict = _agree_at(gold, answer, {}, real, base, MOST_BITS)
        if verdict is not None:
            return verdict
    return None


def _same_function(gold: Expr, answer: Expr, base: int) -> bool | None:
    agreed = 0
    for points, real in domains(gold, answer):
        if not real and agreed >= _NEEDED:
            break  # complex values are only asked where there are no real ones
        for point in points:
            verdict = _agree_at(gold, answer, point, real, base, MOST_BITS // 8)
            if verdict is False:
                return False
            agreed += verdict is True
    return True if agreed >= _NEEDED else None


def _agree_at(gold: Expr, answer: Expr, point: Point, real: bool, base: int, most: int) -> bool | None:
    """Whether both have the same value at a point; None when one of them has none, or it stays unclear."""
    bits = _FIRST_BITS
    while True:
        machine = Enclosure(bits, real=real, log_base=base)
        values: list[Value | None] = []
        for tree in (gold, answer):
            try:
                values.append(machine.value(tree, point))
            except UndefinedError:
                values.append(None)
            except UnclearError:
                break
        if None in values:
            # cases say where they hold: less is another answer
            said = gold.holds("cases") or answer.holds("cases")
            return False if said and values.count(None) == 1 == len(values) - 1 else None
        if len(values) < 2:
            verdict = _same_residues(gold, answer, point) if machine.rounded and bits == _FIRST_BITS else None
            if verdict is not None or bits >= _UNCLEAR_BITS:
                return verdict
            bits *= 8
            continue
        left, right = values
        assert left is not None
        assert right is not None
        if isinstance(left, fmpq) and isinstance(right, fmpq):
            return left == right
        gap = left - right
        if not _around_nought(gap):
            return False
        verdict = _same_residues(gold, answer, point) if machine.rounded and bits == _FIRST_BITS else None
        if verdict is not None:
            return verdict
        enough = _SURE_BITS + 2 * machine.spread
        if bits >= enough and _narrow(gap, left, bits):
            return True
        if bits == most or (point and enough > most and bits >= _UNCLEAR_BITS):
            return None
        # by steps, since a difference mostly shows long before it could no longer hide
        bits = min(most, max(_STEP_BITS, 8 * bits) if bits * 8 < enough else max(enough, 2 * bits))


def _around_nought(gap: Value) -> bool:
    if isinstance(gap, acb):
        return gap.real.contains(0) and gap.imag.contains(0)
    return gap.contains(0) if isinstance(gap, arb) else gap == 0


def _narrow(gap: Value, left: Value, bits: int) -> bool:
    """Whether a ball around nought is small beside the values, or beside all that could be hidden."""
    size = abs(gap).abs_upper() if not isinstance(gap, fmpq) else arb(gap)
    beside = abs(left) if isinstance(left, fmpq) else abs(left).abs_lower()
    return bool(size <= beside * arb(2) ** -_AGREE or size <= arb(2) ** (-bits // 2))


def _same_residues(gold: Expr, answer: Expr, point: Point) -> bool | None:
    """Whether two rational numbers too long to be written out are equal, by primes that nobody knows beforehand."""
    numbers = random.Random(zlib.crc32(repr(gold).encode()) ^ zlib.crc32(repr(answer).encode()))
    primes: list[int] = []
    while len(primes) < _PRIMES:
        prime = numbers.getrandbits(127) | 1 << 126 | 1
        primes += [prime] if fmpz(prime).is_probable_prime() else []
    field = Residues(math.prod(primes), math.lcm(*(prime - 1 for prime in primes)))
    try:
        return field.value(gold, point) == field.value(answer, point)
    except (UnclearError, UndefinedError, RecursionError):
        return None


def rational_value(tree: Expr) -> Fraction | None:
    """The value of a formula that is computed as a rational number; None for all others."""
    value = _value(tree)
    return Fraction(int(value.numerator), int(value.denominator)) if isinstance(value, fmpq) else None


@lru_cache(maxsize=1024)
def number_value(tree: Expr) -> Fraction | None:
    """The real value of a formula without symbols, to 1000 bits where it is not rational; None when it has none."""
    for bits in (_VALUE_BITS, 4 * _VALUE_BITS):
        value = _value(tree, bits)
        if isinstance(value, fmpq):
            return Fraction(int(value.numerator), int(value.denominator))
        if not isinstance(value, arb):
            return None
        if value.abs_upper() < arb(2) ** -_KEPT_BITS:
            return Fraction(0)
        mantissa, exponent = (int(part) for part in value.mid().man_exp())
        if value.rel_accuracy_bits() > _KEPT_BITS and abs(exponent) <= _MOST_SIZE:
            surplus = mantissa.bit_length() - _KEPT_BITS  # so that equal values are equal, however they were computed
            rounded = (mantissa + (1 << surplus >> 1)) >> surplus if surplus > 0 else mantissa
            return Fraction(rounded) * Fraction(2) ** (exponent + max(surplus, 0))
    return None


def _value(tree: Expr, bits: int = _VALUE_BITS) -> Value | None:
    if tree.symbols:
        return None
    for real in (True, False):
        try:
            return Enclosure(bits, real=real).value(tree, {})
        except UndefinedError:
            continue
        except UnclearError:
            return None
    return None


def approximates(decimal: Expr, exact: Expr) -> bool:
    """Whether a decimal literal is an irrational number, rounded or cut after six or more significant digits."""
    negative = decimal.op == "neg"
    literal = decimal.args[0] if negative else decimal
    if literal.op != "num" or not literal.decimals or rational_value(exact) is not None:
        return False
    value = number_value(exact)
    if value is None:
        return False
    said = -literal.value if negative else literal.value
    # all digits of a double will do
    double = literal.value * 10**literal.decimals >= 10**14 and abs(said - value) <= abs(value) * Fraction(_FLOAT_ERROR)
    return double or rounds(said, literal.decimals, value)


def constant_ratio(one: Expr, other: Expr) -> Fraction | None:
    """The sign of ``one / other`` (1 or -1) where that is the same constant everywhere, 0 where it is none.

    None when too few points have a value. Both being nought everywhere counts as no constant.
    """
    if len(one.symbols | other.symbols) > _MAX_SYMBOLS or one.holds("const", "inf") or other.holds("const", "inf"):
        return None
    first: fmpq | arb | None = None
    met = 0
    for points, real in domains(one, other):
        for point in points if real else ():
            machine = Enclosure(2 * _SURE_BITS, real=True)
            try:
                left, right = machine.value(one, point), machine.value(other, point)
            except (UndefinedError, UnclearError):
                continue
            noughts = _around_nought(left), _around_nought(right)
            if any(noughts):
                if not all(noughts):
                    return Fraction(0)
                continue
            ratio = left / right
            assert not isinstance(ratio, acb)  # real
            if first is not None and not _around_nought(first - ratio):
                return Fraction(0)
            first = ratio if first is None else first
            met += 1
    if first is None or met < _NEEDED:
        return None
    return Fraction(1 if first > 0 else -1)
