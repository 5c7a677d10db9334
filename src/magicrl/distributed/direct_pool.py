"""A pool whose vLLM workers take the learner's weights straight from its ranks, not through the object store.

Rank 0 of the learner and all workers of the replicas that live now form one group; it is formed anew when a replica was
replaced. Whatever goes wrong on the way costs time and nothing else: who answers that it failed is given the same
weights through the object store, as successors are; who does not answer is lost, as in any other call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError, RayTaskError

from magicrl.config.cluster_schema import ClusterTimeouts
from magicrl.distributed.engine_pool import EnginePool
from magicrl.distributed.learner.ranks import LearnerLost
from magicrl.distributed.payload import pack
from magicrl.distributed.runtime import ClusterError, waited_for
from magicrl.distributed.slots import Slot
from magicrl.records import RolloutGroup
from magicrl.rollout.protocol import WeightGiver
from magicrl.rollout.vllm_transfer import Meeting, Told
from magicrl.rollout.weight_check import WeightCheck


class SendingLearner(WeightGiver, Protocol):
    """A learner whose ranks send; see ``DistributedLearner``."""

    def meeting(self, size: int) -> Meeting: ...

    def join(self, meeting: Meeting) -> tuple[Told, ...]: ...

    def send(self) -> None: ...


class DirectPool(EnginePool):
    """A `magicrl.rollout.protocol.TakingEngine`.

    Args:
        make, replicas, timeouts, restarts, check: as ``EnginePool``'s.
        learner: whose weights are taken.
        workers: vLLM's in each replica (its tensor-parallel degree).
    """

    def __init__(
        self,
        make: Callable[[int], Any],
        replicas: int,
        *,
        learner: SendingLearner,
        workers: int,
        timeouts: ClusterTimeouts,
        restarts: int = 8,
        check: WeightCheck | None = None,
    ) -> None:
        super().__init__(make, replicas, timeouts=timeouts, restarts=restarts, check=check)
        self._learner = learner
        self._workers = workers
        self._members: list[Any] = []  # actors that have joined, in the order of their places
        self._told: tuple[Told, ...] = ()
        self._stored = -1  # version of what lies in the object store
        self.detours = 0
        """Times that a replica was given its weights through the object store since the direct way failed."""

    def take_weights(self, giver: WeightGiver) -> None:
        """Have every replica take the learner's present weights and show them.

        Raises:
            ValueError: ``giver`` is not the learner whose ranks send.
            ClusterError: no replica is left.
            RuntimeError: a replica samples with other weights (from the check).
        """
        if giver is not self._learner:
            raise ValueError("a direct pool takes the weights of the learner that it was made with")
        version = self._learner.version
        self._weights, self._version = None, version
        live = [slot for slot in self._slots if not slot.starting]
        answers = self._sent(live) if self._all_joined(live) else {}
        for slot in live:
            if slot.name not in answers and slot in self._slots:
                self.detours += 1
                self._taken(slot, self._load(slot), answers, again=False)
        for slot in (slot for slot in self._slots if slot.starting):
            slot.pending = self._load(slot)  # what it was starting with is out of date
        if self._check is not None and answers:
            self._check.compare(answers, version)

    def observations(self) -> dict[str, float]:
        """As the pool's, and how often the direct way failed."""
        return super().observations() | {"cluster/replicas/detours": self.detours}

    def _load(self, slot: Slot) -> Any:
        """Through the object store, gathered when the first replica asks for it."""
        if self._weights is None:
            self._stored = self._learner.version
            self._weights = ray.put(pack(self._learner.weights()))
        probes = self._check.requests if self._check else ()
        return slot.actor.load.remote(self._weights, self._stored, probes)

    def _all_joined(self, live: Sequence[Slot]) -> bool:
        """Form the group anew unless these are its members."""
        actors = [slot.actor for slot in live]
        if actors == self._members:
            return True
        self._members = []
        try:
            meeting = self._learner.meeting(1 + len(live) * self._workers)
            calls = [slot.actor.join.remote(meeting, 1 + k * self._workers) for k, slot in enumerate(live)]
            self._told = self._learner.join(meeting)
        except LearnerLost:
            return False  # its ranks start anew with the next call; the replicas give up after ``meeting.seconds``
        for slot, call in zip(live, calls, strict=True):
            try:
                waited_for(call, self._timeouts.load_weights, f"{slot.name} to meet the learner")
            except (RayActorError, ClusterError) as error:
                self._lose(slot, error)
                return False
            except RayTaskError:
                return False
        self._members = actors
        return True

    def _sent(self, live: Sequence[Slot]) -> dict[str, list[RolloutGroup]]:
        """Send; the probes' answers of the replicas that have taken everything."""
        probes = self._check.requests if self._check else ()
        calls = [slot.actor.take.remote(self._told, self._version, probes) for slot in live]
        try:
            self._learner.send()
        except LearnerLost:
            self._members = []
        answers: dict[str, list[RolloutGroup]] = {}
        for slot, call in zip(live, calls, strict=True):
            self._taken(slot, call, answers, again=True)
        return answers

    def _taken(self, slot: Slot, call: Any, answers: dict[str, list[RolloutGroup]], *, again: bool) -> None:
        """Note a replica's answer; one that says it failed may be asked ``again``, any other is lost."""
        what = f"{slot.name} to take the weights of version {self._version}"
        try:
            answers[slot.name] = waited_for(call, self._timeouts.load_weights, what)
        except (RayActorError, RayTaskError, ClusterError) as error:
            self._members = []
            if not (again and isinstance(error, RayTaskError)):
                self._lose(slot, error)
