"""Where two formulas are compared: at points on every side of what breaks them.

The absolute value, the floor, the larger of two, a root, a logarithm, a condition all change where some other formula
passes nought (`_switches`). These places are looked for in every letter, exactly where that formula is a polynomial,
else by its changes of sign from 10^-6 to 10^12; then there are points at them, between them and beyond the outermost,
so that no branch and no narrow domain is left out. The numbers drawn depend on both formulas.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise

from flint import acb, arb, fmpq, fmpz, fmpz_poly

from magicrl.verifiers.maths.expression import Expr, difference, function, number
from magicrl.verifiers.maths.values import Enclosure, UnclearError, UndefinedError

_COUNTERS = frozenset("nkmpqrljNMK")
"""Names that mostly stand for whole numbers: their formulas are tried at whole numbers too."""
_NODES = tuple(fmpq(node) for node in (-(10**7), -1009, -3, -1, 0, 2, 5, 777, 10**6 + 3))
_MOST_DEGREE = 6
_GRID = sorted(sign * fmpq(part) * fmpq(10) ** power for sign in (-1, 1) for power in range(-6, 13) for part in (1, 3))
_BITS = 64
_HALVINGS = 50
_MOST_SWITCHES = 12
_MOST_PLACES = 24
_SHARES = (fmpq(1, 2), fmpq(137, 1000), fmpq(71, 100), fmpq(93, 100))
_REACH = 10**12


def domains(gold: Expr, answer: Expr) -> Iterator[tuple[Iterator[dict[str, fmpq]], bool]]:
    """Points to try, and whether values must be real there; complex values come last, for who has no real ones."""
    names = sorted(gold.symbols | answer.symbols)
    numbers = random.Random(zlib.crc32(repr(gold).encode()) ^ zlib.crc32(repr(answer).encode()))
    whole_names = _whole_names(gold) | _whole_names(answer)
    steps = any(tree.holds("fn", name) for tree in (gold, answer) for name in ("floor", "ceil", "mod"))
    counted = steps and _COUNTERS.issuperset(names)  # between whole numbers nobody asks
    divisors = any(tree.holds("fn", name) for tree in (gold, answer) for name in ("gcd", "lcm"))

    def points(count: int, low: int, high: int, below: int) -> Iterator[dict[str, fmpq]]:
        for _ in range(count):
            yield {
                name: fmpq(numbers.randint(low, high), 1 if name in whole_names else numbers.randint(1, below))
                for name in names
            }

    def real() -> Iterator[dict[str, fmpq]]:
        if counted:
            yield from points(20, 1, 40, 1)
        else:
            yield from points(3, 1, 40, 13)
            yield from points(4, -40, 40, 13)
            yield from points(2, 1, 12, 13)
            yield from points(2, 100, 400, 7)
        if steps or divisors or any(name.split("_")[0] in _COUNTERS for name in names):
            yield from points(5, 1, 9, 1)
        yield from _beside_breaks(gold, answer, names, whole_names | (set(names) if counted else set()), numbers)
        if not whole_names and not counted:
            for size in (10**3, 10**5, 10**9):
                yield {name: fmpq(numbers.choice((-1, 1)) * numbers.randint(size, 9 * size), 7) for name in names}
                yield {name: fmpq(numbers.choice((-1, 1)) * numbers.randint(1, 9), size) for name in names}

    if gold.holds("const", "i") or answer.holds("const", "i"):
        yield points(6, 1, 40, 13), False
        return
    yield real(), True
    yield points(5, 1, 40, 13), False


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


def _beside_breaks(
    gold: Expr, answer: Expr, names: Sequence[str], whole: frozenset[str] | set[str], numbers: random.Random
) -> Iterator[dict[str, fmpq]]:
    """Points at the breaks in each letter, between them and beyond them, the other letters drawn."""
    analytic = not any(_bends(tree) for tree in (gold, answer))
    breaks = [] if analytic else list(dict.fromkeys((*_switches(gold), *_switches(answer))))[:_MOST_SWITCHES]
    for name in names if breaks else ():
        for _ in range(1 if len(names) == 1 else 2):
            others = {other: fmpq(numbers.randint(-40, 40), 1 if other in whole else 7) for other in names}
            places = {place for tree in breaks if name in tree.symbols for place in _noughts(tree, name, others)}
            ordered = sorted(sorted(places, key=abs)[:_MOST_PLACES])
            if not ordered:
                continue
            gap = 1 + max(abs(ordered[0]), abs(ordered[-1]))
            ordered = [ordered[0] - gap, *ordered, ordered[-1] + gap]
            shares = _SHARES if len(ordered) <= 8 else _SHARES[:1]
            tried = [low + (high - low) * share for low, high in pairwise(ordered) for share in shares]
            for place in (*ordered[1:-1], *tried):
                yield {**others, name: fmpq(round(place)) if name in whole else place}


def _bends(tree: Expr) -> bool:
    """Whether a formula is not one rational function everywhere."""
    bent = tree.op in ("fn", "cases") or (tree.op == "pow" and tree.args[1].op != "num")
    return bent or (tree.op == "pow" and tree.args[1].value.denominator != 1) or any(map(_bends, tree.args))


def _switches(tree: Expr) -> Iterator[Expr]:
    """Formulas that pass nought where ``tree`` may change from one analytic formula to another, or end."""
    if tree.op != "series":  # its body has a letter of its own
        for part in tree.args:
            yield from _switches(part)
    first = tree.args[0] if tree.args else tree
    one, minus = number(1), number(-1)
    if tree.op == "div" and tree.args[1].symbols:
        yield tree.args[1]
    elif tree.op == "bound" or (tree.op == "pow" and _bends(tree) and first.symbols):
        yield first
    elif tree.op == "fn" and first.symbols | tree.args[-1].symbols:
        if tree.name in ("abs", "root", "ln", "log", "lg", "logb"):
            yield first
        elif tree.name in ("max", "min"):
            yield from (difference(one, other) for one, other in combinations(tree.args[:4], 2))
        elif tree.name in ("floor", "ceil", "mod"):
            inner = first if tree.name != "mod" else Expr("div", tree.args)
            yield from (inner, difference(inner, one), difference(inner, minus), difference(inner, number(2)))
        elif tree.name in ("arcsin", "arccos", "artanh", "arcsec", "arccsc", "arcosh"):
            yield from (difference(first, one), difference(first, minus))
        elif tree.name in ("tan", "sec"):
            yield function("cos", first)
        elif tree.name in ("cot", "csc"):
            yield function("sin", first)


def _noughts(tree: Expr, name: str, others: dict[str, fmpq]) -> list[fmpq]:
    """Where a formula passes nought in one letter; close to it where that is not rational."""

    def at(place: fmpq) -> fmpq | arb | None:
        try:
            value = Enclosure(_BITS, real=True).value(tree, {**others, name: place})
        except (UndefinedError, UnclearError):
            return None
        return value if isinstance(value, fmpq | arb) else None

    found = _polynomial_noughts(at)
    return [place for place in found or _changes(at) if abs(place) < _REACH]


def _polynomial_noughts(at: Callable[[fmpq], fmpq | arb | None]) -> list[fmpq] | None:
    """The real noughts of what is a polynomial at all nodes, by Newton's divided differences; None for others."""
    row: list[fmpq] = []
    for node in _NODES:
        value = at(node)
        if not isinstance(value, fmpq):
            return None
        row.append(value)
    leading = [row[0]]
    for step in range(1, len(_NODES)):
        row = [(after - before) / (_NODES[place + step] - _NODES[place])
               for place, (before, after) in enumerate(pairwise(row))]  # fmt: skip
        leading.append(row[0])
    degree = max((power for power, value in enumerate(leading) if value != 0), default=0)
    if not 1 <= degree <= _MOST_DEGREE:
        return [] if degree == 0 else None
    coefficients = [leading[degree]]
    for power in range(degree - 1, -1, -1):  # times (x - node), plus the next difference
        shifted = [fmpq(0), *coefficients]
        coefficients = [new - _NODES[power] * old for new, old in zip(shifted, [*coefficients, fmpq(0)], strict=True)]
        coefficients[0] += leading[power]
    if degree == 1:
        return [-coefficients[0] / coefficients[1]]
    scale = fmpz(1)
    for one in coefficients:
        scale = scale.lcm(one.denominator)
    roots: list[tuple[acb, int]] = fmpz_poly([(one * scale).numerator for one in coefficients]).complex_roots()  # pyright: ignore[reportAssignmentType]
    return [_near(root.real) for root, _ in roots if root.imag.contains(0)]


def _near(ball: arb) -> fmpq:
    """A rational number close to a ball, the simple one if it is in the ball."""
    middle = fmpq(*_fraction(ball))
    rounded = fmpq(round(middle * 5040), 5040)
    return rounded if abs(rounded - middle) < fmpq(1, 10**12) else middle


def _fraction(ball: arb) -> tuple[fmpz, fmpz]:
    mantissa, exponent = ball.mid().man_exp()
    power = fmpz(2) ** abs(int(exponent))
    return (mantissa * power, fmpz(1)) if exponent >= 0 else (mantissa, power)


def _changes(at: Callable[[fmpq], fmpq | arb | None]) -> list[fmpq]:
    """Where the sign changes on the grid, halved down."""
    signs = [(place, value > 0) for place in _GRID if (value := at(place)) is not None and (value > 0 or value < 0)]
    found: list[fmpq] = []
    for (low, before), (high, after) in sorted(pairwise(signs), key=lambda pair: abs(pair[0][0])):
        if before == after or len(found) == _MOST_SWITCHES:
            continue
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            value = at(middle)
            if value is None or value == 0:
                break
            low, high = (middle, high) if (value > 0) == before else (low, middle)
        middle = (low + high) / 2
        rounded = fmpq(round(middle * 5040), 5040)
        found.append(rounded if abs(rounded - middle) < fmpq(1, 10**6) else middle)
    return found
