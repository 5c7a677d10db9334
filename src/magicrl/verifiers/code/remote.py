"""Calls across the border: an assertion process calls the program in another process over plain data.

Lines of JSON each way. The program's side may answer whatever it likes: it arrives as exact plain types, as an
exception of a built-in kind, or as a handle whose only equality is identity.
"""

from __future__ import annotations

import builtins
import collections
import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NoReturn

from magicrl.verifiers.code import values

_MAX_LINE = 64 << 20


class CandidateGone(BaseException):
    """The program's process ended or wrote nonsense. Not an Exception: test code must not catch it."""


class CandidateError(Exception):
    """The program raised an exception of its own making."""


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
        data = memoryview(json.dumps(message).encode("ascii") + b"\n")
        while data:
            data = data[os.write(self._outgoing, data) :]

    def receive(self) -> dict[str, Any] | None:
        line = self._incoming.readline(_MAX_LINE)
        if not line.endswith(b"\n"):
            return None
        message = json.loads(line)
        return message if isinstance(message, dict) else None


class Server:
    """The program's side: answers calls until the other side is done."""

    def __init__(self, calls: int, replies: int, namespace: dict[str, Any]) -> None:
        self._lines = _Lines(calls, replies)
        self._namespace = namespace
        self._objects: list[Any] = []
        self._nodes = _Nodes(namespace)

    def serve(self) -> None:
        names = [name for name in self._namespace if not name.startswith("__")]
        self._lines.send({"names": names})
        while (message := self._lines.receive()) is not None:
            self._lines.send(self._answer(message))

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            target = self._objects[message["h"][0]] if "h" in message else resolve(self._namespace, message["name"])
            if message["op"] == "get":
                return {
                    "value": self._encode(getattr(target, message["attribute"]) if "attribute" in message else target)
                }
            positional = [self._decode(item) for item in message["a"]]
            if message["op"] == "set":
                setattr(target, message["attribute"], positional[0])
                return {"value": None}
            named = {name: self._decode(item) for name, item in message["k"].items()}
            result = target(*positional, **named)
            reply = {"value": self._encode(result)}
            if any(isinstance(item, list | dict | set | collections.deque) for item in positional):
                reply["after"] = [self._encode(item) for item in positional]
            return reply
        except Exception as error:  # noqa: BLE001 - the program's exception belongs to the test code
            return {"error": [type(error).__name__, str(error)[:400], [kind.__name__ for kind in type(error).__mro__]]}

    def _encode(self, value: Any) -> Any:
        return values.encode(value, self._handle)

    def _handle(self, value: Any) -> Any:
        if hasattr(value, "val") and (hasattr(value, "next") or hasattr(value, "left")):
            return None
        self._objects.append(value)
        return {"h": [len(self._objects) - 1, values.truth(value)]}

    def _decode(self, value: Any) -> Any:
        return values.decode(value, self._hook)

    def _hook(self, tagged: Mapping[str, Any]) -> Any:
        if "h" in tagged:
            return self._objects[tagged["h"][0]]
        if "callback" in tagged:
            return partial(self._call_back, tagged["callback"])
        return self._nodes.hook(tagged)

    def _call_back(self, number: int, /, *positional: Any, **named: Any) -> Any:
        encoded = {name: self._encode(item) for name, item in named.items()}
        self._lines.send({"callback": number, "a": [self._encode(item) for item in positional], "k": encoded})
        while (message := self._lines.receive()) is not None:
            if "op" in message:
                self._lines.send(self._answer(message))
            elif "value" in message:
                return self._decode(message["value"])
            else:
                _raise(message["error"])
        raise SystemExit(1)


class Client:
    """The assertion side: names of the program as callables."""

    def __init__(self, replies: int, calls: int) -> None:
        self._lines = _Lines(replies, calls)
        self._callbacks: list[Callable[..., Any]] = []
        self._nodes = _Nodes({})
        names = self._receive().get("names")
        self.names: frozenset[str] = (
            frozenset(n for n in names if isinstance(n, str)) if isinstance(names, list) else frozenset()
        )

    def call(self, target: Mapping[str, Any], positional: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        encoded = {name: self._encode(item) for name, item in named.items()}
        reply = self._ask({**target, "op": "call", "a": [self._encode(item) for item in positional], "k": encoded})
        after = reply.get("after")
        if isinstance(after, list) and len(after) == len(positional):
            for mine, changed in zip(positional, after, strict=True):
                _update(mine, self._decode(changed))
        return self._decode(reply["value"])

    def get(self, target: Mapping[str, Any], attribute: str | None) -> Any:
        extra = {} if attribute is None else {"attribute": attribute}
        return self._decode(self._ask({**target, "op": "get", **extra})["value"])

    def set(self, target: Mapping[str, Any], attribute: str, value: Any) -> None:
        self._ask({**target, "op": "set", "attribute": attribute, "a": [self._encode(value)]})

    def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        self._send(message)
        while True:
            reply = self._receive()
            if "callback" in reply:
                self._send(self._called_back(reply))
            elif "value" in reply:
                return reply
            else:
                _raise(reply.get("error"))

    def _called_back(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            function = self._callbacks[request["callback"]]
            positional = [self._decode(item) for item in request["a"]]
            return {
                "value": self._encode(function(*positional, **{n: self._decode(v) for n, v in request["k"].items()}))
            }
        except Exception as error:  # noqa: BLE001 - goes back to the program that called
            return {"error": [type(error).__name__, str(error)[:400]]}

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self._lines.send(message)
        except OSError as error:
            raise CandidateGone("the program ended before it was called") from error

    def _receive(self) -> dict[str, Any]:
        try:
            message = self._lines.receive()
        except (ValueError, RecursionError, OSError) as error:
            raise CandidateGone(f"the program wrote nonsense to the calling channel: {error}") from error
        if message is None:
            raise CandidateGone("the program ended while it was called")
        return message

    def _encode(self, value: Any) -> Any:
        return values.encode(value, self._local)

    def _local(self, value: Any) -> Any:
        if isinstance(value, Remote):
            return dict(object.__getattribute__(value, "_target"))
        if callable(value):
            self._callbacks.append(value)
            return {"callback": len(self._callbacks) - 1}
        return None

    def _decode(self, value: Any) -> Any:
        try:
            return values.decode(value, self._hook)
        except (ValueError, TypeError, RecursionError, ArithmeticError, AttributeError, IndexError) as error:
            raise CandidateGone(f"the program answered nonsense: {error}") from error

    def _hook(self, tagged: Mapping[str, Any]) -> Any:
        handle = tagged.get("h")
        if isinstance(handle, list) and len(handle) == 2:
            return Remote(self, {"h": handle})
        return self._nodes.hook(tagged)

    def make_nodes(self, nodes: _Nodes) -> None:
        """Lists and trees arrive as nodes of these classes."""
        self._nodes = nodes


class Remote:
    """Something of the program's. Equal to itself alone; as true as it was when it came."""

    _client: Client
    _target: Mapping[str, Any]

    def __init__(self, client: Client, target: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_client", client)
        object.__setattr__(self, "_target", target)

    def __call__(self, *positional: Any, **named: Any) -> Any:
        return self._client.call(self._target, positional, named)

    def __getattr__(self, name: str) -> Any:
        if "name" in self._target and "h" not in self._target:
            whole = self._client.get(self._target, None)
            return getattr(whole, name)
        return self._client.get(self._target, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._client.set(self._target, name, value)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__getattr__("__setitem__")(key, value)

    def __contains__(self, key: Any) -> bool:
        return self.__getattr__("__contains__")(key) is True

    def __getitem__(self, key: Any) -> Any:
        return self.__getattr__("__getitem__")(key)

    def __len__(self) -> int:
        return self.__getattr__("__len__")()

    def __iter__(self) -> Iterator[Any]:
        return iter([self[place] for place in range(len(self))])

    def __bool__(self) -> bool:
        return "h" not in self._target or self._target["h"][1] is True


class AssertionNamespace(dict[str, Any]):
    """Globals of test code: its own names first, then built-ins, then the program's."""

    def __init__(self, client: Client, builtin_names: Mapping[str, Any]) -> None:
        super().__init__()
        self["__name__"] = "tests"
        self["__builtins__"] = dict(builtin_names)
        self._client = client

    def __missing__(self, name: str) -> Any:
        if name in self["__builtins__"] or name not in self._client.names:
            raise KeyError(name)
        return Remote(self._client, {"name": name})

    def bind(self, entries: list[str], point: str | None) -> None:
        """These names mean the program's, but for what the prelude brought; nodes are of the prelude's classes."""
        self._client.make_nodes(_Nodes(self))
        for entry in entries:
            if entry == point or entry not in self:
                self[entry] = Remote(self._client, {"name": entry})

    def call_check(self, entry: str) -> None:
        """Run ``check(candidate)`` for test code that defines it and leaves the call to its harness."""
        candidate = self[entry] if entry.isidentifier() else Remote(self._client, {"name": entry})
        self["check"](candidate)


def _update(mine: Any, changed: Any) -> None:
    """A mutable argument takes the content that the program gave it."""
    if type(mine) is not type(changed):
        return
    if isinstance(mine, list):
        mine[:] = changed
    elif isinstance(mine, dict | set):
        mine.clear()
        mine.update(changed)
    elif isinstance(mine, collections.deque):
        mine.clear()
        mine.extend(changed)


def _raise(error: Any) -> NoReturn:
    """The program's exception, as the nearest built-in kind."""
    if not isinstance(error, list) or len(error) < 2:
        raise CandidateGone("the program answered nonsense")
    name, message = str(error[0]), str(error[1])
    for kind in [name, *(error[2] if len(error) > 2 and isinstance(error[2], list) else [])]:
        found = getattr(builtins, kind, None) if isinstance(kind, str) else None
        if isinstance(found, type) and issubclass(found, Exception) and found is not Exception:
            try:
                made = found(message)
            except TypeError:
                continue
            raise made
    raise CandidateError(f"{name}: {message}")
