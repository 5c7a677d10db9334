"""A rollout played event by event (continuous batching on replicas, refill, a full cache, the tail), and how steps
follow each other: synchronous, with partial rollouts, one step off-policy, fully asynchronous.

Between two events (a response ends, the cache is full, a clock is reached) a replica's batch is constant and its
context grows by a token a sequence and step, so that any number of steps has a closed form (``DecodeCost.steps``): a
step of a thousand responses takes milliseconds to play, whatever their length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf, sqrt
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from magicrl.planning.costs import DecodeCost

Deal = Literal["blocks", "interleaved"]


@dataclass(slots=True)
class Request:
    """One response to be generated.

    Attributes:
        index: its number, unique in a simulation.
        group: responses of a group share their prompt's prefill on a replica.
        prompt: tokens.
        length: tokens that it will have.
        done: tokens that it has.
        batch: the training step that it belongs to.
    """

    index: int
    group: int
    prompt: int
    length: int
    done: int = 0
    batch: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaSetup:
    """One replica of the engine.

    Attributes:
        cost: its decode step.
        capacity: tokens of context that its cache holds.
        rows: sequences that it decodes at once.
    """

    cost: DecodeCost
    capacity: int
    rows: int


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

    def withdraw(self) -> list[Request]:
        """Take back everything unfinished, with the tokens that each has."""
        kept: list[Request] = []
        for request, end in self.running.values():
            request.done = request.length - (end - self.tick)
            kept.append(request)
        kept += self.waiting
        self.running.clear()
        self.waiting.clear()
        self._ends.clear()
        self.context = 0
        return kept

    def _admit(self) -> None:
        setup = self.setup
        while self.waiting and len(self.running) < setup.rows and not (self._blocked and self.running):
            request = self.waiting[0]
            needed = request.prompt + request.done
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
        count, cost = len(self.running), self.setup.cost
        linear = cost.step(count, self.context) - cost.context * count / 2
        square = cost.context * count / 2
        if square <= 0:
            steps = seconds / linear
        else:
            steps = (sqrt(linear * linear + 4 * square * seconds) - linear) / (2 * square)
        return max(1, int(np.ceil(steps)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """What a played rollout took.

    Attributes:
        seconds: until the last response ended.
        finish: ``[responses]`` seconds at which each ended, in the order of the requests.
        replica_seconds: ``[replicas]`` when each had nothing left.
        tokens: generated, over all replicas.
        preemptions: sequences that gave up their place.
        recomputed: tokens prefilled again after that.
    """

    seconds: float
    finish: NDArray[np.float64]
    replica_seconds: NDArray[np.float64]
    tokens: int
    preemptions: int
    recomputed: int

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


def dealt(requests: Sequence[Request], replicas: int, deal: Deal) -> list[list[Request]]:
    """Requests to replicas: in ``blocks`` of neighbours (a group stays together) or ``interleaved``, one in turn."""
    if deal == "interleaved":
        return [list(requests[i::replicas]) for i in range(replicas)]
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


def simulate_rollout(requests: Sequence[Request], setup: ReplicaSetup, replicas: int, deal: Deal = "blocks") -> Rollout:
    """All responses of one synchronous step.

    Raises:
        ValueError: no replica, no request, or a response longer than the cache.
    """
    if replicas < 1 or not requests:
        raise ValueError(f"a rollout needs a replica and a response, got {replicas} and {len(requests)}")
    engines = [Replica(setup) for _ in range(replicas)]
    for engine, share in zip(engines, dealt(requests, replicas, deal), strict=True):
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
    """Seconds of a step outside its rollout.

    Attributes:
        logprobs: old and reference log-probs.
        learn: updates.
        sync: new weights to the engine.
        other: judging, data handling.
    """

    logprobs: float
    learn: float
    sync: float
    other: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.logprobs + self.learn + self.sync + self.other


def one_step_off(rollout: float, parts: StepParts) -> float:
    """Seconds a step where the next batch is generated while this one is learned, with a barrier at the weights."""
    return max(rollout, parts.total - parts.sync) + parts.sync


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """Several steps played in a row.

    Attributes:
        updates: ``[steps]`` seconds at which each update ended.
        rollout: mean seconds a step until the batch was there.
        tokens: generated until the last update.
        trained: tokens of the batches that were learned.
        recomputed: tokens prefilled again after interruptions and preemptions.
        in_flight: tokens generated that no update has used at the end.
        staleness: the largest number of updates between a response's first token's weights and its own update.
    """

    updates: NDArray[np.float64]
    tokens: int
    trained: int
    recomputed: int
    in_flight: int
    staleness: int

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
    lags: list[int] = []
    for step, batch in enumerate(batches):
        while issued < len(batches) and issued <= step + staleness:
            requests = requests_of(batches[issued], prompt, issued, first)
            first += len(requests)
            to_least_loaded(requests, engines, now)
            issued += 1
            lags.append(issued - 1 - step)
        ready = max(_run_until_ready(engine, step) for engine in engines)
        now = max(now, ready) + parts.total - parts.sync
        for engine in engines:
            engine.run(until=now)
            engine.clock = max(engine.clock, now) + parts.sync
            engine.recompute_context()
        now += parts.sync
        updates.append(now)
        assert batch.size > 0
    return _stream(engines, updates, sum(int(b.sum()) for b in batches), max(lags))


def _run_until_ready(engine: Replica, step: int) -> float:
    """Run to the end of the engine's last response of batches up to ``step``; that time (0 where it has none)."""
    seen = 0
    left = sum(request.batch <= step for request in engine.waiting)
    left += sum(request.batch <= step for request, _ in engine.running.values())
    last = max((time for time, request in engine.finished if request.batch == step), default=0.0)
    start = len(engine.finished)

    def done() -> bool:
        nonlocal seen, left, last
        for time, request in engine.finished[start + seen :]:
            seen += 1
            if request.batch <= step:
                left -= 1
                last = max(last, time)
        return left == 0

    engine.run(stop=done)
    done()
    return last


def simulate_partial(
    batches: Sequence[NDArray[np.int64]],
    prompt: int,
    setup: ReplicaSetup,
    replicas: int,
    parts: StepParts,
    extra: float,
) -> Stream:
    """Synchronous steps that do not wait for the tail: each holds ``1 + extra`` batches of responses, and ends when a
    batch's worth is there; the others go on from where they are in the next step, whose weights compute their cache
    anew.

    Raises:
        ValueError: ``extra`` is negative, or a response is longer than the cache.
    """
    if extra < 0:
        raise ValueError(f"partial rollouts need extra >= 0, got {extra:g}")
    carried: list[Request] = []
    supply = [r for j, b in enumerate(batches) for r in requests_of(b, prompt, j, j * b.size)]
    needed, now, spent, recomputed, trained, first_used = batches[0].size, 0.0, 0, 0, 0, dict[int, int]()
    updates: list[float] = []
    lag = 0
    while len(supply) + len(carried) >= needed:
        wanted = max(0, round(needed * (1 + extra)) - len(carried))
        work, supply = carried + supply[:wanted], supply[wanted:]
        for request in work:
            first_used.setdefault(request.index, len(updates))
        # played once to learn when the batch is full, and once more up to then
        ends = np.sort(simulate_rollout([_copy(r) for r in work], setup, replicas, "interleaved").finish)
        engines = [Replica(setup) for _ in range(replicas)]
        for i, engine in enumerate(engines):
            engine.add(work[i::replicas], 0.0)
            engine.run(until=float(ends[needed - 1]))
        finished = [request for engine in engines for _, request in engine.finished]
        carried = [request for engine in engines for request in engine.withdraw()]
        lag = max([lag, *(len(updates) - first_used[r.index] for r in finished)])
        trained += sum(request.length for request in finished)
        spent += sum(engine.generated for engine in engines)
        recomputed += sum(engine.recomputed for engine in engines)
        now += float(ends[needed - 1]) + parts.total
        updates.append(now)
    return Stream(
        updates=np.array(updates),
        tokens=spent,
        trained=trained,
        recomputed=recomputed,
        in_flight=sum(request.done for request in carried),
        staleness=lag,
    )


def _copy(request: Request) -> Request:
    return Request(request.index, request.group, request.prompt, request.length, request.done, request.batch)


def _stream(engines: Sequence[Replica], updates: list[float], trained: int, staleness: int) -> Stream:
    tokens = sum(engine.generated for engine in engines)
    return Stream(
        updates=np.array(updates),
        tokens=tokens,
        trained=trained,
        recomputed=sum(engine.recomputed for engine in engines),
        in_flight=sum(r.done for engine in engines for r in engine.withdraw()),
        staleness=staleness,
    )
