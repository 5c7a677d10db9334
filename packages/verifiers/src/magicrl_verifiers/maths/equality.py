"""Equality of two formulas. They differ only if an enclosure of their difference excludes zero, which is a proof.

Two numbers are equal if they are one rational number, or if their difference contains zero with more bits than anything
in either formula could hide it behind. Numbers too long to be written out are compared by their residues modulo four
large primes that depend on both formulas. Functions are equal if they are equal at enough points of every branch. A
comparison that `MOST_BITS` do not decide is not equal.

The points are on every side of the breaks of a formula: an absolute value, a floor, a maximum, a root, a logarithm and
a condition all change where some other formula passes zero (`_switches`). These places are searched in every letter,
exactly if that formula is a polynomial, else by its changes of sign from 10^-6 to 10^12, or to 10^29 in a formula with
large numbers. There are points at them, between them and beyond the outermost, so that no branch is left out.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache, reduce
from itertools import combinations, pairwise, product
from operator import add, mul

from flint import acb, arb, ctx, fmpq, fmpq_poly, fmpz

from magicrl_verifiers.maths.answers import Expr, complete, function, mapped, numeral, substitute, symbol
from magicrl_verifiers.maths.values import MOST_BITS, Enclosure, Point, Residues, UnclearError, UndefinedError, Value

_COUNTERS = frozenset("nkmpqrljNMK")
"""Usual names of whole numbers: their formulas are tried at whole numbers, too."""
_MOST_DEGREE = 6


def _grid(most: int) -> list[fmpq]:
    return sorted(
        sign * fmpq(part) * fmpq(10) ** power for sign in (-1, 1) for power in range(-6, most) for part in (1, 3)
    )


_GRID, _WIDE_GRID = _grid(13), _grid(30)
_BITS = 64
_HALVINGS = 50
_MOST_SWITCHES = 12
_MOST_PLACES = 24
_SHARES = (fmpq(1, 2), fmpq(137, 1000), fmpq(71, 100), fmpq(93, 100))


def domains(reference: Expr, answer: Expr) -> Iterator[tuple[Iterator[dict[str, fmpq]], bool]]:
    """Yield points to try, and whether values must be real there; complex values come last."""
    names = sorted(reference.symbols | answer.symbols)
    # a function of both formulas: the verdict is reproducible, and no answer can be fitted to known points
    numbers = random.Random(zlib.crc32(repr(reference).encode()) ^ zlib.crc32(repr(answer).encode()))
    whole_names = _whole_names(reference) | _whole_names(answer)
    steps = any(tree.holds("fn", name) for tree in (reference, answer) for name in ("floor", "ceil", "mod"))
    counted = steps and _COUNTERS.issuperset(names)  # only whole numbers matter
    divisors = any(tree.holds("fn", name) for tree in (reference, answer) for name in ("gcd", "lcm"))

    def points(count: int, low: int, high: int, below: int) -> Iterator[dict[str, fmpq]]:
        for _ in range(count):
            yield {
                name: fmpq(numbers.randint(low, high), 1 if name in whole_names else numbers.randint(1, below))
                for name in names
            }

    def real() -> Iterator[dict[str, fmpq]]:
        draws = [(20, 1, 40, 1)] if counted else [(3, 1, 40, 13), (4, -40, 40, 13), (2, 1, 12, 13), (2, 100, 400, 7)]
        if steps or divisors or any(name.split("_")[0] in _COUNTERS for name in names):
            draws.append((5, 1, 9, 1))
        for draw in draws:
            yield from points(*draw)
        yield from _beside_breaks(reference, answer, names, whole_names | (set(names) if counted else set()), numbers)
        if not whole_names and not counted:
            # far from zero and close to it, where functions that agree elsewhere may differ
            for size in (10**3, 10**5, 10**9):
                yield {name: fmpq(numbers.choice((-1, 1)) * numbers.randint(size, 9 * size), 7) for name in names}
                yield {name: fmpq(numbers.choice((-1, 1)) * numbers.randint(1, 9), size) for name in names}

    if reference.holds("const", "i") or answer.holds("const", "i"):
        yield points(6, 1, 40, 13), False
        return
    yield real(), True
    yield points(5, 1, 40, 13), False


def _whole_names(tree: Expr) -> frozenset[str]:
    """Return the names of whole numbers: in the exponent of a negative number, as n in (-1)^n, in bounds of sums."""
    found = frozenset[str]().union(*(_whole_names(part) for part in tree.args))
    if tree.op == "series":
        found = (found | tree.args[0].symbols | tree.args[1].symbols) - {tree.name.split()[1]}
    if tree.op == "pow" and tree.args[1].symbols and tree.args[0].holds("neg") and not tree.args[0].symbols:
        found |= tree.args[1].symbols
    return found


def _beside_breaks(
    reference: Expr, answer: Expr, names: Sequence[str], whole: frozenset[str] | set[str], numbers: random.Random
) -> Iterator[dict[str, fmpq]]:
    """Yield points at the breaks in each letter, between them and beyond them; the other letters are drawn."""
    # a rational function has no branches
    analytic = not any(_bends(tree) for tree in (reference, answer))
    breaks = [] if analytic else list(dict.fromkeys((*_switches(reference), *_switches(answer))))[:_MOST_SWITCHES]
    for name in names if breaks else ():
        # the breaks depend on the other letters: draw them twice
        for _ in range(1 if len(names) == 1 else 2):
            others = {other: fmpq(numbers.randint(-40, 40), 1 if other in whole else 7) for other in names}
            places = {place for tree in breaks if name in tree.symbols for place in _zeros(tree, name, others)}
            # if there are too many, the nearest to zero
            ordered = sorted(sorted(places, key=abs)[:_MOST_PLACES])
            if not ordered:
                continue
            # one place beyond the outermost breaks on each side
            gap = 1 + max(abs(ordered[0]), abs(ordered[-1]))
            ordered = [ordered[0] - gap, *ordered, ordered[-1] + gap]
            shares = _SHARES if len(ordered) <= 8 else _SHARES[:1]
            tried = [low + (high - low) * share for low, high in pairwise(ordered) for share in shares]
            for place in (*ordered[1:-1], *tried):
                yield {**others, name: fmpq(round(place)) if name in whole else place}


def _bends(tree: Expr) -> bool:
    """Return whether a formula is not one rational function everywhere."""
    bent = tree.op in ("fn", "cases") or (tree.op == "pow" and tree.args[1].op != "num")
    return bent or (tree.op == "pow" and tree.args[1].value.denominator != 1) or any(map(_bends, tree.args))


def _switches(tree: Expr) -> Iterator[Expr]:
    """Yield formulas that pass zero where ``tree`` may change from one analytic formula to another, or end."""
    if tree.op != "series":  # its body has a bound letter
        for part in tree.args:
            yield from _switches(part)
    first = tree.args[0] if tree.args else tree
    one, minus = numeral(1), numeral(-1)
    if tree.op == "div" and tree.args[1].symbols:
        yield tree.args[1]
    elif tree.op == "bound" or (tree.op == "pow" and _bends(tree) and first.symbols):
        yield first
    elif tree.op == "fn" and first.symbols | tree.args[-1].symbols:
        if tree.name in ("abs", "root", "ln", "log", "lg", "logb"):
            yield first
        elif tree.name in ("max", "min"):
            yield from (one - other for one, other in combinations(tree.args[:4], 2))
        elif tree.name in ("floor", "ceil", "mod"):
            inner = first if tree.name != "mod" else Expr("div", tree.args)
            yield from (inner, inner - one, inner - minus, inner - numeral(2))
        elif tree.name in ("arcsin", "arccos", "artanh", "arcsec", "arccsc", "arcosh"):
            yield from (first - one, first - minus)
        elif tree.name in ("tan", "sec"):
            yield function("cos", first)
        elif tree.name in ("cot", "csc"):
            yield function("sin", first)


def _zeros(tree: Expr, name: str, others: dict[str, fmpq]) -> list[fmpq]:
    """Return where a formula passes zero in one letter, or places close to an irrational zero."""
    form = _polynomial(tree, name, others)
    if form is None:
        values = [(place, _at(tree, {**others, name: place})) for place in (_GRID if _small(tree) else _WIDE_GRID)]
        signs = [(place, value > 0) for place, value in values if value is not None and (value > 0 or value < 0)]
        changes = [(low, high, before) for (low, before), (high, after) in pairwise(signs) if before != after]
        found: list[fmpq] = []
        for low, high, before in sorted(changes, key=lambda change: abs(change[0]))[:_MOST_SWITCHES]:
            for _ in range(_HALVINGS):
                middle = (low + high) / 2
                value = _at(tree, {**others, name: middle})
                # a pole or the zero itself
                if value is None or value == 0:
                    low = high = middle
                    break
                low, high = (middle, high) if (value > 0) == before else (low, middle)
            found.append(_simple((low + high) / 2))
    elif form.degree() > 1:
        ctx.prec = _BITS  # global in FLINT: the last evaluation may have left it high
        roots: list[tuple[acb, int]] = form.complex_roots()  # pyright: ignore[reportAssignmentType]
        # a ball that touches the real axis counts: an extra point costs little
        found = [_simple(root.real.mid().fmpq()) for root, _ in roots if root.imag.contains(0)]
    else:
        found = [-form[0] / form[1]] if form.degree() == 1 else []
    return found


def _at(tree: Expr, point: Point) -> fmpq | arb | None:
    try:
        value = Enclosure(_BITS, real=True).value(tree, point)
    except (UndefinedError, UnclearError):
        return None
    return None if isinstance(value, acb) else value


def _polynomial(tree: Expr, name: str, others: dict[str, fmpq]) -> fmpq_poly | None:
    """Return the formula as a polynomial in one letter; None if it is none, or of a high degree."""
    if name not in tree.symbols:
        value = _at(tree, others)
        return fmpq_poly([value]) if isinstance(value, fmpq) else None
    if tree.op == "sym":
        return fmpq_poly([0, 1])
    parts = complete(_polynomial(part, name, others) for part in tree.args)
    found: fmpq_poly | None = None
    if parts is None:
        return None
    if tree.op in ("add", "mul"):
        found = reduce(add if tree.op == "add" else mul, parts)
    elif tree.op == "neg":
        found = -parts[0]
    elif tree.op == "div" and parts[1].degree() == 0:
        found = parts[0] / parts[1][0]
    elif tree.op == "pow" and parts[1] in range(1, _MOST_DEGREE + 1):  # a constant, and whole
        found = parts[0] ** int(parts[1][0].numerator)
    return found if found is not None and found.degree() <= _MOST_DEGREE else None


def _small(tree: Expr) -> bool:
    """Return whether the numbers of a formula are too small for a break beyond the grid."""
    large = (tree.op == "num" and abs(tree.value) > 10**4) or (tree.op == "pow" and not tree.symbols)
    return not large and all(map(_small, tree.args))


def _simple(place: fmpq) -> fmpq:
    # 5040 has every divisor up to 10, so that a break at a simple fraction is exact
    rounded = fmpq(round(place * 5040), 5040)
    return rounded if abs(rounded - place) < fmpq(1, 10**9) else place


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


def same_value(reference: Expr, answer: Expr) -> bool | None:
    """Return whether two formulas are equal wherever both are defined; None if that is undecided.

    Example: ``x^2-1`` and ``(x-1)(x+1)`` are; ``sqrt(x^2)`` and ``x`` are not.
    """
    if reference == answer:
        return True
    infinite = reference.holds("const", "inf"), answer.holds("const", "inf")
    if any(infinite):
        left, right = _infinity(reference), _infinity(answer)
        if all(infinite):
            return None if left is None or right is None else left == right
        return None if left is None and right is None else False
    if len(reference.symbols | answer.symbols) > _MAX_SYMBOLS:
        return None
    functions = bool(reference.symbols | answer.symbols)
    if reference.holds("set") or answer.holds("set"):
        # by membership: for every way to be in some sets and not in others
        names = sorted(reference.symbols | answer.symbols)
        ways = [dict(zip(names, way, strict=True)) for way in product((False, True), repeat=len(names))]
        sides = [[_has(tree, way) for way in ways] for tree in (reference, answer)]
        return None if None in (*sides[0], *sides[1]) else sides[0] == sides[1]
    # a bare log is natural or decimal, the same on both sides
    for base in (0, 10) if reference.holds("fn", "log") or answer.holds("fn", "log") else (0,):
        verdict = _same_function(reference, answer, base) if functions else None
        for real in (True, False) if not functions else ():
            verdict = _agree_at(reference, answer, {}, real, base, MOST_BITS) if verdict is None else verdict
        if verdict is not False:
            # the transposed B^T A^T is not A^T B^T, as it is for numbers
            matrices = verdict and any(map(_transposes, (reference, answer)))
            return None if matrices and _products(reference) != _products(answer) else verdict
    return False


def _transposes(tree: Expr) -> bool:
    transposed = tree.op == "pow" and tree.args[1] == symbol("T") and tree.args[0].op in ("sym", "mul")
    return (transposed and all(name.isupper() for name in tree.args[0].symbols)) or any(map(_transposes, tree.args))


def _products(tree: Expr) -> list[str]:
    """Return the letters of each term of a sum in their order."""
    if tree.op in ("add", "neg"):
        return sorted(term for part in tree.args for term in _products(part))
    return [tree.name + "".join(letters for part in tree.args for letters in _products(part))]


def _infinity(tree: Expr) -> int | None:
    if tree.op == "const" and tree.name == "inf":
        return 1
    if tree.op == "neg":
        inner = _infinity(tree.args[0])
        return None if inner is None else -inner
    return None


def _has(tree: Expr, way: dict[str, bool]) -> bool | None:
    if tree.op == "sym":
        return way[tree.name]
    parts = [_has(part, way) for part in tree.args]
    if tree.op != "set" or None in parts:
        return None
    if tree.name == "setminus":
        return bool(parts[0] and not parts[1])
    return any(parts) if tree.name == "cup" else all(parts)


def _same_function(reference: Expr, answer: Expr, base: int) -> bool | None:
    agreed = 0
    for points, real in domains(reference, answer):
        if not real and agreed >= _NEEDED:
            break  # complex values only matter if there are no real ones
        if not real and not agreed:
            at = [point for some, exact in domains(reference, answer) if exact for point in some]
            if any(_at(tree, point) is not None for point in at for tree in (reference, answer)):
                return None  # the two are nowhere real together
        for point in points:
            # a function has many points, so each gets fewer bits than a number
            verdict = _agree_at(reference, answer, point, real, base, MOST_BITS // 8)
            if verdict is False:
                return False
            agreed += verdict is True
    if agreed < _NEEDED:
        return None
    if has_steps(reference) or has_steps(answer):
        counted = _COUNTERS.issuperset(reference.symbols | answer.symbols)
        return True if proven(reference, answer, counted=counted) else None
    return True


def _agree_at(reference: Expr, answer: Expr, point: Point, real: bool, base: int, most: int) -> bool | None:
    """Return whether both have the same value at a point; None if one has no value, or it stays unclear."""
    # few bits first, since most different values differ early
    bits = _FIRST_BITS
    while True:
        machine = Enclosure(bits, real=real, log_base=base)
        values: list[Value | None] = []
        for tree in (reference, answer):
            try:
                values.append(machine.value(tree, point))
            except UndefinedError:
                values.append(None)
            except UnclearError:
                break
        if None in values:
            # cases include their domain: a smaller one is another answer
            said = reference.holds("cases") or answer.holds("cases")
            return False if said and values.count(None) == 1 == len(values) - 1 else None
        if len(values) < 2:
            verdict = _same_residues(reference, answer, point) if machine.rounded and bits == _FIRST_BITS else None
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
        # the ball contains the difference, so this is a proof
        if not _holds_zero(gap):
            return False
        verdict = _same_residues(reference, answer, point) if machine.rounded and bits == _FIRST_BITS else None
        if verdict is not None:
            return verdict
        # not a proof, but more bits than a difference could hide behind
        enough = _SURE_BITS + 2 * machine.spread
        if bits >= enough and _narrow(gap, left, bits):
            return True
        if bits == most or (point and enough > most and bits >= _UNCLEAR_BITS):
            return None
        # in steps, since most differences show early
        bits = min(most, max(_STEP_BITS, 8 * bits) if bits * 8 < enough else max(enough, 2 * bits))


def _holds_zero(gap: Value) -> bool:
    if isinstance(gap, acb):
        return gap.real.contains(0) and gap.imag.contains(0)
    return gap.contains(0) if isinstance(gap, arb) else gap == 0


def _narrow(gap: Value, left: Value, bits: int) -> bool:
    """Return whether a ball around zero is small compared with the values, or with any difference that could hide."""
    size = abs(gap).abs_upper() if not isinstance(gap, fmpq) else arb(gap)
    beside = abs(left) if isinstance(left, fmpq) else abs(left).abs_lower()
    return bool(size <= beside * arb(2) ** -_AGREE or size <= arb(2) ** (-bits // 2))


def _same_residues(reference: Expr, answer: Expr, point: Point) -> bool | None:
    """Compare two rational numbers too long to be written out, modulo primes that nobody knows in advance."""
    numbers = random.Random(zlib.crc32(repr(reference).encode()) ^ zlib.crc32(repr(answer).encode()))
    primes: list[int] = []
    while len(primes) < _PRIMES:
        # the highest bit for the size, the lowest because primes are odd
        prime = numbers.getrandbits(127) | 1 << 126 | 1
        primes += [prime] if fmpz(prime).is_probable_prime() else []
    # Fermat: exponents may be reduced by p - 1, for all four primes by the least common multiple
    field = Residues(math.prod(primes), math.lcm(*(prime - 1 for prime in primes)))
    try:
        return field.value(reference, point) == field.value(answer, point)
    except (UnclearError, UndefinedError, RecursionError):
        return None


def linear(tree: Expr, name: str) -> tuple[Expr, Expr] | None:
    """Return start and step of a formula ``start + step * name``; None for other formulas."""
    start = substitute(tree, name, numeral(0))
    step = substitute(tree, name, numeral(1)) - start
    return (start, step) if same_value(tree, start + step * Expr("sym", name=name)) is True else None


def quadratic(tree: Expr) -> tuple[str, Fraction, Expr, Expr, Fraction] | None:
    """Return name, leading coefficient, smaller and larger root, and discriminant of a quadratic formula.

    None for a formula with several names, of another degree, or without a real root.
    """
    if len(tree.symbols) != 1:
        return None
    (name,) = tree.symbols
    at = {place: substitute(tree, name, numeral(place)) for place in (-1, 0, 1)}
    square = (at[1] + at[-1]) / numeral(2) - at[0]
    slope = (at[1] - at[-1]) / numeral(2)
    x = Expr("sym", name=name)
    if same_value(tree, square * x * x + slope * x + at[0]) is not True:
        return None
    discriminant = slope * slope - numeral(4) * square * at[0]
    leading, size = number_value(square), number_value(discriminant)
    if not leading or size is None or size < 0:
        return None
    middle = -slope / (numeral(2) * square)
    half = function("root", discriminant, numeral(2)) / (numeral(2) * function("abs", square))
    return name, leading, middle - half, middle + half, size


def rational_value(tree: Expr) -> Fraction | None:
    """Return the value of a formula that is computed as a rational number; None for other formulas."""
    value = _value(tree)
    return _fraction(value) if isinstance(value, fmpq) else None


@lru_cache(maxsize=1024)
def number_value(tree: Expr) -> Fraction | None:
    """Return the real value of a formula without symbols, to 1000 bits if it is not rational; None if it has none."""
    for bits in (_VALUE_BITS, 4 * _VALUE_BITS):
        value = _value(tree, bits)
        if isinstance(value, fmpq):
            return _fraction(value)
        if not isinstance(value, arb):
            return None
        if value.abs_upper() < arb(2) ** -_KEPT_BITS:
            return Fraction(0)
        mantissa, exponent = (int(part) for part in value.mid().man_exp())
        if value.rel_accuracy_bits() > _KEPT_BITS and abs(exponent) <= _MOST_SIZE:
            surplus = mantissa.bit_length() - _KEPT_BITS  # equal values must be equal, however they were computed
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


def constant_ratio(one: Expr, other: Expr) -> Fraction | None:
    """Return the sign of ``one / other`` (1 or -1) if that is a constant, 0 if it is none.

    None if too few points have a value, also if both are zero everywhere.
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
            zeros = _holds_zero(left), _holds_zero(right)
            # both zero: no ratio; one zero: the ratio is no constant
            if any(zeros):
                if not all(zeros):
                    return Fraction(0)
                continue
            ratio = left / right
            assert not isinstance(ratio, acb)  # real
            if first is not None and not _holds_zero(first - ratio):
                return Fraction(0)
            first = ratio if first is None else first
            met += 1
    if first is None or met < _NEEDED:
        return None
    return Fraction(1 if first > 0 else -1)


# --- step functions ---
#
# Floors, ceilings, remainders, gcds and lcms may differ at one number in a thousand, so random points prove nothing.
# Two proofs are tried. The formulas are equal if they are equal with every step function replaced by a letter, the same
# letter for the same function of equal arguments. Otherwise, for one letter, each step function of a linear argument is
# periodic, up to a polynomial: agreement at enough points of every piece of enough periods is a proof.

_STEPS = frozenset(("floor", "ceil", "mod", "gcd", "lcm"))
_DIVISORS = frozenset(("gcd", "lcm"))
_MOST_ATOMS = 12
_MOST_STEP_DEGREE = 4
_MOST_POINTS = 3000


def has_steps(tree: Expr) -> bool:
    """Return whether a formula has a step function of a letter."""
    return _is_step(tree) or any(map(has_steps, tree.args))


def proven(reference: Expr, answer: Expr, *, counted: bool) -> bool:
    """Return whether two formulas are proven equal, for whole numbers if ``counted``, else for real ones."""
    known: list[tuple[Expr, Expr]] = []

    def lettered(tree: Expr) -> Expr:
        if not _is_step(tree):
            return mapped(tree, lettered)
        for atom, letter in known:
            if (atom.name, len(atom.args)) != (tree.name, len(tree.args)):
                continue
            if all(same_value(one, two) is True for one, two in zip(atom.args, tree.args, strict=True)):
                return letter
        known.append((tree, symbol(f"#{len(known)}")))
        return known[-1][1]

    left, right = lettered(reference), lettered(answer)
    if len(known) <= _MOST_ATOMS and same_value(left, right) is True:
        return True
    return _same_pieces(reference, answer, counted=counted)


def _is_step(tree: Expr) -> bool:
    return tree.op == "fn" and tree.name in _STEPS and bool(tree.symbols)


def _same_pieces(reference: Expr, answer: Expr, *, counted: bool) -> bool:
    names = reference.symbols | answer.symbols
    if len(names) != 1:
        return False
    (name,) = names
    counted = counted or any(tree.holds("fn", step) for tree in (reference, answer) for step in _DIVISORS)
    try:
        degree = max(_degree(tree, name, counted) for tree in (reference, answer))
        if degree > _MOST_STEP_DEGREE:
            return False
        atoms = [atom for tree in (reference, answer) for atom in _atoms(tree)]
        points = _whole(atoms, name, degree) if counted else _real(atoms, name, degree)
        return all(_exact_at(reference, name, at) == _exact_at(answer, name, at) for at in points)
    except UnclearError:
        return False


def _exact_at(tree: Expr, name: str, place: Fraction) -> fmpq:
    value = _at(tree, {name: fmpq(place.numerator, place.denominator)})
    if not isinstance(value, fmpq):
        raise UnclearError
    return value


def _atoms(tree: Expr) -> Iterator[Expr]:
    if _is_step(tree) or _alternates(tree):
        yield tree
    else:
        for part in tree.args:
            yield from _atoms(part)


def _alternates(tree: Expr) -> bool:
    return tree.op == "pow" and bool(tree.args[1].symbols) and tree.args[0] == -numeral(1)


def _degree(tree: Expr, name: str, counted: bool) -> int:
    """Return the degree of the polynomial that a formula is on each piece."""
    if not tree.symbols:
        _exact_at(tree, name, Fraction(0))  # a rational number
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
        exponent = _exact_at(tree.args[1], name, Fraction(0))
        if exponent.denominator == 1 and 0 <= exponent <= _MOST_STEP_DEGREE:
            return degrees[0] * int(exponent.numerator)
    raise UnclearError


def _line(tree: Expr, name: str) -> tuple[Fraction, Fraction]:
    """Return step and start of a linear formula."""
    if _degree(tree, name, False) > 1 or has_steps(tree):
        raise UnclearError
    start, after = (_fraction(_exact_at(tree, name, Fraction(place))) for place in (0, 1))
    return after - start, start


def _fraction(value: fmpq) -> Fraction:
    return Fraction(int(value.numerator), int(value.denominator))


def _inner(atom: Expr, name: str) -> tuple[Fraction, Fraction]:
    """Return the linear formula inside a floor, a ceiling or a remainder."""
    step, start = _line(atom.args[0], name)
    if atom.name != "mod":
        return step, start
    if atom.args[1].symbols:
        raise UnclearError
    modulus = _fraction(_exact_at(atom.args[1], name, Fraction(0)))
    if not modulus:
        raise UnclearError
    return step / modulus, start / modulus


def _whole(atoms: list[Expr], name: str, degree: int) -> Iterator[Fraction]:
    """Return the whole numbers of enough periods."""
    period = 1
    for atom in atoms:
        if atom.op == "pow":
            period = math.lcm(period, 2)
        elif atom.name in _DIVISORS:
            # a multiple of every common divisor of two linear formulas, by Euclid's algorithm
            lines = [_line(part, name) for part in atom.args]
            if any(number.denominator != 1 for line in lines for number in line) or len(lines) != 2:
                raise UnclearError
            (a, b), (c, d) = lines
            if atom.name == "lcm" and a and c:
                raise UnclearError
            while a and c:
                if abs(a) < abs(c):
                    (a, b), (c, d) = (c, d), (a, b)
                times = a // c
                a, b = a - times * c, b - times * d
            constant = b if not a else d
            if not constant:
                raise UnclearError
            period = math.lcm(period, abs(int(constant)))
        else:
            period = math.lcm(period, _inner(atom, name)[0].denominator)
        if period * (degree + 1) > _MOST_POINTS:
            raise UnclearError
    return map(Fraction, range(1, period * (degree + 1) + 1))


def _real(atoms: list[Expr], name: str, degree: int) -> Iterator[Fraction]:
    """Yield every break, and enough points between two breaks, of enough periods."""
    inner = [line for atom in atoms for line in [_inner(atom, name)] if line[0]]
    if not inner:
        raise UnclearError
    periods = [1 / abs(step) for step, _ in inner]
    whole = Fraction(math.lcm(*(one.numerator for one in periods)), math.gcd(*(one.denominator for one in periods)))
    if sum(int(whole / one) + 1 for one in periods) * (degree + 2) ** 2 > _MOST_POINTS:
        raise UnclearError
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
