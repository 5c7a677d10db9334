"""Calls across the border: test code in one process, the program in another, plain data between them.

Lines of JSON each way. Whatever the program answers arrives as exact plain types, as an exception, or as a handle
(`Remote`). What tests lend to the program, it may call; attributes it reads of stand-ins (mocks, text files) alone.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import importlib
import io
import operator
import os
import sys
import threading
import types
from collections.abc import Callable, Coroutine, Mapping
from json import dumps, loads  # by name: test code may put mocks in the place of the module's functions
from typing import Any, NoReturn

from magicrl.verifiers.code import values
from magicrl.verifiers.code.files import Files

_MAX_LINE = 64 << 20
_NO_ERRORS_OF = ("unittest", "magicrl", "pytest")
"""Modules whose exceptions steer a test run: never raised for a program."""
_STAND_INS = (io.StringIO, io.BytesIO, types.GeneratorType)
_SPECIAL = frozenset(
    f"__{name}__" for name in ("enter", "exit", "iter", "next", "len", "getitem", "setitem", "contains", "str")
)


class ProgramGone(BaseException):
    """The program's process ended or wrote nonsense. Not an Exception: test code must not catch it."""


class Unsupported(Exception):
    """Test code asks for what this sandbox does not offer."""


def as_list(tagged: Mapping[str, Any]) -> Any:
    """`values.decode`'s hook where a linked list or tree is wanted as the list of its values."""
    for tag in ("linked", "tree"):
        if tag in tagged:
            return [values.decode(item, as_list) for item in tagged[tag]]
    raise ValueError("unknown tag")


def resolve(namespace: Mapping[str, Any], entry: str) -> Callable[..., Any]:
    """The function that tests call: a method of ``Solution`` if it has one of this name, else the module's own."""
    if not entry.isidentifier():
        return eval(entry, dict(namespace))
    solution = namespace.get("Solution")
    if isinstance(solution, type) and hasattr(solution, entry):
        return getattr(solution(), entry)
    if entry not in namespace:
        raise NameError(f"the program defines no {entry!r}")
    return namespace[entry]


def arguments_for(
    function: Callable[..., Any], given: Mapping[str, Any], namespace: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Positional and named arguments; lists become nodes where the signature asks for them."""
    decode = _Nodes(namespace).decode
    positional = [decode(item) for item in given["a"]]
    named = {name: decode(item) for name, item in given["k"].items()}
    notes: dict[str, Any] = getattr(function, "__annotations__", None) or {}
    if not notes:
        return positional, named
    asked = [note for name, note in notes.items() if name != "return"]
    nodes = _Nodes(namespace)
    positional = [
        nodes.shaped(item, asked[place] if place < len(asked) else "") for place, item in enumerate(positional)
    ]
    return positional, {name: nodes.shaped(item, notes.get(name, "")) for name, item in named.items()}


def encode_result(function: Callable[..., Any], result: Any) -> Any:
    """A result as plain data; None from a function that returns nodes is the empty list of them."""
    note = (getattr(function, "__annotations__", None) or {}).get("return", "")
    if result is None and ("ListNode" in str(note) or "TreeNode" in str(note)):
        return {"linked": []}
    return values.encode(result)


class _Nodes:
    """Builds linked lists and trees of the program's own classes, or of the common ones."""

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self._list_node: Callable[..., Any] = namespace.get("ListNode", values.ListNode)
        self._tree_node: Callable[..., Any] = namespace.get("TreeNode", values.TreeNode)

    def shaped(self, value: Any, note: Any) -> Any:
        """``value`` as the annotation says (``Optional[ListNode]``, ``List[TreeNode]``)."""
        text = note if isinstance(note, str) else getattr(note, "__name__", "") + " " + str(note)
        make = values.linked if "ListNode" in text else values.tree if "TreeNode" in text else None
        if make is None or not isinstance(value, list):
            return value
        node = self._list_node if "ListNode" in text else self._tree_node
        if "list[" in text.lower():
            return [make(item, node) if isinstance(item, list) else item for item in value]
        return make(value, node)

    def decode(self, value: Any) -> Any:
        return values.decode(value, self.hook)

    def hook(self, tagged: Mapping[str, Any]) -> Any:
        for tag, make, node in (
            ("linked", values.linked, self._list_node),
            ("tree", values.tree, self._tree_node),
        ):
            if tag in tagged:
                return make([self.decode(item) for item in tagged[tag]], node)
        raise ValueError("unknown tag")


class _Lines:
    """Messages over a pair of pipes, a line of JSON each."""

    def __init__(self, incoming: int, outgoing: int) -> None:
        self._incoming = os.fdopen(incoming, "rb")
        self._outgoing = outgoing

    def send(self, message: Mapping[str, Any]) -> None:
        data = memoryview(dumps(message).encode("ascii") + b"\n")
        while data:
            data = data[os.write(self._outgoing, data) :]

    def receive(self) -> dict[str, Any] | None:
        line = self._incoming.readline(_MAX_LINE)
        if not line.endswith(b"\n"):
            return None
        message = loads(line)
        return message if isinstance(message, dict) else None


class Server:
    """The program's side: answers until the other side is done."""

    def __init__(self, calls: int, replies: int, namespace: dict[str, Any], folder: str) -> None:
        self._lines = _Lines(calls, replies)
        self._namespace = namespace
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._replaced: dict[str, tuple[Any, str, Any]] = {}
        self._files = Files(folder)
        self._nodes = _Nodes(namespace)
        self._as_nodes = False
        self._turn = threading.RLock()

    def serve(self) -> None:
        while (message := self._lines.receive()) is not None:
            self._lines.send(self._answer(message))

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            self._files.apply(message.get("files"))
            found: dict[str, Any] = getattr(self, "_op_" + message["op"])(message)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the program's exception belongs to the test code
            found = {"error": self._error(error)}
        if isinstance(sys.stdout, io.StringIO) and sys.stdout.tell():
            found["out"] = sys.stdout.getvalue()
            sys.stdout.seek(0)
            sys.stdout.truncate()
        if (changed := self._files.changes()) is not None:
            found["files"] = changed
        return found

    def _op_hello(self, message: dict[str, Any]) -> dict[str, Any]:
        """What the program defines: functions and classes as handles, exceptions by their kinds, values as None."""
        self._as_nodes = message["nodes"]
        names: dict[str, Any] = {}
        for name, value in self._namespace.items():
            if not name.startswith("__") and not isinstance(value, types.ModuleType):
                handle = self._handle(value) if callable(value) else None
                names[name] = handle and handle["h"]
                if isinstance(value, type) and issubclass(value, BaseException):
                    names[name] = _kinds(value)
        return {"names": names}

    def _op_get(self, message: dict[str, Any]) -> dict[str, Any]:
        target = self._decode(message["of"])
        return {"value": self._encode(getattr(target, message["attribute"]) if "attribute" in message else target)}

    def _op_set(self, message: dict[str, Any]) -> dict[str, Any]:
        setattr(self._decode(message["of"]), message["attribute"], self._decode(message["a"][0]))
        return {"value": None}

    def _op_delete(self, message: dict[str, Any]) -> dict[str, Any]:
        delattr(self._decode(message["of"]), message["attribute"])
        return {"value": None}

    def _op_call(self, message: dict[str, Any]) -> dict[str, Any]:
        target = self._decode(message["of"])
        positional = [self._decode(item) for item in message["a"]]
        named = {name: self._decode(item) for name, item in message["k"].items()}
        result = target(*positional, **named)
        reply = {"value": self._encode(result)}
        given = [*positional, *named.values()]
        if any(isinstance(item, list | dict | set | bytearray | collections.deque) for item in given):
            reply["after"] = [self._encode(item) for item in given]
        return reply

    def _op_wait(self, message: dict[str, Any]) -> dict[str, Any]:
        import asyncio  # would slow every fork

        return {"value": self._encode(asyncio.run(self._decode(message["of"])))}

    def _op_replace(self, message: dict[str, Any]) -> dict[str, Any]:
        """Set an attribute of a module that program and tests share, or put back what was there."""
        module, attribute = message["module"], message["attribute"]
        key = f"{module} {message['path']} {attribute}"
        own = module == ""
        if "a" not in message:
            where, name, before = self._replaced.pop(key)
            self._put(where, name, before)
            return {"value": None}
        where: Any = self._namespace if own else importlib.import_module(module)
        for part in message["path"]:
            where = getattr(where, part)
        before = where.get(attribute, _ABSENT) if own else getattr(where, attribute, _ABSENT)
        self._replaced.setdefault(key, (where, attribute, before))
        self._put(where, attribute, self._decode(message["a"][0]))
        return {"value": None}

    def _put(self, where: Any, name: str, value: Any) -> None:
        spaces = [where if isinstance(where, dict) else None]
        if where is builtins:  # the program's own view of them is a copy
            spaces.append(self._namespace["__builtins__"])
            setattr(builtins, name, value)
        elif spaces == [None]:
            delattr(where, name) if value is _ABSENT else setattr(where, name, value)
        for space in spaces:
            if space is not None:
                space.pop(name, None) if value is _ABSENT else space.update({name: value})

    def _error(self, error: BaseException) -> dict[str, Any]:
        found: dict[str, Any] = {"kinds": _kinds(type(error)), "text": str(error)[:400], "args": [], "vars": {}}
        try:
            found["args"] = [self._encode(item) for item in error.args]
            found["vars"] = {name: self._encode(item) for name, item in vars(error).items()}
        except Exception:  # noqa: BLE001 - its text will do
            found["args"] = [found["text"]]
        return found

    def _encode(self, value: Any) -> Any:
        return values.encode(value, self._handle)

    def _handle(self, value: Any) -> Any:
        if self._as_nodes and hasattr(value, "val") and (hasattr(value, "next") or hasattr(value, "left")):
            return None
        if isinstance(value, Borrowed):
            return {"lent": value.number}
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)
        return {"h": [number, isinstance(value, type), isinstance(value, Coroutine)]}

    def _decode(self, value: Any) -> Any:
        return values.decode(value, self._hook)

    def _hook(self, tagged: Mapping[str, Any]) -> Any:
        (tag, content), *_ = tagged.items()
        if tag == "h":
            return self._objects[content[0]]
        if tag == "name":
            return resolve(self._namespace, content)
        if tag == "operator":
            return getattr(operator, content, None) or getattr(builtins, content)
        if tag == "stranger":
            return object()
        if tag == "lent":
            return Borrowed(self, content)
        return self._nodes.hook(tagged)

    def borrowed(self, number: int, op: str, **fields: Any) -> Any:
        """Use something of the tests'."""
        fields["a"] = [self._encode(item) for item in fields.get("a", ())]
        fields["k"] = {name: self._encode(item) for name, item in fields.get("k", {}).items()}
        with self._turn:
            self._lines.send({"op": op, "lent": number, **fields})
            while (message := self._lines.receive()) is not None:
                if "op" in message:
                    self._lines.send(self._answer(message))
                elif "value" in message:
                    return self._decode(message["value"])
                else:
                    raise _made(message["error"], self._decode)
        os._exit(1)  # the tests have ended


_ABSENT: Any = object()


class Borrowed:
    """Something of the tests' in the program's process: a function, a mock, a text file."""

    def __init__(self, server: Server, number: int) -> None:
        self.__dict__.update(_server=server, number=number)

    def __call__(self, *positional: Any, **named: Any) -> Any:
        return self._server.borrowed(self.number, "call", a=positional, k=named)

    def __getattr__(self, name: str) -> Any:
        return self._server.borrowed(self.number, "get", attribute=name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._server.borrowed(self.number, "set", attribute=name, a=[value])

    def __exit__(self, *error: Any) -> Any:
        return self.__getattr__("__exit__")(None, None, None)


def _forward(name: str) -> Callable[..., Any]:
    def forward(self: Borrowed, *given: Any) -> Any:
        return self.__getattr__(name)(*given)

    return forward


for _name in _SPECIAL - {"__exit__"}:
    setattr(Borrowed, _name, _forward(_name))


def _kinds(error: type) -> list[list[str]]:
    return [[kind.__module__, kind.__qualname__] for kind in error.__mro__]


class Client:
    """The tests' side. Nothing of the program's is believed but what it answers as plain data.

    Attributes:
        called: how often something of the program's was used.
        gone: why the program is no more, or None.
    """

    def __init__(self, replies: int, calls: int, folder: str) -> None:
        self._lines = _Lines(replies, calls)
        self._lent: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._nodes = _Nodes({})
        self._files = Files(folder)
        self._names: dict[str, Any] | None = None
        self._errors: dict[str, type[BaseException]] = {}
        self._turn = threading.RLock()
        self.called = 0
        self.gone: str | None = None
        self.first_call: Callable[[], None] = lambda: None

    def greet(self, namespace: Mapping[str, Any]) -> None:
        """Say what the tests bring; lists and trees arrive as nodes of the tests' classes, if they have such."""
        self._nodes = _Nodes(namespace)
        nodes = "ListNode" in namespace or "TreeNode" in namespace
        with contextlib.suppress(OSError):  # its end shows when it is asked for something
            self._lines.send({"op": "hello", "nodes": nodes})

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
        with self._turn:  # tests may use threads
            return self._exchanged(message)

    def _exchanged(self, message: dict[str, Any]) -> dict[str, Any]:
        if (changed := self._files.changes()) is not None:
            message["files"] = changed
        self._send(message)
        while True:
            reply = self._receive()
            if "op" in reply:
                self._send(self._answer(reply))
                continue
            self._files.apply(reply.get("files"))
            if isinstance(reply.get("out"), str):
                sys.stdout.write(reply["out"])
            if "value" in reply:
                return reply
            self._raise(reply.get("error"))

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The program uses what was lent to it: a function by calling it, a stand-in by its public attributes."""
        try:
            lent = self._lent[request["lent"]]
            given = [self._decode(item) for item in request["a"]]
            if request["op"] == "call":
                result = lent(*given, **{name: self._decode(item) for name, item in request["k"].items()})
                return {"value": self._encode(result)}
            name = str(request["attribute"])
            if not _may_use(lent, name):
                raise AttributeError(f"a program may not use {name!r} of what tests lend it")
            if request["op"] == "set":
                setattr(lent, name, given[0])
                return {"value": None}
            return {"value": self._encode(getattr(lent, name))}
        except Exception as error:  # noqa: BLE001 - goes back to the program that called
            return {"error": {"kinds": _kinds(type(error)), "args": [str(item) for item in error.args], "vars": {}}}

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self._lines.send(message)
        except OSError as error:
            raise self._nonsense("it ended before it was called") from error

    def _receive(self) -> dict[str, Any]:
        if self.gone is not None:
            raise ProgramGone(self.gone)
        try:
            message = self._lines.receive()
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
        number = self._numbers.setdefault(id(value), len(self._lent))
        if number == len(self._lent):
            self._lent.append(value)
        return {"lent": number}

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
        if name not in self._errors:
            self._errors[name] = type(name, (self._error_class(kinds[1:]),), {})
        return self._errors[name]

    def _raise(self, error: Any) -> NoReturn:
        """The program's exception, marked as such."""
        try:
            raised = _made(error, self._decode, self._error_class)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as trouble:
            raise self._nonsense(str(trouble)) from trouble
        raised._of_program = True  # pyright: ignore[reportAttributeAccessIssue]
        raise raised


def of_program(error: BaseException) -> bool:
    """Whether the program raised this exception."""
    return getattr(error, "_of_program", False) is True


def _made(error: Any, decode: Callable[[Any], Any], kind_of: Any = None) -> BaseException:
    """An exception from its description: kinds, arguments, attributes."""
    kinds = [(str(module), str(name)) for module, name in error["kinds"]]
    if kind_of is None:
        found = (getattr(builtins, name, None) for module, name in kinds if module == "builtins")
        kind = next((kind for kind in found if isinstance(kind, type) and issubclass(kind, Exception)), Exception)
    else:
        kind = kind_of(kinds)
    arguments = [decode(item) for item in error["args"]]
    try:
        made = kind(*arguments)
    except TypeError:
        made = kind.__new__(kind, *arguments)
    made.args = tuple(arguments)
    for name, value in error["vars"].items():
        if not name.startswith("_"):
            setattr(made, name, decode(value))
    return made


def _is_mock(value: Any) -> bool:
    mock = sys.modules.get("unittest.mock")
    return mock is not None and isinstance(value, mock.NonCallableMock)


def _may_use(lent: Any, name: str) -> bool:
    """Whether a program may read or set an attribute: never one that steers a mock, nor one that leads elsewhere."""
    if _is_mock(lent):  # its children only: its own interface is the tests'
        interface = dir(sys.modules["unittest.mock"].NonCallableMock)
        return name in _SPECIAL or not (name.startswith(("_", "assert")) or name in interface)
    own = type(lent).__module__ == "__main__" and not isinstance(lent, type)
    return (own or isinstance(lent, _STAND_INS)) and (name in _SPECIAL or not name.startswith(("_", "gi_")))


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
        return any(item == one for one in self)

    def __iter__(self) -> Any:
        return self._client.operate("iter", self)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Remote) and self._client.operate("isinstance", instance, self) is True

    def __enter__(self) -> Any:
        return self.__getattr__("__enter__")()

    def __exit__(self, *error: Any) -> Any:
        return self.__getattr__("__exit__")(None, None, None)


def _shown(function: str, *, turned: bool = False) -> Callable[..., Any]:
    """An operator that shows its other operand to the program."""

    def operate(self: Remote, other: Any) -> Any:
        if not isinstance(other, Remote) and not self._own:  # pyright: ignore[reportPrivateUsage]
            raise TypeError(f"the program returned an object where a value was expected ({function})")
        operands = (other, self) if turned else (self, other)
        return self._client.operate(function, *operands)  # pyright: ignore[reportPrivateUsage]

    return operate


def _asked(function: str) -> Callable[..., Any]:
    def operate(self: Remote, *given: Any) -> Any:
        return self._client.operate(function, self, *given)  # pyright: ignore[reportPrivateUsage]

    return operate


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):  # fmt: skip
    setattr(Remote, f"__{_name}__", _shown(_name))
    setattr(Remote, f"__r{_name}__", _shown(_name, turned=True))
for _name in ("lt", "le", "gt", "ge", "matmul", "and_", "or_", "xor"):  # fmt: skip
    setattr(Remote, f"__{_name.rstrip('_')}__", _shown(_name))
_unary = ("len", "next", "str", "repr", "abs", "neg", "float", "int", "index", "reversed")
for _name in (*_unary, "getitem", "setitem", "delitem"):
    setattr(Remote, f"__{_name}__", _asked(_name))


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
    elif isinstance(mine, dict | set):
        mine.clear()
        mine.update(changed)
    elif isinstance(mine, collections.deque):
        mine.clear()
        mine.extend(changed)
