"""The simulator: hand-computed schedules, tokens conserved, more replicas never slower, against a step-by-step loop."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magicrl.planning.costs import DecodeCost
from magicrl.planning.simulator import (
    Replica,
    ReplicaSetup,
    Request,
    StepParts,
    dealt,
    one_step_off,
    requests_of,
    simulate_async,
    simulate_rollout,
)

COST = DecodeCost(overhead=1.0, weights=2.0, sequence=0.5, context=0.01, prefill=0.001)
FREE = DecodeCost(overhead=1.0, weights=0.0, sequence=0.0, context=0.0, prefill=0.0)
PARTS = StepParts(logprobs=1.0, learn=5.0, sync=1.0, other=3.0)
Batch = st.lists(st.lists(st.integers(1, 60), min_size=4, max_size=4), min_size=1, max_size=8)


def setup(capacity: int = 10**6, rows: int = 1000, cost: DecodeCost = COST) -> ReplicaSetup:
    return ReplicaSetup(cost=cost, capacity=capacity, rows=rows)


def test_two_responses_by_hand() -> None:
    """Both decode for 2 steps, then one goes on alone for 3; a second a step."""
    played = simulate_rollout(requests_of(np.array([[2, 5]]), prompt=3), setup(cost=FREE), 1)
    assert played.finish.tolist() == [2.0, 5.0]
    assert (played.seconds, played.tokens, played.idle) == (5.0, 7, 0.0)


def test_prompt_is_prefilled_once_a_group_and_context_is_paid_for() -> None:
    cost = DecodeCost(overhead=0.0, weights=0.0, sequence=0.0, context=1.0, prefill=10.0)
    played = simulate_rollout(requests_of(np.array([[1, 1]]), prompt=3), setup(cost=cost), 1)
    assert played.seconds == 3 * 10 + (3 + 3)


def test_refill_waits_for_a_row() -> None:
    played = simulate_rollout(requests_of(np.array([[4, 2, 3]]), prompt=1), setup(rows=2, cost=FREE), 1)
    assert played.finish.tolist() == [4.0, 2.0, 5.0]


def test_a_full_cache_pushes_the_youngest_out_and_computes_it_again() -> None:
    """Two sequences of 2 + 6 tokens in 10 slots: at 5 + 5 the second gives way, and comes back after the first."""
    cost = DecodeCost(overhead=1.0, weights=0.0, sequence=0.0, context=0.0, prefill=0.0)
    played = simulate_rollout(requests_of(np.array([[6, 6]]), prompt=2), setup(capacity=10, cost=cost), 1)
    assert played.preemptions == 1
    assert played.recomputed == 3
    assert played.finish.tolist() == [6.0, 9.0]
    assert played.tokens == 12


def test_a_response_that_no_cache_holds_is_refused() -> None:
    with pytest.raises(ValueError, match=r"10 \+ 30 tokens does not fit into a cache of 39 tokens"):
        simulate_rollout(requests_of(np.array([[30]]), prompt=10), setup(capacity=39), 1)
    with pytest.raises(ValueError, match="needs a replica and a response"):
        simulate_rollout([], setup(), 1)


def test_blocks_keep_groups_together() -> None:
    requests = requests_of(np.ones((4, 2), dtype=np.int64), prompt=1)
    assert [[r.group for r in share] for share in dealt(requests, 2)] == [[0, 0, 2, 2], [4, 4, 6, 6]]


def played_step_by_step(lengths: list[int], prompt: int, at: ReplicaSetup) -> float:
    """One replica without limits, a decode step at a time."""
    clock = at.cost.prefill * prompt
    done = dict.fromkeys(range(len(lengths)), 0)
    while done:
        clock += at.cost.step(len(done), sum(prompt + n for n in done.values()))
        done = {i: n + 1 for i, n in done.items() if n + 1 < lengths[i]}
    return clock


@given(lengths=st.lists(st.integers(1, 80), min_size=1, max_size=12), prompt=st.integers(1, 20))
def test_events_give_what_single_steps_give(lengths: list[int], prompt: int) -> None:
    played = simulate_rollout(requests_of(np.array([lengths]), prompt), setup(), 1)
    assert played.seconds == pytest.approx(played_step_by_step(lengths, prompt, setup()))


@settings(deadline=None)
@given(
    batch=Batch,
    replicas=st.integers(1, 5),
    capacity=st.integers(70, 400),
    rows=st.integers(1, 20),
)
def test_tokens_are_conserved(batch: list[list[int]], replicas: int, capacity: int, rows: int) -> None:
    lengths = np.array(batch)
    played = simulate_rollout(requests_of(lengths, 8), setup(capacity, rows), replicas)
    assert played.tokens == lengths.sum()
    assert len(played.finish) == lengths.size
    assert played.finish.max() == played.seconds
    assert 0 <= played.idle < 1


@settings(deadline=None)
@given(batch=Batch, replicas=st.integers(1, 4), factor=st.integers(2, 3))
def test_more_replicas_at_fixed_parallelism_are_never_slower(
    batch: list[list[int]], replicas: int, factor: int
) -> None:
    """A multiple of the replicas divides each one's share, so that every response ends no later."""
    requests = requests_of(np.array(batch), 8)
    few = simulate_rollout(requests, setup(), replicas)
    many = simulate_rollout(requests_of(np.array(batch), 8), setup(), replicas * factor)
    # a group's prompt is prefilled once a replica, which a replica with one member less pays anew: never more than one
    slack = COST.prefill * 8 * len(batch)
    assert np.all(many.finish <= few.finish + slack + 1e-9)


def test_an_interrupted_replica_goes_on_from_where_it_was() -> None:
    replica = Replica(setup(cost=FREE))
    replica.add([Request(0, 0, 2, 10), Request(1, 0, 2, 4)], 0.0)
    replica.run(until=3.0)
    assert (replica.clock, replica.generated, replica.context) == (3.0, 6, 10)
    replica.run()
    assert (replica.clock, replica.generated, replica.recomputed) == (10.0, 14, 0)


def test_one_step_off_hides_the_shorter_side() -> None:
    assert one_step_off(20.0, PARTS) == 21.0
    assert one_step_off(4.0, PARTS) == 10.0


def batches(seed: int, count: int = 12) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 200, (6, 4)) for _ in range(count)]


def test_asynchronous_steps_conserve_tokens_and_overlap() -> None:
    work = batches(0)
    in_turn = simulate_async(work, 8, setup(rows=8), 2, PARTS, staleness=0)
    stale = simulate_async(work, 8, setup(rows=8), 2, PARTS, staleness=3)
    total = sum(int(b.sum()) for b in work)
    assert in_turn.tokens == stale.tokens == total
    assert in_turn.recomputed == 0 < stale.recomputed
    assert stale.seconds_per_step(4) < in_turn.seconds_per_step(4)
    assert np.all(np.diff(stale.updates) >= PARTS.total - 1e-9)  # the learner does one update after another


def test_an_asynchronous_run_without_staleness_is_rollout_and_update_in_turn() -> None:
    work = batches(1, 3)
    stream = simulate_async(work, 8, setup(), 1, PARTS, staleness=0)
    alone = [simulate_rollout(requests_of(b, 8), setup(), 1).seconds for b in work]
    expected = np.cumsum([seconds + PARTS.total for seconds in alone])
    assert stream.updates.tolist() == pytest.approx(expected.tolist())
