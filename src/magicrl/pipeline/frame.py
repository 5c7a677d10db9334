"""What a step is, and how one is run: only the parts that are missing, in one process or several."""

from __future__ import annotations

import json
import multiprocessing
import signal
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np
import pyarrow as pa

from magicrl.evaluation.provenance import now
from magicrl.files import write_atomically
from magicrl.pipeline.entry import DROPPED_SCHEMA, SCHEMA, Entry, entries_of, table_of
from magicrl.pipeline.parts import Part, StepFolder, hash_of, read_part, told_when_full
from magicrl.pipeline.pipeline_schema import PipelineConfig
from magicrl.verifiers.code import kernel


@dataclass(frozen=True, slots=True)
class Drop:
    """A row that does not go on: a reason that can be counted, and the particulars."""

    reason: str
    detail: str = ""


Decision = Drop | Entry | None
"""Of one row: dropped, kept with changes, or kept as it is."""
Decide = Callable[[pa.Table], Sequence[Decision]]
"""Decisions on the rows of a part (a table of ``SCHEMA``), in order."""


class Watcher(Protocol):
    """Who is told how a pipeline goes. It only listens."""

    def step(self, name: str, parts: int, missing: int) -> None:
        """A step begins; ``missing`` of its parts must be made."""
        ...

    def progress(self, name: str, done: int, total: int, unit: str) -> None:
        """So much of a step is done."""
        ...

    def note(self, text: str) -> None:
        """Something a person should know."""
        ...


class Silent:
    """A watcher that says nothing."""

    def step(self, name: str, parts: int, missing: int) -> None:
        return None

    def progress(self, name: str, done: int, total: int, unit: str) -> None:
        return None

    def note(self, text: str) -> None:
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """What a step may use.

    Attributes:
        output: the run folder.
        workers: processes.
        max_field_characters: of a record's field.
        watcher: told how it goes.
    """

    output: Path
    workers: int
    max_field_characters: int
    watcher: Watcher


S = TypeVar("S")


class Step(ABC, Generic[S]):
    """A step: decides row by row, after a look at all rows where it is ``whole``.

    Attributes:
        use: its kind.
        version: of its code; a change that changes results raises it, and then its parts are made anew.
        whole: its decisions depend on all parts together.
        parallel: parts may be decided in several processes, each with a ``Decide`` of its own.
    """

    use: str
    version = 1
    whole = True
    parallel = False

    def __init__(self, settings: S, config: PipelineConfig) -> None:
        self._settings = settings
        self._config = config

    @abstractmethod
    def identity(self, context: Context) -> Any:
        """All settings and files that its decisions depend on, for the key of its parts."""

    def prepare(self, parts: Sequence[Part], folder: StepFolder, key: str, context: Context) -> None:
        """Look at all rows and leave what was found in ``folder.work``; goes on where a kill stopped it.

        ``key`` says what it is made from: work with another key does not count.
        """

    @contextmanager
    def open(self, folder: StepFolder, context: Context) -> Generator[Decide]:
        """What decides on parts, after ``prepare``."""
        yield self.decide(folder)

    def decide(self, folder: StepFolder) -> Decide:
        """For steps that hold nothing open while they decide."""
        raise NotImplementedError

    def finish(self, parts: Sequence[Part], folder: StepFolder, context: Context) -> None:
        """Write what the step tells beside its rows (reports, tables), from its finished parts."""


def by_id(one: Callable[[str], Decision]) -> Decide:
    """Decisions that follow from a row's id."""

    def decide(table: pa.Table) -> list[Decision]:
        return [one(name) for name in table.column("id").to_pylist()]

    return decide


def by_entry(one: Callable[[Entry], Decision]) -> Decide:
    """Decisions on whole entries."""

    def decide(table: pa.Table) -> list[Decision]:
        return [one(entry) for entry in entries_of(table)]

    return decide


def run_step(step: Step[Any], name: str, parts: Sequence[Part], context: Context) -> list[Part]:
    """The step's kept parts, made where they are missing.

    Args:
        step: decides.
        name: of its folder in ``context.output``.
        parts: the kept parts of the step before.
        context: where and how.

    Raises:
        ValueError: a part cannot be read or written; what is finished is kept.
    """
    folder = StepFolder(context.output / name)
    own = hash_of(step.use, step.version, step.identity(context), [part.key for part in parts] if step.whole else None)
    made = [folder.part(part.name, hash_of(own, part.key)) for part in parts]
    missing = [(part, new) for part, new in zip(parts, made, strict=True) if not folder.has(new.name, new.key)]
    context.watcher.step(name, len(parts), len(missing))
    with told_when_full(folder.path):
        _run(step, name, parts, made, missing, folder, own, context)
    return made


def _run(
    step: Step[Any],
    name: str,
    parts: Sequence[Part],
    made: Sequence[Part],
    missing: Sequence[tuple[Part, Part]],
    folder: StepFolder,
    own: str,
    context: Context,
) -> None:
    """Make what is missing, and the step's own reports."""
    began = time.monotonic()
    if missing:
        (folder.path / "work").mkdir(parents=True, exist_ok=True)
        step.prepare(parts, folder, own, context)
        for done, _ in enumerate(_make(step, name, missing, folder, context), start=1 + len(parts) - len(missing)):
            context.watcher.progress(name, done, len(parts), "parts")
    folder.clear_except([part.name for part in made])
    recorded = _recorded(folder)
    if missing or recorded.get("key") != own or recorded.get("inputs") != keys_of(parts):
        step.finish(made, folder, context)
        _summarise(step, name, own, folder, (parts, made), time.monotonic() - began, context)


def _make(
    step: Step[Any], name: str, missing: Sequence[tuple[Part, Part]], folder: StepFolder, context: Context
) -> Iterator[None]:
    """Make the missing parts; yields after each."""
    workers = min(context.workers, len(missing))
    if not step.parallel or workers == 1:
        with step.open(folder, context) as decide:
            for part, new in missing:
                _make_part(decide, name, part, new, folder)
                yield
        return
    alone = replace(context, watcher=Silent(), workers=1)
    pool = ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("spawn"), initializer=_start, initargs=(step, folder, alone)
    )
    waiting: set[Future[None]] = set()
    try:
        for part, new in missing:
            if len(waiting) >= 2 * workers:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
            waiting.add(pool.submit(_in_worker, name, part, new, folder))
        for future in waiting:
            yield future.result()
    except BrokenProcessPool:
        raise ValueError(
            f"step {name}: a worker process died (out of memory, or killed); what is finished is kept, run the same "
            "command again, with fewer workers if memory was short"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def start_worker() -> None:
    """In a worker process: die with the main process, however that dies, and leave Ctrl-C to it."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


_decide: list[Decide] = []


def _start(step: Step[Any], folder: StepFolder, context: Context) -> None:
    """In a worker process: open the step once."""
    start_worker()
    stack = ExitStack()
    _decide.append(stack.enter_context(step.open(folder, context)))
    Finalize(None, stack.close, exitpriority=10)  # a worker process runs no atexit handlers


def _in_worker(name: str, part: Part, new: Part, folder: StepFolder) -> None:
    _make_part(_decide[0], name, part, new, folder)


def _make_part(decide: Decide, name: str, part: Part, new: Part, folder: StepFolder) -> None:
    table = read_part(part.path).select(SCHEMA.names).cast(SCHEMA)
    decisions = decide(table) if table.num_rows else []
    assert len(decisions) == table.num_rows, (name, len(decisions), table.num_rows)
    kept, dropped = split(table, decisions, name)
    folder.write(new.name, new.key, kept, dropped)


def split(table: pa.Table, decisions: Sequence[Decision], step: str) -> tuple[pa.Table, pa.Table]:
    """Kept and dropped rows of a part, each in order; together they are all of its rows."""
    drops = [(index, one) for index, one in enumerate(decisions) if isinstance(one, Drop)]
    changed = [one for one in decisions if isinstance(one, Entry)]
    gone = {index for index, _ in drops}
    if changed:
        both = pa.concat_tables([table, table_of(changed)])
        place = iter(range(table.num_rows, both.num_rows))
        wanted = [
            next(place) if isinstance(one, Entry) else index for index, one in enumerate(decisions) if index not in gone
        ]
        kept = both.take(pa.array(wanted, pa.int64()))
    else:
        mask = np.ones(table.num_rows, dtype=bool)
        mask[sorted(gone)] = False
        kept = table.filter(pa.array(mask))
    rows = table.take(pa.array([index for index, _ in drops], pa.int64()))
    columns: dict[str, Any] = {
        "step": [step] * len(drops),
        "reason": [drop.reason for _, drop in drops],
        "detail": [drop.detail for _, drop in drops],
    }
    for column, values in columns.items():
        rows = rows.append_column(column, pa.array(values, pa.string()))
    return kept.combine_chunks(), rows.combine_chunks().cast(DROPPED_SCHEMA)


def keys_of(parts: Sequence[Part]) -> str:
    """What stands for these parts together: a step that read others is of another run of the pipeline."""
    return hash_of([part.key for part in parts])


def _recorded(folder: StepFolder) -> dict[str, Any]:
    try:
        return cast("dict[str, Any]", json.loads(folder.summary.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _summarise(
    step: Step[Any],
    name: str,
    key: str,
    folder: StepFolder,
    parts: tuple[Sequence[Part], Sequence[Part]],
    seconds: float,
    context: Context,
) -> None:
    """``step.json``: what went in, stayed and was dropped, by source and reason, counted from the rows themselves."""
    counts = count_rows(folder)
    read, made = parts
    entered = sum(read_part(part.path, ["source"]).num_rows for part in read)
    counted = sum(one["in"] for one in counts.values())
    assert entered == counted, f"{name}: {entered} rows went in, {counted} are accounted for"
    document = {
        "schema_version": 1,
        "step": name,
        "use": step.use,
        "version": step.version,
        "key": key,
        "inputs": keys_of(read),
        "made": keys_of(made),
        "settings": step.identity(context),
        "sources": counts,
        "seconds": round(seconds, 3),
        "finished": now(),
    }
    write_atomically(folder.summary, json.dumps(document, indent=1, default=str))


def count_rows(folder: StepFolder) -> dict[str, dict[str, Any]]:
    """By source: rows that went in, were kept, and were dropped by reason."""
    kept: Counter[str] = Counter()
    dropped: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for table in folder.kept_tables(["source"]):
        for source, count in counted(table, ["source"]):
            kept[source] += count
    for table in folder.dropped_tables(["source", "reason"]):
        for source, reason, count in counted(table, ["source", "reason"]):
            dropped[source][reason] += count
    return {
        source: {
            "in": kept[source] + dropped[source].total(),
            "kept": kept[source],
            "dropped": dict(sorted(dropped[source].items())),
        }
        for source in sorted({*kept, *dropped})
    }


def counted(table: pa.Table, columns: Sequence[str]) -> list[tuple[Any, ...]]:
    """Each combination of values of the columns with its number of rows."""
    grouped = table.group_by(list(columns)).aggregate([([], "count_all")]).to_pydict()
    return list(zip(*(grouped[name] for name in (*columns, "count_all")), strict=True))
