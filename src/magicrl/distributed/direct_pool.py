"""A pool whose vLLM workers take the learner's weights straight from its ranks, not through the object store.

Rank 0 of the learner and all workers of the replicas that live now form one group; it is formed anew when a replica was
replaced. Whatever goes wrong on the way costs time and nothing else: who answers that it failed is given the same
weights through the object store, as successors are; who does not answer is lost, as in any other call. Before each copy
every replica is asked for a sign of life: gloo notices a death during the copy, NCCL waits for the call's time-out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError, RayTaskError

from magicrl.config.schema import ClusterTimeouts
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

    def meeting(self, size: int, seconds: float) -> Meeting: ...

    def join(self, meeting: Meeting) -> tuple[Told, ...] | None: ...

    def send(self) -> bool: ...


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
        live = self._alive()
        answers = self._sent(live) if live and self._all_joined(live) else {}
        for slot in live:
            if slot.name not in answers and slot in self._slots:
                self.detours += 1
                self._taken(slot, self._load(slot), answers, again=False)
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

    def _alive(self) -> list[Slot]:
        """The replicas that have weights, those that have died meanwhile replaced."""
        live = [slot for slot in self._slots if not slot.starting]
        signs = [slot.actor.facts.remote() for slot in live]
        for slot, sign in zip(live, signs, strict=True):
            try:
                waited_for(sign, self._timeouts.load_weights, f"a sign of life of {slot.name}")
            except (RayActorError, ClusterError) as error:
                self._lose(slot, error)
        return [slot for slot in live if slot in self._slots]

    def _all_joined(self, live: Sequence[Slot]) -> bool:
        """Form the group anew unless these are its members."""
        actors = [slot.actor for slot in live]
        if actors == self._members:
            return True
        self._members = []
        try:
            meeting = self._learner.meeting(1 + len(live) * self._workers, self._timeouts.load_weights)
            calls = [slot.actor.join.remote(meeting, 1 + k * self._workers) for k, slot in enumerate(live)]
            told = self._learner.join(meeting)
        except LearnerLost:
            return False  # its ranks start anew with the next call; the replicas give up after ``meeting.seconds``
        for slot, call in zip(live, calls, strict=True):
            try:
                waited_for(call, self._timeouts.load_weights, f"{slot.name} to meet the learner")
            except (RayActorError, ClusterError) as error:
                self._lose(slot, error)
                return False
            except RayTaskError:
                told = None
        if told is None:
            return False
        self._told, self._members = told, actors
        return True

    def _sent(self, live: Sequence[Slot]) -> dict[str, list[RolloutGroup]]:
        """Send; the probes' answers of the replicas that have taken everything."""
        probes = self._check.requests if self._check else ()
        calls = [slot.actor.take.remote(self._told, self._version, probes) for slot in live]
        with contextlib.suppress(LearnerLost):  # the replicas will say that they did not get everything
            self._learner.send()
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
