"""Assertions as function calls where they parse, so that the comparison happens outside of every sandbox.

``assert f(1, 2) == 3`` becomes a call with literal arguments and an expected result. Whatever is more than that runs
as a whole in a process of its own (see `testrun`).
"""

from __future__ import annotations

import ast
import builtins
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from magicrl.verifiers.code.values import encode, refuse

_SAFE_CALLS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        abs,
        bool,
        dict,
        float,
        frozenset,
        int,
        len,
        list,
        max,
        min,
        round,
        set,
        sorted,
        str,
        sum,
        tuple,
        all,
        any,
    )
}
_SAFE_MATHS = {
    name: getattr(math, name) for name in ("isclose", "fabs", "inf", "nan", "pi", "e", "sqrt", "floor", "ceil")
}
_SAFE_NODES = (
    ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp, ast.BoolOp,
    ast.Compare, ast.Call, ast.keyword, ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.operator, ast.unaryop,
    ast.boolop, ast.cmpop, ast.expr_context,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One assertion ``call == expected``.

    Attributes:
        entry: the function, or an expression for it (``Solution().solve``).
        positional, named: arguments, plain data.
        expected: what the call has to return, exactly.
    """

    entry: str
    positional: list[Any]
    named: dict[str, Any]
    expected: Any


class _NotSimple(Exception):
    """This assertion needs a process of its own."""


def _globals() -> dict[str, Any]:
    return {"__builtins__": {}, **_SAFE_CALLS, "math": _MATHS}


class _Maths:
    def __init__(self) -> None:
        self.__dict__.update(_SAFE_MATHS)


_MATHS = _Maths()


def parse_trusted(source: str) -> ast.Module:
    """The tree of test code or of a checker. Unlike a program's text it may hold integers of any length.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: it does not parse.
    """
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return ast.parse(source)
    finally:
        sys.set_int_max_str_digits(limit)


def wanted_names(tree: ast.Module, entry: str | None) -> list[str]:
    """The names that test code expects of the program, the entry point alone where one is stated.

    Else what it calls, or gives to ``check``, and neither defines nor finds among the built-ins. Where there is no such
    name and nothing is imported from elsewhere either (a program that defines its own ``sum``): the outermost call of
    each assertion.
    """
    if entry is not None:
        return [entry]
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {argument.arg for node in ast.walk(tree) if isinstance(node, ast.arguments) for argument in node.args}
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    own |= {(alias.asname or alias.name).split(".")[0] for statement in imports for alias in statement.names}
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    names = [call.func.id for call in calls if isinstance(call.func, ast.Name)]
    for call in calls:
        if isinstance(call.func, ast.Name) and call.func.id == "check":
            names += [node.id for node in call.args if isinstance(node, ast.Name)]
    foreign = [name for name in dict.fromkeys(names) if name not in own and not hasattr(builtins, name)]
    loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - own
    if foreign or imports or any(not hasattr(builtins, name) for name in loaded):
        return foreign
    outer: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            left = node.test.left if isinstance(node.test, ast.Compare) else node.test
            if isinstance(left, ast.Call) and isinstance(left.func, ast.Name) and left.func.id not in own:
                outer.append(left.func.id)
    return list(dict.fromkeys(outer))


def parse_calls(tree: ast.Module, entries: Iterable[str], check: str | None) -> list[ParsedCall] | None:
    """Every assertion of the test code as a call, or None if any part of it is more than that.

    Args:
        tree: the test code: assertions, or ``def check(candidate)`` holding assertions.
        entries: names of the program's functions.
        check: what ``check`` is called with if the test code does not call it.
    """
    try:
        return list(_calls(tree, set(entries), check))
    except _NotSimple:
        return None


def _calls(tree: ast.Module, entries: set[str], check: str | None) -> Iterable[ParsedCall]:
    checker: ast.FunctionDef | None = None
    called: list[str] = []
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "check" and len(statement.args.args) == 1:
            checker = statement
        elif isinstance(statement, ast.Assert):
            yield from _assertion(statement, {name: name for name in entries})
        elif (target := _check_call(statement)) is not None:
            called.append(target)
        elif not _harmless(statement):
            raise _NotSimple
    if checker is not None and not called and check is not None:
        called.append(check)
    if (checker is None) != (not called) or len(called) > 1:
        raise _NotSimple
    for entry in called:
        assert checker is not None
        candidate = checker.args.args[0].arg
        for statement in checker.body:
            if isinstance(statement, ast.Assert):
                yield from _assertion(statement, {candidate: entry})
            elif not _harmless(statement):
                raise _NotSimple


def _check_call(statement: ast.stmt) -> str | None:
    if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)):
        return None
    call = statement.value
    if isinstance(call.func, ast.Name) and call.func.id == "check" and len(call.args) == 1 and not call.keywords:
        return ast.unparse(call.args[0])
    return None


def _harmless(statement: ast.stmt) -> bool:
    """Imports that the safe names cover, docstrings, constants such as HumanEval's METADATA."""
    if isinstance(statement, ast.Import):
        return all(alias.name == "math" and alias.asname is None for alias in statement.names)
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    if isinstance(statement, ast.Assign):
        return all(isinstance(target, ast.Name) and target.id == "METADATA" for target in statement.targets)
    return isinstance(statement, ast.Pass)


def _assertion(statement: ast.Assert, entries: dict[str, str]) -> Iterable[ParsedCall]:
    calls = [
        node
        for node in ast.walk(statement.test)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in entries
    ]
    if not calls:
        if isinstance(statement.test, ast.Constant) and statement.test.value is True:
            return
        raise _NotSimple
    if len(calls) > 1:
        raise _NotSimple
    (call,) = calls
    assert isinstance(call.func, ast.Name)
    if any(isinstance(argument, ast.Starred) for argument in call.args) or any(k.arg is None for k in call.keywords):
        raise _NotSimple
    positional = [_literal(argument) for argument in call.args]
    named = {str(keyword.arg): _literal(keyword.value) for keyword in call.keywords}
    test = statement.test
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        for one, other in ((test.left, test.comparators[0]), (test.comparators[0], test.left)):
            if one is call:
                yield ParsedCall(entries[call.func.id], positional, named, _literal(other))
                return
    raise _NotSimple


def _literal(node: ast.expr) -> Any:
    """The value of an expression of literals and safe functions."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        pass
    expression = ast.Expression(node)
    _check_safe(expression)
    try:
        value = eval(compile(ast.fix_missing_locations(expression), "<literal>", "eval"), _globals())
        encode(value, refuse)
    except Exception as error:
        raise _NotSimple from error
    return value


def is_plain(source: str) -> bool:
    """Whether an expression holds nothing but literals, operators and calls of harmless built-ins."""
    try:
        _check_safe(ast.parse(source.strip(), mode="eval"))
    except (_NotSimple, SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _check_safe(expression: ast.Expression) -> None:
    for node in ast.walk(expression):
        if not isinstance(node, _SAFE_NODES):
            raise _NotSimple
        if isinstance(node, ast.Name) and node.id not in _SAFE_CALLS and node.id != "math":
            raise _NotSimple
        if isinstance(node, ast.Attribute) and not (
            isinstance(node.value, ast.Name) and node.value.id == "math" and node.attr in _SAFE_MATHS
        ):
            raise _NotSimple
