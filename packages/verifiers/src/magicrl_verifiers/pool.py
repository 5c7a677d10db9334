"""Many answers, judged beside the caller: nothing lost, nothing mixed up, nothing that hangs.

The caller submits a problem's responses and goes on generating; one small thread per worker process feeds it an item
at a time. A worker that an item exhausts is killed and the item is wrong; a worker that dies for another reason is
replaced and the item tried once more. Idle workers wait in a read and cost nothing. Each verifier has a `WorkerPool` of
its own, started with its first item; what is particular to it (how an item is put to a worker, what a reply means, who
is to blame when an item ends badly) is its `WorkerProtocol`.
"""

from __future__ import annotations

import dataclasses
import itertools
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any, Self

from pydantic import TypeAdapter

from magicrl_verifiers.records import MAX_EXTRACTED, OUTCOME_OF_STATUS, Outcome, Problem, Verdict, make_verdict
from magicrl_verifiers.worker import (
    Exhausted,
    Lost,
    WorkerPlan,
    WorkerProcess,
    WorkerRefusal,
    WorkerSlot,
    WorkerStartError,
)


class Closing(ABC):
    """Base of what holds processes until it is closed."""

    @abstractmethod
    def close(self) -> None:
        """End what is held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


ATTEMPTS = 2
"""Of an item whose worker was lost."""
_CLOSED = "the verifier pool was closed before all answers were judged"


@dataclass(frozen=True, slots=True)
class Ticket:
    """One submitted problem; its verdicts come in parts, which together are in the order of the responses."""

    problem: Problem
    parts: Sequence[Future[list[Verdict]]]

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return all(part.done() for part in self.parts)

    def wait(self) -> tuple[Verdict, ...]:
        """Every verdict, in the order of the responses."""
        try:
            return tuple(verdict for part in self.parts for verdict in part.result())
        except CancelledError as error:
            raise RuntimeError(_CLOSED) from error


@dataclass(frozen=True, slots=True)
class Item:
    """One response on its way to a worker. ``bare``: it is the answer itself, nothing has to be extracted."""

    number: int
    problem: Problem
    text: str
    bare: bool
    judged: Future[list[Verdict]] = field(default_factory=Future[list[Verdict]])


class WorkerProtocol(ABC):
    """How items of one verifier are judged in worker processes. Used by several threads.

    Attributes:
        plan: how its workers are started.
        verdicts: the form of the ``verdict`` in a worker's reply.
        own_words: its statuses may be others than those of `OUTCOME_OF_STATUS`.
    """

    plan: WorkerPlan
    verdicts: TypeAdapter[Any] = TypeAdapter(Verdict)
    own_words: bool = False

    @abstractmethod
    def request(self, item: Item, *, repeat: bool) -> dict[str, Any]:
        """The item as its worker reads it. ``repeat``: the worker was asked about the same problem last."""

    def read(self, item: Item, message: Mapping[str, Any], seconds: float) -> Verdict:
        """What a reply says; a malformed one is a lost worker's."""
        try:
            verdict: Verdict = self.verdicts.validate_python(message.get("verdict"))
            if self.own_words:
                return verdict
            # a worker reads hostile text: a status that does not go with its outcome is none of ours
            known = OUTCOME_OF_STATUS.get(verdict.status) is verdict.outcome
            if known and len(verdict.extracted or "") <= MAX_EXTRACTED + 3:
                return dataclasses.replace(verdict, seconds=seconds)
        except ValueError:
            pass
        return self.lost("the worker sent a malformed verdict", seconds)

    @abstractmethod
    def exhausted(self, item: Item, outcome: Exhausted, seconds: float) -> Verdict:
        """The verdict on an item that used up its worker."""

    def lost(self, reason: str, seconds: float = 0.0) -> Verdict:
        """The verdict on an item whose worker ended through no fault of the item's."""
        return make_verdict("worker_lost", reason=reason, seconds=seconds)

    def final(self, item: Item, verdict: Verdict) -> bool:
        """Whether a verdict that judges nothing would be the same in a fresh worker."""
        return False

    def give_up(self, item: Item, verdict: Verdict) -> None:  # noqa: B027 - most kinds remember nothing
        """Every attempt came to nothing, ``verdict`` last."""


class WorkerThread:
    """Takes items from the common queue and judges them in its own worker, which it replaces when needed."""

    def __init__(
        self, items: queue.SimpleQueue[Item | None], protocol: WorkerProtocol, closing: threading.Event
    ) -> None:
        self._items, self._protocol, self._closing = items, protocol, closing
        self._slot = WorkerSlot(protocol.plan, closing)
        self.greeting: Future[Mapping[str, Any]] = Future()
        """What its first worker said, or why there is none."""
        self.thread = threading.Thread(target=self._run, name="verifier-worker", daemon=True)

    @property
    def worker(self) -> WorkerProcess | None:
        """The one that lives now."""
        return self._slot.worker

    def _run(self) -> None:
        try:
            self.greeting.set_result(self._slot.ready().greeting)
        except Exception as error:  # noqa: BLE001 - whoever waits for the first worker is told
            self.greeting.set_exception(error)
        while (item := self._items.get()) is not None:
            try:
                item.judged.set_result([self._serve(item)])
            except Exception as error:  # noqa: BLE001 - the caller waits for this item: hand the error over to it
                item.judged.set_exception(error)
        self._slot.drop()

    def _serve(self, item: Item) -> Verdict:
        verdict = self._protocol.lost("not tried")
        for _ in range(ATTEMPTS):
            if self._closing.is_set():
                break
            verdict = self._attempt(item)
            if verdict.outcome is not Outcome.NOT_JUDGED or self._protocol.final(item, verdict):
                return verdict
            self._slot.drop()  # the second try gets a fresh one
        if self._closing.is_set():
            # a pool that closes hands over no verdict: the item would count as not judged though nobody tried
            raise RuntimeError(_CLOSED)
        self._protocol.give_up(item, verdict)
        return verdict

    def _attempt(self, item: Item) -> Verdict:
        try:
            worker = self._slot.ready()
        # no item's doing, and the next worker would say the same: the caller has to hear it
        except WorkerRefusal:
            raise
        except WorkerStartError as error:
            return self._protocol.lost(str(error))
        # by identity: no comparison of long texts for every item
        request = self._protocol.request(item, repeat=worker.last_problem is item.problem)
        start = time.perf_counter()
        outcome = worker.ask({"item": item.number, **request})
        seconds = time.perf_counter() - start
        if isinstance(outcome, Exhausted):
            return self._protocol.exhausted(item, outcome, seconds)
        if isinstance(outcome, Lost):
            return self._protocol.lost(outcome.reason, seconds)
        worker.last_problem = item.problem
        return self._protocol.read(item, outcome, seconds)


class JudgingPool(Closing):
    """Base of pools that hand out tickets."""

    def result(self, ticket: Ticket) -> tuple[Verdict, ...]:
        """The verdicts of ``ticket`` in the order of its responses. Waits until all are there.

        Raises:
            RuntimeError: the pool was closed before they were judged.
            WorkerRefusal: the verifier cannot serve on this machine; says why.
        """
        return ticket.wait()

    def ready(self, ticket: Ticket) -> bool:
        """Whether `result` would return at once."""
        return ticket.done


class WorkerPool(JudgingPool):
    """Judges items of one verifier in worker processes, one small thread a worker. Safe to use from several threads.

    Workers start with the first item. Any number of items may wait: they lie in this process.

    Args:
        protocol: how a worker is started and asked.
        workers: worker processes.
    """

    def __init__(self, protocol: WorkerProtocol, workers: int) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        self._items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._threads = [WorkerThread(self._items, protocol, self._closing) for _ in range(workers)]
        self._started = False

    def submit(self, problem: Problem, responses: Sequence[str], *, bare: bool = False) -> Ticket:
        """Queue the responses to one problem (``bare``: the answers themselves) and return at once.

        Raises:
            RuntimeError: the pool is closed.
        """
        with self._lock:
            self._start()
            # under the lock, so that none lies behind the sentinels that `close` puts: its ticket would wait for ever
            items = [Item(next(self._numbers), problem, response, bare) for response in responses]
            for item in items:
                self._items.put(item)
        return Ticket(problem, [item.judged for item in items])

    def warm(self) -> list[Mapping[str, Any]]:
        """Start every worker now and wait for them; returns what each said.

        Raises:
            WorkerStartError: a worker could not be started (with what it wrote on standard error).
        """
        with self._lock:
            self._start()
        return [thread.greeting.result() for thread in self._threads]

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the workers that live now, for monitors."""
        workers = [thread.worker for thread in self._threads]
        return tuple(worker.pid for worker in workers if worker is not None)

    def close(self) -> None:
        """Kill the workers; tickets that still wait raise. Safe to call twice."""
        with self._lock:
            self._closing.set()
            started, self._started = self._started, False
        if not started:
            return
        for thread in self._threads:
            # its thread may wait in `ask`; it finds a lost worker and sees that the pool closes
            if (worker := thread.worker) is not None:
                worker.interrupt()
            self._items.put(None)
        for thread in self._threads:
            thread.thread.join()

    def _start(self) -> None:
        if self._closing.is_set():
            raise RuntimeError("the verifier pool is closed")
        if not self._started:
            self._started = True
            for thread in self._threads:
                thread.thread.start()
