"""Development sets, where present: every attack fails without any effect, and every reference solution passes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from magicrl_verifiers.code.judge import CodeJudge, CodeOptions
from magicrl_verifiers.code.sandbox import Limits, SandboxOptions
from magicrl_verifiers.code.suite import parse_suite

from .conftest import judge_of

DATA = Path(__file__).resolve().parents[5] / "shared" / "data" / "code"
SETS = sorted(path.name for path in (DATA / "sets").iterdir()) if DATA.is_dir() else []
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="no ../shared")


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["B", "A"])
def test_adversarial_programs_get_their_verdict_without_their_effect(tier: str) -> None:
    judge_of(tier).close()
    victim = Path("/tmp/adv_victim")
    victim.mkdir(exist_ok=True)
    (victim / "file").write_text("x")
    mode = victim.stat().st_mode
    limits = Limits(cpu_seconds=1.5, memory_mb=1024, idle_seconds=1.0)
    with CodeJudge(CodeOptions(limits=limits, sandbox=SandboxOptions(tier=tier))) as judge:
        for line in (DATA / "adversarial_dev.jsonl").read_text().splitlines():
            row = json.loads(line)
            tests = {key: value for key, value in row["tests"].items() if key != "prelude"}
            verdict = judge.judge_program(row["program"], parse_suite(tests))
            assert verdict.status != "infrastructure_error", (row["id"], verdict.reason)
            assert verdict.correct == (row["expected"] == "pass"), (row["id"], verdict)
            effect = row["side_effect"]
            path = os.path.expanduser(effect.get("path") or "/tmp/adv_none")
            assert effect["kind"] != "file_absent" or not os.path.lexists(path), row["id"]
            assert (victim.stat().st_mode, (victim / "file").read_text()) == (mode, "x"), row["id"]
            if effect["kind"] == "no_process":
                assert effect["comm"] not in _process_names(), row["id"]
    shutil.rmtree(victim)


def _process_names() -> set[str]:
    found: set[str] = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            found.add(Path(f"/proc/{pid}/comm").read_text().strip())
        except OSError:
            continue
    return found


def _tests(row: dict[str, Any]) -> dict[str, Any] | None:
    tests = dict(row["tests"])
    if tests.get("type") == "checker":
        return {"fn_name": "sol", "inputs": [[]], "checker": tests["checker"]}
    if "outputs" in tests and tests["outputs"] is None:
        return None
    tests |= {"entry_point": row["entry_point"]} if "entry_point" in row else {}
    return tests | ({"import_prefix": row["prelude"]} if "prelude" in row else {})


@pytest.mark.benchmark
@pytest.mark.parametrize("name", SETS)
def test_references_pass(name: str) -> None:
    """The whole sets take 10 minutes of a core. `make test-slow` compares a part of each with its recorded verdicts."""
    folder = DATA / "sets" / name
    known = {entry[0] for entry in json.loads((folder / "reference_failures.json").read_text())}
    options = CodeOptions(limits=Limits(cpu_seconds=20.0), sandbox=SandboxOptions(preload=("sortedcontainers",)))
    judge_of("auto").close()
    failed: list[str] = []
    with CodeJudge(options) as judge:
        for line in (folder / "data.jsonl").read_text().splitlines():
            row = json.loads(line)
            tests = _tests(row)
            if tests is None:
                continue
            verdict = judge.judge_program(row["reference_solution"], parse_suite(tests))
            if not verdict.correct and row["id"] not in known:
                failed.append(f"{row['id']}: {verdict.status} {verdict.reason}")
            if "buggy_solution" in row:
                assert not judge.judge_program(row["buggy_solution"], parse_suite(tests)).correct, row["id"]
    assert failed == []
