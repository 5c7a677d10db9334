"""The tests of one problem: the schemas of the released data as typed cases.

{"inputs": [...], "outputs": [...]}                        standard input and output
{"fn_name": ..., "inputs": [[args], ...], "outputs": ...}  function calls
{"entry_point", "import_prefix", "test_code"}              assertions (HumanEval, LeetCode)
{"assert_case": [...]}                                     assertions (MBPP)

An assertion ``assert f(1, 2) == 3`` becomes a call with literal arguments and an expected result, so that the
comparison happens outside of every sandbox. Other test code runs as a whole in a separate process (see `testrun`).
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import difflib
import json
import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from magicrl_verifiers.code.values import encode, refuse_rich

_SAFE = (
    abs, all, any, bool, dict, float, frozenset, int, len, list, max, min, round, set, sorted, str, sum, tuple,
)  # fmt: skip
_SAFE_CALLS: dict[str, Any] = {function.__name__: function for function in _SAFE}
_SAFE_MATHS = {
    name: getattr(math, name) for name in ("isclose", "fabs", "inf", "nan", "pi", "e", "sqrt", "floor", "ceil")
}
_SAFE_NODES = (
    ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp, ast.BoolOp,
    ast.Compare, ast.Call, ast.keyword, ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.operator, ast.unaryop,
    ast.boolop, ast.cmpop, ast.expr_context,
)  # fmt: skip


class SuiteError(ValueError):
    """Tests that cannot be used; names the field and what was expected."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StdinCase:
    """Standard input, and the output that is expected on it (None: only a checker knows)."""

    input: str
    output: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CallCase:
    """One call of a function.

    Attributes:
        entry: function name, or an expression for it.
        positional, named: arguments, plain data.
        expected: the result.
        strict: it comes from an assertion, so that Python's own ``==`` decides.
    """

    entry: str
    positional: list[Any]
    named: dict[str, Any]
    expected: Any
    strict: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class AssertCase:
    """Test code that runs in a separate process.

    Attributes:
        code: the test code.
        entry: the program's function, if stated.
        wanted: names in it that the program has to define.
        check: what to call ``check`` with, or None if the code calls it (or has none).
    """

    code: str
    entry: str | None
    wanted: tuple[str, ...]
    check: str | None


Case = StdinCase | CallCase | AssertCase


@dataclass(frozen=True, kw_only=True, slots=True)
class Suite:
    """The tests of one problem.

    Attributes:
        cases: at least one.
        prelude: source that runs before the program, or None.
        checker: name or program of a checker, or None for the built-in comparison.
        float_tolerance: absolute or relative difference that floats may have; None: the default.
        in_place: index of the argument whose content after the call is the result, or None.
        wrapped: every expected result may be wrapped in a list (the APPS convention).
        time_limit, memory_limit_mb: the problem's own limits, or None.
    """

    cases: tuple[Case, ...]
    prelude: str | None = None
    checker: str | None = None
    float_tolerance: float | None = None
    in_place: int | None = None
    wrapped: bool = False
    time_limit: float | None = None
    memory_limit_mb: int | None = None


class _NotSimple(Exception):
    """This assertion needs a separate process."""


def parse_trusted(source: str) -> ast.Module:
    """Return the tree of test code or of a checker. Unlike a program's text it may hold integers of any length.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: it does not parse.
    """
    # of the whole interpreter, so it is put back
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return ast.parse(source)
    finally:
        sys.set_int_max_str_digits(limit)


def wanted_names(tree: ast.Module, entry: str | None) -> list[str]:
    """Return the names that test code expects of the program: only the entry point where one is stated.

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
            # `check(f)`: what is given to it is the program's, without being called here
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


def _parse_calls(tree: ast.Module, entries: Iterable[str], check: str | None) -> list[CallCase] | None:
    """Return every assertion of the test code as a call, or None if any part of it is more than that."""
    try:
        calls = list(_calls(tree, set(entries), check))
    except _NotSimple:
        return None
    expected: dict[str, Any] = {}
    for one in calls:
        # one call with two results depends on the calls before it, which other processes would not have made
        key = repr((one.entry, one.positional, one.named))
        if expected.setdefault(key, one.expected) != one.expected:
            return None
    return calls


def _calls(tree: ast.Module, entries: set[str], check: str | None) -> Iterable[CallCase]:
    checker: ast.FunctionDef | None = None
    called: list[str] = []
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "check" and len(statement.args.args) == 1:
            checker = statement
        elif isinstance(statement, ast.Assert):
            yield from _assertion(statement, {name: name for name in entries})
        elif (target := _check_call(statement)) is not None:
            called.append(target)
        # a helper, a loop, a variable: more than calls and what they give
        elif not _harmless(statement):
            raise _NotSimple
    if checker is not None and not called and check is not None:
        called.append(check)
    # check() without a call, a call without check(), or several candidates
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
    """Return whether a statement is an import that the safe names cover, a docstring or a constant such as METADATA."""
    if isinstance(statement, ast.Import):
        return all(alias.name == "math" and alias.asname is None for alias in statement.names)
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    if isinstance(statement, ast.Assign):
        return all(isinstance(target, ast.Name) and target.id == "METADATA" for target in statement.targets)
    return isinstance(statement, ast.Pass)


def _assertion(statement: ast.Assert, entries: dict[str, str]) -> Iterable[CallCase]:
    calls = [
        node
        for node in ast.walk(statement.test)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in entries
    ]
    if not calls:
        # HumanEval's tests hold such lines
        if isinstance(statement.test, ast.Constant) and statement.test.value is True:
            return
        raise _NotSimple
    # f(1) == f(2) has no expected value outside of the program
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
        # either side may be the call; the other must be a value that is known without the program
        for one, other in ((test.left, test.comparators[0]), (test.comparators[0], test.left)):
            if one is call:
                expected = _literal(other)
                yield CallCase(
                    entry=entries[call.func.id], positional=positional, named=named, expected=expected, strict=True
                )
                return
    raise _NotSimple


def _literal(node: ast.expr) -> Any:
    """Return the value of an expression of literals and safe functions."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        pass
    expression = ast.Expression(node)
    _check_safe(expression)
    # evaluated in the judge itself, so only after every node was found harmless
    names = {"__builtins__": {}, **_SAFE_CALLS, "math": SimpleNamespace(**_SAFE_MATHS)}
    try:
        value = eval(compile(ast.fix_missing_locations(expression), "<literal>", "eval"), names)
        encode(value, refuse_rich)
    except Exception as error:
        raise _NotSimple from error
    return value


def is_plain(source: str) -> bool:
    """Return whether an expression holds nothing but literals, operators and calls of harmless built-ins."""
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


BESIDE = ("checker", "time_limit", "memory_limit_mb", "float_tolerance", "in_place", "interactive")
"""Fields that are read next to ``tests`` as well as inside."""
_LEAST_MEMORY_MB = 16
_INTERACTIVE = ("interactive", "interactor", "is_interactive")
_PRELUDES = ("import_prefix", "prelude")
_FORMS = (("inputs", "inputs_kw", "outputs"), ("test_code", "code"), ("assert_case",))
"""Fields of each form of tests."""
_FIELDS = (*BESIDE, *_INTERACTIVE[1:], *sum(_FORMS, ()), "fn_name", "entry_point", *_PRELUDES, "compare")


def parse_suite(tests: Any, extra: Mapping[str, Any] | None = None) -> Suite:
    """Return the typed tests of a problem.

    Args:
        tests: what `tests_object` takes.
        extra: other place of ``checker``, ``time_limit``, ``memory_limit_mb`` and ``float_tolerance``.

    Raises:
        SuiteError: no tests, an interactive problem, or a malformed field.
    """
    tests = tests_object(tests)
    # a field inside `tests` overrides the same field next to it
    merged: dict[str, Any] = {**(extra or {}), **tests}
    for name in _INTERACTIVE:
        if merged.get(name):
            raise SuiteError(f"field {name!r}: interactive problems are not supported; leave this problem out")
    check_names(tests, _FIELDS, inside="tests.", cutoff=0.85)
    given = [[name for name in form if tests.get(name) not in (None, "", [])] for form in _FORMS]
    if len(forms := [names[0] for names in given if names]) > 1:
        raise SuiteError(f"field 'tests' holds two forms of tests, {forms[0]!r} and {forms[1]!r}; remove one of them")
    cases, wrapped = _cases(merged)
    if not cases:
        raise SuiteError(
            f"field {forms[0]!r} holds no assertion that calls the program; write one such as 'assert f(1) == 2'"
            if forms
            else "field 'tests' holds no test; a problem without tests cannot be judged"
        )
    if not merged.get("checker") and any(isinstance(case, StdinCase) and case.output is None for case in cases):
        raise SuiteError("field 'outputs' holds null; without a checker each test needs the output that is expected")
    tolerance, in_place = _comparison(merged, cases)
    memory = _positive(merged, "memory_limit_mb")
    if memory is not None and memory < _LEAST_MEMORY_MB:
        raise SuiteError(f"field 'memory_limit_mb' must be at least {_LEAST_MEMORY_MB}, got {memory:g}")
    return Suite(
        cases=tuple(cases),
        prelude=next(filter(None, (_text(merged, name) for name in _PRELUDES)), None),
        checker=_text(merged, "checker"),
        float_tolerance=tolerance,
        in_place=in_place,
        wrapped=wrapped,
        time_limit=_positive(merged, "time_limit"),
        memory_limit_mb=None if memory is None else int(memory),
    )


def check_names(given: Collection[str], known: Sequence[str], *, inside: str = "", cutoff: float = 0.9) -> None:
    """Refuse a name that is almost a known one which is not given.

    Other unknown names are accepted: they are the user's own, and public data sets have further ones.

    Args:
        inside: what the message puts before the name.
        cutoff: least similarity, from 0 to 1 (`difflib`).

    Raises:
        SuiteError: there is such a name.
    """
    missing = [name for name in known if name not in given]
    for name in (one for one in given if one not in known):
        if near := difflib.get_close_matches(str(name), missing, n=1, cutoff=cutoff):
            raise SuiteError(f"unknown field {f'{inside}{name}'!r}; did you mean {near[0]!r}?")


def tests_object(tests: Any) -> Mapping[str, Any]:
    """Return the ``tests`` of a problem as an object without its null fields.

    Args:
        tests: the object, a list of assertions or one assertion, or their text in JSON or Python.

    Raises:
        SuiteError: it is none of these.
    """
    if isinstance(tests, str):
        tests = [tests] if is_assertion(tests) else _read(tests)
    if isinstance(tests, list | tuple):
        assertions = [is_assertion(one) for one in tests]
        # else one program, whose imports come first
        mixed = any(assertions) and not all(assertions) and all(isinstance(one, str) for one in tests)
        tests = {"test_code": "\n".join(tests)} if mixed else {"assert_case": list(tests)}
    if not isinstance(tests, Mapping):
        form = '{"inputs": [...], "outputs": [...]}'
        raise SuiteError(f"field 'tests' must be an object, {form}, or assertions, got {tests!r:.60}")
    return {field: value for field, value in tests.items() if value is not None}


def is_assertion(text: Any) -> bool:
    """Return whether a text begins with an assertion."""
    return isinstance(text, str) and text.lstrip().startswith("assert ")


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            return ast.literal_eval(text)  # parquet files have Python's repr, too
        raise SuiteError(f"field 'tests' is text but not JSON: {error}") from error


def text_of_tests(tests: Mapping[str, Any] | Sequence[str]) -> str:
    """Return tests as the JSON text that a reference holds.

    Raises:
        SuiteError: JSON would change an argument of a function.
        TypeError: JSON cannot hold a value.
    """
    fields: Mapping[str, Any] = tests if isinstance(tests, Mapping) else {}
    for field in ("inputs", "inputs_kw"):
        for place, given in enumerate(fields.get(field) or ()):
            if isinstance(given, Mapping):
                arguments = given.values()
            else:
                arguments = given if isinstance(given, list | tuple) else (given,)
            for argument in arguments:
                if not _is_json(argument):
                    raise SuiteError(
                        f"field {field!r}, test {place}: JSON would change the argument {argument!r:.60} (tuples "
                        "become lists, keys texts); write assert_case = ['assert f((1, 2)) == 3', ...] instead"
                    )
    return json.dumps(tests)


def _is_json(value: Any) -> bool:
    """Return whether JSON keeps a value: it has no tuples, and no keys but texts."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_json(one) for key, one in value.items())
    return all(map(_is_json, value)) if isinstance(value, list) else not isinstance(value, tuple)


def _cases(tests: Mapping[str, Any]) -> tuple[list[Case], bool]:
    if "assert_case" in tests:
        given = tests["assert_case"]
        texts: list[Any] = [given] if isinstance(given, str) else given
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise SuiteError("field 'assert_case' must be a list of assertions")
        entry = _text(tests, "entry_point")
        return [case for text in texts for case in _code_cases(text, entry)], False
    code = _text(tests, "test_code") or _text(tests, "code")
    if code is not None:
        return list(_code_cases(code, _text(tests, "entry_point"))), False
    if "inputs" not in tests and "inputs_kw" not in tests:
        raise SuiteError("field 'tests' has none of inputs, test_code, assert_case")
    if (name := _text(tests, "fn_name")) is not None:
        return _call_cases(tests, name)
    inputs = _list(tests, "inputs")
    outputs = _outputs(tests, len(inputs))
    return [
        StdinCase(input=_joined(given, "inputs"), output=None if wanted is None else _joined(wanted, "outputs"))
        for given, wanted in zip(inputs, outputs, strict=True)
    ], False


def _joined(value: Any, field: str) -> str:
    """Return text; a list of lines (APPS) is joined."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise SuiteError(f"field {field!r} must hold texts, got {type(value).__name__}")
    return value


def _outputs(tests: Mapping[str, Any], count: int) -> list[Any]:
    # a checker may need only the input
    if "outputs" not in tests and tests.get("checker"):
        return [None] * count
    outputs = _list(tests, "outputs")
    if len(outputs) != count:
        raise SuiteError(f"fields 'inputs' and 'outputs' differ in length: {count} and {len(outputs)}")
    return outputs


def _call_cases(tests: Mapping[str, Any], name: str) -> tuple[list[Case], bool]:
    inputs = _list(tests, "inputs_kw" if "inputs_kw" in tests else "inputs")
    outputs = _outputs(tests, len(inputs))
    cases: list[Case] = []
    for given, wanted in zip(inputs, outputs, strict=True):
        if isinstance(given, str):  # LiveCodeBench: an argument a line, as JSON
            positional, named = [_json(line, "inputs") for line in given.split("\n") if line.strip()], {}
            wanted = _json(wanted, "outputs") if isinstance(wanted, str) else wanted
        elif isinstance(given, Mapping):
            positional, named = [], dict(given)
        else:
            positional, named = list(given) if isinstance(given, list) else [given], {}
        cases.append(CallCase(entry=name, positional=positional, named=named, expected=wanted))
    # lists of one everywhere may be wraps or results, so the judge accepts both readings
    wrapped = bool(outputs) and all(isinstance(item, list) and len(item) == 1 for item in outputs)
    return cases, wrapped


def _json(text: str, field: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        try:
            # not JSON: some sets write arguments as Python does (True, single quotes)
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
            raise SuiteError(f"field {field!r}: {text[:60]!r} is no JSON value") from error


def _code_cases(code: str, entry: str | None) -> Sequence[Case]:
    """Test code as calls, or as one case for a test process."""
    try:
        tree = parse_trusted(code.strip("\n") + "\n")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SuiteError(f"the test code does not parse: {error}") from error
    wanted = wanted_names(tree, entry)
    defines = any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body)
    calls = any(
        isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "check" for n in ast.walk(tree)
    )
    check = entry if defines and not calls else None
    if defines and not calls and entry is None:
        raise SuiteError("the test code defines check() and does not call it, and there is no field 'entry_point'")
    parsed = _parse_calls(tree, wanted, check)
    if parsed is None:
        return [AssertCase(code=code, entry=entry, wanted=tuple(wanted), check=check)]
    return parsed


def _comparison(tests: Mapping[str, Any], cases: Sequence[Case]) -> tuple[float | None, int | None]:
    """Return ``float_tolerance`` and ``in_place``, also from the form ``compare: {kind, ...}``."""
    fields = {name: tests.get(name) for name in ("float_tolerance", "in_place")}
    compare = tests.get("compare")
    if isinstance(compare, Mapping):
        if compare.get("kind") == "float" and fields["float_tolerance"] is None:
            fields["float_tolerance"] = compare.get("tol", compare.get("tolerance"))
        if compare.get("kind") == "inplace" and fields["in_place"] is None:
            fields["in_place"] = compare.get("arg", 0)
    valid = "a finite number of at least 0"
    tolerance = _given(fields, "float_tolerance", lambda v: _is_number(v) and 0 <= v < math.inf, valid)
    counts = [len(case.positional) + len(case.named) for case in cases if isinstance(case, CallCase)]
    valid = "the index of an argument that every test has, counted from 0"
    return tolerance, _given(
        fields, "in_place", lambda v: type(v) is int and 0 <= v < min(counts, default=v + 1), valid
    )


def _given(tests: Mapping[str, Any], name: str, fits: Callable[[Any], bool], what: str) -> Any:
    """Return a field, None where it is missing or blank."""
    value = tests.get(name)
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if not fits(value):
        raise SuiteError(f"field {name!r} must be {what}, got {value!r:.60}")
    return value


def _text(tests: Mapping[str, Any], name: str) -> str | None:
    return _given(tests, name, lambda value: isinstance(value, str), "text")


def _positive(tests: Mapping[str, Any], name: str) -> float | None:
    return _given(tests, name, lambda value: _is_number(value) and value > 0, "a positive number")


def _list(tests: Mapping[str, Any], name: str) -> list[Any]:
    value = tests.get(name)
    if not isinstance(value, list):
        raise SuiteError(f"field {name!r} must be a list, got {type(value).__name__}")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
