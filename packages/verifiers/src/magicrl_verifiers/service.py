"""The pool that judges responses to problems of any verifier: in this process, in worker processes, or by a server."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from magicrl_verifiers.judge_settings import NO_JUDGE, JudgeSettings
from magicrl_verifiers.records import Judge, JudgeOptions, Problem, Verdict, check_seconds
from magicrl_verifiers.several import joined
from magicrl_verifiers.table import VerifierSpec, verifier_spec
from magicrl_verifiers.workers import Closing, JudgingPool, Ticket, WorkerPool

if TYPE_CHECKING:
    from magicrl_verifiers.served_judge import ServedJudge


@dataclass(frozen=True, slots=True)
class JoinedTicket(Ticket):
    """Ticket of a problem with several rewards; ``tickets`` has one per reward."""

    tickets: Sequence[Ticket] = ()

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return all(ticket.done for ticket in self.tickets)

    def wait(self) -> tuple[Verdict, ...]:
        """The joined verdicts, in the order of the responses."""
        return tuple(joined(self.problem.verifier, [ticket.wait() for ticket in self.tickets]))


class VerifierPool(JudgingPool):
    r"""Judges responses, in this process (``exact``) or in worker processes (``maths``, ``code``).

    A problem's verifier may also be a custom reward (`rewards`), which is called in either place.

    Safe to use from several threads. Workers start with the first item that needs one.

    Args:
        options: how the answer is found in a response.
        time_limit: seconds of its worker's CPU time that one item may use.
        workers: worker processes.
        memory_limit_mb: MiB that an item may allocate beyond a warm worker's own.

    Example:
        >>> problem = Problem(id="p", prompt="1/2?", references=("0.5",), verifier="maths", source="doc")
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
        judge: JudgeSettings | None = None,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        check_seconds("time_limit", time_limit)
        self._options = options or JudgeOptions()
        self._limits = (time_limit, memory_limit_mb)
        self._workers = workers
        self._spec = cache(verifier_spec)  # finding one looks through modules and files
        self._judge_settings = judge
        self._local: dict[str, Judge] = {}
        self._served: dict[str, ServedJudge] = {}
        self.lost: list[str] = []  # a server is nobody's to replace
        self._awaited: set[Future[Any]] = set()
        self._pools: dict[str, WorkerPool] = {}
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, problem: Problem, responses: Sequence[str]) -> Ticket:
        """Queue the responses to one problem and return at once.

        Raises:
            ValueError: the problem names an unknown verifier, or one that needs a reference answer and has none.
            RuntimeError: the pool is closed.
        """
        spec = self._spec(problem.verifier)
        spec.check_references(problem)
        if spec.parts:
            tickets = [self.submit(replace(problem, verifier=part.name), responses) for part in spec.parts]
            return JoinedTicket(problem, (), tickets)
        if spec.protocol is not None:
            return self._pool(spec).submit(problem, responses)
        found = self._here(spec)(problem, responses)
        # a reward that answers later: `close` has to know what is still awaited
        if isinstance(found, Future):
            with self._lock:
                self._awaited.add(found)
                closed = self._closed
            if closed:  # `close` was called meanwhile and did not see this one
                found.cancel()
            found.add_done_callback(self._awaited.discard)
            return Ticket(problem, [found])
        judged: Future[list[Verdict]] = Future()
        judged.set_result(list(found))
        return Ticket(problem, [judged])

    def judge(self, problem: Problem, responses: Sequence[str]) -> tuple[Verdict, ...]:
        """Submit the responses and wait for their verdicts."""
        return self.result(self.submit(problem, responses))

    def warm_up(self, verifiers: Iterable[str] = ("maths",)) -> None:
        """Start every worker of these verifiers and ask their servers, so that what is broken shows before a run does.

        Raises:
            RuntimeError: a worker could not be started (with what it wrote on standard error).
            ValueError: a judge's server does not answer as it should.
        """
        found = [self._spec(name) for name in verifiers]
        for spec in dict.fromkeys(part for whole in found for part in whole.parts or (whole,)):
            if spec.protocol is not None:
                self._pool(spec).warm()
            else:
                self._here(spec)
        for served in self._served.values():
            served.probe()

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the workers that live now, for monitors."""
        return tuple(pid for pool in list(self._pools.values()) for pid in pool.worker_pids)

    def close(self) -> None:
        """Kill the workers; tickets that still wait raise. Safe to call twice."""
        with self._lock:
            self._closed = True
            pools: list[Closing] = [*self._pools.values(), *self._served.values()]
            awaited = list(self._awaited)
        # outside the lock: threads that wait for these wake up now and may call the pool
        for future in awaited:
            future.cancel()
        for pool in pools:
            pool.close()

    def totals(self) -> dict[str, float]:
        """Return the requests to servers so far as metrics; {} without a server."""
        return {key: value for served in self._served.values() for key, value in served.totals().items()}

    def observations(self) -> dict[str, float]:
        """Return the requests since the last call as metrics."""
        return {key: value for served in self._served.values() for key, value in served.since().items()}

    def spans(self) -> list[Any]:
        """Return nothing: waiting for verdicts is in the step's own timeline."""
        return []

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the verifier pool is closed")

    def _here(self, spec: VerifierSpec) -> Judge:
        """Return the judge that needs no worker processes, made once."""
        with self._lock:
            self._check_open()
            if spec.name not in self._local:
                if spec.served is None:
                    assert spec.in_process is not None
                    self._local[spec.name] = spec.in_process(self._options)
                else:
                    if self._judge_settings is None:
                        raise ValueError(NO_JUDGE)
                    self._served[spec.name] = spec.served(self._judge_settings, self._options)
                    self._local[spec.name] = self._served[spec.name].judge
            return self._local[spec.name]

    def _pool(self, spec: VerifierSpec) -> WorkerPool:
        assert spec.protocol is not None
        with self._lock:
            self._check_open()
            if spec.name not in self._pools:
                self._pools[spec.name] = WorkerPool(spec.protocol(self._options, *self._limits), self._workers)
            return self._pools[spec.name]
