"""Values as plain data: what crosses the border of a sandbox, as JSON with tags.

An object of a program's own making never crosses: of a subclass of a plain type only its content does, so that no
``__eq__`` of the program's is ever asked. Used on both sides; the receiving side trusts nothing but JSON.
"""

from __future__ import annotations

import collections
import datetime
import importlib
import itertools
import sys
from collections.abc import Callable, Generator, Iterable
from os import fstat, pread, write  # by name: test code may put mocks in the place of the module's functions
from typing import Any, NoReturn

MAX_ITEMS = 1_000_000
"""Items read from an iterator."""
_SMALL = 1 << 63
_MAX_NODES = 200_000

_TYPES = {kind.__name__: kind for kind in (int, float, str, bool, list, tuple, dict, set, frozenset, bytes, complex)}
"""Types that are values themselves, e.g. as the argument of a filter."""

PLAIN_TYPES = frozenset(_TYPES.values())

Hook = Callable[[Any], Any]


class NotPlainError(TypeError):
    """A value that is no plain data and cannot cross."""


def encode(value: Any, other: Hook | None = None) -> Any:
    """Return the JSON form of a plain value. ``other`` may encode what is not plain (as another tagged dict).

    Raises:
        NotPlainError: not plain data.
        RecursionError: nested too deeply, or part of itself.
    """
    if value is None:
        return None
    encoder = _ENCODERS.get(type(value))
    if encoder is None:
        # a subclass: the first base that fits, so that datetime comes before date
        encoder = next((one for base, one in _ENCODERS.items() if isinstance(value, base)), _encode_odd)
    return encoder(value, other)


def _many(items: Iterable[Any], other: Hook | None) -> list[Any]:
    return [encode(item, other) for item in items]


def _int(value: int, other: Hook | None = None) -> Any:
    # beyond 64 bits in hexadecimal: decimal digits of long integers take quadratic time and are limited
    exact = int.__add__(value, 0)
    return exact if -_SMALL <= exact < _SMALL else {"i": hex(exact)}


def _tuple(value: tuple[Any, ...], other: Hook | None) -> Any:
    items, fields = _many(tuple.__iter__(value), other), getattr(type(value), "_fields", None)
    if other is None or type(fields) is not tuple:
        return {"t": items}
    return {"nt": [type(value).__name__, list(map(str, fields)), items]}


_MAPPINGS = {kind.__name__: kind for kind in (collections.Counter, collections.OrderedDict, collections.defaultdict)}
"""Kinds of dictionaries that stay what they are when they cross with a hook."""


def _dict(value: dict[Any, Any], other: Hook | None) -> Any:
    pairs = [_many(pair, other) for pair in dict.items(value)]
    kind = type(value)
    factory = value.default_factory if isinstance(value, collections.defaultdict) else None
    if other is None or _MAPPINGS.get(kind.__name__) is not kind or not (factory is None or factory in PLAIN_TYPES):
        return {"d": pairs}
    return {"map": [kind.__name__, factory and factory.__name__, pairs]}


_ENCODERS: dict[type, Callable[[Any, Hook | None], Any]] = {
    # a subclass gives its content by the base type's own methods, never by its own
    bool: lambda value, other: value,
    int: _int,
    float: lambda value, other: float.__mul__(value, 1.0),
    str: lambda value, other: str.__getitem__(value, slice(None)),
    list: lambda value, other: _many(list.__iter__(value), other),
    tuple: _tuple,
    dict: _dict,
    set: lambda value, other: {"s": _many(set.__iter__(value), other)},
    frozenset: lambda value, other: {"f": _many(frozenset.__iter__(value), other)},
    collections.deque: lambda value, other: {"q": _many(collections.deque.__iter__(value), other)},
    bytes: lambda value, other: {"b": bytes.__getitem__(value, slice(None)).decode("latin-1")},
    bytearray: lambda value, other: {"B": bytearray.__getitem__(value, slice(None)).decode("latin-1")},
    complex: lambda value, other: {"c": [complex.__add__(value, 0).real, complex.__add__(value, 0).imag]},
    slice: lambda value, other: {"sl": _many((value.start, value.stop, value.step), other)},
    range: lambda value, other: {"r": [_int(part) for part in (value.start, value.stop, value.step)]},
    datetime.datetime: lambda value, other: {"datetime": datetime.datetime.isoformat(value)},
    datetime.date: lambda value, other: {"date": datetime.date.isoformat(value)},
    datetime.timedelta: lambda value, other: {"delta": [value.days, value.seconds, value.microseconds]},
}


def _encode_odd(value: Any, other: Hook | None) -> Any:
    kind = type(value)
    for module, name, tag in (("decimal", "Decimal", "D"), ("fractions", "Fraction", "F")):
        if kind is getattr(sys.modules.get(module), name, None):  # not imported here: it would slow every fork
            return {tag: str(value) if tag == "D" else [_int(value.numerator), _int(value.denominator)]}
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
        # one more than is allowed shows that there are too many, without reading an endless iterator
        items = list(itertools.islice(value, MAX_ITEMS + 1))
        if len(items) > MAX_ITEMS:
            raise NotPlainError(f"an iterator of more than {MAX_ITEMS} items")
        return {"it": _many(items, other)}
    if other is not None and (encoded := other(value)) is not None:
        return encoded
    node = _nodes(value)
    if node is None:
        try:
            return {"O": bool(value) is True}
        except Exception:  # noqa: BLE001 - the program's own __bool__
            return refuse_rich(value)
    tag, items = node
    return {tag: _many(items, other)}


def refuse_rich(value: Any) -> NoReturn:
    """Raise `NotPlainError`: the hook for `encode` that lets nothing pass but plain data."""
    raise NotPlainError(f"a value of type {type(value).__name__} is no plain data")


class Opaque:
    """Result of a program that is no plain data: equal to nothing; only its truth value is known."""

    def __init__(self, truth: bool) -> None:
        self._truth = truth

    def __bool__(self) -> bool:
        return self._truth


def _nodes(value: Any) -> tuple[str, list[Any]] | None:
    """Return a LeetCode list (``val``, ``next``) or tree (``val``, ``left``, ``right``) as its usual list of values."""
    is_tree = all(hasattr(value, name) for name in ("val", "left", "right"))
    if not is_tree and not (hasattr(value, "val") and hasattr(value, "next")):
        return None
    found: list[Any] = []
    waiting = collections.deque([value])
    while waiting:
        node = waiting.popleft()
        if node is not None:
            waiting.extend((node.left, node.right) if is_tree else (node.next,))
        found.append(None if node is None else node.val)
        if len(found) > _MAX_NODES:
            raise NotPlainError(f"a linked list or tree of more than {_MAX_NODES} nodes")
    if not is_tree:
        return "linked", found[:-1]  # the last is its end
    # LeetCode leaves the missing children of the last level out
    while found and found[-1] is None:
        found.pop()
    return "tree", found


def decode(value: Any, other: Hook | None = None) -> Any:
    """Return the plain value of a JSON form. ``other`` decodes tags that are not known here.

    Raises:
        ValueError: no form that `encode` makes. (TypeError: a set or dict key that is not hashable.)
    """
    if type(value) is list:
        return [decode(item, other) for item in value]
    if type(value) is not dict:
        return value
    # what crosses is hostile: any shape that `encode` does not make is an error
    if len(value) != 1:
        raise ValueError(f"a tagged value has {len(value)} tags")
    (tag, content), *_ = value.items()
    decoder = _DECODERS.get(tag)
    if decoder is not None:
        return decoder(content, other)
    if other is None:
        raise ValueError(f"unknown tag {tag!r:.40}")
    return other(value)


def decode_rich(tag: str, content: Any, other: Hook) -> Any:
    """Return the named tuple, the array or the special dictionary of a form that `encode` makes only with a hook.

    Raises:
        ValueError: another tag.
    """
    if tag == "nt":
        return collections.namedtuple(content[0], content[1])(*_all(content[2], other))  # pyright: ignore[reportUntypedNamedTuple]
    if tag == "np":
        return _late("numpy", "array", _all(content[1], other), content[0])
    if tag == "map":
        kind: Any = _MAPPINGS[content[0]]
        pairs = [(decode(key, other), decode(item, other)) for key, item in content[2]]
        if kind is collections.defaultdict:
            return kind(None if content[1] is None else _TYPES[content[1]], pairs)
        return kind(dict(pairs))
    raise ValueError(f"unknown tag {tag!r:.40}")


def _all(items: Any, other: Hook | None) -> list[Any]:
    if type(items) is not list:
        raise ValueError("a tagged list is no list")
    return [decode(item, other) for item in items]


def _late(module: str, name: str, *given: Any) -> Any:
    """Make a value by a class of a module that would slow every fork."""
    return getattr(importlib.import_module(module), name)(*given)


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
    "sl": lambda parts, other: slice(*_all(parts, other)),
    "d": lambda items, other: {decode(key, other): decode(item, other) for key, item in items},
    "b": lambda text, other: text.encode("latin-1"),
    "B": lambda text, other: bytearray(text.encode("latin-1")),
    "c": lambda parts, other: complex(float(parts[0]), float(parts[1])),
    "r": lambda parts, other: range(*(_whole(part) for part in parts)),
    "q": lambda items, other: collections.deque(_all(items, other)),
    "D": lambda text, other: _late("decimal", "Decimal", text),
    "F": lambda parts, other: _late("fractions", "Fraction", _whole(parts[0]), _whole(parts[1])),
    "date": lambda text, other: datetime.date.fromisoformat(text),
    "datetime": lambda text, other: datetime.datetime.fromisoformat(text),
    "delta": lambda parts, other: datetime.timedelta(*parts),
    "it": lambda items, other: iter(_all(items, other)),
}


class ListNode:
    """LeetCode's linked list, for programs that do not define one."""

    def __init__(self, val: Any = 0, next: Any = None) -> None:
        self.val = val
        self.next = next


class TreeNode:
    """LeetCode's binary tree, for programs that do not define one."""

    def __init__(self, val: Any = 0, left: Any = None, right: Any = None) -> None:
        self.val = val
        self.left = left
        self.right = right


def linked(items: Iterable[Any], node: Callable[..., Any] = ListNode) -> Any:
    """Return the linked list that holds ``items``; None for none."""
    head: Any = None
    for item in reversed(list(items)):
        made = node(item)
        made.next = head
        head = made
    return head


def tree(items: Iterable[Any], node: Callable[..., Any] = TreeNode) -> Any:
    """Return the binary tree whose levels, left to right, are ``items``; None where a child is missing."""
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


def write_all(fd: int, data: bytes) -> None:
    """Write all of ``data``."""
    view = memoryview(data)
    while view:
        view = view[write(fd, view) :]


def read_all(fd: int) -> bytes:
    """Return the content of a memory file."""
    size = fstat(fd).st_size
    data = pread(fd, size, 0)
    while len(data) < size and (part := pread(fd, size - len(data), len(data))):
        data += part
    return data


def present_cpu(each: float, left: float) -> float:
    """Return the CPU seconds of the next test if all tests have ``left``. Both sides of the sandbox use it."""
    # a test that starts gets a moment, since the start itself takes time
    return max(0.05, min(each, left))


EXIT_MEMORY = 102
EXIT_NOT_PLAIN = 104
EXIT_CHECKER_CRASHED = 113
EXIT_CHECKER_BROKEN = 114
"""Exit statuses by which the runner names why a program failed. A program may fake them: it has failed anyway."""

_CHANNELS = "status code source prelude args result calls replies binary input output answer"
SLOTS = {"stdin": 0, "stdout": 1, "stderr": 2, **{name: 200 + place for place, name in enumerate(_CHANNELS.split())}}
"""Descriptor numbers inside a sandbox, by name."""
