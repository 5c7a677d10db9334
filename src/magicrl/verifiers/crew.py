"""A queue of items and the workers of one verifier that empty it: the pool under ``maths`` and ``code`` alike."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from magicrl.records import Problem, Verdict
from magicrl.verifiers.closing import Closing
from magicrl.verifiers.feeder import Feeder, Item, Ticket, Trade


class Crew(Closing):
    """Judges items of one verifier in worker processes, one small thread a worker. Safe to use from several threads.

    Workers start with the first item. Any number of items may wait: they lie in this process.

    Args:
        trade: the verifier.
        workers: worker processes.
    """

    def __init__(self, trade: Trade, workers: int) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        self._items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._feeders = [Feeder(self._items, trade) for _ in range(workers)]
        self._started = False
        self._closed = False

    def submit(self, problem: Problem, responses: Sequence[str], *, bare: bool = False) -> Ticket:
        """Queue the responses to one problem (``bare``: the answers themselves) and return at once.

        Raises:
            ValueError: the problem has no gold answer.
            RuntimeError: the pool is closed.
        """
        if not problem.golds:
            raise ValueError(f"problem {problem.id!r} has no gold answer (a code problem: no tests); give it one")
        ticket = Ticket(problem, len(responses))
        with self._lock:
            self._start()
            for index, response in enumerate(responses):
                self._items.put(Item(next(self._numbers), ticket, index, response, bare))
        return ticket

    def warm(self) -> list[Mapping[str, Any]]:
        """Start every worker now and wait for them; returns what each said.

        Raises:
            WorkerStartError: a worker could not be started (with what it wrote on standard error).
        """
        with self._lock:
            self._start()
        return [feeder.wait_until_started() for feeder in self._feeders]

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

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the workers that live now, for monitors."""
        return tuple(pid for feeder in self._feeders if (pid := feeder.worker_pid) is not None)

    def close(self) -> None:
        """Kill the workers; tickets that still wait raise. Safe to call twice."""
        with self._lock:
            self._closed = True
            started, self._started = self._started, False
        if not started:
            return
        for feeder in self._feeders:
            feeder.close()
            self._items.put(None)
        for feeder in self._feeders:
            feeder.join()

    def _start(self) -> None:
        if self._closed:
            raise RuntimeError("the verifier pool is closed")
        if not self._started:
            self._started = True
            for feeder in self._feeders:
                feeder.start()
