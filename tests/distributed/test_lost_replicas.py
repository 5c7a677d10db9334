"""The pool while no replica is there: what it says of itself does not depend on who is alive at that moment."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from magicrl.config.cluster_schema import ClusterTimeouts
from magicrl.distributed import engine_pool


class Remote:
    """An actor's method as the pool calls it; what comes of the call is decided where it is waited for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def remote(self, *_: Any) -> str:
        return self._name


def test_the_context_is_known_while_the_only_replica_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def waited_for(call: str, seconds: float, what: str) -> Any:
        if call == "load":
            raise RayActorError
        return SimpleNamespace(max_context=64, host="here", pid=1)

    monkeypatch.setattr(engine_pool, "waited_for", waited_for)
    monkeypatch.setattr(engine_pool, "ray", SimpleNamespace(put=id, kill=id))
    actor = SimpleNamespace(facts=Remote("facts"), load=Remote("load"), collect=Remote("collect"))
    pool = engine_pool.EnginePool(lambda index: actor, 1, timeouts=ClusterTimeouts())
    assert pool.max_context == 64
    pool.load_weights({}, 1)  # the replica dies of it
    assert len(pool.lost) == 1
    assert pool.replicas == (None,)
    assert pool.max_context == 64
