"""The forms of pytest that test code uses, without pytest: a verdict must not depend on what is installed.

Functions and classes with fixtures and parameters; ``raises``, ``approx``, ``skip``, ``fail`` and marks.
What is not offered makes the test code, not the program, at fault.
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

from magicrl.verifiers.code.remote import Unsupported

_MARKS, _FIXTURE = "__pytest_marks__", "__pytest_fixture__"
_CASE_WIDE = ("function", None)


class Skipped(BaseException):
    """A test that is left out."""


class Failed(AssertionError):
    """``pytest.fail``, and what did not happen though it should."""


class ExceptionInfo:
    """What ``raises`` caught."""

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
def _raising(expected: Any, match: str | None) -> Generator[ExceptionInfo]:
    info = ExceptionInfo()
    try:
        yield info
    except expected as error:
        info.value = error
        if match is not None:
            info.match(match)
    else:
        raise Failed(f"did not raise {expected}")


def _raises(expected: Any, *call: Any, match: Any = None, **named: Any) -> Any:
    caught = _raising(expected, match)
    if not call:
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
        # numpy's arrays and scalars; of the type, so that a stand-in of the program's is not asked
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
        raise Skipped(name) from error


class _Param:
    def __init__(self, *given: Any, marks: Any = (), id: Any = None) -> None:
        self.given = given
        self.marks = [mark.mark for mark in (marks if isinstance(marks, list | tuple) else (marks,))]


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


def main(*_: Any, **__: Any) -> int:
    """What ``pytest.main`` and ``unittest.main`` do: nothing, since the tests are run when the module has run."""
    return 0


def module() -> types.ModuleType:
    """What ``import pytest`` finds."""
    made = types.ModuleType("pytest")
    vars(made).update(
        raises=_raises, approx=approx, skip=_skip, fail=_fail, importorskip=_import_or_skip, param=_Param,
        mark=_Marks(), fixture=_fixture, main=main, MonkeyPatch=MonkeyPatch, ExceptionInfo=ExceptionInfo,
    )  # fmt: skip

    def refuse(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Unsupported(f"pytest.{name} is not offered")

    made.__getattr__ = refuse  # pyright: ignore[reportAttributeAccessIssue]
    return made


class MonkeyPatch:
    """Replacements that last for a test."""

    def __init__(self) -> None:
        self._patches: list[Any] = []

    def _start(self, patcher: Any) -> None:
        patcher.start()
        self._patches.append(patcher)

    def setattr(self, target: Any, name: Any, *value: Any, raising: bool = True) -> None:
        if isinstance(target, str):
            self._start(mock.patch(target, name, create=not raising))
        else:
            self._start(mock.patch.object(target, name, value[0], create=not raising))

    def setitem(self, target: Any, key: Any, value: Any) -> None:
        self._start(mock.patch.dict(target, {key: value}))

    def setenv(self, name: str, value: str, prepend: Any = None) -> None:
        self.setitem(os.environ, name, str(value))

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
            self._patches.pop().stop()


class _Read(NamedTuple):
    out: str
    err: str


class _Captured:
    """``capsys``."""

    def __init__(self, out: io.StringIO) -> None:
        self._out = out

    def readouterr(self) -> Any:
        text = self._out.getvalue()
        self._out.seek(0)
        self._out.truncate()
        return _Read(text, "")


@dataclasses.dataclass
class _Test:
    """One run of one test: its fixtures, made when asked for, undone in turn."""

    fixtures: Mapping[str, Any]
    instance: Any
    shared: dict[str, Any]
    values: dict[str, Any]
    params: Mapping[str, Any]
    end: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)

    def arguments(self, function: Any) -> dict[str, Any]:
        names = list(inspect.signature(function).parameters.values())
        wanted = [p.name for p in names if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        return {name: self.value(name) for name in wanted}

    def value(self, name: str) -> Any:
        for known in (self.values, self.shared):
            if name in known:
                return known[name]
        made = self._made(name, self.fixtures[name]) if name in self.fixtures else self._offered(name)
        return self.values.setdefault(name, made)

    def _made(self, name: str, function: Any) -> Any:
        bound = function.__get__(self.instance) if "self" in inspect.signature(function).parameters else function
        request = types.SimpleNamespace(
            param=self.params.get(name), addfinalizer=self.end.callback, getfixturevalue=self.value
        )
        before = self.values.get("request")
        self.values["request"] = request
        made = bound(**self.arguments(bound))
        self.values.pop("request") if before is None else self.values.update(request=before)
        if inspect.isgenerator(made):
            # what stands behind the yield runs when the test has ended
            steps, made = made, next(made)
            self.end.callback(next, steps, None)
        # of a class, module or session: made once; a parameter makes another one for each value
        wide = getattr(function, _FIXTURE).get("scope") not in _CASE_WIDE and name not in self.params
        if wide:
            self.shared[name] = made
        return made

    def _offered(self, name: str) -> Any:
        if name == "monkeypatch":
            return self.end.enter_context(MonkeyPatch.context())
        if name == "capsys":
            return _Captured(self.end.enter_context(contextlib.redirect_stdout(io.StringIO())))
        if name == "tmp_path":
            return pathlib.Path(tempfile.mkdtemp())
        raise Unsupported(f"fixture {name!r} is neither defined nor offered")


def run(namespace: Mapping[str, Any]) -> None:
    """Run the tests that a module defines; raises what the first failing one raised."""
    fixtures, shared = _fixtures_of(namespace), dict[str, Any]()
    wide = _marks_of(types.SimpleNamespace(**{_MARKS: [m.mark for m in _listed(namespace.get("pytestmark", ()))]}))
    for name, found in namespace.items():
        if name.startswith("test") and isinstance(found, types.FunctionType):
            _each(found, None, fixtures, shared, wide)
        elif name.startswith("Test") and isinstance(found, type) and not issubclass(found, unittest.TestCase):
            _class(found, fixtures, shared, wide)


def _class(kind: type, fixtures: Mapping[str, Any], shared: dict[str, Any], wide: list[Any]) -> None:
    members = {name: getattr(kind, name) for name in dir(kind) if not name.startswith("__")}
    own = {**fixtures, **_fixtures_of(members)}
    # in the order in which they are written, as pytest runs them; dir() sorts by name
    order = sorted(members, key=lambda name: getattr(getattr(members[name], "__code__", None), "co_firstlineno", 0))
    if "setup_class" in members:
        members["setup_class"]()
    for name in order:
        if name.startswith("test") and callable(members[name]):
            _each(members[name], kind, own, shared, [*wide, *_marks_of(kind)])
    if "teardown_class" in members:
        members["teardown_class"]()


def _fixtures_of(names: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in names.items() if isinstance(value, types.FunctionType)}
    return {getattr(f, _FIXTURE).get("name") or name: f for name, f in found.items() if hasattr(f, _FIXTURE)}


def _listed(marks: Any) -> Sequence[Any]:
    return marks if isinstance(marks, list | tuple) else [marks]


def _marks_of(what: Any) -> list[Any]:
    return list(getattr(what, _MARKS, ()))


def _each(
    function: Any, kind: type | None, fixtures: Mapping[str, Any], shared: dict[str, Any], wide: list[Any]
) -> None:
    """One test with each of its parameter sets, and each of those of its fixtures."""
    marks = [*wide, *_marks_of(function)]
    axes: list[list[tuple[dict[str, Any], dict[str, Any], list[Any]]]] = []
    for name, given, named in reversed(marks):
        if name == "parametrize":
            axes.append([(values, {}, own) for values, own in _parameters(*given, **named)])
    used = _used(function, fixtures, marks)
    for name in used:
        params = getattr(fixtures[name], _FIXTURE).get("params")
        if params is not None:
            axes.append([({}, {name: one.given[0] if isinstance(one, _Param) else one}, []) for one in params])
    for chosen in itertools.product(*axes):
        values = {name: value for part in chosen for name, value in part[0].items()}
        params = {name: value for part in chosen for name, value in part[1].items()}
        test = _Test(fixtures, kind() if kind else None, shared, values, params)
        _one(function, test, used, [*marks, *(mark for part in chosen for mark in part[2])])


def _parameters(names: Any, sets: Any, **_: Any) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    listed = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    for one in sets:
        if isinstance(one, _Param):
            yield dict(zip(listed, one.given, strict=True)), one.marks
        else:
            given = (one,) if isinstance(names, str) and len(listed) == 1 else tuple(one)
            yield dict(zip(listed, given, strict=True)), []


def _used(function: Any, fixtures: Mapping[str, Any], marks: list[Any]) -> list[str]:
    """Fixtures that a test needs: its own, those of the module that are automatic, and what they need."""
    waiting = [name for name, made in fixtures.items() if getattr(made, _FIXTURE).get("autouse")]
    waiting += [name for mark, given, _ in marks if mark == "usefixtures" for name in given]
    waiting += list(inspect.signature(function).parameters)
    found: list[str] = []
    while waiting:
        name = waiting.pop(0)
        if name in fixtures and name not in found:
            found.append(name)
            waiting += list(inspect.signature(fixtures[name]).parameters)
    return found


def _one(function: Any, test: _Test, used: Sequence[str], marks: Sequence[Any]) -> None:
    if any(name == "skip" or (name == "skipif" and given and given[0]) for name, given, _ in marks):
        return
    expected = any(name == "xfail" and (not given or given[0]) for name, given, _ in marks)
    instance = test.instance
    bound: Callable[..., Any] = function if instance is None else getattr(instance, function.__name__)

    def hook(when: str) -> None:
        if (found := getattr(instance, f"{when}_method", None)) is not None:
            found(*[bound] * len(inspect.signature(found).parameters))

    try:
        with test.end:
            hook("setup")
            test.end.callback(hook, "teardown")
            for name in used:
                test.value(name)
            result = bound(**test.arguments(bound))
            if inspect.iscoroutine(result):
                asyncio.run(result)
    except (Skipped, unittest.SkipTest):
        return
    except Exception:
        if not expected:
            raise
