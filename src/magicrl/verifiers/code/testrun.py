"""Runs test code in a process of its own: plain assertions, ``check(candidate)``, unittest and pytest forms.

What is executed is counted: assertions where the code writes them, uses of the program where they cross the border.
Whose fault an error is follows from where it was raised. All of it happens where the program is not.
"""

from __future__ import annotations

import ast
import builtins
import collections
import contextlib
import errno
import importlib
import io
import os
import sys
import types
import unittest
from collections.abc import Callable, Mapping
from typing import Any, NoReturn
from unittest import mock

from magicrl.verifiers.code import pytest_forms, values
from magicrl.verifiers.code.remote import SPECIAL, Nodes, Peer, Unsupported, kinds_of, made_error
from magicrl.verifiers.code.suite import is_plain

# --- the tests' side of the border ----------------------------------------------------------------------------------

_NO_ERRORS_OF = ("unittest", "magicrl", "pytest")
"""Modules whose exceptions steer a test run: never raised for a program."""
_STAND_INS = (io.StringIO, io.BytesIO, types.GeneratorType)


class ProgramGone(BaseException):
    """The program's process ended or wrote nonsense. Not an Exception: test code must not catch it."""


class Client(Peer):
    """The tests' side. Nothing of the program's is believed but what it answers as plain data.

    Attributes:
        called: how often something of the program's was used.
        gone: why the program is no more, or None.
    """

    def __init__(self, replies: int, calls: int, folder: str) -> None:
        super().__init__(replies, calls, folder)
        self._names: dict[str, Any] | None = None
        self._errors: dict[str, type[BaseException]] = {}
        self.called = 0
        self.gone: str | None = None
        self.first_call: Callable[[], None] = lambda: None

    def greet(self, namespace: Mapping[str, Any]) -> None:
        """Say what the tests bring; lists and trees arrive as nodes of the tests' classes, if they have such."""
        self._nodes = Nodes(namespace)
        nodes = "ListNode" in namespace or "TreeNode" in namespace
        with contextlib.suppress(OSError):  # its end shows when it is asked for something
            self.send({"op": "hello", "nodes": nodes})

    @property
    def names(self) -> dict[str, Any]:
        """What the program defines."""
        if self._names is None:
            found = self._receive().get("names")
            if not isinstance(found, dict):
                raise self._nonsense("no names")
            self._names = found
        return self._names

    def lookup(self, name: str) -> Any:
        """What the program defines under a name that it has."""
        known = self.names[name]
        if known is None:
            return self.ask("get", {"name": name})
        try:
            if isinstance(known[0], list):
                return self._error_class([(str(module), str(kind)) for module, kind in known])
            return Remote(self, {"h": [int(known[0]), bool(known[1])]}, name)
        except (TypeError, ValueError, IndexError) as error:
            raise self._nonsense(str(error)) from error

    def call(self, target: Mapping[str, Any], positional: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        encoded = {name: self._encode(item) for name, item in named.items()}
        reply = self._exchange("call", of=target, a=[self._encode(item) for item in positional], k=encoded)
        given, after = [*positional, *named.values()], reply.get("after")
        # Python passes arguments by reference, so what the program changed in place has to come back
        if isinstance(after, list) and len(after) == len(given):
            for mine, changed in zip(given, after, strict=True):
                _update(mine, self._decode(changed))
        return self._decode(reply["value"])

    def operate(self, name: str, *operands: Any) -> Any:
        """A function of `operator` or a built-in one, applied in the program's process."""
        return self.call({"operator": name}, operands, {})

    def ask(self, op: str, target: Mapping[str, Any], *given: Any, **fields: Any) -> Any:
        """Any other request: ``get``, ``set``, ``delete``, ``wait``."""
        return self._decode(self._exchange(op, of=target, a=[self._encode(item) for item in given], **fields)["value"])

    def replace(self, module: str, path: list[str], attribute: str, *value: Any) -> None:
        """Set an attribute in the program's process (module ``""``: its own); without a value, put it back."""
        self.names  # noqa: B018 - its answer comes first
        fields = {"a": [self._encode(item) for item in value]} if value else {}
        self._request({"op": "replace", "module": module, "path": path, "attribute": attribute, **fields})

    def _exchange(self, op: str, **fields: Any) -> dict[str, Any]:
        self.names  # noqa: B018 - its answer comes first
        if self.called == 0:
            self.first_call()
        self.called += 1
        return self._request({"op": op, **fields})

    def _request(self, message: dict[str, Any]) -> dict[str, Any]:
        with self._turn:
            if (changed := self._files.changes()) is not None:
                message["files"] = changed
            self._send(message)
            # the program uses something lent before it answers
            while "op" in (reply := self._receive()):
                self._send(self._answer(reply))
            self._files.apply(reply.get("files"))
            if isinstance(reply.get("out"), str):
                sys.stdout.write(reply["out"])
            if "value" not in reply:
                self._raise(reply.get("error"))
            return reply

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The program uses what was lent to it: a function by calling it, a stand-in by its public attributes."""
        try:
            lent = self._lent[request["lent"]]
            given = [self._decode(item) for item in request["a"]]
            if request["op"] == "call":
                result = lent(*given, **{name: self._decode(item) for name, item in request["k"].items()})
                return {"value": self._encode(result)}
            name = str(request["attribute"])
            # else it could set a mock's `return_value` or read what the tests compare with
            if not _may_use(lent, name):
                raise AttributeError(f"a program may not use {name!r} of what tests lend it")
            if request["op"] == "set":
                setattr(lent, name, given[0])
                return {"value": None}
            return {"value": self._encode(getattr(lent, name))}
        except Exception as error:  # noqa: BLE001 - goes back to the program that called
            return {"error": {"kinds": kinds_of(type(error)), "args": [str(item) for item in error.args], "vars": {}}}

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self.send(message)
        except OSError as error:
            raise self._nonsense("it ended before it was called") from error

    def _receive(self) -> dict[str, Any]:
        if self.gone is not None:
            raise ProgramGone(self.gone)
        try:
            message = self.receive()
        except (ValueError, RecursionError, OSError) as error:
            raise self._nonsense(str(error)) from error
        if message is None:
            raise self._nonsense("it ended while it was called")
        return message

    def _nonsense(self, reason: str) -> ProgramGone:
        self.gone = f"the program did not answer: {reason}"
        return ProgramGone(self.gone)

    def _encode(self, value: Any) -> Any:
        return values.encode(value, self._lend)

    def _lend(self, value: Any) -> Any:
        if isinstance(value, Remote):
            return dict(object.__getattribute__(value, "_target"))
        if value is _STRANGER:
            return {"stranger": 0}
        if isinstance(value, types.ModuleType):
            raise Unsupported("a module is handed to the program")
        if not _is_mock(value) and not isinstance(value, type) and hasattr(value, "val"):
            return None  # a node of a list or tree
        name = next((name for name, kind in self._errors.items() if kind is value), None)
        if name is not None:
            return {"name": name}
        return {"lent": self._number(value)}

    def _decode(self, value: Any) -> Any:
        try:
            return values.decode(value, self._hook)
        except (ValueError, TypeError, RecursionError, ArithmeticError, AttributeError, LookupError) as error:
            raise self._nonsense(str(error)) from error

    def _hook(self, tagged: Mapping[str, Any]) -> Any:
        (tag, content), *_ = tagged.items()
        if tag == "h":
            remote = Remote(self, {"h": [int(content[0]), bool(content[1])]})
            return _awaited(remote) if content[2] is True else remote
        if tag == "lent":
            return self._lent[content]
        return self._nodes.hook(tagged)

    def _error_class(self, kinds: list[tuple[str, str]]) -> type[BaseException]:
        """The class for an exception of these kinds, nearest first: a common one, or one for the program's own."""
        module, name = kinds[0]
        common = vars(sys.modules.get(module, types)).get(name)  # the program's modules hold no names here
        steers = getattr(common, "__module__", "").startswith(_NO_ERRORS_OF)
        if isinstance(common, type) and issubclass(common, Exception | SystemExit) and not steers:
            return common
        if len(kinds) == 1:
            return Exception
        # one class a name, so that `except` and `assertRaises` meet the same one again
        if name not in self._errors:
            self._errors[name] = type(name, (self._error_class(kinds[1:]),), {})
        return self._errors[name]

    def _raise(self, error: Any) -> NoReturn:
        """The program's exception, marked as such."""
        try:
            raised = made_error(error, self._decode, self._error_class)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as trouble:
            raise self._nonsense(str(trouble)) from trouble
        raised._of_program = True  # pyright: ignore[reportAttributeAccessIssue]
        raise raised


def of_program(error: BaseException) -> bool:
    """Whether the program raised this exception."""
    return getattr(error, "_of_program", False) is True


def _is_mock(value: Any) -> bool:
    mock = sys.modules.get("unittest.mock")
    return mock is not None and isinstance(value, mock.NonCallableMock)


def _may_use(lent: Any, name: str) -> bool:
    """Whether a program may read or set an attribute: never one that steers a mock, nor one that leads elsewhere."""
    if _is_mock(lent):  # its children only: its own interface is the tests'
        interface = dir(sys.modules["unittest.mock"].NonCallableMock)
        return name in SPECIAL or not (name.startswith(("_", "assert")) or name in interface)
    own = type(lent).__module__ == "__main__" and not isinstance(lent, type)
    return (own or isinstance(lent, _STAND_INS)) and (name in SPECIAL or not name.startswith(("_", "gi_")))


async def _awaited(remote: Remote) -> Any:
    return remote._client.ask("wait", remote._target)  # pyright: ignore[reportPrivateUsage]


class Remote:
    """Something of the program's.

    An operator that shows the program a value of the tests' (``f(2) == 4``, ``3 in f(2)``) is left to the program only
    for objects that the tests made of a class, by a capitalised name (``Stack()``): else any result could claim to be
    right.
    """

    _client: Client
    _target: Mapping[str, Any]
    _name: str
    _own: bool

    def __init__(self, client: Client, target: Mapping[str, Any], name: str = "", own: bool = False) -> None:
        for attribute, value in (("_client", client), ("_target", target), ("_name", name), ("_own", own)):
            object.__setattr__(self, attribute, value)

    def __call__(self, *positional: Any, **named: Any) -> Any:
        made = self._client.call(self._target, positional, named)
        if isinstance(made, Remote) and self._name[:1].isupper() and self._name != "Solution":
            object.__setattr__(made, "_own", True)
        return made

    def __getattr__(self, name: str) -> Any:
        return self._client.ask("get", self._target, attribute=name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._client.ask("set", self._target, value, attribute=name)

    def __delattr__(self, name: str) -> None:
        self._client.ask("delete", self._target, attribute=name)

    def __eq__(self, other: object) -> bool:
        ask = self._client.operate
        # a value of the tests' is never shown: the result of a call equals none of them
        if not (isinstance(other, Remote) or self._own):
            return False
        # an object that equals a stranger equals everything
        return ask("eq", self, other) is True and ask("eq", self, _STRANGER) is not True

    def __hash__(self) -> int:
        return hash(self._client.operate("hash", self))

    def __bool__(self) -> bool:
        return self._client.operate("truth", self) is True

    def __contains__(self, item: Any) -> bool:
        if self._own or isinstance(item, Remote):
            return self._client.operate("contains", self, item) is True
        # compared here, element by element: `in` would show the item to the program
        return any(item == one for one in self)

    def __iter__(self) -> Any:
        return self._client.operate("iter", self)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Remote) and self._client.operate("isinstance", instance, self) is True

    def __enter__(self) -> Any:
        return self.__getattr__("__enter__")()

    def __exit__(self, *error: Any) -> Any:
        return self.__getattr__("__exit__")(None, None, None)


def _operator(function: str, *, shows: bool, turned: bool = False) -> Callable[..., Any]:
    """An operator that is left to the program; ``shows``: it would show its other operand to the program."""

    def operate(self: Remote, *given: Any) -> Any:
        if shows and not isinstance(given[0], Remote) and not self._own:  # pyright: ignore[reportPrivateUsage]
            raise TypeError(f"the program returned an object where a value was expected ({function})")
        operands = (*given, self) if turned else (self, *given)
        return self._client.operate(function, *operands)  # pyright: ignore[reportPrivateUsage]

    return operate


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Remote, f"__{_name}__", _operator(_name, shows=True))
    setattr(Remote, f"__r{_name}__", _operator(_name, shows=True, turned=True))
for _name in ("lt", "le", "gt", "ge", "matmul", "and_", "or_", "xor"):
    setattr(Remote, f"__{_name.rstrip('_')}__", _operator(_name, shows=True))
_unary = ("len", "next", "str", "repr", "abs", "neg", "float", "int", "index", "reversed")
for _name in (*_unary, "getitem", "setitem", "delitem"):
    setattr(Remote, f"__{_name}__", _operator(_name, shows=False))


_STRANGER: Any = object()


class ProgramModule(types.ModuleType):
    """The program as a module, for ``from solution import f`` and ``patch("solution.helper")``.

    ``own``: names of the tests' that come first (in ``__main__``).
    """

    def __init__(self, client: Client, name: str, own: dict[str, Any]) -> None:
        super().__init__(name)
        self.__dict__.update(_client=client, _own=own)

    def __getattr__(self, name: str) -> Any:
        if dict.__contains__(self._own, name):
            return self._own[name]
        names = self._client.names
        if name == "__all__":
            return [name for name in names if not name.startswith("_")]
        if name not in names:
            error = AttributeError(f"the program defines no {name!r}", name=name, obj=self)
            error._of_program = not name.startswith("__")  # pyright: ignore[reportAttributeAccessIssue]
            raise error
        return self._client.lookup(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):
            super().__setattr__(name, value)
        elif dict.__contains__(self._own, name):
            self._own[name] = value
        else:
            self._client.replace("", [], name, value)

    def __delattr__(self, name: str) -> None:
        self._client.replace("", [], name)


def _update(mine: Any, changed: Any) -> None:
    """A mutable argument takes the content that the program gave it."""
    if type(mine) is not type(changed):
        return
    if isinstance(mine, list | bytearray):
        mine[:] = changed
    elif isinstance(mine, dict | set | collections.deque):
        mine.clear()
        (mine.extend if isinstance(mine, collections.deque) else mine.update)(changed)


# --- a run ------------------------------------------------------------------------------------------------------------


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
        # `if f(1) != 2: raise ...` is an assertion in other words
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
    unittest.main = pytest_forms.main  # pyright: ignore[reportAttributeAccessIssue]
    for name in _UNSEEN:
        setattr(unittest.TestCase, name, _unseen)
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
        error = _forms(namespace, details["check"])
    except BaseException as raised:  # noqa: BLE001 - whatever it was is told
        error = raised
    said, reason = _judged(error, client)
    return {"said": said, "reason": reason[:400], "asserted": namespace.asserted, "called": client.called}


def _unseen(*_: Any, **__: Any) -> None:
    raise Unsupported("log records and warnings of the program are not seen by its tests")


def _forms(namespace: TestNamespace, check: str | None) -> BaseException | None:
    """Run what the test code defines and leaves to its harness; the first failure."""
    if check is not None:
        candidate = namespace[check] if check.isidentifier() else Remote(namespace.client, {"name": check})
        namespace["check"](candidate)
    suite, result = unittest.TestSuite(), _Result()
    for kind in dict.fromkeys(kind for kind in list(namespace.values()) if isinstance(kind, type)):
        if issubclass(kind, unittest.TestCase):
            suite.addTests(unittest.TestLoader().loadTestsFromTestCase(kind))
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

    addFailure = addError

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self.addError(test, err)

    def addExpectedFailure(self, test: Any, err: Any) -> None: ...

    def addUnexpectedSuccess(self, test: Any) -> None:
        self.addError(test, (None, AssertionError("an expected failure did not come")))


def _judged(error: BaseException | None, client: Client) -> tuple[str, str]:
    """Whose fault an error is, and its words."""
    # first: whatever test code raised afterwards is a consequence
    if client.gone is not None:
        return "program", client.gone
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

# --- what tests replace is replaced in the program's process too ----------------------------------------------------


def _mirror(client: Client) -> None:
    """``patch`` of a module that both processes have, and of ``os.environ``, reaches the program."""

    def environment(patcher: Any, *value: Any) -> None:
        if patcher.in_dict is os.environ:
            client.replace("os", [], "environ", *value)

    attributes: Any = mock._patch  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    _around(
        attributes,
        lambda patcher: _tell(client, patcher, getattr(patcher.target, patcher.attribute)),
        lambda patcher: _tell(client, patcher),
    )
    items: Any = mock._patch_dict  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    _around(items, lambda patcher: environment(patcher, dict(os.environ)), environment)


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
    # standard streams are not mirrored: what the program prints comes with its answers
    if not shared or (target is sys and patcher.attribute in _SHARED_STREAMS):
        return
    is_module = isinstance(target, types.ModuleType)
    module, path = (target.__name__, []) if is_module else (target.__module__, [target.__qualname__])
    # patches of the program's own module go through `ProgramModule.__setattr__`
    if module in PROGRAM_MODULES or (path and not hasattr(importlib.import_module(module), path[0])):
        return
    client.replace(module, path, patcher.attribute, *value)
