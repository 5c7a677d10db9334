"""Reports of replicas and verifier nodes about a step: seconds, tokens, queues, and working times."""

from __future__ import annotations

import time
from typing import Any

import pytest

pytest.importorskip("ray")

from magicrl.distributed.engine_pool import ReplicaSlot
from magicrl.distributed.verifier_nodes import _Place, merged


def test_overlapping_work_is_told_once() -> None:
    """By hand: 1 to 3 and 2 to 4 are one, 4.5 follows within the pause of 0.5, 6 does not. 2.5 to 2.6 is inside."""
    intervals = [(6.0, 7.0), (2.0, 4.0), (4.5, 5.0), (1.0, 3.0), (2.5, 2.6)]
    assert merged(intervals, 0.5) == [(1.0, 5.0), (6.0, 7.0)]
    assert merged([], 0.5) == []


def test_a_node_is_busy_while_it_judges_anything() -> None:
    node: Any = None
    place = _Place(number=0, node=node, actor=None)
    for interval in ((10.0, 12.0), (11.0, 11.5), (20.0, 21.0)):
        place.took(*interval)
    place.add_up()
    assert (place.judged, place.busy, place.spans) == (3, 3.0, [(10.0, 12.0), (20.0, 21.0)])
    place.took(30.0, 30.25)
    place.add_up()
    assert place.busy == 3.25, "what was added up is not added again"


def test_a_replica_tells_its_step_and_then_the_next() -> None:
    slot = ReplicaSlot(index=3, actor=None)
    began = time.perf_counter()
    slot.assign(0, [0, 1])
    slot.assign(1, [0])
    for order, index in ((0, 0), (1, 0), (0, 1)):
        slot.deliver(order, index)
    slot.tokens += 12
    slot.busy, slot.peak_mb = 4.0, 7.0
    assert slot.observations() == {
        "cluster/replica_3/tokens": 12,
        "cluster/replica_3/busy_seconds": 4.0,
        "cluster/replica_3/tokens_per_second": 3.0,
        "cluster/replica_3/queue": 0,
        "cluster/replica_3/queue_max": 3,
        "cluster/replica_3/peak_mb": 7.0,
    }
    (span,) = slot.spans()
    assert (span.worker, span.what) == ("replica 3", "rollout")
    assert began <= span.begin <= span.end <= time.perf_counter()
    slot.assign(2, [0])
    slot.busy, slot.peak_mb = 4.5, 7.0
    observed = slot.observations()
    assert (observed["cluster/replica_3/queue"], observed["cluster/replica_3/busy_seconds"]) == (1, 0.5)
    assert observed["cluster/replica_3/queue_max"] == 1, "of the step and not of the run"
    (first,), (second,) = slot.spans(), slot.spans()
    assert first.end <= second.begin, "work that goes on is told in parts"
    # its successor reports what it had delivered, and its own seconds
    slot.tokens += 5
    observed = slot.successor(None, 0.0).observations()
    assert (observed["cluster/replica_3/tokens"], observed["cluster/replica_3/busy_seconds"]) == (5, 0.0)
