"""The processes of one judge: a zygote for programs, one with numpy, and one for checkers and test code.

Test code and checkers live in a zygote of their own: whatever a program inherits or could reach has never held an
expected output.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from magicrl.verifiers.code.host import Job, Program, SandboxError, SandboxOptions, SandboxRefusal, Zygote
from magicrl.verifiers.code.limits import EXIT_MEMORY, EXIT_NOT_PLAIN, MIB, Limits, Observation

_MAX_RUNS = 20_000
"""A zygote is replaced after so many runs: nothing that might grow can grow for ever."""
_STARTS = 3
_TEST_MODULES = ("magicrl.verifiers.code.testrun",)
_MODULES = {
    "program": (),
    "numpy": ("numpy",),
    "trusted": (),
    "tests": _TEST_MODULES,
    "numpy tests": ("numpy", *_TEST_MODULES),
}
"""Zygotes, by what they have loaded beyond the common modules."""
_MUCH_MEMORY_MB = 256
_PAIR_IDLE_FACTOR = 10.0


class Lost(Exception):
    """A run that came to nothing through no fault of the program's. ``killed``: by a signal from outside."""

    def __init__(self, reason: str, *, killed: bool = False) -> None:
        super().__init__(reason)
        self.killed = killed


class Sandbox:
    """Starts zygotes when they are first needed and replaces them when they are lost. For one thread."""

    def __init__(self, options: SandboxOptions) -> None:
        self._options = options
        self._zygotes: dict[str, Zygote] = {}
        self._runs: dict[str, int] = {}

    @property
    def tier(self) -> str:
        """``A`` or ``B``; starts the zygote for programs if need be."""
        return self._zygote("program").tier

    @property
    def reasons(self) -> list[str]:
        """Why a higher tier is not in use."""
        return self._zygote("program").reasons

    @property
    def pids(self) -> list[int]:
        """The zygotes that live now."""
        return [zygote.pid for zygote in self._zygotes.values()]

    def run(
        self,
        program: Program,
        role: str,
        limits: Limits,
        *,
        each: Sequence[Mapping[str, bytes]],
        outputs: Sequence[str],
        left: float,
        stop: bool,
        heavy: bool = False,
        **details: Any,
    ) -> list[Observation]:
        """Run a program that is not trusted, once for each entry of ``each``; see `host.Job`.

        What was lost is told by the observation's ``lost``; what was observed before it holds.
        """
        job = Job(
            role=role,
            program=program,
            limits=limits,
            each=each,
            outputs=outputs,
            details=details,
            left=left,
            stop=stop,
        )
        return self._all("numpy" if heavy else "program", job)

    def run_trusted(
        self,
        program: Program | None,
        role: str,
        limits: Limits,
        *,
        channels: Mapping[str, bytes | int],
        outputs: Sequence[str] = (),
        **details: Any,
    ) -> Observation:
        """Run a checker, as confined as a program but away from them.

        Raises:
            Lost: the sandbox failed.
        """
        job = Job(role=role, program=program, limits=limits, channels=channels, outputs=outputs, details=details)
        (seen,) = self._all("trusted", job)
        check_lost(seen, limits)
        return seen

    def run_pair(
        self,
        program: Program,
        tests: Program,
        limits: Limits,
        *,
        heavy: bool,
        **details: Any,
    ) -> tuple[Observation, Observation]:
        """Run test code in one process and the program that it calls in another.

        Raises:
            Lost: the sandbox failed.
        """
        calls_out, calls_in = os.pipe2(os.O_CLOEXEC)
        replies_out, replies_in = os.pipe2(os.O_CLOEXEC)
        # one waits while the other works
        patience = _PAIR_IDLE_FACTOR * (limits.cpu_seconds + limits.idle_seconds)
        waiting = dataclasses.replace(limits, idle_seconds=patience)
        server = Job(
            role="serve", program=program, limits=waiting, channels={"calls": calls_out, "replies": replies_in}
        )
        client = Job(
            role="assert",
            program=tests,
            limits=waiting,
            channels={"replies": replies_out, "calls": calls_in},
            outputs=("result",),
            details=details,
        )
        ends = [calls_out, calls_in, replies_out, replies_in]
        try:
            kinds = ("numpy", "numpy tests") if heavy else ("program", "tests")
            program_zygote, trusted = map(self._zygote, kinds)
            try:
                first = program_zygote.start(server)
                second = trusted.start(client)
            finally:
                while ends:
                    os.close(ends.pop())
            (ours,) = trusted.finish(second)
            (theirs,) = program_zygote.finish(first)
            for kind in kinds:
                self._runs[kind] += 1
        except ConnectionError as error:
            raise Lost(str(error)) from error
        finally:
            while ends:
                os.close(ends.pop())
        for seen in (theirs, ours):
            check_lost(seen, waiting)
        return theirs, ours

    def restart(self) -> None:
        """Replace every process at its next use."""
        self.close()

    def close(self) -> None:
        for zygote in self._zygotes.values():
            zygote.close()
        self._zygotes.clear()
        self._runs.clear()

    def _all(self, kind: str, job: Job) -> list[Observation]:
        zygote = self._zygote(kind)
        try:
            found = zygote.finish(zygote.start(job))
        except ConnectionError as error:
            return [Observation(lost=str(error))]
        self._runs[kind] += len(found)
        return found

    def _zygote(self, kind: str) -> Zygote:
        if self._runs.get(kind, 0) >= _MAX_RUNS:
            self._zygotes.pop(kind).close()
        if kind not in self._zygotes:
            self._zygotes[kind] = self._fresh(_MODULES[kind])
            self._runs[kind] = 0
        return self._zygotes[kind]

    def _fresh(self, modules: Sequence[str]) -> Zygote:
        """A new zygote; one that is killed from outside while it warms up is started again."""
        for _ in range(_STARTS - 1):
            try:
                return Zygote(self._options, modules)
            except SandboxRefusal:
                raise
            except SandboxError:
                continue
        return Zygote(self._options, modules)


def check_lost(seen: Observation, limits: Limits) -> None:
    """Raise `Lost` for a run that came to nothing through no fault of the program's."""
    if seen.lost is not None:
        raise Lost(seen.lost)
    outside = seen.signal == signal.SIGKILL and seen.killed is None and seen.cpu_seconds < limits.cpu_seconds
    if outside and seen.peak_mb < min(_MUCH_MEMORY_MB, limits.memory_mb / 2):
        raise Lost("the program was killed from outside", killed=True)


def failure(seen: Observation, limits: Limits) -> tuple[str, str] | None:
    """What the outside saw go wrong, as (status, reason); None when the program ran to its end."""
    if seen.killed == "cpu" or seen.cpu_seconds > limits.cpu_seconds or seen.signal == signal.SIGXCPU:
        return "time_limit", f"more than {limits.cpu_seconds:g} s of CPU time"
    if seen.killed == "idle":
        return "time_limit", "it waited for what never came"
    if seen.killed == "threads":
        return "security", f"more than {limits.threads} threads"
    if not seen.compiled:
        return "syntax_error", _last_line(seen.errors) or "the compiler crashed on it"
    if len(seen.output) >= limits.output_mb * MIB or seen.signal == signal.SIGXFSZ:
        return "output_limit", f"more than {limits.output_mb} MiB of output"
    if seen.signal == signal.SIGSYS:
        return "security", "a system call that no program needs"
    if seen.signal is not None:
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
