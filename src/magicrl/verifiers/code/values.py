"""Values as plain data: what crosses the border of a sandbox, as JSON with tags.

An object of a program's own making never crosses: of a subclass of a plain type only its content does, so that no
``__eq__`` of the program's is ever asked. Used on both sides; the receiving side trusts nothing but JSON.
"""

from __future__ import annotations

import collections
import datetime
import itertools
import sys
from collections.abc import Callable, Generator, Iterable
from typing import Any

MAX_ITEMS = 1_000_000
"""Items read from an iterator."""
_SMALL = 1 << 63
_MAX_NODES = 200_000

_TYPES = {kind.__name__: kind for kind in (int, float, str, bool, list, tuple, dict, set, frozenset, bytes, complex)}
"""Types that are values themselves, e.g. as the argument of a filter."""

Hook = Callable[[Any], Any]


class NotPlainError(TypeError):
    """A value that is no plain data and cannot cross."""


def encode(value: Any, other: Hook | None = None) -> Any:
    """The JSON form of a plain value. ``other`` may encode what is not plain (a tagged dict of its own).

    Raises:
        NotPlainError: not plain data.
        RecursionError: nested too deeply, or part of itself.
    """
    encoder = _EXACT.get(type(value))
    if encoder is not None:
        return encoder(value, other)
    if value is None:
        return None
    for base, base_encoder in _BASES:
        if isinstance(value, base):
            return base_encoder(value, other)
    return _encode_odd(value, other)


def _many(items: Iterable[Any], other: Hook | None) -> list[Any]:
    return [encode(item, other) for item in items]


def _int(value: int, other: Hook | None) -> Any:
    exact = int.__add__(value, 0)
    return exact if -_SMALL <= exact < _SMALL else {"i": hex(exact)}


def _dict(value: dict[Any, Any], other: Hook | None) -> Any:
    return {"d": [[encode(key, other), encode(item, other)] for key, item in dict.items(value)]}


def _tuple(value: tuple[Any, ...], other: Hook | None) -> Any:
    items, fields = _many(tuple.__iter__(value), other), getattr(type(value), "_fields", None)
    if other is None or type(fields) is not tuple:
        return {"t": items}
    return {"nt": [type(value).__name__, list(map(str, fields)), items]}


def _bytes(value: bytes, other: Hook | None) -> Any:
    return {"b": bytes.__getitem__(value, slice(None)).decode("latin-1")}


def _itself(value: Any, other: Hook | None) -> Any:
    return value


_EXACT: dict[type, Callable[[Any, Hook | None], Any]] = {
    bool: _itself,
    float: _itself,
    str: _itself,
    int: _int,
    list: _many,
    tuple: lambda value, other: {"t": _many(value, other)},
    set: lambda value, other: {"s": _many(value, other)},
    frozenset: lambda value, other: {"f": _many(value, other)},
    dict: _dict,
    bytes: _bytes,
    bytearray: lambda value, other: {"B": value.decode("latin-1")},
    complex: lambda value, other: {"c": [value.real, value.imag]},
    range: lambda value, other: {"r": [_int(part, None) for part in (value.start, value.stop, value.step)]},
    collections.deque: lambda value, other: {"q": _many(value, other)},
    datetime.date: lambda value, other: {"date": value.isoformat()},
    datetime.datetime: lambda value, other: {"datetime": value.isoformat()},
    datetime.timedelta: lambda value, other: {"delta": [value.days, value.seconds, value.microseconds]},
}

_BASES: tuple[tuple[type, Callable[[Any, Hook | None], Any]], ...] = (
    # a subclass gives its content by the base type's own methods, never by its own
    (int, _int),
    (float, lambda value, other: float.__mul__(value, 1.0)),
    (str, lambda value, other: str.__getitem__(value, slice(None))),
    (list, lambda value, other: _many(list.__iter__(value), other)),
    (tuple, lambda value, other: _tuple(value, other)),
    (dict, _dict),
    (set, lambda value, other: {"s": _many(set.__iter__(value), other)}),
    (frozenset, lambda value, other: {"f": _many(frozenset.__iter__(value), other)}),
    (collections.deque, lambda value, other: {"q": _many(collections.deque.__iter__(value), other)}),
    (bytes, _bytes),
)


def _encode_odd(value: Any, other: Hook | None) -> Any:
    kind = type(value)
    for module, name, tag in (("decimal", "Decimal", "D"), ("fractions", "Fraction", "F")):
        if kind is getattr(sys.modules.get(module), name, None):  # not imported here: it would slow every fork
            return {tag: str(value) if tag == "D" else [_int(value.numerator, None), _int(value.denominator, None)]}
    if kind is type and _TYPES.get(value.__name__) is value:
        return {"T": value.__name__}
    if kind.__module__.split(".")[0] == "numpy" and hasattr(value, "tolist"):
        plain = value.tolist()
        if not isinstance(plain, list):
            return encode(plain, other)
        return {"it": _many(plain, other)} if other is None else {"np": [str(value.dtype.str), _many(plain, other)]}
    if isinstance(value, Generator) and other is not None and (encoded := other(value)) is not None:
        return encoded  # it may have no end
    if not callable(value) and hasattr(kind, "__iter__") and kind.__module__ in ("builtins", "itertools"):
        items = list(itertools.islice(value, MAX_ITEMS + 1))
        if len(items) > MAX_ITEMS:
            raise NotPlainError(f"an iterator of more than {MAX_ITEMS} items")
        return {"it": _many(items, other)}
    if other is not None and (encoded := other(value)) is not None:
        return encoded
    node = _nodes(value)
    if node is None:
        return {"O": truth(value)}
    tag, items = node
    return {tag: _many(items, other)}


def refuse(value: Any) -> Any:
    """A hook for `encode` that lets nothing pass but plain data."""
    raise NotPlainError(f"a value of type {type(value).__name__} is no plain data")


def truth(value: Any) -> bool:
    """Whether an object of no plain type counts as true.

    Raises:
        NotPlainError: it will not say.
    """
    try:
        return bool(value) is True
    except Exception as error:
        raise NotPlainError(f"a value of type {type(value).__name__} is no plain data") from error


class Opaque:
    """What a program returned that is no plain data: equal to nothing; only its truth value is known."""

    def __init__(self, truth: bool) -> None:
        self._truth = truth

    def __bool__(self) -> bool:
        return self._truth


def _nodes(value: Any) -> tuple[str, list[Any]] | None:
    """A LeetCode list (``val``, ``next``) or tree (``val``, ``left``, ``right``) as its usual list of values."""
    if hasattr(value, "val") and hasattr(value, "left") and hasattr(value, "right"):
        found: list[Any] = []
        waiting: collections.deque[Any] = collections.deque([value])
        while waiting:
            node = waiting.popleft()
            found.append(None if node is None else node.val)
            if node is not None:
                waiting.extend((node.left, node.right))
            if len(found) > _MAX_NODES:
                raise NotPlainError(f"a tree of more than {_MAX_NODES} nodes")
        while found and found[-1] is None:
            found.pop()
        return "tree", found
    if hasattr(value, "val") and hasattr(value, "next"):
        found = []
        while value is not None:
            found.append(value.val)
            value = value.next
            if len(found) > _MAX_NODES:
                raise NotPlainError(f"a linked list of more than {_MAX_NODES} nodes")
        return "linked", found
    return None


def decode(value: Any, other: Hook | None = None) -> Any:
    """The plain value of a JSON form. ``other`` is asked for tags that are not known here.

    Raises:
        ValueError: no form that `encode` makes. (TypeError: a set or dict key that is not hashable.)
    """
    if type(value) is list:
        return [decode(item, other) for item in value]
    if type(value) is not dict:
        return value
    if len(value) != 1:
        raise ValueError(f"a tagged value has {len(value)} tags")
    (tag, content), *_ = value.items()
    decoder = _DECODERS.get(tag)
    if decoder is not None:
        return decoder(content, other)
    if other is None:
        raise ValueError(f"unknown tag {tag!r:.40}")
    return other(value)


def _all(items: Any, other: Hook | None) -> list[Any]:
    if type(items) is not list:
        raise ValueError("a tagged list is no list")
    return [decode(item, other) for item in items]


def _pairs(items: Any, other: Hook | None) -> dict[Any, Any]:
    return {decode(key, other): decode(item, other) for key, item in items}


def _decimal(text: str) -> Any:
    import decimal

    return decimal.Decimal(text)


def _fraction(numerator: int, denominator: int) -> Any:
    import fractions

    return fractions.Fraction(numerator, denominator)


def _array(kind: str, items: list[Any]) -> Any:
    import numpy as np

    return np.array(items, dtype=kind)


def _named(name: str, fields: list[str], items: list[Any]) -> Any:
    return collections.namedtuple(name, fields)(*items)  # pyright: ignore[reportUntypedNamedTuple]


def _whole(value: Any) -> int:
    found = decode(value)
    if type(found) is not int:
        raise ValueError("not an integer")
    return found


_DECODERS: dict[str, Callable[[Any, Hook | None], Any]] = {
    "O": lambda known, other: Opaque(known is True),
    "T": lambda name, other: _TYPES[name],
    "i": lambda text, other: int(text, 16),
    "t": lambda items, other: tuple(_all(items, other)),
    "s": lambda items, other: set(_all(items, other)),
    "f": lambda items, other: frozenset(_all(items, other)),
    "d": _pairs,
    "b": lambda text, other: text.encode("latin-1"),
    "B": lambda text, other: bytearray(text.encode("latin-1")),
    "c": lambda parts, other: complex(float(parts[0]), float(parts[1])),
    "r": lambda parts, other: range(*(_whole(part) for part in parts)),
    "q": lambda items, other: collections.deque(_all(items, other)),
    "D": lambda text, other: _decimal(text),
    "F": lambda parts, other: _fraction(_whole(parts[0]), _whole(parts[1])),
    "date": lambda text, other: datetime.date.fromisoformat(text),
    "datetime": lambda text, other: datetime.datetime.fromisoformat(text),
    "delta": lambda parts, other: datetime.timedelta(*parts),
    "nt": lambda parts, other: _named(parts[0], parts[1], _all(parts[2], other)),
    "np": lambda parts, other: _array(parts[0], _all(parts[1], other)),
    "it": lambda items, other: iter(_all(items, other)),
}


class ListNode:
    """The linked list of LeetCode's problems, for programs that do not bring their own."""

    def __init__(self, val: Any = 0, next: Any = None) -> None:
        self.val = val
        self.next = next


class TreeNode:
    """The binary tree of LeetCode's problems, for programs that do not bring their own."""

    def __init__(self, val: Any = 0, left: Any = None, right: Any = None) -> None:
        self.val = val
        self.left = left
        self.right = right


def linked(items: Iterable[Any], node: Callable[..., Any] = ListNode) -> Any:
    """The linked list that holds ``items``; None for none."""
    head: Any = None
    for item in reversed(list(items)):
        made = node(item)
        made.next = head
        head = made
    return head


def tree(items: Iterable[Any], node: Callable[..., Any] = TreeNode) -> Any:
    """The binary tree whose levels, left to right, are ``items``; None where a child is missing."""
    source = iter(items)
    first = next(source, None)
    if first is None:
        return None
    root = node(first)
    waiting = collections.deque([root])
    while waiting:
        parent = waiting.popleft()
        for side in ("left", "right"):
            item = next(source, None)
            if item is not None:
                child = node(item)
                setattr(parent, side, child)
                waiting.append(child)
    return root


# --- what both sides of the sandbox know of a run -----------------------------------------------------------------


def present_cpu(each: float, left: float) -> float:
    """CPU seconds of the next test when ``left`` remain for all together. Both sides of the sandbox reckon so."""
    return max(0.05, min(each, left))


EXIT_MEMORY = 102
EXIT_NOT_PLAIN = 104
EXIT_CHECKER_CRASHED = 113
"""Exit statuses by which the runner names why a program failed. A program may fake them: it has failed anyway."""

SLOTS = {
    "stdin": 0,
    "stdout": 1,
    "stderr": 2,
    "status": 200,
    "code": 201,
    "source": 202,
    "prelude": 203,
    "args": 204,
    "result": 205,
    "calls": 206,
    "replies": 207,
    "binary": 208,
    "input": 209,
    "output": 210,
    "answer": 211,
}
"""Descriptor numbers inside a sandbox, by name."""
