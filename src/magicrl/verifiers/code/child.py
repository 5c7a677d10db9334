"""What a forked child does: bind itself, then run a program in one of several roles. It never returns.

The guards are in force before a byte of the program is compiled. Two letters on the status channel, written before
the program runs and closed then, say that: R(eady) and C(ompiled).
"""

from __future__ import annotations

import atexit
import builtins
import json
import marshal
import os
import resource
import signal
import sys
import threading
import types
from dataclasses import dataclass
from math import ceil
from typing import Any, NoReturn

from magicrl.verifiers.code import checker_tools, kernel, landlock, remote, values
from magicrl.verifiers.code.limits import EXIT_CHECKER_CRASHED, EXIT_MEMORY, EXIT_NOT_PLAIN, SLOTS
from magicrl.verifiers.code.seccomp import Filter

_RECURSION = 50_000
_MAX_MESSAGE = 400
_FIRST_SLOT, _END_SLOT = 200, 220

_modules: dict[str, Any] = {}
_convenience: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Guards:
    """What binds a child. A guard that is None was switched off, by a test that shows what it is for."""

    rules: int | None
    filter: Filter | None
    exec_filter: Filter
    folder: str


def prepare() -> None:
    """In the zygote: the names that LeetCode's own environment imports, offered below a program's own."""
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
    atexit._clear()  # pyright: ignore[reportPrivateUsage] # the zygote's own imports registered some: not a program's
    importlib.import_module("random").seed(0)  # the same verdict every time
    # str.encode and the traceback machinery load lazily what Landlock may later hide
    str(ZeroDivisionError())
    "a".encode("utf-8", "surrogatepass")


def run(request: dict[str, Any], fds: dict[str, int], guards: Guards) -> NoReturn:
    """Take the guards, then the role that ``request`` names."""
    status = 1
    try:
        _place(fds)
        _bind(request, guards)
        os.write(SLOTS["status"], b"R")
        _roles[request["role"]](request)
        status = 0
    except BaseException as error:  # noqa: BLE001 - the last frame of a forked child: nothing may pass it
        status = _explain(error)
    finally:
        os._exit(status)


def _place(fds: dict[str, int]) -> None:
    """Every descriptor at its slot, everything else closed (but what `_bind` still needs, below the slots)."""
    for name, fd in fds.items():
        os.dup2(fd, SLOTS[name], inheritable=True)


def _bind(request: dict[str, Any], guards: Guards) -> None:
    os.setsid()
    os.chdir(guards.folder)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    # a second net only: the kernel counts this limit in ticks, which may run ahead of the true time by a quarter
    cpu = ceil(2 * request["cpu"]) + 5
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
    kernel.drop_capabilities()
    if guards.rules is not None:
        landlock.restrict(guards.rules)
    os.closerange(3, _FIRST_SLOT)
    os.closerange(_END_SLOT, 256)
    chosen = guards.exec_filter if request["role"] == "execute" else guards.filter
    if chosen is not None:
        chosen.install(os.getpid())


def _read(name: str) -> bytes:
    """All of an input channel, which is then closed."""
    fd = SLOTS[name]
    parts: list[bytes] = []
    offset = 0
    while part := os.pread(fd, 1 << 20, offset):
        parts.append(part)
        offset += len(part)
    os.close(fd)
    return b"".join(parts)


def _load(request: dict[str, Any]) -> list[types.CodeType]:
    """The program's code objects (prelude, if any, then program): compiled, or as an earlier test compiled them.

    The code that is passed on was made by a child that had run nothing of the program, and only a child that runs
    the program reads it.
    """
    sys.set_int_max_str_digits(0)
    if request["compiled"]:
        codes = marshal.loads(_read("code"))
    else:
        codes = []
        for name in ("prelude", "source"):
            if name in request["fds"]:
                text = _read(name)
                codes.append(compile(text, "main.py" if name == "source" else name, "exec", dont_inherit=True))
        if "code" in request["fds"]:
            _write(SLOTS["code"], marshal.dumps(codes))
            os.close(SLOTS["code"])
    os.write(SLOTS["status"], b"C")
    os.close(SLOTS["status"])
    sys.setrecursionlimit(_RECURSION)
    return codes


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _module(name: str, *, helpful: bool) -> dict[str, Any]:
    """A fresh module's namespace. ``helpful``: names that LeetCode imports are found after the builtins."""
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
    os._exit(status)


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
    function = remote.resolve(namespace, request["entry"])
    positional, named = remote.arguments_for(function, arguments, namespace)
    result = function(*positional, **named)
    try:
        after: Any = [values.encode(item) for item in positional]
    except (values.NotPlainError, RecursionError):
        after = None
    reply = {"result": remote.encode_result(function, result), "after": after}
    _write(SLOTS["result"], json.dumps(reply).encode("ascii"))


def _serve(request: dict[str, Any]) -> None:
    """Run the program as a module, then answer calls from an assertion process."""
    codes = _load(request)
    namespace = _module("solution", helpful=True)
    for code in codes:
        exec(code, namespace)
    remote.Server(SLOTS["calls"], SLOTS["replies"], namespace).serve()


def _assert(request: dict[str, Any]) -> None:
    """Run test code, the program's names standing for calls into the other process. Trusted code, hostile data."""
    codes = _load(request)
    client = remote.Client(SLOTS["replies"], SLOTS["calls"])
    namespace = remote.AssertionNamespace(client, {**_modules, **vars(builtins)})
    for code in codes[:-1]:
        exec(code, namespace)
    namespace.bind(request["entries"], request["check"])
    exec(codes[-1], namespace)
    if request["check"] is not None:
        namespace.call_check(request["check"])
    _write(SLOTS["result"], b"held")


def _judge(request: dict[str, Any]) -> None:
    """Call a checker's function with (input, output, answer). Trusted code, hostile data."""
    codes = _load(request)
    inputs = [values.decode(item, remote.as_list) for item in json.loads(_read("args"))]
    namespace = _module("checker", helpful=True)
    namespace["__builtins__"].update(checker_tools.TOOLS)
    for code in codes:
        exec(code, namespace)
    function = namespace.get("check")
    accepted = function(*inputs) if callable(function) else namespace["sat"](inputs[1])
    _write(SLOTS["result"], b"yes" if accepted else b"no")


def _checker(request: dict[str, Any]) -> None:
    """Run a checker program with testlib's arguments: input, output and answer files."""
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
