"""Types of answers: formulas as small trees, units, and the shapes that `reading` finds and `comparison` compares.

A formula that the grammar does not know (an integral, words) gives no tree, never a tree with a part left out:
`equality` compares two formulas only when both were read completely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product, repeat
from typing import TypeVar

T = TypeVar("T")
MAX_SIGNS = 4


@dataclass(frozen=True, slots=True)
class Expr:
    """A formula: an operation ``op`` on ``args``.

    The operations are num (``value``, exact, and ``decimals``: digits after the point of a decimal literal), sym
    (``name``), const (``name`` is e, i, pi or inf), add, mul, div, pow, neg, fn (``name`` of args), pm (two signs), mp
    (the opposite two signs), apply (a function of which only the name is known), series (bounds and body; ``name`` is
    ``sum`` or ``prod`` and the bound name), set (of named sets; ``name`` is cup, cap or setminus) and cases (values
    and bounds in turn; a bound is a formula that is positive where the value holds, or not negative if it is closed).
    """

    op: str
    args: tuple[Expr, ...] = ()
    name: str = ""
    value: Fraction = Fraction(0)
    decimals: int = 0

    def __add__(self, other: Expr) -> Expr:
        return Expr("add", (self, other))

    def __sub__(self, other: Expr) -> Expr:
        return Expr("add", (self, Expr("neg", (other,))))

    def __mul__(self, other: Expr) -> Expr:
        return Expr("mul", (self, other))

    def __truediv__(self, other: Expr) -> Expr:
        return Expr("div", (self, other))

    def __neg__(self) -> Expr:
        return Expr("neg", (self,))

    @property
    def symbols(self) -> frozenset[str]:
        """Names of the free symbols."""
        if self.op == "sym":
            return frozenset((self.name,))
        if self.op == "series":
            low, high, body = self.args
            return low.symbols | high.symbols | (body.symbols - {self.name.split()[1]})
        return frozenset().union(*(part.symbols for part in self.args))

    def holds(self, op: str, name: str = "") -> bool:
        """Return whether a part has this ``op`` (and ``name``, if given)."""
        return (self.op == op and name in ("", self.name)) or any(part.holds(op, name) for part in self.args)


def mapped(tree: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """Return ``tree`` with ``change`` applied to its parts."""
    return Expr(tree.op, tuple(map(change, tree.args)), tree.name, tree.value, tree.decimals)


def numeral(value: Fraction | int, decimals: int = 0) -> Expr:
    """Make a number literal."""
    return Expr("num", value=Fraction(value), decimals=decimals)


def symbol(name: str) -> Expr:
    """Make a symbol, or one of the constants e, i, pi, inf."""
    return Expr("const" if name in ("e", "i", "pi", "inf") else "sym", name=name)


def function(name: str, *args: Expr) -> Expr:
    """Make a function of its arguments."""
    return Expr("fn", args, name)


def rename(answer: Shape, names: dict[str, str]) -> Shape:
    """Return the answer with all letters renamed at once."""
    if isinstance(answer, Quantity):
        return Quantity(_rename(answer.expr, names), answer.unit)
    if isinstance(answer, Several | Brackets):
        return replace(answer, items=tuple(rename(item, names) for item in answer.items))
    return replace(answer, value=rename(answer.value, names)) if isinstance(answer, Named) else answer


def _rename(tree: Expr, names: dict[str, str]) -> Expr:
    if tree.op == "sym":
        return Expr("sym", name=names.get(tree.name, tree.name))
    return mapped(tree, lambda part: _rename(part, names))


def formulas(answer: Shape) -> list[Expr]:
    """Return the formulas of quantities, lists, brackets and named values."""
    if isinstance(answer, Quantity):
        return [answer.expr]
    if isinstance(answer, Several | Brackets):
        return [part for item in answer.items for part in formulas(item)]
    inner = answer.value if isinstance(answer, Named) else answer.answer if isinstance(answer, Family) else None
    return [] if inner is None else formulas(inner)


def names_of(answer: Shape) -> frozenset[str]:
    """Return the letters in the formulas of an answer."""
    return frozenset().union(*(part.symbols for part in formulas(answer)))


def substitute(tree: Expr, name: str, by: Expr) -> Expr:
    """Replace one symbol by a formula."""
    return put(tree, Expr("sym", name=name), by)


def put(tree: Expr, leaf: Expr, by: Expr) -> Expr:
    """Replace a symbol or a constant by a formula."""
    if (tree.op, tree.name) == (leaf.op, leaf.name) and not tree.args:
        return by
    return mapped(tree, lambda part: put(part, leaf, by))


def without_degrees(tree: Expr) -> Expr:
    """Remove the degree signs of a formula: 30 degrees become the number 30."""
    # `formulas` reads a degree sign as base * pi / 180
    if tree.op == "div" and tree.args[1] == numeral(180) and tree.args[0].op == "mul" and len(tree.args[0].args) == 2:
        base, half_turn = tree.args[0].args
        if half_turn == symbol("pi"):
            return without_degrees(base)
    return mapped(tree, without_degrees)


def signs(tree: Expr) -> tuple[Expr, ...] | None:
    """Return the formulas for all choices of the plus-minus signs; None when there are too many signs.

    Every plus-minus sign is free; a minus-plus sign is opposite to the plus-minus signs of its formula.
    """
    # a minus-plus sign is opposite to all plus-minus signs, so these share one sign
    if tree.holds("mp"):
        return tuple(_signed(tree, repeat(sign), -sign) for sign in (1, -1))
    count = _signs(tree)
    return tuple(_signed(tree, iter(way), 0) for way in product((1, -1), repeat=count)) if count <= MAX_SIGNS else None


def _signs(tree: Expr) -> int:
    return (tree.op == "pm") + sum(map(_signs, tree.args))


def _signed(tree: Expr, ways: Iterator[int], opposite: int) -> Expr:
    if tree.op not in ("pm", "mp"):
        return mapped(tree, lambda part: _signed(part, ways, opposite))
    sign = next(ways) if tree.op == "pm" else opposite
    parts = [_signed(part, ways, opposite) for part in tree.args]
    last = parts[-1] if sign > 0 else -parts[-1]
    return last if len(parts) == 1 else parts[0] + last


Dimension = tuple[tuple[str, int], ...]
"""Base dimensions with their exponents, sorted by name."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Unit or noun next to a number.

    Attributes:
        kind: unit, percent, degree, noun, or none (the ending of an ordinal).
        dimension: Base dimensions of a unit; ``any`` for the word "units".
        factor: Exact size in base units.
        noun: Last word of a noun in the singular, or the letters of a unit of up to three letters.
        words: All words of a noun.
    """

    kind: str
    dimension: Dimension = ()
    factor: Fraction = Fraction(1)
    noun: str = ""
    words: tuple[str, ...] = ()


PERCENT = Unit("percent")
DEGREE = Unit("degree")


class Shape:
    """Base class of the shapes of an answer."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Text(Shape):
    """Words in small letters, without articles."""

    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Quantity(Shape):
    """A formula, with a unit or without."""

    expr: Expr
    unit: Unit | None = None


@dataclass(frozen=True, slots=True)
class Fixed(Shape):
    """Notation that equals only itself: digits in a stated base, a permutation in cycles."""

    parts: tuple[str | int | tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Ratio(Shape):
    """``a:b`` or ``a:b:c``."""

    parts: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Clock(Shape):
    """Time of day or duration ``h:mm(:ss)``; ``ratio`` is set where it may be a ratio.

    ``half``: am, pm, 24 (``03:00`` and ``3:00 hours``), or empty where the text leaves it open.
    """

    seconds: int
    half: str
    ratio: Ratio | None


@dataclass(frozen=True, slots=True)
class Several(Shape):
    """List without an order; ``signs``: it comes from a plus-minus sign; ``either``: its items are joined by "or"."""

    items: tuple[Shape, ...]
    signs: bool = False
    either: bool = False


@dataclass(frozen=True, slots=True)
class Brackets(Shape):
    """Items in brackets, in order: a tuple, a list, an interval, or (in braces) a set."""

    opening: str
    closing: str
    items: tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Numbers between two bounds; a point has equal, closed bounds."""

    low: Expr
    low_closed: bool
    high: Expr
    high_closed: bool


@dataclass(frozen=True, slots=True)
class RealSet(Shape):
    """Union of spans; ``subject`` is the name in the inequality, if there was one."""

    spans: tuple[Bounds, ...]
    subject: str = ""


PLUS_INFINITY, MINUS_INFINITY = symbol("inf"), -symbol("inf")
ALL_REALS = RealSet((Bounds(MINUS_INFINITY, False, PLUS_INFINITY, False),))


@dataclass(frozen=True, slots=True)
class Matrix(Shape):
    """Rows of formulas."""

    rows: tuple[tuple[Shape, ...], ...]


@dataclass(frozen=True, slots=True)
class Named(Shape):
    """``name = value``: ``x = 5``, ``f(x) = 2x``, ``(p, q) = (1, 2)``, ``Paolo: 18``.

    ``name`` is without a function's ``arguments``; ``symbol`` is the name as a formula, None if it is none.
    """

    name: str
    arguments: tuple[str, ...]
    value: Shape
    symbol: Expr | None = None


@dataclass(frozen=True, slots=True)
class Equation(Shape):
    """Two equal formulas, neither of them a name."""

    left: Expr
    right: Expr


@dataclass(frozen=True, slots=True)
class Order(Shape):
    """Chain of formulas with ``<`` or ``<=`` between them (or one ``!=``)."""

    parts: tuple[Expr, ...]
    relations: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Family(Shape):
    """Answer with free parameters (``for some integer t``), and their domain (Z, N, R) if it is given."""

    answer: Shape
    parameters: frozenset[str]
    domain: str = ""


@dataclass(frozen=True, slots=True)
class Domain(Shape):
    r"""Set of numbers that is no union of intervals: ``\mathbb{Z}``, ``\mathbb{Q}``, the positive integers (Z+)."""

    name: str


@dataclass(frozen=True, slots=True)
class Within(Shape):
    r"""Members of a domain that meet a condition: ``\{x \in \mathbb{Z} : x > 2\}``."""

    domain: str
    condition: Shape


@dataclass(frozen=True, slots=True)
class Piecewise(Shape):
    """Definition by cases: values and their conditions; the condition of "otherwise" is None."""

    pieces: tuple[tuple[Shape, Shape | None], ...]


@dataclass(frozen=True, slots=True)
class Dotted(Shape):
    """List that continues by a rule: the item at place ``#j``, counted from 0, and the last place (None: no end)."""

    item: Expr
    last: Expr | None


@dataclass(frozen=True, slots=True)
class Sentence(Shape):
    """Words with content, and the formulas between them."""

    parts: tuple[str | Shape, ...]


def complete(items: Iterable[T | None]) -> list[T] | None:
    """Return the items as a list; None if one of them is None."""
    found: list[T] = []
    for item in items:
        if item is None:
            return None
        found.append(item)
    return found


def unitless(answer: Shape | None) -> Expr | None:
    """Return the formula of a quantity without a unit; None for every other answer."""
    return answer.expr if isinstance(answer, Quantity) and answer.unit is None else None


def as_value(value: Quantity) -> Expr | None:
    """Return the value of a quantity without a unit, or of a percentage."""
    return value.expr / numeral(100) if value.unit is not None and value.unit.kind == "percent" else unitless(value)


def all_of(verdicts: Sequence[bool | None]) -> bool | None:
    """Return False if one verdict is False, else None if one is unknown, else True."""
    return False if False in verdicts else None if None in verdicts else True


def any_of(verdicts: Sequence[bool | None]) -> bool | None:
    """Return True if one verdict is True, else None if one is unknown, else False."""
    return True if True in verdicts else None if None in verdicts else False
