"""Losses at awkward moments: without any replica, before a successor has reported, after a long silence."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from builders import completion, request
from ray.exceptions import RayActorError, RayTaskError

from magicrl.config.cluster_schema import ClusterTimeouts
from magicrl.distributed import engine_pool
from magicrl.distributed.runtime import ClusterError
from magicrl.rollout.protocol import Capabilities

FACTS = SimpleNamespace(max_context=64, host="here", pid=1, capabilities=Capabilities(), devices=())


class Remote:
    """An actor's method as the pool calls it. The result of a call is decided when it is waited for."""

    def __init__(self, name: str, asked: list[str]) -> None:
        self._name, self._asked = name, asked

    def remote(self, *_: Any) -> str:
        self._asked.append(self._name)
        return self._name


def pool_of(
    monkeypatch: pytest.MonkeyPatch,
    answer: Callable[[str], Any],
    *,
    wait: Callable[..., Any] = lambda calls, **_: (calls[:1], calls[1:]),
    asked: list[str] | None = None,
    **options: Any,
) -> engine_pool.EnginePool:
    """Return a pool of one. ``answer`` gives the result of each call by its name, which is appended to ``asked``."""
    ray = SimpleNamespace(put=id, kill=id, wait=wait)
    monkeypatch.setattr(engine_pool, "ray", ray)
    monkeypatch.setattr(engine_pool, "waited_for", lambda call, *_, **__: answer(call))
    methods = ("start", "load", "collect", "submit")
    told: list[str] = [] if asked is None else asked
    actor = SimpleNamespace(**{name: Remote(name, told) for name in methods})
    return engine_pool.EnginePool(lambda index: actor, 1, timeouts=ClusterTimeouts(generate=5.0), **options)


def test_a_pool_has_the_capabilities_of_its_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse runs that need requests in flight, which a custom engine may lack in a pool as in one process."""
    found = [Capabilities(turns=False)]

    def facts(_: str) -> Any:
        return SimpleNamespace(**(vars(FACTS) | {"capabilities": found[0]}))

    pool = pool_of(monkeypatch, facts)
    assert (pool.capabilities.in_flight, pool.capabilities.turns, pool.capabilities.sleep) == (False, False, False)
    found[0] = Capabilities(turns=False, adapters=True)
    pool._slots.append(engine_pool.ReplicaSlot(index=1, actor=pool._slots[0].actor))
    with pytest.raises(ClusterError, match=r"rollout replica 1 .* has other capabilities .* \(adapters\); install"):
        pool._meet(pool._slots[1], facts("start"))


def died() -> Any:
    raise RayActorError


def test_the_context_is_known_while_the_only_replica_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(monkeypatch, lambda call: died() if call == "load" else FACTS)
    assert pool.max_context == 64
    pool.load_weights({}, 1)  # this call kills the replica
    assert len(pool.lost) == 1
    assert pool.replicas == (None,)
    assert pool.max_context == 64


@pytest.mark.parametrize(
    "trouble",
    [
        RayActorError(),
        ClusterError("waited 900 s for rollout replica 0 to start"),
        RayTaskError("start", "ValueError: the cache does not fit", ValueError("the cache does not fit")),
    ],
)
def test_successors_that_die_before_they_told_of_themselves_are_losses(
    monkeypatch: pytest.MonkeyPatch, trouble: Exception
) -> None:
    told = [FACTS]

    def answer(call: str) -> Any:
        if call == "start":
            if told:
                return told.pop()
            raise trouble
        return died() if call == "load" and not pool.lost else []

    pool = pool_of(monkeypatch, answer, restarts=3)
    pool.load_weights({}, 1)
    assert pool._wait(0.0)
    assert len(pool.lost) == 2
    told.append(FACTS)
    assert pool._wait(0.0)
    assert pool.replicas == (None,), "it has no weights yet"
    assert pool._wait(0.0)
    assert pool.replicas == (FACTS,)
    pool.load_weights({}, 2)
    assert len(pool.lost) == 2
    pool._lose(pool._slots[0], RayActorError())
    with pytest.raises(ClusterError, match=r"4 rollout replicas were lost, cluster\.rollout\.restarts = 3"):
        pool._wait(0.0)


def test_a_successor_is_given_the_present_weights_once_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of the steps in which a successor starts do not wait for it, and it never ends up with older ones."""
    asked: list[str] = []
    pool = pool_of(monkeypatch, lambda call: FACTS if call == "start" else [], asked=asked)
    pool.load_weights({}, 0)
    pool._lose(pool._slots[0], RayActorError())
    asked.clear()
    for version in (1, 2, 3):
        pool.load_weights({}, version)
    assert asked == []
    assert pool._wait(0.0)
    assert asked == ["load"]
    pool.load_weights({}, 4)  # while it loads those of version 3
    assert pool._wait(0.0)
    assert asked == ["load", "load"]
    assert pool.replicas == (None,)
    assert pool._wait(0.0)
    assert pool.replicas == (FACTS,)
    assert asked == ["load", "load"]


def test_silence_counts_only_while_the_pool_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner's step that is longer than ``timeouts.generate`` is not the replica's fault."""
    now = 0.0

    def wait(calls: list[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        nonlocal now
        now += timeout
        return [], calls

    monkeypatch.setattr(engine_pool, "time", SimpleNamespace(monotonic=lambda: now, perf_counter=lambda: now))
    pool = pool_of(monkeypatch, lambda call: FACTS if call == "start" else [], wait=wait)
    pool.load_weights({}, 0)
    pool.submit([request(0, [5], size=2)])
    now += 100.0
    for _ in range(5):
        pool._wait(1.0)
    assert not pool.lost
    pool._wait(1.0)
    assert [loss.partition(": ")[2] for loss in pool.lost] == ["waited 5 s for a sample; it owes those of 1 groups"]


def test_what_has_arrived_of_an_open_group_outlives_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run requests only the missing sample, on a pool as in one process."""
    asked = request(0, [5], size=2)
    arrived = completion([7, 8], text="78", policy_version=3)
    collected = ([(0, 1, arrived)], 0.0, 0.0)
    pool = pool_of(monkeypatch, lambda call: FACTS if call == "start" else collected)
    pool.submit([asked])
    pool._wait(0.0)
    kept = pool.snapshot()
    resumed = pool_of(monkeypatch, lambda call: FACTS)
    resumed.resume(kept, [asked])
    assert resumed._slots[0].assigned == {0: {0}}
    (group,) = resumed._groups.open.values()
    assert group.done[1].tokens.tolist() == [7, 8]
    assert group.done[1].policy_version == 3
    resumed = pool_of(monkeypatch, lambda call: FACTS)
    resumed.resume({"orders": 1}, [asked])  # state of a single process, whose caches cannot be used here
    assert resumed._slots[0].assigned == {0: {0, 1}}
