"""All replicas start, answer and are waited for at the same time, under one limit. Without Ray's processes."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from magicrl.config.cluster_schema import ClusterConfig, ClusterTimeouts
from magicrl.distributed import engine_pool
from magicrl.distributed.engine_pool import EnginePool, GroupPool
from magicrl.distributed.runtime import ClusterError, connected
from magicrl.rollout.protocol import Capabilities

FACTS = SimpleNamespace(max_context=64, host="here", pid=1, capabilities=Capabilities(), devices=())


class Actor:
    """Actor that starts in ``seconds``. Calls of a method in ``hung`` are never answered."""

    def __init__(self, workers: ThreadPoolExecutor, seconds: float, hung: tuple[str, ...]) -> None:
        self._workers, self._seconds, self._hung = workers, seconds, hung

    def __getattr__(self, name: str) -> Any:
        def remote(*_: Any) -> Future[Any]:
            if name in self._hung:
                return Future()
            return self._workers.submit(lambda: (time.sleep(self._seconds), FACTS if name == "start" else [])[1])

        return SimpleNamespace(remote=remote)


@pytest.fixture
def pool_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    def waited_for(call: Future[Any], seconds: float, what: str, **options: Any) -> Any:
        until = options.get("until")
        try:
            return call.result(seconds if until is None else max(0.01, until - time.monotonic()))
        except TimeoutError:
            raise ClusterError(f"waited {seconds:g} s for {what}") from None

    killed: list[Any] = []
    monkeypatch.setattr(engine_pool, "ray", SimpleNamespace(put=id, kill=killed.append))
    monkeypatch.setattr(engine_pool, "waited_for", waited_for)

    def make(count: int, *, seconds: float = 0.0, hung: tuple[str, ...] = (), limit: float = 0.4) -> EnginePool:
        workers = ThreadPoolExecutor(count)
        timeouts = ClusterTimeouts(start=limit, load_weights=limit)
        return EnginePool(lambda _: Actor(workers, seconds, hung), count, timeouts=timeouts)

    make.killed = killed  # type: ignore[attr-defined]
    return make


def test_replicas_start_at_the_same_time(pool_of: Any) -> None:
    began = time.monotonic()
    pool = pool_of(8, seconds=0.4, limit=5.0)
    assert time.monotonic() - began < 2 * 0.4
    assert len(pool.replicas) == 8


def test_a_replica_that_does_not_start_ends_the_others(pool_of: Any) -> None:
    with pytest.raises(ClusterError, match=r"waited 0.4 s for rollout replica 0 to start"):
        pool_of(3, hung=("start",))
    assert len(pool_of.killed) == 3


def test_hung_replicas_share_one_limit(pool_of: Any) -> None:
    pool = pool_of(8, hung=("load",))
    began = time.monotonic()
    pool.load_weights({}, 1)
    assert time.monotonic() - began < 2 * 0.4
    assert len(pool.lost) == 8
    assert all("waited 0.4 s for rollout replica" in loss for loss in pool.lost)


def test_new_ranks_and_new_replicas_form_the_group_again(pool_of: Any) -> None:
    """Form a group of two replicas of three workers and rank 0: seven members."""
    joined: list[int] = []
    learner: Any = SimpleNamespace(
        version=1, starts=1, weights=dict, send=lambda _: None, open_store=lambda: ("here", 1)
    )
    learner.join = lambda size, seconds: joined.append(size) or ()
    pool: Any = pool_of(2)
    pool.__class__ = GroupPool
    pool._learner, pool._workers, pool._members, pool.detours = learner, 3, None, 0

    def synced() -> int:
        pool.sync_weights(learner)
        return len(joined)

    assert [synced(), synced()] == [1, 1]
    learner.starts += 1
    assert [synced(), synced()] == [2, 2]
    pool._slots[0].actor = Actor(ThreadPoolExecutor(1), 0.0, ())
    assert [synced(), synced()] == [3, 3]
    assert joined == [7, 7, 7]
    pool._slots[0].actor._hung = ("take",)
    assert synced() == 3
    assert (len(pool.lost), pool.detours) == (1, 0)
    assert pool._members is None, "the group has lost a member"


def test_a_machine_too_busy_for_ray_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: Any) -> None:
        raise Exception("The current node timed out during startup. This could happen because ...")  # as Ray does

    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", init)
    with pytest.raises(ClusterError, match="the machine is too busy, or its memory is full; end other work"):
        connected(ClusterConfig()).__enter__()
