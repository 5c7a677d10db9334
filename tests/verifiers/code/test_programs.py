"""Programs run as they are: what contest programs do must work, and what goes wrong has its own status."""

from __future__ import annotations

import textwrap

import pytest

from magicrl.verifiers.code.judge import CodeJudge
from magicrl.verifiers.code.suite import parse_suite

SUM = {"inputs": ["2 3\n", "7 8\n"], "outputs": ["5\n", "15\n"]}


def status(judge: CodeJudge, program: str, tests: dict[str, object]) -> str:
    return judge.judge_program(textwrap.dedent(program), parse_suite(tests)).status


@pytest.mark.parametrize(
    "program",
    [
        "a, b = map(int, input().split())\nprint(a + b)",
        "import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))",
        "print(sum(map(int, open(0).read().split())))",
        "print(sum(map(int, open('/dev/stdin').read().split())))",
        "import os\nos.write(1, b'%d' % sum(map(int, os.read(0, 99).split())))",
        "import sys\nprint(sum(map(int, input().split())))\nsys.exit()",
        "print(sum(map(int, input().split())))\nexit(0)",
        "import sys, os\nprint(sum(map(int, input().split())))\nsys.stdout.flush()\nos._exit(0)",
        "from __future__ import annotations\nfrom math import *\ndef f(a: X, b): return a + b\n"
        "print(f(*map(int, input().split())))",
        "if __name__ == '__main__':\n    print(sum(map(int, input().split())))",
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    a: int\n    b: int\n"
        "p = P(*map(int, input().split()))\nprint(p.a + p.b)",
        "import pickle\nclass C: pass\nassert type(pickle.loads(pickle.dumps(C()))) is C\n"
        "print(sum(map(int, input().split())))",
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(256 << 20)\n"
        "def f(n): return 0 if n == 0 else 1 + f(n - 1)\n"
        "def main():\n    assert f(50000) == 50000\n    print(sum(map(int, input().split())))\n"
        "t = threading.Thread(target=main)\nt.start()\nt.join()",
        "from functools import lru_cache\nimport sys\nsys.setrecursionlimit(10**6)\n@lru_cache(None)\n"
        "def f(n): return 0 if n == 0 else 1 + f(n - 1)\nassert f(20000) == 20000\n"
        "print(sum(map(int, input().split())))",
        "import asyncio\nasync def main():\n    await asyncio.sleep(0)\n    print(sum(map(int, input().split())))\n"
        "asyncio.run(main())",
        "import atexit\nt = sum(map(int, input().split()))\natexit.register(lambda: print(t))",
        "import fileinput\nfor line in fileinput.input(): print(sum(map(int, line.split())))",
        "import sys\nprint('debug', file=sys.stderr)\nprint(sum(map(int, input().split())))",
        "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(3) as pool:\n"
        "    print(sum(pool.map(int, input().split())))",
        "import resource\nresource.setrlimit(resource.RLIMIT_STACK, resource.getrlimit(resource.RLIMIT_STACK))\n"
        "print(sum(map(int, input().split())))",
        "import numpy as np\nprint(int(np.array(input().split(), dtype=int).sum()))",
    ],
)
def test_an_honest_program_passes_in_both_tiers(tiered: CodeJudge, program: str) -> None:
    verdict = tiered.judge_program(program, parse_suite(SUM))
    assert (verdict.status, verdict.passed, verdict.total) == ("passed", 2, 2), verdict.reason


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("print(0)", "wrong_answer"),
        ("", "wrong_answer"),
        ("1 / 0", "runtime_error"),
        ("print(5)\nraise SystemExit(3)", "runtime_error"),
        ("import os\nos.abort()", "runtime_error"),
        ("import os\nos.kill(os.getpid(), 9)", "security"),
        ("while True: pass", "time_limit"),
        ("import time\ntime.sleep(60)", "time_limit"),
        ("import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n"
         "    except Exception: pass\nwhile True:\n    try: x = 1\n    except BaseException: pass", "time_limit"),
        ("x = bytearray(8 << 30)", "memory_limit"),
        ("x = []\nwhile True: x.append(bytearray(1 << 20))", "memory_limit"),
        ("import sys\nwhile True: sys.stdout.write('x' * 65536)", "output_limit"),
        ("print(1", "syntax_error"),
        ("print(1)\0", "syntax_error"),
        ("x = '\ud800'", "syntax_error"),
        ("(" * 20000 + ")" * 20000, "syntax_error"),
        ("import threading, time\nthreading.stack_size(65536)\n"
         "for _ in range(500): threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n"
         "while True: pass", "security"),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_named(judge: CodeJudge, program: str, expected: str) -> None:
    assert status(judge, program, SUM) == expected


def test_tests_do_not_share_anything(judge: CodeJudge) -> None:
    """A counter kept in a file, a module or a global starts anew with every test."""
    counting = """
        import os, sys
        path = "/tmp/count"
        seen = os.path.exists(path)
        try: open(path, "w").close()
        except OSError: pass
        sys.path.append("seen")
        print(sum(map(int, input().split())) if not seen and sys.path.count("seen") == 1 else 0)
    """
    assert status(judge, counting, SUM) == "passed"


def test_all_tests_run_unless_told_to_stop(judge: CodeJudge) -> None:
    tests = {"inputs": ["1", "2", "3"], "outputs": ["1", "0", "3"]}
    verdict = judge.judge_program("print(input())", parse_suite(tests))
    assert (verdict.passed, verdict.total, verdict.status) == (2, 3, "wrong_answer")


def test_the_problems_own_limits_hold(judge: CodeJudge) -> None:
    slow = "import time\nend = time.process_time() + 0.6\nwhile time.process_time() < end: pass\nprint(1)"
    assert status(judge, slow, {"inputs": [""], "outputs": ["1"]}) == "passed"
    assert status(judge, slow, {"inputs": [""], "outputs": ["1"], "time_limit": 0.2}) == "time_limit"
    large = "x = bytearray(200 << 20)\nprint(1)"
    assert status(judge, large, {"inputs": [""], "outputs": ["1"]}) == "passed"
    assert status(judge, large, {"inputs": [""], "outputs": ["1"], "memory_limit_mb": 64}) == "memory_limit"


def test_randomness_does_not_change_a_verdict(judge: CodeJudge) -> None:
    program = "import random\nprint(random.random(), hash('a'))"
    suite = parse_suite({"inputs": ["", ""], "outputs": ["", ""]})
    assert len(set(judge.outputs(program, suite))) == 1
