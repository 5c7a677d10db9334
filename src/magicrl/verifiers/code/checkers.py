"""Problems with several valid outputs: built-in comparisons by name, checker functions, checker programs.

A checker is one of
  * a name of `BUILTIN`;
  * Python source that defines ``check(input, output, answer)`` or ``sat(output)`` and returns whether it is right;
  * a Python program with testlib's contract: ``checker input output answer`` (file names), exit status 0 accepted,
    1, 2, 4, 7 (points: not full marks) or 8 wrong, 3 the checker itself failed;
  * the path of a compiled program with the same contract.
Every one but the built-in runs confined, in a process that holds nothing else.
"""

from __future__ import annotations

import ast
import collections
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from magicrl.verifiers.code import compare
from magicrl.verifiers.code.assertions import parse_trusted
from magicrl.verifiers.code.suite import SuiteError

_MAX_PATH = 4096


class Kind(Enum):
    """How a checker is run."""

    BUILTIN = "builtin"
    FUNCTION = "function"
    PROGRAM = "program"
    COMPILED = "compiled"


@dataclass(frozen=True, slots=True)
class Checker:
    """A checker: its kind, and a name, a source or a path."""

    kind: Kind
    text: str


def load_checker(text: str) -> Checker:
    """The checker that a problem names.

    Raises:
        SuiteError: no known name, no such file, or source that does not parse.
    """
    if text in BUILTIN:
        return Checker(Kind.BUILTIN, text)
    if "\n" not in text and len(text) < _MAX_PATH and os.path.isfile(text):
        if not text.endswith(".py"):
            if not os.access(text, os.X_OK):
                raise SuiteError(f"field 'checker': {text} is no executable file")
            return Checker(Kind.COMPILED, text)
        with open(text, encoding="utf-8") as file:
            text = file.read()
    try:
        tree = parse_trusted(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        known = ", ".join(sorted(BUILTIN))
        raise SuiteError(
            f"field 'checker' is no built-in one ({known}), no file and no Python source: {error}"
        ) from error
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    if functions & {"check", "sat"}:
        return Checker(Kind.FUNCTION, text)
    if not any(isinstance(node, ast.Import | ast.ImportFrom | ast.Call) for node in ast.walk(tree)):
        raise SuiteError(f"field 'checker': {text[:60]!r} is no built-in checker ({_known()}) and no program")
    return Checker(Kind.PROGRAM, text)


def accepts_text(name: str, output: bytes, answer: bytes, tolerance: float | None) -> bool:
    """What a built-in checker says of a program's output."""
    return _TEXT[name](output, answer, tolerance)


def accepts_value(name: str, found: Any, wanted: Any, tolerance: float | None) -> bool:
    """What a built-in checker says of a function's result."""
    if name in ("unordered", "permutation", "unordered_lines"):
        return _unordered(found, wanted, tolerance)
    if name == "set":
        return _unordered(_distinct(found), _distinct(wanted), tolerance)
    if name in ("exact", "lines"):
        return compare.same_value(found, wanted, 0.0, strict=False)
    if name == "nocase" and isinstance(found, str) and isinstance(wanted, str):
        return found.lower() == wanted.lower()
    return compare.same_value(found, wanted, tolerance, strict=False)


def _known() -> str:
    return ", ".join(sorted(BUILTIN))


def _normal(output: bytes) -> list[bytes]:
    return [b" ".join(line.split()) for line in output.split(b"\n") if line.strip()]


def _unordered_lines(output: bytes, answer: bytes, tolerance: float | None) -> bool:
    return collections.Counter(_normal(output)) == collections.Counter(_normal(answer))


def _unordered_tokens(output: bytes, answer: bytes, tolerance: float | None) -> bool:
    return collections.Counter(output.split()) == collections.Counter(answer.split())


_TEXT: dict[str, Callable[[bytes, bytes, float | None], bool]] = {
    "tokens": lambda output, answer, tolerance: compare.same_text(output, answer, tolerance),
    "exact": lambda output, answer, tolerance: output == answer,
    "lines": lambda output, answer, tolerance: compare.same_lines(output, answer),
    "nocase": lambda output, answer, tolerance: compare.same_text(output, answer, tolerance, fold_case=True),
    "float": lambda output, answer, tolerance: compare.same_text(
        output, answer, compare.DEFAULT_TOLERANCE if tolerance is None else tolerance
    ),
    "unordered": _unordered_lines,
    "unordered_lines": _unordered_lines,
    "permutation": _unordered_tokens,
    "set": lambda output, answer, tolerance: set(output.split()) == set(answer.split()),
}
BUILTIN: dict[str, str] = {
    "tokens": "tokens between white space (the default), floats within the tolerance",
    "exact": "byte for byte",
    "lines": "line by line, but for white space at the ends",
    "nocase": "tokens, letters of either case",
    "float": "tokens, every number within the tolerance, whole ones too",
    "unordered": "the same lines (of a function: the same items) in any order",
    "unordered_lines": "the same as unordered",
    "permutation": "the same tokens (of a function: the same items) in any order",
    "set": "the same distinct tokens or items",
}
assert BUILTIN.keys() == _TEXT.keys()


def _unordered(found: Any, wanted: Any, tolerance: float | None) -> bool:
    """The same items in any order; each is taken once. Quadratic only among items that JSON cannot order."""
    if not isinstance(found, list | tuple | set | frozenset) or not isinstance(wanted, list | tuple | set | frozenset):
        return compare.same_value(found, wanted, tolerance, strict=False)
    if len(found) != len(wanted):
        return False
    ours = sorted(found, key=_sort_key)
    theirs = sorted(wanted, key=_sort_key)
    return all(compare.same_value(a, b, tolerance, strict=False) for a, b in zip(ours, theirs, strict=True))


def _distinct(value: Any) -> Any:
    if not isinstance(value, list | tuple | set | frozenset):
        return value
    return list({_sort_key(item): item for item in value}.values())


def _sort_key(value: Any) -> tuple[str, float, str]:
    """An order for plain data in which equal values meet: by kind, number, text."""
    if isinstance(value, int | float):
        try:
            return ("number", float(value), "")
        except OverflowError:
            return ("number", float("inf") if value > 0 else float("-inf"), str(value))
    return (type(value).__name__ if isinstance(value, str) else "other", 0.0, json.dumps(value, default=str))
