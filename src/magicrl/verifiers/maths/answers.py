r"""What an answer can be: the shapes that `reading` finds in it and `comparison` compares."""

from __future__ import annotations

from dataclasses import dataclass

from magicrl.verifiers.maths.expression import Expr
from magicrl.verifiers.maths.units import Unit


@dataclass(frozen=True, slots=True)
class Text:
    """Words, case folded, without articles."""

    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Quantity:
    """A formula, with a unit or without."""

    expr: Expr
    unit: Unit | None = None


@dataclass(frozen=True, slots=True)
class Based:
    """Digits in a stated base."""

    digits: str
    base: int


@dataclass(frozen=True, slots=True)
class Ratio:
    """``a:b`` or ``a:b:c``."""

    parts: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Clock:
    """A time of day or a duration ``h:mm(:ss)``; ``half`` is am, pm or empty."""

    seconds: int
    half: str
    ratio: Ratio | None


@dataclass(frozen=True, slots=True)
class Several:
    """Several answers, in no order: a bare list; ``signs``: of a plus-minus sign; ``either``: joined by "or"."""

    items: tuple[Answer, ...]
    signs: bool = False
    either: bool = False


@dataclass(frozen=True, slots=True)
class Group:
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
class RealSet:
    """A union of spans; ``subject`` is the name that an inequality was about, if any."""

    spans: tuple[Span, ...]
    subject: str = ""


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of formulas."""

    rows: tuple[tuple[Answer, ...], ...]


@dataclass(frozen=True, slots=True)
class Named:
    """``name = value``: ``x = 5``, ``f(x) = 2x``, ``(p, q) = (1, 2)``, ``Paolo: 18``.

    Attributes:
        name: spelling of the name; of a function without its arguments.
        arguments: names of a function's arguments.
        value: what is given.
        symbol: the name as a formula, None if it is none.
    """

    name: str
    arguments: tuple[str, ...]
    value: Answer
    symbol: Expr | None = None


@dataclass(frozen=True, slots=True)
class Equation:
    """Two formulas of which neither is a mere name."""

    left: Expr
    right: Expr


@dataclass(frozen=True, slots=True)
class Order:
    """A chain of formulas with ``<`` or ``<=`` between them (or one ``!=``)."""

    parts: tuple[Expr, ...]
    relations: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """An answer with the parameters it declares free (``for some integer t``).

    ``domain`` is Z, N or R where the declaration says so, else empty.
    """

    answer: Answer
    parameters: frozenset[str]
    domain: str = ""


@dataclass(frozen=True, slots=True)
class Domain:
    r"""A set of numbers that is no union of intervals: ``\mathbb{Z}``, ``\mathbb{Q}``, the positive integers (Z+)."""

    name: str


@dataclass(frozen=True, slots=True)
class Within:
    r"""The members of a domain that a condition lets in: ``\{x \in \mathbb{Z} : x > 2\}``."""

    domain: str
    condition: Answer


@dataclass(frozen=True, slots=True)
class Piecewise:
    """A definition by cases: values and their conditions; the condition of "otherwise" is None."""

    pieces: tuple[tuple[Answer, Answer | None], ...]


@dataclass(frozen=True, slots=True)
class Cycles:
    """A permutation as disjoint cycles, each from its least member on, in order."""

    cycles: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Dotted:
    r"""A list that goes on as it began: ``1, 3, \ldots, 2n-1``.

    Attributes:
        item: the item at place ``#j``, counted from 0.
        last: the last place, None for a list without an end.
    """

    item: Expr
    last: Expr | None


@dataclass(frozen=True, slots=True)
class Sentence:
    """Words, without those that say nothing, and the formulas between them."""

    parts: tuple[str | Answer, ...]


Answer = (
    Text
    | Quantity
    | Based
    | Ratio
    | Clock
    | Several
    | Group
    | RealSet
    | Matrix
    | Named
    | Equation
    | Order
    | Family
    | Domain
    | Within
    | Piecewise
    | Cycles
    | Dotted
    | Sentence
)
