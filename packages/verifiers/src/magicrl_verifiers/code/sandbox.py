"""The outer side of the sandbox: starts fork servers, hands them the runs of a program, reads what came of them.

A judge has a fork server for programs, one with numpy, and others for checkers and test code: whatever a program
inherits or could reach has never held an expected output.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import magicrl_verifiers
from magicrl_verifiers.code.values import EXIT_MEMORY, EXIT_NOT_PLAIN, read_all, write_all
from magicrl_verifiers.records import check_seconds

MIB = 1 << 20

_START_SECONDS = 60.0
_GRACE_SECONDS = 30.0
_HARD_FACTOR = 10.0
_MAX_ERRORS = 2000
_MAX_REPORT = 1 << 17
_BOOTSTRAP = """
import sys, types
for name, path in {packages!r}:
    package = types.ModuleType(name)
    package.__path__ = [path]
    sys.modules[name] = package
sys.path.extend({site!r})
from magicrl_verifiers.code import forkserver
"""
"""The packages are entered by hand: their ``__init__`` would load numpy and pydantic into every fork."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of one run of a program.

    Attributes:
        cpu_seconds: CPU time, all threads.
        memory_mb: MiB of address space beyond the bare interpreter's.
        output_mb: MiB on standard output, on standard error and in any file it writes.
        idle_seconds: wall-clock seconds beyond ``cpu_seconds`` in which it may do nothing. A program that still
            runs then, on a busy machine, is left to use its CPU time, up to ten times the sum.
        threads: live threads.
    """

    cpu_seconds: float = 10.0
    memory_mb: int = 4096
    output_mb: int = 64
    idle_seconds: float = 2.0
    threads: int = 64

    def __post_init__(self) -> None:
        check_seconds("time_limit", self.cpu_seconds)
        if self.memory_mb < 16:
            raise ValueError(f"memory_limit_mb must be at least 16, got {self.memory_mb}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """Observation of one run from outside.

    Attributes:
        compiled: its source was accepted.
        exit_code: its exit status, or None if a signal ended it.
        signal: the signal that ended it, or None.
        killed: why the sandbox ended it (a key of `_KILLED`), or None.
        cpu_seconds: CPU time it used.
        peak_mb: most resident memory, MiB.
        output: what it wrote on standard output.
        errors: the end of what it wrote on standard error.
        result: what it wrote on the result channel.
        lost: why there is no observation (the sandbox itself failed), or None.
    """

    compiled: bool = False
    exit_code: int | None = None
    signal: int | None = None
    killed: str | None = None
    cpu_seconds: float = 0.0
    peak_mb: float = 0.0
    output: bytes = b""
    errors: str = ""
    result: bytes = b""
    lost: str | None = None


class SandboxError(RuntimeError):
    """The sandbox could not be started; says why."""


class SandboxRefusal(SandboxError):
    """This machine cannot isolate programs; says why. Another try would say the same."""


class SandboxLost(Exception):
    """A run that came to nothing through no fault of the program's. ``killed``: by a signal from outside."""

    def __init__(self, reason: str, *, killed: bool = False) -> None:
        super().__init__(reason)
        self.killed = killed


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
        compiled: whether a run reported that it compiled the program, which it does before it runs the program.
    """

    source: str
    prelude: str | None = None
    compiled: bool = field(default=False, init=False)
    _code: int = field(default=-1, init=False)

    def channels(self) -> dict[str, int | bytes]:
        """Return the channels of a run: the compiled form, or the texts and a place for the compiled form."""
        if self.compiled:
            return {"code": self._code}
        self.close()  # what a run left that did not get as far
        self._code = os.memfd_create("code", os.MFD_CLOEXEC)
        texts: dict[str, int | bytes] = {"source": self.source.encode("utf-8", "surrogatepass"), "code": self._code}
        if self.prelude is not None:
            texts["prelude"] = self.prelude.encode("utf-8", "surrogatepass")
        return texts

    def close(self) -> None:
        """Free the compiled form. Safe to call twice."""
        if self._code >= 0:
            os.close(self._code)
            self._code, self.compiled = -1, False


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Runs of one program, one after another, each in a separate process.

    Attributes:
        role: what the child does (see `forkserver`).
        program: its source; None for a compiled program.
        limits: what each run may use.
        channels: descriptors, or bytes that it can read, by slot name, the same for every run.
        each: further channels of each run; there are as many runs as entries.
        outputs: slots that a run writes and that are read afterwards.
        details: further fields of the request (``entry``).
        left: CPU seconds of all runs together; those that would begin after it is used up are left out.
        stop: leave out the runs after the first that does not end with status 0.
    """

    role: str
    program: Program | None
    limits: Limits
    channels: Mapping[str, bytes | int] = field(default_factory=dict[str, "bytes | int"])
    each: Sequence[Mapping[str, bytes]] = ({},)
    outputs: Sequence[str] = ()
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])
    left: float = math.inf
    stop: bool = True


def site_folders() -> list[str]:
    """Return the folders of packages: the environment's, the user's, and the system's if this process sees it."""
    seen = [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
    return list(dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *seen]))


def readable_paths() -> list[str]:
    """Return the paths that a program may read: interpreter, libraries, shared libraries, time zones."""
    candidates = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), *site_folders()]
    candidates += [str(Path(sys.base_prefix) / "lib"), "/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/local/lib"]
    candidates += ["/usr/share/zoneinfo", "/etc/localtime", "/etc/ld.so.cache"]
    found: list[str] = []
    for path in dict.fromkeys(candidates):
        if os.path.exists(path) and not any(path.startswith(other + "/") for other in found):
            found.append(path)
    return found


class ForkServer:
    """One warm process. Used by one thread at a time."""

    def __init__(self, options: SandboxOptions, extra_modules: Sequence[str] = ()) -> None:
        """Start it and wait until it serves.

        Raises:
            SandboxRefusal: it cannot serve on this machine, with what it said.
            SandboxError: it ended or said nothing while it started.
        """
        if sys.platform != "linux" or os.uname().machine != "x86_64":
            raise SandboxRefusal(f"the code sandbox needs Linux on x86-64, this is {sys.platform} {os.uname().machine}")
        # keeps the borders of messages, and passes descriptors with them
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        setup = {
            "socket": theirs.fileno(),
            "parent": os.getpid(),
            "tier": options.tier,
            "required": list(options.preload),
            "preload": list(extra_modules),
            "readable": readable_paths(),
            "guards_off": list(options.guards_off),
        }
        self._link = ours
        self._child = subprocess.Popen(
            [sys.executable, *_BARE, "-c", bootstrap() + "forkserver.serve_forks()\n", json.dumps(setup)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            env=_ENVIRONMENT,
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
        self.runs = 0

    def start(self, job: Job) -> _Running:
        """Begin some runs. Raises SandboxLost if the fork server is gone."""
        running = _Running(job)
        request = {
            **{name: getattr(job, name) for name in ("details", "role", "stop")},
            **dataclasses.asdict(job.limits),
            "common": running.common,
            "each": running.each,
            "count": len(job.each),
            "compiled": job.program is not None and job.program.compiled,
            # JSON has no infinity
            "left": min(job.left, 1e9),
            # a result in its tagged form may be several times as long as it would be printed
            "output_mb": job.limits.output_mb * (4 if job.role == "call" else 1),
        }
        try:
            socket.send_fds(self._link, [json.dumps(request).encode()], running.fds)
        except OSError as error:
            running.close()
            raise SandboxLost(str(error)) from error
        return running

    def finish(self, running: _Running) -> list[Observation]:
        """Wait for the end of the runs that were started last: at least one, at most all.

        An observation's ``lost`` says why there is none. Raises SandboxLost if the fork server is gone.
        """
        limits, runs = running.job.limits, len(running.job.each)
        # the fork server ends each run by then at the latest
        report = self._receive(runs * (limits.cpu_seconds + limits.idle_seconds) * _HARD_FACTOR + _GRACE_SECONDS)
        with contextlib.closing(running):
            if report is None:
                self.close(wait=0)
                raise SandboxLost("the fork server was lost")
            self.runs += len(report["runs"])
            return [running.observe(number, one) for number, one in enumerate(report["runs"])]

    def close(self, *, wait: float = 1.0) -> None:
        """End it and what it runs; one that is idle leaves by itself within ``wait`` seconds. Safe to call twice."""
        self._link.close()
        try:
            self._child.wait(timeout=wait)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        if self._child.stderr is not None:
            self._child.stderr.close()

    def _receive(self, seconds: float) -> dict[str, Any] | None:
        self._link.settimeout(seconds)
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


# no site: no .pth file and no user's package runs in what programs are forked from
_BARE = ("-s", "-S", "-P", "-X", "utf8", "-W", "ignore")
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "LD_BIND_NOW": "1",  # what is bound after the fork is bound again in every child
}


def bootstrap() -> str:
    """Source of a process that has imported the fork server and as little else as can be."""
    root = Path(magicrl_verifiers.__file__).resolve().parent
    packages = [("magicrl_verifiers", str(root)), ("magicrl_verifiers.code", str(root / "code"))]
    return _BOOTSTRAP.format(packages=packages, site=site_folders())


class _Running:
    """Started runs with the descriptors of their channels: the common ones, then those of each run."""

    def __init__(self, job: Job) -> None:
        self.job = job
        channels = {**(job.program.channels() if job.program is not None else {}), **job.channels, "stderr": b""}
        self.common, self.each = list(channels), [*job.each[0], *job.outputs]
        contents = [*channels.values()]
        for inputs in job.each:
            contents += [*inputs.values(), *[b""] * len(job.outputs)]
        with contextlib.ExitStack() as made:
            self.fds = [one if isinstance(one, int) else _memory(one, made) for one in contents]
            self._made = made.pop_all()

    def observe(self, number: int, report: Mapping[str, Any]) -> Observation:
        """Return the observation of a run."""
        if "lost" in report:
            return Observation(lost=report["lost"])
        code = os.waitstatus_to_exitcode(report["status"])
        told: str = report["told"]
        # C is written after the compiled form
        if told == "RC" and self.job.program is not None:
            self.job.program.compiled = True
        # descriptors: the common ones, then for each run its inputs and its outputs
        first = len(self.common) + number * len(self.each) + len(self.each) - len(self.job.outputs)
        written = {name: read_all(self.fds[first + place]) for place, name in enumerate(self.job.outputs)}
        return Observation(
            compiled=told == "RC",
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            killed=report["killed"],
            cpu_seconds=report["cpu"],
            peak_mb=report["peak"] / 1024,
            output=written.get("stdout", b""),
            errors=report["errors"].strip(),
            result=written.get("result", b""),
            # a child writes R before it reads the program, so without R nothing of the program ran
            lost=None if told else f"the guards could not be set: {report['errors']}",
        )

    def close(self) -> None:
        self._made.close()


def _memory(content: bytes, made: contextlib.ExitStack) -> int:
    fd = os.memfd_create("channel", os.MFD_CLOEXEC)
    made.callback(os.close, fd)
    write_all(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


_MAX_RUNS = 20_000
"""A fork server is replaced after so many runs: nothing that might grow can grow for ever."""
_STARTS = 3
_TEST_MODULES = ("magicrl_verifiers.code.testrun",)
_MODULES = {
    "program": (),
    "numpy": ("numpy",),
    "trusted": ("magicrl_verifiers.code.checkers",),
    "tests": _TEST_MODULES,
    "numpy tests": ("numpy", *_TEST_MODULES),
}
"""Fork servers, by what they have loaded beyond the common modules."""
_MUCH_MEMORY_MB = 256
_PAIR_IDLE_FACTOR = 10.0


class Sandbox:
    """Starts fork servers when they are first needed and replaces them when they are lost. For one thread."""

    def __init__(self, options: SandboxOptions) -> None:
        self._options = options
        self._forkservers: dict[str, ForkServer] = {}

    @property
    def tier(self) -> str:
        """``A`` or ``B``; starts the fork server for programs if need be."""
        return self._forkserver("program").tier

    def run(self, job: Job, *, heavy: bool = False, trusted: bool = False) -> list[Observation]:
        """Do the runs of a program (``heavy``: it imports numpy) or, apart from those, of a checker (``trusted``).

        Returns what `ForkServer.finish` returns; raises SandboxLost.
        """
        forkserver = self._forkserver("trusted" if trusted else "numpy" if heavy else "program")
        return forkserver.finish(forkserver.start(job))

    def run_pair(
        self, program: Program, tests: Program, limits: Limits, details: Mapping[str, Any], *, heavy: bool
    ) -> tuple[Observation, Observation]:
        """Run test code in one process and the program that it calls in another.

        Raises:
            SandboxLost: The sandbox failed.
        """
        waiting = waiting_limits(limits)
        (calls_out, calls_in), (replies_out, replies_in) = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
        theirs = Job(
            role="serve", program=program, limits=waiting, channels={"calls": calls_out, "replies": replies_in}
        )
        ours = Job(
            role="assert",
            program=tests,
            limits=waiting,
            channels={"replies": replies_out, "calls": calls_in},
            outputs=("result",),
            details=details,
        )
        with contextlib.ExitStack() as started:
            # an end that stayed open here would keep a process from noticing that the other has ended
            with contextlib.ExitStack() as ends:
                for fd in (calls_out, calls_in, replies_out, replies_in):
                    ends.callback(os.close, fd)
                programs = self._forkserver("numpy" if heavy else "program")
                trusted = self._forkserver("numpy tests" if heavy else "tests")
                first = started.enter_context(contextlib.closing(programs.start(theirs)))
                second = started.enter_context(contextlib.closing(trusted.start(ours)))
            (seen_here,) = trusted.finish(second)
            (seen_there,) = programs.finish(first)
        check_lost(seen_there, waiting)
        check_lost(seen_here, waiting)
        return seen_there, seen_here

    def close(self) -> None:
        """End every process; the next use starts new ones."""
        for forkserver in self._forkservers.values():
            forkserver.close()
        self._forkservers.clear()

    def _forkserver(self, kind: str) -> ForkServer:
        if kind in self._forkservers and self._forkservers[kind].runs >= _MAX_RUNS:
            self._forkservers.pop(kind).close()
        for attempt in range(1, _STARTS + 1):
            if kind in self._forkservers:
                break
            try:
                self._forkservers[kind] = ForkServer(self._options, _MODULES[kind])
            except SandboxError as error:
                # one that is killed from outside while it warms up is started again
                if isinstance(error, SandboxRefusal) or attempt == _STARTS:
                    raise
        return self._forkservers[kind]


def waiting_limits(limits: Limits) -> Limits:
    """Return the limits of two processes, of which one waits while the other works."""
    return dataclasses.replace(limits, idle_seconds=_PAIR_IDLE_FACTOR * (limits.cpu_seconds + limits.idle_seconds))


def check_lost(seen: Observation, limits: Limits) -> None:
    """Raise `SandboxLost` for a run that came to nothing through no fault of the program's."""
    if seen.lost is not None:
        raise SandboxLost(seen.lost)
    # a kill from outside: the kernel's memory killer takes large processes, anybody else may take small ones
    outside = seen.signal == signal.SIGKILL and seen.killed is None and seen.cpu_seconds < limits.cpu_seconds
    if outside and seen.peak_mb < min(_MUCH_MEMORY_MB, limits.memory_mb / 2):
        raise SandboxLost("the program was killed from outside", killed=True)


_KILLED = {
    "cpu": ("time_limit", "more than {cpu_seconds:g} s of CPU time"),
    "idle": ("time_limit", "it waited for what never came"),
    "threads": ("security", "more than {threads} threads"),
}
"""Status and reason of a run by `Observation.killed`. The reason may name fields of `Limits`."""


def failure(seen: Observation, limits: Limits) -> tuple[str, str] | None:
    """Return (status, reason) of a run that failed, None for one that ran to its end."""
    # what the sandbox did or the kernel says comes first; exit status and text are the program's own words
    late = seen.cpu_seconds > limits.cpu_seconds or seen.signal == signal.SIGXCPU
    if (killed := "cpu" if late else seen.killed) is not None:
        status, reason = _KILLED[killed]
        return status, reason.format_map(dataclasses.asdict(limits))
    if not seen.compiled:
        return "syntax_error", _last_line(seen.errors) or "the compiler crashed on it"
    if len(seen.output) >= limits.output_mb * MIB or seen.signal == signal.SIGXFSZ:
        return "output_limit", f"more than {limits.output_mb} MiB of output"
    if seen.signal == signal.SIGSYS:
        return "security", "a system call that no program needs"
    if seen.signal is not None:
        # C code that gets no memory mostly crashes instead of raising MemoryError
        if seen.signal == signal.SIGKILL or seen.peak_mb > 0.9 * limits.memory_mb:
            return "memory_limit", "killed for its memory"
        with contextlib.suppress(ValueError):
            return "runtime_error", f"ended by {signal.Signals(seen.signal).name}"
        return "runtime_error", f"ended by signal {seen.signal}"
    if seen.exit_code == EXIT_MEMORY:
        return "memory_limit", f"more than {limits.memory_mb} MiB"
    if seen.exit_code == EXIT_NOT_PLAIN:
        return "wrong_answer", _last_line(seen.errors)
    if seen.exit_code != 0:
        return "runtime_error", _last_line(seen.errors) or f"exit status {seen.exit_code}"
    return None


def _last_line(text: str) -> str:
    return text.strip().rsplit("\n", 1)[-1].strip()
