"""Judging a file of answers: the engine of ``magicrl verify``, and its half for maths.

JSON Lines in, JSON Lines out, in the same order, one line each: a line that cannot be read gets its own, too, with the
status ``broken_line`` and the reason.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from magicrl.records import Outcome, Problem, Verdict
from magicrl.verifiers.base import JudgeOptions, VerifierService
from magicrl.verifiers.pool import Ticket, VerifierPool

_IN_FLIGHT_PER_WORKER = 32
BROKEN_LINE = "broken_line"
"""Status of a line that cannot be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSummary:
    """What a batch came to.

    Attributes:
        total: the lines of the output.
        correct: of these, right.
        wrong: of these, wrong.
        not_judged: of these, not judged (a line or a gold that cannot be read, a worker lost twice).
        broken: what is wrong with the lines that cannot be read, each with its file, line and field.
        statuses: answers by the verifier's own word.
        seconds: wall-clock seconds of the whole batch.
    """

    total: int
    correct: int
    wrong: int
    not_judged: int
    broken: tuple[str, ...]
    statuses: Mapping[str, int]
    seconds: float


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the input: its id (its number if it has none), its problem and the text to judge.

    ``bare``: the text is the answer itself, nothing has to be extracted.
    """

    id: Any
    problem: Problem
    text: str
    bare: bool = False


@dataclass(frozen=True, slots=True)
class BrokenLine:
    """A line of the input that cannot be read: its id (its number if it has none), and why."""

    id: Any
    reason: str


Parse = Callable[[dict[str, Any], Any, str], Line]
"""An input line from (object, its id, place for messages); raises ValueError."""


def judge_file(
    input: Path,
    output: Path,
    pool: VerifierService,
    *,
    parse: Parse,
    row: Callable[[Any], dict[str, Any]],
    submit: Callable[[Line], Ticket],
    workers: int,
) -> BatchSummary:
    """Judge every line of ``input`` with a pool that is warm; ``output`` appears whole when all are judged.

    Until then ``<output>.part`` grows. Blank lines are skipped. `check_file` comes first. ``row`` gives the fields of
    an output line after its id, also for the plain verdict on a line that cannot be read.
    """
    start = time.perf_counter()
    statuses: Counter[str] = Counter()
    outcomes: Counter[Outcome] = Counter()
    broken: list[str] = []
    part = output.with_name(output.name + ".part")
    waiting: deque[tuple[Line, Ticket] | BrokenLine] = deque()

    def finish(file: TextIO) -> None:
        first = waiting.popleft()
        if isinstance(first, BrokenLine):
            verdict = Verdict(outcome=Outcome.NOT_JUDGED, status=BROKEN_LINE, reason=first.reason)
            told = {"id": first.id, **row(verdict), "reason": first.reason}
            broken.append(first.reason)
        else:
            line, ticket = first
            (verdict,) = pool.result(ticket)
            told = {"id": line.id, **row(verdict)}
        file.write(json.dumps(told) + "\n")
        file.flush()
        statuses[verdict.status] += 1
        outcomes[verdict.outcome] += 1

    with part.open("w", encoding="utf-8") as file:
        for line in _lines(input, parse):
            waiting.append(line if isinstance(line, BrokenLine) else (line, submit(line)))
            if len(waiting) >= workers * _IN_FLIGHT_PER_WORKER:
                finish(file)
        while waiting:
            finish(file)
    part.replace(output)
    return BatchSummary(
        total=outcomes.total(),
        correct=outcomes[Outcome.CORRECT],
        wrong=outcomes[Outcome.WRONG],
        not_judged=outcomes[Outcome.NOT_JUDGED],
        broken=tuple(broken),
        statuses=dict(statuses.most_common()),
        seconds=time.perf_counter() - start,
    )


def check_file(input: Path, output: Path) -> None:
    """Refuse what no work should be spent on.

    Raises:
        ValueError: there is no line in the input, or input and output are the same file.
        OSError: the input cannot be read.
    """
    if output.exists() and output.samefile(input):
        raise ValueError(f"output {output} is the input file; choose another")
    with input.open("rb") as file:
        if not any(raw.strip() for raw in file):
            raise ValueError(f"{input}: the file holds no line to judge; give one JSON object a line")


def verify_math_file(
    input: Path,
    output: Path,
    *,
    options: JudgeOptions | None = None,
    workers: int | None = None,
    time_limit: float = 2.0,
    memory_limit_mb: int = 4096,
) -> BatchSummary:
    """Judge every line ``{"id"?, "gold": str|[str], "response": str}`` of ``input``.

    Writes ``{"id", "correct", "status", "extracted", "decided_by", "seconds"}`` a line to ``output``. A line without
    an id gets its line number.

    Args:
        workers: worker processes; default: the cores this process may use.

    Raises:
        ValueError: an empty input, or input and output are the same file.
        OSError: a file cannot be read or written.
        RuntimeError: the verifier cannot be started.
    """
    check_file(input, output)
    count = workers if workers is not None else _usable_cores()
    with VerifierPool(options=options, workers=count, time_limit=time_limit, memory_limit_mb=memory_limit_mb) as pool:
        pool.warm_up()
        return judge_file(
            input,
            output,
            pool,
            parse=_parse_maths,
            row=_maths_row,
            submit=lambda line: pool.submit(line.problem, [line.text]),
            workers=count,
        )


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _lines(path: Path, parse: Parse) -> Iterator[Line | BrokenLine]:
    for number, where, raw in _raw_lines(path):
        name: Any = number
        try:
            row = _object(raw, where)
            name = row.get("id", number)
            yield parse(row, name, where)
        except ValueError as error:
            yield BrokenLine(name, str(error))


def _raw_lines(path: Path) -> Iterator[tuple[int, str, bytes]]:
    """Number, place and bytes of every line that is not blank."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if raw.strip():
                yield number, f"{path}:{number}", raw


def objects(path: Path) -> Iterator[tuple[dict[str, Any], Any, str]]:
    """The objects of a JSON Lines file, each with its id (its line's number if it has none) and its place.

    Blank lines are skipped.

    Raises:
        ValueError: a line that is no JSON object (names file and line).
        OSError: the file cannot be read.
    """
    for number, where, raw in _raw_lines(path):
        row = _object(raw, where)
        yield row, row.get("id", number), where


def _object(raw: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected an object, got {type(row).__name__}")
    return row


def _parse_maths(row: dict[str, Any], name: Any, where: str) -> Line:
    for field in ("gold", "response"):
        if field not in row:
            raise ValueError(f"{where}: field {field!r} is missing")
    gold, response = row["gold"], row["response"]
    golds = [gold] if isinstance(gold, str) else gold
    if not isinstance(golds, list) or not golds:
        raise ValueError(f"{where}: field 'gold' must be a string or a list of strings, got {_shown(gold)}")
    for one in golds:
        if not isinstance(one, str) or not one.strip():
            raise ValueError(f"{where}: field 'gold' must hold strings that are not empty, got {_shown(one)}")
    if not isinstance(response, str):
        raise ValueError(f"{where}: field 'response' must be a string, got {_shown(response)}")
    problem = Problem(id=str(name), prompt="", golds=tuple(golds), verifier="maths", source="file")
    return Line(name, problem, response)


def _maths_row(verdict: Verdict) -> dict[str, Any]:
    return {
        "correct": verdict.correct,
        "status": verdict.status,
        "extracted": verdict.extracted,
        "decided_by": verdict.decided_by,
        "seconds": round(verdict.seconds, 4),
    }


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
