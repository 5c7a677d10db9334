"""Any text as a program, any data as tests, any bytes as output: one verdict each, in order, without hang or crash."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from magicrl.records import Problem
from magicrl_verifiers.code import remote, values
from magicrl_verifiers.code.checkers import same_result, same_text
from magicrl_verifiers.code.judge import CodeJudge, CodeOptions, CodePool, program_in
from magicrl_verifiers.code.sandbox import Limits
from magicrl_verifiers.code.suite import SuiteError, parse_suite
from magicrl_verifiers.records import OUTCOME_OF_STATUS

from .conftest import judge_of

CALM = settings(max_examples=40, suppress_health_check=list(HealthCheck))
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=8)
HASHABLE = st.integers() | st.text(max_size=4) | st.tuples(st.integers(), st.booleans())
PLAIN = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(HASHABLE, inner, max_size=3)
        | st.sets(HASHABLE, max_size=3)
    ),
    max_leaves=12,
)
FRAGMENTS = st.sampled_from(
    ["print(", "input()", ")", "\n", " ", "0", "'", '"""', "def f(x):", "return", "import os", "os.", "_exit(0)",
     "fork()", "while 1:", "pass", "lambda", "[", "]", "{", "}", "\\", "\0", "\ud800", "é", "raise ", "SystemExit",
     "sys", "exec(",
     "__import__('sys')", ".stdout", ".close()", "class A:", "yield", "await", "async ", "~" * 50, "(" * 200]
)  # fmt: skip
REFUSALS = (ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError)
"""Exceptions by which the judge rejects data that is not plain."""
PROGRAMS = st.lists(FRAGMENTS, max_size=25).map("".join) | st.text(max_size=200)


@pytest.fixture(scope="module")
def pool() -> Iterator[CodePool]:
    judge_of("auto").close()
    with CodePool(CodeOptions(limits=Limits(cpu_seconds=0.5, memory_mb=256, idle_seconds=0.3))) as made:
        yield made


@pytest.fixture(scope="module")
def judges() -> Iterator[dict[bool, CodeJudge]]:
    """Return one judge that stops at the first failure, and one that does not."""
    with judge_of("auto") as stopping, judge_of("auto", stop_at_failure=False) as thorough:
        yield {True: stopping, False: thorough}


@CALM
@given(programs=st.lists(PROGRAMS, min_size=1, max_size=4), fenced=st.booleans())
def test_random_programs_get_one_verdict_each(pool: CodePool, programs: list[str], fenced: bool) -> None:
    tests = json.dumps({"inputs": ["4711"], "outputs": ["4711"]})
    problem = Problem(id="p", prompt="", references=(tests,), verifier="code", source="fuzz")
    right = "print(input())"
    texts = [f"```python\n{p}\n```" if fenced else p for p in [right, *programs, right]]
    verdicts = pool.result(pool.submit(problem, texts, bare=not fenced))
    assert len(verdicts) == len(texts)
    assert all(verdict.status in OUTCOME_OF_STATUS for verdict in verdicts)
    assert "infrastructure_error" not in {verdict.status for verdict in verdicts}
    assert verdicts[0].correct
    assert verdicts[-1].correct


FATES = {
    "right": ("print(n)", None),
    "wrong": ("print(n + 1)", "wrong_answer"),
    "raises": ("raise ValueError(n)", "runtime_error"),
    "exits": ("raise SystemExit(3)", "runtime_error"),
    "floods": ("print('x' * (5 << 20))", "output_limit"),
    "attacks": ("import ctypes; ctypes.CDLL(None).ptrace(0, 0, 0, 0)", "security"),
    "leaves a file": ("print(n)\n    try: open('/tmp/left', 'x').write('1')\n    except PermissionError: pass", None),
}
FATED = "n, fate = input().split('|')\nn = int(n)\n" + "".join(
    f"if fate == {fate!r}:\n    {body}\n" for fate, (body, _) in FATES.items()
)


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(fates=st.lists(st.sampled_from(list(FATES)), min_size=1, max_size=40), stop=st.booleans())
def test_every_test_is_judged_as_if_it_were_alone(judges: dict[bool, CodeJudge], fates: list[str], stop: bool) -> None:
    """Tests run in batches, except the first. The result of a test must not depend on its place."""
    inputs, outputs = [f"{n}|{fate}" for n, fate in enumerate(fates)], [str(n) for n in range(len(fates))]
    verdict = judges[stop].judge_program(FATED, parse_suite({"inputs": inputs, "outputs": outputs}))
    statuses = [FATES[fate][1] for fate in fates]
    failed = [place for place, status in enumerate(statuses) if status is not None]
    assert verdict.status == (statuses[failed[0]] if failed else "passed"), verdict
    assert verdict.passed == (failed[0] if stop and failed else statuses.count(None))
    assert verdict.total == len(fates)
    assert not failed or verdict.reason.startswith(f"test {failed[0] + 1}:")


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(outputs=st.lists(st.binary(max_size=40), min_size=1, max_size=12))
def test_whatever_bytes_a_program_writes(judges: dict[bool, CodeJudge], outputs: list[bytes]) -> None:
    program = "import sys; sys.stdout.buffer.write(bytes.fromhex(sys.stdin.readline()))"
    wanted = [output.decode("utf-8", "replace") for output in outputs]
    suite = parse_suite({"inputs": [output.hex() for output in outputs], "outputs": wanted})
    verdict = judges[False].judge_program(program, suite)
    same = [same_text(output, text.encode("utf-8")) for output, text in zip(outputs, wanted, strict=True)]
    assert verdict.passed == sum(same)


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(results=st.lists(PLAIN, min_size=1, max_size=6), body=PROGRAMS)
def test_whatever_a_function_returns(judges: dict[bool, CodeJudge], results: list[Any], body: str) -> None:
    program = f"nan = inf = 0.0\nV = {results!r}\ndef f(i): return V[i]"
    suite = parse_suite(
        {"fn_name": "f", "inputs": [[i] for i in range(len(results))], "outputs": [4711.5] * len(results)}
    )
    verdict = judges[False].judge_program(program, suite)
    assert (verdict.status, verdict.passed) == ("wrong_answer", 0)
    assert judges[False].judge_program(body, suite).status in {*OUTCOME_OF_STATUS} - {"infrastructure_error", "passed"}


@CALM
@given(value=PLAIN)
def test_plain_values_cross_unchanged(value: Any) -> None:
    back = values.decode(json.loads(json.dumps(values.encode(value))), remote.as_list)
    assert _same(back, value)


def _same(one: Any, other: Any) -> bool:
    """Return whether type and value are equal at every level. NaN equals itself, and a set has no order."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other or repr(one) == repr(other)


@CALM
@given(value=st.recursive(LEAVES, lambda x: st.lists(x) | st.dictionaries(st.text(max_size=3), x), max_leaves=10))
def test_any_json_is_decoded_or_refused(value: Any) -> None:
    with contextlib.suppress(*REFUSALS):
        values.decode(json.loads(json.dumps(value, default=str)), remote.as_list)


@CALM
@given(output=st.binary(max_size=60), expected=st.binary(max_size=60), tolerance=st.none() | st.floats(0, 1))
def test_random_bytes_compare(output: bytes, expected: bytes, tolerance: float | None) -> None:
    assert same_text(expected, expected, tolerance)
    if tolerance is None and output.split() == expected.split():
        assert same_text(output, expected)


@CALM
@given(found=PLAIN, wanted=PLAIN, strict=st.booleans())
def test_random_values_compare(found: Any, wanted: Any, strict: bool) -> None:
    assert isinstance(same_result(found, wanted, None, strict=strict), bool)


FIELDS = st.sampled_from(["inputs", "outputs", "fn_name", "test_code", "assert_case", "entry_point", "time_limit"])
CONTENTS = st.lists(st.text(max_size=9), max_size=3) | st.text(max_size=20)


@CALM
@given(tests=PLAIN | st.dictionaries(FIELDS, CONTENTS))
def test_random_tests_parse_or_are_named(tests: Any) -> None:
    with contextlib.suppress(SuiteError):
        assert parse_suite(tests).cases


@CALM
@given(
    text=st.lists(st.sampled_from(["```", "~~~", "`", "python", "\n", "x", "<think>", "</think>", " "])).map("".join)
)
def test_random_fences(text: str) -> None:
    found = program_in(text, "auto")
    assert found is None or found in text
