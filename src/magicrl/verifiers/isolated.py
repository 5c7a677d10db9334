"""The trade of verifiers that read hostile text with heavy machinery: each item in a warm, killable worker."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from magicrl.records import Verdict
from magicrl.verifiers.base import MAX_EXTRACTED, OUTCOME_OF_STATUS, JudgeOptions, make_verdict
from magicrl.verifiers.feeder import Item
from magicrl.verifiers.process import Exhausted, WorkerPlan

_MAX_DISTRUSTED = 10_000
_MAX_REASON = 300
_MIN_STALL_SECONDS = 60.0
_STALL_FACTOR = 20.0


class IsolatedTrade:
    """Items of one `IsolatedVerifier`; ``verifiers.worker`` is the other end.

    Golds that no worker could read are remembered, so that each costs its time only once.

    Args:
        name: the verifier's name in the registry.
        options: how the answer is found in a response.
        time_limit: seconds of its worker's CPU time that one item may use.
        memory_limit_mb: MiB that an item may allocate beyond a warm worker's own.
    """

    def __init__(self, name: str, options: JudgeOptions, time_limit: float, memory_limit_mb: int) -> None:
        self._time_limit = time_limit
        self._plan = WorkerPlan(
            module="magicrl.verifiers.worker",
            hello={
                "verifier": name,
                "reasoning": options.reasoning,
                "extract": options.extract,
                "cpu_limit": time_limit,
                "memory_limit_mb": memory_limit_mb,
            },
            cpu_limit=time_limit,
            stall_limit=max(_MIN_STALL_SECONDS, _STALL_FACTOR * time_limit),
        )
        self._distrusted: set[tuple[str, ...]] = set()
        self._lock = threading.Lock()

    @property
    def plan(self) -> WorkerPlan:
        return self._plan

    def request(self, item: Item, *, repeat: bool) -> dict[str, Any]:
        golds = item.problem.golds
        return {"golds": list(golds), "response": item.text, "distrust": self._distrusts(golds)}

    def read(self, message: Mapping[str, Any], seconds: float) -> Verdict:
        return verdict_from(message, seconds)

    def exhausted(self, outcome: Exhausted, seconds: float) -> Verdict:
        who = "gold" if outcome.phase == "gold" else "answer"
        status = "gold_unparsable" if who == "gold" else outcome.kind
        limit = f"{self._time_limit:g} s of CPU time"
        reason = f"the {who} used up {limit}" if outcome.kind == "timeout" else f"the {who} crashed the worker"
        return make_verdict(status, reason=reason, seconds=seconds)

    def lost(self, reason: str, seconds: float = 0.0) -> Verdict:
        return make_verdict("worker_lost", reason=reason, seconds=seconds)

    def final(self, item: Item, verdict: Verdict) -> bool:
        return self._distrusts(item.problem.golds)

    def give_up(self, item: Item, verdict: Verdict) -> None:
        with self._lock:
            if verdict.status == "gold_unparsable" and len(self._distrusted) < _MAX_DISTRUSTED:
                self._distrusted.add(item.problem.golds)

    def _distrusts(self, golds: tuple[str, ...]) -> bool:
        with self._lock:
            return golds in self._distrusted


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
