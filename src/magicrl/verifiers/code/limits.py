"""What a program may use, and what was seen of it. Shared by both sides of the sandbox."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


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
        if not self.cpu_seconds > 0:
            raise ValueError(f"time_limit must be positive seconds, got {self.cpu_seconds}")
        if self.memory_mb < 16:
            raise ValueError(f"memory_limit_mb must be at least 16, got {self.memory_mb}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What was seen of one run from outside.

    Attributes:
        ready: its guards were in force; False means that nothing of the program ran.
        compiled: its source was accepted.
        exit_code: its exit status, or None if a signal ended it.
        signal: the signal that ended it, or None.
        killed: why the sandbox ended it: ``cpu``, ``idle``, ``threads`` or None.
        cpu_seconds: CPU time it used.
        peak_mb: most resident memory, MiB.
        output: what it wrote on standard output.
        errors: the end of what it wrote on standard error.
        result: what it wrote on the result channel.
        lost: why there is no observation (the sandbox itself failed), or None.
    """

    ready: bool = False
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


def present_cpu(each: float, left: float) -> float:
    """CPU seconds of the next test when ``left`` remain for all together. Both sides of the sandbox reckon so."""
    return max(0.05, min(each, left))


EXIT_MEMORY = 102
EXIT_NOT_PLAIN = 104
EXIT_CHECKER_CRASHED = 113
"""Exit statuses by which the runner names why a program failed. A program may fake them: it has failed anyway."""

SLOTS = {
    "stdin": 0,
    "stdout": 1,
    "stderr": 2,
    "status": 200,
    "code": 201,
    "source": 202,
    "prelude": 203,
    "args": 204,
    "result": 205,
    "calls": 206,
    "replies": 207,
    "binary": 208,
    "input": 209,
    "output": 210,
    "answer": 211,
}
"""Descriptor numbers inside a sandbox, by name."""
