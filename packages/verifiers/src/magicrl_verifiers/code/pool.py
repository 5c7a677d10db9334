"""Many programs, judged beside the caller by worker processes.

The processes that use up limits here are not the workers but the programs that they run, so a worker's own limits are
wide: they only end a judge that a program's output keeps busy. A worker holds the tests, drives the fork servers and
compares; nothing of a program runs in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import psutil
from pydantic import TypeAdapter

from magicrl_verifiers.code.judge import CodeJudge, CodeOptions, CodeVerdict, code_verdict
from magicrl_verifiers.code.sandbox import SandboxRefusal
from magicrl_verifiers.code.suite import Suite, SuiteError, parse_suite
from magicrl_verifiers.pool import Item, Ticket, WorkerPool, WorkerProtocol
from magicrl_verifiers.records import Problem, Verdict, check_references
from magicrl_verifiers.worker import Exhausted, Refused, RequestHandler, Send, WorkerPlan

_JUDGE_CPU_SECONDS = 60.0
_STALL_FACTOR = 12.0
_STALL_SECONDS = 120.0


class CodeProtocol(WorkerProtocol):
    """What the generic pool must know of code: a problem's tests are the JSON text in ``references[0]``."""

    verdicts = TypeAdapter(CodeVerdict)

    def __init__(self, options: CodeOptions) -> None:
        seconds = options.limits.cpu_seconds
        self.plan = WorkerPlan(
            handler="magicrl_verifiers.code.pool:CodeHandler",
            hello=dataclasses.asdict(options),
            # of the worker itself, which only compares: programs have their time in the sandbox
            cpu_limit=_JUDGE_CPU_SECONDS,
            stall_limit=_STALL_SECONDS + _STALL_FACTOR * (options.total_seconds or 12 * seconds),
        )

    def request(self, item: Item, *, repeat: bool) -> dict[str, Any]:
        request: dict[str, Any] = {"text": item.text, "program": item.bare}
        return request if repeat else {**request, "tests": item.problem.references[0]}

    def exhausted(self, item: Item, outcome: Exhausted, seconds: float) -> CodeVerdict:
        # the program had its time in the sandbox: it was its output that kept the judge busy
        if outcome.kind == "timeout":
            reason = "its output could not be compared within the judge's own time"
            return code_verdict("output_limit", reason, seconds=seconds)
        return self.lost("the judge crashed", seconds)

    def lost(self, reason: str, seconds: float = 0.0) -> CodeVerdict:
        return code_verdict("infrastructure_error", reason, seconds=seconds, decided_by="pool")

    def final(self, item: Item, verdict: Verdict) -> bool:
        return verdict.decided_by == "suite"  # tests that cannot be used are told at once


class CodePool(WorkerPool):
    """Judges responses (or bare programs) to code problems in worker processes. Safe to use from several threads.

    A problem's tests are the JSON text in ``references[0]`` (`suite` has the forms).

    Args:
        options: limits, isolation and where the program stands in a response.
        workers: worker processes, each with its own sandbox.

    Example:
        >>> problem = Problem(id="p", prompt="", references=('{"inputs": ["2 3"], "outputs": ["5"]}',), verifier="code",
        ...                   source="doc")
        >>> with CodePool() as pool:
        ...     ticket = pool.submit(problem, ["```python\\nprint(sum(map(int, input().split())))\\n```"])
        ...     [verdict.status for verdict in pool.result(ticket)]
        ['passed']
    """

    def __init__(self, options: CodeOptions | None = None, *, workers: int = 1) -> None:
        super().__init__(CodeProtocol(options or CodeOptions()), workers)

    def submit(self, problem: Problem, responses: Sequence[str], *, bare: bool = False) -> Ticket:
        """As `WorkerPool.submit`; ``bare``: these are programs, from which nothing has to be extracted.

        Raises:
            ValueError: the problem has no tests.
            RuntimeError: the pool is closed.
        """
        check_references(problem)
        return super().submit(problem, responses, bare=bare)

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


_GROWTH_MB = 1024
"""Resident memory beyond that of the start at which a worker asks to be replaced."""


class CodeHandler(RequestHandler):
    """One judge, and the tests that it was asked about last."""

    def __init__(self, hello: dict[str, Any], send: Send) -> None:
        self._judge = CodeJudge(TypeAdapter(CodeOptions).validate_python(hello))
        try:
            self.greeting = {"tier": self._judge.sandbox.tier}
        except SandboxRefusal as error:
            raise Refused(str(error)) from error
        self._memory = psutil.Process()
        self._most = self._memory.memory_info().rss + _GROWTH_MB * 2**20
        self._suite: Suite | None = None
        self._trouble = ""

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        # left out when the same problem is asked about again: tests may be megabytes
        if "tests" in request:
            self._suite, self._trouble = None, ""
            try:
                self._suite = parse_suite(request["tests"])
            except SuiteError as error:
                self._trouble = str(error)
        verdict = dataclasses.asdict(self._verdict(request))
        return {"verdict": verdict, "retire": self._memory.memory_info().rss > self._most}

    def close(self) -> None:
        self._judge.close()

    def _verdict(self, request: dict[str, Any]) -> CodeVerdict:
        suite = self._suite
        if suite is None:
            return code_verdict("infrastructure_error", self._trouble, decided_by="suite")
        total = len(suite.cases)
        try:
            if request["program"]:
                return self._judge.judge_program(request["text"], suite)
            return self._judge.judge_response(request["text"], suite)
        except MemoryError:
            return code_verdict("output_limit", "its output is too large to be compared", total=total)
        except Exception as error:  # noqa: BLE001 - a hostile output must not end the worker; the pool retries elsewhere
            return code_verdict("infrastructure_error", f"the judge raised {error!r}", total=total)
