"""Judging a file of programs: the engine of ``magicrl verify code``.

JSON Lines in, JSON Lines out, in the same order, one line each. Every line's form is checked before the first
program runs; tests that cannot be used (none at all, interactive) are an error of their line, never a pass.
"""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from magicrl.records import Outcome, Problem
from magicrl.verifiers.batch import BatchSummary
from magicrl.verifiers.code.judge import CodeOptions, CodeVerdict
from magicrl.verifiers.code.pool import CodePool
from magicrl.verifiers.feeder import Ticket

_IN_FLIGHT_PER_WORKER = 16
_BESIDE = ("checker", "time_limit", "memory_limit_mb", "float_tolerance", "in_place", "interactive")
"""Fields that may stand beside ``tests`` as well as inside."""


@dataclass(frozen=True, slots=True)
class _Line:
    id: Any
    text: str
    program: bool
    tests: str


def verify_code_file(
    input: Path, output: Path, *, options: CodeOptions | None = None, workers: int = 1, explain: bool = False
) -> BatchSummary:
    """Judge every line ``{"id"?, "response" | "program", "tests": {...}}`` of ``input``.

    Writes ``{"id", "correct", "status", "passed", "total", "seconds"}`` a line to ``output``, which appears whole
    when all are judged (until then ``<output>.part`` grows). A line without an id gets its line number.

    Args:
        explain: add ``reason``, a sentence for a person.

    Raises:
        ValueError: a malformed line (names file, line and field), or input and output are the same file.
        OSError: a file cannot be read or written.
        SandboxError: this machine cannot isolate programs; says why.
    """
    if output.exists() and output.samefile(input):
        raise ValueError(f"output {output} is the input file; choose another")
    for _ in _lines(input):
        pass
    start = time.perf_counter()
    statuses: Counter[str] = Counter()
    outcomes: Counter[Outcome] = Counter()
    part = output.with_name(output.name + ".part")
    with CodePool(options, workers=workers) as pool, part.open("w", encoding="utf-8") as file:
        pool.warm_up()
        for verdict in _judged(_lines(input), pool, workers * _IN_FLIGHT_PER_WORKER, file, explain):
            statuses[verdict.status] += 1
            outcomes[verdict.outcome] += 1
    part.replace(output)
    return BatchSummary(
        total=outcomes.total(),
        correct=outcomes[Outcome.CORRECT],
        wrong=outcomes[Outcome.WRONG],
        not_judged=outcomes[Outcome.NOT_JUDGED],
        statuses=dict(statuses.most_common()),
        seconds=time.perf_counter() - start,
    )


def _judged(lines: Iterator[_Line], pool: CodePool, most: int, file: TextIO, explain: bool) -> Iterator[CodeVerdict]:
    waiting: deque[tuple[_Line, Ticket]] = deque()

    def finish() -> CodeVerdict:
        line, ticket = waiting.popleft()
        (verdict,) = pool.result(ticket)
        file.write(json.dumps(_row(line, verdict, explain)) + "\n")
        file.flush()
        return verdict

    for line in lines:
        problem = Problem(id=str(line.id), prompt="", golds=(line.tests,), verifier="code", source="file")
        submit = pool.submit_programs if line.program else pool.submit
        waiting.append((line, submit(problem, [line.text])))
        if len(waiting) >= most:
            yield finish()
    while waiting:
        yield finish()


def _row(line: _Line, verdict: CodeVerdict, explain: bool) -> dict[str, Any]:
    row: dict[str, Any] = {
        "id": line.id,
        "correct": verdict.correct,
        "status": verdict.status,
        "passed": verdict.passed,
        "total": verdict.total,
        "seconds": round(verdict.seconds, 4),
    }
    return {**row, "reason": verdict.reason} if explain else row


def _lines(path: Path) -> Iterator[_Line]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if raw.strip():
                yield _parse(raw, number, f"{path}:{number}")


def _parse(raw: bytes, number: int, where: str) -> _Line:
    try:
        row = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected an object, got {type(row).__name__}")
    given = [name for name in ("program", "response") if row.get(name) is not None]
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
    beside = {name: row[name] for name in _BESIDE if row.get(name) is not None}
    return _Line(row.get("id", number), text, given[0] == "program", json.dumps({**beside, **tests}))
