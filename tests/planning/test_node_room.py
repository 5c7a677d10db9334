"""Ranks and replicas on nodes: whole replicas inside a node, beside ranks that fill as few nodes as they can."""

from __future__ import annotations

import pytest

from magicrl.config.schema import ClusterConfig
from magicrl.planning.node_room import NodeRoom, beside_ranks, nodes_of, placement_fault, replicas_held

EIGHT = NodeRoom(gpus=8)


def cluster(ranks: int, replicas: int, tensor_parallel: int = 1, **further: float | bool) -> ClusterConfig:
    """Further settings are ``[cluster.rollout]``'s, but for ``sequence_parallel``."""
    learner = {"ranks": ranks, "sequence_parallel": int(further.pop("sequence_parallel", 1))}
    rollout = {"replicas": replicas, "tensor_parallel": tensor_parallel, "cpus": 2.0} | further
    return ClusterConfig.model_validate({"learner": learner, "rollout": rollout})


def left(nodes: list[NodeRoom], ranks: int) -> list[float] | None:
    found = beside_ranks(nodes, ranks)
    return None if found is None else [node.gpus for node in found]


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
    # the largest node first, whatever is asked for beside
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
                "3 replicas of 4 GPUs do not fit, 2 do: beside 6 learner ranks, which fill as few nodes as they can, "
                "there are nodes of 1 x 2, 1 x 8 GPUs",
                "each alone: cluster.rollout.replicas = 2; cluster.learner.ranks = 4; 1 more node of 8 GPUs",
            ],
        ),
        # sequences are shared by four ranks: two ranks fewer would do, four have to go
        ([EIGHT, EIGHT], cluster(8, 6, 2, sequence_parallel=4), ["6 replicas", "cluster.learner.ranks = 4; 1 more"]),
        # no rank fewer helps: each of the two nodes holds one replica of five
        ([EIGHT, EIGHT], cluster(3, 3, 5), ["3 replicas of 5", "cluster.rollout.replicas = 2; 1 more node"]),
        # colocated, replicas and ranks go together
        (
            [NodeRoom(gpus=6)] * 2,
            cluster(12, 3, 4, colocated=True),
            ["2 do: there are nodes of 2 x 6 GPUs", "replicas = 2 with cluster.learner.ranks = 8; 1 more node of 6"],
        ),
        ([EIGHT], cluster(12, 1), ["12 learner ranks, each of a GPU and a CPU, do not fit", "; ", "1 more node"]),
        ([EIGHT, EIGHT], cluster(1, 1, 16), ["tensor_parallel 16 is more than the 8 GPUs of the largest node"]),
        # two ranks' CPUs and 6 x 2: only 12 of 13 are there
        (
            [NodeRoom(gpus=8, cpus=13)],
            cluster(2, 6),
            ["6 replicas of 1 GPUs and 2 CPUs do not fit, 5 do", "1 x 6 (with 11 CPUs)", "cluster.learner.ranks = 1"],
        ),
        ([NodeRoom(gpus=8, cpus=1)], cluster(1, 1), ["0 do", "each alone: nodes with more CPUs, or smaller"]),
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
