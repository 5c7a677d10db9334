"""The forms of pytest that test code uses, without pytest: a verdict must not depend on what is installed.

Functions and classes with fixtures and parameters; ``raises``, ``approx``, ``skip``, ``fail`` and marks.
Test code that needs what is not offered is not judged.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib
import inspect
import io
import itertools
import math
import os
import pathlib
import re
import tempfile
import types
import unittest
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

from magicrl_verifiers.code.remote import Unsupported, taken

_MARKS, _FIXTURE = "__pytest_marks__", "__pytest_fixture__"
_WIDE = {"class": "class", "module": "module", "package": "module", "session": "module"}
"""The scope whose end a fixture lasts to, by the scope that it states."""


class Skipped(BaseException):
    """A test that is left out."""


class Failed(BaseException):
    """``pytest.fail``, and what did not happen though it should. As in pytest, ``except Exception`` lets it pass."""


class _Offered:
    """Base of the objects that test code gets. Attributes that pytest's own have, and these lack, are not judged."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise Unsupported(f"{type(self).__name__.lstrip('_')}.{name} is not offered")


class ExceptionInfo(_Offered):
    """The exception that ``raises`` caught."""

    value: Any = None

    @property
    def type(self) -> Any:
        return type(self.value)

    @property
    def typename(self) -> str:
        return type(self.value).__name__

    def match(self, pattern: str) -> bool:
        if not re.search(pattern, str(self.value)):
            raise Failed(f"{str(self.value)!r} does not match {pattern!r}")
        return True


@contextlib.contextmanager
def _raising(expected: Any, match: str | None, check: Callable[[Any], Any] | None) -> Generator[ExceptionInfo]:
    info = ExceptionInfo()
    try:
        yield info
    except expected as error:
        info.value = error
        if match is not None:
            info.match(match)
        if check is not None and not check(error):
            raise Failed(f"{error!r} does not pass the check") from None
    else:
        raise Failed(f"did not raise {expected}")


def _raises(expected: Any, *call: Any, match: Any = None, check: Any = None, **named: Any) -> Any:
    caught = _raising(expected, match, check)
    if not call:
        if named:
            raise Unsupported(f"pytest.raises({', '.join(named)}=...) is not offered")
        return caught
    with caught as info:
        call[0](*call[1:], **named)
    return info


class approx:
    """Equal to numbers, and to sequences and mappings of them, within 1e-6 relative or 1e-12 absolute."""

    __hash__ = None  # pyright: ignore[reportAssignmentType]
    __array_ufunc__ = None
    __array_priority__ = 100

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None, nan_ok: bool = False) -> None:
        self.expected, self._rel, self._abs, self._nan_ok = expected, rel, abs, nan_ok

    def __repr__(self) -> str:
        return f"approx({self.expected!r})"

    def __eq__(self, found: object) -> bool:
        return self._same(found, self.expected)

    def _same(self, found: Any, wanted: Any) -> bool:
        # numpy's arrays and scalars; of the type, so that no attribute of the program's is read
        found, wanted = (one.tolist() if hasattr(type(one), "tolist") else one for one in (found, wanted))
        if isinstance(wanted, Mapping) and isinstance(found, Mapping):
            return found.keys() == wanted.keys() and all(self._same(found[key], wanted[key]) for key in wanted)
        if isinstance(wanted, Sequence) and not isinstance(wanted, str | bytes):
            return isinstance(found, Sequence) and len(found) == len(wanted) and all(map(self._same, found, wanted))
        # as in pytest: what is no number is compared exactly
        if isinstance(wanted, bool) or not isinstance(wanted, int | float | complex):
            return type(found) is not type(self) and bool(found == wanted)
        if not isinstance(found, int | float | complex):
            return hasattr(type(found), "as_tuple") and self._same(float(found), wanted)  # a Decimal
        if found == wanted:
            return True
        if found != found or wanted != wanted:
            return self._nan_ok and found != found and wanted != wanted
        if math.isinf(abs(wanted)) or math.isinf(abs(found)):
            return False
        # pytest's own defaults; a stated absolute tolerance switches the default relative one off
        absolute = 1e-12 if self._abs is None else self._abs
        relative = (1e-6 if self._abs is None else 0.0) if self._rel is None else self._rel
        return abs(found - wanted) <= max(absolute, relative * abs(wanted))


def _skip(reason: str = "", **_: Any) -> None:
    raise Skipped(reason)


def _fail(reason: str = "", **_: Any) -> None:
    raise Failed(reason)


def _import_or_skip(name: str, **_: Any) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        # pytest skips the test; a verdict must not depend on what is installed
        raise Unsupported(f"the tests need {name}, which is not installed here") from error


class _Param:
    def __init__(self, *given: Any, marks: Any = (), id: Any = None) -> None:
        self.given = given
        self.marks = _listed(marks)


class _Mark:
    """A mark: ``@mark``, ``@mark(...)`` or ``pytestmark = mark``."""

    def __init__(self, name: str, given: tuple[Any, ...] = (), named: Mapping[str, Any] | None = None) -> None:
        self.mark = (name, given, named or {})

    def __call__(self, *given: Any, **named: Any) -> Any:
        # `@mark` gets the function at once, `@mark(...)` its arguments first
        bare = self.mark[1:] == ((), {})
        if bare and not (len(given) == 1 and not named and callable(given[0])):
            return _Mark(self.mark[0], given, named)
        setattr(given[0], _MARKS, [*vars(given[0]).get(_MARKS, ()), self.mark])
        return given[0]


class _Marks:
    def __getattr__(self, name: str) -> Any:
        return _Mark(name)


def _fixture(function: Any = None, **settings: Any) -> Any:
    if function is None:
        return functools.partial(_fixture, **settings)
    setattr(function, _FIXTURE, settings)
    return function


def _main(*_: Any, **__: Any) -> int:
    """Do nothing: the tests run when their module has run."""
    return 0


def module() -> types.ModuleType:
    """Return the module that ``import pytest`` finds."""
    made = types.ModuleType("pytest")
    vars(made).update(
        raises=_raises, approx=approx, skip=_skip, fail=_fail, importorskip=_import_or_skip, param=_Param,
        mark=_Marks(), fixture=_fixture, main=_main, xfail=_skip, MonkeyPatch=MonkeyPatch, ExceptionInfo=ExceptionInfo,
    )  # fmt: skip

    def refuse(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Unsupported(f"pytest.{name} is not offered")

    made.__getattr__ = refuse  # pyright: ignore[reportAttributeAccessIssue]
    return made


class MonkeyPatch(_Offered):
    """Replacements that last for a test."""

    def __init__(self) -> None:
        self._patches: list[Any] = []
        self._folder: str | None = None

    def _start(self, patcher: Any) -> None:
        patcher.__enter__()
        self._patches.append(patcher)

    def chdir(self, path: Any) -> None:
        # only the first time, as in pytest: later the working directory may have been deleted
        if self._folder is None:
            self._folder = os.getcwd()
        os.chdir(path)

    def setattr(self, target: Any, name: Any, *value: Any, raising: bool = True) -> None:
        if isinstance(target, str):
            self._start(mock.patch(target, name, create=not raising))
        else:
            self._start(mock.patch.object(target, name, value[0], create=not raising))

    def setitem(self, target: Any, key: Any, value: Any) -> None:
        self._start(mock.patch.dict(target, {key: value}))

    def setenv(self, name: str, value: str, prepend: Any = None) -> None:
        more = f"{prepend}{os.environ[name]}" if prepend and name in os.environ else ""
        self.setitem(os.environ, name, f"{value}{more}")

    def delitem(self, target: Any, key: Any, raising: bool = True) -> None:
        if raising or key in target:
            kept = {name: value for name, value in target.items() if name != key}
            if len(kept) == len(target):
                raise KeyError(key)
            self._start(mock.patch.dict(target, kept, clear=True))

    def delenv(self, name: str, raising: bool = True) -> None:
        self.delitem(os.environ, name, raising)

    @classmethod
    @contextlib.contextmanager
    def context(cls) -> Generator[MonkeyPatch]:
        made = cls()
        try:
            yield made
        finally:
            made.undo()

    def undo(self) -> None:
        while self._patches:
            self._patches.pop().__exit__(None, None, None)
        if self._folder is not None:
            os.chdir(self._folder)
            self._folder = None


class _Read(NamedTuple):
    out: str
    err: str


class _Captured(_Offered):
    """``capsys``."""

    def __init__(self, *streams: io.StringIO) -> None:
        self._streams = streams

    def readouterr(self) -> Any:
        return _Read(*map(taken, self._streams))


class _Request(_Offered):
    """``request``; it has a ``param`` only where there is one, since fixtures look for that."""

    def __init__(self, test: _Test, stack: contextlib.ExitStack, **known: Any) -> None:
        self.__dict__.update(known, addfinalizer=stack.callback, getfixturevalue=test.value, function=test.function)
        self.instance, self.cls = test.instance, test.kind

    def __getattr__(self, name: str) -> Any:
        if name == "param":
            raise AttributeError(name)
        return super().__getattr__(name)


class _Scope(contextlib.ExitStack):
    """What ends the fixtures of a test, class or module, and their values in ``made``."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[Any, Any] = {}


_Fixtures = Mapping[str, Sequence[Any]]
"""Fixture functions by name, the outermost first: one of a class hides the module's, and may request it."""


@dataclasses.dataclass
class _Test:
    """One run of one test: its fixtures are made when they are requested and end with their scopes."""

    function: Any
    kind: type | None
    instance: Any
    fixtures: _Fixtures
    scopes: Mapping[str, _Scope]
    values: dict[str, Any]
    params: Mapping[str, Any]

    def arguments(self, function: Any, hidden: Mapping[str, int] | None = None, request: Any = None) -> dict[str, Any]:
        # `patch` hands its mocks over itself, as the first arguments
        patched = [p for p in getattr(function, "patchings", ()) if p.new is mock.DEFAULT and not p.attribute_name]
        names = list(inspect.signature(function).parameters.values())[len(patched) :]
        wanted = [p.name for p in names if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        hidden = hidden or {}
        return {
            name: request if request and name == "request" else self.value(name, hidden.get(name, 0)) for name in wanted
        }

    def value(self, name: str, hidden: int = 0) -> Any:
        """Return the value of a fixture or parameter; ``hidden``: how many fixtures of the name are passed over."""
        if name in self.values:
            return self.values[name]
        chain = self.fixtures.get(name, ())
        if len(chain) <= hidden:
            return self.values.setdefault(name, self._offered(name))
        function = chain[-1 - hidden]
        for scope in self.scopes.values():
            if function in scope.made:
                return scope.made[function]
        return self._make(name, function, hidden)

    def _make(self, name: str, function: Any, hidden: int) -> Any:
        # a parameter makes another value for each test, whatever the scope
        wide = None if name in self.params else _WIDE.get(getattr(function, _FIXTURE).get("scope"))
        scope = self.scopes.get(wide or "function", self.scopes["function"])
        bound = function.__get__(self.instance) if "self" in inspect.signature(function).parameters else function
        known = {"param": self.params[name]} if name in self.params else {}
        made = bound(**self.arguments(bound, {name: hidden + 1}, _Request(self, scope, **known)))
        if inspect.iscoroutine(made) or inspect.isasyncgen(made):
            raise Unsupported(f"fixture {name!r} is asynchronous")
        if inspect.isgenerator(made):
            # what follows the yield runs when the scope ends
            steps, made = made, next(made)
            scope.callback(_finish, steps)
        return scope.made.setdefault(function, made)

    def _offered(self, name: str) -> Any:
        end = self.scopes["function"]
        if name == "monkeypatch":
            return end.enter_context(MonkeyPatch.context())
        if name == "capsys":
            redirected = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
            return _Captured(*(end.enter_context(one) for one in redirected))
        if name == "tmp_path":
            return pathlib.Path(tempfile.mkdtemp())
        if name == "request":
            return _Request(self, end)
        raise Unsupported(f"fixture {name!r} is neither defined nor offered")


_END: Any = object()


def _finish(steps: Any) -> None:
    if next(steps, _END) is not _END:
        raise Unsupported("a fixture yields more than once")


@contextlib.contextmanager
def around(setup: Any, teardown: Any, *given: Any) -> Generator[None]:
    """Call a pair of xunit's functions, where there are such, with as many of ``given`` as they take."""

    def call(function: Any) -> None:
        if callable(function):
            function(*given[: len(inspect.signature(function).parameters)])

    call(setup)
    try:
        yield
    finally:
        call(teardown)


class _Collector:
    """Runs the tests of a module.

    Args:
        ledger: where tests that start or are left out are recorded.
        hooks: ``setup_function`` and ``teardown_function`` of the module, or None for each.
    """

    def __init__(self, ledger: Any, hooks: Sequence[Any]) -> None:
        self._ledger, self._hooks = ledger, hooks

    def run_class(self, kind: type, fixtures: _Fixtures, outer: Mapping[str, _Scope], marks: list[Any]) -> None:
        """Run the tests of a class, and of the classes inside it."""
        members = _members(kind)
        tests = {name: one for name, one in members.items() if _is_test(name, one) or _is_test_class(name, one)}
        if tests and (kind.__init__ is not object.__init__ or kind.__new__ is not object.__new__):
            raise Unsupported(f"class {kind.__name__} has a constructor, so pytest does not collect it")
        own = {name: [*fixtures.get(name, ()), function] for name, function in _fixtures_of(members).items()}
        scopes = {**outer, "class": _Scope()}
        with around(members.get("setup_class"), members.get("teardown_class"), kind), scopes["class"]:
            for name, one in tests.items():
                if isinstance(one, type):
                    self.run_class(one, {**fixtures, **own}, scopes, [*marks, *_marks_of(kind)])
                else:
                    wide = [*marks, *_marks_of(kind), *_marks_of(one)]
                    self.run_function(one, {**fixtures, **own}, scopes, wide, (kind, name))

    def run_function(
        self,
        function: Any,
        fixtures: _Fixtures,
        outer: Mapping[str, _Scope],
        marks: list[Any],
        method: tuple[type, str] | None = None,
    ) -> None:
        """Run one test with each of its parameter sets, and with each of those of its fixtures.

        Args:
            method: class and name of a method; None for a function of the module.
        """
        axes: list[list[tuple[dict[str, Any], dict[str, Any], list[Any]]]] = []
        indirect: set[str] = set()
        for name, given, named in reversed(marks):
            if name == "parametrize":
                axes.append(list(_parameters(*given, **named)))
                indirect.update(*(one[1] for one in axes[-1]))
        used = _used(function, fixtures, marks)
        for name in used:
            params = getattr(fixtures[name][-1], _FIXTURE).get("params")
            if params is not None and name not in indirect:
                given = [one if isinstance(one, _Param) else _Param(one) for one in params]
                axes.append([({}, {name: one.given[0]}, one.marks) for one in given])
        if not all(axes):
            missing = f"{function.__name__} has no parameters to run with"
            raise Unsupported(missing) if self._ledger.independent else Failed(missing)
        for chosen in itertools.product(*axes):
            values = {name: value for part in chosen for name, value in part[0].items()}
            params = {name: value for part in chosen for name, value in part[1].items()}
            scopes = {"function": _Scope(), **outer}
            instance = method[0]() if method else None
            bound = getattr(instance, method[1]) if method else function
            test = _Test(bound, method[0] if method else None, instance, fixtures, scopes, values, params)
            self._run_once(test, used, [*marks, *(mark for part in chosen for mark in part[2])])

    def _run_once(self, test: _Test, used: Sequence[str], marks: Sequence[Any]) -> None:
        ledger, hooks = self._ledger, self._hooks
        expected: list[Mapping[str, Any]] = []
        for name, given, named in marks:
            if name == "skip" or (name == "skipif" and _holds(given, named)):
                ledger.conditional = ledger.conditional or name == "skipif"
                ledger.leave_out(test.function)
                return
            if name == "xfail" and _holds(given, named):
                if not named.get("run", True):
                    ledger.leave_out(test.function)
                    return
                expected.append(named)
        used_before, instance = ledger.used(), test.instance
        if instance is not None:
            hooks = [getattr(instance, f"{when}_method", None) for when in ("setup", "teardown")]
        try:
            with test.scopes["function"], around(*hooks, test.function):
                for name in used:
                    test.value(name)
                result = test.function(**test.arguments(test.function))
                if inspect.iscoroutine(result):
                    result = asyncio.run(result)
                refuse_result(result, test.function)
                ledger.ended()
        except (Skipped, unittest.SkipTest):
            ledger.skipped_inside(used_before)
            return
        except (Exception, Failed) as error:
            if not expected or not all(isinstance(error, named.get("raises", BaseException)) for named in expected):
                raise
            return
        if any(named.get("strict") for named in expected):
            raise Failed(f"{test.function.__name__} is marked as a strict xfail, and passes")


def run_collected(names: Mapping[str, Any], ledger: Any) -> None:
    """Run the tests that a module defines; raise what the first failing one raised."""
    module = _Scope()
    marks = _listed(names.get("pytestmark", ()))
    fixtures = {name: [function] for name, function in _fixtures_of(names).items()}
    first = names.get("setUpModule") or names.get("setup_module")
    last = names.get("tearDownModule") or names.get("teardown_module")
    found = [one for name, one in names.items() if _is_test(name, one) or _is_test_class(name, one)]
    if not found:
        return
    collector = _Collector(ledger, [names.get(f"{when}_function") for when in ("setup", "teardown")])
    with around(first, last, types.SimpleNamespace(**names)), module:
        for one in found:
            if isinstance(one, type):
                collector.run_class(one, fixtures, {"module": module}, marks)
            else:
                collector.run_function(one, fixtures, {"module": module}, [*marks, *_marks_of(one)])


def _is_test(name: str, found: Any) -> bool:
    """Return whether pytest collects this as a test function."""
    found = getattr(found, "__func__", found)
    if isinstance(found, type) or not callable(found) or hasattr(found, _FIXTURE):
        return False
    if not isinstance(found, types.FunctionType):
        if name.startswith("test"):
            raise Unsupported(f"{name} is no function, which pytest does not collect")
        return False
    return _is_chosen(found, name.startswith("test"))


def _is_test_class(name: str, found: Any) -> bool:
    """Return whether pytest collects this as a class of tests; those of unittest are run by unittest."""
    if not isinstance(found, type) or issubclass(found, unittest.TestCase):
        return False
    return _is_chosen(found, name.startswith("Test"))


def _is_chosen(found: Any, named: bool) -> bool:
    """Return whether ``__test__`` makes something a test, or its name does and ``__test__`` does not deny it."""
    return getattr(found, "__test__", None) is True or (named and getattr(found, "__test__", True))


def _members(kind: type) -> dict[str, Any]:
    found = {name: getattr(kind, name) for name in dir(kind) if not name.startswith("__")}
    # in the order in which they are written, as pytest runs them; dir() sorts by name
    order = sorted(found, key=lambda name: getattr(getattr(found[name], "__code__", None), "co_firstlineno", 0))
    return {name: found[name] for name in order}


def _fixtures_of(names: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in names.items() if isinstance(value, types.FunctionType)}
    return {getattr(f, _FIXTURE).get("name") or name: f for name, f in found.items() if hasattr(f, _FIXTURE)}


def _listed(given: Any) -> list[Any]:
    return [one.mark for one in (given if isinstance(given, list | tuple) else [given])]


def _marks_of(what: Any) -> list[Any]:
    return [*_listed(getattr(what, "pytestmark", ())), *getattr(what, _MARKS, ())]


def refuse_marks(kind: type[unittest.TestCase], names: Mapping[str, Any]) -> None:
    """Raise `Unsupported` where pytest would do more with a test case than unittest does."""
    members = _members(kind)
    marks = [
        *_listed(names.get("pytestmark", ())),
        *_marks_of(kind),
        *(mark for one in members.values() for mark in getattr(one, _MARKS, ())),
    ]
    acting = [name for name, _, _ in marks if name in ("skip", "skipif", "xfail", "usefixtures", "parametrize")]
    fixtures = {**_fixtures_of(names), **_fixtures_of(members)}
    acting += [name for name, function in fixtures.items() if getattr(function, _FIXTURE).get("autouse")]
    if acting:
        raise Unsupported(f"{acting[0]} of pytest in {kind.__name__}, a class of unittest")
    inner = [name for name, one in vars(kind).items() if name.startswith("Test") and isinstance(one, type)]
    if any(one.startswith("test") for name in inner for one in dir(vars(kind)[name])):
        raise Unsupported(f"class {inner[0]} in {kind.__name__}, a class of unittest, is not collected")


def _parameters(
    argnames: Any, argvalues: Any, indirect: Any = False, **_: Any
) -> Iterator[tuple[dict[str, Any], dict[str, Any], list[Any]]]:
    """Yield values, parameters of fixtures, and marks of each parameter set."""
    listed = [name.strip() for name in argnames.split(",") if name.strip()] if isinstance(argnames, str) else argnames
    through = listed if indirect is True else indirect or ()
    for one in argvalues:
        if not isinstance(one, _Param):
            one = _Param(one) if isinstance(argnames, str) and "," not in argnames else _Param(*one)
        pairs = list(zip(listed, one.given, strict=True))
        direct = {name: value for name, value in pairs if name not in through}
        yield direct, {name: value for name, value in pairs if name in through}, one.marks


def _used(function: Any, fixtures: _Fixtures, marks: list[Any]) -> list[str]:
    """Return the fixtures that a test needs: its own, the automatic ones, and what they need."""
    waiting = [name for name, made in fixtures.items() if getattr(made[-1], _FIXTURE).get("autouse")]
    waiting += [name for mark, given, _ in marks if mark == "usefixtures" for name in given]
    waiting += list(inspect.signature(function).parameters)
    found: list[str] = []
    while waiting:
        name = waiting.pop(0)
        if name in fixtures and name not in found:
            found.append(name)
            waiting += [one for made in fixtures[name] for one in inspect.signature(made).parameters]
    return found


def _holds(given: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Return whether the condition of a mark holds; without one it does."""
    conditions = [*given, *([named["condition"]] if "condition" in named else [])]
    if any(isinstance(one, str) for one in conditions):
        raise Unsupported("the condition of a mark is a text")
    return any(conditions) if conditions else True


def refuse_result(result: Any, function: Any) -> None:
    """Raise `Unsupported` for a test that returns something: what it found was not asserted."""
    if inspect.iscoroutine(result):
        result.close()
    # it returns nothing else, so that False is how it fails
    if result is False and getattr(function, "false_fails", False):
        raise Failed("the test returned False")
    if result is not None:
        raise Unsupported("a test returns a value, which nothing looks at")
