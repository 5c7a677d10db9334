"""Many answers, judged beside the caller: nothing lost, nothing mixed up, nothing that hangs.

The caller submits a problem's responses and goes on generating; one small thread per worker process feeds it
an item at a time. A worker that an item exhausts is killed and the item is wrong; a worker that dies for
another reason is replaced and the item tried once more. Idle workers wait in a read and cost nothing. Each verifier
has workers of its own, started with its first item.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Self

from magicrl.config.schema import VerifierConfig
from magicrl.records import Problem, Verdict
from magicrl.verifiers.base import JudgeOptions, Verifier, VerifierSpec, verifier_spec
from magicrl.verifiers.closing import Closing
from magicrl.verifiers.crew import Crew
from magicrl.verifiers.feeder import Ticket


class VerifierPool(Closing):
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
        self._limits = (time_limit, memory_limit_mb)
        self._workers = workers
        self._local: dict[str, Verifier] = {}
        self._crews: dict[str, Crew] = {}
        self._lock = threading.Lock()
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
        if spec.in_process is None:
            return self._crew(spec).submit(problem, responses)
        with self._lock:
            self._check_open()
            verifier = self._local.setdefault(spec.name, spec.in_process(self._options))
        ticket = Ticket(problem, len(responses))
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
        for spec in [verifier_spec(name) for name in verifiers]:
            if spec.in_process is None:
                self._crew(spec).warm()

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the workers that live now, for monitors."""
        return tuple(pid for crew in list(self._crews.values()) for pid in crew.worker_pids)

    def close(self) -> None:
        """Kill the workers; tickets that still wait raise. Safe to call twice."""
        with self._lock:
            self._closed = True
            crews = list(self._crews.values())
        for crew in crews:
            crew.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the verifier pool is closed")

    def _crew(self, spec: VerifierSpec) -> Crew:
        assert spec.trade is not None
        with self._lock:
            self._check_open()
            if spec.name not in self._crews:
                self._crews[spec.name] = Crew(spec.trade(self._options, *self._limits), self._workers)
            return self._crews[spec.name]
