"""Judging a file of answers: the engine of ``magicrl verify math``.

JSON Lines in, JSON Lines out, in the same order, one line each. Every input line is checked before the first
answer is judged, so that a malformed line costs no work and leaves no half-written output.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from magicrl.records import Outcome, Problem, Verdict
from magicrl.verifiers.base import JudgeOptions
from magicrl.verifiers.feeder import Ticket
from magicrl.verifiers.pool import VerifierPool

_IN_FLIGHT_PER_WORKER = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSummary:
    """What a batch came to.

    Attributes:
        total: answers judged; the lines of the output.
        correct: of these, right.
        wrong: of these, wrong.
        not_judged: of these, not judged (a gold that cannot be read, a worker lost twice).
        statuses: answers by the verifier's own word.
        seconds: wall-clock seconds of the whole batch.
    """

    total: int
    correct: int
    wrong: int
    not_judged: int
    statuses: Mapping[str, int]
    seconds: float


@dataclass(frozen=True, slots=True)
class _Line:
    id: Any
    golds: tuple[str, ...]
    response: str


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

    Writes ``{"id", "correct", "status", "extracted", "decided_by", "seconds"}`` a line to ``output``, which
    appears whole when all are judged (until then ``<output>.part`` grows). A line without an id gets its line
    number; blank lines are skipped.

    Args:
        workers: worker processes; default: the cores this process may use.

    Raises:
        ValueError: a malformed line (names file, line and field), or input and output are the same file.
        OSError: a file cannot be read or written.
        RuntimeError: the verifier cannot be started.
    """
    if output.exists() and output.samefile(input):
        raise ValueError(f"output {output} is the input file; choose another")
    for _ in _lines(input):
        pass
    start = time.perf_counter()
    count = workers if workers is not None else _usable_cores()
    statuses: Counter[str] = Counter()
    outcomes: Counter[Outcome] = Counter()
    part = output.with_name(output.name + ".part")
    with (
        VerifierPool(options=options, workers=count, time_limit=time_limit, memory_limit_mb=memory_limit_mb) as pool,
        part.open("w", encoding="utf-8") as file,
    ):
        pool.warm_up()
        for verdict in _judged(_lines(input), pool, count * _IN_FLIGHT_PER_WORKER, file):
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


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _judged(lines: Iterator[_Line], pool: VerifierPool, most: int, file: TextIO) -> Iterator[Verdict]:
    """Judge with at most ``most`` answers in flight, write the results in order, yield their verdicts."""
    waiting: deque[tuple[_Line, Ticket]] = deque()

    def finish() -> Verdict:
        line, ticket = waiting.popleft()
        (verdict,) = pool.result(ticket)
        file.write(json.dumps(_row(line, verdict)) + "\n")
        file.flush()
        return verdict

    for line in lines:
        problem = Problem(id=str(line.id), prompt="", golds=line.golds, verifier="maths", source="file")
        waiting.append((line, pool.submit(problem, [line.response])))
        if len(waiting) >= most:
            yield finish()
    while waiting:
        yield finish()


def _row(line: _Line, verdict: Verdict) -> dict[str, Any]:
    return {
        "id": line.id,
        "correct": verdict.correct,
        "status": verdict.status,
        "extracted": verdict.extracted,
        "decided_by": verdict.decided_by,
        "seconds": round(verdict.seconds, 4),
    }


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
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected an object, got {type(row).__name__}")
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
    return _Line(row.get("id", number), tuple(golds), response)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
