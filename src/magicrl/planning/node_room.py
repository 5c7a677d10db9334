"""Do a cluster's parts fit its nodes: a replica stays inside one, and learner ranks take room beside the replicas.

The sum over the cluster says too little: 2 nodes of 8 have 10 GPUs left beside 6 ranks, but only two replicas of 4.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from magicrl.config.schema import ClusterConfig

RANK_CPUS = 1
"""Each learner rank on a GPU reserves one."""
_MOST_NODES = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRoom:
    """What a node may give out: GPUs, and CPUs where they are known."""

    gpus: float
    cpus: float = math.inf


def nodes_of(gpus: int, each: int) -> list[NodeRoom]:
    """``gpus`` accelerators as nodes of ``each``; what is over is a smaller one."""
    whole, rest = divmod(gpus, each)
    return [NodeRoom(gpus=each)] * whole + ([NodeRoom(gpus=rest)] if rest else [])


def beside_ranks(nodes: Sequence[NodeRoom], ranks: int) -> list[NodeRoom] | None:
    """What the nodes have left, in their order, beside learner ranks of a GPU and a CPU each; None: these do not fit.

    Ray's PACK fills the node with the largest shares left after one rank, then the next (its `LeastResourceScorer`).
    """
    left = list(nodes)
    usable = (index for index, node in enumerate(nodes) if _ranks_in(node))
    for index in sorted(usable, key=lambda index: (-_share_left(nodes[index]), index)):
        taken = min(ranks, _ranks_in(left[index]))
        left[index] = NodeRoom(gpus=left[index].gpus - taken, cpus=left[index].cpus - taken * RANK_CPUS)
        ranks -= taken
    return None if ranks else left


def replicas_held(nodes: Sequence[NodeRoom], gpus: int, cpus: float = 0.0) -> int:
    """Replicas of ``gpus`` GPUs and ``cpus`` CPUs that fit, each inside one node."""
    return sum(math.floor(min(node.gpus / gpus, node.cpus / cpus if cpus else math.inf)) for node in nodes)


def placement_fault(nodes: Sequence[NodeRoom], cluster: ClusterConfig) -> str | None:
    """Why ranks and replicas on GPUs do not fit these nodes together, and what to change; None where they do.

    Colocated, a replica's GPUs and CPUs are its ranks' too. CPUs are left out where a node's are not known.
    """
    learner, rollout = cluster.learner, cluster.rollout
    gpus, wanted, ranks = rollout.tensor_parallel, rollout.replicas, 0 if rollout.colocated else learner.ranks
    largest = max((node.gpus for node in nodes), default=0.0)
    if gpus > largest:
        return (
            f"cluster.rollout.tensor_parallel {gpus} is more than the {largest:g} GPUs of the largest node; a replica "
            "stays inside a node"
        )

    def held(ranks: int, among: Sequence[NodeRoom] = nodes) -> int:
        left = beside_ranks(among, ranks)
        return -1 if left is None else replicas_held(left, gpus, rollout.cpus)

    now = held(ranks)
    if now >= wanted:
        return None
    left = beside_ranks(nodes, ranks)
    taken = f"beside {ranks} learner ranks, which fill as few nodes as they can, " if ranks else ""
    if left is None:
        told = f"{ranks} learner ranks, each of a GPU and a CPU, do not fit: {_told(nodes)}"
    else:
        each = f"{gpus} GPUs" + (f" and {rollout.cpus:g} CPUs" if any(math.isfinite(n.cpus) for n in nodes) else "")
        told = f"{wanted} replicas of {each} do not fit, {now} do: {taken}{_told(left)}; a replica stays inside a node"
    ways = [f"cluster.rollout.replicas = {now}"] if now > 0 and not rollout.colocated else []
    if now > 0 and rollout.colocated:
        ways.append(f"cluster.rollout.replicas = {now} with cluster.learner.ranks = {now * gpus}")
    fewer = range(ranks - learner.sequence_parallel, 0, -learner.sequence_parallel)
    enough = next((count for count in fewer if held(count) >= wanted), None)
    if enough is not None:
        ways.append(f"cluster.learner.ranks = {enough}")
    ways += _more_nodes(nodes, lambda among: held(ranks, among) >= wanted)
    return f"{told}. What would make it fit, each alone: {'; '.join(ways)}"


def _ranks_in(node: NodeRoom) -> int:
    return math.floor(min(node.gpus, node.cpus / RANK_CPUS))


def _share_left(node: NodeRoom) -> float:
    return (node.gpus - 1) / node.gpus + (1.0 if math.isinf(node.cpus) else (node.cpus - RANK_CPUS) / node.cpus)


def _told(nodes: Sequence[NodeRoom]) -> str:
    """Each node's room, equal ones counted."""
    kinds: dict[NodeRoom, int] = {}
    for node in nodes:
        kinds[node] = kinds.get(node, 0) + 1
    words = (
        f"{count} x {node.gpus:g}" + ("" if math.isinf(node.cpus) else f" (with {node.cpus:g} CPUs)")
        for node, count in kinds.items()
    )
    return f"there are nodes of {', '.join(words)} GPUs"


def _more_nodes(nodes: Sequence[NodeRoom], fits: Callable[[Sequence[NodeRoom]], bool]) -> list[str]:
    """The least number of further nodes like the largest that suffices; more CPUs where even those do not."""
    largest = max(nodes, key=lambda node: (node.gpus, node.cpus))
    most = 1
    while not fits([*nodes, *[largest] * most]):
        most *= 2
        if most > _MOST_NODES:
            return ["nodes with more CPUs, or smaller cluster.rollout.cpus"]
    least = bisect_left(range(most + 1), 1, key=lambda count: fits([*nodes, *[largest] * count]))
    return [f"{least} more {'node' if least == 1 else 'nodes'} of {largest.gpus:g} GPUs"]
