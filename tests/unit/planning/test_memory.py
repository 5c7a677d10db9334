"""Memory by term: compared with independent estimates at 32K, and monotone in everything that enlarges a step.

Also placement on nodes: each replica inside one node, and ranks on as few nodes as possible.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicrl.config.cluster_schema import ClusterConfig
from magicrl.planning import memory
from magicrl.planning.hardware import GIB, load_hardware
from magicrl.planning.memory import (
    LearnerSetup,
    NodeRoom,
    beside_ranks,
    engine_memory,
    learner_memory,
    nodes_of,
    placement_fault,
    replicas_held,
    shards_by_default,
    unit_transients,
)
from magicrl.planning.shapes import ModelShape, load_shape

AT_32K = LearnerSetup(
    gpus=8, sequence_parallel=1, micro_batch_tokens=1, longest=34816, checkpointing=True, head_chunk_tokens=1024
)


@pytest.mark.parametrize(
    ("model", "gpus", "sequence_parallel", "estimate"),
    [
        ("Qwen3-8B", 8, 1, 39),
        ("Qwen3-8B", 8, 2, 31),
        ("DeepSeek-R1-Distill-Qwen-32B", 16, 4, 49),
        ("DeepSeek-R1-Distill-Qwen-32B", 8, 4, 80),
        ("DeepSeek-R1-Distill-Qwen-32B", 32, 4, 34),
    ],
)
def test_the_estimates_at_32k_are_met_within_a_tenth(
    model: str, gpus: int, sequence_parallel: int, estimate: float
) -> None:
    """Compare GiB per GPU, with full checkpointing and logits in chunks of 1024, with independent estimates."""
    setup = replace(AT_32K, gpus=gpus, sequence_parallel=sequence_parallel)
    assert learner_memory(load_shape(model), setup, 3 * GIB).total / GIB == pytest.approx(estimate, rel=0.1)


def test_states_of_a_shard_by_hand() -> None:
    shape = load_shape("Qwen3-8B")
    memory = learner_memory(shape, replace(AT_32K, reference=True), 0.0)
    assert memory.master == memory.gradients == memory.moments / 2 == 4 * shape.parameters / 8
    assert memory.reference == 2 * shape.parameters / 8
    taught = learner_memory(shape, replace(AT_32K, reference=True, teacher=800), 0.0)
    assert taught.total == memory.total + 2 * 800 / 8
    assert memory.total == pytest.approx(sum(memory.terms().values()))
    assert memory.resident == memory.master + memory.moments + memory.reference
    layers = 36 * 34816 * 4096 * 2  # the layers' inputs
    one = 34816 * (10 * 4096 + 3 * 12288) * 2
    assert memory.activations == layers + one
    assert learner_memory(shape, replace(AT_32K, checkpointing=False), 0.0).activations == 36 * one
    alone = learner_memory(shape, replace(AT_32K, gpus=1), 0.0)
    assert (alone.head, alone.gathered) == (3 * 4 * 1024 * shape.vocabulary, 2 * shape.parameters)


# eight words of width four: embedding and head have 32 values each, a layer 4 * 16 + 3 * 32 + 2 * 4 = 168
SMALL = ModelShape(
    name="s", hidden=4, intermediate=8, layers=2, heads=1, kv_heads=1, head_dim=4, vocabulary=8, tied=False
)


def test_what_is_whole_in_a_backward_pass_by_hand() -> None:
    """Count bytes in the order of FSDP2. `tests/unit/distributed/learner/test_unit_memory.py` measures FSDP2 itself."""
    setup = LearnerSetup(gpus=4, micro_batch_tokens=1, longest=1, checkpointing=False, head_chunk_tokens=1)
    # gathered, reduced, activations, head
    head, layers, sending = unit_transients(SMALL, setup)
    assert (head[0], head[1], head[3]) == (2 * 32 + 2 * 168, 2 * 32, 3 * 4 * 8)
    # two layers; the last one's gradient exists together with the head's send buffer, an inner one's with a layer's
    assert layers[:2] == (4 * 168, max(4 * 32 + 2 * 168, (2 + 4) * 168))
    assert sending[:2] == (2 * 168, 2 * 32 + 4 * 32 * 1.25)
    _, layers, adding, sending = unit_transients(replace(SMALL, tied=True), setup)
    assert layers[:2] == (2 * 32 + 4 * 168, 2 * 32 + (2 + 4) * 168)
    assert adding[:2] == (2 * 32, 3 * 2 * 32 + 4 * 168)
    assert sending[:2] == (0, 2 * 32 + 4 * 32 * 1.25)
    narrow = unit_transients(SMALL, replace(setup, reduce_bytes=2.0))
    assert narrow[2][1] == 2 * 32 + 2 * 32 + (2 + 4) * 32 / 4
    once = unit_transients(SMALL, replace(setup, reduce_once=True))
    assert once[0][1] == 2 * 32 + 4 * SMALL.parameters
    adapted = unit_transients(SMALL, replace(setup, adapters=10))
    assert [moment[1] for moment in adapted] == [0, (2 + 4) * 5, 0]


def test_a_node_holds_a_copy_where_its_state_takes_a_quarter() -> None:
    assert shards_by_default(32, 8, 8 * 20.0, 80.0) == 8
    assert shards_by_default(32, 8, 8 * 20.1, 80.0) == 32


@given(
    longest=st.integers(1, 65536),
    more=st.integers(0, 65536),
    gpus=st.sampled_from([1, 8, 16, 64]),
    sp=st.sampled_from([1, 2, 4]),
    micro=st.integers(1, 40000),
    checkpointing=st.booleans(),
)
def test_memory_never_shrinks_with_t_and_never_grows_with_gpus(
    longest: int, more: int, gpus: int, sp: int, micro: int, checkpointing: bool
) -> None:
    shape = load_shape("DeepSeek-R1-Distill-Qwen-7B")
    setup = replace(
        AT_32K,
        longest=longest,
        gpus=gpus,
        sequence_parallel=sp,
        micro_batch_tokens=micro,
        checkpointing=checkpointing,
    )
    total = learner_memory(shape, setup, 0.0).total
    assert learner_memory(shape, replace(setup, longest=longest + more), 0.0).total >= total
    assert learner_memory(shape, replace(setup, gpus=2 * gpus), 0.0).total <= total
    assert learner_memory(shape, replace(setup, sequence_parallel=2 * sp), 0.0).total <= total


def test_the_cache_is_what_the_budget_leaves() -> None:
    shape, hardware = load_shape("Qwen3-8B"), load_hardware("H100-80G")
    engine = engine_memory(shape, hardware, 2, learner=10 * GIB)
    assert sum(engine.values()) == pytest.approx(hardware.budget)
    assert engine_memory(shape, hardware, 2, learner=70 * GIB)["cache"] < 0


def test_adapters_alone_have_masters_and_moments() -> None:
    # rank 2 on q and down of one layer: 2 * ((8 + 16) + (8 + 24)) = 112
    shape = ModelShape(
        name="s", hidden=8, intermediate=24, layers=1, heads=4, kv_heads=2, head_dim=4, vocabulary=10, tied=True
    )
    adapters = shape.adapter_parameters(2, ("q_proj", "down_proj"))
    assert adapters == 112
    setup = replace(AT_32K, gpus=1, adapters=adapters)
    memory = learner_memory(shape, setup, 0.0)
    assert (memory.master, memory.gradients, memory.moments) == (4 * 112, 4 * 112, 8 * 112)
    assert memory.frozen == 2 * shape.parameters


EIGHT = NodeRoom(gpus=8)


def cluster(ranks: int, replicas: int, tensor_parallel: int = 1, **further: float | bool) -> ClusterConfig:
    """Return a cluster. Further settings belong to ``[cluster.rollout]``, except ``sequence_parallel``."""
    learner = {"ranks": ranks, "sequence_parallel": int(further.pop("sequence_parallel", 1))}
    rollout = {"replicas": replicas, "tensor_parallel": tensor_parallel, "cpus": 2.0} | further
    return ClusterConfig.model_validate({"learner": learner, "rollout": rollout})


def left(nodes: list[NodeRoom], ranks: int) -> list[float] | None:
    found = beside_ranks(nodes, ranks)
    return None if found is None else [node.gpus for node in found]


def test_a_containers_limit_is_the_memory_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "_LIMITS", (str(tmp_path / "none"), str(limit)))
    limit.write_text("1048576\n")
    assert memory.host_memory() == 2**20
    limit.write_text("max\n")
    assert memory.host_memory() == psutil.virtual_memory().total


def test_nodes_of_a_number_of_accelerators() -> None:
    assert nodes_of(16, 8) == [EIGHT, EIGHT]
    assert nodes_of(20, 8) == [EIGHT, EIGHT, NodeRoom(gpus=4)]
    assert nodes_of(3, 8) == [NodeRoom(gpus=3)]


def test_ranks_fill_one_node_before_the_next() -> None:
    assert left([EIGHT, EIGHT], 6) == [2, 8]
    assert left([EIGHT, EIGHT], 8) == [0, 8]
    assert left([EIGHT, EIGHT], 11) == [0, 5]
    assert left([EIGHT, EIGHT], 0) == [8, 8]
    assert left([EIGHT, EIGHT], 17) is None
    # the largest node comes first, whatever else is requested
    assert left([NodeRoom(gpus=4), EIGHT], 2) == [4, 6]


def test_ranks_take_a_cpu_each() -> None:
    # shares left after a rank: 7/8 + 3/4 = 1.625, 7/8 + 5/6 = 1.71 and 1/2 + 15/16 = 1.44
    uneven = [NodeRoom(gpus=8, cpus=4), NodeRoom(gpus=8, cpus=6), NodeRoom(gpus=2, cpus=16)]
    assert beside_ranks(uneven, 7) == [NodeRoom(gpus=7, cpus=3), NodeRoom(gpus=2, cpus=0), NodeRoom(gpus=2, cpus=16)]
    assert left(uneven, 12) == [4, 2, 0]
    assert left(uneven, 13) is None
    assert left([NodeRoom(gpus=0, cpus=4), NodeRoom(gpus=2, cpus=4)], 2) == [0, 0]


def test_a_replica_stays_inside_a_node() -> None:
    assert replicas_held([NodeRoom(gpus=2), EIGHT], 4) == 2, "ten GPUs, and two of them on a node of their own"
    assert replicas_held([EIGHT, EIGHT], 3) == 4
    assert replicas_held([NodeRoom(gpus=8, cpus=3)], 1, 2.0) == 1, "CPUs for one"
    assert replicas_held([NodeRoom(gpus=8, cpus=3)], 1, 0.0) == 8


@pytest.mark.parametrize(
    ("nodes", "wanted"),
    [
        ([EIGHT, EIGHT], cluster(6, 2, 4)),
        ([EIGHT, EIGHT], cluster(8, 2, 4)),
        ([EIGHT], cluster(2, 6)),
        ([EIGHT, EIGHT], cluster(4, 3, 4)),
        ([EIGHT, EIGHT], cluster(16, 4, 4, colocated=True)),
        ([NodeRoom(gpus=8, cpus=8), NodeRoom(gpus=8, cpus=16)], cluster(8, 4, 2)),
    ],
)
def test_what_fits(nodes: list[NodeRoom], wanted: ClusterConfig) -> None:
    assert placement_fault(nodes, wanted) is None


@pytest.mark.parametrize(
    ("nodes", "wanted", "words"),
    [
        (
            [EIGHT, EIGHT],
            cluster(6, 3, 4),
            [
                "3 replicas of 4 GPUs do not fit, 2 do: next to 6 learner ranks, which fill as few nodes as possible, "
                "there are nodes of 1 x 2, 1 x 8 GPUs",
                "would make it fit: cluster.rollout.replicas = 2; cluster.learner.ranks = 4; 1 more node of 8 GPUs",
            ],
        ),
        # four ranks share a sequence: two ranks fewer would fit, but four must go
        ([EIGHT, EIGHT], cluster(8, 6, 2, sequence_parallel=4), ["6 replicas", "cluster.learner.ranks = 4; 1 more"]),
        # fewer ranks do not help: each of the two nodes holds one replica of five GPUs
        ([EIGHT, EIGHT], cluster(3, 3, 5), ["3 replicas of 5", "cluster.rollout.replicas = 2; 1 more node"]),
        # colocated replicas and ranks share their GPUs
        (
            [NodeRoom(gpus=6)] * 2,
            cluster(12, 3, 4, colocated=True),
            ["2 do: there are nodes of 2 x 6 GPUs", "replicas = 2 with cluster.learner.ranks = 8; 1 more node of 6"],
        ),
        ([EIGHT], cluster(12, 1), ["12 learner ranks, each with a GPU and a CPU, do not fit", "; ", "1 more node"]),
        ([EIGHT, EIGHT], cluster(1, 1, 16), ["tensor_parallel 16 is more than the 8 GPUs of the largest node"]),
        # two ranks' CPUs and 6 x 2: only 12 of 13 are available
        (
            [NodeRoom(gpus=8, cpus=13)],
            cluster(2, 6),
            ["6 replicas of 1 GPUs and 2 CPUs do not fit, 5 do", "1 x 6 (with 11 CPUs)", "cluster.learner.ranks = 1"],
        ),
        ([NodeRoom(gpus=8, cpus=1)], cluster(1, 1), ["0 do", "would make it fit: nodes with more CPUs, or smaller"]),
    ],
)
def test_what_does_not(nodes: list[NodeRoom], wanted: ClusterConfig, words: list[str]) -> None:
    fault = placement_fault(nodes, wanted)
    assert fault is not None
    for part in words:
        assert part in fault, fault


def test_a_remedy_makes_it_fit() -> None:
    wanted = cluster(13, 9, 4)
    fault = placement_fault([EIGHT] * 4, wanted)
    assert fault is not None
    nodes = int(fault.split("; ")[-1].split(" more")[0])
    assert placement_fault([EIGHT] * (4 + nodes), wanted) is None
    assert placement_fault([EIGHT] * (4 + nodes - 1), wanted) is not None
