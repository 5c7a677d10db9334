"""The thread that feeds one worker process and replaces it, whatever is judged there.

What is particular to a verifier (how an item is put to its worker, what a reply means, who is to blame when an item
ends badly) is its `Trade`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from magicrl.records import Outcome, Problem, Verdict
from magicrl.verifiers.process import Answered, Exhausted, WorkerPlan, WorkerProcess, WorkerRefusal, WorkerStartError

_ATTEMPTS = 2
_STARTS = 3
"""A worker may be killed from outside while it warms up; a broken installation fails every time."""


class Ticket:
    """One submitted problem: filled by the feeders, read through the pool's ``result``."""

    def __init__(self, problem: Problem, count: int) -> None:
        self.problem = problem
        self._verdicts: list[Verdict | None] = [None] * count
        self._left = count
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._finished = threading.Event()
        if count == 0:
            self._finished.set()

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._finished.is_set()

    def fill(self, index: int, verdict: Verdict) -> None:
        """For the pool: the verdict of response ``index``."""
        with self._lock:
            assert self._verdicts[index] is None, index
            self._verdicts[index] = verdict
            self._left -= 1
            if self._left == 0:
                self._finished.set()

    def fail(self, error: Exception) -> None:
        """For the pool: these verdicts will never come."""
        with self._lock:
            self._error = self._error or error
            self._finished.set()

    def wait(self) -> tuple[Verdict, ...]:
        """Every verdict, in the order of the responses."""
        self._finished.wait()
        if self._error is not None:
            raise self._error
        verdicts = tuple(verdict for verdict in self._verdicts if verdict is not None)
        assert len(verdicts) == len(self._verdicts)
        return verdicts


@dataclass(frozen=True, slots=True)
class Item:
    """One response on its way to a worker. ``bare``: it is the answer itself, nothing has to be extracted."""

    number: int
    ticket: Ticket
    index: int
    text: str
    bare: bool = False

    @property
    def problem(self) -> Problem:
        return self.ticket.problem


class Trade(Protocol):
    """What a feeder must know of a verifier whose items are judged in worker processes. Used by several threads."""

    @property
    def plan(self) -> WorkerPlan:
        """How its workers are started."""
        ...

    def request(self, item: Item, *, repeat: bool) -> dict[str, Any]:
        """The item as its worker reads it. ``repeat``: the worker was asked about the same problem last."""
        ...

    def read(self, message: Mapping[str, Any], seconds: float) -> Verdict:
        """What a reply says; a malformed one is a lost worker's."""
        ...

    def exhausted(self, outcome: Exhausted, seconds: float) -> Verdict:
        """The verdict on an item that used up its worker."""
        ...

    def lost(self, reason: str, seconds: float = 0.0) -> Verdict:
        """The verdict on an item whose worker ended through no fault of the item's."""
        ...

    def final(self, item: Item, verdict: Verdict) -> bool:
        """Whether a verdict that judges nothing would be the same in a fresh worker."""
        ...

    def give_up(self, item: Item, verdict: Verdict) -> None:
        """Every attempt came to nothing, ``verdict`` last."""
        ...


class Feeder:
    """Takes items from the common queue and judges them in its own worker, which it replaces when needed."""

    def __init__(self, items: queue.SimpleQueue[Item | None], trade: Trade) -> None:
        self._items = items
        self._trade = trade
        self._worker: WorkerProcess | None = None
        self._greeting: Mapping[str, Any] = {}
        self._start_error: WorkerStartError | None = None
        self._started = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="verifier-feeder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait_until_started(self) -> Mapping[str, Any]:
        """Wait for the first worker; returns what it said. Raises WorkerStartError if it did not start."""
        self._started.wait()
        if self._start_error is not None:
            raise self._start_error
        return self._greeting

    @property
    def worker_pid(self) -> int | None:
        """Process id of the present worker, None between workers."""
        worker = self._worker
        return None if worker is None else worker.pid

    def close(self) -> None:
        """Interrupt what is being judged; the thread ends at the next ``None`` in the queue."""
        self._closing.set()
        worker = self._worker
        if worker is not None:
            worker.interrupt()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            self._greeting = self._ready_worker().greeting
        except WorkerStartError as error:
            self._start_error = error
        finally:
            self._started.set()
        while (item := self._items.get()) is not None:
            try:
                self._serve(item)
            except Exception as error:  # noqa: BLE001 - the caller waits for this ticket: hand the error over to it
                item.ticket.fail(error)
        self._drop_worker()

    def _serve(self, item: Item) -> None:
        verdict = self._trade.lost("not tried")
        for _ in range(_ATTEMPTS):
            if self._closing.is_set():
                raise RuntimeError("the verifier pool was closed before all answers were judged")
            verdict = self._attempt(item)
            if verdict.outcome is not Outcome.NOT_JUDGED or self._trade.final(item, verdict):
                break
            self._drop_worker()  # the second try gets a fresh one
        else:
            self._trade.give_up(item, verdict)
            if self._closing.is_set():
                raise RuntimeError("the verifier pool was closed before all answers were judged")
        item.ticket.fill(item.index, verdict)

    def _attempt(self, item: Item) -> Verdict:
        try:
            worker = self._ready_worker()
        except WorkerRefusal:
            raise
        except WorkerStartError as error:
            return self._trade.lost(str(error))
        request = self._trade.request(item, repeat=worker.last_problem is item.problem)
        start = time.perf_counter()
        outcome = worker.ask({"item": item.number, **request})
        seconds = time.perf_counter() - start
        if isinstance(outcome, Answered):
            worker.last_problem = item.problem
            return self._trade.read(outcome.message, seconds)
        if isinstance(outcome, Exhausted):
            return self._trade.exhausted(outcome, seconds)
        return self._trade.lost(outcome.reason, seconds)

    def _ready_worker(self) -> WorkerProcess:
        if self._worker is None or not self._worker.usable:
            self._drop_worker()
            self._worker = self._fresh_worker()
        return self._worker

    def _fresh_worker(self) -> WorkerProcess:
        for _ in range(_STARTS - 1):
            try:
                return WorkerProcess(self._trade.plan)
            except WorkerRefusal:
                raise
            except WorkerStartError:
                if self._closing.is_set():
                    raise
        return WorkerProcess(self._trade.plan)

    def _drop_worker(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker = None
