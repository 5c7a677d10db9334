"""What a step is, and how one is run: only the parts that are missing, in one process or several."""

from __future__ import annotations

import json
import multiprocessing
import signal
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Generic, TypeVar

import pyarrow as pa

from magicrl.evaluation.provenance import now
from magicrl.files import write_atomically
from magicrl.pipeline.entry import DROPPED_SCHEMA, SCHEMA, Entry, entries_of, table_of
from magicrl.pipeline.parts import Part, StepFolder, hash_of, read_part, told_when_full
from magicrl.pipeline.pipeline_schema import PipelineConfig
from magicrl_verifiers.code import kernel


@dataclass(frozen=True, slots=True)
class Drop:
    """A row that does not go on: a reason that can be counted, and the particulars."""

    reason: str
    detail: str = ""


Decision = Drop | Entry | None
"""Of one row: dropped, kept with changes, or kept as it is."""
Decide = Callable[[pa.Table], Sequence[Decision]]
"""Decisions on the rows of a part (a table of ``SCHEMA``), in order."""


class Watcher:
    """Who is told how a pipeline goes. It only listens; this one says nothing."""

    def step(self, name: str, parts: int, missing: int) -> None:
        """A step begins; ``missing`` of its parts must be made."""

    def progress(self, name: str, done: int, total: int, unit: str) -> None:
        """So much of a step is done."""

    def note(self, text: str) -> None:
        """Something a person should know."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """What a step may use."""

    output: Path  # the run folder
    workers: int  # processes
    max_field_characters: int  # of a record
    watcher: Watcher


S = TypeVar("S")
R = TypeVar("R")


class Step(ABC, Generic[S]):
    """A step: decides row by row, after a look at all rows where it is ``whole``."""

    use: str  # its kind
    version = 1  # of its code; a change that changes results raises it, and then its parts are made anew
    whole = True  # its decisions depend on all parts together
    parallel = False  # parts may be decided in several processes, each with a ``Decide`` of its own

    def __init__(self, settings: S, config: PipelineConfig) -> None:
        self._settings = settings
        self._config = config

    @abstractmethod
    def identity(self, context: Context) -> Any:
        """All settings and files that its decisions depend on, for the key of its parts."""

    def prepare(self, parts: Sequence[Part], folder: StepFolder, context: Context) -> None:
        """Look at all rows and leave what was found in ``folder.work``; goes on where a kill stopped it."""

    @contextmanager
    def open(self, folder: StepFolder, context: Context) -> Generator[Decide]:
        """What decides on parts, after ``prepare``."""
        yield self.decide(folder)

    def decide(self, folder: StepFolder) -> Decide:
        """For steps that hold nothing open while they decide; by default what ``write_drops`` left."""
        drops: dict[str, list[str]] = json.loads((folder.work / "drops.json").read_text(encoding="utf-8"))

        def decide(table: pa.Table) -> list[Decision]:
            return [Drop(*drops[name]) if name in drops else None for name in table.column("id").to_pylist()]

        return decide

    def finish(self, parts: Sequence[Part], folder: StepFolder, context: Context) -> None:
        """Write what the step tells beside its rows (reports, tables), from its finished parts."""


def write_drops(folder: StepFolder, drops: Mapping[str, Drop]) -> None:
    """Keep which rows go, by id, and why."""
    told = {name: [drop.reason, drop.detail] for name, drop in drops.items()}
    write_atomically(folder.work / "drops.json", json.dumps(told))


def by_entry(one: Callable[[Entry], Decision]) -> Decide:
    """Decisions on whole entries."""

    def decide(table: pa.Table) -> list[Decision]:
        return [one(entry) for entry in entries_of(table)]

    return decide


def run_step(step: Step[Any], name: str, parts: Sequence[Part], context: Context) -> list[Part]:
    """The step's kept parts in the folder ``name`` of the run, made from the kept ``parts`` of the step before.

    Raises:
        ValueError: a part cannot be read or written; what is finished is kept.
    """
    began = time.monotonic()
    folder = StepFolder(context.output / name)
    # a step that looks at all rows depends on every part; one that goes row by row on each part alone
    own = hash_of(step.use, step.version, step.identity(context), [part.key for part in parts] if step.whole else None)
    made = [folder.part(part.name, hash_of(own, part.key)) for part in parts]
    missing = [(part, new) for part, new in zip(parts, made, strict=True) if not folder.has(new)]
    context.watcher.step(name, len(parts), len(missing))
    with told_when_full(folder.path):
        if missing:
            folder.work.mkdir(parents=True, exist_ok=True)
            prepared = folder.work / "prepared.key"  # work of another key does not count
            if not (prepared.is_file() and prepared.read_text() == own):
                step.prepare(parts, folder, context)
                write_atomically(prepared, own)
            for done, _ in enumerate(_make(step, name, missing, folder, context), start=1 + len(parts) - len(missing)):
                context.watcher.progress(name, done, len(parts), "parts")
        folder.clear_except([part.name for part in made])  # a source that was taken out takes its parts with it
        # also when no part is missing: a source taken out changes the counts and makes none anew
        recorded = json.loads(folder.summary.read_text(encoding="utf-8")) if folder.summary.is_file() else {}
        if missing or recorded.get("key") != own or recorded.get("inputs") != _keys_of(parts):
            step.finish(made, folder, context)
            counts = count_rows(folder)
            # every row is kept or dropped, none is lost
            entered = sum(read_part(part.path, ["source"]).num_rows for part in parts)
            counted = sum(one["in"] for one in counts.values())
            assert entered == counted, f"{name}: {entered} rows went in, {counted} are accounted for"
            document = {
                "schema_version": 1,
                "step": name,
                "use": step.use,
                "version": step.version,
                "key": own,
                "inputs": _keys_of(parts),
                "made": _keys_of(made),
                "settings": step.identity(context),
                "sources": counts,
                "seconds": round(time.monotonic() - began, 3),
                "finished": now(),
            }
            write_atomically(folder.summary, json.dumps(document, indent=1, default=str))
    return made


def _make(
    step: Step[Any], name: str, missing: Sequence[tuple[Part, Part]], folder: StepFolder, context: Context
) -> Iterator[None]:
    """Make the missing parts; yields after each."""
    workers = min(context.workers, len(missing))
    jobs = ((name, part, new, folder) for part, new in missing)
    if step.parallel and workers > 1:
        # the processes are the parallelism: their verifiers get one worker each, and the watcher stays here
        alone = replace(context, watcher=Watcher(), workers=1)
        yield from in_processes(name, _in_worker, jobs, workers, _open_in_worker, (step, folder, alone))
        return
    with step.open(folder, context) as decide:
        for job in jobs:
            yield _make_part(decide, *job)


def in_processes(
    name: str,
    call: Callable[..., R],
    jobs: Iterable[tuple[Any, ...]],
    workers: int,
    start: Callable[..., None],
    startargs: tuple[Any, ...] = (),
) -> Iterator[R]:
    """``call(*job)`` for each job, in order, in several processes that each begin with ``start(*startargs)``."""
    waiting: deque[Future[R]] = deque()
    # no fork: this process may hold torch's threads
    method = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=method, initializer=start, initargs=startargs)
    try:
        for job in jobs:
            if len(waiting) >= 2 * workers:  # a job holds its argument and its result in memory
                yield waiting.popleft().result()
            waiting.append(pool.submit(call, *job))
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise ValueError(
            f"{name}: a worker process died (out of memory, or killed); what is finished is kept, run the same command "
            "again, with fewer workers if memory was short"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def start_worker() -> None:
    """In a worker process: die with the main process, however that dies, and leave Ctrl-C to it."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


_decide: list[Decide] = []


def _open_in_worker(step: Step[Any], folder: StepFolder, context: Context) -> None:
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
    folder.write(new, *split(table, decisions, name))


def split(table: pa.Table, decisions: Sequence[Decision], step: str) -> tuple[pa.Table, pa.Table]:
    """Kept and dropped rows of a part, each in order; together they are all of its rows."""
    # changed rows stand behind the old ones, so that one `take` puts all of them in order
    both = pa.concat_tables([table, table_of([one for one in decisions if isinstance(one, Entry)])])
    changed = iter(range(table.num_rows, both.num_rows))
    places = [next(changed) if isinstance(one, Entry) else place for place, one in enumerate(decisions)]
    gone = {place: one for place, one in enumerate(decisions) if isinstance(one, Drop)}
    kept = both.take(pa.array([place for number, place in enumerate(places) if number not in gone], pa.int64()))
    # dropped rows as they came, without what this step changed
    dropped = table.take(pa.array([*gone], pa.int64()))
    columns = {
        "step": [step] * len(gone),
        "reason": [drop.reason for drop in gone.values()],
        "detail": [drop.detail for drop in gone.values()],
    }
    for column, values in columns.items():
        dropped = dropped.append_column(column, pa.array(values, pa.string()))
    return kept.combine_chunks(), dropped.combine_chunks().cast(DROPPED_SCHEMA)


def _keys_of(parts: Sequence[Part]) -> str:
    """What stands for these parts together: a step that read others is of another run of the pipeline."""
    return hash_of([part.key for part in parts])


def count_rows(folder: StepFolder) -> dict[str, dict[str, Any]]:
    """By source: rows that went in, were kept, and were dropped by reason."""
    kept: Counter[str] = Counter()
    dropped: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for table in folder.tables("kept", ["source"]):
        for source, count in _counted(table, ["source"]):
            kept[source] += count
    for table in folder.tables("dropped", ["source", "reason"]):
        for source, reason, count in _counted(table, ["source", "reason"]):
            dropped[source][reason] += count
    return {
        source: {
            "in": kept[source] + dropped[source].total(),
            "kept": kept[source],
            "dropped": dict(sorted(dropped[source].items())),
        }
        for source in sorted({*kept, *dropped})
    }


def _counted(table: pa.Table, columns: list[str]) -> Iterable[tuple[Any, ...]]:
    """Each combination of values of the columns with its number of rows."""
    grouped = table.group_by(columns).aggregate([([], "count_all")]).to_pydict()
    return zip(*(grouped[name] for name in (*columns, "count_all")), strict=True)
