"""Many programs, judged beside the caller by worker processes: the code verifier's place in the generic pool.

The processes that use up limits here are not the workers but the programs that they run, so a worker's own limits are
wide: they only end a judge that a program's output keeps busy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from magicrl.records import Problem
from magicrl.verifiers.base import OUTCOME_OF_STATUS
from magicrl.verifiers.code.judge import CodeOptions, CodeVerdict, code_verdict
from magicrl.verifiers.crew import Crew
from magicrl.verifiers.feeder import Item, Ticket
from magicrl.verifiers.process import Exhausted, WorkerPlan

_JUDGE_CPU_SECONDS = 60.0
_STALL_FACTOR = 12.0
_STALL_SECONDS = 120.0


class CodeTrade:
    """What the generic pool must know of code: a problem's tests are the JSON text in ``golds[0]``."""

    def __init__(self, options: CodeOptions) -> None:
        seconds = options.limits.cpu_seconds
        self._plan = WorkerPlan(
            module="magicrl.verifiers.code.worker",
            hello=settings_of(options),
            cpu_limit=_JUDGE_CPU_SECONDS,
            stall_limit=_STALL_SECONDS + _STALL_FACTOR * (options.total_seconds or 12 * seconds),
        )

    @property
    def plan(self) -> WorkerPlan:
        return self._plan

    def request(self, item: Item, *, repeat: bool) -> dict[str, Any]:
        request: dict[str, Any] = {"text": item.text, "program": item.bare}
        return request if repeat else {**request, "tests": item.problem.golds[0]}

    def read(self, message: Mapping[str, Any], seconds: float) -> CodeVerdict:
        return verdict_from(message, seconds)

    def exhausted(self, outcome: Exhausted, seconds: float) -> CodeVerdict:
        if outcome.kind == "timeout":
            reason = "its output could not be compared within the judge's own time"
            return code_verdict("output_limit", reason, seconds=seconds)
        return self.lost("the judge crashed", seconds)

    def lost(self, reason: str, seconds: float = 0.0) -> CodeVerdict:
        return code_verdict("infrastructure_error", reason, seconds=seconds, decided_by="pool")

    def final(self, item: Item, verdict: Any) -> bool:
        return verdict.decided_by == "suite"

    def give_up(self, item: Item, verdict: Any) -> None:
        """Nothing is remembered: tests that cannot be used are told at once."""


class CodePool(Crew):
    """Judges responses (or bare programs) to code problems in worker processes. Safe to use from several threads.

    A problem's tests are the JSON text in ``golds[0]`` (`suite` has the forms).

    Args:
        options: limits, isolation and where the program stands in a response.
        workers: worker processes, each with its own sandbox.

    Example:
        >>> problem = Problem(id="p", prompt="", golds=('{"inputs": ["2 3"], "outputs": ["5"]}',), verifier="code",
        ...                   source="doc")
        >>> with CodePool() as pool:
        ...     ticket = pool.submit(problem, ["```python\\nprint(sum(map(int, input().split())))\\n```"])
        ...     [verdict.status for verdict in pool.result(ticket)]
        ['passed']
    """

    def __init__(self, options: CodeOptions | None = None, *, workers: int = 1) -> None:
        super().__init__(CodeTrade(options or CodeOptions()), workers)

    def submit_programs(self, problem: Problem, programs: Sequence[str]) -> Ticket:
        """`submit` for bare programs, from which nothing has to be extracted."""
        return self.submit(problem, programs, bare=True)

    def result(self, ticket: Ticket) -> tuple[CodeVerdict, ...]:
        """The verdicts of ``ticket`` in the order of its texts. Waits until all are there.

        Raises:
            RuntimeError: the pool was closed before they were judged.
            WorkerRefusal: this machine cannot isolate programs; says why.
        """
        verdicts = ticket.wait()
        found = tuple(verdict for verdict in verdicts if isinstance(verdict, CodeVerdict))
        assert len(found) == len(verdicts)
        return found

    def warm_up(self) -> str:
        """Start every worker now and wait for them; returns the tier of isolation in use.

        Raises:
            WorkerRefusal: this machine cannot isolate programs; says why.
            WorkerStartError: a worker could not be started.
        """
        return str(self.warm()[0]["tier"])


def settings_of(options: CodeOptions) -> dict[str, Any]:
    """What a worker is told when it starts."""
    return {
        "time_limit": options.limits.cpu_seconds,
        "memory_limit_mb": options.limits.memory_mb,
        "output_limit_mb": options.limits.output_mb,
        "idle_seconds": options.limits.idle_seconds,
        "threads": options.limits.threads,
        "total_seconds": options.total_seconds,
        "stop_at_failure": options.stop_at_failure,
        "tier": options.sandbox.tier,
        "preload": list(options.sandbox.preload),
        "guards_off": list(options.sandbox.guards_off),
        "reasoning": options.judge.reasoning,
    }


def verdict_from(message: Mapping[str, Any], seconds: float) -> CodeVerdict:
    """The verdict a worker's reply states; what is not exactly of the expected form counts as a lost worker."""
    status, reason = message.get("status"), message.get("reason")
    passed, total = message.get("passed"), message.get("total")
    if (
        isinstance(status, str)
        and status in OUTCOME_OF_STATUS
        and isinstance(reason, str)
        and isinstance(passed, int)
        and isinstance(total, int)
    ):
        decided_by = "suite" if message.get("unusable") is True else "tests"
        return code_verdict(status, reason, passed=passed, total=total, seconds=seconds, decided_by=decided_by)
    return code_verdict("infrastructure_error", "the worker sent a malformed verdict", seconds=seconds)
