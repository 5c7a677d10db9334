"""Whether an output is the expected one: comparison of text and values, and checkers of problems with several answers.

Text: tokens between ASCII white space, byte for byte; a token that is expected as a decimal fraction may differ by
the float tolerance. Values: Python's ``==`` on exact plain types; lists and tuples are one in JSON.

A checker is one of
  * a built-in name;
  * Python source that defines ``check(input, output, answer)`` or ``sat(output)`` and returns whether it is right; it
    may call the predicates of `TOOLS`, which answer False to whatever is not of the right form;
  * a Python program with testlib's contract: ``checker input output answer`` (file names), exit status 0 accepted,
    1, 2, 4, 7 (points: not full marks) or 8 wrong, 3 the checker itself failed;
  * the path of a compiled program with the same contract.
Every one but the built-in runs confined, in a process that holds nothing else.
"""

from __future__ import annotations

import ast
import collections
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, Literal

from magicrl_verifiers.code.suite import SuiteError, parse_trusted

DEFAULT_TOLERANCE = 1e-6
"""Tolerance of floats, absolute or relative, where a problem states none: the usual one of contests."""
MAX_NUMBER_CHARS = 400

_FRACTION = re.compile(rb"[+-]?(\d+\.\d*|\.\d+|\d+(?:\.\d*)?[eE][+-]?\d+|\.\d+[eE][+-]?\d+)", re.ASCII)
_NUMBER = re.compile(rb"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)


def same_text(output: bytes, expected: bytes, tolerance: float | None = None) -> bool:
    """Equal token by token.

    Args:
        tolerance: of fractions; None: `DEFAULT_TOLERANCE` where the expected token has a point or an exponent.
            A stated one also covers expected integers.
    """
    if output == expected:
        return True
    wanted = expected.split()
    found = output.split(None, len(wanted))  # a flood of output is never cut up whole
    if len(found) != len(wanted):
        return False
    return all(a == b or close_tokens(a, b, tolerance) for a, b in zip(found, wanted, strict=True))


def close_tokens(found: bytes, wanted: bytes, tolerance: float | None) -> bool:
    """Return whether two tokens are numbers that differ by no more than the tolerance."""
    # no number of a test has so many digits, and a flood of them is not worth converting
    if len(found) > MAX_NUMBER_CHARS or len(wanted) > MAX_NUMBER_CHARS:
        return False
    # a whole number is meant exactly unless the problem states a tolerance
    if tolerance == 0 or not (_FRACTION if tolerance is None else _NUMBER).fullmatch(wanted):
        return False
    if not _NUMBER.fullmatch(found):
        return False
    return is_close(float(found), float(wanted), DEFAULT_TOLERANCE if tolerance is None else tolerance)


def is_close(found: float, wanted: float, tolerance: float = DEFAULT_TOLERANCE) -> bool:
    """Finite and within the tolerance, absolute or relative to the expected value; or equal."""
    if found == wanted:
        return True
    if not (math.isfinite(found) and math.isfinite(wanted)):
        return False
    return abs(found - wanted) <= tolerance * max(1.0, abs(wanted))


def same_lines(output: bytes, expected: bytes) -> bool:
    """Equal line by line, but for white space at ends of lines and of the text."""
    return [line.rstrip() for line in output.rstrip().split(b"\n")] == [
        line.rstrip() for line in expected.rstrip().split(b"\n")
    ]


def same_result(found: Any, wanted: Any, tolerance: float | None, *, strict: bool) -> bool:
    """Return whether two plain values are equal.

    Args:
        tolerance: of floats; None: the default where ``wanted`` is a float, and none at all with ``strict``.
        strict: Python's own ``==`` (assertions); else a tuple is a list, and a dictionary's keys may be texts of
            integers, as in JSON. 1 equals True in both, as in LiveCodeBench's harness.
    """
    if strict and tolerance is None:
        return bool(found == wanted)
    # iterative, since hostile results may be nested deeply
    waiting = collections.deque([(found, wanted)])
    while waiting:
        a, b = waiting.pop()
        if not strict:
            a, b = _as_json(a, b), _as_json(b, a)
        if isinstance(b, list | tuple) and isinstance(a, list | tuple):
            if (strict and type(a) is not type(b)) or len(a) != len(b):
                return False
            waiting.extend(zip(a, b, strict=True))
        elif isinstance(b, dict) and isinstance(a, dict):
            keys = a if a.keys() == b.keys() or strict else {str(key): item for key, item in a.items()}
            if keys.keys() != b.keys():
                return False
            waiting.extend((keys[key], b[key]) for key in b)
        elif not _same_leaf(a, b, tolerance):
            return False
    return True


def _as_json(value: Any, other: Any) -> Any:
    if isinstance(value, range) and hasattr(other, "__len__"):
        # one number more than the other side has shows the difference: a range may stand for billions
        value = islice(value, len(other) + 1)
    if isinstance(value, tuple | collections.deque) or hasattr(value, "__next__"):
        return list(value)
    return value


def _same_leaf(a: Any, b: Any, tolerance: float | None) -> bool:
    if a == b:
        return True
    numbers = isinstance(a, int | float) and isinstance(b, int | float)
    # True is 1 in Python, but no number within a tolerance
    if not numbers or isinstance(a, bool) or isinstance(b, bool):
        return False
    if tolerance is None and not isinstance(b, float):
        return False
    try:
        return is_close(float(a), float(b), DEFAULT_TOLERANCE if tolerance is None else tolerance)
    except OverflowError:
        return False


Edge = tuple[int, int]


def integers(text: str) -> list[int] | None:
    """Return the whole text as integers in ASCII digits, or None."""
    tokens = text.split()
    # str.isdigit also takes digits of other scripts, and superscripts
    if any(not token.lstrip("+-").isascii() or not token.lstrip("+-").isdigit() for token in tokens):
        return None
    return [int(token) for token in tokens]


def is_permutation(items: Sequence[int], count: int, first: int = 1) -> bool:
    """Return whether ``items`` are ``first`` to ``first + count - 1`` in any order."""
    return len(items) == count and set(items) == set(range(first, first + count))


def same_items(items: Iterable[Any], others: Iterable[Any]) -> bool:
    """Return whether both hold the same items in any order, each as often."""
    # by their text: items of different types have no order
    return sorted(items, key=repr) == sorted(others, key=repr)


def _neighbours(edges: Iterable[Edge], directed: bool) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for one, other in edges:
        found.setdefault(one, set()).add(other)
        found.setdefault(other, set())
        if not directed:
            found[other].add(one)
    return found


def is_connected(nodes: Sequence[int], edges: Iterable[Edge]) -> bool:
    """Return whether every node is reached from the first over undirected edges."""
    near = _neighbours(edges, directed=False)
    if not nodes:
        return True
    seen, waiting = {nodes[0]}, collections.deque([nodes[0]])
    while waiting:
        for other in near.get(waiting.popleft(), ()):
            if other not in seen:
                seen.add(other)
                waiting.append(other)
    return all(node in seen for node in nodes)


def is_tree(nodes: Sequence[int], edges: Sequence[Edge]) -> bool:
    """Return whether the edges join exactly these nodes, without a cycle."""
    known = set(nodes)
    ends_known = all(one in known and other in known for one, other in edges)
    # n - 1 edges that join n nodes hold no cycle
    return ends_known and len(edges) == len(known) - 1 and is_connected(nodes, edges)


def is_spanning_tree(nodes: Sequence[int], edges: Iterable[Edge], chosen: Sequence[Edge]) -> bool:
    """Return whether ``chosen`` is a tree over all nodes, made of given edges."""
    given = {frozenset(edge) for edge in edges}
    return all(frozenset(edge) in given for edge in chosen) and is_tree(nodes, chosen)


def is_path(
    edges: Iterable[Edge], path: Sequence[int], start: int, end: int, *, directed: bool = False, simple: bool = False
) -> bool:
    """Return whether ``path`` leads from start to end over given edges; ``simple``: no node twice."""
    if not path or path[0] != start or path[-1] != end or (simple and len(set(path)) != len(path)):
        return False
    near = _neighbours(edges, directed)
    return all(other in near.get(one, ()) for one, other in pairwise(path))


def is_topological_order(nodes: Sequence[int], edges: Iterable[Edge], order: Sequence[int]) -> bool:
    """Return whether ``order`` holds every node once, each edge leading forward."""
    if len(order) != len(nodes) or set(order) != set(nodes):
        return False
    place = {node: index for index, node in enumerate(order)}
    return all(place[one] < place[other] for one, other in edges)


def is_colouring(edges: Iterable[Edge], colours: dict[int, Any]) -> bool:
    """Neighbours differ."""
    return all(one in colours and other in colours and colours[one] != colours[other] for one, other in edges)


def is_matching(edges: Iterable[Edge], chosen: Sequence[Edge]) -> bool:
    """Chosen edges are given ones and share no node."""
    given = {frozenset(edge) for edge in edges}
    ends = [node for edge in chosen for node in edge]
    return all(frozenset(edge) in given for edge in chosen) and len(set(ends)) == len(ends)


_OFFERED: tuple[Callable[..., Any], ...] = (
    integers, is_permutation, same_items, is_connected, is_tree, is_spanning_tree, is_path, is_topological_order,
    is_colouring, is_matching, is_close,
)  # fmt: skip
TOOLS = {function.__name__: function for function in _OFFERED}


_MAX_PATH = 4096


@dataclass(frozen=True, slots=True)
class Checker:
    """A checker: how it is run, and its name, source or path."""

    kind: Literal["builtin", "function", "program", "compiled"]
    text: str


def load_checker(text: str) -> Checker:
    """Return the checker that a problem names.

    Raises:
        SuiteError: no known name, no such file, or source that does not parse.
    """
    if text in _TEXT:
        return Checker("builtin", text)
    known = ", ".join(sorted(_TEXT))
    if "\n" not in text and len(text) < _MAX_PATH and os.path.isfile(text):
        if not text.endswith(".py"):
            if not os.access(text, os.X_OK):
                raise SuiteError(f"field 'checker': {text} is no executable file")
            return Checker("compiled", text)
        with open(text, encoding="utf-8") as file:
            text = file.read()
    try:
        tree = parse_trusted(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SuiteError(
            f"field 'checker' is no built-in one ({known}), no file and no Python source: {error}"
        ) from error
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    if functions & {"check", "sat"}:
        return Checker("function", text)
    # a misspelt name of a built-in checker is valid Python too, but does nothing
    if not any(isinstance(node, ast.Import | ast.ImportFrom | ast.Call) for node in ast.walk(tree)):
        raise SuiteError(f"field 'checker': {text[:60]!r} is no built-in checker ({known}) and no program")
    return Checker("program", text)


def accepts_value(name: str, found: Any, wanted: Any, tolerance: float | None) -> bool:
    """Return whether a built-in checker accepts the result of a function."""
    if name in ("unordered", "permutation", "unordered_lines"):
        return _unordered(found, wanted, tolerance)
    if name == "set":
        return _unordered(_distinct(found), _distinct(wanted), tolerance)
    if name in ("exact", "lines"):
        return same_result(found, wanted, 0.0, strict=False)
    if name == "nocase" and isinstance(found, str) and isinstance(wanted, str):
        return found.lower() == wanted.lower()
    return same_result(found, wanted, tolerance, strict=False)


def _same_lines_in_any_order(output: bytes, answer: bytes, tolerance: float | None) -> bool:
    ours, theirs = (
        [b" ".join(line.split()) for line in text.split(b"\n") if line.strip()] for text in (output, answer)
    )
    return _in_any_order(ours, theirs, tolerance)


def _in_any_order(ours: list[bytes], theirs: list[bytes], tolerance: float | None) -> bool:
    if tolerance is None:
        return collections.Counter(ours) == collections.Counter(theirs)
    # sorted by value, so that numbers within the tolerance meet without trying all pairs
    pairs = zip(sorted(ours, key=_by_value), sorted(theirs, key=_by_value), strict=False)
    return len(ours) == len(theirs) and all(same_text(one, other, tolerance) for one, other in pairs)


def _same_set(output: bytes, answer: bytes, tolerance: float | None) -> bool:
    ours, theirs = (
        list({token if tolerance is None else _by_value(token): token for token in text.split()}.values())
        for text in (output, answer)
    )
    return _in_any_order(ours, theirs, tolerance)


def _by_value(line: bytes) -> tuple[tuple[bool, float, bytes], ...]:
    """Return an order of lines of tokens in which equal numbers meet, however they are written."""
    found: list[tuple[bool, float, bytes]] = []
    for token in line.split():
        try:
            found.append((False, float(token), b""))
        except ValueError:
            found.append((True, 0.0, token))
    return tuple(found)


# The built-in checkers of a program's output, each a function of (output, answer, tolerance).
_TEXT: dict[str, Callable[[bytes, bytes, float | None], bool]] = {
    # tokens between white space (the default), floats within the tolerance
    "tokens": same_text,
    # byte for byte
    "exact": lambda output, answer, tolerance: output == answer,
    # line by line, but for white space at the ends
    "lines": lambda output, answer, tolerance: same_lines(output, answer),
    # tokens, letters of either case
    "nocase": lambda output, answer, tolerance: same_text(output.lower(), answer.lower(), tolerance),
    # tokens, every number within the tolerance, whole ones too
    "float": lambda output, answer, tolerance: same_text(
        output, answer, DEFAULT_TOLERANCE if tolerance is None else tolerance
    ),
    # the same lines (of a function: the same items) in any order
    "unordered": _same_lines_in_any_order,
    "unordered_lines": _same_lines_in_any_order,
    # the same tokens (of a function: the same items) in any order
    "permutation": lambda output, answer, tolerance: _in_any_order(output.split(), answer.split(), tolerance),
    # the same distinct tokens or items
    "set": _same_set,
}


def accepts_text(name: str, output: bytes, answer: bytes, tolerance: float | None) -> bool:
    """Return whether a built-in checker accepts the output of a program."""
    return _TEXT[name](output, answer, tolerance)


def _unordered(found: Any, wanted: Any, tolerance: float | None) -> bool:
    """Compare items in any order, each taken once. It is quadratic only among items that JSON cannot order."""
    if not isinstance(found, list | tuple | set | frozenset) or not isinstance(wanted, list | tuple | set | frozenset):
        return same_result(found, wanted, tolerance, strict=False)
    if len(found) != len(wanted):
        return False
    # sorted alike, so that values within the tolerance meet without trying all pairs
    ours = sorted(found, key=_sort_key)
    theirs = sorted(wanted, key=_sort_key)
    return all(same_result(a, b, tolerance, strict=False) for a, b in zip(ours, theirs, strict=True))


def _distinct(value: Any) -> Any:
    if not isinstance(value, list | tuple | set | frozenset):
        return value
    return list({_sort_key(item): item for item in value}.values())


def _sort_key(value: Any) -> tuple[str, float, str]:
    """Return an order for plain data in which equal values meet: by kind, number, text."""
    if isinstance(value, int | float):
        try:
            return ("number", float(value), "")
        except OverflowError:
            return ("number", float("inf") if value > 0 else float("-inf"), str(value))
    return (type(value).__name__ if isinstance(value, str) else "other", 0.0, json.dumps(value, default=str))
