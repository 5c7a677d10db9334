"""The tests' side of the border: calls of the program, its objects and its module, as test code sees them.

The last part makes two processes look like one to test code, or refuses to judge where that is not possible.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import copy
import dataclasses
import functools
import inspect
import io
import sys
import types
import unittest
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from magicrl_verifiers.code import values
from magicrl_verifiers.code.remote import (
    MUTABLE,
    SPECIAL,
    Nodes,
    Peer,
    Unsupported,
    kinds_of,
    made_error,
    unpickled,
    update_in_place,
)
from magicrl_verifiers.code.suite import is_plain

PROGRAM_MODULES = ("solution", "main", "submission", "program", "candidate", "your_module", "__main__")
"""Names under which test code imports the program."""
NOT_MIRRORED = {("sys", "stdout"), ("sys", "stderr"), ("os", "environ")}
"""Attributes that are not mirrored, because output and environment cross with every answer."""

_NO_ERRORS_OF = ("unittest", "magicrl", "pytest")
"""Modules whose exceptions steer a test run: never raised for a program."""
_REMEMBERED = 8
"""Results of the program that are kept to decide whether the program caused an error."""
_OF_OPAQUE = ("eq", "lt", "le", "gt", "ge", "is_", "isinstance", "issubclass", "type", "hash", "str", "repr", "format")
"""Operators whose result may be plain data although an operand is opaque (see `Client.operate`)."""
_STAND_INS = (io.StringIO, io.BytesIO, types.GeneratorType)
caller: Callable[[int], types.FrameType] = sys._getframe  # pyright: ignore[reportPrivateUsage]


def blamed_on_program(error: BaseException) -> BaseException:
    """Mark an exception as one that the program caused, and return it."""
    error._of_program = True  # pyright: ignore[reportAttributeAccessIssue]
    return error


def of_program(error: BaseException) -> bool:
    """Return whether the program raised or caused this exception."""
    return getattr(error, "_of_program", False) is True


class ProgramGone(BaseException):
    """The program's process ended or wrote nonsense. Not an Exception: test code must not catch it."""


class Client(Peer):
    """The tests' side. Nothing of the program's is believed but what it answers as plain data.

    Attributes:
        called: how often something of the program's was used.
        missed: whether the tests looked for a name that the program does not define.
        gone: why the program is no more, or None.
        classes: names that the tests use as classes: they read an attribute of what these made, or add two of them.
        stops: whether the tests name ``StopIteration``.
    """

    def __init__(self, replies: int, calls: int, folder: str) -> None:
        super().__init__(replies, calls, folder)
        self._names: dict[str, Any] | None = None
        self._errors: dict[str, type[BaseException]] = {}
        self.called = 0
        self.missed = False
        self._last: tuple[Any, list[Any]] = (None, [])
        self._results: collections.deque[Any] = collections.deque(maxlen=_REMEMBERED)
        self._assigned: dict[tuple[str, str], Any] = {}
        self.gone: str | None = None
        self.classes: set[str] = set()
        self.stops = False
        self.first_use: Callable[[], None] = lambda: None

    def greet(self, namespace: Mapping[str, Any]) -> None:
        """Send the first message. Lists and trees arrive as nodes of the tests' own classes, if there are such."""
        self._nodes = Nodes(namespace)
        nodes = "ListNode" in namespace or "TreeNode" in namespace
        with contextlib.suppress(OSError):  # the next request notices that it has ended
            self.send({"op": "hello", "nodes": nodes})

    @property
    def names(self) -> dict[str, Any]:
        """Names that the program defines."""
        with self._turn:  # else two threads of the tests both wait for the one message
            if self._names is None:
                self.first_use()  # from here on the program can end this process: by a flood of names, for example
                found = self._receive().get("names")
                if not isinstance(found, dict):
                    raise self._nonsense("no names")
                self._names = found
            return self._names

    def lookup(self, name: str) -> Any:
        """Return what the program defines under one of `names`."""
        known = self.names[name]
        if known is None:
            return self.ask("get", {"name": name})
        try:
            if isinstance(known[0], list):
                return self._error_class([(str(module), str(kind)) for module, kind in known])
            return ProgramObject(self, {"h": [int(known[0]), bool(known[1])]}, name)
        except (TypeError, ValueError, IndexError) as error:
            raise self._nonsense(str(error)) from error

    def call(self, target: Mapping[str, Any], positional: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        encoded = {name: self._encode(item) for name, item in named.items()}
        reply = self._exchange("call", of=target, a=[self._encode(item) for item in positional], k=encoded)
        given, after = [*positional, *named.values()], reply.get("after")
        # Python passes arguments by reference, so what the program changed in place has to come back
        if isinstance(after, list) and len(after) == len(given):
            for mine, changed in zip(given, after, strict=True):
                update_in_place(mine, self._decode(changed))
            # values cross as copies, but where the program returned an argument itself, so does this
            same = reply.get("same")
            if isinstance(same, int) and 0 <= same < len(given) and isinstance(given[same], MUTABLE):
                return given[same]
        self._last = (self._received(reply), given)
        self._results.append(self._last[0])
        return self._last[0]

    def is_new(self, found: Any, other: Any) -> bool:
        """Return whether ``found`` is the last result, ``other`` an argument of that call, and they are two values."""
        result, given = self._last
        return found is result and any(other is one for one in given)

    def may_see(self, maker: str, other: Any) -> bool:
        """Return whether an operator of an object that ``maker`` made may show the program its other operand."""
        gave = isinstance(other, tuple) and other != () and any(other is one for one in self._results)
        return isinstance(other, ProgramObject) or gave or maker in self.classes

    def sent(self) -> Iterator[str | bytes]:
        """Yield the texts in the program's last results."""
        waiting = list(self._results)
        while waiting:
            found = waiting.pop()
            if isinstance(found, str | bytes):
                yield found
            elif isinstance(found, dict):
                waiting += [*found.keys(), *found.values()]
            elif isinstance(found, list | tuple | set | frozenset):
                waiting += found

    def has_lent(self, value: Any) -> bool:
        """Return whether the program has been given this object, so that it may have returned it."""
        return any(value is one for one in self._lent)

    def operate(self, name: str, *operands: Any, maker: str = "") -> Any:
        """Apply a function of `operator` or a built-in one in the program's process.

        Args:
            maker: name that made an operand which is no known class, and is shown a value of the tests here. The result
                is opaque: it must be an object, and so must what is computed of it, or it could claim to be right.
        """
        opaque = (one._shown for one in operands if isinstance(one, ProgramObject))  # pyright: ignore[reportPrivateUsage]
        maker = next((one for one in opaque if one not in ("", *self.classes)), maker)
        found = self.call({"operator": name}, operands, {})
        if maker and name not in _OF_OPAQUE:
            if not isinstance(found, ProgramObject):
                raise TypeError(f"the program returned an object where a value was expected ({name})")
            object.__setattr__(found, "_shown", maker)
        return found

    def ask(self, op: str, target: Mapping[str, Any], *given: Any, **fields: Any) -> Any:
        """Send any other request: ``get``, ``set``, ``delete``, ``wait``."""
        return self._received(self._exchange(op, of=target, a=[self._encode(item) for item in given], **fields))

    def _received(self, reply: Mapping[str, Any]) -> Any:
        found = self._decode(reply["value"])
        if isinstance(number := reply.get("number"), int) and isinstance(found, MUTABLE):
            self.share(number, found)
        return found

    def leave(self, target: Mapping[str, Any], error: BaseException | None) -> bool:
        """Call ``__exit__`` of an object of the program; return whether it suppresses the error of the tests."""
        raised = None if error is None else {"kinds": kinds_of(type(error)), "args": [], "vars": {}}
        if raised is not None:
            with contextlib.suppress(TypeError, RecursionError):  # arguments that are no plain data stay here
                raised["args"] = [self._encode(item) for item in error.args] if error is not None else []
        return self._decode(self._exchange("leave", of=target, raised=raised)["value"]) is True

    def replace(self, module: str, path: list[str], attribute: str, *value: Any) -> None:
        """Set an attribute in the program's process (module ``""``: its own); without a value, put it back."""
        self.names  # noqa: B018 - its answer comes first
        fields = {"a": [self._encode(item) for item in value]} if value else {}
        self._request({"op": "replace", "module": module, "path": path, "attribute": attribute, **fields})

    def assign(self, target: Any, attribute: str, value: Any) -> None:
        """Set an attribute of the tests'; one of a module that both processes have is set in the program's too."""
        shared = isinstance(target, types.ModuleType) and not isinstance(target, ProgramModule)
        if not shared or (target.__name__, attribute) in NOT_MIRRORED:
            setattr(target, attribute, value)
            return
        current = getattr(target, attribute, None)
        original = self._assigned.setdefault((target.__name__, attribute), current)
        setattr(target, attribute, value)
        if current is not original:
            self.replace(target.__name__, [], attribute)
        if value is not original:
            self.replace(target.__name__, [], attribute, value)

    def seed(self, *given: Any, **named: Any) -> None:
        """Seed ``random`` in the program's process as in this one."""
        self.names  # noqa: B018 - its answer comes first
        fields = {name: self._encode(item) for name, item in named.items()}
        self._request({"op": "seed", "a": [self._encode(item) for item in given], "k": fields})

    def _exchange(self, op: str, **fields: Any) -> dict[str, Any]:
        self.names  # noqa: B018 - its answer comes first
        self.called += 1
        return self._request({"op": op, **fields})

    def _request(self, message: dict[str, Any]) -> dict[str, Any]:
        with self._turn:
            if (changed := self._files.changes()) is not None:
                message["files"] = changed
            message |= self.state_changes()
            if shared := self.shared_changes():
                message["shared"] = shared
            self._send(message)
            # the program uses something lent before it answers
            while "op" in (reply := self._receive()):
                self._send(self._answer(reply))
            self._files.apply(reply.get("files"))
            self.apply_shared(reply.get("shared"))
            # never the working directory: from there the tests may import what the program wrote
            self.apply_state({"environ": reply.get("environ")})
            for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
                if isinstance(reply.get(name), str):
                    stream.write(reply[name])
            if "value" not in reply:
                try:
                    raised = made_error(reply.get("error"), self._decode, self._error_class)
                except Exception as trouble:  # as in `_decode`
                    raise self._nonsense(str(trouble)) from trouble
                # it would end a loop of the tests over `map(f, ...)` before its other checks
                if isinstance(raised, StopIteration) and not self.stops and message.get("of") != {"operator": "next"}:
                    raised = RuntimeError("the program raised StopIteration")
                raise blamed_on_program(raised)
            return reply

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer the program, which calls a function that was lent to it or reads a public attribute of a stand-in."""
        before = Unsupported.first
        try:
            lent = self._lent[request["lent"]]
            given = [self._decode(item) for item in request["a"]]
            if request["op"] == "call":
                result = lent(*given, **{name: self._decode(item) for name, item in request["k"].items()})
                if result is NotImplemented:
                    raise TypeError(f"{getattr(lent, '__name__', 'the operation')} is not supported")
                return {"value": self._encode(result)}
            if request["op"] in _OPERATIONS:
                return {"value": self._encode(_OPERATIONS[request["op"]](lent, *given))}
            name = str(request["attribute"])
            # else it could set a mock's `return_value` or read what the tests compare with
            if not _may_use(lent, name):
                raise AttributeError(f"a program may not use {name!r} of what tests lend it")
            if request["op"] == "set":
                setattr(lent, name, given[0])
                return {"value": None}
            return {"value": self._encode(getattr(lent, name))}
        except Exception as error:  # noqa: BLE001 - goes back to the program that called
            if request.get("op") != "call":
                Unsupported.first = before  # the program chose the attribute, not the tests
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
        except (ValueError, RecursionError, OSError, MemoryError) as error:
            raise self._nonsense(str(error) or "too large") from error
        if message is None:
            raise self._nonsense("it ended while it was called")
        return message

    def _nonsense(self, reason: str) -> ProgramGone:
        self.gone = f"the program did not answer: {reason}"
        return ProgramGone(self.gone)

    def _encode(self, value: Any) -> Any:
        return values.encode(value, self._lend)

    def _lend(self, value: Any) -> Any:
        if isinstance(value, ProgramObject):
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
        if isinstance(value, types.FunctionType | types.MethodType) and not hasattr(value, "mock"):
            if inspect.iscoroutinefunction(value):
                raise Unsupported("an asynchronous function of the tests is handed to the program")
            parameters = [
                [one.name, int(one.kind), [] if one.default is one.empty else [self._encode(one.default)]]
                for one in inspect.signature(value).parameters.values()
            ]
            # what `functools.wraps` and `inspect.signature` read
            return {"function": [self._number(value), value.__name__, value.__qualname__, value.__doc__, parameters]}
        return {"lent": self._number(value)}

    def _decode(self, value: Any) -> Any:
        try:
            return values.decode(value, self._hook)
        except Exception as error:  # a hostile form may raise anything
            raise self._nonsense(str(error)) from error

    def _hook(self, tagged: Mapping[str, Any]) -> Any:
        (tag, content), *_ = tagged.items()
        if tag == "h":
            remote = ProgramObject(self, {"h": [int(content[0]), bool(content[1])]})
            return _awaited(remote) if content[2] is True else remote
        if tag == "lent":
            return self._lent[content]
        return self._nodes.hook(tagged)

    def _error_class(self, kinds: list[tuple[str, str]]) -> type[BaseException]:
        """Return the class for an exception of these kinds, nearest first: a common one, or one of the program's."""
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


def _is_mock(value: Any) -> bool:
    mock = sys.modules.get("unittest.mock")
    return mock is not None and isinstance(value, mock.NonCallableMock)


def _may_use(lent: Any, name: str) -> bool:
    """Return whether a program may read or set an attribute, which must not steer a mock or lead elsewhere."""
    if _is_mock(lent):  # its children only: its own interface is the tests'
        interface = dir(sys.modules["unittest.mock"].NonCallableMock)
        return name in SPECIAL or not (name.startswith(("_", "assert")) or name in interface)
    return (_is_own(lent) or isinstance(lent, _STAND_INS)) and (name in SPECIAL or not name.startswith(("_", "gi_")))


def _is_own(lent: Any) -> bool:
    """Return whether a value is an object of a class that the tests define."""
    return type(lent).__module__ == "__main__" and not isinstance(lent, type | unittest.TestCase)


def _same_lent(lent: Any, other: Any) -> bool:
    # equality of a mock or a function is identity; that of other objects could show what the tests compare with
    return bool(lent == other) if _is_own(lent) else lent is other


def _copied(duplicate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def make(lent: Any) -> Any:
        if not _is_own(lent):
            raise TypeError(f"cannot copy an object of type {type(lent).__name__}")
        return duplicate(lent)

    return make


_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "truth": bool,
    "hash": hash,
    "eq": _same_lent,
    "copy": _copied(copy.copy),
    "deepcopy": _copied(copy.deepcopy),
}
"""Operations on a lent object that the program may request by name."""


async def _awaited(remote: ProgramObject) -> Any:
    return remote._client.ask("wait", remote._target)  # pyright: ignore[reportPrivateUsage]


class ProgramObject:
    # Something of the program's. The class has no docstring, since `__doc__` is the program's.
    #
    # An operator that shows the program a value of the tests' (``f(2) == 4``, ``3 in f(2)``) is left to the program
    # only for objects of a class: made by a capitalised name of which the tests use attributes (``Stack().push``).
    # Else any result could claim to be right. Arithmetic may show it (``Vector(1, 2) * 3``): see `Client.operate`.

    __doc__ = property(lambda self: self.__getattr__("__doc__"))  # pyright: ignore[reportAssignmentType]
    # no `__dict__`, so that `vars` and `__dict__` read the program's
    __slots__ = ("__weakref__", "_client", "_made_by", "_name", "_shown", "_target")
    _client: Client
    _target: Mapping[str, Any]
    _name: str
    _made_by: str
    _shown: str

    def __init__(self, client: Client, target: Mapping[str, Any], name: str = "") -> None:
        given = {"_client": client, "_target": target, "_name": name, "_made_by": "", "_shown": ""}
        for attribute, value in given.items():
            object.__setattr__(self, attribute, value)

    def __call__(self, *positional: Any, **named: Any) -> Any:
        made = self._client.call(self._target, positional, named)
        if isinstance(made, ProgramObject) and self._name[:1].isupper() and self._name != "Solution":
            object.__setattr__(made, "_made_by", self._name)
        return made

    def __getattr__(self, name: str) -> Any:
        made_by = self._made_by or self._shown or self._name
        if made_by and not name.startswith("__"):  # those that numpy and others look for
            self._client.classes.add(made_by)
        elif self._shown and self._shown not in self._client.classes:
            raise AttributeError(name)  # else `__array__` would be a number of its choice
        return self._client.ask("get", self._target, attribute=name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._client.ask("set", self._target, value, attribute=name)

    def __delattr__(self, name: str) -> None:
        self._client.ask("delete", self._target, attribute=name)

    def __eq__(self, other: object) -> bool:
        ask = self._client.operate
        # a value of the tests' is not shown: the result of a call equals none of them
        if not self._client.may_see(self._made_by, other):
            return False
        # an object that equals a stranger equals everything
        return ask("eq", self, other) is True and ask("eq", self, _STRANGER) is not True

    def __hash__(self) -> int:
        return hash(self._client.operate("hash", self))

    def __bool__(self) -> bool:
        return self._client.operate("truth", self) is True

    def __contains__(self, item: Any) -> bool:
        if self._client.may_see(self._made_by, item):
            return self._client.operate("contains", self, item) is True
        # compared here, element by element: `in` would show the item to the program
        return any(item == one for one in self)

    def __iter__(self) -> Any:
        return self._client.operate("iter", self)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> NoReturn:
        raise Unsupported(f"a class of the tests derives from {self._name or 'a class'} of the program")

    def __subclasscheck__(self, kind: Any) -> bool:
        return isinstance(kind, ProgramObject) and self._client.operate("issubclass", kind, self) is True

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, ProgramObject) and self._client.operate("isinstance", instance, self) is True

    def __enter__(self) -> Any:
        return self.__getattr__("__enter__")()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        suppressed = self._client.leave(self._target, error)
        # otherwise a program could pass by suppressing the failures of the tests
        return suppressed and isinstance(error, Exception) and not isinstance(error, AssertionError)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        if is_named(self):
            raise Unsupported("an object of the program is pickled or copied by the tests")
        raise blamed_on_program(TypeError("the program returned an object where plain data was expected"))


def is_named(remote: ProgramObject) -> bool:
    """Return whether tests got this by a name of the program's, or made it of a class; else a call returned it."""
    return bool(remote._name or remote._made_by)  # pyright: ignore[reportPrivateUsage]


def _operator(function: str, *, shows: bool, turned: bool = False) -> Callable[..., Any]:
    """Return an operator that is left to the program; ``shows``: it would show its other operand to the program."""
    arithmetic = shows and function not in ("lt", "le", "gt", "ge")

    def operate(self: ProgramObject, *given: Any) -> Any:
        client, made_by = self._client, self._made_by  # pyright: ignore[reportPrivateUsage]
        unknown = shows and not client.may_see(made_by, given[0])
        maker = (made_by or self._shown) if unknown and arithmetic else ""  # pyright: ignore[reportPrivateUsage]
        if unknown and not maker:
            raise TypeError(f"the program returned an object where a value was expected ({function})")
        found = client.operate(function, *((*given, self) if turned else (self, *given)), maker=maker)
        # (1, 2) + (3, 4) is an object again: two numbers would give a number
        objects = arithmetic and isinstance(found, ProgramObject) and isinstance(given[0], ProgramObject)
        if objects and made_by and not found._shown:  # pyright: ignore[reportPrivateUsage]
            client.classes.add(made_by)
        return found

    return operate


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(ProgramObject, f"__{_name}__", _operator(_name, shows=True))
    setattr(ProgramObject, f"__r{_name}__", _operator(_name, shows=True, turned=True))
for _name in ("lt", "le", "gt", "ge", "matmul", "and_", "or_", "xor"):
    setattr(ProgramObject, f"__{_name.rstrip('_')}__", _operator(_name, shows=True))
_unary = ("len", "next", "str", "repr", "abs", "neg", "float", "int", "index", "reversed")
for _name in (*_unary, "getitem", "setitem", "delitem", "format", "round"):
    setattr(ProgramObject, f"__{_name}__", _operator(_name, shows=False))


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
            # unittest looks for these itself
            if not name.startswith("__") and name not in ("setUpModule", "tearDownModule"):
                self._client.missed = True
            error = AttributeError(f"the program defines no {name!r}", name=name, obj=self)
            raise error if name.startswith("__") else blamed_on_program(error)
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


# --- what a border between two processes would change -----------------------------------------------------------------


class Guard:
    """Keeps test code from executing what the program wrote: text that it evaluates, objects that it unpickles."""

    def __init__(self, namespace: dict[str, Any], client: Client) -> None:
        self._namespace = namespace
        self._client = client

    def __call__(self, event: str, given: tuple[Any, ...]) -> None:
        if event == "pickle.find_class" and given[1] not in _UNPICKLED.get(given[0], ()):
            what = f"the test code unpickles {given[0]}.{given[1]}"
            own = given[0] == "__main__" and dict.__contains__(self._namespace, given[1])
            own = own or given == (unpickled.__module__, unpickled.__name__)  # the program pickled an own object
            raise Unsupported(what) if own or not self._client.called else blamed_on_program(ValueError(what))
        # only from the test code's own frame: the standard library compiles too (namedtuple)
        if event == "compile" and self._client.called and caller(1).f_globals is self._namespace:
            source = given[0]
            text = source.decode("utf-8", "replace") if isinstance(source, bytes) else source
            if not isinstance(text, str) or not is_plain(text):
                if isinstance(text, str) and self._is_programs(text, caller(1)):
                    raise blamed_on_program(ValueError("the program returned text that is no plain value"))
                raise Unsupported("the test code executes text that the program may have written")

    def _is_programs(self, text: str, frame: types.FrameType) -> bool:
        """Return whether ``text`` is no plain value because of the program, and uses no number of the tests."""
        sent = [one for one in self._client.sent() if isinstance(one, str) and one.strip() and one in text]
        if not any(is_plain(text.replace(one, " 0 ")) for one in sent):
            return False
        try:
            used = {node.id for node in ast.walk(ast.parse(text.strip(), mode="eval")) if isinstance(node, ast.Name)}
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return True
        known = {**self._namespace, **frame.f_locals}
        return not any(isinstance(known.get(name), int | float | complex) for name in used)


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


def same_object(client: Client, one: Any, other: Any) -> bool:
    """``one is other``, as if the tests and the program were one process; `Unsupported` where that is not known."""
    if one is other or isinstance(one, ProgramObject) != isinstance(other, ProgramObject):
        return one is other
    if isinstance(one, ProgramObject):
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


_INTROSPECTION = {
    inspect: [name for name in vars(inspect) if name.startswith(("is", "get", "sig", "unwrap"))],
    dataclasses: ["asdict", "astuple", "fields", "replace", "is_dataclass"],
    copy: ["copy", "deepcopy"],
}


def refuse_introspection(namespace: dict[str, Any]) -> None:
    """Make functions that look into an object refuse the program's: they would see the stand-in instead."""

    def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
        # a result could be made an object in order not to be judged; but what a decorator returns is one, too
        always = function.__name__ == "signature"

        @functools.wraps(function)
        def call(*given: Any, **named: Any) -> Any:
            stand_ins = [one for one in given if type(one) is ProgramObject]
            # the standard library's own calls are not meant
            if stand_ins and caller(1).f_globals is namespace and (always or is_named(stand_ins[0])):
                raise Unsupported(f"{function.__name__}() of something of the program's")
            return function(*given, **named)

        return call

    for module, names in _INTROSPECTION.items():
        for name in names:
            if isinstance(found := getattr(module, name), types.FunctionType):
                setattr(module, name, guarded(found))
