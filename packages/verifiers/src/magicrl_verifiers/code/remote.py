"""Calls across the border: test code in one process, the program in another, plain data between them.

Lines of JSON each way. Whatever the program answers arrives as exact plain types, as an exception, or as a handle
(`border.ProgramObject`). The program may call functions that tests lend to it, and read attributes only of stand-ins
(mocks, text files). This module has the program's side and what both share; the tests' side is in `border`.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import copy
import importlib
import io
import itertools
import operator
import os
import stat
import sys
import threading
import types
from collections.abc import Callable, Coroutine, Iterator, Mapping
from json import dumps, loads  # by name: test code may put mocks in the place of the module's functions
from os import chdir, close, getcwd, lstat, makedirs, pread, remove, rmdir, scandir
from os import open as open_file
from typing import Any, ClassVar

from magicrl_verifiers.code import values

_MAX_FILE_BYTES = 16 << 20
_MAX_LINE = 64 << 20
_MOST_SHARED = 4
_MOST_SHARED_ITEMS = 500
"""Results of the program that are kept alike on both sides: how many, and how large one may be."""
MUTABLE = (list, dict, set, bytearray, collections.deque)
# never through a link: a program could aim it at a file of the other side
_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC


class Files:
    """One side's view of a folder that two processes with separate file systems keep alike.

    Test code writes a file and gives its name to the program, which writes another; what changed since the last message
    goes with the next one. In tier A nothing can be written, so nothing is exchanged.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._known: dict[str, tuple[int, ...]] = {}

    def changes(self) -> dict[str, Any] | None:
        """Return changes since the last look: content by path (None for a folder), and deleted paths. None: nothing."""
        if self._folder == "/":
            return None
        before, self._known = self._known, dict(self._walk())
        if before == self._known:
            return None
        new: dict[str, str | None] = {}
        room = _MAX_FILE_BYTES
        for path, state in self._known.items():
            if before.get(path) != state:
                # a folder's state is (0,)
                content = None if len(state) == 1 else self._read(path, min(state[1], room))
                room -= len(content or "")
                new[path] = content
        return {"new": new, "gone": [path for path in before if path not in self._known]}

    def apply(self, changed: Any) -> None:
        """Make the other side's changes here; what is no plain path below the folder is left out."""
        if not isinstance(changed, dict) or self._folder == "/":
            return
        new, gone = changed.get("new"), changed.get("gone")
        # a file where a folder is wanted, a name too long, no room: the other side sees it missing
        for path in filter(_below, reversed(gone if isinstance(gone, list) else [])):
            with contextlib.suppress(OSError, ValueError):
                gone_path = f"{self._folder}/{path}"
                (rmdir if stat.S_ISDIR(lstat(gone_path).st_mode) else remove)(gone_path)
        for path, content in (new if isinstance(new, dict) else {}).items():
            if _below(path) and (content is None or isinstance(content, str)):
                with contextlib.suppress(OSError, ValueError):
                    self._write(f"{self._folder}/{path}", content)
        self._known = dict(self._walk())

    def _walk(self, below: str = "") -> Iterator[tuple[str, tuple[int, ...]]]:
        with contextlib.suppress(OSError), scandir(f"{self._folder}/{below}") as entries:
            for entry in entries:
                path = f"{below}{entry.name}"
                state = lstat(f"{self._folder}/{path}")
                if stat.S_ISDIR(state.st_mode):
                    yield path, (0,)
                    yield from self._walk(path + "/")
                elif stat.S_ISREG(state.st_mode):
                    yield path, (state.st_mtime_ns, state.st_size, state.st_ino)

    def _read(self, path: str, size: int) -> str:
        fd = open_file(f"{self._folder}/{path}", os.O_RDONLY | _SAFE)
        try:
            # latin-1 takes every byte, and JSON carries its characters
            return pread(fd, size, 0).decode("latin-1")
        finally:
            close(fd)

    def _write(self, path: str, content: str | None) -> None:
        if content is None:
            makedirs(path, exist_ok=True)
            return
        fd = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _SAFE, 0o666)
        try:
            values.write_all(fd, content.encode("latin-1"))
        finally:
            close(fd)


def _below(path: Any) -> bool:
    return isinstance(path, str) and bool(path) and ".." not in path.split("/") and not path.startswith("/")


_COMPARISONS = ("lt", "le", "gt", "ge")
SPECIAL = frozenset(
    f"__{name}__"
    for name in ("enter", "exit", "iter", "next", "len", "getitem", "setitem", "contains", "str", *_COMPARISONS)
)
"""Special methods that a program may call on an object of the tests."""


class Unsupported(Exception):
    """Test code needs what this sandbox does not offer.

    Attributes:
        first: text of the first one in this process. Test code may catch the exception, but the verdict must not.
    """

    first: ClassVar[str | None] = None

    def __init__(self, text: str) -> None:
        super().__init__(text)
        Unsupported.first = Unsupported.first or text


def as_list(tagged: Mapping[str, Any]) -> Any:
    """`values.decode`'s hook where a linked list or tree is wanted as the list of its values."""
    for tag in ("linked", "tree"):
        if tag in tagged:
            return [values.decode(item, as_list) for item in tagged[tag]]
    raise ValueError("unknown tag")


def program_function(namespace: Mapping[str, Any], entry: str) -> Callable[..., Any]:
    """Return the function that tests call: a method of ``Solution`` with this name, else the module's own."""
    if not entry.isidentifier():
        # a path such as `Solution().f`; evaluated where the program runs, so it can do no more than that
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
    """Positional and named arguments; lists become nodes where the signature says so."""
    nodes = Nodes(namespace)
    positional = [nodes.decode(item) for item in given["a"]]
    named = {name: nodes.decode(item) for name, item in given["k"].items()}
    notes: dict[str, Any] = getattr(function, "__annotations__", None) or {}
    inner: Any = function  # behind `functools.cache` and the like
    while (next_one := getattr(inner, "__func__", None) or getattr(inner, "__wrapped__", None)) is not None:
        inner = next_one
    names = [name for name in notes if name != "return"]
    if (code := getattr(inner, "__code__", None)) is not None:
        names = code.co_varnames[isinstance(function, types.MethodType) : code.co_argcount]
    asked = [notes.get(name, "") for name in names]
    shaped = [
        nodes.shaped(item, note)
        for item, note in itertools.zip_longest(positional, asked[: len(positional)], fillvalue="")
    ]
    return shaped, {name: nodes.shaped(item, notes.get(name, "")) for name, item in named.items()}


def encode_result(function: Callable[..., Any], result: Any) -> Any:
    """Return a result as plain data; None from a function that returns nodes is the empty list of them."""
    note = (getattr(function, "__annotations__", None) or {}).get("return", "")
    if result is None and ("ListNode" in str(note) or "TreeNode" in str(note)):
        return {"linked": []}
    return values.encode(result)


class Nodes:
    """Builds linked lists and trees of the program's own classes, or of the common ones."""

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self._list_node: Callable[..., Any] = namespace.get("ListNode", values.ListNode)
        self._tree_node: Callable[..., Any] = namespace.get("TreeNode", values.TreeNode)

    def shaped(self, value: Any, note: Any) -> Any:
        """Return ``value`` as the annotation says (``Optional[ListNode]``, ``List[TreeNode]``)."""
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
        (tag, items), *_ = tagged.items()
        if tag == "linked":
            return values.linked([self.decode(item) for item in items], self._list_node)
        if tag == "tree":
            return values.tree([self.decode(item) for item in items], self._tree_node)
        return values.decode_rich(tag, items, self.hook)


class Peer:
    """One side of the border: messages over a pair of pipes, a line of JSON each, and what it has lent by number."""

    def __init__(self, incoming: int, outgoing: int, folder: str) -> None:
        self._incoming = os.fdopen(incoming, "rb")
        self._outgoing = outgoing
        self._lent: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._files = Files(folder)
        self._nodes = Nodes({})
        self._environ = dict(_bytes_of_environ())
        self._place = _working_folder()
        self._turn = threading.RLock()  # either side may use threads
        self._shared: collections.deque[tuple[int, Any, Any]] = collections.deque(maxlen=_MOST_SHARED)

    def state_changes(self) -> dict[str, Any]:
        """Return the environment and the working directory, where they changed since they were last exchanged."""
        changed: dict[str, Any] = {}
        if _bytes_of_environ() != self._environ:
            self._environ = dict(_bytes_of_environ())
            changed["environ"] = dict(os.environ)
        if (place := _working_folder()) != self._place:
            self._place = changed["folder"] = place
        return changed

    def apply_state(self, changed: Mapping[str, Any]) -> None:
        """Take over the other side's environment and working directory; what is malformed is left out."""
        environ, folder = changed.get("environ"), changed.get("folder")
        if isinstance(environ, dict) and all(isinstance(one, str) for pair in environ.items() for one in pair):
            with contextlib.suppress(ValueError, OSError):
                for name in [*os.environ]:
                    if name not in environ:
                        del os.environ[name]
                os.environ.update(environ)
        if isinstance(folder, str):
            with contextlib.suppress(OSError, ValueError):
                chdir(folder)
        if environ is not None or folder is not None:
            self.state_changes()

    def share(self, number: int, value: Any) -> None:
        """Keep a mutable result of the program alike on both sides from here on, unless it is large."""
        with contextlib.suppress(_TooLargeError):
            self._shared.append((number, value, _snapshot(value)))

    def shared_changes(self) -> list[Any]:
        """Return the shared values that changed on this side since the last message."""
        changed: list[Any] = []
        for at, (number, value, before) in enumerate(self._shared):
            with contextlib.suppress(_TooLargeError):
                if (now := _snapshot(value)) != before:
                    self._shared[at] = (number, value, now)
                    changed.append([number, self._encode(value)])
        return changed

    def apply_shared(self, changes: Any) -> None:
        """Take over the shared values that changed on the other side."""
        for number, content in changes if isinstance(changes, list) else ():
            for at, (own, value, _) in enumerate(self._shared):
                if own == number:
                    update_in_place(value, self._decode(content))
                    with contextlib.suppress(_TooLargeError):
                        self._shared[at] = (own, value, _snapshot(value))

    def _encode(self, value: Any) -> Any:
        raise NotImplementedError

    def _decode(self, value: Any) -> Any:
        raise NotImplementedError

    def send(self, message: Mapping[str, Any]) -> None:
        values.write_all(self._outgoing, dumps(message).encode("ascii") + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """Return the next message, None at the end. Raises ValueError, RecursionError or OSError for what is none."""
        line = self._incoming.readline(_MAX_LINE)
        if not line.endswith(b"\n"):
            return None
        message = loads(line)
        return message if isinstance(message, dict) else None

    def _number(self, value: Any) -> int:
        # `_lent` keeps the object alive, so that its id stays its own
        number = self._numbers.setdefault(id(value), len(self._lent))
        if number == len(self._lent):
            self._lent.append(value)
        return number


class _TooLargeError(Exception):
    pass


def _snapshot(value: Any, left: list[int] | None = None) -> Any:
    """Return what shows whether a value changed in place: plain content by value, anything else by identity."""
    left = [_MOST_SHARED_ITEMS] if left is None else left
    left[0] -= 1
    if left[0] < 0:
        raise _TooLargeError
    kind = type(value)
    if kind in (list, tuple, collections.deque):
        return kind, [_snapshot(item, left) for item in value]
    if isinstance(value, dict):
        return kind, [(_snapshot(key, left), _snapshot(item, left)) for key, item in dict.items(value)]
    if kind in (set, bytearray):
        left[0] -= len(value)
        return kind, kind(value) if left[0] >= 0 else None
    return (kind, value) if kind in (int, float, str, bool, bytes, complex, type(None)) else id(value)


def update_in_place(mine: Any, changed: Any) -> None:
    """Give a mutable value the content that the other side gave its copy."""
    if not any(isinstance(mine, kind) and isinstance(changed, kind) for kind in MUTABLE):
        return
    if isinstance(mine, list | bytearray):
        mine[:] = changed
    else:
        fill: Any = mine.extend if isinstance(mine, collections.deque) else mine.update
        mine.clear()
        fill(changed)


def _bytes_of_environ() -> Mapping[Any, Any]:
    # `os.environ` decodes every entry when it is copied or compared, and two processes look at it at every exchange
    # test code may put another mapping in its place
    return getattr(os.environ, "_data", os.environ)


def _working_folder() -> str | None:
    try:
        return getcwd()
    except FileNotFoundError:  # it was deleted, and the other side cannot follow
        return None


def taken(stream: io.StringIO) -> str:
    """Return the text of a stream, and empty the stream."""
    text = stream.getvalue()
    stream.seek(0)
    stream.truncate()
    return text


class Server(Peer):
    """The program's side: answers until the other side is done."""

    def __init__(self, calls: int, replies: int, namespace: dict[str, Any], folder: str) -> None:
        super().__init__(calls, replies, folder)
        self._namespace = namespace
        self._nodes = Nodes(namespace)
        self._functions: dict[types.FunctionType, int] = {}
        self._borrowed: dict[int, Borrowed] = {}
        self._results = 0
        self._replaced: dict[str, list[tuple[Any, str, Any]]] = {}
        self._as_nodes = False

    def serve(self) -> None:
        while (message := self.receive()) is not None:
            self.send(self._answer(message))

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            self._files.apply(message.get("files"))
            self.apply_state(message)
            self.apply_shared(message.get("shared"))
            found: dict[str, Any] = getattr(self, "_op_" + message["op"])(message)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the program's exception belongs to the test code
            found = {"error": self._error(error)}
        for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
            if isinstance(stream, io.StringIO) and stream.tell():
                found[name] = taken(stream)
        if (changed := self._files.changes()) is not None:
            found["files"] = changed
        if shared := self.shared_changes():
            found["shared"] = shared
        return found | self.state_changes()

    def _op_hello(self, message: dict[str, Any]) -> dict[str, Any]:
        """Reply with the program's names: functions and classes as handles, exceptions by kinds, values as None."""
        self._as_nodes = message["nodes"]
        names: dict[str, Any] = {}
        for name, value in self._namespace.items():
            if not name.startswith("__") and not isinstance(value, types.ModuleType):
                handle = self._handle(value) if callable(value) else None
                names[name] = handle and handle["h"]
                if isinstance(value, type) and issubclass(value, BaseException):
                    names[name] = kinds_of(value)
        return {"names": names}

    def _op_get(self, message: dict[str, Any]) -> dict[str, Any]:
        target = self._decode(message["of"])
        found = getattr(target, message["attribute"]) if "attribute" in message else target
        return {"value": self._encode(found)} | self._shared_number(found)

    def _shared_number(self, result: Any) -> dict[str, Any]:
        if not isinstance(result, MUTABLE):
            return {}
        self._results += 1
        self.share(self._results, result)
        return {"number": self._results}

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
        if type(result) is target and _has_methods(target, self._namespace["__name__"]):
            reply = {"value": self._handle(result)}
        else:
            reply = {"value": self._encode(result)} | self._shared_number(result)
        given = [*positional, *named.values()]
        if any(isinstance(item, MUTABLE) for item in given):
            reply["after"] = [self._encode(item) for item in given]
            reply["same"] = next((at for at, item in enumerate(given) if item is result), None)
        return reply

    def _op_leave(self, message: dict[str, Any]) -> dict[str, Any]:
        """Call ``__exit__`` of an object of the program, with an error of the same kind if the tests raised one."""
        target, description = self._decode(message["of"]), message["raised"]
        error = made_error(description, self._decode, self._error_kind) if description else None
        return {"value": bool(target.__exit__(type(error) if error else None, error, None))}

    def _error_kind(self, kinds: list[tuple[str, str]]) -> type[BaseException]:
        """Return the nearest class of an exception that the program knows: its own or a built-in one."""
        found = (self._namespace.get(name) or getattr(builtins, name, None) for _, name in kinds)
        return next((kind for kind in found if isinstance(kind, type) and issubclass(kind, Exception)), Exception)

    def _op_seed(self, message: dict[str, Any]) -> dict[str, Any]:
        given = [self._decode(item) for item in message["a"]]
        importlib.import_module("random").seed(
            *given, **{name: self._decode(one) for name, one in message["k"].items()}
        )
        return {"value": None}

    def _op_wait(self, message: dict[str, Any]) -> dict[str, Any]:
        import asyncio  # would slow every fork

        return {"value": self._encode(asyncio.run(self._decode(message["of"])))}

    def _op_replace(self, message: dict[str, Any]) -> dict[str, Any]:
        """Set an attribute of a module that program and tests share, or put back what was there."""
        module, attribute = message["module"], message["attribute"]
        key = f"{module} {message['path']} {attribute}"
        if "a" not in message:
            self._put(*self._replaced[key].pop())
            return {"value": None}
        where: Any = importlib.import_module(module) if module else self._namespace
        for part in message["path"]:
            where = getattr(where, part)
        before = getattr(where, attribute, _ABSENT) if module else where.get(attribute, _ABSENT)
        # patches of one attribute may be nested: the end of each restores the value of the one around it
        self._replaced.setdefault(key, []).append((where, attribute, before))
        self._put(where, attribute, self._decode(message["a"][0]))
        return {"value": None}

    def _put(self, where: Any, name: str, value: Any) -> None:
        if where is builtins:
            setattr(builtins, name, value)
            where = self._namespace["__builtins__"]  # the program's own view of them is a copy
        if not isinstance(where, dict):
            delattr(where, name) if value is _ABSENT else setattr(where, name, value)
        elif value is _ABSENT:
            where.pop(name, None)
        else:
            where[name] = value

    def _error(self, error: BaseException) -> dict[str, Any]:
        found: dict[str, Any] = {"kinds": kinds_of(type(error)), "text": str(error)[:400], "args": [], "vars": {}}
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
        # a function of the tests comes back as itself, unless the program has marked it with an attribute
        if (
            type(value) is types.FunctionType
            and value in self._functions
            and not vars(value).keys() - {"__signature__"}
        ):
            return {"lent": self._functions[value]}
        return {"h": [self._number(value), isinstance(value, type), isinstance(value, Coroutine)]}

    def _decode(self, value: Any) -> Any:
        return values.decode(value, self._hook)

    def _hook(self, tagged: Mapping[str, Any]) -> Any:
        (tag, content), *_ = tagged.items()
        if tag == "h":
            return self._lent[content[0]]
        if tag == "name":
            return program_function(self._namespace, content)
        if tag == "operator":
            return getattr(operator, content, None) or getattr(builtins, content)
        if tag == "stranger":
            return object()
        if tag == "lent":
            # one stand-in for each object, so that `is` works as in one process
            return self._borrowed.setdefault(content, Borrowed(self, content))
        if tag == "function":
            return self._function(*content)
        return self._nodes.hook(tagged)

    def _function(self, number: int, name: str, qualname: str, doc: str | None, parameters: list[Any]) -> Any:
        """Return a function that calls the tests' and looks like it, for ``wraps`` and ``inspect.signature``."""
        import inspect  # the fork server has loaded it

        def call(*positional: Any, **named: Any) -> Any:
            return self.borrowed(number, "call", a=positional, k=named)

        call.__name__, call.__qualname__, call.__doc__, call.__module__ = name, qualname, doc, "tests"
        empty, kinds = inspect.Parameter.empty, list(type(inspect.Parameter.VAR_KEYWORD))
        made = [
            inspect.Parameter(one, kinds[kind], default=self._decode(default[0]) if default else empty)
            for one, kind, default in parameters
        ]
        call.__signature__ = inspect.Signature(made)  # pyright: ignore[reportFunctionMemberAccess]
        self._functions[call] = number
        return call

    def borrowed(self, number: int, op: str, **fields: Any) -> Any:
        """Use something of the tests'."""
        fields["a"] = [self._encode(item) for item in fields.get("a", ())]
        fields["k"] = {name: self._encode(item) for name, item in fields.get("k", {}).items()}
        with self._turn:
            self.send({"op": op, "lent": number, **fields})
            # the tests may call the program while it waits for them (a callback of a callback)
            while (message := self.receive()) is not None:
                if "op" in message:
                    self.send(self._answer(message))
                elif "value" in message:
                    return self._decode(message["value"])
                else:
                    raise made_error(message["error"], self._decode)
        os._exit(1)  # the tests have ended


def _has_methods(kind: type, module: str) -> bool:
    """Return whether a class of the program adds methods to its bases, so that no copy can stand in for its objects."""
    if type(kind) is not type or not issubclass(kind, tuple(values.PLAIN_TYPES)):
        return False
    own = [value for base in kind.__mro__ if base.__module__ == module for value in vars(base).values()]
    own = [getattr(value, "fget", None) or getattr(value, "__func__", value) for value in own]
    return any(getattr(one, "__module__", "") == module or isinstance(one, types.MethodDescriptorType) for one in own)


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

    # an operation by its name, since most objects do not define its special method
    def __bool__(self) -> bool:
        return self._server.borrowed(self.number, "truth")

    def __eq__(self, other: object) -> bool:
        return self is other or self._server.borrowed(self.number, "eq", a=[other])

    def __hash__(self) -> int:
        return self._server.borrowed(self.number, "hash")

    def __copy__(self) -> Any:
        return self._server.borrowed(self.number, "copy")

    def __deepcopy__(self, memo: Any) -> Any:
        return self._server.borrowed(self.number, "deepcopy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        # every loading makes another copy of the state at this moment
        _pickled.append(copy.deepcopy(self))
        return unpickled, (len(_pickled) - 1,)


_pickled: list[Borrowed] = []
"""Copies of the objects of the tests that the program has pickled."""


def unpickled(place: int) -> Any:
    """Return a copy of an object of the tests that the program pickled."""
    return copy.deepcopy(_pickled[place])


def _forward(name: str) -> Callable[..., Any]:
    def forward(self: Borrowed, *given: Any) -> Any:
        return self.__getattr__(name)(*given)

    return forward


for _name in SPECIAL - {"__exit__"}:
    setattr(Borrowed, _name, _forward(_name))


def kinds_of(error: type) -> list[list[str]]:
    return [[kind.__module__, kind.__qualname__] for kind in error.__mro__]


def made_error(error: Any, decode: Callable[[Any], Any], kind_of: Any = None) -> BaseException:
    """Return an exception from its description: kinds, arguments, attributes."""
    kinds = [(str(module), str(name)) for module, name in error["kinds"]]
    if kind_of is None:
        found = (getattr(builtins, name, None) for module, name in kinds if module == "builtins")
        # nearest built-in class: the program's process knows none of the tests' own
        kind = next((kind for kind in found if isinstance(kind, type) and issubclass(kind, Exception)), Exception)
    else:
        kind = kind_of(kinds)
    arguments = [decode(item) for item in error["args"]]
    try:
        made = kind(*arguments)
    except TypeError:
        # its __init__ wants other arguments than those that it keeps in `args`
        made = kind.__new__(kind, *arguments)
    made.args = tuple(arguments)
    for name, value in error["vars"].items():
        if not name.startswith("_"):
            setattr(made, name, decode(value))
    return made
