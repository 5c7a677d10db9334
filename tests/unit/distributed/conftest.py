"""A tiny starting model on disk, a recipe for it, and three simulated nodes on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from magicrl.config.cluster_schema import ClusterConfig
from magicrl.config.model_schema import TinyModelConfig
from magicrl.config.schema import TrainConfig
from magicrl.data.families import make_family
from magicrl.models.loading import save_policy
from magicrl.models.small_models import make_tiny

STORE = 80 << 20  # bytes: Ray's minimum is 75 MiB
# Ray lowers the priority of its actors, which then wait for everything else on a busy machine
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 (Ray spells it like this)


@pytest.fixture(scope="session")
def start_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random tiny reasoner with attention heads that vLLM's CPU build has a kernel for."""
    folder = tmp_path_factory.mktemp("start") / "model"
    model, tokenizer = make_tiny(TinyModelConfig(), make_family("running_sum", {}).vocabulary, seed=5)
    save_policy(model, tokenizer, folder)
    return folder


@pytest.fixture(scope="session")
def make_recipe(start_model: Path) -> Callable[..., TrainConfig]:
    """Return a recipe of a few float32 steps on the tiny model. Keyword arguments are further sections."""

    def make(cluster: dict[str, Any] | None = None, **sections: Any) -> TrainConfig:
        tree: dict[str, Any] = {
            "run": {"name": "cluster", "threads": 1, "device": "cpu"},
            "start": {"model": str(start_model)},
            "model": {"dtype": "float32"},
            "data": {"train": [{"family": "running_sum", "seed": 1, "count": 60}]},
            "rollout": {"max_rows": 16, "memory_limit_mb": 64},
            "entropy": {"controller": "none", "estimator": "sampled"},
            "optimizer": {"learning_rate": 1e-3},
            "stages": [{"max_tokens": 24, "rollout_batch": 4, "group_size": 4, "max_steps": 3}],
            "verifier": {"extract": "lenient"},
        }
        tree |= {"cluster": ClusterConfig.model_validate(cluster)} if cluster is not None else {}
        return TrainConfig.model_validate(tree | sections)

    return make


@pytest.fixture(scope="session")
def three_nodes() -> Generator[Any]:
    """Connect to a Ray of three nodes, processes of this machine: the head without CPUs for actors, and two workers."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": STORE, "include_dashboard": False}
    )
    for _ in range(2):
        cluster.add_node(num_cpus=2, object_store_memory=STORE)
    ray.init(address=cluster.address, namespace="magicrl", log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()
