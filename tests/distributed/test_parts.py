"""What the run's own process holds on a cluster, decided from the recipe and Ray's count of the nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("ray")

from magicrl.config.schema import TrainConfig
from magicrl.distributed import cluster_parts
from magicrl.distributed.runtime import Node
from magicrl.models.loading import load_policy


@pytest.fixture
def parts(
    make_recipe: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., cluster_parts.ClusterParts]:
    """Parts of a recipe on two nodes that Ray would count so."""

    def make(cluster: dict[str, Any], *, gpus: int = 0, **sections: Any) -> cluster_parts.ClusterParts:
        room = {"cpus": 16.0, "gpus": float(gpus), "memory": 1e9, "object_store": 1e9}
        alive = [Node(id=name, address=name, head=name == "a", **room) for name in ("a", "b")]
        monkeypatch.setattr(cluster_parts, "nodes", lambda: alive)
        return cluster_parts.ClusterParts(make_recipe(cluster, run={"name": "parts", "device": "auto"}, **sections))

    return make


@pytest.mark.parametrize(("ranks", "gpus", "here"), [(1, 0, True), (2, 0, False), (1, 4, False), (2, 4, False)])
def test_the_runs_process_holds_weights_only_where_it_trains_itself(
    parts: Callable[..., cluster_parts.ClusterParts], make_recipe: Any, ranks: int, gpus: int, here: bool
) -> None:
    start = make_recipe().start.model
    policy = parts({"learner": {"ranks": ranks}}, gpus=gpus).policy(start)
    named = dict(policy.model.named_parameters())
    assert {parameter.device.type for parameter in named.values()} == {"cpu" if here else "meta"}
    whole = load_policy(start)
    assert {name: p.shape for name, p in named.items()} == {n: p.shape for n, p in whole.model.named_parameters()}
    for fact in ("folder", "max_context", "valid_vocab", "end_tokens", "licence"):
        assert getattr(policy, fact) == getattr(whole, fact)


def test_every_device_that_a_run_holds_is_counted_once(parts: Callable[..., cluster_parts.ClusterParts]) -> None:
    """Device hours in reports are seconds times these."""
    vllm = {"rollout": {"engine": "vllm", "max_rows": 8}}
    wide = {"replicas": 2, "tensor_parallel": 2}
    assert parts({"learner": {"ranks": 2}}).devices == 2, "two machines"
    assert parts({"learner": {"ranks": 2}, "rollout": wide}, gpus=4, **vllm).devices == 2 + 2 * 2
    assert parts({"learner": {"ranks": 4}, "rollout": wide | {"colocated": True}}, gpus=4, **vllm).devices == 4
