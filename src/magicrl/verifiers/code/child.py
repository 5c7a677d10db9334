"""What a forked child does: bind itself, then run a program in one of several roles. It never returns.

The guards are in force before a byte of the program is compiled. Two letters on the status channel, written before
the program runs and closed then, say that: R(eady) and C(ompiled).
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import io
import json
import marshal
import os
import resource
import signal
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any, NoReturn

from magicrl.verifiers.code import kernel, remote, values
from magicrl.verifiers.code.kernel import Script
from magicrl.verifiers.code.seccomp import Filter
from magicrl.verifiers.code.values import EXIT_CHECKER_CRASHED, EXIT_MEMORY, EXIT_NOT_PLAIN, SLOTS

_RECURSION = 50_000
_MAX_MESSAGE = 400
_MAX_DIGITS = 100_000
"""Of an integer that a checker or a test reads or writes; it takes 0.1 s and grows with the square."""
_FIRST_SLOT, _END_SLOT, _EVERY = 200, 220, 0xFFFFFFFF
_WRITE, _CLOSE, _SIGPROCMASK, _PREAD, _GETPID, _CHDIR, _SETPGID = 1, 3, 14, 17, 39, 80, 109  # x86-64
_GETPPID, _PRCTL, _SETRLIMIT, _CLOSE_RANGE = 110, 157, 160, 436

_threads: dict[int, threading.Thread] = vars(threading)["_active"]
"""Live threads: asked with its lock, as the module's function does, costs every child five pages."""
_modules: dict[str, Any] = {}
_convenience: dict[str, Any] = {}
_fresh: dict[str, dict[str, Any]] = {}
"""Modules made before the forks, for one use each."""


@dataclass(frozen=True, slots=True)
class Guards:
    """What binds a child. A guard that is None was switched off, by a test that shows what it is for."""

    rules: int | None
    filter: Filter | None
    exec_filter: Filter
    folder: str
    parent: int
    """The fork server's number as a child sees it."""


class Binding:
    """The guards as system calls of a child.

    Args:
        role: the children's.
        guards: what binds them.
        compiled: the program's compiled form, as a descriptor and the bytes that are there; None: it is yet to be made.
    """

    def __init__(self, role: str, guards: Guards, compiled: tuple[int, int] | None) -> None:
        self._guards = guards
        self._compiled = compiled
        self.code = bytearray(0 if compiled is None else compiled[1])
        """The compiled form, in a child; empty if there is none."""
        self._filter = guards.exec_filter if role == "execute" else guards.filter
        self._folder = ctypes.create_string_buffer(guards.folder.encode())
        self._signals = ctypes.c_uint64(0)
        self._seconds = (ctypes.c_uint64 * 2)()
        self._told = ctypes.create_string_buffer(b"RC")

    def allow(self, cpu: float) -> None:
        """What each child may use, in seconds.

        A second net only: the kernel counts this limit in ticks, which may run ahead of the true time by a quarter.
        """
        self._seconds[0] = self._seconds[1] = ceil(2 * cpu) + 5

    def write(self, script: Script) -> None:
        """Every guard, in force before a byte of the program is read; then word of it on the status channel."""
        guards = self._guards
        if self._compiled is not None:
            fd, size = self._compiled
            into = ctypes.addressof((ctypes.c_char * size).from_buffer(self.code))
            script.call((_PREAD, fd, into, size, 0, 0), size)
        calls: list[kernel.Call] = [
            (_SIGPROCMASK, signal.SIG_SETMASK, kernel.address(self._signals), 0, 8, 0),
            (_SETPGID, 0, 0, 0, 0, 0),
            (_CHDIR, kernel.address(self._folder), 0, 0, 0, 0),
            (_SETRLIMIT, resource.RLIMIT_CPU, kernel.address(self._seconds), 0, 0, 0),
            kernel.DROP_CAPABILITIES,
        ]
        script.call((_PRCTL, kernel.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
        # a fork server that died before this sends no signal any more
        script.call((_GETPPID, 0, 0, 0, 0, 0), guards.parent, guards.parent)
        if guards.rules is not None:
            calls.append(kernel.landlock_restriction(guards.rules))
        calls += [(_CLOSE_RANGE, 3, _FIRST_SLOT - 1, 0, 0, 0), (_CLOSE_RANGE, _END_SLOT, _EVERY, 0, 0, 0)]
        if self._filter is not None:
            me = script.call((_GETPID, 0, 0, 0, 0, 0), 1)
            for place in self._filter.own:
                script.store(place, script.answer_address(me))
            calls.append(self._filter.installation)
        for call in calls:
            script.call(call)
        status, told = SLOTS["status"], kernel.address(self._told)
        if self._compiled is None:
            script.call((_WRITE, status, told, 1, 0, 0))
        else:
            script.call((_WRITE, status, told, 2, 0, 0))
            script.call((_CLOSE, status, 0, 0, 0, 0))


def prepare() -> None:
    """In the fork server: the names that LeetCode's own environment imports, offered below a program's own."""
    import importlib

    for module in ("typing", "collections", "itertools", "functools", "heapq", "bisect", "operator", "math", "string"):
        loaded = importlib.import_module(module)
        for name in getattr(loaded, "__all__", None) or [n for n in vars(loaded) if not n.startswith("_")]:
            if not hasattr(builtins, name):
                _convenience.setdefault(name, getattr(loaded, name))
        _modules[module] = loaded
    for module in ("random", "re", "datetime", "copy", "sys", "json", "os", "time"):
        _modules[module] = importlib.import_module(module)
    _convenience.update(_modules)
    _convenience.update(inf=float("inf"), ListNode=values.ListNode, TreeNode=values.TreeNode)
    atexit._clear()  # pyright: ignore[reportPrivateUsage] # the fork server's own imports registered some: not a program's
    importlib.import_module("random").seed(0)  # the same verdict every time
    # str.encode and the traceback machinery load lazily what Landlock may later hide
    str(ZeroDivisionError())
    "a".encode("utf-8", "surrogatepass")
    sys.set_int_max_str_digits(0)
    sys.setrecursionlimit(_RECURSION)


def run(request: dict[str, Any], bound: bool) -> NoReturn:
    """The role that ``request`` names, if the guards are in force."""
    status = 1
    try:
        if not bound:
            raise OSError("a guard could not be set")
        _roles[request["role"]](request)
        status = 0
    except BaseException as error:  # noqa: BLE001 - the last frame of a forked child: nothing may pass it
        status = _explain(error)
    finally:
        os._exit(status)


def _read(name: str) -> bytes:
    """All of an input channel, which is then closed."""
    fd = SLOTS[name]
    size = os.lseek(fd, 0, os.SEEK_END)
    data = os.pread(fd, size, 0)
    while len(data) < size and (part := os.pread(fd, size - len(data), len(data))):
        data += part
    os.close(fd)
    return data


def _load(request: dict[str, Any], compiler: Callable[[bytes], types.CodeType] | None = None) -> list[types.CodeType]:
    """The program's code objects (prelude, if any, then program): compiled, or as an earlier test compiled them.

    The code that is passed on was made by a child that had run nothing of the program, and only a child that runs
    the program reads it.
    """
    if request["code"]:
        return marshal.loads(request["code"])
    codes: list[types.CodeType] = []
    for name in ("prelude", "source"):
        if name in request["common"]:
            text = _read(name)
            made = None if compiler is None else compiler(text)
            codes.append(made or compile(text, "main.py" if name == "source" else name, "exec", dont_inherit=True))
    if "code" in request["common"]:
        _write(SLOTS["code"], marshal.dumps(codes))
        os.close(SLOTS["code"])
    os.write(SLOTS["status"], b"C")
    os.close(SLOTS["status"])
    return codes


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _module(name: str, *, helpful: bool) -> dict[str, Any]:
    """A fresh module's namespace. ``helpful``: names that LeetCode imports are found after the builtins."""
    fresh = _fresh.get(name)
    if fresh is not None:
        return fresh
    module = types.ModuleType(name)
    sys.modules[name] = module
    namespace = vars(module)
    if helpful:
        namespace["__builtins__"] = {**_convenience, **vars(builtins)}
    else:
        namespace["__builtins__"] = builtins
    return namespace


def _finish() -> None:
    """What the interpreter does at its end: wait for threads, run exit handlers, flush."""
    if len(_threads) > 1:
        end_threads = getattr(threading, "_shutdown", None)
        if end_threads is not None:
            end_threads()
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()


def _program(request: dict[str, Any]) -> None:
    """Run as ``__main__``, as ``python main.py`` would, standard input and output connected."""
    _as_main(request, uncaught=1)


def _as_main(request: dict[str, Any], uncaught: int) -> NoReturn:
    os._exit(_main(request, uncaught))


def _main(request: dict[str, Any], uncaught: int) -> int:
    codes = _load(request)
    namespace = _module("__main__", helpful=False)
    status = 0
    try:
        for code in codes:
            exec(code, namespace)
    except BaseException as error:  # noqa: BLE001 - what the interpreter does with an uncaught exception
        status = _explain(error)
        if status == 1 and not isinstance(error, SystemExit):
            status = uncaught
    _finish()
    return status


def _explain(error: BaseException) -> int:
    """Write an uncaught exception's last line, as a traceback ends; returns the exit status it means."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return int(error.code or 0) & 0xFF
        os.write(2, str(error.code)[:_MAX_MESSAGE].encode("utf-8", "replace"))
        return 1
    status = 1
    if isinstance(error, MemoryError):
        status = EXIT_MEMORY
    elif isinstance(error, values.NotPlainError):
        status = EXIT_NOT_PLAIN
    try:
        where = error.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        line = "" if where is None else f" (line {where.tb_lineno})"
        text = f"{type(error).__name__}: {str(error)[:_MAX_MESSAGE]}{line}"
        os.write(2, b"\n" + text.encode("utf-8", "replace"))
    except BaseException:  # noqa: BLE001 - an exception whose own text fails
        status = status or 1
    return status


def _call(request: dict[str, Any]) -> None:
    """Call a function of the program once; its result, and arguments that it changed, go out as plain data."""
    codes = _load(request)
    arguments = json.loads(_read("args"))
    namespace = _module("solution", helpful=True)
    for code in codes:
        exec(code, namespace)
    function = remote.resolve(namespace, arguments["entry"])
    positional, named = remote.arguments_for(function, arguments, namespace)
    result = function(*positional, **named)
    try:
        after: Any = [values.encode(item) for item in positional]
    except (values.NotPlainError, RecursionError):
        after = None
    reply = {"result": remote.encode_result(function, result), "after": after}
    _write(SLOTS["result"], json.dumps(reply).encode("ascii"))


_REHEARSALS = 20
_SAMPLE = """
def f(a, b):
    c = [x * 2 for x in range(a)]
    return sorted(c)[:b] + [len(c), max(a, b), sum(c)]
if __name__ == "__main__":
    n, m = map(int, input().split())
    for i in range(2):
        print(*f(n, m), str(i), " ".join(map(str, [n, m])))
"""


def rehearse() -> None:
    """In the fork server: run a harmless program as children do, many times.

    What Python makes at a first use (caches of types and attributes, specialised bytecode, parsers of arguments) is
    then made before the forks; made after one, it costs every child the pages that it lies in.
    """
    kept = sys.stdin, sys.stdout
    outside = [os.dup(fd) for fd in (0, 1)]
    compiled = marshal.dumps([compile(_SAMPLE, "main.py", "exec")])
    arguments = json.dumps({"entry": "f", "a": [3, 2], "k": {}}).encode()
    request: dict[str, Any] = {"code": bytearray(compiled), "common": ()}
    try:
        for turn in range(2 * _REHEARSALS):
            for name, content in {"stdin": b"3 2\n", "stdout": b""}.items():
                _rehearsal_file(name, content)
            sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115 - no file to close
            if turn % 2 == 0:
                _main(request, 1)
            else:
                _rehearsal_file("args", arguments)
                _rehearsal_file("result", b"")
                _call(request)
                os.close(SLOTS["result"])
    finally:
        sys.stdin, sys.stdout = kept
        _fresh.update({"__main__": _module("__main__", helpful=False), "solution": _module("solution", helpful=True)})
        for fd, own in enumerate(outside):
            os.dup2(own, fd)
            os.close(own)


def _rehearsal_file(name: str, content: bytes) -> None:
    fd = os.memfd_create(name)
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    os.dup2(fd, SLOTS[name])
    os.close(fd)


def _serve(request: dict[str, Any]) -> None:
    """Run the program as a module, then answer calls from a test process."""
    codes = _load(request)
    namespace = _module("solution", helpful=True)
    sys.stdout = io.StringIO()  # goes to the tests with each answer
    for code in codes:
        exec(code, namespace)
    sys.stdout.seek(0)
    sys.stdout.truncate()
    remote.Server(SLOTS["calls"], SLOTS["replies"], namespace, os.getcwd()).serve()


def _assert(request: dict[str, Any]) -> None:
    """Run test code, the program's names standing for calls into the other process. Trusted code, hostile data."""
    from magicrl.verifiers.code import testrun  # its modules would slow every other fork

    codes = _load(request, testrun.compile_tests)
    sys.set_int_max_str_digits(_MAX_DIGITS)
    client = testrun.Client(SLOTS["replies"], SLOTS["calls"], os.getcwd())
    client.first_call = lambda: _write(SLOTS["result"], b"called\n")
    found = testrun.run(client, codes, request["details"], _modules)
    _write(SLOTS["result"], json.dumps(found).encode("ascii"))


def _judge(request: dict[str, Any]) -> None:
    """Call a checker's function with (input, output, answer). Trusted code, hostile data."""
    from magicrl.verifiers.code.checkers import TOOLS  # preloaded where checkers run, left out of every other fork

    codes = _load(request)
    sys.set_int_max_str_digits(_MAX_DIGITS)
    inputs = [values.decode(item, remote.as_list) for item in json.loads(_read("args"))]
    namespace = _module("checker", helpful=True)
    namespace["__builtins__"].update(TOOLS)
    for code in codes:
        exec(code, namespace)
    function = namespace.get("check")
    accepted = function(*inputs) if callable(function) else namespace["sat"](inputs[1])
    if accepted is not None:
        _write(SLOTS["result"], b"yes" if accepted else b"no")


def _checker(request: dict[str, Any]) -> None:
    """Run a checker program with testlib's arguments: input, output and answer files."""
    sys.set_int_max_str_digits(_MAX_DIGITS)
    sys.argv = ["checker", *(f"/proc/self/fd/{SLOTS[name]}" for name in ("input", "output", "answer"))]
    _as_main(request, uncaught=EXIT_CHECKER_CRASHED)


def _execute(request: dict[str, Any]) -> None:
    """Become a compiled checker, with testlib's arguments."""
    os.write(SLOTS["status"], b"C")
    os.close(SLOTS["status"])
    files = [f"/proc/self/fd/{SLOTS[name]}" for name in ("input", "output", "answer")]
    os.execve(SLOTS["binary"], ["checker", *files], {"PATH": "/usr/bin:/bin"})


_roles = {
    "program": _program,
    "call": _call,
    "serve": _serve,
    "assert": _assert,
    "judge": _judge,
    "checker": _checker,
    "execute": _execute,
}
