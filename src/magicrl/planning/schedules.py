"""How steps follow each other: synchronous, with partial rollouts, one step off, fully asynchronous.

A step's parts outside the rollout are given (``costs``); here they are laid beside the rollouts in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from magicrl.planning.simulator import Replica, ReplicaSetup, Request, requests_of, simulate_rollout, to_least_loaded


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
