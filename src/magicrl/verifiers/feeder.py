"""The thread that feeds one worker process, and who is to blame when an item ends badly."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from magicrl.records import Outcome, Problem, Verdict
from magicrl.verifiers.base import MAX_EXTRACTED, OUTCOME_OF_STATUS, make_verdict
from magicrl.verifiers.process import Answered, Exhausted, WorkerProcess, WorkerStartError

_ATTEMPTS = 2
_MAX_DISTRUSTED = 10_000
_MAX_REASON = 300


class Ticket:
    """One submitted problem: filled by the feeders, read through `VerifierPool.result`."""

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
        """Whether `VerifierPool.result` would return at once."""
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
    """One response on its way to a worker."""

    number: int
    ticket: Ticket
    index: int
    response: str


class Distrust:
    """Golds that no worker could read, shared by the feeders, so that each costs its time only once."""

    def __init__(self) -> None:
        self._golds: set[tuple[str, ...]] = set()
        self._lock = threading.Lock()

    def add(self, golds: tuple[str, ...]) -> None:
        with self._lock:
            if len(self._golds) < _MAX_DISTRUSTED:
                self._golds.add(golds)

    def __contains__(self, golds: tuple[str, ...]) -> bool:
        with self._lock:
            return golds in self._golds


class Feeder:
    """Takes items from the common queue and judges them in its own worker, which it replaces when needed."""

    def __init__(self, items: queue.SimpleQueue[Item | None], settings: Mapping[str, Any], distrust: Distrust) -> None:
        self._items = items
        self._settings = settings
        self._distrust = distrust
        self._worker: WorkerProcess | None = None
        self._start_error: WorkerStartError | None = None
        self._started = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="verifier-feeder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait_until_started(self) -> None:
        """Wait for the first worker; raises WorkerStartError if it did not start."""
        self._started.wait()
        if self._start_error is not None:
            raise self._start_error

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
            self._ready_worker()
        except WorkerStartError as error:
            self._start_error = error
        finally:
            self._started.set()
        while (item := self._items.get()) is not None:
            try:
                self._serve(item)
            except Exception as error:  # noqa: BLE001 - the caller waits for this ticket: hand the error over to it
                item.ticket.fail(error)
        if self._worker is not None:
            self._worker.kill()

    def _serve(self, item: Item) -> None:
        golds = item.ticket.problem.golds
        verdict = make_verdict("worker_lost")
        for _ in range(_ATTEMPTS):
            if self._closing.is_set():
                raise RuntimeError("the verifier pool was closed before all answers were judged")
            verdict = self._attempt(item)
            if verdict.outcome is not Outcome.NOT_JUDGED or golds in self._distrust:
                break
            self._drop_worker()  # the second try gets a fresh one
        else:
            if verdict.status == "gold_unparsable":
                self._distrust.add(golds)
        if self._closing.is_set() and verdict.status == "worker_lost":
            raise RuntimeError("the verifier pool was closed before all answers were judged")
        item.ticket.fill(item.index, verdict)

    def _attempt(self, item: Item) -> Verdict:
        try:
            worker = self._ready_worker()
        except WorkerStartError as error:
            return make_verdict("worker_lost", reason=str(error))
        problem = item.ticket.problem
        request = {
            "item": item.number,
            "verifier": problem.verifier,
            "golds": list(problem.golds),
            "response": item.response,
            "distrust": problem.golds in self._distrust,
        }
        start = time.perf_counter()
        outcome = worker.ask(request)
        seconds = time.perf_counter() - start
        if isinstance(outcome, Answered):
            return verdict_from(outcome.message, seconds)
        if isinstance(outcome, Exhausted):
            who = "gold" if outcome.phase == "gold" else "answer"
            status = "gold_unparsable" if who == "gold" else outcome.kind
            limit = f"{self._settings['cpu_limit']:g} s of CPU time"
            reason = f"the {who} used up {limit}" if outcome.kind == "timeout" else f"the {who} crashed the worker"
            return make_verdict(status, reason=reason, seconds=seconds)
        return make_verdict("worker_lost", reason=outcome.reason, seconds=seconds)

    def _ready_worker(self) -> WorkerProcess:
        if self._worker is None or not self._worker.usable:
            self._drop_worker()
            try:
                self._worker = WorkerProcess(self._settings)
            except WorkerStartError:
                # somebody may have killed it while it warmed up; a broken installation fails again
                self._worker = WorkerProcess(self._settings)
        return self._worker

    def _drop_worker(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker = None


def verdict_from(message: Mapping[str, Any], seconds: float) -> Verdict:
    """The verdict a worker's reply states; what is not exactly of the expected form counts as a lost worker."""
    status, reason = message.get("status"), message.get("reason")
    decided_by, extracted = message.get("decided_by"), message.get("extracted")
    if (
        isinstance(status, str)
        and status in OUTCOME_OF_STATUS
        and isinstance(reason, str)
        and isinstance(decided_by, str)
        and (extracted is None or (isinstance(extracted, str) and len(extracted) <= MAX_EXTRACTED + 3))
    ):
        return make_verdict(
            status, reason=reason[:_MAX_REASON], decided_by=decided_by[:50], extracted=extracted, seconds=seconds
        )
    return make_verdict("worker_lost", reason="worker sent a malformed verdict", seconds=seconds)
