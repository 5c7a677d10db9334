"""Verifiers that read hostile text with heavy machinery: each item in a warm, killable worker.

`IsolatedProtocol` is the pool's end, `IsolatedHandler` what runs in the worker.
"""

from __future__ import annotations

import dataclasses
import random
import resource
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import psutil

from magicrl_verifiers.records import JudgeOptions, Verdict, Verifier, make_verdict
from magicrl_verifiers.references import resolve_reference
from magicrl_verifiers.workers import Exhausted, Item, RequestHandler, Send, WorkerPlan, WorkerProtocol

_MAX_REASON = 300
_MIN_STALL_SECONDS = 60.0
_STALL_FACTOR = 20.0


Progress = Callable[[str], None]
"""Called by an isolated verifier with the phase it enters (``reference``, ``answer``), so that blame can be laid."""


class IsolatedVerifier(Verifier, Protocol):
    """A verifier that reads hostile text with heavy machinery and therefore lives in a killable process."""

    def distrust(self, references: Sequence[str]) -> None:
        """Never parse these reference answers again:

        doing so exhausted a worker. Plain string equality still counts."""


class IsolatedProtocol(WorkerProtocol):
    """Items of one `IsolatedVerifier`; `IsolatedHandler` is the other end.

    Reference answers that no worker could read are remembered, so that each costs its time only once.

    Args:
        make: ``module:name`` of what makes the verifier in a worker, from (options, progress).
        options: how the answer is found in a response.
        time_limit: seconds of its worker's CPU time that one item may use.
        memory_limit_mb: MiB that an item may allocate beyond a warm worker's own.
        warm_up: a (reference answer, response) pair judged once when a worker starts, so that no item pays for loading.
    """

    def __init__(
        self,
        make: str,
        options: JudgeOptions,
        time_limit: float,
        memory_limit_mb: int,
        warm_up: tuple[str, str] = ("1", "\\boxed{1}"),
    ) -> None:
        self._time_limit = time_limit
        self.plan = WorkerPlan(
            handler="magicrl_verifiers.isolated:IsolatedHandler",
            hello={
                "make": make,
                "warm_up": warm_up,
                "options": dataclasses.asdict(options),
                "cpu_limit": time_limit,
                "memory_limit_mb": memory_limit_mb,
            },
            cpu_limit=time_limit,
            stall_limit=max(_MIN_STALL_SECONDS, _STALL_FACTOR * time_limit),
        )
        self._distrusted: set[tuple[str, ...]] = set()

    def request(self, item: Item, *, repeat: bool) -> dict[str, Any]:
        references = item.problem.references
        return {"references": list(references), "response": item.text, "distrust": references in self._distrusted}

    def exhausted(self, item: Item, outcome: Exhausted, seconds: float) -> Verdict:
        who = "reference" if outcome.phase == "reference" else "answer"
        status = "reference_unparsable" if who == "reference" else outcome.kind
        limit = f"{self._time_limit:g} s of CPU time"
        reason = f"the {who} used up {limit}" if outcome.kind == "timeout" else f"the {who} crashed the worker"
        return make_verdict(status, reason=reason, seconds=seconds)

    def final(self, item: Item, verdict: Verdict) -> bool:
        return item.problem.references in self._distrusted

    def give_up(self, item: Item, verdict: Verdict) -> None:
        if verdict.status == "reference_unparsable":
            self._distrusted.add(item.problem.references)


MAX_ITEMS = 20_000
"""A worker is replaced after so many items: caches of symbolic libraries only grow."""
_CPU_SLACK_SECONDS = 5


class IsolatedHandler(RequestHandler):
    """Holds the verifiers of this worker and turns a request into a reply."""

    def __init__(self, hello: dict[str, Any], send: Send) -> None:
        self._send = send
        self._item = -1
        self._phase = ""
        self._cpu_limit: float = hello["cpu_limit"]
        self._handled = 0
        make: Callable[[JudgeOptions, Progress], IsolatedVerifier] = resolve_reference("verifier", hello["make"])
        self._verifier = make(JudgeOptions(**hello["options"]), self._progress)
        reference, response = hello["warm_up"]
        # warm first: limits count from what the loaded libraries take
        self._verifier.judge([reference], response)
        # resident memory now, not ru_maxrss: that one starts at the size of the parent process
        self._most_resident = psutil.Process().memory_info().rss + hello["memory_limit_mb"] * 2**19
        limit_memory(hello["memory_limit_mb"])
        _lower(resource.RLIMIT_FSIZE, 0)  # it writes no files

    def _progress(self, phase: str) -> None:
        self._phase = phase
        if self._item >= 0:
            self._send({"item": self._item, "phase": phase})

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        self._item, self._phase = request["item"], ""
        limit_cpu(self._cpu_limit)
        random.seed(0)  # a verdict must not depend on the items before it
        if request["distrust"]:
            self._verifier.distrust(request["references"])
        # of the thread: with a limit of CPU time, Linux counts that of a process in ticks
        retire, start = False, time.thread_time()
        try:
            verdict = self._verifier.judge(request["references"], request["response"])
            verdict = dataclasses.replace(verdict, reason=verdict.reason[:_MAX_REASON])
        except MemoryError:
            verdict, retire = self._failed("memory", "the answer needs more memory than its limit"), True
        except RecursionError:
            verdict = self._failed("unparsable", "the answer is nested too deeply")
        except Exception as error:  # noqa: BLE001 - hostile text may raise anything; it must not end the worker
            verdict = self._failed("unparsable", f"the verifier raised {type(error).__name__}")
        verdict = dataclasses.replace(verdict, seconds=time.thread_time() - start)
        self._handled += 1
        retire = retire or self._handled >= MAX_ITEMS or psutil.Process().memory_info().rss > self._most_resident
        return {"verdict": dataclasses.asdict(verdict), "retire": retire}

    def _failed(self, status: str, reason: str) -> Verdict:
        if self._phase == "reference":
            status, reason = "reference_unparsable", reason.replace("answer", "reference")
        return make_verdict(status, reason=reason)


def limit_memory(memory_limit_mb: int) -> None:
    """Limit the address space (Linux) to that of the warm worker plus the limit; no core dumps."""
    if sys.platform == "linux":
        _lower(resource.RLIMIT_AS, psutil.Process().memory_info().vms + memory_limit_mb * 2**20)
    _lower(resource.RLIMIT_CORE, 0)


def _lower(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def limit_cpu(seconds: float) -> None:
    """Limit the CPU time of this process too: an orphan of a killed run then ends by itself."""
    lower_soft(resource.RLIMIT_CPU, int(time.process_time() + 2 * seconds) + _CPU_SLACK_SECONDS)


def lower_soft(kind: int, value: int) -> None:
    """Lower a limit of this process, but not the highest value that it and its children may set."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
