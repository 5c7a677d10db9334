"""The outer side of the sandbox: starts zygotes, hands them one program run at a time, reads what came of it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import magicrl
from magicrl.verifiers.code.limits import MIB, Limits, Observation

_START_SECONDS = 60.0
_GRACE_SECONDS = 30.0
_HARD_FACTOR = 10.0
_MAX_ERRORS = 2000
_MAX_REPORT = 1 << 16
_BOOTSTRAP = """
import sys, types
for name, path in {packages!r}:
    package = types.ModuleType(name)
    package.__path__ = [path]
    sys.modules[name] = package
sys.path.extend({site!r})
from magicrl.verifiers.code import zygote
zygote.main()
"""
"""The packages are entered by hand: their ``__init__`` would load numpy and pydantic into every fork."""


class SandboxError(RuntimeError):
    """The sandbox could not be started; says why."""


class SandboxRefusal(SandboxError):
    """This machine cannot isolate programs; says why. Another try would say the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxOptions:
    """How programs are confined.

    Attributes:
        tier: ``A`` (no namespaces), ``B`` (they are required) or ``auto``: B where the system allows it.
        preload: further modules that programs may import at no cost, e.g. ``sortedcontainers``.
        guards_off: guards switched off (``seccomp``, ``landlock``, ``pid_namespace``): only to show what they hold.
    """

    tier: str = "auto"
    preload: tuple[str, ...] = ()
    guards_off: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.tier not in ("auto", "A", "B"):
            raise ValueError(f"tier must be auto, A or B, got {self.tier!r}")


@dataclass(slots=True)
class Program:
    """Source text, and its compiled form once a first run has made it.

    Attributes:
        source: the program.
        prelude: source that runs before it in the same namespace (imports, helper classes), or None.
    """

    source: str
    prelude: str | None = None
    _code: int = field(default=-1, init=False)
    _compiled: bool = field(default=False, init=False)

    @property
    def compiled(self) -> bool:
        """Whether a run has compiled it."""
        return self._compiled

    def channels(self) -> dict[str, int | bytes]:
        """What a run needs of it: the compiled form, or the texts and a place for the compiled form."""
        if self._compiled:
            return {"code": self._code}
        if self._code >= 0:
            os.ftruncate(self._code, 0)  # a run that did not get as far
        else:
            self._code = os.memfd_create("code", os.MFD_CLOEXEC)
        texts: dict[str, int | bytes] = {"source": self.source.encode("utf-8", "surrogatepass"), "code": self._code}
        if self.prelude is not None:
            texts["prelude"] = self.prelude.encode("utf-8", "surrogatepass")
        return texts

    def note(self, seen: Observation) -> None:
        self._compiled = self._compiled or seen.compiled

    def close(self) -> None:
        """Free the compiled form. Safe to call twice."""
        if self._code >= 0:
            os.close(self._code)
            self._code, self._compiled = -1, False


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run.

    Attributes:
        role: what the child does (see `child`).
        program: its source; None for a compiled program.
        limits: what it may use.
        channels: descriptors, or bytes that it can read, by slot name.
        outputs: slots that it writes and that are read afterwards.
        details: further fields of the request (``entry``).
    """

    role: str
    program: Program | None
    limits: Limits
    channels: Mapping[str, bytes | int] = field(default_factory=dict[str, "bytes | int"])
    outputs: Sequence[str] = ()
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])


def readable_paths() -> list[str]:
    """What a program may read: the interpreter, its libraries, shared libraries, time zones."""
    candidates = [
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        str(Path(sys.base_prefix) / "lib"),
        "/usr/lib",
        "/usr/lib64",
        "/lib",
        "/lib64",
        "/usr/local/lib",
        "/usr/share/zoneinfo",
        "/etc/localtime",
        "/etc/ld.so.cache",
    ]
    found: list[str] = []
    for path in dict.fromkeys(candidates):
        if os.path.exists(path) and not any(path.startswith(other + "/") for other in found):
            found.append(path)
    return found


class Zygote:
    """One warm process. Used by one thread at a time."""

    def __init__(self, options: SandboxOptions, extra_modules: Sequence[str] = ()) -> None:
        """Start it and wait until it serves.

        Raises:
            SandboxRefusal: it cannot serve on this machine, with what it said.
            SandboxError: it ended or said nothing while it started.
        """
        if sys.platform != "linux" or os.uname().machine != "x86_64":
            raise SandboxRefusal(f"the code sandbox needs Linux on x86-64, this is {sys.platform} {os.uname().machine}")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        setup = {
            "socket": theirs.fileno(),
            "parent": os.getpid(),
            "tier": options.tier,
            "preload": [*options.preload, *extra_modules],
            "readable": readable_paths(),
            "guards_off": list(options.guards_off),
        }
        self._link = ours
        self._child = subprocess.Popen(
            [sys.executable, "-s", "-S", "-P", "-X", "utf8", "-W", "ignore", "-c", _bootstrap(), json.dumps(setup)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            env={"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "1", **_ONE_THREAD},
            start_new_session=True,
        )
        theirs.close()
        hello = self._receive(_START_SECONDS)
        if hello is None:
            said = self._last_words()
            self.close()
            # by its own exit; 128 and more: a signal, to it or to the first process of its namespace
            kind = SandboxRefusal if said and 0 <= self._child.returncode < 128 else SandboxError
            raise kind(f"the code sandbox did not start: {said or 'no output'}")
        self.tier: str = hello["tier"]
        self.reasons: list[str] = hello["reasons"]
        self.missing: list[str] = hello["missing"]

    def start(self, job: Job) -> _Running:
        """Begin a run.

        Raises:
            ConnectionError: the zygote is gone.
        """
        running = _Running(job)
        limits = job.limits
        request = {
            **job.details,
            "role": job.role,
            "fds": list(running.fds),
            "compiled": job.program is not None and job.program.compiled,
            "cpu": limits.cpu_seconds,
            "idle": limits.idle_seconds,
            "memory": limits.memory_mb * MIB,
            # a result in its tagged form may be several times as long as it would be printed
            "output": limits.output_mb * MIB * (4 if job.role == "call" else 1),
            "threads": limits.threads,
        }
        try:
            socket.send_fds(self._link, [json.dumps(request).encode()], list(running.fds.values()))
        except OSError as error:
            running.close()
            raise ConnectionError(str(error)) from error
        return running

    def finish(self, running: _Running) -> Observation:
        """Wait for the end of the run that was started last."""
        limits = running.job.limits
        report = self._receive((limits.cpu_seconds + limits.idle_seconds) * _HARD_FACTOR + _GRACE_SECONDS)
        if report is None:
            running.close()
            self.close(wait=0)
            return Observation(lost="the zygote was lost")
        return running.observe(report)

    @property
    def pid(self) -> int:
        return self._child.pid

    def close(self, *, wait: float = 1.0) -> None:
        """End it and what it runs; one that is idle leaves by itself within ``wait`` seconds. Safe to call twice."""
        self._link.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout=wait)
        if self._child.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._child.pid, signal.SIGKILL)
        self._child.wait()
        if self._child.stderr is not None:
            self._child.stderr.close()

    def _receive(self, seconds: float) -> dict[str, Any] | None:
        poll = select.poll()
        poll.register(self._link.fileno(), select.POLLIN)
        if not poll.poll(seconds * 1000):
            return None
        try:
            data = self._link.recv(_MAX_REPORT)
        except OSError:
            return None
        return json.loads(data) if data else None

    def _last_words(self) -> str:
        assert self._child.stderr is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            _, errors = self._child.communicate(timeout=5)
            return errors[-_MAX_ERRORS:].decode("utf-8", "replace").strip()
        return ""


_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def _bootstrap() -> str:
    root = Path(magicrl.__file__).resolve().parent
    packages = [
        ("magicrl", str(root)),
        ("magicrl.verifiers", str(root / "verifiers")),
        ("magicrl.verifiers.code", str(root / "verifiers" / "code")),
    ]
    site = list(dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]))
    return _BOOTSTRAP.format(packages=packages, site=site)


class _Running:
    """A run's descriptors on this side."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.fds: dict[str, int] = {}
        self._own: list[int] = []
        try:
            channels: dict[str, bytes | int] = {} if job.program is None else job.program.channels()
            channels.update(job.channels)
            for name, content in channels.items():
                self.fds[name] = content if isinstance(content, int) else self._memory(content)
            for name in ("status", "stderr", *job.outputs):
                self.fds[name] = self._memory(b"")
        except OSError:
            self.close()
            raise

    def _memory(self, content: bytes) -> int:
        fd = os.memfd_create("channel", os.MFD_CLOEXEC)
        self._own.append(fd)
        view, offset = memoryview(content), 0
        while offset < len(view):
            offset += os.pwrite(fd, view[offset:], offset)
        return fd

    def observe(self, report: Mapping[str, Any]) -> Observation:
        """What came of it; frees the descriptors."""
        try:
            if "lost" in report:
                return Observation(lost=report["lost"])
            status = os.pread(self.fds["status"], 2, 0)
            code = os.waitstatus_to_exitcode(report["status"])
            seen = Observation(
                ready=status.startswith(b"R"),
                compiled=status == b"RC",
                exit_code=code if code >= 0 else None,
                signal=-code if code < 0 else None,
                killed=report["killed"],
                cpu_seconds=report["cpu"],
                wall_seconds=report["wall"],
                peak_mb=report["peak"] / 1024,
                output=_content(self.fds["stdout"]) if "stdout" in self.fds else b"",
                errors=_tail(self.fds["stderr"]),
                result=_content(self.fds["result"]) if "result" in self.fds else b"",
                lost=None if status else f"the guards could not be set: {_tail(self.fds['stderr'])}",
            )
        finally:
            self.close()
        if self.job.program is not None:
            self.job.program.note(seen)
        return seen

    def close(self) -> None:
        for fd in self._own:
            os.close(fd)
        self._own.clear()


def _content(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    parts: list[bytes] = []
    offset = 0
    while offset < size and (part := os.pread(fd, size - offset, offset)):
        parts.append(part)
        offset += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _tail(fd: int) -> str:
    size = os.fstat(fd).st_size
    return os.pread(fd, _MAX_ERRORS, max(0, size - _MAX_ERRORS)).decode("utf-8", "replace").strip()
