"""Output comparison, checkers, test schemas and extraction. Only checkers run in the sandbox."""

from __future__ import annotations

import json
import math
import os
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from builders import write_lines

from magicrl_verifiers.batch import admission_file, disagreements, disagreements_file, examine_checker
from magicrl_verifiers.cli import checkers, find_disagreements
from magicrl_verifiers.code import checkers as tools
from magicrl_verifiers.code.checkers import accepts_text, same_lines, same_result, same_text
from magicrl_verifiers.code.judge import CodeJudge, program_in
from magicrl_verifiers.code.sandbox import SandboxError, SandboxLost
from magicrl_verifiers.code.suite import SuiteError, parse_suite, text_of_tests


@pytest.mark.parametrize(
    ("output", "expected", "tolerance", "same"),
    [
        (b"1 2\n3", b"1  2 3\n", None, True),
        (b"12", b"1 2", None, False),
        (b"1 2 3", b"1 2", None, False),
        (b"1", b"1 2", None, False),
        (b"", b"", None, True),
        (b"0.3333333333", b"0.333333", None, True),
        (b"0.3334", b"0.333333", None, False),
        (b"1e-10", b"0.0000000001", 1e-12, True),
        (b"1e-7", b"0.0", None, True),
        (b"5.0", b"5", None, False),
        (b"5.0", b"5", 1e-6, True),
        (b"5", b"5.0", None, True),
        (b"1.000001e9", b"1.0e9", None, True),
        (b"nan", b"nan", None, True),
        (b"nan", b"0.5", 1e9, False),
        (b"inf", b"1e308", 1e9, False),
        ("٥".encode(), b"5.0", 1e-6, False),
        (b"1_0.0", b"10.0", 1e-6, False),
        (b"0.5", b"0.5000000001", 0.0, False),
        (b"wrong\r5", b"5", None, False),
        ("5\u2028".encode(), b"5", None, False),
        (b"5\x00", b"5", None, False),
        (b"YES", b"Yes", None, False),
    ],
)
def test_text(output: bytes, expected: bytes, tolerance: float | None, same: bool) -> None:
    assert same_text(output, expected, tolerance) is same


def test_text_of_either_case_and_by_lines() -> None:
    assert tools.accepts_text("nocase", b"YES", b"Yes", None)
    assert same_lines(b"1 2 \n3\n\n", b"1 2\n3")
    assert not same_lines(b"1 2 3", b"1 2\n3")


@pytest.mark.parametrize(
    ("found", "wanted", "tolerance", "strict", "same"),
    [
        ((1, [2]), [1, (2,)], None, False, True),
        ((1, 2), [1, 2], None, True, False),
        (0.1 + 0.2, 0.3, None, False, True),
        (0.1 + 0.2, 0.3, None, True, False),
        (0.1 + 0.2, 0.3, 1e-9, True, True),
        ([float("nan")], [0.5], 1.0, False, False),
        (True, 1.0, 0.5, False, True),
        (1, True, None, False, True),  # LiveCodeBench's harness compares with ==
        (False, 0.4, 0.5, False, False),
        ({1: 2}, {"1": 2}, None, False, True),
        ({1: 2}, {"1": 2}, None, True, False),
        ([1], [1, 2], None, False, False),
        ("5", 5, None, False, False),
        (10**400, 1.0, 0.1, False, False),
    ],
)
def test_values(found: Any, wanted: Any, tolerance: float | None, strict: bool, same: bool) -> None:
    assert same_result(found, wanted, tolerance, strict=strict) is same


def test_a_range_of_a_program_is_read_as_far_as_the_expected_list_is_long() -> None:
    tracemalloc.start()
    try:
        for wanted in (5, None, "5", [], [0, 1, 2]):
            assert not same_result(range(10**7), wanted, None, strict=False)
            assert not same_result([range(10**7)], [wanted], 0.1, strict=False)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert same_result(range(3), [0, 1, 2], None, strict=False)
    assert not same_result(range(2), [0, 1, 2], None, strict=False)


@pytest.mark.parametrize(
    ("tests", "word"),
    [
        ({"inputs": [], "outputs": []}, "no test"),
        ({"assert_case": []}, "no test"),
        ({}, "none of inputs"),
        ({"inputs": ["1"], "outputs": []}, "differ in length"),
        ({"inputs": ["1"], "outputs": [5]}, "texts"),
        ({"inputs": ["1", "2"], "outputs": ["1", None]}, "'outputs' holds null; without a checker"),
        ({"inputs": ["1"]}, "'outputs' must be a list"),
        ({"test_code": "assert ("}, "does not parse"),
        ({"test_code": "def check(c): assert c(1)"}, "entry_point"),
        ({"inputs": ["1"], "outputs": ["1"], "interactive": True}, "interactive problems are not supported"),
        ({"inputs": ["1"], "outputs": ["1"], "time_limit": -1}, "time_limit"),
        ({"inputs": ["1"], "outputs": ["1"], "float_tolerance": "x"}, "float_tolerance"),
        ({"inputs": ["1"], "outputs": ["1"], "float_tolerance": math.inf}, "float_tolerance"),
        ({"inputs": ["1"], "outputs": ["1"], "assert_case": ["assert f(1)"]}, "two forms.*'inputs' and 'assert_case'"),
        ({"test_code": "assert f(1)", "outputs": ["1"]}, "two forms of tests, 'outputs' and 'test_code'"),
        ({"inputs": ["1"], "outputs": ["1"], "cheker": "set"}, "unknown field 'tests.cheker'; did you mean 'checker'?"),
        (
            {"inputs": ["1"], "outputs": ["1"], "func_name": "f"},
            "'tests.func_name'; did you mean 'fn_name'",
        ),
        ({"assert_case": ["assert True"]}, "'assert_case' holds no assertion that calls the program"),
        (
            {"fn_name": "f", "inputs": [[1, 2], [1]], "outputs": [1, 1], "in_place": 1},
            "an argument that every test has",
        ),
        ("{", "not JSON"),
        (7, "object"),
    ],
)
def test_unusable_tests_are_errors(tests: Any, word: str) -> None:
    with pytest.raises(SuiteError, match=word):
        parse_suite(tests)


def test_fields_of_public_data_sets_are_accepted() -> None:
    others = {"type": "stdin", "atol": 0, "difficulty": "EASY", "source": "x", "language": "python", "rtol": 0}
    blank = {"assert_case": None, "test_code": "", "in_place": None}
    assert len(parse_suite({"inputs": ["1"], "outputs": ["1"], **others, **blank}).cases) == 1


def program(body: str) -> str:
    return f"print({body!r})"


@pytest.mark.parametrize(
    ("checker", "expected", "right", "wrong"),
    [
        ("exact", "1 2\n", "1 2", "1  2"),
        ("lines", "1 2\n3", "1 2 \n3", "1 2 3"),
        ("nocase", "Yes", "YES", "No"),
        ("float", "100", "100.00001", "101"),
        ("unordered", "a b\nc", "c\na  b", "b a\nc"),
        ("unordered", "a\na\nb", "b\na\na", "a\nb\nb"),
        ("permutation", "1 2 2", "2 1 2", "1 1 2"),
        ("set", "1 2 2", "2 1", "1"),
        ("def check(inp, out, ans):\n    return out.strip() in ('1', '2')", "1", "2", "3"),
        ("def sat(out):\n    return int(out) % 2 == 0", "", "4", "x"),
        ("def check(inp, out, ans):\n    n = integers(out)\n    return n is not None and is_permutation(n, 3)", "1 2 3",
         "3 1 2", "3 1 x"),
        ("import sys\no, a = (open(p).read().split() for p in sys.argv[2:4])\nsys.exit(0 if len(o) == len(a) else 1)",
         "1 2", "3 4", "3"),
        ("import sys\nint(open(sys.argv[2]).read())", "1", "2", "x"),
        ("import sys\nsys.exit(7 if open(sys.argv[2]).read().strip() == 'half' else 0)", "1", "2", "half"),
    ],
)  # fmt: skip
def test_checkers(judge: CodeJudge, checker: str, expected: str, right: str, wrong: str) -> None:
    answers = {"outputs": [expected]} if expected else {}
    suite = parse_suite({"inputs": ["in"], "checker": checker, **answers})
    accepted, rejected = (judge.judge_program(program(body), suite) for body in (right, wrong))
    assert accepted.status == "passed", accepted.reason
    assert rejected.status == "wrong_answer", rejected.reason


@pytest.mark.parametrize("checker", ["unordered", "permutation", "set"])
def test_items_in_any_order_have_the_tolerance(checker: str) -> None:
    assert accepts_text(checker, b"0.501 x\n10", b"10.0\n0.5 x", 0.01)
    assert not accepts_text(checker, b"0.501 x\n10", b"10.0\n0.6 x", 0.01)
    assert not accepts_text(checker, b"0.501 x\n10", b"10\n0.5 x", None)


@pytest.mark.parametrize("argument", [(1, 2), [(1, 2)], {1: "a"}, {"x": {2: 3}}])
def test_an_argument_that_json_would_change_is_refused(argument: Any) -> None:
    with pytest.raises(SuiteError, match="field 'inputs', test 1: JSON would change the argument"):
        text_of_tests({"fn_name": "f", "inputs": [[0], (argument,)], "outputs": [1, 1]})


@pytest.mark.parametrize(
    "checker",
    [
        "import sys\nsys.exit(3)",
        "def check(inp, out, ans): return undefined",
        "import sys\nraise RuntimeError",
        "no_such",
    ],
)
def test_a_failed_checker_is_nobodys_fault(judge: CodeJudge, checker: str) -> None:
    verdict = judge.judge_program("print(2)", parse_suite({"inputs": [""], "outputs": ["1"], "checker": checker}))
    assert verdict.status == "infrastructure_error"
    assert verdict.outcome.value == "not_judged"


def test_checkers_of_function_results(judge: CodeJudge) -> None:
    tests = {"fn_name": "f", "inputs": [[3]], "outputs": [[[1, 2], [3]]], "checker": "unordered"}
    assert judge.judge_program("def f(n): return [[3], [1, 2]]", parse_suite(tests)).correct
    assert not judge.judge_program("def f(n): return [[3], [2, 1]]", parse_suite(tests)).correct
    puzzle = {"fn_name": "f", "inputs": [[]], "checker": "def sat(x: int):\n    return x % 7 == 3"}
    assert judge.judge_program("def f(): return 10", parse_suite(puzzle)).correct
    assert not judge.judge_program("class A(int):\n    __mod__ = lambda s, o: 3\ndef f(): return A(1)",
                                   parse_suite(puzzle)).correct  # fmt: skip


def test_a_compiled_checker(judge: CodeJudge) -> None:
    """Any executable with testlib's arguments works. Here sh runs its first file, the input, with the other two."""
    script = 'read out < "$1"; read answer < "$2"; test "$out" -gt "$answer"'
    suite = parse_suite({"inputs": [script], "outputs": ["5"], "checker": os.path.realpath("/bin/sh")})
    assert judge.judge_program("print(6)", suite).status == "passed"
    assert judge.judge_program("print(4)", suite).status == "wrong_answer"
    failing = parse_suite({"inputs": ["exit 3"], "outputs": ["5"], "checker": os.path.realpath("/bin/sh")})
    assert judge.judge_program("print(6)", failing).status == "infrastructure_error"


def test_admission_and_disagreement(judge: CodeJudge) -> None:
    tests = {"inputs": ["3", "1"], "outputs": ["1 2 3", "1"]}
    up, down = "print(*range(1, int(input()) + 1))", "print(*range(int(input()), 0, -1))"
    assert disagreements(judge, parse_suite(tests), [up, down]) == [0]
    assert disagreements(judge, parse_suite(tests), [up, up]) == []
    rough = ["print(1.0)", "print(1.05)"]
    assert disagreements(judge, parse_suite(tests), rough) == [0, 1]
    assert disagreements(judge, parse_suite({**tests, "float_tolerance": 0.1}), rough) == []
    good = parse_suite({**tests, "checker": "permutation"})
    assert examine_checker(judge, good, right=[up, down], wrong=["print(1)"])["admitted"]
    blind = parse_suite({**tests, "checker": "def check(i, o, a): return True"})
    assert examine_checker(judge, blind, right=[up], wrong=["print(1)"])["accepted_wrong"] == [0]
    strict = parse_suite({**tests, "checker": "tokens"})
    assert examine_checker(judge, strict, right=[up, down], wrong=["x"])["rejected_right"] == [1]
    assert not examine_checker(judge, good, right=[up], wrong=[])["admitted"]


def test_the_search_for_problems_that_need_a_checker(judge: CodeJudge, tmp_path: Path) -> None:
    tests = {"inputs": ["2"], "outputs": ["1 2"]}
    rows = [
        {"id": "a", "tests": tests, "solutions": ["print(1, 2)", "print(2, 1)", "1 / 0"]},
        {"tests": tests, "solutions": ["print(1, 2)", "print('1 ', 2)"]},
        {"tests": {"fn_name": "f", "inputs": [[1]], "outputs": [1]}, "solutions": ["def f(x): return 1"] * 2},
        {"id": "b", "tests": tests, "solutions": ["print(1)"]},
        {"tests": {"test_code": "for i in [1]:\n    assert f(i) == i"}, "solutions": ["def f(x): return 1"] * 2},
    ]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_lines(source, rows)
    summary = disagreements_file(source, output)
    assert (summary.total, summary.correct, summary.wrong, summary.not_judged) == (5, 3, 1, 1)
    *found, broken, untested = [json.loads(line) for line in output.read_text().splitlines()]
    assert found == [
        {"id": "a", "needs_checker": True, "tests": [0], "failed": [2]},
        {"id": 2, "needs_checker": False, "tests": [], "failed": []},
        {"id": 3, "needs_checker": False, "tests": [], "failed": []},
    ]
    assert (broken["id"], broken["status"], [broken["reason"]]) == ("b", "broken_line", list(summary.broken))
    assert "in.jsonl:4: field 'solutions'" in broken["reason"]
    assert untested["failed"] == [], "test code has no output"
    with pytest.raises(ValueError, match=r"1 of 5 lines could not be read .*in\.jsonl:4: field 'solutions'"):
        find_disagreements(input=source, output=output)


def test_a_lost_sandbox_ends_the_search_with_the_problem_s_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*arguments: object) -> None:
        raise SandboxLost("the fork server was lost")

    monkeypatch.setattr(CodeJudge, "outputs", lost)
    source = tmp_path / "in.jsonl"
    write_lines(source, [{"id": "a", "tests": {"inputs": ["2"], "outputs": ["1"]}, "solutions": ["print(1)"] * 2}])
    with pytest.raises(SandboxError, match="the programs of 'a' were not run: the fork server was lost"):
        disagreements_file(source, tmp_path / "out.jsonl")


def test_the_gate_for_checkers(judge: CodeJudge, tmp_path: Path) -> None:
    tests = {"inputs": ["2"], "outputs": ["1 2"]}
    strict = {"tests": tests, "checker": "exact", "right": ["print(1, 2)", "print(2, 1)"], "wrong": ["print(1)"]}
    rows = [
        strict,
        {**strict, "id": "b", "checker": "permutation"},
        {**strict, "checker": "def check(i, o, a): return 1"},
    ]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_lines(source, rows)
    assert admission_file(source, output).correct == 1
    assert [json.loads(line) for line in output.read_text().splitlines()] == [
        {"id": 1, "admitted": False, "rejected_right": [0, 1], "accepted_wrong": []},  # print adds a newline
        {"id": "b", "admitted": True, "rejected_right": [], "accepted_wrong": []},
        {"id": 3, "admitted": False, "rejected_right": [], "accepted_wrong": [0]},
    ]
    for change, word in (
        ({"right": []}, "'right' must be a list"),
        ({"checker": None}, "name no checker"),
        ({"tests": {**tests, "memory_limit_mb": 8}}, "'memory_limit_mb' must be at least 16"),
        ({"tests": {**tests, "interactive": True}}, "interactive problems are not supported"),
        ({"time_limt": 1}, "unknown field 'time_limt'; did you mean 'time_limit'?"),
    ):
        write_lines(source, [{**strict, **change}, rows[1]])
        with pytest.raises(ValueError, match=rf"1 of 2 lines .*in\.jsonl:1: .*{re.escape(word)}"):
            checkers(input=source, output=output)
        assert json.loads(output.read_text().splitlines()[1])["admitted"]


def test_checker_tools() -> None:
    edges = [(1, 2), (2, 3), (3, 4)]
    assert tools.is_tree([1, 2, 3, 4], edges)
    assert not tools.is_tree([1, 2, 3, 4], [*edges, (1, 4)])
    assert not tools.is_tree([1, 2, 3, 4], [(1, 2), (2, 1), (3, 4)])
    assert tools.is_path(edges, [1, 2, 3], 1, 3)
    assert not tools.is_path(edges, [3, 2, 1], 3, 1, directed=True)
    assert not tools.is_path(edges, [1, 2, 1, 2, 3], 1, 3, simple=True)
    assert tools.is_topological_order([1, 2, 3], [(1, 2)], [3, 1, 2])
    assert not tools.is_topological_order([1, 2, 3], [(1, 2)], [3, 2, 1])
    assert tools.is_spanning_tree([1, 2, 3], [(1, 2), (2, 3), (1, 3)], [(2, 1), (1, 3)])
    assert not tools.is_spanning_tree([1, 2, 3], [(1, 2)], [(2, 1), (1, 3)])
    assert tools.is_colouring(edges, {1: 0, 2: 1, 3: 0, 4: 1})
    assert not tools.is_colouring(edges, {1: 0, 2: 0, 3: 1, 4: 0})
    assert tools.is_matching(edges, [(2, 1), (3, 4)])
    assert not tools.is_matching(edges, [(1, 2), (2, 3)])
    assert not tools.is_matching(edges, [(1, 4)])
    assert tools.is_connected([1, 2, 3, 4], edges)
    assert not tools.is_connected([1, 2, 3, 4], edges[1:])
    assert not tools.is_permutation([1, 2, 2, 3], 3)
    assert tools.integers("1 -2") == [1, -2]
    assert tools.integers("1 ٢") is None


@pytest.mark.parametrize(
    ("response", "reasoning", "expected"),
    [
        ("```python\na\n```", "auto", "a\n"),
        ("```python\na\n```\ntext\n```py\nb\n```", "auto", "b\n"),
        ("```python\na\n```\nIt prints\n```\n1\n```", "auto", "a\n"),
        ("```\na\n```", "auto", "a\n"),
        ("<think>```python\na\n```", "auto", None),
        ("<think>```python\na\n```</think>no code", "auto", None),
        ("```python\na\n```", "required", None),
        ("x</think>~~~python\na\n~~~", "required", "a\n"),
        ("```python\na", "auto", None),
        ("  ```python\n  a\n  ```", "auto", "a\n"),
        ("1. So:\n   ```python\n   if a:\n     b\n\n   c\n   ```", "auto", "if a:\n  b\n\nc\n"),
        ("\t```python\n\ta\n\t\tb\n\t```", "auto", "a\n\tb\n"),
        ("   ```python\nif a:\n  b\n   ```", "auto", "if a:\n  b\n"),
        ("```python\n  a\n```", "auto", "  a\n"),
        ("````python\n```\n````", "auto", "```\n"),
        ("```python\ndef f():\n    return 1\n    ```\nDone.", "auto", "def f():\n    return 1\n"),
        ("```python\nf()\n    ```\nExample:\n```text\n1\n```", "auto", "f()\n"),
        ("```python\n'''\n    ```\n'''\nf()\n```\nand\n```text\n1", "auto", "'''\n    ```\n'''\nf()\n"),
        ("```python\n'''\n    ```\n    f()\n    ```\n'''\n```", "auto", "'''\n    ```\n    f()\n    ```\n'''\n"),
        (
            "```python\n'''\n    ```python\n    f()\n    ```\n'''\n```",
            "auto",
            "'''\n    ```python\n    f()\n    ```\n'''\n",
        ),
        ("```python\na\n   ```", "auto", "a\n"),
        ("no fence", "auto", None),
    ],
)
def test_extraction(response: str, reasoning: Any, expected: str | None) -> None:
    found = program_in(response, reasoning)
    assert found == expected or (found or "").rstrip() == (expected or "-").rstrip()
