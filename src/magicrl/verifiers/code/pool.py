"""Many programs, judged beside the caller by worker processes; the files of ``magicrl verify code``; checkers on trial.

The processes that use up limits here are not the workers but the programs that they run, so a worker's own limits are
wide: they only end a judge that a program's output keeps busy. A worker holds the tests, drives the fork servers and
compares; nothing of a program runs in it.

Correct solutions that disagree with each other on a test show that the test has several right outputs: comparing with
one of them punishes the others. A checker is admitted only if it accepts what is known to be right and rejects what is
known to be wrong.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from pydantic import TypeAdapter

from magicrl.records import Problem, Verdict
from magicrl.verifiers.base import CODE
from magicrl.verifiers.batch import BatchSummary, Line, Tell, check_file, count_lines, judge_file, objects, untold
from magicrl.verifiers.code import remote, values
from magicrl.verifiers.code.checkers import same_text, same_value
from magicrl.verifiers.code.judge import CodeJudge, CodeOptions, CodeVerdict, code_verdict
from magicrl.verifiers.code.sandbox import SandboxRefusal
from magicrl.verifiers.code.suite import BESIDE, StdinCase, Suite, SuiteError, parse_suite, tests_object
from magicrl.verifiers.pool import Item, Ticket, WorkerPool, WorkerProtocol
from magicrl.verifiers.worker import Exhausted, Refused, RequestHandler, Send, WorkerPlan

_JUDGE_CPU_SECONDS = 60.0
_STALL_FACTOR = 12.0
_STALL_SECONDS = 120.0


class CodeProtocol(WorkerProtocol):
    """What the generic pool must know of code: a problem's tests are the JSON text in ``golds[0]``."""

    verdicts = TypeAdapter(CodeVerdict)

    def __init__(self, options: CodeOptions) -> None:
        seconds = options.limits.cpu_seconds
        self.plan = WorkerPlan(
            handler="magicrl.verifiers.code.pool:CodeHandler",
            hello=dataclasses.asdict(options),
            # of the worker itself, which only compares: programs have their time in the sandbox
            cpu_limit=_JUDGE_CPU_SECONDS,
            stall_limit=_STALL_SECONDS + _STALL_FACTOR * (options.total_seconds or 12 * seconds),
        )

    def request(self, item: Item, *, repeat: bool) -> dict[str, Any]:
        request: dict[str, Any] = {"text": item.text, "program": item.bare}
        return request if repeat else {**request, "tests": item.problem.golds[0]}

    def exhausted(self, item: Item, outcome: Exhausted, seconds: float) -> CodeVerdict:
        # the program had its time in the sandbox: it was its output that kept the judge busy
        if outcome.kind == "timeout":
            reason = "its output could not be compared within the judge's own time"
            return code_verdict("output_limit", reason, seconds=seconds)
        return self.lost("the judge crashed", seconds)

    def lost(self, reason: str, seconds: float = 0.0) -> CodeVerdict:
        return code_verdict("infrastructure_error", reason, seconds=seconds, decided_by="pool")

    def final(self, item: Item, verdict: Verdict) -> bool:
        return verdict.decided_by == "suite"  # tests that cannot be used are told at once


class CodePool(WorkerPool):
    """Judges responses (or bare programs) to code problems in worker processes. Safe to use from several threads.

    A problem's tests are the JSON text in ``golds[0]`` (`suite` has the forms).

    Args:
        options: limits, isolation and where the program stands in a response.
        workers: worker processes, each with its own sandbox.

    Example:
        >>> problem = Problem(id="p", prompt="", golds=('{"inputs": ["2 3"], "outputs": ["5"]}',), verifier="code",
        ...                   source="doc")
        >>> with CodePool() as pool:
        ...     ticket = pool.submit(problem, ["```python\\nprint(sum(map(int, input().split())))\\n```"])
        ...     [verdict.status for verdict in pool.result(ticket)]
        ['passed']
    """

    def __init__(self, options: CodeOptions | None = None, *, workers: int = 1) -> None:
        super().__init__(CodeProtocol(options or CodeOptions()), workers)

    def submit(self, problem: Problem, responses: Sequence[str], *, bare: bool = False) -> Ticket:
        """As `WorkerPool.submit`; ``bare``: these are programs, from which nothing has to be extracted.

        Raises:
            ValueError: the problem has no tests.
            RuntimeError: the pool is closed.
        """
        CODE.check_golds(problem)
        return super().submit(problem, responses, bare=bare)

    def result(self, ticket: Ticket) -> tuple[CodeVerdict, ...]:
        """The verdicts of ``ticket`` in the order of its texts. Waits until all are there.

        Raises:
            RuntimeError: the pool was closed before they were judged.
            WorkerRefusal: this machine cannot isolate programs; says why.
        """
        verdicts = ticket.wait()
        found = tuple(verdict for verdict in verdicts if isinstance(verdict, CodeVerdict))
        assert len(found) == len(verdicts)
        return found

    def warm_up(self) -> str:
        """Start every worker now and wait for them; returns the tier of isolation in use.

        Raises:
            WorkerRefusal: this machine cannot isolate programs; says why.
            WorkerStartError: a worker could not be started.
        """
        return str(self.warm()[0]["tier"])


_GROWTH_MB = 1024
"""Resident memory beyond that of the start at which a worker asks to be replaced."""


class CodeHandler(RequestHandler):
    """One judge, and the tests that it was asked about last."""

    def __init__(self, hello: dict[str, Any], send: Send) -> None:
        self._judge = CodeJudge(TypeAdapter(CodeOptions).validate_python(hello))
        try:
            self.greeting = {"tier": self._judge.sandbox.tier}
        except SandboxRefusal as error:
            raise Refused(str(error)) from error
        self._memory = psutil.Process()
        self._most = self._memory.memory_info().rss + _GROWTH_MB * 2**20
        self._suite: Suite | None = None
        self._trouble = ""

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        # left out when the same problem is asked about again: tests may be megabytes
        if "tests" in request:
            self._suite, self._trouble = None, ""
            try:
                self._suite = parse_suite(request["tests"])
            except SuiteError as error:
                self._trouble = str(error)
        verdict = dataclasses.asdict(self._verdict(request))
        return {"verdict": verdict, "retire": self._memory.memory_info().rss > self._most}

    def close(self) -> None:
        self._judge.close()

    def _verdict(self, request: dict[str, Any]) -> CodeVerdict:
        suite = self._suite
        if suite is None:
            return code_verdict("infrastructure_error", self._trouble, decided_by="suite")
        total = len(suite.cases)
        try:
            if request["program"]:
                return self._judge.judge_program(request["text"], suite)
            return self._judge.judge_response(request["text"], suite)
        except MemoryError:
            return code_verdict("output_limit", "its output is too large to be compared", total=total)
        except Exception as error:  # noqa: BLE001 - a hostile output must not end the worker; the pool retries elsewhere
            return code_verdict("infrastructure_error", f"the judge raised {error!r}", total=total)


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
    golds = (json.dumps({**beside, **tests}),)
    problem = Problem(id=str(name), prompt="", golds=golds, verifier="code", source="file")
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
