"""Which problems need a checker, and whether a checker may be trusted.

Correct solutions that disagree with each other on a test show that the test has several right outputs: comparing
with one of them punishes the others. A checker is admitted only if it accepts what is known to be right and rejects
what is known to be wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magicrl.verifiers.batch import objects
from magicrl.verifiers.code import compare, remote, values
from magicrl.verifiers.code.judge import CodeJudge, CodeOptions
from magicrl.verifiers.code.suite import BESIDE, StdinCase, Suite, SuiteError, parse_suite


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
        raise ValueError("the tests name no checker; set field 'checker'")
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
        if any(not _same(known[0], other, suite.float_tolerance, text=text) for other in known[1:]):
            found.append(index)
    return found


def disagreements_file(input: Path, output: Path, options: CodeOptions | None = None) -> int:
    """Look through problems with several correct solutions: lines ``{"id"?, "solutions": [...], "tests": {...}}``.

    Writes ``{"id", "needs_checker", "tests"}`` a line: indices of the tests on which the solutions disagree.

    Returns:
        How many problems need a checker.

    Raises:
        ValueError: a malformed line or unusable tests (names file, line and field), or output is the input.
        SandboxError: this machine cannot isolate programs; says why.
    """
    rows: list[dict[str, Any]] = []
    with CodeJudge(options) as judge:
        for name, suite, row, where in _problems(input, output):
            solutions = _programs(row, "solutions", 2, where)
            found = disagreements(judge, suite, solutions)
            rows.append({"id": name, "needs_checker": bool(found), "tests": found})
    _write(output, rows)
    return sum(row["needs_checker"] for row in rows)


def admission_file(input: Path, output: Path, options: CodeOptions | None = None) -> int:
    """Examine checkers: lines ``{"id"?, "tests": {..., "checker"}, "right": [programs], "wrong": [programs]}``.

    Writes ``{"id", "admitted", "rejected_right", "accepted_wrong"}`` a line: indices of programs misjudged.

    Returns:
        How many checkers were admitted.

    Raises:
        ValueError: a malformed line or unusable tests (names file, line and field), or output is the input.
        SandboxError: this machine cannot isolate programs; says why.
    """
    rows: list[dict[str, Any]] = []
    with CodeJudge(options) as judge:
        for name, suite, row, where in _problems(input, output):
            right, wrong = (_programs(row, field, 1, where) for field in ("right", "wrong"))
            if suite.checker is None:
                raise ValueError(f"{where}: the tests name no checker; set field 'checker' in 'tests' or beside it")
            found = examine_checker(judge, suite, right=right, wrong=wrong)
            rejected = [index for index, _ in found.rejected_right]
            misjudged = {"rejected_right": rejected, "accepted_wrong": list(found.accepted_wrong)}
            rows.append({"id": name, "admitted": found.admitted, **misjudged})
    _write(output, rows)
    return sum(row["admitted"] for row in rows)


def _problems(input: Path, output: Path) -> Iterator[tuple[Any, Suite, dict[str, Any], str]]:
    if output.exists() and output.samefile(input):
        raise ValueError(f"output {output} is the input file; choose another")
    for row, name, where in objects(input):
        if "tests" not in row:
            raise ValueError(f"{where}: field 'tests' is missing")
        try:
            yield name, parse_suite(row["tests"], {field: row[field] for field in BESIDE if field in row}), row, where
        except SuiteError as error:
            raise ValueError(f"{where}: {error}") from error


def _programs(row: dict[str, Any], field: str, least: int, where: str) -> list[str]:
    given = row.get(field)
    if not isinstance(given, list) or len(given) < least or not all(isinstance(one, str) for one in given):
        raise ValueError(f"{where}: field {field!r} must be a list of at least {least} programs")
    return given


def _write(output: Path, rows: list[dict[str, Any]]) -> None:
    output.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _same(one: bytes, other: bytes, tolerance: float | None, *, text: bool) -> bool:
    if text:
        return compare.same_text(one, other, tolerance)
    try:
        first, second = (values.decode(json.loads(part)["result"], remote.as_list) for part in (one, other))
    except (ValueError, TypeError, KeyError, RecursionError, ArithmeticError):
        return one == other
    return compare.same_value(first, second, tolerance, strict=False)
