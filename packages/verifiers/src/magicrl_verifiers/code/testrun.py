"""Runs test code in a separate process: plain assertions, ``check(candidate)``, unittest and pytest forms.

Test code is compiled so that executed assertions are counted and so that every function whose name begins with ``test``
reports its definition and its start. A test that was defined and never started makes the verdict "not judged", whatever
the reason. Uses of the program are counted where they cross the border between the two processes.

Who is to blame for an error follows from where it was raised and from what the program sent: a program must not be
able to make itself "not judged".
"""

from __future__ import annotations

import ast
import builtins
import dis
import errno
import functools
import importlib
import inspect
import marshal
import operator
import random
import sys
import threading
import types
import unittest
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn
from unittest import mock

from magicrl_verifiers.code import pytest_forms
from magicrl_verifiers.code.border import (
    NOT_MIRRORED,
    PROGRAM_MODULES,
    Client,
    Guard,
    ProgramModule,
    ProgramObject,
    caller,
    of_program,
    refuse_introspection,
    same_object,
)
from magicrl_verifiers.code.pytest_forms import Failed
from magicrl_verifiers.code.remote import MUTABLE, Unsupported
from magicrl_verifiers.code.values import PLAIN_TYPES

_COUNT, _DEFINED, _STARTED, _REFUSED = "__counted__", "__defined__", "__started__", "__refused__"
_ASSERTED, _PAIRED, _DROPPED = "__asserted__", "__paired__", "__dropped__"
_MESSAGE, _FALSE_FAILS = "__message__", "__false_fails__"
_NOT_IN_LAMBDA = (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)
_SAME, _CLASS, _ASSIGN = "__same__", "__class_of__", "__assign__"
"""Names of the functions that replace ``is``, ``type(x)`` and the assignment of an attribute in test code."""
_ASSERTING = ("assert", "raises", "warns", "fail")
_EXPECTING = ("raises", "assertRaises")
_UNSEEN = ("assertLogs", "assertNoLogs", "assertWarns", "assertWarnsRegex")
"""Assertions about the interpreter that runs them. The program has another interpreter."""
_FORBIDDEN = {errno.EPERM, errno.EACCES, errno.EROFS}


def compile_tests(source: bytes) -> types.CodeType:
    """Compile test code with its assertions and tests counted, and with what two processes do not share replaced."""
    tree = Counting().visit(ast.parse(source, "tests"))
    return compile(ast.fix_missing_locations(tree), "tests", "exec", dont_inherit=True)


class Counting(ast.NodeTransformer):
    """Counts ``assert``, calls named so, what guards a ``raise`` or follows one, and functions that are tests."""

    def __init__(self) -> None:
        self._raising = 0
        """Number of blocks around the node that expect an exception, as ``with raises(...)`` does."""

    def visit_With(self, node: ast.With | ast.AsyncWith) -> ast.AST:
        expected = any(
            isinstance(item.context_expr, ast.Call) and _called_name(item.context_expr).startswith(_EXPECTING)
            for item in node.items
        )
        self._raising += expected
        self.generic_visit(node)
        self._raising -= expected
        return node

    visit_AsyncWith = visit_With

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        self.generic_visit(node)
        # a tuple is always true: `assert (f(1) == 2, "message")`
        paired = isinstance(node.test, ast.Tuple) and node.test.elts
        node.test = _call(_PAIRED if paired else _COUNT if self._raising else _ASSERTED, node.test)
        # a mistake in the message shows only where the assertion fails, and must not excuse the program
        if node.msg is not None and not any(isinstance(one, _NOT_IN_LAMBDA) for one in ast.walk(node.msg)):
            none = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
            node.msg = _call(_MESSAGE, ast.copy_location(ast.Lambda(none, node.msg), node.msg))
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        # `if f(1) != 2: raise ...` is an assertion in other words
        if any(isinstance(statement, ast.Raise) for statement in (*node.body, *node.orelse)):
            node.test = _call(_COUNT, node.test)
        return node

    def visit_Try(self, node: ast.Try) -> ast.AST:
        """Count handlers, since ``try: f(-1); assert False`` expects to come to its handler."""
        self.generic_visit(node)
        if any(isinstance(statement, ast.Assert | ast.Raise) for statement in (*node.body, *node.orelse)):
            if any(isinstance(one, ast.Return | ast.Break | ast.Continue) for one in node.finalbody):
                node.finalbody.insert(0, _statement(node.finalbody[0], _DROPPED))
            for handler in node.handlers:
                first = handler.body[0]
                # a handler that does nothing, or only prints, makes a failed assertion pass
                idle = all(
                    isinstance(one, ast.Pass | ast.Continue)
                    or (
                        isinstance(one, ast.Expr)
                        and isinstance(one.value, ast.Call)
                        and _called_name(one.value) == "print"
                    )
                    for one in handler.body
                )
                handler.body.insert(0, _statement(first, _COUNT, ast.Constant(None)))
                if idle and not self._raising:
                    handler.body.insert(0, _statement(first, _DROPPED))
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = _called_name(node)
        if name.startswith(_ASSERTING):
            node.func = _call(_COUNT, node.func)
        elif isinstance(node.func, ast.Name) and name == "type" and len(node.args) == 1 and not node.keywords:
            return _call(_CLASS, node.args[0])
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        self.generic_visit(node)
        if node.name.startswith("test") or node.name.endswith("_test"):
            # innermost, so that the function itself is registered and not what a decorator makes of it
            node.decorator_list.append(ast.copy_location(ast.Name(_DEFINED, ast.Load()), node))
            returned = [one.value for one in _own_nodes(node) if isinstance(one, ast.Return) and one.value is not None]
            if returned and all(isinstance(one, ast.Constant) and one.value is False for one in returned):
                node.decorator_list.append(ast.copy_location(ast.Name(_FALSE_FAILS, ast.Load()), node))
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
        same = _call(_SAME, node.left, right)
        return same if isinstance(operator, ast.Is) else ast.copy_location(ast.UnaryOp(ast.Not(), same), node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        return _call(_CLASS, node.value) if node.attr == "__class__" and isinstance(node.ctx, ast.Load) else node

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
        return _statement(node, _ASSIGN, target.value, ast.Constant(target.attr), node.value)

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> Any:
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        if "doctest" not in names:
            return node
        return [_statement(node, _REFUSED, ast.Constant("doctests are not run")), node]

    visit_ImportFrom = visit_Import


def _called_name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _call(name: str, *given: ast.expr) -> ast.expr:
    return ast.copy_location(ast.Call(ast.Name(name, ast.Load()), list(given), []), given[0])


def _statement(where: ast.stmt, name: str, *given: ast.expr) -> ast.stmt:
    return ast.copy_location(ast.Expr(ast.Call(ast.Name(name, ast.Load()), list(given), [])), where)


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of functions inside it."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield node
            yield from _own_nodes(node)


def _message(make: Callable[[], Any]) -> Any:
    """Return the message of a failed assertion, or an empty text where the message itself fails."""
    before = Unsupported.first
    try:
        return str(make())
    except Exception:  # noqa: BLE001 - the assertion has failed whatever the message says
        Unsupported.first = before
        return ""


def _false_fails(function: Any) -> Any:
    function.false_fails = True
    return function


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
        """First failure that was reported to a result of unittest."""
        self._defined: dict[types.CodeType, Any] = {}
        self._settled: set[types.CodeType] = set()
        """Tests that started, or that the test code itself leaves out."""
        self.independent = True
        """Whether the module of the tests ran without a look at the program."""
        self.conditional = False
        """Whether the condition of a skip held after test code looked at the program."""
        self.left_out = False
        self.dropped = False
        """Whether test code caught the failure of an assertion and passed."""
        self._last_failed = False

    def names(self) -> dict[str, Any]:
        """Return the functions that compiled test code calls."""
        return {
            _COUNT: self._count,
            _ASSERTED: self._assert,
            _DROPPED: self._drop,
            _PAIRED: self._paired,
            _DEFINED: self._define,
            _STARTED: self._start,
            _REFUSED: refuse,
            _MESSAGE: _message,
            _FALSE_FAILS: _false_fails,
        }

    def _count(self, value: Any) -> Any:
        self.asserted += 1
        return value

    def _assert(self, value: Any) -> bool:
        self.asserted += 1
        self._last_failed = True  # also if the truth of the value cannot be found out
        self._last_failed = not value
        return not self._last_failed

    def _paired(self, value: tuple[Any, ...]) -> bool:
        self.asserted += 1
        self.dropped = self.dropped or not value[0]
        return True

    def _drop(self) -> None:
        error = sys.exc_info()[1]
        self.dropped = self.dropped or (isinstance(error, AssertionError) and not of_program(error))

    def ended(self) -> None:
        """Note whether the test that ends now dropped the failure of its last assertion."""
        self.dropped = self.dropped or self._last_failed

    def _define(self, function: Any) -> Any:
        self._defined[function.__code__] = function
        return function

    def _start(self) -> None:
        self._settled.add(caller(1).f_code)
        self._last_failed = False

    def loaded(self) -> None:
        """Note that the module of the tests has run; conditions of skips are known now."""
        self.independent = self.used() == 0 and not self._missed()

    def leave_out(self, test: Any) -> None:
        """Accept that the test code skips a test by a mark or decorator, unless the program may have decided that."""
        self.left_out = True
        if not self.independent:
            if self.conditional:
                raise Failed("a test is skipped because of what the program is or does")
            raise Unsupported("a test is skipped after the test code looked at the program")
        if (code := getattr(inspect.unwrap(test), "__code__", None)) is not None:
            self._settled.add(code)

    def skipped_inside(self, used_before: int) -> None:
        """Accept that a test skips itself, unless it has used the program by then: the program must not decide that."""
        self.left_out = True
        if self.used() != used_before:
            raise Failed("a test skips itself after it has used the program")

    def note_condition(self, holds: Any) -> None:
        """Note that the condition of a skip was evaluated."""
        self.conditional = self.conditional or bool(holds and (self.used() or self._missed()))

    def note_thread(self, ended: threading.ExceptHookArgs) -> None:
        """Record the error that ended a thread of the tests, which nothing else looks at."""
        self.failed = self.failed or ended.exc_value

    def excuse(self, kind: type) -> None:
        """Accept that the tests of a class with ``__test__ = False`` do not run."""
        self.left_out = True
        self._settled.update(one.__code__ for one in vars(kind).values() if isinstance(one, types.FunctionType))

    def close(self, code: types.CodeType) -> None:
        """Refuse to judge if a test that was defined in ``code`` did not start, and nothing in ``code`` calls it."""
        for part in _class_bodies(code):
            if part.co_name.startswith("test") and _STARTED in part.co_names and part not in self._defined:
                raise Unsupported(f"{part.co_name} was written down as a test and not defined")
        for test, function in self._defined.items():
            if test not in self._settled and getattr(function, "__test__", True):
                missing = f"{function.__qualname__} was defined as a test and did not run"
                called = self.used() and any(
                    one.opname.startswith("LOAD_") and one.argval == function.__name__
                    for part in _codes(code)
                    for one in dis.get_instructions(part)
                )
                raise Failed(missing) if called else Unsupported(missing)

    def nothing_done(self, code: types.CodeType) -> tuple[str, str] | None:
        """Return the outcome and the reason if tests that passed asserted nothing, or nothing that counts."""
        if self.dropped:
            return "broken", "the test code drops the failure of an assertion"
        if self.used() and self.asserted:
            return None
        what = "asserted nothing" if self.used() else "never called the program"
        # the program lacks a name, or gave no items to a loop: other programs would have been tested
        skipped = (
            self.used()
            and not self.left_out
            and any({_COUNT, _ASSERTED}.intersection(part.co_names) for part in _codes(code))
        )
        return ("wrong" if self._missed() or skipped else "broken"), f"the test code {what}"


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object and all inside it."""
    yield code
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from _codes(one)


def _class_bodies(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the functions of a module and of its classes, without those inside functions."""
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            if one.co_flags & inspect.CO_OPTIMIZED:
                yield one
            else:
                yield from _class_bodies(one)


def refuse(reason: str) -> NoReturn:
    """Raise `Unsupported`."""
    raise Unsupported(reason)


def _collect(names: Mapping[str, Any], ledger: Ledger, code: types.CodeType) -> BaseException | None:
    """Run the tests that a module defines and leaves to its harness; return the first failure."""
    for name in names:
        if name == "pytest_plugins" or (name.startswith("pytest_") and isinstance(names[name], types.FunctionType)):
            raise Unsupported(f"{name}: hooks and plugins of pytest do not run")
    if ledger.failed is None:
        _run_unittest(names, ledger)
    if ledger.failed is None:
        pytest_forms.run_collected(names, ledger)
        ledger.close(code)
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
    """Yield the test cases of a module, and those in its classes, which pytest finds."""
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
                method = getattr(test, getattr(test, "_testMethodName", ""), None)
                if any(getattr(one, "__unittest_skip__", False) for one in (type(test), method)):
                    ledger.leave_out(method)
                elif test not in began:
                    raise Unsupported("a class is skipped by its own code")
                else:
                    ledger.skipped_inside(began[test])
            elif name == "addUnexpectedSuccess":
                ledger.failed = ledger.failed or AssertionError("an expected failure did not come")
            elif given[-1] is not None:  # of a subtest that held
                ledger.failed = ledger.failed or given[-1][1]
            if ledger.failed is not None:
                self.stop()

        setattr(result, name, report)

    def conditional(decorate: Callable[[Any, str], Any], skips: Callable[[Any], bool]) -> Callable[[Any, str], Any]:
        def call(condition: Any, reason: str) -> Any:
            ledger.note_condition(skips(condition))
            return decorate(condition, reason)

        return call

    unittest.skipIf = conditional(unittest.skipIf, bool)
    unittest.skipUnless = conditional(unittest.skipUnless, operator.not_)

    for name in ("startTest", "addError", "addFailure", "addSubTest", "addSkip", "addUnexpectedSuccess"):
        record(name)
    for name in _UNSEEN:
        setattr(case, name, _unseen)

    def call_method(self: Any, method: Callable[[], Any]) -> None:
        pytest_forms.refuse_result(method(), method)
        ledger.ended()

    def assert_is(self: Any, first: Any, second: Any, msg: Any = None) -> None:
        if not same(first, second):
            self.fail(msg or f"{first!r} is not {second!r}")

    def assert_is_not(self: Any, first: Any, second: Any, msg: Any = None) -> None:
        if same(first, second):
            self.fail(msg or f"unexpectedly identical: {first!r}")

    case._callTestMethod, case.assertIs, case.assertIsNot = call_method, assert_is, assert_is_not  # pyright: ignore


class TestNamespace(dict[str, Any]):
    """Globals of test code: its own names first, then built-ins, then the program's."""

    def __init__(self, client: Client, common: Mapping[str, Any]) -> None:
        super().__init__()
        self.client = client
        self._wanted: frozenset[str] = frozenset()
        self.ledger = Ledger(lambda: client.called, lambda: client.missed)
        self["__name__"] = "__main__"

        def class_of(value: Any) -> Any:
            if not isinstance(value, ProgramObject):
                return type(value)
            found = client.operate("type", value)
            # a program may claim that its object is an int
            return found if isinstance(found, ProgramObject) else ProgramObject

        def identity(value: Any) -> int:
            if isinstance(value, (ProgramObject, *MUTABLE)):
                raise Unsupported("id() of a value that may have crossed as a copy")
            return id(value)

        self["__builtins__"] = {
            **common,
            **vars(builtins),
            # what a border between two processes would change
            "id": identity,
            _CLASS: class_of,
            _SAME: functools.partial(same_object, client),
            _ASSIGN: client.assign,
            **self.ledger.names(),
        }

    def __missing__(self, name: str) -> Any:
        # built-ins are found behind the globals anyway; names such as __file__ are the program's only if wanted
        if name in self["__builtins__"] or (name.startswith("__") and name not in self._wanted):
            raise KeyError(name)
        if name in self.client.names:
            return self.client.lookup(name)
        if name in self._wanted:
            return ProgramObject(self.client, {"name": name}, name)
        raise KeyError(name)

    def bind(self, entry: str | None, wanted: list[str]) -> None:
        """Bind the names that the program has to define. The entry point is always the program's."""
        self._wanted = frozenset(wanted)
        for name in wanted:
            if name == entry or (name in self["__builtins__"] and name not in self):
                self[name] = ProgramObject(self.client, {"name": name}, name)


def run_tests(
    client: Client, codes: list[types.CodeType], details: Mapping[str, Any], common: Mapping[str, Any]
) -> dict[str, Any]:
    """Run test code to its end or its first failure.

    Args:
        codes: prelude, if any, and test code.
        details: ``entry`` and ``wanted`` (see `TestNamespace.bind`); ``check``: what to call ``check`` with, or None.
        common: names that are offered after the tests' own.

    Returns:
        ``said``: held, wrong (an assertion or something like it failed), program (its exception, or its end) or broken
        (the test code's fault); ``reason``.
    """
    client.stops = any(b"StopIteration" in marshal.dumps(code) for code in codes)
    namespace = TestNamespace(client, common)
    # test code imports the program under several names: all of them lead to the other process
    for name in PROGRAM_MODULES:
        sys.modules[name] = ProgramModule(client, name, namespace if name == "__main__" else {})
    sys.modules["pytest"] = pytest_forms.module()
    # the tests run when their module has run
    unittest.main = lambda *_, **__: types.SimpleNamespace(result=unittest.TestResult())  # pyright: ignore
    watch_unittest(namespace.ledger, functools.partial(same_object, client))
    refuse_introspection(namespace)
    _mirror(client)
    threading.excepthook = namespace.ledger.note_thread
    # it cannot be taken off again, so test code that is misled cannot either
    sys.addaudithook(Guard(namespace, client))
    error: BaseException | None = None
    try:
        for code in codes[:-1]:
            exec(code, namespace)
        # after the prelude, which may define the nodes that lists and trees arrive as
        client.greet(namespace)
        namespace.bind(details["entry"], details["wanted"])
        try:
            exec(codes[-1], namespace)
        except SystemExit as left:  # ``sys.exit(pytest.main())`` and the like
            if left.code or of_program(left):
                raise
        namespace.ledger.ended()
        namespace.ledger.loaded()
        if (check := details["check"]) is not None:  # the test code leaves this call to its harness
            candidate = namespace[check] if check.isidentifier() else ProgramObject(client, {"name": check})
            namespace["check"](candidate)
        own = {name: one for name, one in namespace.items() if type(one) is not ProgramObject}
        error = _collect(own, namespace.ledger, codes[-1])
    except BaseException as raised:  # noqa: BLE001 - the report says what it was
        error = raised
    said, reason = _judged(error, client)
    if said == "held":
        said, reason = namespace.ledger.nothing_done(codes[-1]) or (said, reason)
    return {"said": said, "reason": reason[:400]}


def _judged(error: BaseException | None, client: Client) -> tuple[str, str]:
    """Return whose fault an error is, and its words."""
    # first: whatever test code raised afterwards is a consequence
    if client.gone is not None:
        return "program", client.gone
    # also one that the test code caught: what should have run did not
    if Unsupported.first is not None:
        return "broken", Unsupported.first
    if error is None:
        return "held", ""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - a text that fails says nothing
        text = ""
    reason = f"{type(error).__name__}: {text}".rstrip(": ")
    if of_program(error) or (isinstance(error, ImportError) and error.name in PROGRAM_MODULES):
        return "program", reason
    # before the program was used, nothing but a missing name can be its fault
    if (client.called == 0 and not client.missed) or _own_fault(error, client):
        return "broken", reason
    return "wrong", reason


def _own_fault(error: BaseException, client: Client) -> bool:
    """Return whether test code raised this by its own mistake, and nothing that the program sent can have caused it."""
    if isinstance(error, NameError | ImportError | Unsupported):
        return True
    if isinstance(error, AttributeError):
        where: Any = error.obj
        if isinstance(where, type) and where in PLAIN_TYPES:
            return False
        own = isinstance(where, types.ModuleType | type | unittest.TestCase | types.FunctionType)
        return own and not client.has_lent(where)
    return isinstance(error, OSError) and error.errno in _FORBIDDEN and error.filename not in client.sent()


# --- what a border between two processes would change ---


def _mirror(client: Client) -> None:
    """Pass on to the program a ``patch`` of a module that both processes have, and a seed of ``random``."""
    attributes: Any = mock._patch  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    _around(
        attributes,
        lambda patcher: _replay(client, patcher, getattr(patcher.target, patcher.attribute)),
        lambda patcher: _replay(client, patcher),
    )
    seed = random.seed

    def seeded(*given: Any, **named: Any) -> None:
        seed(*given, **named)
        client.seed(*given, **named)

    random.seed = seeded


def _around(kind: Any, entered: Callable[[Any], None], left: Callable[[Any], None]) -> None:
    enter, leave = kind.__enter__, kind.__exit__

    def do_enter(patcher: Any) -> Any:
        found = enter(patcher)
        entered(patcher)
        return found

    def do_leave(patcher: Any, *error: Any) -> Any:
        left(patcher)
        return leave(patcher, *error)

    kind.__enter__, kind.__exit__ = do_enter, do_leave


def _replay(client: Client, patcher: Any, *value: Any) -> None:
    target = patcher.target
    shared = isinstance(target, types.ModuleType | type) and not isinstance(target, ProgramModule)
    if not shared or (target.__name__, patcher.attribute) in NOT_MIRRORED:
        return
    is_module = isinstance(target, types.ModuleType)
    module, path = (target.__name__, []) if is_module else (target.__module__, [target.__qualname__])
    # patches of the program's own module go through `ProgramModule.__setattr__`
    if module in PROGRAM_MODULES or (path and not hasattr(importlib.import_module(module), path[0])):
        return
    client.replace(module, path, patcher.attribute, *value)
