"""The contract for test code: every probe has its outcome, and a program cannot forge reports about what ran."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import threading
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from magicrl_verifiers.code import border, pytest_forms, testrun
from magicrl_verifiers.code.judge import CodeJudge
from magicrl_verifiers.code.remote import Files, Peer
from magicrl_verifiers.code.suite import SuiteError, is_plain, parse_suite, wanted_names

_WRITES = ("tempfile", "tmp_path", "makedirs")


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A program, its tests, and the required outcome."""

    name: str
    program: str
    tests: dict[str, Any]
    outcome: str
    why: list[str]


def _probes(file: str) -> list[Probe]:
    """Return the rows of a file of probes. The head of ``contract_probes.txt`` describes their form."""
    text = Path(__file__).with_name(file).read_text()
    head, *blocks = re.split(r"^=== ", text, flags=re.MULTILINE)
    shared = dict(re.findall(r"^@ (\w+)\n(.*?)\n(?=@ [A-Z]|\Z)", head, re.MULTILINE | re.DOTALL))
    probes: list[Probe] = []
    tests: dict[str, Any] = {}
    for block in blocks:
        block = re.sub(r"^<(\w+)>$", lambda found: shared[found[1]], block, flags=re.MULTILINE)
        title, _, rest = block.partition("\n")
        name, outcome, *why = title.split(" | ")
        program, *own = re.split(r"^---(.*)\n", rest, flags=re.MULTILINE)
        if own:
            more, code = own
            tests = json.loads(more or "{}") | ({"test_code": code} if code else {})
        probes.append(Probe(name=name, program=program, tests=tests, outcome=outcome, why=why))
    return probes


def _hostile() -> list[Probe]:
    """Return the rows of ``hostile_probes.toml``: each group has its tests, and the programs by their outcome."""
    groups = tomllib.loads(Path(__file__).with_name("hostile_probes.toml").read_text())["groups"]
    return [
        Probe(name=f"{group['name']}, {outcome} {number}", program=program, tests=group, outcome=outcome, why=[])
        for group in groups
        for outcome in ("correct", "wrong")
        for number, program in enumerate(group.pop(outcome), 1)
    ]


def _outcome(judge: CodeJudge, probe: Probe) -> tuple[str, str]:
    try:
        verdict = judge.judge_program(probe.program, parse_suite(probe.tests))
    except SuiteError as error:
        return "not_judged", str(error)
    return verdict.outcome.value, f"{verdict.status}: {verdict.reason}"


@pytest.mark.parametrize("probe", _probes("contract_probes.txt"), ids=lambda probe: probe.name)
def test_the_probes_have_their_outcome(tiered: CodeJudge, probe: Probe) -> None:
    outcome, reason = _outcome(tiered, probe)
    if tiered.sandbox.tier == "A" and any(word in str(probe.tests) for word in _WRITES):
        assert outcome == "not_judged", reason  # the folder is read-only
        return
    assert outcome == probe.outcome, (reason, probe.why)
    assert outcome != "not_judged" or len(reason) > len("infrastructure_error: "), "a reason"


@pytest.mark.parametrize(
    "probe",
    [*_probes("form_probes.txt"), *_probes("blind_probes.txt"), *_hostile()],
    ids=lambda probe: probe.name,
)
def test_what_is_collected_runs_or_is_not_judged(judge: CodeJudge, probe: Probe) -> None:
    outcome, reason = _outcome(judge, probe)
    if judge.sandbox.tier == "A" and any(word in str(probe.tests) for word in _WRITES):
        assert outcome == "not_judged", reason
        return
    assert outcome == probe.outcome, (reason, probe.why)


@pytest.mark.parametrize("probe", _probes("escape_probes.txt"), ids=lambda probe: probe.name)
def test_a_wrong_program_does_not_escape_its_verdict(judge: CodeJudge, probe: Probe) -> None:
    outcome, reason = _outcome(judge, probe)
    if judge.sandbox.tier == "A" and "tempfile" in str(probe.tests):
        return
    assert outcome == probe.outcome, (reason, probe.why)


def test_what_counts_as_an_assertion() -> None:
    code = """
assert 1
self.assertEqual(1, 1)
numpy.testing.assert_allclose(1, 1)
with pytest.raises(ValueError): pass
if x: raise ValueError
print(1)
if x: y = 1
try:
    f(-1)
    assert False
except ValueError: pass
"""
    counted = [
        node
        for node in ast.walk(testrun.Counting().visit(ast.parse(code)))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("__counted__", "__asserted__")
    ]
    assert len(counted) == 7


@pytest.mark.parametrize(
    ("code", "entry", "wanted"),
    [
        ("assert f(1) == 2", None, ["f"]),
        ("assert f(1) == 2", "g", ["g"]),
        ("check(f)\ndef check(candidate): assert len(candidate(1)) == 2", None, ["f"]),
        ("assert len(candidate) == 2\nassert math.isclose(f(1), 2)", None, ["f"]),
        ("assert sum(1, 2) == 3", None, ["sum"]),
        ("import unittest\nclass T(unittest.TestCase):\n    def test(self): assert len(self.x) == 1", None, []),
        ("from solution import f\nassert len(f(1)) == 2", None, []),
    ],
)
def test_which_names_the_program_has_to_define(code: str, entry: str | None, wanted: list[str]) -> None:
    assert wanted_names(ast.parse(code), entry) == wanted


@pytest.mark.parametrize(
    ("found", "wanted", "settings", "same"),
    [
        (0.1 + 0.2, 0.3, {}, True),
        (1.001, 1.0, {}, False),
        (1.001, 1.0, {"rel": 1e-2}, True),
        (1.001, 1.0, {"abs": 1e-4}, False),
        (1e6 + 0.5, 1e6, {"abs": 0.1}, False),
        (1e-13, 0, {}, True),
        (1e-11, 0, {}, False),
        ([0.1 + 0.2, 1], [0.3, 1], {}, True),
        ((0.3,), [0.3, 1], {}, False),
        ({"a": 0.1 + 0.2}, {"a": 0.3}, {}, True),
        ({"b": 0.3}, {"a": 0.3}, {}, False),
        (float("nan"), float("nan"), {}, False),
        (float("nan"), float("nan"), {"nan_ok": True}, True),
        (float("inf"), 1e308, {}, False),
        ("x", "x", {}, True),
        (None, 0.0, {}, False),
        (True, 1.0000001, {}, True),
    ],
)
def test_approx_is_pytests_own(found: object, wanted: object, settings: dict[str, float], same: bool) -> None:
    assert (found == pytest_forms.approx(wanted, **settings)) is same  # pyright: ignore[reportArgumentType]
    assert (found == pytest.approx(wanted, **settings)) is same


def test_what_is_lent_can_be_called_and_no_more() -> None:
    allowed = border._may_use  # pyright: ignore[reportPrivateUsage]
    assert not allowed(len, "__self__")
    assert not allowed(lambda: 0, "__globals__")
    made = mock.MagicMock()
    assert allowed(made, "json")
    assert allowed(made, "__enter__")
    assert not any(
        allowed(made, name) for name in ("assert_called_once", "return_value", "configure_mock", "_mock_parent")
    )
    assert allowed(io.StringIO(), "read")
    assert not allowed(io, "open")
    assert not allowed((0 for _ in ()), "gi_frame")


def test_text_that_may_be_evaluated() -> None:
    assert all(map(is_plain, ["1 + 2", " max(3, 1)", "[1, {'a': 2}]", "math.sqrt(4)"]))
    assert not any(map(is_plain, ["open(3)", "().__class__", "x", "__import__('os')", "f'{x}'", "lambda: 1", "1 +"]))


def test_files_are_kept_alike(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    here, there = Files(str(one)), Files(str(other))
    assert here.changes() is None
    (one / "a").mkdir()
    (one / "a" / "b.bin").write_bytes(b"\0\xff")
    there.apply(here.changes())
    assert (other / "a" / "b.bin").read_bytes() == b"\0\xff"
    assert here.changes() is None
    assert there.changes() is None
    (other / "a" / "b.bin").unlink()
    (other / "a").rmdir()
    here.apply(there.changes())
    assert list(one.iterdir()) == []
    (tmp_path / "kept").write_text("x")
    here.apply({"new": {"../kept": "y", "/etc/x": "y", "../new": "y", "c": 5, "d/": ""}, "gone": ["../kept", 3]})
    assert (tmp_path / "kept").read_text() == "x"
    assert not (tmp_path / "new").exists()
    (one / "link").symlink_to(tmp_path / "kept")
    here.apply({"new": {"link": "y"}, "gone": []})
    assert (tmp_path / "kept").read_text() == "x"


def test_two_threads_of_the_tests_may_be_the_first_to_use_the_program(tmp_path: Path) -> None:
    calls, replies = os.pipe(), os.pipe()
    client = border.Client(replies[0], calls[1], str(tmp_path))
    client.first_use = lambda: time.sleep(0.1)  # the other thread comes meanwhile
    Peer(calls[0], replies[1], str(tmp_path)).send({"names": {"add": None}})
    found: list[list[str]] = []
    threads = [threading.Thread(target=lambda: found.append([*client.names]), daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=5)
    assert found == [["add"], ["add"]], "a thread waits for what the other has read"
