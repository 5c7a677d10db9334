"""The warm process that forks one child per test, and what a child does. Standard library only.

`sandbox.ForkServer` starts it. It imports what contest programs import, isolates itself as far as the system allows,
and then serves requests: it forks a child under every limit, watches it and reports its end. It never sees an expected
output, because a child inherits this process's memory.

A child binds itself with every guard before a byte of the program is compiled, then runs one of the roles below and
never returns. It writes two letters to the status channel before the program runs and then closes it: R (the guards are
set) and C (the program is compiled).
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import dataclasses
import fcntl
import gc
import importlib
import io
import json
import marshal
import os
import resource
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, NoReturn

from magicrl_verifiers.code import kernel, remote, values
from magicrl_verifiers.code.values import (
    EXIT_CHECKER_BROKEN,
    EXIT_CHECKER_CRASHED,
    EXIT_MEMORY,
    EXIT_NOT_PLAIN,
    SLOTS,
    present_cpu,
)

_RECURSION = 50_000
_MAX_MESSAGE = 400
_MAX_DIGITS = 100_000
"""Digits of an integer that a checker or a test reads or writes: 0.1 s, and quadratic beyond."""
_FIRST_SLOT, _END_SLOT, _MOST_DESCRIPTORS = 200, 220, 1024

_modules: dict[str, Any] = {}
_convenience: dict[str, Any] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Guards:
    """The guards of a child. A guard that is None was switched off by a test.

    Attributes:
        rules: descriptor of the Landlock rules.
        filter, exec_filter: filters of system calls; the second is for a compiled checker.
        folder: working directory of a program.
        parent: the fork server's number as a child sees it.
    """

    rules: int | None
    filter: kernel.Filter | None
    exec_filter: kernel.Filter
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
        # descriptors of the fork server: its socket, and those of the other runs of the request
        os.closerange(3, _FIRST_SLOT)
        os.closerange(_END_SLOT, _MOST_DESCRIPTORS)
        # last: the guards above need calls that the filter refuses
        filter = self.exec_filter if request["role"] == "execute" else self.filter
        if filter is not None:
            filter.install()
        os.write(SLOTS["status"], b"R")


def prepare() -> None:
    """Load, in the fork server, the names that LeetCode imports; they are offered after a program's own."""
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
    """Run the role that ``request`` names, with descriptors put at their places, under every guard."""
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
    """Read all of an input channel and close it."""
    data = values.read_all(SLOTS[name])
    os.close(SLOTS[name])
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
        values.write_all(SLOTS["code"], marshal.dumps(codes))
        os.close(SLOTS["code"])
    _say_compiled()
    return codes


def _say_compiled() -> None:
    os.write(SLOTS["status"], b"C")
    os.close(SLOTS["status"])


def _module(name: str, *, helpful: bool) -> dict[str, Any]:
    """Return a fresh module's namespace. ``helpful``: names that LeetCode imports are found after the builtins."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    namespace = vars(module)
    if helpful:
        # behind the program's own names and the built-ins, so that it may define its own `gcd`
        namespace["__builtins__"] = {**_convenience, **vars(builtins)}
    else:
        namespace["__builtins__"] = builtins
    return namespace


def _finish(namespace: dict[str, Any]) -> None:
    """Do what the interpreter does at its end: wait for threads, run exit handlers, flush, drop the program's names."""
    if threading.active_count() > 1:
        threading._shutdown()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not getattr(stream, "closed", False):
            stream.flush()
    while namespace:  # closes open files, and so writes what they hold; finalizers still see what was made before
        namespace.popitem()
    for stream in (sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(AttributeError, ValueError, OSError):  # none, closed, detached, or its file is closed
            stream.flush()  # pyright: ignore[reportOptionalMemberAccess]


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
            status = EXIT_CHECKER_BROKEN if uncaught != 1 and _own_mistake(error) else uncaught
    _finish(namespace)
    return status


def _program_lines(error: BaseException) -> list[int | None]:
    """Return the lines of an exception's traceback, the innermost last; None for those outside the program."""
    lines: list[int | None] = []
    where = error.__traceback__
    while where is not None:
        lines.append(where.tb_lineno if where.tb_frame.f_code.co_filename == "main.py" else None)
        where = where.tb_next
    return lines


def _own_mistake(error: BaseException) -> bool:
    """Return whether a checker's own lines, not text that it evaluates, name or import what does not exist."""
    lines = _program_lines(error)
    return bool(lines and lines[-1]) and type(error) in (NameError, ImportError, ModuleNotFoundError)


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
        lines = [line for line in _program_lines(error) if line is not None]
        where = f" (line {lines[-1]})" if lines else ""
        text = f"{type(error).__name__}: {str(error)[:_MAX_MESSAGE]}{where}"
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
    function = remote.program_function(namespace, arguments["entry"])
    positional, named = remote.arguments_for(function, arguments, namespace)
    result = function(*positional, **named)
    try:
        after: Any = [values.encode(item) for item in (*positional, *named.values())]
    except (values.NotPlainError, RecursionError):
        # arguments that are no plain data any more are left as the caller has them
        after = None
    reply = {"result": remote.encode_result(function, result), "after": after}
    values.write_all(SLOTS["result"], json.dumps(reply).encode("ascii"))


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
    from magicrl_verifiers.code import border, testrun  # their modules would slow every other fork

    codes = _load(request, testrun.compile_tests)
    sys.set_int_max_str_digits(_MAX_DIGITS)
    client = border.Client(SLOTS["replies"], SLOTS["calls"], os.getcwd())
    client.first_use = lambda: values.write_all(SLOTS["result"], b"called\n")
    found = testrun.run_tests(client, codes, request["details"], _modules)
    values.write_all(SLOTS["result"], json.dumps(found).encode("ascii"))


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
    try:
        if callable(function):
            accepted = function(*inputs)
        elif (accepted := namespace["sat"](inputs[1])) is not None:
            accepted = bool(accepted)  # a puzzle may return any value
    except (NameError, ImportError) as error:
        _explain(error)
        os._exit(EXIT_CHECKER_BROKEN if _own_mistake(error) else 1)
    if accepted in (True, False):  # None, a score or a text is no verdict
        values.write_all(SLOTS["result"], b"yes" if accepted else b"no")


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

# --- The server ------------------------------------------------------------------------------------------------------

# fmt: off
PRELOADED = (
    "bisect", "collections", "copy", "dataclasses", "datetime", "functools", "heapq", "io", "itertools", "math",
    "operator", "random", "re", "string", "threading", "typing",
)
# fmt: on
"""Modules that contest programs import. Others load on demand, because each module here slows every fork."""
_MAX_REQUEST = 1 << 16
_MAX_FDS = 128
_MAX_ERRORS = 500
_SLICES = (0.02, 0.05, 0.1, 0.25)
_HARD_FACTOR = 10.0
_STACK = 120 << 20
"""Stack of the main thread in bytes. The kernel leaves 128 MiB below the stack free."""
_PROGRESS_SECONDS = 0.002
_STILL_LOOKS = 3
"""Looks without progress before a program counts as waiting: on a busy machine it may not run for a while."""
_PARENT_DEATH = signal.SIGKILL


def serve_forks() -> None:
    """Serve until the other end of the socket is closed. The socket and the setup come on the command line."""
    setup: dict[str, Any] = json.loads(sys.argv[1])
    # at a low number, since children close the descriptors above their own up to a bound
    link = socket.socket(fileno=os.dup(setup["socket"]))
    os.close(setup["socket"])
    kernel.prctl(kernel.PR_SET_PDEATHSIG, _PARENT_DEATH)
    if os.getppid() != setup["parent"]:
        return
    sys.argv = ["main.py"]
    for name in (*PRELOADED, *setup["preload"]):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for name in setup["required"]:
        try:
            importlib.import_module(name)
        except ImportError as error:
            sys.exit(f"preload {name}: {error}; programs see only installed packages, so install it without -e")
    import site

    site.setquit()  # exit() and quit(), which -S leaves out
    prepare()
    os.environ.pop("LD_BIND_NOW")  # it was for the start of this process; programs do not see it
    tier, has_proc = _isolate(setup)
    forkserver = _ForkServer(link, setup, tier, has_proc)
    link.send(json.dumps({"tier": tier}).encode())
    forkserver.serve()
    os._exit(0)


def _isolate(setup: dict[str, Any]) -> tuple[str, bool]:
    """Take tier B where the system allows it, else tier A; and whether there is a /proc."""
    if setup["tier"] != "A":
        try:
            kernel.enter_namespaces()
            _become_first_process()
            return "B", kernel.private_tree(setup["readable"])
        except OSError as error:
            if setup["tier"] == "B":
                raise SystemExit(f"no private namespaces: {error}") from error
    os.chdir("/")
    return "A", os.path.exists("/proc/self/stat")


def _become_first_process() -> None:
    """Fork into the new process numbers; this process only waits for the real fork server and dies with it."""
    pid = os.fork()
    if pid == 0:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, _PARENT_DEATH)
        return
    _, status = os.waitpid(pid, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


class _ForkServer:
    def __init__(self, link: socket.socket, setup: dict[str, Any], tier: str, has_proc: bool) -> None:
        self._link = link
        self._has_proc = has_proc
        # address space of this process, which a program's limit is counted from
        self._memory = 256 << 20
        if has_proc:
            with open("/proc/self/statm") as file:
                self._memory = resource.getpagesize() * int(file.read().split()[0])
        self._paths = [(path, kernel.READ_RIGHTS) for path in setup["readable"]]
        self._paths += [(f"/dev/{name}", kernel.DEVICE_RIGHTS) for name in kernel.DEVICES]
        self._numbers = -1
        if tier == "B":
            self._paths.append((kernel.SCRATCH_FOLDER, kernel.SCRATCH_RIGHTS))
            with contextlib.suppress(OSError):
                self._numbers = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        elif kernel.landlock_abi() == 0:
            raise SystemExit("neither namespaces nor Landlock: files of this machine would be readable")
        off = setup["guards_off"]
        if "pid_namespace" in off:
            self._numbers = -1
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # enough for a request's descriptors and the slots; it also bounds what a program's pipes can hold
        resource.setrlimit(resource.RLIMIT_NOFILE, (_MAX_FDS + 128, _MAX_FDS + 128))
        _limit(resource.RLIMIT_STACK, _STACK)
        self._guards = Guards(
            rules=None if "landlock" in off or kernel.landlock_abi() == 0 else kernel.landlock_rules(self._paths),
            filter=None if "seccomp" in off else kernel.Filter(),
            exec_filter=kernel.Filter(allow_exec=True),
            folder=kernel.SCRATCH_FOLDER if tier == "B" else "/",
            parent=0 if self._numbers >= 0 else os.getpid(),
        )
        # what a child says of its guards; the same pipe for all, since they run one after another
        self._told, self._telling = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._scratch = _state(kernel.SCRATCH_FOLDER) if tier == "B" else None
        signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGCHLD})  # the child's end is waited for

    def serve(self) -> None:
        # a collection in a child would write to every object of this process, and so copy its page
        gc.collect()
        gc.freeze()
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._link, _MAX_REQUEST, _MAX_FDS)
            except ConnectionError:
                return
            if not data:
                return
            runs: list[dict[str, Any]] = []
            try:
                self._all(json.loads(data), fds, runs)
            except OSError as error:  # no process, no memory: not the program's doing
                runs.append({"lost": f"the sandbox could not start a process: {error}"})
            for fd in fds:
                os.close(fd)
            self._link.send(json.dumps({"runs": runs}).encode())

    def _all(self, request: dict[str, Any], fds: list[int], runs: list[dict[str, Any]]) -> None:
        """Do every run of a request while CPU time and output bytes are left; append the reports to ``runs``."""
        # children inherit these limits; the filter keeps them from being raised
        _limit(resource.RLIMIT_AS, self._memory + (request["memory_mb"] << 20))
        room = request["output_mb"] << 20
        _limit(resource.RLIMIT_FSIZE, room)
        # as the outside packed them: the common channels, then those of each run
        names, rest = request["common"], iter(fds)
        common = [(next(rest), SLOTS[name]) for name in names]
        errors, left = common[names.index("stderr")][0], request["left"]
        common.append((self._telling, SLOTS["status"]))
        for _ in range(request["count"]):
            own = [(next(rest), SLOTS[name]) for name in request["each"]]
            # one file for what all runs write on standard error: nothing of its state passes from one to the next
            os.lseek(errors, 0, os.SEEK_SET)
            fcntl.fcntl(errors, fcntl.F_SETFL, 0)
            report = self._run(request, [*common, *own], present_cpu(request["cpu_seconds"], left))
            self._renew_scratch()
            report["told"] = _told(self._told)
            report["errors"] = _taken(errors)
            runs.append(report)
            left -= report["cpu"]
            room -= sum(os.fstat(fd).st_size for fd, _ in own)
            if left <= 0 or room <= 0 or report["killed"] == "idle" or (request["stop"] and report["status"] != 0):
                return

    def _run(self, request: dict[str, Any], places: Sequence[tuple[int, int]], cpu: float) -> dict[str, Any]:
        """Fork a child, wait for its end, and kill it where a limit is passed."""
        start = time.monotonic()
        pid = self._fork()
        if pid == 0:
            run(request, places, self._guards, cpu)
        turn, before, still = 0, 0.0, 0
        killed: str | None = None
        while True:
            # ends with the child; the looks in between grow rare, since most programs end before the first
            signal.sigtimedwait({signal.SIGCHLD}, _SLICES[turn])
            ended, status, usage = os.wait4(pid, os.WNOHANG)
            if ended:
                used = usage.ru_utime + usage.ru_stime
                return {"status": status, "cpu": used, "peak": usage.ru_maxrss, "killed": killed}
            turn = min(turn + 1, len(_SLICES) - 1)
            used = kernel.cpu_seconds(pid)
            # a program is idle only if it makes no progress: on a busy machine wall-clock time says little
            still = still + 1 if used - before < _PROGRESS_SECONDS else 0
            before = used
            wall, patience = time.monotonic() - start, cpu + request["idle_seconds"]
            if used > cpu:
                killed = killed or "cpu"
            elif wall > patience * _HARD_FACTOR or (wall > patience and still >= _STILL_LOOKS):
                killed = killed or "idle"
            elif self._has_proc and _threads(pid) > request["threads"]:
                killed = killed or "threads"
            if killed is not None:
                os.kill(pid, signal.SIGKILL)  # its number is its own until it is waited for

    def _fork(self) -> int:
        """Fork a child; in tier B it gets a new namespace of process numbers."""
        if self._numbers < 0:
            return kernel.fork()
        # this process stays where it is; its next child is the first of the new numbers
        kernel.unshare(kernel.CLONE_NEWPID)
        pid = -1  # if the fork fails, this process has to go back too
        try:
            pid = kernel.fork()
        finally:
            if pid != 0:
                kernel.setns(self._numbers, kernel.CLONE_NEWPID)
        return pid

    def _renew_scratch(self) -> None:
        """Make an empty scratch folder if a program changed it; Landlock's rule for the old one does not reach it."""
        if self._scratch is None or self._scratch == _state(kernel.SCRATCH_FOLDER):
            return
        kernel.fresh_scratch()
        self._scratch = _state(kernel.SCRATCH_FOLDER)
        old = self._guards.rules
        if old is not None:
            self._guards = dataclasses.replace(self._guards, rules=kernel.landlock_rules(self._paths))
            os.close(old)


def _limit(kind: int, value: int) -> None:
    # above the hard limit, which a container may have set, only root could go
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _state(folder: str) -> tuple[int, ...]:
    """Return the state of a folder in memory. It changes with every file made there, even if that is deleted again."""
    found = os.stat(folder)
    return found.st_nlink, found.st_uid, found.st_mode, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _told(fd: int) -> str:
    """Read a pipe that does not block."""
    try:
        return os.read(fd, 8).decode("ascii")
    except BlockingIOError:
        return ""


def _taken(fd: int) -> str:
    """Return the end of what was written to a memory file, and empty the file."""
    size = os.lseek(fd, 0, os.SEEK_END)
    if size == 0:
        return ""
    text = os.pread(fd, _MAX_ERRORS, max(0, size - _MAX_ERRORS)).decode("utf-8", "replace")
    os.ftruncate(fd, 0)
    return text


def _threads(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat") as file:
            # num_threads, behind the last parenthesis: a program may put spaces and parentheses into its name
            return int(file.read().rpartition(")")[2].split()[17])
    except (OSError, IndexError, ValueError):
        return 0
