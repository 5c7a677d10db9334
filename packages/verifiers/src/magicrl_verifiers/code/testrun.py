"""Runs test code in a process of its own: plain assertions, ``check(candidate)``, unittest and pytest forms.

What is executed is counted: assertions where the code writes them, uses of the program where they cross the border.
Whose fault an error is follows from where it was raised. All of it happens where the program is not.
"""

from __future__ import annotations

import builtins
import copy
import dataclasses
import errno
import functools
import importlib
import inspect
import random
import sys
import types
import unittest
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

from magicrl_verifiers.code import collection, pytest_forms
from magicrl_verifiers.code.border import (
    MUTABLE,
    NOT_MIRRORED,
    PROGRAM_MODULES,
    Client,
    ProgramModule,
    Remote,
    is_named,
    of_program,
)
from magicrl_verifiers.code.remote import Unsupported
from magicrl_verifiers.code.suite import is_plain

_REFUSED = {errno.EPERM, errno.EACCES, errno.EROFS}


class TestNamespace(dict[str, Any]):
    """Globals of test code: its own names first, then built-ins, then the program's."""

    def __init__(self, client: Client, common: Mapping[str, Any]) -> None:
        super().__init__()
        self.client = client
        self._wanted: frozenset[str] = frozenset()
        self.ledger = collection.Ledger(lambda: client.called, lambda: client.missed)
        self["__name__"] = "__main__"
        self["__builtins__"] = {**common, **vars(builtins), **_replacements(client), **self.ledger.names()}

    def __missing__(self, name: str) -> Any:
        # built-ins are found behind the globals anyway; names such as __file__ are the program's only if wanted
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
    client: Client, codes: list[types.CodeType], details: Mapping[str, Any], common: Mapping[str, Any]
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
    # test code imports the program under several names: all of them lead to the other process
    for name in PROGRAM_MODULES:
        sys.modules[name] = ProgramModule(client, name, namespace if name == "__main__" else {})
    sys.modules["pytest"] = pytest_forms.module()
    # the tests run when their module has run
    unittest.main = lambda *_, **__: types.SimpleNamespace(result=unittest.TestResult())  # pyright: ignore
    collection.watch_unittest(namespace.ledger, functools.partial(_same, client))
    _refuse_introspection(namespace)
    _mirror(client)
    # it cannot be taken off again, so test code that is misled cannot either
    sys.addaudithook(_Guard(namespace, client))
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
        namespace.ledger.loaded()
        _check(namespace, details["check"])
        error = collection.run(
            {name: one for name, one in namespace.items() if type(one) is not Remote}, namespace.ledger
        )
    except BaseException as raised:  # noqa: BLE001 - whatever it was is told
        error = raised
    said, reason = _judged(error, client)
    return {"said": said, "reason": reason[:400], "asserted": namespace.ledger.asserted, "called": client.called}


def _check(namespace: TestNamespace, check: str | None) -> None:
    """Call ``check`` with the program's function, where the test code leaves that to its harness."""
    if check is not None:
        candidate = namespace[check] if check.isidentifier() else Remote(namespace.client, {"name": check})
        namespace["check"](candidate)


def _judged(error: BaseException | None, client: Client) -> tuple[str, str]:
    """Whose fault an error is, and its words."""
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
    # before the program was used nothing can be its fault
    if client.called == 0 or _own_fault(error):
        return "broken", reason
    return "wrong", reason


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
        # only from the test code's own frame: the standard library compiles too (namedtuple)
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

# --- what a border between two processes would change ---


def _same(client: Client, one: Any, other: Any) -> bool:
    """``one is other``, as if the tests and the program were one process; `Unsupported` where that is not known."""
    if one is other or isinstance(one, Remote) != isinstance(other, Remote):
        return one is other
    if isinstance(one, Remote):
        return client.operate("is_", one, other) is True
    if client.is_new(one, other) or client.is_new(other, one):
        return False
    # equal copies of one value, or of two: what was a single value in the program may have crossed twice
    if isinstance(one, MUTABLE) and isinstance(other, MUTABLE):
        raise Unsupported("whether two mutable values are identical, since values cross as copies")
    if isinstance(one, _COPIED) and type(one) is type(other) and one == other:
        raise Unsupported("whether two equal values are identical, since values cross as copies")
    return False


_COPIED = (str, int, float, complex, tuple, frozenset, bytes)


def _replacements(client: Client) -> dict[str, Any]:
    """Built-in functions and operators of test code that a border between two processes would change."""

    def class_of(value: Any) -> Any:
        if not isinstance(value, Remote):
            return type(value)
        found = client.operate("type", value)
        # a program may claim that its object is an int
        return found if isinstance(found, Remote) else Remote

    def identity(value: Any) -> int:
        if isinstance(value, (Remote, *MUTABLE)):
            raise Unsupported("id() of a value that may have crossed as a copy")
        return id(value)

    return {
        "id": identity,
        collection.CLASS: class_of,
        collection.SAME: functools.partial(_same, client),
        collection.ASSIGN: client.assign,
    }


_INTROSPECTION = {
    inspect: [name for name in vars(inspect) if name.startswith(("is", "get", "sig", "unwrap"))],
    dataclasses: ["asdict", "astuple", "fields", "replace", "is_dataclass"],
    copy: ["copy", "deepcopy"],
}


def _refuse_introspection(namespace: TestNamespace) -> None:
    """Make functions that look into an object refuse the program's: they would look into its stand-in."""

    def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
        # a result could be made an object in order not to be judged; but what a decorator returns is one, too
        always = function.__name__ == "signature"

        @functools.wraps(function)
        def call(*given: Any, **named: Any) -> Any:
            stand_ins = [one for one in given if type(one) is Remote]
            # the standard library's own calls are not meant
            if stand_ins and _caller(1).f_globals is namespace and (always or is_named(stand_ins[0])):
                raise Unsupported(f"{function.__name__}() of something of the program's")
            return function(*given, **named)

        return call

    for module, names in _INTROSPECTION.items():
        for name in names:
            if isinstance(found := getattr(module, name), types.FunctionType):
                setattr(module, name, guarded(found))


# --- what tests replace is replaced in the program's process too ----------------------------------------------------


def _mirror(client: Client) -> None:
    """``patch`` of a module that both processes have, and a seed of ``random``, reach the program."""
    attributes: Any = mock._patch  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    _around(
        attributes,
        lambda patcher: _tell(client, patcher, getattr(patcher.target, patcher.attribute)),
        lambda patcher: _tell(client, patcher),
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


def _tell(client: Client, patcher: Any, *value: Any) -> None:
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
