"""A batch of runs as a script: what comes of each; Python has a look at every run that is not as it should be."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

import pytest

from magicrl.verifiers.code import kernel
from magicrl.verifiers.code.child import Binding, Guards
from magicrl.verifiers.code.forkserver import Batch, Plan, World
from magicrl.verifiers.code.kernel import Machine
from magicrl.verifiers.code.seccomp import child_filter
from magicrl.verifiers.code.values import SLOTS

from .test_script import in_a_child

CODE = b"compiled"


def batch_of(
    inside: Callable[[bool], NoReturn], *, runs: int = 3, rules: int | None = None, stop: bool = True
) -> Batch:
    """In a process of one thread that may be bound for ever. Its children have one file each, at standard output."""
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    told, telling = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    code = os.memfd_create("code")
    os.write(code, CODE)
    filters = child_filter()
    parent = os.getpid()
    rules = kernel.landlock_rules([("/usr", kernel.READ_RIGHTS)]) if rules is None else rules
    binding = Binding("program", Guards(rules, filters, filters, "/", parent), (code, len(CODE)))
    binding.allow(5)
    errors = os.memfd_create("errors")
    plan = Plan(
        common=[(errors, 2), (telling, SLOTS["status"])],
        own=[[(os.memfd_create("out"), 1)] for _ in range(runs)],
        errors=errors,
        room=100,
        stop=stop,
        scratch=None,
    )
    return Batch(World(Machine(), kernel.Wait(0.02), told, -1), binding, plan, inside)


def gone(batch: Batch, run: int) -> int:
    """As `Batch.go`, but on a busy machine a child may take longer than it is waited for."""
    at = batch.go(run)
    while at < len(batch) and batch.alive(at):
        at = batch.resume(at)
    return at


def status(batch: Batch, run: int) -> int:
    return os.waitstatus_to_exitcode(batch.report(run)["status"])


def leave(bound: bool, action: Callable[[], object] = lambda: None, code: int = 0) -> NoReturn:
    """What a child does: nothing of it may come back."""
    try:
        action()
    finally:
        os._exit(code if bound else 77)


def all_end_well() -> bool:
    batch = batch_of(lambda bound: leave(bound, lambda: os.write(1, b"x")))
    return gone(batch, 0) == len(batch) == 3 and [batch.report(run)["told"] for run in range(3)] == ["RC"] * 3


def a_guard_that_fails_ends_the_child() -> bool:
    """Landlock's descriptor is none: the child learns that it is not bound, and nobody was told that it was."""
    batch = batch_of(leave, rules=9999)
    return gone(batch, 0) == 0 and batch.alive(0) == 0 and status(batch, 0) == 77 and batch.report(0)["told"] == ""


def a_failed_run_ends_the_script() -> bool:
    batch = batch_of(lambda bound: leave(bound, code=5))
    return gone(batch, 0) == 0 and gone(batch, 1) == 1 and status(batch, 1) == 5


def a_failed_run_is_passed_over() -> bool:
    batch = batch_of(lambda bound: leave(bound, code=5), stop=False)
    return gone(batch, 0) == 3 and [status(batch, run) for run in range(3)] == [5, 5, 5]


def words_on_standard_error_end_the_script() -> bool:
    batch = batch_of(lambda bound: leave(bound, lambda: os.write(2, b"oh")))
    return gone(batch, 0) == 0 and os.pread(batch.errors, 9, 0) == b"oh" and status(batch, 0) == 0


def much_output_ends_the_script() -> bool:
    return gone(batch_of(lambda bound: leave(bound, lambda: os.write(1, bytes(101)))), 0) == 0


def a_run_that_takes_long_is_waited_for_again_and_can_be_killed() -> bool:
    batch = batch_of(lambda bound: leave(bound, lambda: time.sleep(60)), runs=2)
    first = batch.go(0)
    pid = batch.alive(0)
    again = batch.resume(0)
    still = batch.alive(0)
    os.kill(pid, signal.SIGKILL)
    while batch.resume(0) == 0 and batch.alive(0):
        pass
    return (first, again, still) == (0, 0, pid) and batch.alive(0) == 0 and status(batch, 0) == -signal.SIGKILL


@pytest.mark.parametrize(
    "case",
    [
        all_end_well,
        a_guard_that_fails_ends_the_child,
        a_failed_run_ends_the_script,
        a_failed_run_is_passed_over,
        words_on_standard_error_end_the_script,
        much_output_ends_the_script,
        a_run_that_takes_long_is_waited_for_again_and_can_be_killed,
    ],
)
def test_runs_of_a_batch(case: Callable[[], bool]) -> None:
    if kernel.landlock_abi() == 0 or sys.platform != "linux":
        pytest.skip("kernel lacks the primitive: Landlock")
    assert in_a_child(lambda: 0 if case() else 1) == 0
