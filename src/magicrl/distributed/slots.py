"""A replica's place in the pool: the actor that fills it now, what that one owes, and what is told of it each step."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from magicrl.distributed.replica import Harvest, ReplicaFacts
from magicrl.training.protocols import WorkSpan


@dataclass(kw_only=True, eq=False)
class Slot:
    """A place.

    Attributes:
        index: names it.
        actor: Ray's handle.
        facts: None until it has answered for the first time.
        pending: the call on whose answer the pool waits: ``facts`` and then ``load`` while it starts, else ``collect``.
        starting: it has not the present weights yet.
        given: version of the weights that it takes while it starts.
        owed: sample indices by issue order.
        heard: seconds that the pool had listened at its last delivered sample, or at the hand-over of work.
        tokens: delivered since `observations`.
        busy, busy_told: seconds spent generating so far, and at the last `observations`.
        peak_mb: most memory of its accelerator so far.
        longest: most samples owed at once since `observations`.
    """

    index: int
    actor: Any
    facts: ReplicaFacts | None = None
    pending: Any = None
    starting: bool = True
    given: int | None = None
    owed: dict[int, set[int]] = field(default_factory=dict[int, set[int]])
    heard: float = 0.0
    tokens: int = 0
    busy: float = 0.0
    busy_told: float = 0.0
    peak_mb: float = 0.0
    longest: int = 0
    _began: float | None = None
    _spans: list[WorkSpan] = field(default_factory=list[WorkSpan])

    @property
    def name(self) -> str:
        where = "" if self.facts is None else f" ({self.facts.host}, process {self.facts.pid})"
        return f"rollout replica {self.index}{where}"

    @property
    def queue(self) -> int:
        """Samples that it owes."""
        return sum(map(len, self.owed.values()))

    def owes(self, order: int, indices: Iterable[int]) -> None:
        """It is asked for these samples of a request."""
        self.owed.setdefault(order, set()).update(indices)
        self.longest = max(self.longest, self.queue)
        if self._began is None:
            self._began = time.perf_counter()

    def settle(self, order: int, index: int) -> None:
        """It has delivered this one."""
        self.owed[order].discard(index)
        if not self.owed[order]:
            del self.owed[order]
        if not self.owed:
            self._rest()

    def excuse(self) -> None:
        """It owes nothing any more."""
        self.owed.clear()
        self._rest()

    def heard_of(self, harvest: Harvest) -> None:
        """What it tells of itself with every delivery."""
        self.busy, self.peak_mb = harvest.busy, harvest.peak_mb

    def successor(self, actor: Any, listened: float) -> Slot:
        """The place with another actor in it, whose seconds begin anew; what is not told yet is kept."""
        self._rest()
        return Slot(
            index=self.index,
            actor=actor,
            heard=listened,
            tokens=self.tokens,
            longest=self.longest,
            _spans=self._spans,
        )

    def observations(self) -> dict[str, float]:
        """Metrics since the last call: what it delivered, how fast, how much it owes and owed at most, its memory."""
        key, busy = f"cluster/replica_{self.index}", self.busy - self.busy_told
        values = {
            f"{key}/tokens": self.tokens,
            f"{key}/busy_seconds": busy,
            f"{key}/tokens_per_second": self.tokens / busy if busy else 0.0,
            f"{key}/queue": self.queue,
            f"{key}/queue_max": max(self.longest, self.queue),
            f"{key}/peak_mb": self.peak_mb,
        }
        self.tokens, self.busy_told, self.longest = 0, self.busy, 0
        return values

    def spans(self) -> list[WorkSpan]:
        """When it owed something, since the last call; seconds of this process's ``perf_counter``."""
        if self._began is not None:
            self._rest()
            self._began = time.perf_counter()
        told, self._spans = self._spans, []
        return told

    def _rest(self) -> None:
        if self._began is not None:
            self._spans.append(WorkSpan(f"replica {self.index}", "rollout", self._began, time.perf_counter()))
        self._began = None
