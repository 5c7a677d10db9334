"""A pool whose ranks lend buckets: order of the calls, and the cost of a failure on either side. Without processes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import RayActorError, RayTaskError

from magicrl.config.cluster_schema import ClusterTimeouts
from magicrl.distributed import engine_pool
from magicrl.distributed.engine_pool import ColocatedPool, ReplicaSlot
from magicrl.distributed.learner.launchers import LearnerLost


class Call:
    """A delayed call of an actor's method: it runs only when somebody waits for it."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def remote(self, *given: Any) -> Any:
        return lambda: self.run(*given)


class FakeReplica:
    """Replica that copies the bucket when its answer is waited for. ``breaks``: bucket at which it raises an error."""

    def __init__(self, told: list[str], number: int) -> None:
        self.number, self.copies, self.breaks = number, list[str](), dict[str, Exception]()

        def receive(bucket: list[str]) -> None:
            if (error := self.breaks.get(bucket[0])) is not None:
                raise error
            self.copies.append(bucket[0])
            told.append(f"{number} has {bucket[0]}")

        def load(payload: Any, version: int, probes: Any) -> list[Any]:
            told.append(f"{number} loads {version}")
            return []

        self.receive, self.load = Call(receive), Call(load)
        self.facts, self.sleep = Call(lambda: None), Call(lambda: told.append(f"{number} sleeps"))
        self.complete = Call(lambda version, probes: told.append(f"{number} completes {version}"))


class FakeLearner:
    """Learner with two buckets in one memory. With ``dies``, it dies before the second."""

    def __init__(self, told: list[str]) -> None:
        self.told, self.version, self.dies = told, 7, False

    def buckets(self) -> Iterator[list[str]]:
        memory = [""]
        for content in ("b0", "b1"):
            if self.dies and content == "b1":
                raise LearnerLost(0, "died", "buckets")
            memory[0] = content
            self.told.append(f"filled {content}")
            yield memory
        self.told.append("given back")

    def weights(self) -> dict[str, Any]:
        self.told.append("gathered")
        return {}


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[str], list[FakeReplica]]:
    told: list[str] = []
    replicas = [FakeReplica(told, number) for number in range(2)]
    pool: Any = ColocatedPool.__new__(ColocatedPool)
    pool._learner, pool.detours, pool._check, pool._timeouts = FakeLearner(told), 0, None, ClusterTimeouts()
    pool._slots = [ReplicaSlot(index=index, actor=actor, starting=False) for index, actor in enumerate(replicas)]
    pool._lose = lambda slot, error: (told.append(f"{slot.index} lost"), pool._slots.remove(slot))
    monkeypatch.setattr(engine_pool, "waited_for", lambda call, *_, **__: call())
    monkeypatch.setattr(engine_pool, "ray", SimpleNamespace(put=lambda _: "stored"))
    return pool, told, replicas


def task_error() -> Exception:
    return RayTaskError("receive", "the traceback", ValueError("no room"))


def test_a_bucket_is_filled_anew_when_every_replica_has_copied_it(parts: Any) -> None:
    pool, told, replicas = parts
    pool.sync_weights(pool._learner)
    taken = [f"{number} has b{bucket}" for bucket in (0, 1) for number in (0, 1)]
    ranks = ["filled b0", *taken[:2], "filled b1", *taken[2:], "given back"]
    assert told == [*ranks, "0 completes 7", "1 completes 7"], "the ranks give their memory back before caches need it"
    assert [replica.copies for replica in replicas] == [["b0", "b1"]] * 2
    assert pool.detours == 0


@pytest.mark.parametrize("when", ["b0", "b1"])
def test_a_replica_that_fails_takes_a_detour_and_the_ranks_go_on_to_the_end(parts: Any, when: str) -> None:
    pool, told, replicas = parts
    replicas[0].breaks[when] = task_error()
    pool.sync_weights(pool._learner)
    assert replicas[1].copies == ["b0", "b1"]
    assert told[-4:] == ["given back", "1 completes 7", "gathered", "0 loads 7"]
    assert (pool.detours, len(pool._slots)) == (1, 2)


def test_a_replica_that_dies_is_lost_and_nothing_else(parts: Any) -> None:
    pool, told, replicas = parts
    replicas[0].breaks["b1"] = RayActorError()
    pool.sync_weights(pool._learner)
    assert told[-3:] == ["1 has b1", "given back", "1 completes 7"]
    assert told.count("0 lost") == 1
    assert (pool.detours, [slot.index for slot in pool._slots]) == (0, [1])


def test_replicas_give_their_memory_back_before_lost_ranks_start_anew(parts: Any) -> None:
    pool, told, _ = parts
    pool._learner.dies = True
    pool.sync_weights(pool._learner)
    assert told[-5:] == ["0 sleeps", "1 sleeps", "gathered", "0 loads 7", "1 loads 7"]
    assert pool.detours == 2
