"""What a hostile program does with what it is allowed: files, signals, threads, limits and memory of the kernel's."""

from __future__ import annotations

import textwrap

import pytest

from magicrl.verifiers.code.judge import CodeJudge
from magicrl.verifiers.code.suite import parse_suite

from .conftest import judge_of
from .test_confinement import denied, holes

RIGHT = "print(input())"
ECHO = {"inputs": ["1"] * 3, "outputs": ["1"] * 3, "time_limit": 0.4}


def status_of(judge: CodeJudge, program: str) -> str:
    """Of a hostile program; an honest one passes right after it, in the same sandbox, which is not replaced."""
    judge.judge_program(RIGHT, parse_suite(ECHO))
    before = judge.sandbox.pids
    status = judge.judge_program(textwrap.dedent(program), parse_suite(ECHO)).status
    assert judge.judge_program(RIGHT, parse_suite(ECHO)).status == "passed"
    assert judge.sandbox.pids == before
    return status


def test_asks_the_kernel_for_nothing_that_is_shared_with_others(tiered: CodeJudge) -> None:
    attempts = {
        "semaphores": denied(64, 0, 1, 0o1000),
        "messages": denied(68, 0, 0o1000),
        "posix_messages": denied(240, 0, 0o100, 0o600, 0),
        "inotify": denied(294, 0),
        "fanotify": denied(300, 0, 0),
        "timerfd": denied(283, 0, 0),
        "signalfd": denied(289, -1, 0, 8, 0),
        "timer": denied(222, 0, 0, 0),
        "queued_signal": denied(129, 1, 10, 0),
        "locked_memory": denied(149, 0, 4096),
        "secret_memory": denied(447, 0),
        "own_filter": denied(317, 1, 0, 0),
        "own_rules": denied(444, 0, 0, 1),
        "exec_descriptor": denied(322, 0, 0, 0, 0, 0x1000),
        "fallocate": denied(285, 1, 0, 0, 1 << 20),
        "large_pipe": "import fcntl; r, w = os.pipe(); fcntl.fcntl(r, 1031, 1 << 20)",
        "seal": "import fcntl; fcntl.fcntl(1, 1033, 2)",
        "lease": "import fcntl; fcntl.fcntl(1, 1024, 0)",
        "pass_a_descriptor": "import array; a, b = socket.socketpair(); a.sendmsg([b'x'],"
        " [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [1]))])",
        "thread_with_descriptors_of_its_own": denied(56, 0x10B00, 0, 0, 0, 0),
        "process_that_shares_memory": denied(56, 0x4111, 0, 0, 0, 0),
    }
    assert holes(tiered, attempts) == set()


@pytest.mark.parametrize("number", [248, 250, 298, 303, 312, 323, 424, 438, 440])
def test_further_calls_end_the_program(tiered: CodeJudge, number: int) -> None:
    """Keys, performance counters, file handles, kcmp, userfaultfd and what goes through process descriptors."""
    assert (
        status_of(tiered, f"import ctypes\nctypes.CDLL(None).syscall({number}, 0, 0, 0, 0, 0)\n{RIGHT}") == "security"
    )


def test_limits_cannot_be_raised(tiered: CodeJudge) -> None:
    kinds = ["AS", "FSIZE", "CPU", "NOFILE", "CORE"]
    attempts = {
        kind: f"import resource; old = resource.getrlimit(resource.RLIMIT_{kind})[1]\n"
        f"if old < 0: raise OSError\nresource.setrlimit(resource.RLIMIT_{kind}, (old + 1, old + 1))"
        for kind in kinds
    }
    attempts |= {
        f"{kind}_none": f"import resource; resource.setrlimit(resource.RLIMIT_{kind}, (-1, -1))" for kind in kinds
    }
    assert holes(tiered, attempts) == set()


@pytest.mark.parametrize(
    ("program", "statuses"),
    [
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\nprint(0)", {"time_limit", "wrong_answer"}),
        ("import signal\nfor n in range(1, 65):\n  try: signal.signal(n, signal.SIG_IGN)\n"
         "  except (OSError, ValueError): pass\nwhile True: pass", {"time_limit"}),
        ("import ctypes, threading\ndef spin():\n  while True: pass\nthreading.Thread(target=spin).start()\n"
         "ctypes.CDLL(None).syscall(60, 0)", {"time_limit"}),
        ("import threading, time\nwhile True:\n  threading.Thread(target=time.sleep, args=(9,)).start()",
         {"security", "runtime_error", "memory_limit", "time_limit"}),
        ("import os\nwhile True: os.write(2, b'x' * (1 << 20))", {"runtime_error", "output_limit"}),
        ("import os\nos.ftruncate(1, 1 << 40)", {"runtime_error", "output_limit"}),
        ("import os\nos.ftruncate(0, 4 << 20)\nos.ftruncate(2, 4 << 20)\nprint(0)", {"wrong_answer"}),
        ("import os, sys\nsys.stdout.close()\nfor n in range(300):\n  try: os.close(n)\n  except OSError: pass",
         {"wrong_answer", "runtime_error"}),
        ("import os\nkept = []\ntry:\n  while True: kept.append(os.pipe())\nexcept OSError: pass\n"
         "for r, w in kept:\n  os.set_blocking(w, False)\n  try:\n    while True: os.write(w, bytes(65536))\n"
         "  except OSError: pass\nprint(0)", {"wrong_answer"}),
        ("import ctypes\nctypes.memset(0, 1, 1)", {"runtime_error"}),
        ("import ctypes, sys\nctypes.memset(id(None), 0, 16)\nprint(0)", {"wrong_answer", "runtime_error"}),
        ("import mmap, os\nos.ftruncate(1, 4096)\nmmap.mmap(1, 4096)[:2] = b'0\\n'", {"wrong_answer"}),
        ("import marshal\nmarshal.loads(b'c' + bytes(range(256)) * 9)", {"runtime_error"}),
    ],
)  # fmt: skip
def test_abuse_of_what_is_allowed_ends_the_program_alone(tiered: CodeJudge, program: str, statuses: set[str]) -> None:
    assert status_of(tiered, program) in statuses


def test_a_full_scratch_folder_is_empty_for_the_next_test() -> None:
    fills = """
    import os
    written = made = 0
    try:
        for n in range(100):
            with open(f"/tmp/{n}", "wb") as file:
                written += file.write(bytes(1 << 20))
    except OSError: pass
    try:
        for n in range(9999):
            os.mkdir(f"/tmp/d{n}")
            made += 1
    except OSError: pass
    print(written >> 20 <= 64, made < 2000, len(os.listdir("/tmp")) > 1000)
    """
    with judge_of("B") as judge:
        outputs = judge.outputs(textwrap.dedent(fills), parse_suite({"inputs": [""] * 3, "outputs": [""] * 3}))
    assert outputs == [b"True True True\n"] * 3


def test_what_one_test_does_to_its_interpreter_does_not_reach_the_next(tiered: CodeJudge) -> None:
    program = """
    import builtins, gc, json, os, random, sys, threading
    print(len(gc.get_objects()) > 9, sys.getrecursionlimit(), random.random(), len(dir(builtins)), json.dumps(1),
          threading.active_count(), os.getcwd(), os.umask(0o22), sorted(os.environ), gc.isenabled())
    builtins.planted, json.dumps = 1, None
    sys.setrecursionlimit(77); random.seed(5); os.umask(0o77); os.environ["PLANTED"] = "1"; gc.disable()
    sys.modules["bisect"] = None
    """
    outputs = tiered.outputs(textwrap.dedent(program), parse_suite({"inputs": [""] * 4, "outputs": [""] * 4}))
    assert outputs[0] is not None
    assert outputs == [outputs[0]] * 4
    suite = parse_suite({"inputs": [""] * 12, "outputs": [outputs[0].decode()] * 12})
    assert tiered.judge_program(textwrap.dedent(program), suite).passed == 12  # one alone, then in a batch
