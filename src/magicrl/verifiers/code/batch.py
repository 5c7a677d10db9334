"""Judging a file of programs: the half of ``magicrl verify`` for code.

Tests that cannot be used (none at all, interactive) are an error of their line, never a pass.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from magicrl.records import Problem, Verdict
from magicrl.verifiers.batch import BatchSummary, Form, Line, check_file, judge_file
from magicrl.verifiers.code.judge import CodeOptions, CodeVerdict
from magicrl.verifiers.code.pool import CodePool
from magicrl.verifiers.code.suite import BESIDE


def verify_code_file(
    input: Path, output: Path, *, options: CodeOptions | None = None, workers: int = 1, explain: bool = False
) -> BatchSummary:
    """Judge every line ``{"id"?, "response" | "program", "tests": {...}}`` of ``input``.

    Writes ``{"id", "correct", "status", "passed", "total", "seconds"}`` a line to ``output``, which appears whole
    when all are judged (until then ``<output>.part`` grows). A line without an id gets its line number.

    Args:
        explain: add ``reason``, a sentence for a person.

    Raises:
        ValueError: an empty input, or input and output are the same file.
        OSError: a file cannot be read or written.
        WorkerRefusal: this machine cannot isolate programs; says why.
    """
    form = Form(parse=_parse, row=partial(_row, explain), broken=_broken)
    check_file(input, output)
    with CodePool(options, workers=workers) as pool:
        pool.warm_up()
        return judge_file(
            input,
            output,
            form,
            pool,
            submit=lambda line: pool.submit(line.problem, [line.text], bare=line.bare),
            workers=workers,
        )


def _row(explain: bool, verdict: CodeVerdict) -> dict[str, Any]:
    row: dict[str, Any] = {
        "correct": verdict.correct,
        "status": verdict.status,
        "passed": verdict.passed,
        "total": verdict.total,
        "seconds": round(verdict.seconds, 4),
    }
    return {**row, "reason": verdict.reason} if explain else row


def _broken(verdict: Verdict) -> dict[str, Any]:
    """The fields of `_row` for a line that cannot be read."""
    return {"correct": False, "status": verdict.status, "passed": 0, "total": 0, "seconds": 0.0}


def _parse(row: dict[str, Any], name: Any, where: str) -> Line:
    given = [field for field in ("program", "response") if row.get(field) is not None]
    if len(given) != 1:
        raise ValueError(
            f"{where}: exactly one of the fields 'program' and 'response' is needed, got {given or 'none'}"
        )
    text = row[given[0]]
    if not isinstance(text, str):
        raise ValueError(f"{where}: field {given[0]!r} must be text, got {type(text).__name__}")
    if "tests" not in row:
        raise ValueError(f"{where}: field 'tests' is missing")
    tests = row["tests"]
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: field 'tests' is text but not JSON: {error}") from error
    if isinstance(tests, list):
        tests = {"assert_case": tests}
    if not isinstance(tests, dict):
        raise ValueError(f"{where}: field 'tests' must be an object, got {type(tests).__name__}")
    beside = {field: row[field] for field in BESIDE if row.get(field) is not None}
    golds = (json.dumps({**beside, **tests}),)
    return Line(
        name, Problem(id=str(name), prompt="", golds=golds, verifier="code", source="file"), text, given[0] == "program"
    )
