"""Files of programs: judged, searched for tests with several right outputs, and checkers on trial.

Correct solutions that disagree with each other on a test show that the test has several right outputs: comparing with
one of them punishes the others. A checker is admitted only if it accepts what is known to be right and rejects what is
known to be wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from magicrl_verifiers.batch import BatchSummary, Line, Tell, check_file, count_lines, judge_file, objects, untold
from magicrl_verifiers.code import remote, values
from magicrl_verifiers.code.checkers import same_text, same_value
from magicrl_verifiers.code.judge import CodeJudge, CodeOptions, CodePool, CodeVerdict
from magicrl_verifiers.code.suite import BESIDE, StdinCase, Suite, SuiteError, parse_suite, tests_object
from magicrl_verifiers.records import Problem, Verdict


def verify_code_file(
    input: Path,
    output: Path,
    *,
    options: CodeOptions | None = None,
    workers: int = 1,
    explain: bool = False,
    tell: Tell = untold,
) -> BatchSummary:
    """Judge every line ``{"id"?, "response" | "program", "tests": {...}}`` of ``input``.

    Writes ``{"id", "correct", "status", "passed", "total", "seconds"}`` a line to ``output``, which appears whole
    when all are judged (until then ``<output>.part`` grows). A line without an id gets its line number.

    Args:
        explain: add ``reason``, a sentence for a person.
        tell: called with the lines that are judged, and all.

    Raises:
        ValueError: an empty input, or input and output are the same file.
        OSError: a file cannot be read or written.
        WorkerRefusal: this machine cannot isolate programs; says why.
    """
    check_file(input, output)
    with CodePool(options, workers=workers) as pool:
        pool.warm_up()
        return judge_file(
            input,
            output,
            pool,
            parse=_parse,
            row=partial(_row, explain),
            submit=lambda line: pool.submit(line.problem, [line.text], bare=line.bare),
            workers=workers,
            tell=tell,
        )


def _row(explain: bool, verdict: Verdict) -> dict[str, Any]:
    passed, total = (verdict.passed, verdict.total) if isinstance(verdict, CodeVerdict) else (0, 0)
    row: dict[str, Any] = {
        "correct": verdict.correct,
        "status": verdict.status,
        "passed": passed,
        "total": total,
        "seconds": round(verdict.seconds, 4),
    }
    return {**row, "reason": verdict.reason} if explain else row


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
    try:
        tests = tests_object(row["tests"])
    except SuiteError as error:
        raise ValueError(f"{where}: {error}") from error
    beside = {field: row[field] for field in BESIDE if row.get(field) is not None}
    references = (json.dumps({**beside, **tests}),)
    problem = Problem(id=str(name), prompt="", references=references, verifier="code", source="file")
    return Line(problem, text, bare=given[0] == "program")


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """What a checker did with known programs.

    Attributes:
        rejected_right: indices of right programs that it rejected, with the verdict's words.
        accepted_wrong: indices of wrong programs that it accepted.
        judged_right, judged_wrong: how many programs of each kind were given.
    """

    rejected_right: tuple[tuple[int, str], ...]
    accepted_wrong: tuple[int, ...]
    judged_right: int
    judged_wrong: int

    @property
    def admitted(self) -> bool:
        """It made no mistake, and was shown at least one program of each kind."""
        clean = not self.rejected_right and not self.accepted_wrong
        return clean and self.judged_right > 0 and self.judged_wrong > 0


def examine_checker(judge: CodeJudge, suite: Suite, *, right: Sequence[str], wrong: Sequence[str]) -> Admission:
    """Judge known programs by the suite's checker.

    Args:
        right: programs known to be right.
        wrong: programs known to be wrong (of another kind than crashes and time-outs, which no checker sees).

    Raises:
        ValueError: the suite has no checker.
    """
    if suite.checker is None:
        raise ValueError("the tests name no checker; set field 'checker' in 'tests' or beside it")
    verdicts = [judge.judge_program(source, suite) for source in right]
    rejected = tuple((i, f"{v.status}: {v.reason}") for i, v in enumerate(verdicts) if not v.correct)
    accepted = tuple(i for i, source in enumerate(wrong) if judge.judge_program(source, suite).correct)
    return Admission(rejected_right=rejected, accepted_wrong=accepted, judged_right=len(right), judged_wrong=len(wrong))


def disagreements(judge: CodeJudge, suite: Suite, solutions: Sequence[str]) -> list[int]:
    """Indices of the tests on which solutions that are all known to be right give different outputs.

    A solution that fails on a test (time, crash) says nothing about it. Outputs count as different only when the
    built-in comparison (tokens, floats within the tolerance) says so.
    """
    given = [judge.outputs(source, suite) for source in solutions]
    found: list[int] = []
    for index, case in enumerate(suite.cases):
        outputs = [row[index] for row in given]
        known = [output for output in outputs if output is not None]
        text = isinstance(case, StdinCase)
        # with the first that ran: one that differs is enough
        if any(not _same(known[0], other, suite.float_tolerance, text=text) for other in known[1:]):
            found.append(index)
    return found


def disagreements_file(input: Path, output: Path, options: CodeOptions | None = None, tell: Tell = untold) -> int:
    """Look through problems with several correct solutions: lines ``{"id"?, "solutions": [...], "tests": {...}}``.

    Writes ``{"id", "needs_checker", "tests"}`` a line: indices of the tests on which the solutions disagree.

    Returns:
        How many problems need a checker.

    Raises:
        ValueError: a malformed line or unusable tests (names file, line and field), or output is the input.
        SandboxError: this machine cannot isolate programs; says why.
    """

    def look(judge: CodeJudge, suite: Suite, row: dict[str, Any]) -> dict[str, Any]:
        found = disagreements(judge, suite, _programs(row, "solutions", 2))
        return {"needs_checker": bool(found), "tests": found}

    return sum(row["needs_checker"] for row in _each_problem(input, output, options, look, tell))


def admission_file(input: Path, output: Path, options: CodeOptions | None = None, tell: Tell = untold) -> int:
    """Examine checkers: lines ``{"id"?, "tests": {..., "checker"}, "right": [programs], "wrong": [programs]}``.

    Writes ``{"id", "admitted", "rejected_right", "accepted_wrong"}`` a line: indices of programs misjudged.

    Returns:
        How many checkers were admitted.

    Raises:
        ValueError: a malformed line or unusable tests (names file, line and field), or output is the input.
        SandboxError: this machine cannot isolate programs; says why.
    """

    def look(judge: CodeJudge, suite: Suite, row: dict[str, Any]) -> dict[str, Any]:
        found = examine_checker(judge, suite, right=_programs(row, "right", 1), wrong=_programs(row, "wrong", 1))
        rejected = [index for index, _ in found.rejected_right]
        return {"admitted": found.admitted, "rejected_right": rejected, "accepted_wrong": list(found.accepted_wrong)}

    return sum(row["admitted"] for row in _each_problem(input, output, options, look, tell))


def _each_problem(
    input: Path,
    output: Path,
    options: CodeOptions | None,
    look: Callable[[CodeJudge, Suite, dict[str, Any]], dict[str, Any]],
    tell: Tell,
) -> list[dict[str, Any]]:
    if output.exists() and output.samefile(input):
        raise ValueError(f"output {output} is the input file; choose another")
    rows: list[dict[str, Any]] = []
    lines = count_lines(input)
    with CodeJudge(options) as judge:
        for row, name, where in objects(input):
            try:
                suite = parse_suite(row.get("tests"), {field: row[field] for field in BESIDE if field in row})
                rows.append({"id": name, **look(judge, suite, row)})
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
            tell(len(rows), lines)
    output.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return rows


def _programs(row: dict[str, Any], field: str, least: int) -> list[str]:
    given = row.get(field)
    if not isinstance(given, list) or len(given) < least or not all(isinstance(one, str) for one in given):
        raise ValueError(f"field {field!r} must be a list of at least {least} programs")
    return given


def _same(one: bytes, other: bytes, tolerance: float | None, *, text: bool) -> bool:
    if text:
        return same_text(one, other, tolerance)
    try:
        first, second = (values.decode(json.loads(part)["result"], remote.as_list) for part in (one, other))
    except (ValueError, TypeError, KeyError, RecursionError, ArithmeticError):
        return one == other
    return same_value(first, second, tolerance, strict=False)
