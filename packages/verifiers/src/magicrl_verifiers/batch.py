"""Judging one answer, rows, or a file of answers or programs: the functions behind ``magicrl verify``.

Files are JSON Lines. The output has one line per input line in the same order. A line that cannot be read gets the
status ``broken_line`` and the reason.
"""

from __future__ import annotations

import atexit
import errno
import functools
import json
import math
import os
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO, TypeVar

from magicrl_verifiers.code import remote, values
from magicrl_verifiers.code.checkers import same_result, same_text
from magicrl_verifiers.code.judge import CodeJudge, CodeOptions, CodePool, CodeVerdict
from magicrl_verifiers.code.sandbox import Limits, SandboxError, SandboxLost
from magicrl_verifiers.code.suite import (
    BESIDE,
    AssertCase,
    StdinCase,
    Suite,
    check_names,
    parse_suite,
    tests_object,
    text_of_tests,
)
from magicrl_verifiers.judge_settings import JudgeSettings
from magicrl_verifiers.records import (
    Extract,
    JudgeOptions,
    Outcome,
    Problem,
    Reasoning,
    RepeatedKey,
    Verdict,
    VerifierService,
    unique_keys,
)
from magicrl_verifiers.service import VerifierPool
from magicrl_verifiers.table import VerifierSpec, verifier_spec
from magicrl_verifiers.workers import Ticket

_IN_FLIGHT_PER_WORKER = 32
Result = TypeVar("Result")
BROKEN_LINE = "broken_line"
"""Status of a line that cannot be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSummary:
    """Counts of a judged file.

    Attributes:
        total: the lines of the output.
        correct, wrong, not_judged: of these. Not judged: a line or a reference answer that cannot be read, a worker
        lost twice.
        score: mean of the graded rewards; None without any.
        broken: what is wrong with the lines that cannot be read, each with its file, line and field.
        alike: whether two or more answers were judged, and all have the same reward.
    """

    total: int
    correct: int
    wrong: int
    not_judged: int
    score: float | None
    broken: tuple[str, ...]
    alike: bool = False


Tell = Callable[[int, int], None]
"""Progress callback with the number of judged lines and of all lines."""


def untold(done: int, total: int) -> None:
    """Ignore progress."""


def judge_file(
    input: Path,
    output: Path,
    pool: VerifierService,
    *,
    submit: Callable[[dict[str, Any], Any], Ticket],
    row: Callable[[Any], dict[str, Any]],
    workers: int,
    tell: Tell = untold,
) -> BatchSummary:
    """Judge every line of ``input`` with a pool that is warm; ``output`` appears whole when all are judged.

    Until then ``<output>.part`` grows. Blank lines are skipped. `check_file` comes first.

    Args:
        submit: queues a line, given its object and its id; raises ValueError for one that cannot be read.
        row: gives the fields of an output line after ``id`` and ``correct``, also for the plain verdict on a line that
            cannot be read.
    """
    outcomes: Counter[Outcome] = Counter()
    broken: list[str] = []
    scores: list[float] = []
    rewards: set[float] = set()
    part = _part(output)
    lines = count_lines(input)
    waiting: deque[tuple[Any, Ticket | ValueError]] = deque()

    def finish(file: TextIO) -> None:
        name, found = waiting.popleft()
        if isinstance(found, ValueError):
            broken.append(str(found))
            verdict = Verdict(outcome=Outcome.NOT_JUDGED, status=BROKEN_LINE, reason=str(found))
            fields = {**row(verdict), "reason": verdict.reason}
        else:
            verdict = pool.result(found)[0]
            fields = row(verdict)
        correct = None if verdict.outcome is Outcome.NOT_JUDGED else verdict.correct
        file.write(json.dumps({"id": name, "correct": correct, **fields}) + "\n")
        file.flush()
        outcomes[verdict.outcome] += 1
        scores.extend([] if verdict.score is None else [verdict.score])
        if correct is not None:
            rewards.add(float(correct) if verdict.score is None else verdict.score)
        tell(outcomes.total(), lines)

    with _named_if_full(part), part.open("w", encoding="utf-8") as file:
        for line in _each_line(input, submit):
            waiting.append(line)
            # enough to keep the workers busy; a file of millions of lines is not in memory
            if len(waiting) >= workers * _IN_FLIGHT_PER_WORKER:
                finish(file)
        while waiting:
            finish(file)
    # only a whole output has its name: a run that was killed leaves the part file
    if part != output:
        part.replace(part.with_suffix(""))
    return BatchSummary(
        total=outcomes.total(),
        correct=outcomes[Outcome.CORRECT],
        wrong=outcomes[Outcome.WRONG],
        not_judged=outcomes[Outcome.NOT_JUDGED],
        score=sum(scores) / len(scores) if scores else None,
        broken=tuple(broken),
        alike=len(rewards) == 1 and outcomes.total() - outcomes[Outcome.NOT_JUDGED] > 1,
    )


@contextmanager
def _named_if_full(path: Path) -> Generator[None]:
    """Name ``path`` in an error of a full disk, since a failed write names no file."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from None


def count_lines(path: Path) -> int:
    """Return the number of lines that are not blank."""
    with path.open("rb") as file:
        return sum(bool(raw.strip()) for raw in file)


def check_file(input: Path, output: Path) -> None:
    """Refuse what no work should be spent on.

    Raises:
        ValueError: there is no line in the input, or the output is the input, a folder, or in no folder.
        OSError: the input cannot be read.
    """
    if output.is_dir():
        raise ValueError(f"output {output} is a folder; give a file in it")
    if input.exists() and not input.is_file():
        raise ValueError(f"{input} is no file, and is read twice; write its lines to a file first")
    # before anything is judged: the input would be overwritten, or a long run would end without a place for its result
    for written in (output, _part(output)):
        if written.exists() and written.samefile(input):
            raise ValueError(f"output {written} is the input file; choose another")
    if not output.parent.is_dir():
        raise ValueError(f"output {output}: there is no folder {output.parent}; create it, or choose another")
    if not count_lines(input):
        raise ValueError(f"{input}: the file holds no line to judge; give one JSON object a line")


def _part(output: Path) -> Path:
    """Return the file that grows until the output is whole.

    It is next to the file that a link names. A device or pipe, such as /dev/null, must not be replaced by a file.
    """
    if output.exists() and not output.is_file():
        return output
    return Path(f"{os.path.realpath(output)}.part")


def verify_file(
    input: Path,
    output: Path,
    *,
    verifier: str = "maths",
    options: JudgeOptions | None = None,
    workers: int | None = None,
    time_limit: float = 2.0,
    memory_limit_mb: int = 4096,
    judge: JudgeSettings | None = None,
    tell: Tell = untold,
) -> BatchSummary:
    """Judge every line ``{"id"?, "prompt"?, "reference": str|[str], "response": str, ...}`` of
    ``input``, as training does.

    Writes ``{"id", "correct", "status", "extracted", "decided_by", "seconds"}`` a line to ``output``, with a graded
    reward ``score`` and ``metrics``, too. ``correct`` is null where nothing was judged. A line without
    an id gets its line number. A reward of the user's needs no reference answer, and finds further fields in
    ``problem.extra``.

    Args:
        verifier: a built-in one, or a reward of the user's as `magicrl.registry` finds it.
        workers: worker processes; default: the cores this process may use.
        judge: settings of the verifier ``judge``.
        tell: receives the number of judged lines and of all lines.

    Raises:
        ValueError: an unknown verifier, an empty input, or input and output are the same file.
        OSError: a file cannot be read or written.
        RuntimeError: the verifier cannot be started.
    """
    spec = verifier_spec(verifier)
    check_file(input, output)
    count = workers if workers is not None else usable_cores()
    limits: dict[str, Any] = {"workers": count, "time_limit": time_limit, "memory_limit_mb": memory_limit_mb}
    with VerifierPool(options=options, judge=judge, **limits) as pool:
        pool.warm_up([verifier])

        def submit(row: dict[str, Any], name: Any) -> Ticket:
            problem, response = _parse(spec, row, name)
            return pool.submit(problem, [response] * spec.tries)

        return judge_file(input, output, pool, submit=submit, row=_row, workers=count, tell=tell)


def verify_rows(
    rows: Sequence[Mapping[str, Any]],
    *,
    verifier: str,
    options: JudgeOptions,
    workers: int,
    time_limit: float,
    memory_limit_mb: int,
) -> list[Verdict]:
    """Return the verdicts of rows as `verify_file` has them on its lines, in their order.

    Raises:
        ValueError: an unknown verifier, or a row that cannot be read; nothing was judged.
        RuntimeError: the verifier cannot be started.
    """
    spec = verifier_spec(verifier)
    lines: list[tuple[Problem, str]] = []
    for number, row in enumerate(rows):
        try:
            lines.append(_parse(spec, dict(row), row.get("id", number)))
            spec.check_references(lines[-1][0])
        except ValueError as error:
            raise ValueError(f"record {number}: {error}") from error
    with VerifierPool(options=options, workers=workers, time_limit=time_limit, memory_limit_mb=memory_limit_mb) as pool:
        tickets = [pool.submit(problem, [text] * spec.tries) for problem, text in lines]
        return [pool.result(ticket)[0] for ticket in tickets]


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _each_line(path: Path, work: Callable[[dict[str, Any], Any], Result]) -> Iterator[tuple[Any, Result | ValueError]]:
    """Yield the id (else the number) of every line that is not blank, and what ``work`` returns for (object, id).

    Instead of that, the error of a line that holds no object, or for which ``work`` raises ValueError, with its place.
    """
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            name: Any = number
            try:
                found = _object(raw)
                name = found.get("id", number)
                result = work(found, name)
            except ValueError as error:
                result = ValueError(f"{path}:{number}: {error}")
            yield name, result


def _object(raw: bytes) -> dict[str, Any]:
    try:
        # some editors write a byte order mark
        found = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=unique_keys)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from error
    except RepeatedKey:
        raise
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"expected an object, got {type(found).__name__}")
    return found


def _parse(spec: VerifierSpec, row: dict[str, Any], name: Any) -> tuple[Problem, str]:
    """Return the problem and the response of a line."""
    if "gold" in row:  # the field's name before 0.2
        row = {"reference": row["gold"]} | {field: value for field, value in row.items() if field != "gold"}
    for field in ("reference", "response") if spec.needs_reference else ("response",):
        if field not in row:
            raise ValueError(f"field {field!r} is missing")
    check_names(row, ["prompt"])
    reference, prompt, response = row.get("reference"), row.get("prompt", ""), row["response"]
    references = reference if isinstance(reference, list | tuple) else [reference] if "reference" in row else []
    empty = not references and "reference" in row
    references = [number_as_text(one) for one in references]
    if empty or not all(isinstance(one, str) and one.strip() for one in references):
        raise ValueError(f"field 'reference' must be a string or a list of strings, none empty, got {reference!r:.60}")
    for field, text in (("prompt", prompt), ("response", response)):
        if not isinstance(text, str):
            raise ValueError(f"field {field!r} must be a string, got {text!r:.60}")
    extra = {field: value for field, value in row.items() if field not in ("id", "prompt", "reference", "response")}
    problem = Problem(
        id=str(name), prompt=prompt, references=tuple(references), verifier=spec.name, source="file", extra=extra
    )
    return problem, response


def number_as_text(value: Any) -> Any:
    """Return a finite number as text, 51.0 as ``51``, and any other value unchanged."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return value
    return str(int(value) if value == int(value) else value)


def _row(verdict: Verdict) -> dict[str, Any]:
    graded = {} if verdict.score is None else {"score": verdict.score, "metrics": dict(verdict.metrics)}
    return {
        "status": verdict.status,
        "extracted": verdict.extracted,
        "decided_by": verdict.decided_by,
        "seconds": round(verdict.seconds, 4),
        **graded,
        **({"rewards": {name: score for name, (_, score) in verdict.parts.items()}} if verdict.parts else {}),
        **({"reason": verdict.reason} if verdict.outcome is Outcome.NOT_JUDGED else {}),
    }


# --- Files of programs ------------------------------------------------------------------------------------------------
#
# Correct solutions that disagree with each other on a test show that the test has several right outputs: comparing with
# one of them punishes the others. A checker is admitted only if it accepts what is known to be right and rejects what
# is known to be wrong.


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
        explain: add ``reason``, a sentence for a person, to every line; programs that were not judged always have it.
        tell: receives the number of judged lines and of all lines.

    Raises:
        ValueError: an empty input, or input and output are the same file.
        OSError: a file cannot be read or written.
        WorkerRefusal: this machine cannot isolate programs; says why.
    """
    check_file(input, output)
    with CodePool(options, workers=workers) as pool:
        pool.warm_up()
        submit, row = partial(_submit_code, pool), partial(_code_row, explain)
        return judge_file(input, output, pool, submit=submit, row=row, workers=workers, tell=tell)


def _code_row(explain: bool, verdict: Verdict) -> dict[str, Any]:
    passed, total = (verdict.passed, verdict.total) if isinstance(verdict, CodeVerdict) else (0, 0)
    seconds = round(verdict.seconds, 4)
    row: dict[str, Any] = {"status": verdict.status, "passed": passed, "total": total, "seconds": seconds}
    return {**row, "reason": verdict.reason} if explain or verdict.outcome is Outcome.NOT_JUDGED else row


def _submit_code(pool: CodePool, row: dict[str, Any], name: Any) -> Ticket:
    given = [field for field in ("program", "response") if row.get(field) is not None]
    if len(given) != 1:
        raise ValueError(f"exactly one of the fields 'program' and 'response' is needed, got {given or 'none'}")
    text = row[given[0]]
    if not isinstance(text, str):
        raise ValueError(f"field {given[0]!r} must be text, got {type(text).__name__}")
    if "tests" not in row:
        raise ValueError("field 'tests' is missing")
    check_names(row, BESIDE)
    beside = {field: row[field] for field in BESIDE if row.get(field) is not None}
    references = (json.dumps({**beside, **tests_object(row["tests"])}),)
    problem = Problem(id=str(name), prompt="", references=references, verifier="code", source="file")
    return pool.submit(problem, [text], bare=given[0] == "program")


def examine_checker(judge: CodeJudge, suite: Suite, *, right: Sequence[str], wrong: Sequence[str]) -> dict[str, Any]:
    """Judge known programs by the suite's checker.

    Returns:
        ``admitted``: whether it made no mistake, and was shown at least one program of each kind; ``rejected_right``
        and ``accepted_wrong``: indices of the programs that it misjudged.

    Args:
        right: programs known to be right.
        wrong: programs known to be wrong (of another kind than crashes and time-outs, which no checker sees).

    Raises:
        ValueError: the suite has no checker.
    """
    if suite.checker is None:
        raise ValueError("the tests name no checker; set field 'checker' in 'tests' or next to it")
    verdicts = [judge.judge_program(source, suite) for source in right]
    rejected = [at for at, verdict in enumerate(verdicts) if not verdict.correct]
    accepted = [at for at, source in enumerate(wrong) if judge.judge_program(source, suite).correct]
    admitted = not rejected and not accepted and bool(right) and bool(wrong)
    return {"admitted": admitted, "rejected_right": rejected, "accepted_wrong": accepted}


def disagreements(judge: CodeJudge, suite: Suite, solutions: Sequence[str]) -> list[int]:
    """Indices of the tests on which solutions that are all known to be right give different outputs.

    A solution that fails on a test (time, crash) says nothing about it. Outputs count as different only when the
    built-in comparison (tokens, floats within the tolerance) says so.
    """
    return _differing(suite, [judge.outputs(source, suite) for source in solutions])


def _differing(suite: Suite, given: Sequence[Sequence[bytes | None]]) -> list[int]:
    """Return the tests on which the outputs differ; ``given[solution][test]`` is None where a solution failed."""
    found: list[int] = []
    for index, case in enumerate(suite.cases):
        outputs = [row[index] for row in given]
        known = [output for output in outputs if output is not None]
        text = isinstance(case, StdinCase)
        # with the first that ran: one that differs is enough
        if any(not _same(known[0], other, suite.float_tolerance, text=text) for other in known[1:]):
            found.append(index)
    return found


def disagreements_file(
    input: Path, output: Path, options: CodeOptions | None = None, tell: Tell = untold
) -> BatchSummary:
    """Look through problems with several correct solutions: lines ``{"id"?, "solutions": [...], "tests": {...}}``.

    Writes ``{"id", "needs_checker", "tests", "failed"}`` a line: indices of the tests on which the solutions disagree,
    and of the solutions that gave no output on a test. Those say nothing about it.

    Returns:
        The counts: ``wrong`` problems need a checker.

    Raises:
        ValueError: the input is empty, or output is the input.
        SandboxError: this machine cannot isolate programs; says why.
    """

    def look(judge: CodeJudge, suite: Suite, row: dict[str, Any]) -> tuple[bool, dict[str, Any]]:
        given = [judge.outputs(source, suite) for source in _programs(row, "solutions", 2)]
        found = _differing(suite, given)
        # test code has no output
        silent = sum(isinstance(case, AssertCase) for case in suite.cases)
        failed = [at for at, outputs in enumerate(given) if outputs.count(None) > silent]
        return not found, {"needs_checker": bool(found), "tests": found, "failed": failed}

    return _each_problem(input, output, options, look, tell)


def admission_file(input: Path, output: Path, options: CodeOptions | None = None, tell: Tell = untold) -> BatchSummary:
    """Examine checkers: lines ``{"id"?, "tests": {..., "checker"}, "right": [programs], "wrong": [programs]}``.

    Writes ``{"id", "admitted", "rejected_right", "accepted_wrong"}`` a line: indices of programs misjudged.

    Returns:
        The counts: ``correct`` checkers were admitted.

    Raises:
        ValueError: the input is empty, or output is the input.
        SandboxError: this machine cannot isolate programs; says why.
    """

    def look(judge: CodeJudge, suite: Suite, row: dict[str, Any]) -> tuple[bool, dict[str, Any]]:
        found = examine_checker(judge, suite, right=_programs(row, "right", 1), wrong=_programs(row, "wrong", 1))
        return found["admitted"], found

    return _each_problem(input, output, options, look, tell)


def _each_problem(
    input: Path,
    output: Path,
    options: CodeOptions | None,
    look: Callable[[CodeJudge, Suite, dict[str, Any]], tuple[bool, dict[str, Any]]],
    tell: Tell,
) -> BatchSummary:
    """Write the fields that ``look`` returns for each line, or ``broken_line`` and the reason; count its ``True``."""
    check_file(input, output)
    rows: list[dict[str, Any]] = []
    broken: list[str] = []
    good = 0
    lines = count_lines(input)
    with CodeJudge(options) as judge:

        def work(row: dict[str, Any], name: Any) -> tuple[bool, dict[str, Any]]:
            check_names(row, BESIDE)
            suite = parse_suite(row.get("tests"), {field: row[field] for field in BESIDE if field in row})
            try:
                return look(judge, suite, row)
            except SandboxLost as error:
                raise SandboxError(f"the programs of {name!r} were not run: {error}") from error

        for name, found in _each_line(input, work):
            if isinstance(found, ValueError):
                broken.append(str(found))
                fields = {"status": BROKEN_LINE, "reason": str(found)}
            else:
                fields = found[1]
                good += found[0]
            rows.append({"id": name, **fields})
            tell(len(rows), lines)
    with _named_if_full(output):
        output.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return BatchSummary(
        total=len(rows),
        correct=good,
        wrong=len(rows) - good - len(broken),
        not_judged=len(broken),
        score=None,
        broken=tuple(broken),
    )


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
    return same_result(first, second, tolerance, strict=False)


# --- One answer or one program at a time ------------------------------------------------------------------------------


@functools.cache
def _maths_pool(reasoning: Reasoning, extract: Extract, time_limit: float) -> VerifierPool:
    pool = VerifierPool(options=JudgeOptions(reasoning=reasoning, extract=extract), time_limit=time_limit)
    atexit.register(pool.close)
    return pool


@functools.cache
def _code_pool(reasoning: Reasoning) -> CodePool:
    pool = CodePool(CodeOptions(judge=JudgeOptions(reasoning=reasoning)))
    atexit.register(pool.close)
    return pool


def verify_maths(
    reference: str | Sequence[str],
    response: str,
    *,
    reasoning: Reasoning = "auto",
    extract: Extract = "lenient",
    time_limit: float = 10.0,
) -> Verdict:
    r"""Return whether a response gives the reference answer.

    The response is judged in a worker process, which is killed at its limit. Safe to call from several threads. For
    many responses `VerifierPool` or ``magicrl-verify math`` are faster: they keep several workers busy.

    Args:
        reference: the reference answer, or several of which any counts.
        response: what the model wrote, reasoning included.
        reasoning: what an unfinished ``<think>`` means (`JudgeOptions`).
        extract: ``box``: only a ``\boxed{}`` counts; ``lenient``: an answer without a box counts, too.
        time_limit: CPU seconds.

    Raises:
        TypeError: a reference or the response is no text.
        ValueError: no reference.
        RuntimeError: no worker can be started on this machine.

    Example:
        >>> verify_maths("1/2", r"It is \boxed{0.5}.").correct
        True
    """
    given: Any = reference
    single = isinstance(given, str | bytes) or not isinstance(given, Iterable)
    references: tuple[Any, ...] = (given,) if single else tuple(given)
    for name, text in (*(("reference", one) for one in references), ("response", response)):
        if not isinstance(text, str):
            raise TypeError(f"{name} must be text, got {text!r:.60}")
    problem = Problem(id="direct", prompt="", references=references, verifier="maths", source="direct")
    (verdict,) = _maths_pool(reasoning, extract, time_limit).judge(problem, [response])
    return verdict


def verify_code(
    tests: Mapping[str, Any],
    program: str,
    *,
    response: bool = False,
    reasoning: Reasoning = "auto",
    time_limit: float = 10.0,
    memory_limit_mb: int = 4096,
) -> CodeVerdict:
    """Return whether a program passes its tests, run in a sandbox (docs/reference/code-verifier.md).

    Args:
        tests: ``{"inputs", "outputs", "fn_name"?}``, ``{"entry_point", "import_prefix", "test_code"}`` or
            ``{"assert_case"}``.
        program: Python source; with ``response`` a model's text, whose last code block is the program.
        response: whether ``program`` is a model's text.
        reasoning: what an unfinished ``<think>`` in a response means (`JudgeOptions`).
        time_limit: CPU seconds of one test.
        memory_limit_mb: MiB of one test.

    Raises:
        SuiteError: an argument of a function is a tuple, or has keys that are no texts, which JSON would change.
        WorkerRefusal: this machine cannot isolate programs; says why.

    Example:
        >>> verify_code({"inputs": ["3"], "outputs": ["6"]}, "print(2 * int(input()))").correct
        True
    """
    limits = Limits(cpu_seconds=time_limit, memory_mb=memory_limit_mb)
    # with the tests, and not as the pool's: each pool keeps processes
    limited = {"time_limit": limits.cpu_seconds, "memory_limit_mb": limits.memory_mb, **tests_object(tests)}
    problem = Problem(id="direct", prompt="", references=(text_of_tests(limited),), verifier="code", source="direct")
    pool = _code_pool(reasoning)
    (verdict,) = pool.result(pool.submit(problem, [program], bare=not response))
    assert isinstance(verdict, CodeVerdict)
    return verdict
