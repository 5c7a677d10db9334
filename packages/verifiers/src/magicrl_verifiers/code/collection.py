"""Collects what pytest and unittest would run of test code, runs it, and refuses to judge if any of it did not run.

Test code is compiled so that its assertions are counted and so that every function whose name begins with ``test``
reports its definition and its start. One that was defined and never started makes the verdict "not judged", whatever
the reason: a class or name that nothing collects, a decorator that does not call it, a second function of its name.
"""

from __future__ import annotations

import ast
import inspect
import sys
import types
import unittest
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from magicrl_verifiers.code import pytest_forms
from magicrl_verifiers.code.remote import Unsupported

_COUNT, _DEFINED, _STARTED, _REFUSED = "__counted__", "__defined__", "__started__", "__refused__"
SAME, CLASS, ASSIGN = "__same__", "__class_of__", "__assign__"
"""Names under which `testrun` offers ``is``, ``type(x)`` and the assignment of an attribute."""
_ASSERTING = ("assert", "raises", "warns", "fail")
_UNSEEN = ("assertLogs", "assertNoLogs", "assertWarns", "assertWarnsRegex")
"""Assertions about the interpreter in which they run; the program has its own."""


def compile_tests(source: bytes) -> types.CodeType:
    """Compile test code with its assertions and tests counted, and with what two processes do not share replaced."""
    tree = Counting().visit(ast.parse(source, "tests"))
    return compile(ast.fix_missing_locations(tree), "tests", "exec", dont_inherit=True)


class Counting(ast.NodeTransformer):
    """Counts ``assert``, calls named so, what guards a ``raise`` or follows one, and functions that are tests."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        self.generic_visit(node)
        node.test = _call(_COUNT, node.test)
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        # `if f(1) != 2: raise ...` is an assertion in other words
        if any(isinstance(statement, ast.Raise) for statement in (*node.body, *node.orelse)):
            node.test = _call(_COUNT, node.test)
        return node

    def visit_Try(self, node: ast.Try) -> ast.AST:
        """``try: f(-1); assert False`` expects to come to its handler."""
        self.generic_visit(node)
        if any(isinstance(statement, ast.Assert | ast.Raise) for statement in (*node.body, *node.orelse)):
            for handler in node.handlers:
                handler.body.insert(0, _statement(handler.body[0], _COUNT, ast.Constant(None)))
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name.startswith(_ASSERTING):
            node.func = _call(_COUNT, node.func)
        elif isinstance(node.func, ast.Name) and name == "type" and len(node.args) == 1 and not node.keywords:
            return _call(CLASS, node.args[0])
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        self.generic_visit(node)
        if node.name.startswith("test") or node.name.endswith("_test"):
            # innermost, so that the function itself is registered and not what a decorator makes of it
            node.decorator_list.append(ast.copy_location(ast.Name(_DEFINED, ast.Load()), node))
            node.body.insert(ast.get_docstring(node) is not None, _statement(node.body[0], _STARTED))
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        (operator, *more), (right, *_) = node.ops, node.comparators
        constant = any(
            isinstance(side, ast.Constant) and not isinstance(side.value, str) for side in (node.left, right)
        )
        if more or constant or not isinstance(operator, ast.Is | ast.IsNot):
            return node
        same = _call(SAME, node.left, right)
        return same if isinstance(operator, ast.Is) else ast.copy_location(ast.UnaryOp(ast.Not(), same), node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        return _call(CLASS, node.value) if node.attr == "__class__" and isinstance(node.ctx, ast.Load) else node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        if len(node.targets) != 1 or not isinstance(target := node.targets[0], ast.Attribute):
            return node
        # of `self.x = 1` it is known that it sets nothing of a module
        if isinstance(target.value, ast.Name) and target.value.id in ("self", "cls"):
            return node
        # a name in a class is mangled by the compiler, which a text is not
        if target.attr.startswith("__") and not target.attr.endswith("__"):
            return node
        return _statement(node, ASSIGN, target.value, ast.Constant(target.attr), node.value)

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> Any:
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        if "doctest" not in names:
            return node
        return [_statement(node, _REFUSED, ast.Constant("doctests are not run")), node]

    visit_ImportFrom = visit_Import


def _call(name: str, *given: ast.expr) -> ast.expr:
    return ast.copy_location(ast.Call(ast.Name(name, ast.Load()), list(given), []), given[0])


def _statement(where: ast.stmt, name: str, *given: ast.expr) -> ast.stmt:
    return ast.copy_location(ast.Expr(ast.Call(ast.Name(name, ast.Load()), list(given), [])), where)


_caller: Callable[[int], types.FrameType] = sys._getframe  # pyright: ignore[reportPrivateUsage]


class Ledger:
    """The tests that test code defines, those that started, and the assertions that were executed.

    Args:
        used: how often the program has been used so far.
        missed: whether test code looked for a name that the program does not define.
    """

    def __init__(self, used: Callable[[], int], missed: Callable[[], bool]) -> None:
        self.used, self._missed = used, missed
        self.asserted = 0
        self.failed: BaseException | None = None
        """First failure that a result of unittest was given, whoever ran the test."""
        self._defined: dict[types.CodeType, Any] = {}
        self._settled: set[types.CodeType] = set()
        """Tests that started, or that the test code itself leaves out."""
        self._independent = True

    def names(self) -> dict[str, Any]:
        """The functions that compiled test code calls."""
        return {_COUNT: self._count, _DEFINED: self._define, _STARTED: self._start, _REFUSED: refuse}

    def _count(self, value: Any) -> Any:
        self.asserted += 1
        return value

    def _define(self, function: Any) -> Any:
        self._defined[function.__code__] = function
        return function

    def _start(self) -> None:
        self._settled.add(_caller(1).f_code)

    def loaded(self) -> None:
        """Note that the module of the tests has run; conditions of skips are known now."""
        self._independent = self.used() == 0 and not self._missed()

    def leave_out(self, test: Any) -> None:
        """Accept that the test code skips a test by a mark or decorator, unless the program may have decided that."""
        if not self._independent:
            raise Unsupported("a test is skipped after the test code looked at the program")
        if (code := getattr(inspect.unwrap(test), "__code__", None)) is not None:
            self._settled.add(code)

    def skipped_inside(self, used_before: int) -> None:
        """Accept that a test skips itself, unless it has used the program by then."""
        if self.used() != used_before:
            raise Unsupported("a test skips itself after it has used the program")

    def excuse(self, kind: type) -> None:
        """Accept that the tests of a class with ``__test__ = False`` do not run."""
        self._settled.update(one.__code__ for one in vars(kind).values() if isinstance(one, types.FunctionType))

    def close(self) -> None:
        """Refuse to judge if a test that was defined did not start."""
        for code, function in self._defined.items():
            if code not in self._settled and getattr(function, "__test__", True):
                raise Unsupported(f"{function.__qualname__} was defined as a test and did not run")


def refuse(reason: str) -> NoReturn:
    """Raise `Unsupported`."""
    raise Unsupported(reason)


def run(names: Mapping[str, Any], ledger: Ledger) -> BaseException | None:
    """Run the tests that a module defines and leaves to its harness; return the first failure."""
    for name in names:
        if name == "pytest_plugins" or (name.startswith("pytest_") and isinstance(names[name], types.FunctionType)):
            raise Unsupported(f"{name}: hooks and plugins of pytest do not run")
    if ledger.failed is None:
        _run_unittest(names, ledger)
    if ledger.failed is None:
        pytest_forms.run(names, ledger)
        ledger.close()
    return ledger.failed


def _run_unittest(names: Mapping[str, Any], ledger: Ledger) -> None:
    loader = unittest.TestLoader()
    suite: Any = unittest.TestSuite()
    for kind in dict.fromkeys(_cases(list(names.values()), ledger)):
        pytest_forms.refuse_marks(kind, names)
        suite.addTests(loader.loadTestsFromTestCase(kind))
    if callable(chosen := names.get("load_tests")):
        suite = chosen(loader, suite, None)
    if suite.countTestCases() == 0:
        return
    module = [names.get(name) for name in ("setup_module", "teardown_module")]
    with pytest_forms.around(*module):
        suite.run(unittest.TestResult())


def _cases(found: list[Any], ledger: Ledger) -> Iterator[type[unittest.TestCase]]:
    """Test cases of a module, and those in its classes, which pytest finds."""
    for kind in found:
        if not isinstance(kind, type):
            continue
        if not getattr(kind, "__test__", True):
            ledger.excuse(kind)
        elif issubclass(kind, unittest.TestCase):
            yield kind
        elif kind.__name__.startswith("Test"):
            yield from _cases(list(vars(kind).values()), ledger)


def _unseen(*_: Any, **__: Any) -> NoReturn:
    refuse("log records and warnings stay in the program's process")


def watch_unittest(ledger: Ledger, same: Callable[[Any, Any], bool]) -> None:
    """Record every failure and skip that a result of unittest is given, also of runs that the test code starts.

    Args:
        ledger: where they are recorded.
        same: decides ``assertIs``.
    """
    result, case = unittest.TestResult, unittest.TestCase
    began: dict[Any, int] = {}

    def record(name: str) -> None:
        reported: Callable[..., Any] = getattr(result, name)

        def report(self: Any, test: Any, *given: Any) -> None:
            reported(self, test, *given)
            if name == "startTest":
                began[test] = ledger.used()
            elif name == "addSkip":
                _skipped(test)
            elif name == "addUnexpectedSuccess":
                ledger.failed = ledger.failed or AssertionError("an expected failure did not come")
            elif given[-1] is not None:  # of a subtest that held
                ledger.failed = ledger.failed or given[-1][1]
            if ledger.failed is not None:
                self.stop()

        setattr(result, name, report)

    def _skipped(test: Any) -> None:
        method = getattr(test, getattr(test, "_testMethodName", ""), None)
        if any(getattr(one, "__unittest_skip__", False) for one in (type(test), method)):
            ledger.leave_out(method)
        else:
            ledger.skipped_inside(began.get(test, -1))

    for name in ("startTest", "addError", "addFailure", "addSubTest", "addSkip", "addUnexpectedSuccess"):
        record(name)
    for name in _UNSEEN:
        setattr(case, name, _unseen)

    def call_method(self: Any, method: Callable[[], Any]) -> None:
        pytest_forms.refuse_result(method())

    def assert_is(self: Any, first: Any, second: Any, msg: Any = None) -> None:
        if not same(first, second):
            self.fail(msg or f"{first!r} is not {second!r}")

    def assert_is_not(self: Any, first: Any, second: Any, msg: Any = None) -> None:
        if same(first, second):
            self.fail(msg or f"unexpectedly identical: {first!r}")

    case._callTestMethod, case.assertIs, case.assertIsNot = call_method, assert_is, assert_is_not  # pyright: ignore
