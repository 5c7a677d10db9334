"""Runs test code in a process of its own: plain assertions, ``check(candidate)``, unittest and pytest forms.

What is executed is counted: assertions where the code writes them, uses of the program where they cross the border.
Whose fault an error is follows from where it was raised. All of it happens where the program is not.
"""

from __future__ import annotations

import ast
import builtins
import errno
import importlib
import os
import sys
import types
import unittest
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

from magicrl.verifiers.code import pytest_forms
from magicrl.verifiers.code.assertions import is_plain
from magicrl.verifiers.code.remote import Client, ProgramModule, Remote, Unsupported, of_program

PROGRAM_MODULES = ("solution", "main", "submission", "program", "candidate", "your_module", "__main__")
"""Names under which test code imports the program."""
_COUNT = "__counted__"
_ASSERTING = ("assert", "raises", "warns", "fail")
_REFUSED = {errno.EPERM, errno.EACCES, errno.EROFS}
_UNSEEN = ("assertLogs", "assertNoLogs", "assertWarns", "assertWarnsRegex")
"""They look at the interpreter in which they run, and the program has its own."""
_SHARED_STREAMS = {"stdout", "stderr"}


def compile_tests(source: bytes) -> types.CodeType:
    """Test code with every assertion counted: ``assert``, calls named so, what guards a ``raise`` or follows one."""
    tree = _Counting().visit(ast.parse(source, "tests"))
    return compile(ast.fix_missing_locations(tree), "tests", "exec", dont_inherit=True)


class _Counting(ast.NodeTransformer):
    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        self.generic_visit(node)
        node.test = _counted(node.test)
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        if any(isinstance(statement, ast.Raise) for statement in (*node.body, *node.orelse)):
            node.test = _counted(node.test)
        return node

    def visit_Try(self, node: ast.Try) -> ast.AST:
        """``try: f(-1); assert False`` expects to come to its handler."""
        self.generic_visit(node)
        if any(isinstance(statement, ast.Assert | ast.Raise) for statement in (*node.body, *node.orelse)):
            for handler in node.handlers:
                handler.body.insert(0, ast.copy_location(ast.Expr(_counted(ast.Constant(None))), handler.body[0]))
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name.startswith(_ASSERTING):
            node.func = _counted(node.func)
        return node


def _counted(node: ast.expr) -> ast.expr:
    return ast.copy_location(ast.Call(ast.Name(_COUNT, ast.Load()), [node], []), node)


class TestNamespace(dict[str, Any]):
    """Globals of test code: its own names first, then built-ins, then the program's."""

    def __init__(self, client: Client, common: Mapping[str, Any]) -> None:
        super().__init__()
        self.client = client
        self._wanted: frozenset[str] = frozenset()
        self.asserted = 0
        self["__name__"] = "__main__"
        self["__builtins__"] = {**common, **vars(builtins), _COUNT: self._count}

    def _count(self, value: Any) -> Any:
        self.asserted += 1
        return value

    def __missing__(self, name: str) -> Any:
        if name in self["__builtins__"] or (name.startswith("__") and name not in self._wanted):
            raise KeyError(name)
        if name in self.client.names:
            return self.client.lookup(name)
        if name in self._wanted:
            return Remote(self.client, {"name": name}, name)
        raise KeyError(name)

    def bind(self, entry: str | None, wanted: list[str]) -> None:
        """What the program has to define; the entry point is the program's whatever else has its name."""
        self._wanted = frozenset(wanted)
        for name in wanted:
            if name == entry or (name in self["__builtins__"] and name not in self):
                self[name] = Remote(self.client, {"name": name}, name)


def run(
    client: Client,
    codes: list[types.CodeType],
    details: Mapping[str, Any],
    common: Mapping[str, Any],
) -> dict[str, Any]:
    """Run test code to its end or its first failure.

    Args:
        codes: prelude, if any, and test code.
        details: ``entry`` and ``wanted`` (see `TestNamespace.bind`); ``check``: what to call ``check`` with, or None.
        common: names that are offered after the tests' own.

    Returns:
        ``said``: held, wrong (an assertion or something like it failed), program (its exception, or its end), broken
        (the test code's fault); ``reason``; ``asserted`` and ``called``: how often.
    """
    namespace = TestNamespace(client, common)
    for name in PROGRAM_MODULES:
        sys.modules[name] = ProgramModule(client, name, namespace if name == "__main__" else {})
    sys.modules["pytest"] = pytest_forms.module()
    unittest.main = pytest_forms.main  # pyright: ignore[reportAttributeAccessIssue]
    for name in _UNSEEN:
        setattr(unittest.TestCase, name, _unseen)
    _mirror(client)
    sys.addaudithook(_Guard(namespace, client))
    error: BaseException | None = None
    try:
        for code in codes[:-1]:
            exec(code, namespace)
        client.greet(namespace)
        namespace.bind(details["entry"], details["wanted"])
        error = _module(codes[-1], namespace) or _forms(namespace, details["check"])
    except BaseException as raised:  # noqa: BLE001 - whatever it was is told
        error = raised
    said, reason = _judged(error, client)
    return {"said": said, "reason": reason[:400], "asserted": namespace.asserted, "called": client.called}


def _unseen(*_: Any, **__: Any) -> None:
    raise Unsupported("log records and warnings of the program are not seen by its tests")


def _module(code: types.CodeType, namespace: TestNamespace) -> BaseException | None:
    try:
        exec(code, namespace)
    except SystemExit as error:  # ``sys.exit(pytest.main())`` and the like
        return error if error.code or of_program(error) else None
    return None


def _forms(namespace: TestNamespace, check: str | None) -> BaseException | None:
    """Run what the test code defines and leaves to its harness; the first failure."""
    if check is not None:
        candidate = namespace[check] if check.isidentifier() else Remote(namespace.client, {"name": check})
        namespace["check"](candidate)
    suite, defined = unittest.TestSuite(), list(namespace.values())
    for kind in dict.fromkeys(kind for kind in defined if isinstance(kind, type)):
        if issubclass(kind, unittest.TestCase):
            suite.addTests(unittest.TestLoader().loadTestsFromTestCase(kind))
    result = _Result()
    if suite.countTestCases():
        suite.run(result)
    if result.first is None:
        pytest_forms.run(dict(namespace))
    return result.first


class _Result(unittest.TestResult):
    """Stops at the first failure and keeps what was raised."""

    first: BaseException | None = None

    def addError(self, test: Any, err: Any) -> None:
        self.first = self.first or err[1]
        self.stop()

    def addFailure(self, test: Any, err: Any) -> None:
        self.addError(test, err)

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self.addError(test, err)

    def addExpectedFailure(self, test: Any, err: Any) -> None:
        pass

    def addUnexpectedSuccess(self, test: Any) -> None:
        self.addError(test, (None, AssertionError("an expected failure did not come"), None))


def _judged(error: BaseException | None, client: Client) -> tuple[str, str]:
    """Whose fault an error is, and its words."""
    if client.gone is not None:
        return "program", client.gone
    if error is None:
        return "held", ""
    reason = f"{type(error).__name__}: {_text(error)}".rstrip(": ")
    if of_program(error) or (isinstance(error, ImportError) and error.name in PROGRAM_MODULES):
        return "program", reason
    if client.called == 0 or _own_fault(error):
        return "broken", reason
    return "wrong", reason


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a text that fails says nothing
        return ""


def _own_fault(error: BaseException) -> bool:
    """Whether test code that has used the program raised this by a mistake of its own."""
    if isinstance(error, NameError | ImportError | SyntaxError | Unsupported):
        return True
    if isinstance(error, AttributeError):
        return isinstance(error.obj, types.ModuleType | type | unittest.TestCase | types.FunctionType)
    return isinstance(error, OSError) and error.errno in _REFUSED


_caller: Callable[[int], types.FrameType] = sys._getframe  # pyright: ignore[reportPrivateUsage]


class _Guard:
    """Keeps test code from executing what the program wrote: text that it evaluates, objects that it unpickles."""

    def __init__(self, namespace: TestNamespace, client: Client) -> None:
        self._namespace = namespace
        self._client = client

    def __call__(self, event: str, given: tuple[Any, ...]) -> None:
        if event == "pickle.find_class" and given[1] not in _UNPICKLED.get(given[0], ()):
            raise Unsupported(f"the test code unpickles {given[0]}.{given[1]}")
        if event == "compile" and self._client.called and _caller(1).f_globals is self._namespace:
            source = given[0]
            text = source.decode("utf-8", "replace") if isinstance(source, bytes) else source
            if not isinstance(text, str) or not is_plain(text):
                raise Unsupported("the test code executes text that the program may have written")


_UNPICKLED: dict[str, tuple[str, ...]] = {
    "builtins": ("set", "frozenset", "bytearray", "complex", "range", "slice", "list", "dict", "tuple"),
    "collections": ("OrderedDict", "defaultdict", "Counter", "deque"),
    "datetime": ("date", "datetime", "time", "timedelta", "timezone"),
    "decimal": ("Decimal",),
    "fractions": ("Fraction",),
    "numpy": ("ndarray", "dtype"),
    "numpy.core.multiarray": ("_reconstruct", "scalar"),
    "numpy._core.multiarray": ("_reconstruct", "scalar"),
    "_codecs": ("encode",),
}

# --- what tests replace is replaced in the program's process too ----------------------------------------------------


def _mirror(client: Client) -> None:
    """``patch`` of a module that both processes have, and of ``os.environ``, reaches the program."""
    kind: Any = mock._patch  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    _around(
        kind,
        lambda patcher: _tell(client, patcher, getattr(patcher.target, patcher.attribute)),
        lambda patcher: _tell(client, patcher),
    )

    def environment(patcher: Any) -> None:
        if patcher.in_dict is os.environ:
            client.replace("os", [], "environ", dict(os.environ))

    def restored(patcher: Any) -> None:
        if patcher.in_dict is os.environ:
            client.replace("os", [], "environ")

    _around(mock._patch_dict, environment, restored)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


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


def _tell(client: Client, patcher: Any, *value: Any) -> None:
    target = patcher.target
    shared = isinstance(target, types.ModuleType | type) and not isinstance(target, ProgramModule)
    if not shared or (target is sys and patcher.attribute in _SHARED_STREAMS):
        return
    module, path = (
        (target.__name__, []) if isinstance(target, types.ModuleType) else (target.__module__, [target.__qualname__])
    )
    if module in PROGRAM_MODULES or (path and not hasattr(importlib.import_module(module), path[0])):
        return
    client.replace(module, path, patcher.attribute, *value)
