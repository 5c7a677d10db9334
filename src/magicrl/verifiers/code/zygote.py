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
import select
import signal
import socket
import sys
import time
from typing import Any

from magicrl.verifiers.code import child, kernel, landlock, namespaces
from magicrl.verifiers.code.seccomp import Filter

# fmt: off
PRELOADED = (
    "bisect", "collections", "copy", "dataclasses", "datetime", "functools", "heapq", "io", "itertools", "math",
    "operator", "random", "re", "string", "threading", "typing",
)
# fmt: on
"""What contest programs import. The rest loads when a program asks for it: each module here slows every fork."""
_MAX_REQUEST = 1 << 16
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
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        off: frozenset[str] = frozenset(setup.get("guards_off", ()))
        self._limits = (0, 0)
        self._guards = child.Guards(
            rules=None if "landlock" in off else rules,
            filter=None if "seccomp" in off else Filter(),
            exec_filter=Filter(allow_exec=True),
            folder=namespaces.SCRATCH if tier == "B" else "/",
        )
        self._base_memory = base
        _, hard = resource.getrlimit(resource.RLIMIT_STACK)
        stack = _STACK if hard == resource.RLIM_INFINITY else min(_STACK, hard)
        resource.setrlimit(resource.RLIMIT_STACK, (stack, hard))
        self._new_numbers = self._own_numbers >= 0 and "pid_namespace" not in off

    def serve(self) -> None:
        gc.collect()
        gc.freeze()
        gc.disable()
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._link, _MAX_REQUEST, 16)
            except ConnectionError:
                return
            if not data:
                return
            request = json.loads(data)
            try:
                report = self._run(request, fds)
            except OSError as error:  # no process, no memory: not the program's doing
                report = {"lost": f"the sandbox could not start a process: {error}"}
            for fd in fds:
                os.close(fd)
            self._link.send(json.dumps(report).encode())

    def _run(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        start = time.monotonic()
        self._inherit_limits(self._base_memory + request["memory"], request["output"])
        pid = self._fork()
        if pid == 0:
            child.run(request, dict(zip(request["fds"], fds, strict=True)), self._guards)  # never returns
        killed = self._watch(pid, request, start)
        _, status, usage = os.wait4(pid, 0)
        if self._tier == "B" and os.listdir(namespaces.SCRATCH):
            self._renew_scratch()
        return {
            "status": status,
            "cpu": usage.ru_utime + usage.ru_stime,
            "peak": usage.ru_maxrss,
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
        old = self._guards.rules
        if old is not None:
            self._guards = dataclasses.replace(self._guards, rules=landlock.ruleset(self._paths))
            os.close(old)

    def _fork(self) -> int:
        if not self._new_numbers:
            return kernel.fork()
        kernel.unshare(kernel.CLONE_NEWPID)
        try:
            pid = kernel.fork()
        except OSError:
            kernel.setns(self._own_numbers, kernel.CLONE_NEWPID)
            raise
        if pid != 0:
            kernel.setns(self._own_numbers, kernel.CLONE_NEWPID)
        return pid

    def _watch(self, pid: int, request: dict[str, Any], start: float) -> str | None:
        """Wait for the end of a child, or end it; returns why it was ended."""
        ended = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(ended, select.POLLIN)
            killed, turn, before, still = None, 0, 0.0, 0
            while not poll.poll(1000 * _SLICES[min(turn, len(_SLICES) - 1)]):
                turn += 1
                used = kernel.cpu_seconds(pid)
                still = still + 1 if used - before < _PROGRESS_SECONDS else 0
                killed = self._verdict(pid, request, time.monotonic() - start, used, still)
                before = used
                if killed is not None:
                    signal.pidfd_send_signal(ended, signal.SIGKILL)
                    poll.poll()
                    break
            return killed
        finally:
            os.close(ended)

    def _verdict(self, pid: int, request: dict[str, Any], wall: float, cpu: float, still: int) -> str | None:
        if cpu > request["cpu"]:
            return "cpu"
        patience = request["cpu"] + request["idle"]
        if wall > patience * _HARD_FACTOR or (wall > patience and still >= _STILL_LOOKS):
            return "idle"
        if self._has_proc and _threads(pid) > request["threads"]:
            return "threads"
        return None


def _first_field(path: str) -> str:
    with open(path) as file:
        return file.read().split()[0]


def _threads(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[17])
    except (OSError, IndexError, ValueError):
        return 0


if __name__ == "__main__":
    main()
