"""The warm process that forks one program a test. Started by `host.Zygote`; standard library only.

It preloads what contest programs import, takes what isolation the system offers, and then serves: a request and
descriptors in, a forked child under every limit, the child's end watched and reported. It never sees an expected
output: what a child inherits is this process's memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import json
import os
import resource
import signal
import socket
import sys
import time
from typing import Any

from magicrl.verifiers.code import child, kernel, landlock, namespaces
from magicrl.verifiers.code.limits import present_cpu
from magicrl.verifiers.code.seccomp import base_filter, child_filter

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
_SET_FLAGS = 4  # F_SETFL
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
    link = socket.socket(fileno=setup["socket"])
    kernel.prctl(kernel.PR_SET_PDEATHSIG, _PARENT_DEATH)
    if os.getppid() != setup["parent"]:
        return
    sys.argv = ["main.py"]
    missing = _preload(setup["preload"])
    os.environ.pop("LD_BIND_NOW")
    tier, reasons, has_proc = _isolate(setup)
    zygote = _Zygote(link, setup, tier, has_proc)
    link.send(json.dumps({"tier": tier, "reasons": reasons, "proc": has_proc, "missing": missing}).encode())
    zygote.serve()
    os._exit(0)


def _preload(extra: list[str]) -> list[str]:
    missing: list[str] = []
    for name in (*PRELOADED, *extra):
        try:
            importlib.import_module(name)
        except ImportError:
            missing.append(name)
    import site

    site.setquit()  # exit() and quit(), which -S leaves out
    child.prepare()
    return missing


def _isolate(setup: dict[str, Any]) -> tuple[str, list[str], bool]:
    """Take tier B where the system allows it, else tier A; says why not."""
    reasons: list[str] = []
    if setup["tier"] != "A":
        try:
            namespaces.enter()
            _become_first_process()
            return "B", reasons, namespaces.private_tree(setup["readable"])
        except OSError as error:
            reasons.append(f"no private namespaces: {error}")
    if setup["tier"] == "B":
        raise SystemExit("; ".join(reasons))
    os.chdir("/")
    return "A", reasons, os.path.exists("/proc/self/stat")


def _become_first_process() -> None:
    """Fork into the new process numbers; this process only waits for the real zygote and dies with it."""
    pid = os.fork()
    if pid == 0:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, _PARENT_DEATH)
        return
    _, status = os.waitpid(pid, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


class _Zygote:
    def __init__(self, link: socket.socket, setup: dict[str, Any], tier: str, has_proc: bool) -> None:
        self._link = link
        self._tier = tier
        self._has_proc = has_proc
        base = resource.getpagesize() * int(_first_field("/proc/self/statm")) if has_proc else 256 << 20
        self._own_numbers = -1
        paths = [(path, landlock.READ) for path in setup["readable"]]
        paths += [(f"/dev/{name}", landlock.DEVICE) for name in ("null", "zero", "full", "random", "urandom")]
        rules: int | None = None
        if tier == "B":
            paths.append((namespaces.SCRATCH, landlock.SCRATCH))
            with contextlib.suppress(OSError):
                self._own_numbers = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._paths = paths
        if landlock.abi() > 0:
            rules = landlock.ruleset(paths)
        elif tier == "A":
            raise SystemExit("neither namespaces nor Landlock: files of this machine would be readable")
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (_MAX_FDS + 128, _MAX_FDS + 128))
        off: frozenset[str] = frozenset(setup.get("guards_off", ()))
        self._limits = (0, 0)
        self._guards = child.Guards(
            rules=None if "landlock" in off else rules,
            filter=None if "seccomp" in off else child_filter(),
            exec_filter=child_filter(allow_exec=True),
            folder=namespaces.SCRATCH if tier == "B" else "/",
            new_numbers=self._own_numbers >= 0 and "pid_namespace" not in off,
        )
        self._base_memory = base
        _, hard = resource.getrlimit(resource.RLIMIT_STACK)
        stack = _STACK if hard == resource.RLIM_INFINITY else min(_STACK, hard)
        resource.setrlimit(resource.RLIMIT_STACK, (stack, hard))
        # what a child says of its guards; the same pipe for all, since they run one after another
        self._told = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._scratch = kernel.Folder(namespaces.SCRATCH) if tier == "B" else None
        self._child = kernel.Child()
        self._to_new_numbers: list[kernel.Call] = [(kernel.UNSHARE, kernel.CLONE_NEWPID, 0, 0, 0, 0)]
        self._to_own_numbers: list[kernel.Call] = [(kernel.SETNS, self._own_numbers, kernel.CLONE_NEWPID, 0, 0, 0)]

    def serve(self) -> None:
        child.rehearse()
        if self._guards.filter is not None:
            self._base = base_filter()
            kernel.perform([self._base.installation])
        gc.collect()
        gc.freeze()
        gc.disable()
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
        self._inherit_limits(self._base_memory + request["memory"], request["output"])
        common, names, left, room = request["common"], request["each"], request["left"], request["output"]
        errors = fds[common.index("stderr")]
        shared = [child.place(fds[index], name) for index, name in enumerate(common)]
        shared.append(child.place(self._told[1], "status"))
        # one file for what all runs write on standard error: nothing of its state passes from one to the next
        clean: list[kernel.Call] = [(kernel.LSEEK, errors, 0, 0, 0, 0), (kernel.FCNTL, errors, _SET_FLAGS, 0, 0, 0)]
        first = len(common)
        binding = child.Binding(request["role"], self._guards)
        for _ in range(request["count"]):
            own = fds[first : first + len(names)]
            first += len(names)
            places = shared + [child.place(fd, name) for fd, name in zip(own, names)]  # noqa: B905 - runs once a test
            kernel.perform(clean)
            report = self._run(request, places, binding, present_cpu(request["cpu"], left))
            if self._scratch is not None and self._scratch.changed():
                self._renew_scratch()
                binding = child.Binding(request["role"], self._guards)
            report["told"] = _drained(self._told[0])
            report["errors"] = _taken(errors)
            runs.append(report)
            left -= report["cpu"]
            room -= sum([os.lseek(fd, 0, os.SEEK_END) for fd in own])
            if left <= 0 or room <= 0 or (request["stop"] and report["status"] != 0):
                return

    def _run(
        self, request: dict[str, Any], places: list[kernel.Call], binding: child.Binding, cpu: float
    ) -> dict[str, Any]:
        start = time.monotonic()
        binding.allow(cpu)
        pid = self._fork()
        if pid == 0:
            child.run(request, places, binding)  # never returns
        turn, before, still = 0, 0.0, 0
        killed: str | None = None
        while not self._child.await_end(pid, _SLICES[turn]):
            turn = min(turn + 1, len(_SLICES) - 1)
            used = kernel.cpu_seconds(pid)
            still = still + 1 if used - before < _PROGRESS_SECONDS else 0
            before = used
            killed = killed or self._verdict(pid, request, cpu, time.monotonic() - start, used, still)
            if killed is not None:
                os.kill(pid, signal.SIGKILL)  # its number is its own until it is waited for
        return {
            "status": self._child.status,
            "cpu": self._child.cpu_seconds,
            "peak": self._child.peak_kib,
            "wall": time.monotonic() - start,
            "killed": killed,
        }

    def _inherit_limits(self, memory: int, output: int) -> None:
        """Children inherit these limits of this process; the filter keeps them from being raised."""
        if (memory, output) != self._limits:
            for kind, value in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, output)):
                _, hard = resource.getrlimit(kind)
                resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
            self._limits = (memory, output)

    def _renew_scratch(self) -> None:
        """An empty scratch folder; Landlock's rule for the old one does not reach it."""
        namespaces.fresh_scratch()
        self._scratch = kernel.Folder(namespaces.SCRATCH)
        old = self._guards.rules
        if old is not None:
            self._guards = dataclasses.replace(self._guards, rules=landlock.ruleset(self._paths))
            os.close(old)

    def _fork(self) -> int:
        if not self._guards.new_numbers:
            return kernel.fork()
        kernel.perform(self._to_new_numbers)
        pid = -1
        try:
            pid = kernel.fork()
        finally:
            if pid != 0:
                kernel.perform(self._to_own_numbers)
        return pid

    def _verdict(
        self, pid: int, request: dict[str, Any], limit: float, wall: float, used: float, still: int
    ) -> str | None:
        """Why a run has to be ended now, or None."""
        if used > limit:
            return "cpu"
        patience = limit + request["idle"]
        if wall > patience * _HARD_FACTOR or (wall > patience and still >= _STILL_LOOKS):
            return "idle"
        if self._has_proc and _threads(pid) > request["threads"]:
            return "threads"
        return None


def _drained(fd: int) -> str:
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
            return int(file.read().rpartition(")")[2].split()[17])
    except (OSError, IndexError, ValueError):
        return 0
