"""Allowed operations of programs and functions, and the names of their failures. No object of the program decides."""

from __future__ import annotations

import sys
import textwrap
from typing import Any

import pytest

from magicrl_verifiers.code.judge import CodeJudge, CodeOptions, CodeProtocol
from magicrl_verifiers.code.sandbox import Job, Limits, Observation, Sandbox, failure
from magicrl_verifiers.code.suite import AssertCase, CallCase, parse_suite
from magicrl_verifiers.records import Problem
from magicrl_verifiers.workers import Item

from .conftest import judge_of

# From 3.12 on CPython limits calls through C, such as those of a cached function, by itself.
CACHED = 20_000 if sys.version_info < (3, 12) else 400
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
        f"def f(n): return 0 if n == 0 else 1 + f(n - 1)\nassert f({CACHED}) == {CACHED}\n"
        "print(sum(map(int, input().split())))",
        "import threading, time\ndef late():\n    time.sleep(0.05)\n    print(sum(map(int, input().split())))\n"
        "threading.Thread(target=late).start()",
        "print(sum(map(int, input().split())) + 5000 - len(str(10**4999)))",
        "import asyncio\nasync def main():\n    await asyncio.sleep(0)\n    print(sum(map(int, input().split())))\n"
        "asyncio.run(main())",
        "import atexit\nt = sum(map(int, input().split()))\natexit.register(lambda: print(t))",
        "import fileinput\nfor line in fileinput.input(): print(sum(map(int, line.split())))",
        "import sys\nprint('debug', file=sys.stderr)\nprint(sum(map(int, input().split())))",
        "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(3) as pool:\n"
        "    print(sum(pool.map(int, input().split())))",
        "import resource\nresource.setrlimit(resource.RLIMIT_STACK, resource.getrlimit(resource.RLIMIT_STACK))\n"
        "print(sum(map(int, input().split())))",
        "import resource\nresource.setrlimit(resource.RLIMIT_STACK, (2**29, -1))\n"
        "print(sum(map(int, input().split())))",
        "import atexit, io, sys\nkept = io.StringIO()\nsys.stdout = kept\n"
        "atexit.register(lambda: sys.__stdout__.write(kept.getvalue()))\nprint(sum(map(int, input().split())))",
        "out = open(1, 'w')\nout.write(f'{sum(map(int, input().split()))}\\n')",
        "import os\nout = os.fdopen(1, 'w')\nprint(sum(map(int, input().split())), file=out)",
        "import os, sys\nclass Out:\n    text = ''\n    def write(self, text): self.text += text\n"
        "    def flush(self):\n        os.write(1, self.text.encode())\n        self.text = ''\n"
        "sys.stdout = Out()\nprint(sum(map(int, input().split())))",
        "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.detach(), encoding='utf-8')\n"
        "print(sum(map(int, input().split())))",
        "import os\ndef write(n): os.write(1, f'{n}\\n'.encode())\nclass Total:\n    def __del__(self): write(self.n)\n"
        "total = Total()\ntotal.n = sum(map(int, input().split()))",
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
        ("print(5)\nraise SystemExit('no solution')", "runtime_error"),
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


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("def f(x):\n    return x[5]", "IndexError: list index out of range (line 2)"),
        ("import json\ndef f(x):\n    return json.loads('{')", "(char 1) (line 3)"),
        ("def f(x, y): return x", "missing 1 required positional argument: 'y'"),
        ("def g(x): return x", "NameError: the program defines no 'f'"),
        ("def f(x) return x", "SyntaxError: expected ':' (main.py, line 1)"),
    ],
)
def test_a_reason_names_lines_of_the_program_only(judge: CodeJudge, program: str, reason: str) -> None:
    verdict = judge.judge_program(program, parse_suite({"inputs": ["[1]"], "outputs": ["1"], "fn_name": "f"}))
    assert verdict.reason.endswith(reason)


def test_tests_do_not_share_anything(judge: CodeJudge) -> None:
    """A counter kept in a file, a module or a global starts from scratch with every test."""
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
    tests = {"inputs": ["1", "2", "3", "0"], "outputs": ["1", "0", "3", "0"]}
    verdict = judge.judge_program("n = int(input())\nprint(n // n * n)", parse_suite(tests))
    assert (verdict.passed, verdict.total, verdict.status) == (2, 4, "wrong_answer"), "the first failure counts"


def test_all_tests_together_have_a_time_and_slow_progress_is_not_idleness() -> None:
    limits = Limits(cpu_seconds=0.3, memory_mb=512, idle_seconds=0.1)
    burning = "import time\nwhile time.process_time() < 0.12: pass"
    slow = """
        import time
        end = time.monotonic() + 0.8
        while time.monotonic() < end:
            pause = time.process_time() + 0.001
            while time.process_time() < pause: pass
            time.sleep(0.01)
    """
    with judge_of("auto", limits=limits, total_seconds=0.5) as judge:
        assert status(judge, burning, {"inputs": [""] * 3, "outputs": [""] * 3}) == "passed"
        assert status(judge, burning, {"inputs": [""] * 6, "outputs": [""] * 6}) == "time_limit"
        brief = burning.replace("0.12", "0.02")
        many = judge.judge_program(brief, parse_suite({"inputs": [""] * 64, "outputs": [""] * 64}))
        assert many.status == "time_limit"
        assert many.seconds < 0.8, "tests that run in one request share the time that is left"
        assert status(judge, slow, {"inputs": [""], "outputs": [""]}) == "passed"


def test_waiting_counts_by_the_clock_against_the_time_of_all_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch ends with its first test that waits, so that the worker gets to count it."""
    batches: list[list[str | None]] = []

    def noted(sandbox: Sandbox, job: Job, **options: bool) -> list[Observation]:
        found = run(sandbox, job, **options)
        batches.append([seen.killed for seen in found])
        return found

    run = Sandbox.run
    monkeypatch.setattr(Sandbox, "run", noted)
    limits = Limits(cpu_seconds=0.2, memory_mb=512, idle_seconds=0.3)
    tests = parse_suite({"inputs": ["1"] * 3 + ["0"] * 60, "outputs": ["1"] * 63})
    program = "import time\nif input() == '0': time.sleep(1e6)\nprint(1)"
    with judge_of("auto", limits=limits, stop_at_failure=False) as judge:
        verdict = judge.judge_program(program, tests)
    assert (verdict.status, verdict.passed, verdict.reason) == (
        "time_limit",
        3,
        "test 4: it waited for what never came",
    )
    assert verdict.seconds < 2
    assert all("idle" not in batch[:-1] for batch in batches)
    assert 1 < sum(map(len, batches)) < 63, "the time of all tests was not used up"


def test_a_problem_with_a_long_limit_has_its_worker_for_longer() -> None:
    protocol = CodeProtocol(CodeOptions())
    texts = ['{"time_limit": 1000.5, "inputs": []}', r'{"inputs": ["\"time_limit\": 1000"]}']
    problems = [Problem(id="p", prompt="", references=(text,), verifier="code", source="test") for text in texts]
    limits = [protocol.stall_limit(Item(0, problem, "", bare=True)) for problem in problems]
    assert limits == [120 + 144 * 1000.5, 0.0]


def test_a_program_that_ends_after_its_limit_has_failed() -> None:
    """The sandbox polls a program a few times a second, so a program may exit by itself after its limit."""
    late = Observation(compiled=True, exit_code=0, cpu_seconds=1.1)
    assert failure(late, Limits(cpu_seconds=1.0)) == ("time_limit", "more than 1 s of CPU time")
    assert failure(late, Limits(cpu_seconds=1.2)) is None


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


ADD = {"fn_name": "add", "inputs": [[2, 3], [10, 20]], "outputs": [5, 30]}


def correct(judge: CodeJudge, program: str, tests: dict[str, Any]) -> bool:
    verdict = judge.judge_program(program, parse_suite(tests))
    assert verdict.status != "infrastructure_error", verdict.reason
    return verdict.correct


@pytest.mark.parametrize(
    "program",
    [
        "def add(a, b): return a + b",
        "class Solution:\n    def add(self, a: int, b: Optional[int]) -> List[int]:\n        return a + b",
        "class Solution:\n    @cache\n    def add(self, a, b): return a + b",
        "class Solution:\n    @staticmethod\n    def add(a, b): return a + b",
        "class Solution:\n    def add(self, a, b): return b if a == 0 else 1 + self.add(a - 1, b)",
        "calls = 0\ndef add(a, b):\n    global calls\n    calls += 1\n    return a + b",
        "def add(a, b): return a + b\nif __name__ == '__main__': print(add(*map(int, input().split())))",
        "import numpy as np\ndef add(a, b): return np.int64(a) + np.int64(b)",
    ],
)
def test_an_honest_function_passes(judge: CodeJudge, program: str) -> None:
    assert correct(judge, program, ADD)


def test_deep_recursion_needs_no_limit_raised(judge: CodeJudge) -> None:
    program = "def depth(n): return 0 if n == 0 else 1 + depth(n - 1)"
    assert correct(judge, program, {"fn_name": "depth", "inputs": [[20000]], "outputs": [20000]})


@pytest.mark.parametrize(
    "body",
    [
        "class A:\n    def __eq__(self, o): return True\n    def __ne__(self, o): return False\nr = A()",
        "class A(int):\n    def __eq__(self, o): return True\n    __hash__ = int.__hash__\nr = A(1)",
        "class A(list):\n    def __eq__(self, o): return True\nr = A([1])",
        "class A(str):\n    def __eq__(self, o): return True\nr = A('x')",
        "from unittest.mock import ANY\nr = ANY",
        "r = float('nan')",
        "r = []\nfor _ in range(300000): r = [r]",
        "r = []\nr.append(r)",
        "import builtins, json\njson.dumps = lambda *a, **k: '5'\nbuiltins.type = lambda x: int\nr = 1",
        "class A:\n    def __repr__(self):\n        while True: pass\nr = A()",
        "import sys\nr = [f for f in sys._current_frames().values()]",
    ],
)
def test_a_result_that_only_claims_to_be_equal_fails(judge: CodeJudge, body: str) -> None:
    program = body + "\ndef add(a, b): return r"
    assert not correct(judge, program, ADD)
    assert not correct(judge, program, {"assert_case": ["assert add(2, 3) == 5", "assert add(10, 20) == 30"]})
    loop = "def check(candidate):\n    for a, b, c in [(2, 3, 5), (10, 20, 30)]:\n        assert candidate(a, b) == c\n"
    assert not correct(judge, program, {"entry_point": "add", "test_code": loop})


def test_lists_and_trees_of_leetcode(judge: CodeJudge) -> None:
    reverse = """
class Solution:
    def reverseList(self, head: Optional[ListNode]) -> Optional[ListNode]:
        before = None
        while head:
            head.next, before, head = before, head, head.next
        return before
"""
    tests = {"fn_name": "reverseList", "inputs": [[[1, 2, 3]], [[]]], "outputs": [[3, 2, 1], []]}
    assert correct(judge, reverse, tests)
    invert = """
class Solution:
    def invertTree(self, root: Optional[TreeNode]) -> Optional[TreeNode]:
        if root:
            root.left, root.right = self.invertTree(root.right), self.invertTree(root.left)
        return root
"""
    tests = {"fn_name": "invertTree", "inputs": [[[4, 2, 7, None, 3]]], "outputs": [[4, 7, 2, None, None, 3]]}
    assert correct(judge, invert, tests)
    merge = """
class Solution:
    def merge(self, lists: List[Optional[ListNode]]) -> Optional[ListNode]:
        values = []
        for node in lists:
            while node:
                values.append(node.val)
                node = node.next
        head = None
        for value in sorted(values, reverse=True):
            head = ListNode(value, head)
        return head
"""
    total = """
class Solution:
    def total(self, k, head: Optional[ListNode], *rest):
        return k + head.val
"""
    assert correct(judge, total, {"fn_name": "total", "inputs": [[3, [1, 2]]], "outputs": [4]})
    assert correct(judge, merge, {"fn_name": "merge", "inputs": [[[[1, 4], [2, 3]]]], "outputs": [[1, 2, 3, 4]]})


def test_results_in_place(judge: CodeJudge) -> None:
    tests = {"fn_name": "order", "inputs": [[[3, 1, 2]]], "outputs": [[1, 2, 3]]}
    assert correct(judge, "def order(a): a.sort()", tests)
    assert not correct(judge, "def order(a): pass", tests)
    assert correct(judge, "def order(a):\n    a.sort()\n    return len(a)", {**tests, "in_place": 0})
    second = {**tests, "inputs": [[[0], [3, 1, 2]]]}
    assert correct(judge, "def order(a, b): b.sort()", second), "the first argument that changes"
    for place in ({"in_place": 1}, {"compare": {"kind": "inplace", "arg": 1}}):
        assert correct(judge, "def order(a, b):\n    b.sort()\n    a.append(1)", {**second, **place})
    named = {**tests, "inputs": [{"b": [0], "a": [3, 1, 2]}]}
    assert correct(judge, "def order(a, b): a.sort()", named)
    assert correct(judge, "def order(a, b):\n    a.sort()\n    b.append(1)", {**named, "in_place": 1})


def test_forms_of_arguments_and_results(judge: CodeJudge) -> None:
    assert correct(judge, "def f(a, b): return a + b", {"fn_name": "f", "inputs": ["[1]\n[2]"], "outputs": ["[1, 2]"]})
    assert correct(
        judge, "def f(a): return a", {"fn_name": "f", "inputs": [[True], [False]], "outputs": [[True], [False]]}
    )
    assert correct(judge, "def f(a): return (a, a)", {"fn_name": "f", "inputs": [[1]], "outputs": [[1, 1]]})
    one = {"fn_name": "f", "inputs": [[1]], "outputs": [[1, 1]]}
    assert not correct(judge, "def f(a): return a", one), "one item is not the list"
    mixed = {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[1], [2, 2]]}
    assert not correct(judge, "def f(a): return [1] if a == 1 else 2", mixed)
    lines = {"inputs": [["1", "2"]], "outputs": [["3", "4"]]}
    assert correct(judge, "n = int(input()) + int(input())\nprint(n)\nprint(n + 1)", lines)
    assert correct(judge, "def f(x): return x / 3", {"fn_name": "f", "inputs": [[1]], "outputs": [0.33333333]})
    assert not correct(judge, "def f(x): return 0.3333", {"fn_name": "f", "inputs": [[1]], "outputs": [0.33333333]})
    assert correct(judge, "def f(): return 10 ** 5000", {"fn_name": "f", "inputs": [[]], "outputs": [10**5000]})
    assert correct(judge, "def f(): return {1: 'a'}", {"fn_name": "f", "inputs": [[]], "outputs": [{"1": "a"}]})


@pytest.mark.parametrize(
    ("assertion", "right", "wrong"),
    [
        ("assert f(2) == 4", "lambda x: 4", "lambda x: 5"),
        ("assert f(2) == (1, 2)", "lambda x: (1, 2)", "lambda x: [1, 2]"),
        ("assert 4 == f(2)", "lambda x: 4", "lambda x: 5"),
    ],
)
def test_an_assertion_becomes_a_call(judge: CodeJudge, assertion: str, right: str, wrong: str) -> None:
    suite = parse_suite({"assert_case": [assertion]})
    assert [type(case) for case in suite.cases] == [CallCase]
    assert judge.judge_program(f"f = {right}", suite).status == "passed"
    assert judge.judge_program(f"f = {wrong}", suite).status == "wrong_answer"


@pytest.mark.parametrize(
    ("code", "right", "wrong"),
    [
        ("assert f(2) is True", "f = lambda x: True", "f = lambda x: 1"),
        ("assert f(2) != 2", "f = lambda x: 3", "f = lambda x: 2"),
        ("d = {}\nf(d)\nassert d == {1: 2}", "def f(d): d[1] = 2", "def f(d): pass"),
        ("assert not f('a')", "f = lambda x: 0", "f = lambda x: 1"),
        ("assert abs(f(.1) - .3) < 1e-6", "f = lambda x: .3", "f = lambda x: .4"),
        ("import math\nassert math.isclose(f(1), 2.0, rel_tol=1e-3)", "f = lambda x: 2.0001", "f = lambda x: 2.1"),
        ("assert set(f([1, 1])) == {1}", "f = lambda x: [1, 1]", "f = lambda x: [2]"),
        ("assert sorted(f((2, 1)))[0] == 1", "f = lambda x: [2, 1]", "f = lambda x: 7"),
        ("assert f('x')", "import re\nf = lambda x: re.match('x', x)", "import re\nf = lambda x: re.match('y', x)"),
        ("for i in range(5):\n    assert f(i) == 2 * i", "def f(x): return 2 * x", "def f(x): return x"),
        ("try:\n    f(-1)\n    assert False\nexcept ValueError: pass",
         "def f(x): raise ValueError", "def f(x): return x"),
        ("a = [2, 1]\nf(a)\nassert a == [1, 2]", "def f(x): x.sort()", "def f(x): pass"),
        ("assert f(f(1)) == 3", "def f(x): return x + 1", "def f(x): return x"),
        ("assert f(lambda x: 2 * x, [1, 2]) == [2, 4]", "def f(g, x): return list(map(g, x))", "def f(g, x): return x"),
        ("s = Stack()\ns.push(3)\nassert s.pop() == 3\nassert len(s) == 0",
         "class Stack:\n    def __init__(self): self.x = []\n    def push(self, v): self.x.append(v)\n"
         "    def pop(self): return self.x.pop()\n    def __len__(self): return len(self.x)",
         "class Stack:\n    def push(self, v): pass\n    def pop(self): return 4\n    def __len__(self): return 0"),
        (
            "a = Node(1)\na.left = Node(2)\na.left.value = 5\nassert total(a) == 6\nassert a.left.value == 5",
            "class Node:\n    left = None\n    def __init__(self, v): self.value = v\n"
            "def total(n): return n.value + (total(n.left) if n.left else 0)",
            "class Node:\n    left = None\n    def __init__(self, v): self.value = v\ndef total(n): return n.value",
        ),
        ("assert sum(1, 2) == sum(2, 1) == 3", "def sum(a, b): return a + b", "def sum(a, b): return a"),
    ],
)  # fmt: skip
def test_other_assertions_run_beside_the_program(judge: CodeJudge, code: str, right: str, wrong: str) -> None:
    suite = parse_suite({"test_code": code})
    assert [type(case) for case in suite.cases] == [AssertCase]
    verdict = judge.judge_program(right, suite)
    assert verdict.status == "passed", verdict.reason
    assert not judge.judge_program(wrong, suite).correct


@pytest.mark.parametrize(
    "program",
    [
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "def f(x):\n    import os\n    os._exit(0)",
        "def f(x): raise SystemExit(0)",
        "def f(x): raise KeyboardInterrupt",
        "import sys\nsys.excepthook = lambda *a: None\ndef f(x): return 0",
        "class AssertionError(Exception): pass\ndef f(x): return 0",
        "def check(candidate): pass\ndef f(x): return 0",
        "import os\ndef f(x):\n    for fd in range(3, 250):\n        try: os.write(fd, b'held\\n{\"value\": 6}\\n')\n"
        "        except OSError: pass\n    os._exit(0)",
        "import os\ndef f(x):\n    os.closerange(0, 256)\n    return 6",
        "def f(x):\n    while True: pass",
        "class R:\n    def __eq__(self, o): return True\n    def __bool__(self): return True\ndef f(x): return R()",
    ],
)
def test_no_way_around_an_assertion_process(judge: CodeJudge, program: str) -> None:
    code = "def check(candidate):\n    for i in (3, 4):\n        assert candidate(i) == 2 * i\n"
    verdict = judge.judge_program(program, parse_suite({"entry_point": "f", "test_code": code}))
    assert not verdict.correct
    assert verdict.status != "infrastructure_error", verdict.reason


def test_helpers_of_the_prelude_cannot_be_replaced(judge: CodeJudge) -> None:
    tests = {
        "entry_point": "f",
        "import_prefix": "def same(a, b):\n    return a == b\n",
        "test_code": "def check(candidate):\n    for i in range(2): assert same(candidate(i), i + 1)\n",
    }
    assert correct(judge, "def f(x): return x + 1", tests)
    assert not correct(judge, "def same(a, b): return True\ndef f(x): return 0", tests)


@pytest.mark.parametrize("example", ["assert double(3) == 6", "print(Solution().double(3))", ">>> double(3)\n6"])
@pytest.mark.parametrize(
    "suite", [{"fn_name": "double", "inputs": [[3]], "outputs": [6]}, {"assert_case": ["assert double(3) == 6"]}]
)
def test_an_example_of_use_is_no_program(judge: CodeJudge, suite: dict[str, Any], example: str) -> None:
    wrong, right = (f"```python\ndef double(n):\n    return {n} * n\n```\n" for n in (3, 2))
    response = f"{wrong}No:\n{right}For example:\n```python\n{example}\n```"
    assert judge.judge_response(response, parse_suite(suite)).status == "passed"
    assert judge.judge_response(f"{response}\n{wrong}", parse_suite(suite)).status == "wrong_answer"
