"""What an answer can be: formulas as small trees, units, and the shapes that `reading` finds and `comparison` compares.

What the grammar does not know (integrals, words) gives no tree at all, never a tree that dropped something: an answer
is only compared by `equality` when both sides were read whole.
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

    num (``value``, exactly, and ``decimals``: digits after the point of a decimal literal), sym (``name``), const
    (``name`` is e, i, pi or inf), add, mul, div, pow, neg, fn (``name`` of args), pm (two signs), mp (the opposite two
    signs), apply (a function that only has a name), series (bounds and body; ``name`` is ``sum`` or ``prod`` and the
    bound name), set (of sets with names; ``name`` is cup, cap or setminus), cases (values and bounds by turns; a bound
    is a formula that is positive, or if its name is closed not negative, where the value holds).
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
        """Whether a part has this ``op`` (and ``name``, if given)."""
        return (self.op == op and name in ("", self.name)) or any(part.holds(op, name) for part in self.args)


def mapped(tree: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """``tree`` with its parts changed."""
    return Expr(tree.op, tuple(map(change, tree.args)), tree.name, tree.value, tree.decimals)


def number(value: Fraction | int, decimals: int = 0) -> Expr:
    """A number literal."""
    return Expr("num", value=Fraction(value), decimals=decimals)


def symbol(name: str) -> Expr:
    """A symbol, or one of the constants e, i, pi, inf."""
    return Expr("const" if name in ("e", "i", "pi", "inf") else "sym", name=name)


def function(name: str, *args: Expr) -> Expr:
    """A function of its arguments."""
    return Expr("fn", args, name)


def rename(answer: Answer, names: dict[str, str]) -> Answer:
    """The answer with letters renamed, one by one."""
    if isinstance(answer, Quantity):
        return Quantity(_rename(answer.expr, names), answer.unit)
    if isinstance(answer, Several | Group):
        return replace(answer, items=tuple(rename(item, names) for item in answer.items))
    return replace(answer, value=rename(answer.value, names)) if isinstance(answer, Named) else answer


def _rename(tree: Expr, names: dict[str, str]) -> Expr:
    return (
        Expr("sym", name=names.get(tree.name, tree.name))
        if tree.op == "sym"
        else mapped(tree, lambda part: _rename(part, names))
    )


def formulas(answer: Answer) -> list[Expr]:
    """The formulas of quantities, lists, brackets and named values."""
    if isinstance(answer, Quantity):
        return [answer.expr]
    if isinstance(answer, Several | Group):
        return [part for item in answer.items for part in formulas(item)]
    inner = answer.value if isinstance(answer, Named) else answer.answer if isinstance(answer, Family) else None
    return [] if inner is None else formulas(inner)


def names_of(answer: Answer) -> frozenset[str]:
    """The letters in the formulas of an answer."""
    return frozenset().union(*(part.symbols for part in formulas(answer)))


def substitute(tree: Expr, name: str, by: Expr) -> Expr:
    """``tree`` with ``by`` in place of one symbol."""
    return put(tree, Expr("sym", name=name), by)


def put(tree: Expr, leaf: Expr, by: Expr) -> Expr:
    """``tree`` with ``by`` in place of a symbol or a constant."""
    if (tree.op, tree.name) == (leaf.op, leaf.name) and not tree.args:
        return by
    return mapped(tree, lambda part: put(part, leaf, by))


def without_degrees(tree: Expr) -> Expr:
    """``tree`` with the degree signs left out: numbers of degrees as mere numbers."""
    # the form in which `formulas` reads a degree sign: base * pi / 180
    if tree.op == "div" and tree.args[1] == number(180) and tree.args[0].op == "mul" and len(tree.args[0].args) == 2:
        base, half_turn = tree.args[0].args
        if half_turn == symbol("pi"):
            return without_degrees(base)
    return mapped(tree, without_degrees)


def signs(tree: Expr) -> tuple[Expr, ...] | None:
    """The formulas that plus-minus signs stand for, or None when there are too many of them.

    Every plus-minus sign is free; a minus-plus sign is opposite to the plus-minus signs of its formula.
    """
    # a minus-plus is opposite to all plus-minus signs, so these have one sign together
    if tree.holds("mp"):
        return tuple(_signed(tree, repeat(sign), -sign) for sign in (1, -1))
    count = _count(tree)
    return tuple(_signed(tree, iter(way), 0) for way in product((1, -1), repeat=count)) if count <= MAX_SIGNS else None


def _count(tree: Expr) -> int:
    return (tree.op == "pm") + sum(map(_count, tree.args))


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
    """What stands after (or before) a number; ``kind``: unit, percent, degree, noun or none (an ordinal's ending).

    A unit has a ``dimension`` (of "units" alone it is named ``any``) and an exact ``factor`` to base units. ``noun`` is
    the last word of a noun, singular, of a unit of up to three letters those letters; ``words`` are all of a noun.
    """

    kind: str
    dimension: Dimension = ()
    factor: Fraction = Fraction(1)
    noun: str = ""
    words: tuple[str, ...] = ()


PERCENT = Unit("percent")
DEGREE = Unit("degree")


class Answer:
    """What an answer can be."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Text(Answer):
    """Words, case folded, without articles."""

    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Quantity(Answer):
    """A formula, with a unit or without."""

    expr: Expr
    unit: Unit | None = None


@dataclass(frozen=True, slots=True)
class Based(Answer):
    """Digits in a stated base."""

    digits: str
    base: int


@dataclass(frozen=True, slots=True)
class Ratio(Answer):
    """``a:b`` or ``a:b:c``."""

    parts: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Clock(Answer):
    """A time of day or a duration ``h:mm(:ss)``; ``half`` is am, pm or empty."""

    seconds: int
    half: str
    ratio: Ratio | None


@dataclass(frozen=True, slots=True)
class Several(Answer):
    """Several answers, in no order: a bare list; ``signs``: of a plus-minus sign; ``either``: joined by "or"."""

    items: tuple[Answer, ...]
    signs: bool = False
    either: bool = False


@dataclass(frozen=True, slots=True)
class Group(Answer):
    """What stands in brackets, in order: a tuple, a list, an interval, or (braces) a set."""

    opening: str
    closing: str
    items: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """The numbers between two bounds; the bounds of a point are equal and closed."""

    low: Expr
    low_closed: bool
    high: Expr
    high_closed: bool


@dataclass(frozen=True, slots=True)
class RealSet(Answer):
    """A union of spans; ``subject`` is the name that an inequality was about, if any."""

    spans: tuple[Span, ...]
    subject: str = ""


PLUS_INFINITY, MINUS_INFINITY = symbol("inf"), -symbol("inf")
ALL_REALS = RealSet((Span(MINUS_INFINITY, False, PLUS_INFINITY, False),))


@dataclass(frozen=True, slots=True)
class Matrix(Answer):
    """Rows of formulas."""

    rows: tuple[tuple[Answer, ...], ...]


@dataclass(frozen=True, slots=True)
class Named(Answer):
    """``name = value``: ``x = 5``, ``f(x) = 2x``, ``(p, q) = (1, 2)``, ``Paolo: 18``.

    ``name`` is without a function's ``arguments``; ``symbol`` is the name as a formula, None if it is none.
    """

    name: str
    arguments: tuple[str, ...]
    value: Answer
    symbol: Expr | None = None


@dataclass(frozen=True, slots=True)
class Equation(Answer):
    """Two formulas of which neither is a mere name."""

    left: Expr
    right: Expr


@dataclass(frozen=True, slots=True)
class Order(Answer):
    """A chain of formulas with ``<`` or ``<=`` between them (or one ``!=``)."""

    parts: tuple[Expr, ...]
    relations: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Family(Answer):
    """An answer with the parameters it declares free (``for some integer t``), and their domain (Z, N, R), if said."""

    answer: Answer
    parameters: frozenset[str]
    domain: str = ""


@dataclass(frozen=True, slots=True)
class Domain(Answer):
    r"""A set of numbers that is no union of intervals: ``\mathbb{Z}``, ``\mathbb{Q}``, the positive integers (Z+)."""

    name: str


@dataclass(frozen=True, slots=True)
class Within(Answer):
    r"""The members of a domain that a condition lets in: ``\{x \in \mathbb{Z} : x > 2\}``."""

    domain: str
    condition: Answer


@dataclass(frozen=True, slots=True)
class Piecewise(Answer):
    """A definition by cases: values and their conditions; the condition of "otherwise" is None."""

    pieces: tuple[tuple[Answer, Answer | None], ...]


@dataclass(frozen=True, slots=True)
class Cycles(Answer):
    """A permutation as disjoint cycles, each from its least member on, in order."""

    cycles: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Dotted(Answer):
    """A list that goes on as it began: the item at place ``#j``, from 0, and the last place, if there is an end."""

    item: Expr
    last: Expr | None


@dataclass(frozen=True, slots=True)
class Sentence(Answer):
    """Words, without those that say nothing, and the formulas between them."""

    parts: tuple[str | Answer, ...]


def complete(items: Iterable[T | None]) -> list[T] | None:
    """The items; None where one of them is none."""
    found: list[T] = []
    for item in items:
        if item is None:
            return None
        found.append(item)
    return found


def plain(answer: Answer | None) -> Expr | None:
    """The formula of a quantity without a unit."""
    return answer.expr if isinstance(answer, Quantity) and answer.unit is None else None


def as_value(value: Quantity) -> Expr | None:
    """The value of a quantity without a unit, or of a percentage."""
    return value.expr / number(100) if value.unit is not None and value.unit.kind == "percent" else plain(value)


def all_of(verdicts: Sequence[bool | None]) -> bool | None:
    """False where one is false, None where one is unknown."""
    return False if False in verdicts else None if None in verdicts else True


def any_of(verdicts: Sequence[bool | None]) -> bool | None:
    """True where one is true, None where one is unknown."""
    return True if True in verdicts else None if None in verdicts else False
