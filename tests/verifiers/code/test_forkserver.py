"""Scripts of system calls, and batches of runs as scripts: where they go on and end, and what comes of each run."""

from __future__ import annotations

import ctypes
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
from magicrl.verifiers.code.kernel import LEAST, Machine, Script, enlarge_code
from magicrl.verifiers.code.seccomp import child_filter
from magicrl.verifiers.code.values import SLOTS

WRITE, GETPID, GETPPID, EXIT, WAIT4 = 1, 39, 110, 231, 61
ME = (GETPID, 0, 0, 0, 0, 0)
NO_SUCH_CALL = (9999, 0, 0, 0, 0, 0)


@pytest.fixture
def script() -> Script:
    return Script(Machine(), 20)


def writing(fd: int, text: ctypes.Array[ctypes.c_char]) -> kernel.Call:
    return (WRITE, fd, kernel.address(text), len(text.raw) - 1, 0, 0)


def test_goes_through_all_records_and_keeps_the_answers(script: Script) -> None:
    first, second = script.call(ME), script.call((GETPPID, 0, 0, 0, 0, 0))
    end = script.stop()
    assert script.run(0) == end
    assert (script.answer(first), script.answer(second)) == (os.getpid(), os.getppid())


@pytest.mark.parametrize(
    ("low", "high", "goes_on"),
    [
        (None, None, True),
        (0, 0, True),
        (None, -1, False),
        (1, None, False),
    ],
)
def test_ends_at_an_answer_out_of_range(script: Script, low: int | None, high: int | None, goes_on: bool) -> None:
    """``low`` and ``high`` are distances from the answer; None: far away."""
    me = os.getpid()
    script.call(ME, 0 if low is None else me + low, 1 << 40 if high is None else me + high)
    end = script.stop()
    assert (script.run(0) == end) == goes_on


def test_an_error_is_out_of_the_usual_range_but_may_be_allowed(script: Script) -> None:
    failing = script.call(NO_SUCH_CALL)
    allowed = script.call(NO_SUCH_CALL, LEAST)
    end = script.stop()
    assert script.run(failing) == failing
    assert script.answer(failing) == -38  # ENOSYS
    assert script.run(allowed) == end


@pytest.mark.parametrize("equal", [True, False])
def test_compares_memory_and_copies_four_bytes(script: Script, equal: bool) -> None:
    first, second = (ctypes.c_uint64 * 3)(1, 2, 3), (ctypes.c_uint64 * 3)(1, 2, 4)
    if equal:
        script.store(kernel.address(second) + 16, kernel.address(first) + 16)
    same = script.same(kernel.address(first), kernel.address(second), 3)
    end = script.stop()
    assert script.run(0) == (end if equal else same)


def test_jumps_over_records_and_arguments_can_be_changed(script: Script) -> None:
    jump = script.jump(0)
    script.call(NO_SUCH_CALL)
    script.lead(jump, len(script))
    out, into = os.pipe()
    text = ctypes.create_string_buffer(b"abc")
    told = script.call(writing(into, text), 2, 2)
    end = script.stop()
    try:
        assert script.run(0) == told  # three bytes, not two
        script.change(told, 2, 2)
        assert script.run(0) == end
        assert os.read(out, 9) == b"abcab"
    finally:
        os.close(out)
        os.close(into)


def in_a_child(action: Callable[[], int]) -> int:
    """The exit status of a child of this process that ends with an action's result."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            status = action()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_child_goes_its_own_way_and_python_goes_on_in_it() -> None:
    def forks() -> int:
        """In a process of one thread: what `kernel.FORK` asks for."""
        script, status = Script(Machine(), 20), ctypes.c_int64(0)
        fork = script.call(kernel.FORK)
        wait = script.call((WAIT4, -1, kernel.address(status), 0, 0, 0), 1)
        end = script.stop()
        script.lead(fork, len(script))
        inside = script.stop()
        if script.run(fork) == inside:
            os._exit(7 if os.getpid() != script.answer(fork) and sorted([2, 1]) == [1, 2] else 1)
        return 7 if script.answer(wait) > 1 and os.waitstatus_to_exitcode(status.value) == 7 and end < inside else 1

    assert in_a_child(forks) == 7


def test_the_interpreter_goes_on_in_large_pages() -> None:
    """Whether the system gives them or not; where it does, its code is a private copy then."""

    def works() -> int:
        done = enlarge_code()
        inside = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p).value or 0
        with open("/proc/self/maps") as maps:
            lines = [line.split() for line in maps]
        (rights,) = {
            line[1] for line in lines if int(line[0].split("-")[0], 16) <= inside < int(line[0].split("-")[1], 16)
        }
        import decimal

        assert "w" not in rights
        return 5 if decimal.Decimal("0.1") * 3 == decimal.Decimal("0.3") and done in (True, False) else 1

    assert in_a_child(works) == 5


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
