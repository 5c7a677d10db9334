"""A rollout played event by event (continuous batching on replicas, refill, a full cache, the tail), and how steps
follow each other: synchronous, one step off-policy, fully asynchronous.

Between two events (a response ends, the cache is full, a clock is reached) a replica's batch is constant and its
context grows by a token a sequence and step, so that any number of steps has a closed form (``DecodeCost.steps``): a
step of a thousand responses takes milliseconds to play, whatever their length.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf, sqrt

import numpy as np
from numpy.typing import NDArray

from magicrl.planning.costs import DecodeCost


@dataclass(slots=True)
class Request:
    """One response to be generated."""

    index: int  # its number, unique in a simulation
    group: int  # responses of a group share their prompt's prefill on a replica
    prompt: int  # tokens
    length: int  # tokens that it will have
    done: int = 0  # tokens that it has
    batch: int = 0  # the training step that it belongs to


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaSetup:
    """One replica of the engine."""

    cost: DecodeCost  # its decode step
    capacity: int  # tokens of context that its cache holds
    rows: int  # sequences that it decodes at once


@dataclass(slots=True)
class Replica:
    """The state of one replica; ``clock`` is its own time, seconds.

    Where the cache is full, the sequence admitted last gives up its place and is computed again later. Until a
    response ends nothing is admitted after that, so that no two sequences push each other out for ever.
    """

    setup: ReplicaSetup
    clock: float = 0.0
    tick: int = 0
    context: int = 0
    generated: int = 0
    preemptions: int = 0
    recomputed: int = 0
    waiting: deque[Request] = field(default_factory=deque[Request])
    running: dict[int, tuple[Request, int]] = field(default_factory=dict[int, tuple[Request, int]])
    finished: list[tuple[float, Request]] = field(default_factory=list[tuple[float, Request]])
    pending: Counter[int] = field(default_factory=Counter[int])  # unfinished responses of each training step
    _ends: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    _prompts: set[int] = field(default_factory=set[int])
    _blocked: bool = False

    def add(self, requests: Iterable[Request], now: float) -> None:
        """Queue requests at time ``now``.

        Raises:
            ValueError: a response that the whole cache cannot hold.
        """
        if not self.running and not self.waiting:
            self.clock = max(self.clock, now)
        for request in requests:
            if request.prompt + request.length > self.setup.capacity:
                raise ValueError(
                    f"a response of {request.prompt} + {request.length} tokens does not fit into a cache of "
                    f"{self.setup.capacity} tokens; divide the model over more accelerators, or lower T"
                )
            self.waiting.append(request)
            self.pending[request.batch] += 1

    def outstanding(self) -> int:
        """Requests that are not finished."""
        return len(self.waiting) + len(self.running)

    def run(self, until: float = inf, stop: Callable[[], bool] | None = None) -> None:
        """Go on until nothing is left, ``clock`` reaches ``until`` (a decode step is ended), or ``stop`` says so."""
        while self.clock < until and not (stop is not None and stop()):
            self._admit()
            if not self.running:
                return
            count = len(self.running)
            steps = self._next_end() - self.tick
            room = (self.setup.capacity - self.context) // count
            if room < 1:
                self._preempt()
                continue
            steps = min(steps, room)
            if until < inf:
                steps = min(steps, self._steps_within(until - self.clock))
            self.clock += self.setup.cost.steps(steps, count, self.context)
            self.tick += steps
            self.context += steps * count
            self.generated += steps * count
            self._finish()

    def recompute_context(self) -> None:
        """New weights: the cache of every running sequence is computed again; the prompts' cache is dropped."""
        self.clock += self.setup.cost.prefill * self.context
        self.recomputed += self.context
        self._prompts.clear()

    def _admit(self) -> None:
        setup = self.setup
        while self.waiting and len(self.running) < setup.rows and not (self._blocked and self.running):
            request = self.waiting[0]
            needed = request.prompt + request.done
            # room for a token more of every sequence, or the next step would push the new one out again
            if self.running and self.context + needed + len(self.running) + 1 > setup.capacity:
                return
            self.waiting.popleft()
            prompt = 0 if request.group in self._prompts else request.prompt
            self._prompts.add(request.group)
            self.recomputed += request.done
            self.clock += setup.cost.prefill * (prompt + request.done)
            end = self.tick + request.length - request.done
            self.running[request.index] = (request, end)
            heappush(self._ends, (end, request.index))
            self.context += needed

    def _next_end(self) -> int:
        while True:
            end, index = self._ends[0]
            entry = self.running.get(index)
            if entry is not None and entry[1] == end:
                return end
            heappop(self._ends)  # of a sequence that was preempted

    def _finish(self) -> None:
        while self.running and self._next_end() <= self.tick:
            _, index = heappop(self._ends)
            request, _ = self.running.pop(index)
            request.done = request.length
            self.context -= request.prompt + request.length
            self.finished.append((self.clock, request))
            self.pending[request.batch] -= 1
            if not self.pending[request.batch]:
                del self.pending[request.batch]
            self._blocked = False

    def _preempt(self) -> None:
        assert len(self.running) > 1, "a lone sequence fits, `add` has checked it"
        _, (request, end) = self.running.popitem()
        request.done = request.length - (end - self.tick)
        self.context -= request.prompt + request.done
        self.waiting.appendleft(request)
        self.preemptions += 1
        self._blocked = True

    def _steps_within(self, seconds: float) -> int:
        """Steps until ``seconds`` have passed, the last one begun before; at least one."""
        # n steps take n * linear + n**2 * square seconds, since every step reads the tokens of those before
        count, cost = len(self.running), self.setup.cost
        linear = cost.step(count, self.context) - cost.context * count / 2
        square = cost.context * count / 2
        # the form of the root that also holds where square is 0
        steps = 2 * seconds / (linear + sqrt(linear * linear + 4 * square * seconds))
        return max(1, int(np.ceil(steps)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """What a played rollout took."""

    seconds: float  # until the last response ended
    finish: NDArray[np.float64]  # ``[responses]`` seconds at which each ended, in the order of the requests
    replica_seconds: NDArray[np.float64]  # ``[replicas]`` when each had nothing left
    tokens: int  # generated, over all replicas
    preemptions: int  # sequences that gave up their place
    recomputed: int  # tokens prefilled again after that

    @property
    def idle(self) -> float:
        """Share of the replicas' time in which they had nothing left to do."""
        return float(1 - self.replica_seconds.mean() / self.seconds) if self.seconds else 0.0

    def tail(self, share: float = 0.9) -> float:
        """Share of the time spent after ``share`` of the responses had ended."""
        return float(1 - np.quantile(self.finish, share) / self.seconds) if self.seconds else 0.0


def requests_of(lengths: NDArray[np.int64], prompt: int, batch: int = 0, first: int = 0) -> list[Request]:
    """Requests of ``[groups, group_size]`` lengths, group after group."""
    groups, size = lengths.shape
    return [
        Request(
            index=first + g * size + m, group=first + g * size, prompt=prompt, length=int(lengths[g, m]), batch=batch
        )
        for g in range(groups)
        for m in range(size)
    ]


def dealt(requests: Sequence[Request], replicas: int) -> list[list[Request]]:
    """Requests to replicas in blocks of neighbours, so that a group stays together and prefills its prompt once."""
    edges = [round(i * len(requests) / replicas) for i in range(replicas + 1)]
    return [list(requests[edges[i] : edges[i + 1]]) for i in range(replicas)]


def to_least_loaded(requests: Sequence[Request], replicas: Sequence[Replica], now: float) -> None:
    """Each request to the replica that has the fewest outstanding."""
    load = [(replica.outstanding(), i) for i, replica in enumerate(replicas)]
    heapify(load)
    for request in requests:
        count, i = heappop(load)
        replicas[i].add([request], now)
        heappush(load, (count + 1, i))


def simulate_rollout(requests: Sequence[Request], setup: ReplicaSetup, replicas: int) -> Rollout:
    """All responses of one synchronous step.

    Raises:
        ValueError: no replica, no request, or a response longer than the cache.
    """
    if replicas < 1 or not requests:
        raise ValueError(f"a rollout needs a replica and a response, got {replicas} and {len(requests)}")
    engines = [Replica(setup) for _ in range(replicas)]
    for engine, share in zip(engines, dealt(requests, replicas), strict=True):
        engine.add(share, 0.0)
        engine.run()
    ended = {request.index: time for engine in engines for time, request in engine.finished}
    finish = np.array([ended[request.index] for request in requests])
    return Rollout(
        seconds=float(finish.max()),
        finish=finish,
        replica_seconds=np.array([engine.clock for engine in engines]),
        tokens=sum(engine.generated for engine in engines),
        preemptions=sum(engine.preemptions for engine in engines),
        recomputed=sum(engine.recomputed for engine in engines),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepParts:
    """Seconds of a step outside its rollout."""

    logprobs: float  # old and reference log-probs
    learn: float  # updates
    sync: float  # new weights to the engine
    other: float  # judging, data handling

    @property
    def total(self) -> float:
        """All of them."""
        return self.logprobs + self.learn + self.sync + self.other


def one_step_off(rollout: float, parts: StepParts) -> float:
    """Seconds a step where the next batch is generated while this one is learned, with a barrier at the weights."""
    return max(rollout, parts.total - parts.sync) + parts.sync


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """Several steps played in a row."""

    updates: NDArray[np.float64]  # [steps] seconds at which each update ended
    tokens: int  # generated
    recomputed: int  # tokens prefilled again after interruptions and preemptions

    def seconds_per_step(self, warm: int = 2) -> float:
        """Mean seconds between updates after the first ``warm``."""
        assert 0 < warm < len(self.updates)
        return float((self.updates[-1] - self.updates[warm - 1]) / (len(self.updates) - warm))


def simulate_async(
    batches: Sequence[NDArray[np.int64]],
    prompt: int,
    setup: ReplicaSetup,
    replicas: int,
    parts: StepParts,
    staleness: int,
) -> Stream:
    """Fully asynchronous steps: engine and learner have their own accelerators.

    Batch j may start once update ``j - staleness`` has ended, and is learned when all its responses are there (in the
    order of issue, so that short ones get no preference). An update interrupts the engine: running sequences keep
    their tokens (partial rollouts), their cache is computed anew under the new weights.

    Args:
        batches: a ``[groups, group_size]`` array of lengths for each step.
        prompt: tokens.
        setup: of a replica.
        replicas: of the engine.
        parts: of a step; all of them on the learner's side.
        staleness: updates that a batch may be behind; 0 generates and learns in turn.

    Raises:
        ValueError: a response longer than the cache.
    """
    engines = [Replica(setup) for _ in range(replicas)]
    issued, now, first = 0, 0.0, 0
    updates: list[float] = []
    for step in range(len(batches)):
        while issued < len(batches) and issued <= step + staleness:
            requests = requests_of(batches[issued], prompt, issued, first)
            first += len(requests)
            to_least_loaded(requests, engines, now)
            issued += 1
        ready = max(_run_until_ready(engine, step) for engine in engines)
        now = max(now, ready) + parts.total - parts.sync
        for engine in engines:
            engine.run(until=now)
            engine.clock = max(engine.clock, now) + parts.sync
            engine.recompute_context()
        now += parts.sync
        updates.append(now)
    return Stream(
        updates=np.array(updates),
        tokens=sum(engine.generated for engine in engines),
        recomputed=sum(engine.recomputed for engine in engines),
    )


def _run_until_ready(engine: Replica, step: int) -> float:
    """Run to the end of the engine's last response of batches up to ``step``; that time (0 where it has none)."""
    engine.run(stop=lambda: all(batch > step for batch in engine.pending))
    return max((time for time, request in engine.finished if request.batch <= step), default=0.0)
