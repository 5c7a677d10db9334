"""Which problems need a checker, and whether a checker may be trusted.

Correct solutions that disagree with each other on a test show that the test has several right outputs: comparing
with one of them punishes the others. A checker is admitted only if it accepts what is known to be right and rejects
what is known to be wrong.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magicrl.verifiers.code import compare, remote, values
from magicrl.verifiers.code.judge import CodeJudge, CodeOptions
from magicrl.verifiers.code.suite import StdinCase, Suite, parse_suite


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
    if output.exists() and output.samefile(input):
        raise ValueError(f"output {output} is the input file; choose another")
    rows: list[dict[str, Any]] = []
    with CodeJudge(options) as judge, input.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{input}:{number}"
            try:
                row = json.loads(line)
                suite = parse_suite(row["tests"])
                solutions = row["solutions"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{where}: needs fields 'tests' and 'solutions': {error}") from error
            if not isinstance(solutions, list) or len(solutions) < 2 or not all(isinstance(s, str) for s in solutions):
                raise ValueError(f"{where}: field 'solutions' must be a list of at least two programs")
            found = disagreements(judge, suite, solutions)
            rows.append({"id": row.get("id", number), "needs_checker": bool(found), "tests": found})
    output.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return sum(row["needs_checker"] for row in rows)


def _same(one: bytes, other: bytes, tolerance: float | None, *, text: bool) -> bool:
    if text:
        return compare.same_text(one, other, tolerance)
    try:
        first, second = (values.decode(json.loads(part)["result"], remote.as_list) for part in (one, other))
    except (ValueError, TypeError, KeyError, RecursionError, ArithmeticError):
        return one == other
    return compare.same_value(first, second, tolerance, strict=False)
