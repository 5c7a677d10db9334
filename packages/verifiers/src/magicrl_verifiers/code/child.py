"""What a forked child does: bind itself, then run a program in one of several roles. It never returns.

The guards are in force before a byte of the program is compiled. Two letters on the status channel, written before
the program runs and closed then, say that: R(eady) and C(ompiled).
"""

from __future__ import annotations

import atexit
import builtins
import io
import json
import marshal
import os
import resource
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, NoReturn

from magicrl_verifiers.code import kernel, remote, values
from magicrl_verifiers.code.seccomp import Filter
from magicrl_verifiers.code.values import EXIT_CHECKER_CRASHED, EXIT_MEMORY, EXIT_NOT_PLAIN, SLOTS

_RECURSION = 50_000
_MAX_MESSAGE = 400
_MAX_DIGITS = 100_000
"""Of an integer that a checker or a test reads or writes; it takes 0.1 s and grows with the square."""
_FIRST_SLOT, _END_SLOT, _MOST_DESCRIPTORS = 200, 220, 1024

_modules: dict[str, Any] = {}
_convenience: dict[str, Any] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Guards:
    """What binds a child. A guard that is None was switched off, by a test that shows what it is for.

    Attributes:
        rules: Landlock's, a descriptor.
        filter, exec_filter: of system calls; the second for a compiled checker.
        folder: where a program starts.
        parent: the fork server's number as a child sees it.
    """

    rules: int | None
    filter: Filter | None
    exec_filter: Filter
    folder: str
    parent: int

    def bind(self, request: Mapping[str, Any], cpu: float) -> None:
        """Bind this process before a byte of the program is read; the status channel hears of it.

        Raises:
            OSError: a guard could not be set.
        """
        os.setpgid(0, 0)  # or its signals to its own group would reach the fork server
        os.chdir(self.folder)
        # a second net only: the kernel counts it in ticks, which may run ahead of the true time by a quarter
        seconds = ceil(2 * cpu) + 5
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        kernel.drop_capabilities()
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self.parent:
            raise ProcessLookupError("the fork server died before its death could reach this process")
        if self.rules is not None:
            kernel.landlock_restrict(self.rules)
        # what is left of the fork server's: its socket, and the descriptors of the other runs of the request
        os.closerange(3, _FIRST_SLOT)
        os.closerange(_END_SLOT, _MOST_DESCRIPTORS)
        # last: the guards above need calls that the filter refuses
        filter = self.exec_filter if request["role"] == "execute" else self.filter
        if filter is not None:
            filter.install()
        os.write(SLOTS["status"], b"R")


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


def run(request: dict[str, Any], places: Iterable[tuple[int, int]], guards: Guards, cpu: float) -> NoReturn:
    """The role that ``request`` names, with descriptors put at their places, under every guard."""
    status = 1
    try:
        for fd, number in places:
            os.dup2(fd, number)
        guards.bind(request, cpu)
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
    if request["compiled"]:
        codes: list[types.CodeType] = marshal.loads(_read("code"))
        _say_compiled()
        return codes
    codes = []
    for name in ("prelude", "source"):
        if name in request["common"]:
            text = _read(name)
            made = None if compiler is None else compiler(text)
            codes.append(made or compile(text, "main.py" if name == "source" else name, "exec", dont_inherit=True))
    if "code" in request["common"]:
        _write(SLOTS["code"], marshal.dumps(codes))
        os.close(SLOTS["code"])
    _say_compiled()
    return codes


def _say_compiled() -> None:
    os.write(SLOTS["status"], b"C")
    os.close(SLOTS["status"])


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
        # behind the program's own names and the built-ins, so that it may define a `gcd` of its own
        namespace["__builtins__"] = {**_convenience, **vars(builtins)}
    else:
        namespace["__builtins__"] = builtins
    return namespace


def _finish() -> None:
    """What the interpreter does at its end: wait for threads, run exit handlers, flush."""
    if threading.active_count() > 1:
        threading._shutdown()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()


def _program(request: dict[str, Any]) -> None:
    """Run as ``__main__``, as ``python main.py`` would, standard input and output connected."""
    os._exit(_main(request, 1))


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
        # arguments that are no plain data any more are left as the caller has them
        after = None
    reply = {"result": remote.encode_result(function, result), "after": after}
    _write(SLOTS["result"], json.dumps(reply).encode("ascii"))


def _serve(request: dict[str, Any]) -> None:
    """Run the program as a module, then answer calls from a test process."""
    codes = _load(request)
    namespace = _module("solution", helpful=True)
    sys.stdout, sys.stderr = io.StringIO(), io.StringIO()  # they go to the tests with each answer
    for code in codes:
        exec(code, namespace)
    # what it printed while it was defined belongs to no answer
    for stream in (sys.stdout, sys.stderr):
        stream.seek(0)
        stream.truncate()
    remote.Server(SLOTS["calls"], SLOTS["replies"], namespace, os.getcwd()).serve()


def _assert(request: dict[str, Any]) -> None:
    """Run test code, the program's names standing for calls into the other process. Trusted code, hostile data."""
    from magicrl_verifiers.code import border, collection, testrun  # their modules would slow every other fork

    codes = _load(request, collection.compile_tests)
    sys.set_int_max_str_digits(_MAX_DIGITS)
    client = border.Client(SLOTS["replies"], SLOTS["calls"], os.getcwd())
    client.first_call = lambda: _write(SLOTS["result"], b"called\n")
    found = testrun.run(client, codes, request["details"], _modules)
    _write(SLOTS["result"], json.dumps(found).encode("ascii"))


def _judge(request: dict[str, Any]) -> None:
    """Call a checker's function with (input, output, answer). Trusted code, hostile data."""
    from magicrl_verifiers.code.checkers import TOOLS  # preloaded where checkers run, left out of every other fork

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
    os._exit(_main(request, EXIT_CHECKER_CRASHED))


def _execute(request: dict[str, Any]) -> None:
    """Become a compiled checker, with testlib's arguments."""
    _say_compiled()
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
