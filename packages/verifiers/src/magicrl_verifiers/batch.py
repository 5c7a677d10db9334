"""Judging a file of answers: the engine of ``magicrl verify``, and all of it but programs in their own form.

JSON Lines in, JSON Lines out, in the same order, one line each: a line that cannot be read gets its own, too, with the
status ``broken_line`` and the reason.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from magicrl_verifiers.judge_settings import JudgeSettings
from magicrl_verifiers.pool import Ticket
from magicrl_verifiers.records import JudgeOptions, Outcome, Problem, Verdict, VerifierService
from magicrl_verifiers.service import VerifierPool
from magicrl_verifiers.table import VerifierSpec, verifier_spec

_IN_FLIGHT_PER_WORKER = 32
BROKEN_LINE = "broken_line"
"""Status of a line that cannot be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSummary:
    """What a batch came to.

    Attributes:
        total: the lines of the output.
        correct, wrong, not_judged: of these. Not judged: a line or a reference answer that cannot be read, a worker
        lost twice.
        score: mean of the graded rewards; None without any.
        broken: what is wrong with the lines that cannot be read, each with its file, line and field.
        statuses: answers by the verifier's own word.
        seconds: wall-clock seconds of the whole batch.
    """

    total: int
    correct: int
    wrong: int
    not_judged: int
    score: float | None
    broken: tuple[str, ...]
    statuses: Mapping[str, int]
    seconds: float


@dataclass(frozen=True, slots=True)
class Line:
    """A problem of the input and the text to judge; ``bare``: the text is the answer itself."""

    problem: Problem
    text: str
    bare: bool = False


Parse = Callable[[dict[str, Any], Any, str], Line]
"""An input line from (object, its id, place for messages); raises ValueError."""


Tell = Callable[[int, int], None]
"""Who is told how many of how many lines are judged."""


def untold(done: int, total: int) -> None:
    """Nobody is told."""


def judge_file(
    input: Path,
    output: Path,
    pool: VerifierService,
    *,
    parse: Parse,
    row: Callable[[Any], dict[str, Any]],
    submit: Callable[[Line], Ticket],
    workers: int,
    tell: Tell = untold,
) -> BatchSummary:
    """Judge every line of ``input`` with a pool that is warm; ``output`` appears whole when all are judged.

    Until then ``<output>.part`` grows. Blank lines are skipped. `check_file` comes first. ``row`` gives the fields of
    an output line after its id, also for the plain verdict on a line that cannot be read.
    """
    start = time.perf_counter()
    statuses: Counter[str] = Counter()
    outcomes: Counter[Outcome] = Counter()
    broken: list[str] = []
    scores: list[float] = []
    part = output.with_name(output.name + ".part")
    lines = count_lines(input)
    waiting: deque[tuple[Any, Ticket | ValueError]] = deque()

    def finish(file: TextIO) -> None:
        name, found = waiting.popleft()
        if isinstance(found, ValueError):
            broken.append(str(found))
            verdict = Verdict(outcome=Outcome.NOT_JUDGED, status=BROKEN_LINE, reason=str(found))
            told = {"id": name, **row(verdict), "reason": verdict.reason}
        else:
            (verdict,) = pool.result(found)
            told = {"id": name, **row(verdict)}
        file.write(json.dumps(told) + "\n")
        file.flush()
        statuses[verdict.status] += 1
        outcomes[verdict.outcome] += 1
        scores.extend([] if verdict.score is None else [verdict.score])
        tell(outcomes.total(), lines)

    with part.open("w", encoding="utf-8") as file:
        for name, place, found in _objects(input):
            try:
                line = found if isinstance(found, ValueError) else parse(found, name, place)
            except ValueError as error:
                line = error
            waiting.append((name, line if isinstance(line, ValueError) else submit(line)))
            # enough to keep the workers busy; a file of millions of lines is not in memory
            if len(waiting) >= workers * _IN_FLIGHT_PER_WORKER:
                finish(file)
        while waiting:
            finish(file)
    # only a whole output has its name: a run that was killed leaves the part file
    part.replace(output)
    return BatchSummary(
        total=outcomes.total(),
        correct=outcomes[Outcome.CORRECT],
        wrong=outcomes[Outcome.WRONG],
        not_judged=outcomes[Outcome.NOT_JUDGED],
        score=sum(scores) / len(scores) if scores else None,
        broken=tuple(broken),
        statuses=dict(statuses.most_common()),
        seconds=time.perf_counter() - start,
    )


def count_lines(path: Path) -> int:
    """Lines that are not blank."""
    with path.open("rb") as file:
        return sum(bool(raw.strip()) for raw in file)


def check_file(input: Path, output: Path) -> None:
    """Refuse what no work should be spent on.

    Raises:
        ValueError: there is no line in the input, or input and output are the same file.
        OSError: the input cannot be read.
    """
    # before anything is judged: the input would be overwritten at the end of a long run
    if output.exists() and output.samefile(input):
        raise ValueError(f"output {output} is the input file; choose another")
    with input.open("rb") as file:
        empty = not any(raw.strip() for raw in file)
    if empty:
        raise ValueError(f"{input}: the file holds no line to judge; give one JSON object a line")


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
    reward ``score`` and ``metrics``, too. A line without an id gets its line number. A reward of the user's needs no
    reference answer, and finds further fields in ``problem.extra``.

    Args:
        verifier: a built-in one, or a reward of the user's as `magicrl.registry` finds it.
        workers: worker processes; default: the cores this process may use.
        judge: settings of the verifier ``judge``.
        tell: called with the lines that are judged, and all.

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
        return judge_file(
            input,
            output,
            pool,
            parse=partial(_parse, spec),
            row=_row,
            submit=lambda line: pool.submit(line.problem, [line.text]),
            workers=count,
            tell=tell,
        )


def verify_rows(
    rows: Sequence[Mapping[str, Any]],
    *,
    verifier: str,
    options: JudgeOptions,
    workers: int,
    time_limit: float,
    memory_limit_mb: int,
) -> list[Verdict]:
    """The verdicts of rows as `verify_file` has them on its lines, in their order.

    Raises:
        ValueError: an unknown verifier, or a row that cannot be read; nothing was judged.
        RuntimeError: the verifier cannot be started.
    """
    spec = verifier_spec(verifier)
    lines = [_parse(spec, dict(row), row.get("id", n), f"record {n}") for n, row in enumerate(rows)]
    with VerifierPool(options=options, workers=workers, time_limit=time_limit, memory_limit_mb=memory_limit_mb) as pool:
        tickets = [pool.submit(line.problem, [line.text]) for line in lines]
        return [pool.result(ticket)[0] for ticket in tickets]


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _objects(path: Path) -> Iterator[tuple[Any, str, dict[str, Any] | ValueError]]:
    """Id (else number), place and object of every line that is not blank; what is wrong with one that is no object."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            place, name = f"{path}:{number}", number
            try:
                found = json.loads(raw.decode("utf-8"))
                if isinstance(found, dict):
                    name = found.get("id", number)
                else:
                    found = ValueError(f"{place}: expected an object, got {type(found).__name__}")
            except UnicodeDecodeError as error:
                found = ValueError(f"{place}: not UTF-8 at byte {error.start}")
            except (ValueError, RecursionError) as error:
                found = ValueError(f"{place}: not JSON: {error}")
            yield name, place, found


def objects(path: Path) -> Iterator[tuple[dict[str, Any], Any, str]]:
    """The objects of a JSON Lines file, each with its id (its line's number if it has none) and its place.

    Blank lines are skipped.

    Raises:
        ValueError: a line that is no JSON object (names file and line).
        OSError: the file cannot be read.
    """
    for name, place, found in _objects(path):
        if isinstance(found, ValueError):
            raise found
        yield found, name, place


def _parse(spec: VerifierSpec, row: dict[str, Any], name: Any, where: str) -> Line:
    if "gold" in row:  # the field's name before 0.2
        row = {"reference": row["gold"]} | {field: value for field, value in row.items() if field != "gold"}
    for field in ("reference", "response") if spec.needs_reference else ("response",):
        if field not in row:
            raise ValueError(f"{where}: field {field!r} is missing")
    reference, prompt, response = row.get("reference"), row.get("prompt", ""), row["response"]
    references = [reference] if isinstance(reference, str) else reference if "reference" in row else []
    empty = not references and "reference" in row
    if (
        empty
        or not isinstance(references, list | tuple)
        or not all(isinstance(one, str) and one.strip() for one in references)
    ):
        raise ValueError(
            f"{where}: field 'reference' must be a string or a list of strings, none empty, got {reference!r:.60}"
        )
    for field, text in (("prompt", prompt), ("response", response)):
        if not isinstance(text, str):
            raise ValueError(f"{where}: field {field!r} must be a string, got {text!r:.60}")
    extra = {field: value for field, value in row.items() if field not in ("id", "prompt", "reference", "response")}
    problem = Problem(
        id=str(name), prompt=prompt, references=tuple(references), verifier=spec.name, source="file", extra=extra
    )
    return Line(problem, response)


def _row(verdict: Verdict) -> dict[str, Any]:
    graded = {} if verdict.score is None else {"score": verdict.score, "metrics": dict(verdict.metrics)}
    return {
        "correct": verdict.correct,
        "status": verdict.status,
        "extracted": verdict.extracted,
        "decided_by": verdict.decided_by,
        "seconds": round(verdict.seconds, 4),
        **graded,
        **({"reason": verdict.reason} if verdict.status == "reward_failed" else {}),
    }
