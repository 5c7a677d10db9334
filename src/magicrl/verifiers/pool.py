"""Many answers, judged beside the caller: nothing lost, nothing mixed up, nothing that hangs.

The caller submits a problem's responses and goes on generating; one small thread per worker process feeds it
an item at a time. A worker that an item exhausts is killed and the item is wrong; a worker that dies for
another reason is replaced and the item tried once more. Idle workers wait in a read and cost nothing.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Self

from magicrl.config.schema import VerifierConfig
from magicrl.records import Problem, Verdict
from magicrl.verifiers.base import JudgeOptions, Verifier, VerifierSpec, WarmService, verifier_spec
from magicrl.verifiers.feeder import Distrust, Feeder, Item, Ticket


class VerifierPool:
    r"""Judges responses, in this process (``exact``) or in worker processes (``maths``, ``code``).

    Safe to use from several threads. Workers start with the first item that needs one.

    Args:
        options: how the answer is found in a response.
        time_limit: seconds of its worker's CPU time that one item may use.
        workers: worker processes.
        memory_limit_mb: MiB that an item may allocate beyond a warm worker's own.

    Example:
        >>> problem = Problem(id="p", prompt="1/2?", golds=("0.5",), verifier="maths", source="doc")
        >>> with VerifierPool() as pool:
        ...     ticket = pool.submit(problem, [r"\boxed{\frac12}", r"\boxed{2}"])
        ...     [verdict.correct for verdict in pool.result(ticket)]
        [True, False]
    """

    def __init__(
        self,
        *,
        options: JudgeOptions | None = None,
        time_limit: float = 2.0,
        workers: int = 1,
        memory_limit_mb: int = 4096,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        if time_limit <= 0:
            raise ValueError(f"time_limit must be positive seconds, got {time_limit}")
        self._options = options or JudgeOptions()
        self._settings: dict[str, Any] = {
            "verifiers": ["maths"],
            "reasoning": self._options.reasoning,
            "extract": self._options.extract,
            "cpu_limit": time_limit,
            "memory_limit_mb": memory_limit_mb,
        }
        self._local: dict[str, Verifier] = {}
        self._services: dict[str, WarmService] = {}
        self._items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        distrust = Distrust()
        self._feeders = [Feeder(self._items, self._settings, distrust) for _ in range(workers)]
        self._started = False
        self._closed = False

    @classmethod
    def from_config(cls, config: VerifierConfig) -> Self:
        """The pool that a recipe's ``[verifier]`` describes."""
        return cls(
            options=JudgeOptions(reasoning=config.reasoning, extract=config.extract),
            time_limit=config.time_limit,
            workers=config.workers,
            memory_limit_mb=config.memory_limit_mb,
        )

    def submit(self, problem: Problem, responses: Sequence[str]) -> Ticket:
        """Queue the responses to one problem and return at once.

        Raises:
            ValueError: the problem names an unknown verifier or has no gold answer.
            RuntimeError: the pool is closed.
        """
        if not problem.golds:
            raise ValueError(f"problem {problem.id!r} has no gold answer; give it at least one")
        spec = verifier_spec(problem.verifier)
        if spec.service is not None:
            return self._service(spec).submit(problem, responses)
        ticket = Ticket(problem, len(responses))
        with self._lock:
            if self._closed:
                raise RuntimeError("the verifier pool is closed")
            if spec.in_process is None:
                self._start_feeders()
                for index, response in enumerate(responses):
                    self._items.put(Item(next(self._numbers), ticket, index, response))
                return ticket
            verifier = self._local.setdefault(spec.name, spec.in_process(self._options))
        for index, response in enumerate(responses):
            ticket.fill(index, verifier.judge(problem.golds, response))
        return ticket

    def result(self, ticket: Ticket) -> tuple[Verdict, ...]:
        """The verdicts of ``ticket`` in the order of its responses. Waits until all are there.

        Raises:
            RuntimeError: the pool was closed before they were judged.
        """
        return ticket.wait()

    def ready(self, ticket: Ticket) -> bool:
        """Whether `result` would return at once."""
        return ticket.done

    def judge(self, problem: Problem, responses: Sequence[str]) -> tuple[Verdict, ...]:
        """`submit` and `result` in one."""
        return self.result(self.submit(problem, responses))

    def warm_up(self, verifiers: Iterable[str] = ("maths",)) -> None:
        """Start every worker of these verifiers now, so that a broken installation shows before a run does.

        Raises:
            RuntimeError: a worker could not be started (with what it wrote on standard error).
        """
        specs = [verifier_spec(name) for name in verifiers]
        for spec in specs:
            if spec.service is not None:
                self._service(spec).warm_up()
        if not any(spec.isolated is not None for spec in specs):
            return
        with self._lock:
            if self._closed:
                raise RuntimeError("the verifier pool is closed")
            self._start_feeders()
        for feeder in self._feeders:
            feeder.wait_until_started()

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the workers that live now, for monitors."""
        own = tuple(pid for feeder in self._feeders if (pid := feeder.worker_pid) is not None)
        return own + tuple(pid for service in self._services.values() for pid in service.worker_pids)

    def close(self) -> None:
        """Kill the workers; tickets that still wait raise. Safe to call twice."""
        with self._lock:
            self._closed = True
            started, self._started = self._started, False
            services = list(self._services.values())
        for service in services:
            service.close()
        if not started:
            return
        for feeder in self._feeders:
            feeder.close()
            self._items.put(None)
        for feeder in self._feeders:
            feeder.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _service(self, spec: VerifierSpec) -> WarmService:
        assert spec.service is not None
        with self._lock:
            if self._closed:
                raise RuntimeError("the verifier pool is closed")
            if spec.name not in self._services:
                limit, memory = self._settings["cpu_limit"], self._settings["memory_limit_mb"]
                self._services[spec.name] = spec.service(self._options, limit, memory, len(self._feeders))
            return self._services[spec.name]

    def _start_feeders(self) -> None:
        if not self._started:
            self._started = True
            for feeder in self._feeders:
                feeder.start()
