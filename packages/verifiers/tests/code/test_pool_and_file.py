"""The pool and the command: nothing lost, nothing mixed up, correct verdicts after any accident."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
from builders import write_lines

from magicrl.records import Outcome, Problem
from magicrl_verifiers import JudgeOptions, VerifierPool
from magicrl_verifiers.batch import verify_code_file
from magicrl_verifiers.cli import code
from magicrl_verifiers.code import checkers
from magicrl_verifiers.code.judge import CodeOptions, CodePool, CodeProtocol
from magicrl_verifiers.code.sandbox import Limits
from magicrl_verifiers.code.suite import parse_suite
from magicrl_verifiers.code.values import SLOTS
from magicrl_verifiers.workers import Exhausted, Item

from .conftest import judge_of

OPTIONS = CodeOptions(limits=Limits(cpu_seconds=2.0, memory_mb=512, output_mb=4, idle_seconds=1.0))
ECHO = "```python\nprint(input())\n```"
Until = Callable[[Callable[[], bool]], None]


def problem(number: int = 1, **more: Any) -> Problem:
    tests = {"inputs": [str(number)], "outputs": [str(number)], **more}
    return Problem(id=str(number), prompt="", references=(json.dumps(tests),), verifier="code", source="test")


@pytest.fixture(scope="module")
def pool() -> Iterator[CodePool]:
    judge_of("auto").close()
    with CodePool(OPTIONS, workers=2) as made:
        yield made


def test_many_items_keep_their_order_and_their_problem(pool: CodePool) -> None:
    responses = [ECHO, "no code", "```python\nprint(0)\n```", "```python\n1/0\n```"]
    tickets = [pool.submit(problem(n), responses) for n in range(40)]
    expected = ["passed", "no_code", "wrong_answer", "runtime_error"]
    for number, ticket in enumerate(tickets):
        # print(0) is correct for problem 0
        wanted = ["passed" if number == 0 and s == "wrong_answer" else s for s in expected]
        assert [verdict.status for verdict in pool.result(ticket)] == wanted
    assert pool.result(pool.submit(problem(), [])) == ()


def test_seconds_are_cpu_time(pool: CodePool) -> None:
    slow = "```python\nimport time\ntime.sleep(1)\nprint(input())\n```"
    (verdict,) = pool.result(pool.submit(problem(), [slow]))
    assert verdict.correct
    assert 0 < verdict.seconds < 0.7


def test_items_survive_the_death_of_their_worker(pool: CodePool, until: Until) -> None:
    pool.warm_up()
    worker = psutil.Process(pool.worker_pids[0])
    resting = len(worker.children(recursive=True))
    slow = "```python\nimport time\ntime.sleep(0.5)\nprint(input())\n```"
    ticket = pool.submit(problem(), [slow] * 4)
    until(lambda: len(worker.children(recursive=True)) > resting)  # the program runs
    os.kill(worker.pid, signal.SIGKILL)
    assert [verdict.status for verdict in pool.result(ticket)] == ["passed"] * 4


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("return range(3 * 10**8)", "wrong_answer"),
        (f"os.write({SLOTS['result']}, b'[' + b'[],' * (32 << 20) + b'[]]')\n    os._exit(0)", "output_limit"),
    ],
)
def test_a_result_that_stands_for_gigabytes_costs_the_judge_little(body: str, status: str) -> None:
    judge_of("auto").close()
    tests = {"fn_name": "f", "inputs": [[1]], "outputs": [5]}
    item = Problem(id="m", prompt="", references=(json.dumps(tests),), verifier="code", source="test")
    with CodePool(CodeOptions(limits=Limits(cpu_seconds=5.0, memory_mb=512))) as pool:
        pool.warm_up()
        (pid,) = pool.worker_pids
        ticket = pool.submit(item, [f"import os\ndef f(n):\n    {body}\n"], bare=True)
        assert [verdict.status for verdict in pool.result(ticket)] == [status]
        peak = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        assert peak is not None
        assert int(peak[1]) < 2 << 20  # two GiB; half of the second result is more


@pytest.mark.parametrize(
    ("tests", "program", "status"),
    [
        ({"inputs": ["1"], "outputs": ["1"]}, "print(1)", "infrastructure_error"),
        ({"inputs": ["1"], "outputs": ["1 " * (1 << 20)]}, "print('1 ' * (1 << 20))", "infrastructure_error"),
        ({"inputs": ["1"], "outputs": ["1"]}, "print('1 ' * (1 << 20))", "output_limit"),
        ({"fn_name": "f", "inputs": [[1]], "outputs": [1]}, "def f(n): return n", "infrastructure_error"),
        ({"fn_name": "f", "inputs": [[1]], "outputs": [1]}, "def f(n): return [n] * (1 << 20)", "output_limit"),
    ],
)
def test_memory_that_the_judge_lacks_is_the_programs_fault_only_after_a_flood(
    tests: dict[str, Any], program: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("accepts_text", "same_result"):
        monkeypatch.setattr(checkers, name, mock.Mock(side_effect=MemoryError))
    with judge_of("auto") as judge:
        verdict = judge.judge_program(program, parse_suite(tests))
    assert verdict.status == status
    assert "memory" in verdict.reason or status == "output_limit"


def test_unusable_tests_are_not_judged_and_never_right(pool: CodePool) -> None:
    # the worker keeps a suite, which must not judge the next problems
    assert [verdict.status for verdict in pool.result(pool.submit(problem(), [ECHO]))] == ["passed"]
    for tests in ('{"inputs": [], "outputs": []}', "{", '{"inputs": ["1"], "outputs": ["1"], "interactive": true}'):
        broken = Problem(id="b", prompt="", references=(tests,), verifier="code", source="test")
        (verdict,) = pool.result(pool.submit(broken, [ECHO]))
        assert (verdict.outcome, verdict.status) == (Outcome.NOT_JUDGED, "infrastructure_error")
        assert verdict.reason
    with pytest.raises(ValueError, match="no tests"):
        pool.submit(Problem(id="b", prompt="", references=(), verifier="code", source="test"), [ECHO])


def test_one_verifier_pool_judges_code_beside_the_rest(until: Until) -> None:
    exact = Problem(id="e", prompt="", references=("7",), verifier="exact", source="test")
    large = "</think>\n```python\nx = bytearray(400 << 20)\nprint(1)\n```"
    with VerifierPool(options=JudgeOptions(reasoning="required"), time_limit=2.0, memory_limit_mb=256) as pool:
        pool.warm_up(["code"])
        (pid,) = pool.worker_pids
        tickets = [
            pool.submit(problem(), [f"</think>\n{ECHO}", "x", ECHO, large]),
            pool.submit(exact, ["</think> 7", "</think> 8"]),
        ]
        found = [[verdict.status for verdict in pool.result(ticket)] for ticket in tickets]
        assert found == [["passed", "no_code", "no_code", "memory_limit"], ["matched", "mismatch"]]
        below = psutil.Process(pid).children(recursive=True)
        assert below
    until(lambda: not any(p.is_running() and p.status() != "zombie" for p in below))


def test_an_output_that_takes_too_long_to_compare_is_over_a_time_limit() -> None:
    verdict = CodeProtocol(OPTIONS).exhausted(Item(0, problem(), ECHO, False), Exhausted("timeout", ""), 60.0)
    assert (verdict.outcome, verdict.status, verdict.seconds) == (Outcome.WRONG, "time_limit", 60.0)
    assert "could not be compared within 60 s" in verdict.reason


def test_closing_ends_a_waiting_result() -> None:
    pool = CodePool(OPTIONS)
    pool.warm_up()
    ticket = pool.submit(problem(), ["```python\nwhile True: pass\n```"] * 50)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            pool.result(ticket)
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    pool.close()
    pool.close()
    thread.join(timeout=300)
    assert len(caught) == 1
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(problem(), [ECHO])


def test_the_command_writes_one_line_a_line(tmp_path: Path) -> None:
    judge_of("auto").close()
    tests = {"inputs": ["1", "2"], "outputs": ["1", "2"]}
    one = {"inputs": [""], "outputs": ["1"]}
    rows: list[dict[str, Any]] = [
        {"id": "a", "program": "print(input())", "tests": tests},
        {"response": "<think>no</think>\n" + ECHO, "tests": json.dumps(tests)},
        {"id": "c", "program": "print(1)", "tests": tests},
        {"id": "d", "program": "print(1.00001)", "tests": one, "float_tolerance": 0.1},
        {"id": "e", "program": "print(1)", "tests": {"inputs": [], "outputs": []}},
        {"id": "f", "program": "def f(x): return x", "tests": {"assert_case": ["assert f(1) == 1"]}},
        # a setting inside the tests takes precedence over one next to them
        {
            "id": "g",
            "program": "print(1.01)",
            "float_tolerance": 0.1,
            "tests": {**one, "float_tolerance": 0.0},
        },
        # data frames fill what a row does not have
        {"id": "h", "program": "print(1.01)", "float_tolerance": 0.1, "tests": {**one, "float_tolerance": None}},
    ]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_lines(source, rows)
    options = CodeOptions(limits=OPTIONS.limits, stop_at_failure=False)
    summary = verify_code_file(source, output, options=options)
    found = [json.loads(line) for line in output.read_text().splitlines()]
    keys = ["id", "correct", "status", "passed", "total", "seconds"]
    reasons = [["reason"] if row["correct"] is None else [] for row in found]  # why a program was not judged
    assert [list(row) for row in found] == [[*keys, *reason] for reason in reasons]
    assert [[row[key] for key in keys[:5]] for row in found] == [
        ["a", True, "passed", 2, 2],
        [2, True, "passed", 2, 2],
        ["c", False, "wrong_answer", 1, 2],
        ["d", True, "passed", 1, 1],
        ["e", None, "infrastructure_error", 0, 0],
        ["f", True, "passed", 1, 1],
        ["g", False, "wrong_answer", 0, 1],
        ["h", True, "passed", 1, 1],
    ]
    assert (summary.total, summary.correct, summary.wrong, summary.not_judged) == (8, 5, 2, 1)
    write_lines(source, rows[:1])
    for limit, status in ((None, "passed"), (0.001, "time_limit")):
        code(input=source, output=output, total_limit=limit, workers=1)
        assert json.loads(output.read_text())["status"] == status


BROKEN = {
    "{": "not JSON",
    "[]": "expected an object",
    '{"tests": {}}': "exactly one of the fields",
    '{"program": "x", "response": "y", "tests": {}}': "exactly one of the fields",
    '{"program": 1, "tests": {}}': "'program' must be text",
    '{"program": "x"}': "'tests' is missing",
    '{"program": "x", "tests": 5}': "'tests' must be an object",
    '{"program": "x", "tests": {}, "time_limt": 3, "difficulty": 2}': "field 'time_limt'; did you mean 'time_limit'?",
}


def test_a_line_that_cannot_be_read_has_its_own_row(tmp_path: Path) -> None:
    judge_of("auto").close()
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    good = {"program": "print(input())", "tests": {"inputs": ["1"], "outputs": ["1"]}}
    source.write_text("\n".join([json.dumps(good), *BROKEN]) + "\n")
    summary = verify_code_file(source, output, options=OPTIONS)
    first, *rest = [json.loads(line) for line in output.read_text().splitlines()]
    assert (first["id"], first["correct"]) == (1, True)
    for line, (row, word) in enumerate(zip(rest, BROKEN.values(), strict=True), start=2):
        assert (row["id"], row["correct"], row["status"], row["total"]) == (line, None, "broken_line", 0)
        assert word in row["reason"]
        assert f"in.jsonl:{line}: " in summary.broken[line - 2]


def test_a_module_to_preload_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--preload sortedcontaners: there is no module of that name"):
        code(input=tmp_path / "in.jsonl", output=tmp_path / "out.jsonl", preload=["json", "sortedcontaners"])
