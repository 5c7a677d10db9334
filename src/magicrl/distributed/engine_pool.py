"""Many rollout replicas as one engine: requests are distributed, and samples of a dead replica are issued again.

All requests of one ``submit`` are assigned before any of them runs, each to the replica with the fewest tokens still to
come. The same submissions therefore give every replica the same work, however fast it is. A replica that dies or is
silent for too long is replaced by one with the current weights. Meanwhile the other replicas generate the samples that
it had not delivered: no sample is lost or delivered twice. Replicas keep generating while they have work; new weights
are loaded between two turns of an engine, and unfinished responses continue with them.

In a `DirectPool` vLLM's workers take the learner's weights directly from its ranks: in a `GroupPool` on separate
devices, in a `ColocatedPool` on the devices of the ranks. A replica that reports a failure gets the same weights
through the object store; one that does not answer is lost. Before each copy every replica has to respond: gloo notices
a death during the copy, NCCL only at the limit.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import ray
from ray.exceptions import RayActorError, RayTaskError

from magicrl.config.cluster_schema import ClusterTimeouts
from magicrl.distributed.learner.launchers import LearnerLost
from magicrl.distributed.learner.learner import DistributedLearner
from magicrl.distributed.replica import ReplicaFacts
from magicrl.distributed.runtime import ClusterError, cause_of, waited_for
from magicrl.distributed.tensors import pack
from magicrl.distributed.worker_logs import output_hint
from magicrl.records import RolloutGroup, RolloutRequest
from magicrl.rollout.protocol import WeightCheck, WeightSource
from magicrl.rollout.requests import EndedSample, OpenGroups, SchedulingEngine, check_request
from magicrl.rollout.weight_buckets import WeightInfo
from magicrl.training.protocols import WorkSpan


@dataclass(kw_only=True, eq=False)
class ReplicaSlot:
    """A replica's slot in the pool: its current actor, the samples assigned to it, and its figures for the step."""

    index: int  # its name in metrics and errors
    actor: Any  # Ray's handle
    facts: ReplicaFacts | None = None  # None until it has started
    pending: Any = None  # the pending call: ``start`` and then ``load`` while it starts, else ``collect``
    starting: bool = True  # it does not have the current weights yet
    given: int | None = None  # version of the weights that it loads while it starts
    assigned: dict[int, set[int]] = field(default_factory=dict[int, set[int]])  # sample indices by issue order
    heard: float = 0.0  # the pool's ``_listened`` when it last delivered or was assigned work
    tokens: int = 0  # delivered since `observations`
    busy: float = 0.0  # seconds spent generating so far
    busy_reported: float = 0.0  # of them at the last `observations`
    peak_mb: float = 0.0  # peak memory of its accelerator, MiB
    longest: int = 0  # most samples assigned at once since `observations`
    _began: float | None = None
    _spans: list[WorkSpan] = field(default_factory=list[WorkSpan])

    @property
    def name(self) -> str:
        where = "" if self.facts is None else f" ({self.facts.host}, process {self.facts.pid})"
        return f"rollout replica {self.index}{where}"

    @property
    def queue(self) -> int:
        """Samples assigned and not delivered."""
        return sum(map(len, self.assigned.values()))

    def assign(self, order: int, indices: Iterable[int]) -> None:
        """Assign these samples of a request to it."""
        self.assigned.setdefault(order, set()).update(indices)
        self.longest = max(self.longest, self.queue)
        if self._began is None:
            self._began = time.perf_counter()

    def deliver(self, order: int, index: int) -> None:
        """Take a delivered sample off its list."""
        self.assigned[order].discard(index)
        if not self.assigned[order]:
            del self.assigned[order]
        if not self.assigned:
            self._rest()

    def release(self) -> None:
        """Take everything off its list."""
        self.assigned.clear()
        self._rest()

    def successor(self, actor: Any, listened: float) -> ReplicaSlot:
        """Return the slot with another actor, whose busy seconds start at 0; figures not reported yet are kept."""
        self._rest()
        successor = ReplicaSlot(index=self.index, actor=actor, heard=listened)
        successor.tokens, successor.longest, successor._spans = self.tokens, self.longest, self._spans
        return successor

    def observations(self) -> dict[str, float]:
        """Return metrics since the last call: tokens and their rate, the queue now and at its longest, memory."""
        key, busy = f"cluster/replica_{self.index}", self.busy - self.busy_reported
        values = {
            f"{key}/tokens": self.tokens,
            f"{key}/busy_seconds": busy,
            f"{key}/tokens_per_second": self.tokens / busy if busy else 0.0,
            f"{key}/queue": self.queue,
            f"{key}/queue_max": max(self.longest, self.queue),
            f"{key}/peak_mb": self.peak_mb,
        }
        self.tokens, self.busy_reported, self.longest = 0, self.busy, 0
        return values

    def spans(self) -> list[WorkSpan]:
        """Return when it had work since the last call, in seconds of this process's ``perf_counter``."""
        if self._began is not None:
            self._rest()
            self._began = time.perf_counter()
        spans, self._spans = self._spans, []
        return spans

    def _rest(self) -> None:
        if self._began is not None:
            self._spans.append(WorkSpan(f"replica {self.index}", "rollout", self._began, time.perf_counter()))
        self._began = None


class EnginePool(SchedulingEngine):
    """Rollout replicas, each an engine in a Ray actor.

    Args:
        make: starts the actor of a slot, given its index; called again for its successors.
        replicas: number of replicas.
        timeouts: limits of every wait.
        restarts: replicas that may be lost before the pool stops with an error.
        check: compares every replica's answers with the learner after each weight copy.
        file: returns the file that keeps the output of a slot's replicas; default: none.

    Raises:
        ClusterError, ValueError: a replica did not start in time, or its engine cannot be made.
    """

    def __init__(
        self,
        make: Callable[[int], Any],
        replicas: int,
        *,
        timeouts: ClusterTimeouts,
        restarts: int = 8,
        check: WeightCheck | None = None,
        file: Callable[[int], str | None] = lambda _: None,
    ) -> None:
        self._make, self._file = make, file
        self._timeouts = timeouts
        self._restarts = restarts
        self._check = check
        self._groups = OpenGroups()
        self._waiting: deque[tuple[int, set[int]]] = deque()  # while there is no replica
        self._busy_lost = 0.0  # busy seconds of replicas that were lost, on average
        self._listened = 0.0  # seconds spent waiting for the replicas
        self._weights: tuple[Any, int] = (None, -1)  # reference to the current payload, and its version
        self._max_context = sys.maxsize  # kept here: there may be no replica at the moment
        self.lost: list[str] = []  # names of all lost replicas, with the reason
        self._slots = [ReplicaSlot(index=index, actor=make(index)) for index in range(replicas)]
        calls = [(slot, slot.actor.start.remote()) for slot in self._slots]  # all load their models at the same time
        until = time.monotonic() + timeouts.start
        try:
            for slot, call in calls:
                self._meet(slot, waited_for(call, timeouts.start, f"{slot.name} to start", until=until))
                slot.starting = False
        except (RayActorError, RayTaskError) as error:
            failed = next(slot for slot in self._slots if slot.starting)
            where = output_hint(file(failed.index))
            self.close()
            raise ValueError(f"{failed.name} could not be made: {cause_of(error)}{where}") from error
        except ClusterError:
            self.close()
            raise

    @property
    def replicas(self) -> tuple[ReplicaFacts | None, ...]:
        """Facts of each slot's replica; None where a successor is starting."""
        return tuple(None if slot.starting else slot.facts for slot in self._slots)

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """See `RolloutEngine.submit`."""
        for request in requests:
            check_request(request, self.max_context)
        self._distribute([(group.order, set(group.to_start)) for group in self._groups.take_in(requests)])

    def sampled_tokens(self) -> int:
        return 0

    def _ahead(self, tokens: int) -> list[EndedSample]:
        """Return what has arrived; the replicas work all the time, whatever ``tokens`` is."""
        while self._wait(0.0):
            pass
        return self._groups.ended()

    @contextmanager
    def newest_weights(self) -> Generator[None]:
        """Inside this context, only requests submitted in it are returned; other samples are kept until after it."""
        with self._groups.set_aside():
            yield

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices of all started replicas."""
        return tuple(name for slot in self._slots if slot.facts is not None for name in slot.facts.devices)

    def peak_mb(self) -> float:
        """Return the peak memory over all accelerators of all replicas, MiB."""
        return max((slot.peak_mb for slot in self._slots), default=0.0)

    def busy_seconds(self) -> float:
        """Return the seconds that the replicas spent generating, on average."""
        return self._busy_lost + sum(slot.busy for slot in self._slots) / max(1, len(self._slots))

    def load_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """Put the weights into the object store once, have every replica load them, and check them.

        A starting successor loads the weights that are current when it is ready: pending calls would each hold a copy
        in the store, and Ray does not guarantee their order.
        """
        self._weights, self._version = (ray.put(pack(weights)), version), version
        self._compare(self._answers([(slot, self._load(slot)) for slot in self._live], self._what))

    def sleep(self) -> None:
        """Have every replica release its GPU memory until the next ``load_weights``.

        A replica that is lost meanwhile is replaced first: its engine is loaded on the learner's GPUs.
        """
        asleep: list[ReplicaSlot] = []
        while awake := [slot for slot in self._slots if slot not in asleep]:
            calls = [(slot, slot.actor.sleep.remote()) for slot in awake if not slot.starting]
            asleep += self._answers(calls, "to give its memory back")
            if any(slot.starting for slot in self._slots):
                self._wait(1.0)

    def interrupt(self, *, keep: bool = False) -> list[RolloutRequest]:
        """Stop; return the unfinished requests in issue order, with ``keep`` including their finished samples."""
        unfinished = self._unfinished(keep=keep)
        self._groups.drop()
        self._waiting.clear()
        for slot in self._slots:
            slot.release()
        self._answers([(slot, slot.actor.interrupt.remote()) for slot in self._live], "to stop")
        return unfinished

    def close(self) -> None:
        """End every replica. Safe to call twice."""
        for slot in self._slots:
            ray.kill(slot.actor)
        self._slots.clear()
        self._groups.drop()

    def observations(self) -> dict[str, float]:
        """Return metrics since the last call: losses, and the figures of each replica."""
        values: dict[str, float] = {"cluster/replicas/lost": len(self.lost)}
        for slot in self._slots:
            values |= slot.observations()
        return values

    def spans(self) -> list[WorkSpan]:
        """Return when each replica had work since the last call."""
        return [span for slot in self._slots for span in slot.spans()]

    @property
    def _live(self) -> list[ReplicaSlot]:
        return [slot for slot in self._slots if not slot.starting]

    def _answers(
        self,
        calls: Sequence[tuple[ReplicaSlot, Any]],
        what: str,
        *,
        until: float | None = None,
        failed: Literal["raise", "skip", "lose"] = "raise",
    ) -> dict[ReplicaSlot, Any]:
        """Return what replicas answer to calls that were made at the same time and share one limit.

        Args:
            calls: each replica's.
            what: what a replica is to do, for errors.
            until: moment of ``time.monotonic`` at which the limit ends; default: ``timeouts.load_weights`` from now.
            failed: what becomes of a replica that answers with an error. One that gives no answer is lost.
        """
        limit = self._timeouts.load_weights
        until = time.monotonic() + limit if until is None else until
        answers: dict[ReplicaSlot, Any] = {}
        for slot, call in calls:
            try:
                answers[slot] = waited_for(call, limit, f"{slot.name} {what}", until=until)
            except RayTaskError as error:
                if failed == "raise":
                    raise
                if failed == "lose":
                    self._lose(slot, error)
            except (RayActorError, ClusterError) as error:
                self._lose(slot, error)
        return answers

    def _compare(self, answers: Mapping[ReplicaSlot, list[RolloutGroup]]) -> None:
        """Have the weights' check look at what replicas answered to its probes."""
        if self._check is not None and answers:
            self._check.compare({slot.name: groups for slot, groups in answers.items()}, self._version)

    # distribution

    def _distribute(self, work: Sequence[tuple[int, set[int]]]) -> None:
        """Assign each request's samples to the replica with the fewest tokens to come, in issue order."""
        live = self._live
        if not live:
            self._waiting.extend(work)
            return
        shares: dict[int, list[tuple[int, RolloutRequest]]] = {slot.index: [] for slot in live}
        loads = {
            slot.index: sum(
                _tokens(self._groups.open[order].request, len(found)) for order, found in slot.assigned.items()
            )
            for slot in live
        }
        for order, indices in work:
            slot = min(live, key=lambda slot: (loads[slot.index], slot.index))
            group = self._groups.open[order]
            # Expected work counts, not what is done so far: the assignment must not depend on the speed of a machine.
            loads[slot.index] += _tokens(group.request, len(indices))
            slot.assign(order, indices)
            partial = tuple((index, group.partial[index]) for index in sorted(indices) if index in group.partial)
            part = replace(group.request, samples=tuple(sorted(indices)), begun=partial)
            shares[slot.index].append((order, part))
        for slot in live:
            if shares[slot.index]:
                slot.heard = self._listened
                slot.actor.submit.remote(shares[slot.index])

    # collecting

    def _advance(self) -> None:
        self._wait(1.0)

    def _wait(self, seconds: float) -> bool:
        """Wait for the next answer of any replica and replace silent replicas; return whether an answer came.

        Only time spent waiting here counts as silence: replicas are not lost because of a long learner step.
        """
        for slot in self._slots:
            if slot.pending is None:
                slot.pending = slot.actor.collect.remote()
        calls = {slot.pending: slot for slot in self._slots}
        began = time.monotonic()
        done, _ = ray.wait(list(calls), num_returns=1, timeout=seconds)
        self._listened += time.monotonic() - began
        for call in done:
            slot = calls[call]
            slot.pending = None
            try:
                answer = waited_for(call, self._timeouts.load_weights, f"what {slot.name} has sent")
            except (RayActorError, ClusterError) as error:
                self._lose(slot, error)
                continue
            except RayTaskError as error:  # raised by the engine: its process is alive
                if slot.facts is None:
                    self._lose(slot, ClusterError(f"its engine cannot be made: {cause_of(error)}"))
                    continue
                raise error.cause from error
            if slot.starting:
                self._begin(slot, answer)
            else:
                samples, slot.busy, slot.peak_mb = answer
                for order, index, completion in samples:
                    group = self._groups.open.get(order)
                    if group is None or index not in slot.assigned.get(order, ()):
                        continue  # interrupted meanwhile
                    slot.deliver(order, index)
                    slot.heard = self._listened
                    slot.tokens += len(completion)
                    self._groups.file(group, index, completion)
        for slot in self._slots:
            limit = self._timeouts.start if slot.starting else self._timeouts.generate
            if (slot.starting or slot.assigned) and self._listened - slot.heard > limit:
                groups = len(slot.assigned)
                what = "its engine to start" if slot.starting else f"a sample; it owes those of {groups} groups"
                self._lose(slot, ClusterError(f"waited {limit:g} s for {what}"))
        return bool(done)

    # starting and losing

    @property
    def _what(self) -> str:
        return f"to take the weights of version {self._version}"

    @property
    def _probes(self) -> Sequence[RolloutRequest]:
        return self._check.requests if self._check else ()

    def _load(self, slot: ReplicaSlot) -> Any:
        return slot.actor.load.remote(*self._weights, self._probes)

    def _meet(self, slot: ReplicaSlot, facts: ReplicaFacts) -> None:
        slot.facts = facts
        known = [slot.facts for slot in self._slots if slot.facts is not None]
        self._max_context = min(one.max_context for one in known)
        found = [asdict(one.capabilities) for one in known]
        differing = [name for name in found[0] if len({one[name] for one in found}) > 1]
        if differing:
            raise ClusterError(
                f"the engine of {slot.name} has other capabilities than those of other replicas "
                f"({', '.join(differing)}); install the same packages on every node"
            )
        self.capabilities = facts.capabilities

    def _begin(self, slot: ReplicaSlot, answer: Any) -> None:
        """Handle the first answers of a successor: it gets work once it has the current weights."""
        if slot.facts is None:
            self._meet(slot, answer)
        elif slot.given == self._version:
            self._compare({slot: answer} if answer else {})
            slot.starting, slot.heard = False, self._listened
            work = list(self._waiting)
            self._waiting.clear()
            self._distribute(work)
            return
        slot.given, slot.heard = self._version, self._listened
        slot.pending = self._load(slot)

    def _lose(self, slot: ReplicaSlot, error: Exception) -> None:
        """Replace a lost replica and assign its samples to the others.

        Raises:
            ClusterError: too many were lost.
        """
        reason = str(error).strip().splitlines()[0]
        self.lost.append(f"{slot.name}: {reason}{output_hint(self._file(slot.index))}")
        ray.kill(slot.actor)
        assigned = sorted(slot.assigned.items())
        if len(self.lost) > self._restarts:
            raise ClusterError(
                f"{len(self.lost)} rollout replicas were lost, cluster.rollout.restarts = {self._restarts}; the last: "
                f"{self.lost[-1]}. Resume from the last checkpoint once the cause is gone"
            )
        successor = slot.successor(self._make(slot.index), self._listened)
        # Keep a lost replica's share, so that the mean over the replicas does not fall at a loss.
        self._busy_lost += slot.busy / len(self._slots)
        self._slots[self._slots.index(slot)] = successor
        successor.pending = successor.actor.start.remote()
        self._distribute(assigned)


def _tokens(request: RolloutRequest, samples: int) -> int:
    """Return the largest possible number of tokens of these samples and the prompt."""
    return len(request.prompt_tokens) + samples * request.sampling.max_tokens


class DirectPool(EnginePool):
    """A pool whose vLLM workers take the weights from the ranks of ``learner``."""

    def __init__(
        self, make: Callable[[int], Any], replicas: int, *, learner: DistributedLearner, **options: Any
    ) -> None:
        super().__init__(make, replicas, **options)
        self._learner = learner
        self.detours = 0  # copies through the object store because the direct way failed

    def sync_weights(self, learner: WeightSource) -> None:
        """Have every replica take the learner's current weights, and check them."""
        if learner is not self._learner:
            raise ValueError("a direct pool takes the weights of the learner that it was made with")
        self._weights, self._version = (None, -1), self._learner.version
        # Find dead replicas before the copy: NCCL would notice one only after its full limit.
        signs = [(slot, slot.actor.facts.remote()) for slot in self._live]
        live = list(self._answers(signs, "to give a sign of life"))
        answers = self._sent(live) if live else {}
        detours = [(slot, self._load(slot)) for slot in live if slot not in answers and slot in self._slots]
        self.detours += len(detours)
        self._compare(answers | self._answers(detours, self._what, failed="lose"))

    def observations(self) -> dict[str, float]:
        """Return the pool's metrics and how often the direct way failed."""
        return super().observations() | {"cluster/replicas/detours": self.detours}

    def _sent(self, live: Sequence[ReplicaSlot]) -> dict[ReplicaSlot, list[RolloutGroup]]:
        """Send the weights; return the probes' answers of the replicas that have received everything."""
        raise NotImplementedError

    def _load(self, slot: ReplicaSlot) -> Any:
        """Load through the object store, into which the weights are gathered for the first replica."""
        if self._weights[0] is None:
            version = self._learner.version
            self._weights = ray.put(pack(self._learner.weights())), version
        return super()._load(slot)


class GroupPool(DirectPool):
    """Rank 0 and all workers (``workers`` in each replica) form one group.

    It is formed again when a replica or the ranks were replaced, or when a copy failed. One limit,
    ``timeouts.load_weights``, holds for a whole copy. A single wait inside the group has half of it, so that everybody
    reports a member that hangs before the pool would take the others for lost, too.
    """

    def __init__(self, make: Callable[[int], Any], replicas: int, *, workers: int, **options: Any) -> None:
        super().__init__(make, replicas, **options)
        self._workers = workers
        self._members: tuple[int, list[Any]] | None = None  # `DistributedLearner.starts`, and actors in order of place
        self._infos: tuple[WeightInfo, ...] = ()

    def _joined(self, live: Sequence[ReplicaSlot]) -> bool:
        """Form the group unless these replicas and the present ranks are its members; whether all have come."""
        # Compare actors and not slots: a successor has the slot of the replica that it replaces.
        actors = [slot.actor for slot in live]
        if self._members == (self._learner.starts, actors):
            return True
        self._members = None
        limit, size = self._timeouts.load_weights, 1 + len(live) * self._workers
        until = time.monotonic() + limit
        try:
            store = self._learner.open_store()
            calls = [
                (slot, slot.actor.join.remote(store, 1 + place * self._workers, size, limit / 2))
                for place, slot in enumerate(live)
            ]
            weights = self._learner.join(size, limit / 2)
        except LearnerLost:
            return False  # its ranks start again with the next call; the replicas give up after their limit
        came = self._answers(calls, "to meet the learner", until=until, failed="skip")
        if weights is None or len(came) < len(live):
            return False
        self._infos, self._members = weights, (self._learner.starts, actors)
        return True

    def _sent(self, live: Sequence[ReplicaSlot]) -> dict[ReplicaSlot, list[RolloutGroup]]:
        if not self._joined(live):
            return {}
        limit = self._timeouts.load_weights
        until = time.monotonic() + limit
        calls = [(slot, slot.actor.take.remote(self._infos, self._version, self._probes)) for slot in live]
        with contextlib.suppress(LearnerLost):  # the replicas will say that they did not get everything
            self._learner.send(limit)
        answers = self._answers(calls, self._what, until=until, failed="skip")
        if len(answers) < len(live):
            self._members = None
        return answers


class ColocatedPool(DirectPool):
    """Each rank lends a bucket to the worker on its device, and fills it again when all workers have copied it."""

    def _sent(self, live: Sequence[ReplicaSlot]) -> dict[ReplicaSlot, list[RolloutGroup]]:
        taking = list(live)
        try:
            # always to its end: gathering the weights is a collective of the ranks
            for bucket in self._learner.buckets():
                calls = [(slot, slot.actor.receive.remote(bucket)) for slot in taking]
                taking = list(self._answers(calls, self._what, failed="skip"))
        except LearnerLost:
            # new ranks start on these GPUs and need the memory of the half-loaded engines
            self._answers([(slot, slot.actor.sleep.remote()) for slot in taking], self._what, failed="skip")
            return {}
        calls = [(slot, slot.actor.complete.remote(self._version, self._probes)) for slot in taking]
        return self._answers(calls, self._what, failed="skip")
