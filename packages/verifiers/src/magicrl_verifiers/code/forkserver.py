"""The warm process that forks one program a test. Started by `sandbox.ForkServer`; standard library only.

It preloads what contest programs import, takes what isolation the system offers, and then serves: a request and
descriptors in, a forked child under every limit, the child's end watched and reported. It never sees an expected
output: what a child inherits is this process's memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import gc
import importlib
import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

from magicrl_verifiers.code import child, kernel
from magicrl_verifiers.code.seccomp import Filter
from magicrl_verifiers.code.values import SLOTS, present_cpu

# fmt: off
PRELOADED = (
    "bisect", "collections", "copy", "dataclasses", "datetime", "functools", "heapq", "io", "itertools", "math",
    "operator", "random", "re", "string", "threading", "typing",
)
# fmt: on
"""What contest programs import. The rest loads when a program asks for it: each module here slows every fork."""
_MAX_REQUEST = 1 << 16
_MAX_FDS = 128
_MAX_ERRORS = 500
_SLICES = (0.02, 0.05, 0.1, 0.25)
_HARD_FACTOR = 10.0
_STACK = 120 << 20
"""Of the main thread; the kernel leaves 128 MiB below the stack free."""
_PROGRESS_SECONDS = 0.002
_STILL_LOOKS = 3
"""Looks without progress before a program counts as waiting: on a busy machine it may not run for a while."""
_PARENT_DEATH = signal.SIGKILL


def main() -> None:
    """Serve until the other end of the socket is closed. The socket and the setup come on the command line."""
    setup: dict[str, Any] = json.loads(sys.argv[1])
    # at a low number: children close what lies above their own descriptors up to a bound
    link = socket.socket(fileno=os.dup(setup["socket"]))
    os.close(setup["socket"])
    kernel.prctl(kernel.PR_SET_PDEATHSIG, _PARENT_DEATH)
    if os.getppid() != setup["parent"]:
        return
    sys.argv = ["main.py"]
    for name in (*PRELOADED, *setup["preload"]):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    import site

    site.setquit()  # exit() and quit(), which -S leaves out
    child.prepare()
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
        self._memory = resource.getpagesize() * int(_first_field("/proc/self/statm")) if has_proc else 256 << 20
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
        # room for a request's descriptors and the slots; what a program's pipes can hold is bounded by it too
        resource.setrlimit(resource.RLIMIT_NOFILE, (_MAX_FDS + 128, _MAX_FDS + 128))
        _limit(resource.RLIMIT_STACK, _STACK)
        self._guards = child.Guards(
            rules=None if "landlock" in off or kernel.landlock_abi() == 0 else kernel.landlock_rules(self._paths),
            filter=None if "seccomp" in off else Filter(),
            exec_filter=Filter(allow_exec=True),
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
        """Every run of a request, as long as the time and the room for outputs last; fills ``runs``."""
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
            if left <= 0 or room <= 0 or (request["stop"] and report["status"] != 0):
                return

    def _run(self, request: dict[str, Any], places: Sequence[tuple[int, int]], cpu: float) -> dict[str, Any]:
        """Fork a child, wait for its end and bring it about where a limit is passed."""
        start = time.monotonic()
        pid = self._fork()
        if pid == 0:
            child.run(request, places, self._guards, cpu)
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
            # wall-clock time alone says little on a busy machine: only a program that makes no progress is idle
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
        """In tier B every child is the first of its own process numbers."""
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
        """An empty scratch folder, if a program changed it; Landlock's rule for the old one does not reach it."""
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
    """Of a folder in memory: it changes with everything that is made there, even if it is gone again."""
    found = os.stat(folder)
    return found.st_nlink, found.st_uid, found.st_mode, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _told(fd: int) -> str:
    """What lies in a pipe that does not block."""
    try:
        return os.read(fd, 8).decode("ascii")
    except BlockingIOError:
        return ""


def _taken(fd: int) -> str:
    """The end of what was written to a memory file, which is then empty again."""
    size = os.lseek(fd, 0, os.SEEK_END)
    if size == 0:
        return ""
    text = os.pread(fd, _MAX_ERRORS, max(0, size - _MAX_ERRORS)).decode("utf-8", "replace")
    os.ftruncate(fd, 0)
    return text


def _first_field(path: str) -> str:
    with open(path) as file:
        return file.read().split()[0]


def _threads(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat") as file:
            # num_threads, behind the last parenthesis: a program may put spaces and parentheses into its name
            return int(file.read().rpartition(")")[2].split()[17])
    except (OSError, IndexError, ValueError):
        return 0
