"""Base class of pipeline steps, and the function that runs a step on its missing parts in one or several processes."""

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
    """Why a row is dropped: a reason that reports count, and details."""

    reason: str
    detail: str = ""


Decision = Drop | Entry | None
"""Decision on a row: drop it, keep the changed entry, or keep it unchanged (None)."""
Decide = Callable[[pa.Table], Sequence[Decision]]
"""Function that returns a decision per row of a part (a table with the columns ``SCHEMA``), in order."""


class Watcher:
    """Receives progress events of a pipeline. This base class ignores them."""

    def step(self, name: str, parts: int, missing: int) -> None:
        """Report that a step begins and must compute ``missing`` of its parts."""

    def progress(self, name: str, done: int, total: int, unit: str) -> None:
        """Report the progress of a step."""

    def note(self, text: str) -> None:
        """Show a message to the user."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """Resources of a step."""

    output: Path  # run folder
    workers: int  # number of processes
    max_field_characters: int  # longest field of a record
    watcher: Watcher


S = TypeVar("S")
R = TypeVar("R")


class PipelineStep(ABC, Generic[S]):
    """A step of a pipeline, which keeps, changes or drops rows."""

    use: str  # kind of step, as in ``PIPELINE.toml``
    version = 1  # version of the code; raising it makes reruns compute the parts again
    whole = True  # decisions depend on all parts, not only on the row's own
    parallel = False  # parts may be decided in several processes, each with its own ``Decide``

    def __init__(self, settings: S, config: PipelineConfig) -> None:
        self._settings = settings
        self._config = config

    @abstractmethod
    def identity(self, context: Context) -> Any:
        """Return all settings and files that the decisions depend on. They are part of the key of each part."""

    def prepare(self, parts: Sequence[Part], folder: StepFolder, context: Context) -> None:
        """Read all rows and store results in ``folder.work``. After a kill, the next call continues there."""

    @contextmanager
    def open(self, folder: StepFolder, context: Context) -> Generator[Decide]:
        """Open the resources for decisions, after ``prepare``, and yield the function that decides."""
        yield self.decide(folder)

    def decide(self, folder: StepFolder) -> Decide:
        """Return the function that decides, by default from the drops that ``write_drops`` stored."""
        drops: dict[str, list[str]] = json.loads((folder.work / "drops.json").read_text(encoding="utf-8"))

        def decide(table: pa.Table) -> list[Decision]:
            return [Drop(*drops[name]) if name in drops else None for name in table.column("id").to_pylist()]

        return decide

    def finish(self, parts: Sequence[Part], folder: StepFolder, context: Context) -> None:
        """Write reports and tables from the finished parts."""

    def is_finished(self, context: Context) -> bool:
        """Return whether files that ``finish`` wrote outside the step's folder are still there."""
        return True


def write_drops(folder: StepFolder, drops: Mapping[str, Drop]) -> None:
    """Store which rows to drop, by id, and why."""
    told = {name: [drop.reason, drop.detail] for name, drop in drops.items()}
    write_atomically(folder.work / "drops.json", json.dumps(told))


def by_entry(one: Callable[[Entry], Decision]) -> Decide:
    """Return a ``Decide`` that calls ``one`` on each entry."""

    def decide(table: pa.Table) -> list[Decision]:
        return [one(entry) for entry in entries_of(table)]

    return decide


def run_step(step: PipelineStep[Any], name: str, parts: Sequence[Part], context: Context) -> list[Part]:
    """Run a step and return its kept parts, in the folder ``name`` of the run.

    Args:
        step: The step.
        name: Folder of the step within the run folder.
        parts: Kept parts of the previous step.
        context: Run folder and number of processes.

    Raises:
        ValueError: A part cannot be read or written. Finished parts are kept.
    """
    began = time.monotonic()
    folder = StepFolder(context.output / name)
    # a whole step depends on every part, a row-by-row step only on the part itself
    own = hash_of(step.use, step.version, step.identity(context), [part.key for part in parts] if step.whole else None)
    made = [folder.part(part.name, hash_of(own, part.key)) for part in parts]
    missing = [(part, new) for part, new in zip(parts, made, strict=True) if not folder.has(new)]
    context.watcher.step(name, len(parts), len(missing))
    with told_when_full(folder.path):
        if missing:
            folder.work.mkdir(parents=True, exist_ok=True)
            prepared = folder.work / "prepared.key"  # results of other settings must not be reused
            if not (prepared.is_file() and prepared.read_text() == own):
                step.prepare(parts, folder, context)
                write_atomically(prepared, own)
            folder.summary.unlink(missing_ok=True)  # it says that the step has finished
            for done, _ in enumerate(_make(step, name, missing, folder, context), start=1 + len(parts) - len(missing)):
                context.watcher.progress(name, done, len(parts), "parts")
        folder.clear_except([part.name for part in made])  # parts of a removed source are deleted
        # also if no part is missing: a removed source changes the counts but no other part
        recorded = json.loads(folder.summary.read_text(encoding="utf-8")) if folder.summary.is_file() else {}
        same = recorded.get("key") == own and recorded.get("inputs") == _keys_of(parts)
        if missing or not same or not step.is_finished(context):
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
    step: PipelineStep[Any], name: str, missing: Sequence[tuple[Part, Part]], folder: StepFolder, context: Context
) -> Iterator[None]:
    """Compute the missing parts, yielding after each."""
    workers = min(context.workers, len(missing))
    jobs = ((name, part, new, folder) for part, new in missing)
    if step.parallel and workers > 1:
        # one verifier worker per process is enough, and events are reported from this process
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
    """Yield ``call(*job)`` for each job, in order, from processes that each start with ``start(*startargs)``."""
    waiting: deque[Future[R]] = deque()
    # no fork: this process may have torch threads
    method = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=method, initializer=start, initargs=startargs)
    try:
        for job in jobs:
            if len(waiting) >= 2 * workers:  # bounds memory: a job holds its arguments and its result
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
    """Make this worker process exit with the main process, and leave Ctrl-C to the main process."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


_decide: list[Decide] = []


def _open_in_worker(step: PipelineStep[Any], folder: StepFolder, context: Context) -> None:
    """Open the step once in this worker process."""
    start_worker()
    stack = ExitStack()
    _decide.append(stack.enter_context(step.open(folder, context)))
    Finalize(None, stack.close, exitpriority=10)  # worker processes do not run atexit handlers


def _in_worker(name: str, part: Part, new: Part, folder: StepFolder) -> None:
    _make_part(_decide[0], name, part, new, folder)


def _make_part(decide: Decide, name: str, part: Part, new: Part, folder: StepFolder) -> None:
    table = read_part(part.path).select(SCHEMA.names).cast(SCHEMA)
    decisions = decide(table) if table.num_rows else []
    assert len(decisions) == table.num_rows, (name, len(decisions), table.num_rows)
    folder.write(new, *split(table, decisions, name))


def split(table: pa.Table, decisions: Sequence[Decision], step: str) -> tuple[pa.Table, pa.Table]:
    """Split a part into kept and dropped rows, each in order."""
    # append changed rows to the old ones, so that one `take` selects all in order
    both = pa.concat_tables([table, table_of([one for one in decisions if isinstance(one, Entry)])])
    changed = iter(range(table.num_rows, both.num_rows))
    places = [next(changed) if isinstance(one, Entry) else place for place, one in enumerate(decisions)]
    gone = {place: one for place, one in enumerate(decisions) if isinstance(one, Drop)}
    kept = both.take(pa.array([place for number, place in enumerate(places) if number not in gone], pa.int64()))
    # dropped rows keep their previous content
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
    """Return a hash of the parts' keys. A step that read other parts belongs to another run."""
    return hash_of([part.key for part in parts])


def count_rows(*folders: StepFolder) -> dict[str, dict[str, Any]]:
    """Return for each source how many rows were read, kept, and dropped by reason, in all folders together."""
    kept: Counter[str] = Counter()
    dropped: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for folder in folders:
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
    """Return each combination of the columns' values with its number of rows."""
    grouped = table.group_by(columns).aggregate([([], "count_all")]).to_pydict()
    return zip(*(grouped[name] for name in (*columns, "count_all")), strict=True)
