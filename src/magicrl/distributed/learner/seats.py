"""Which process becomes which rank, and how many ranks hold the model once: by the nodes that they run on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from magicrl.planning.memory import shards_by_default


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """Where a rank's process runs."""

    node: str  # the same for all processes of a node, and for no other
    memory: float  # bytes of its GPU; of a rank on CPUs, its part of the node's


def by_node(nodes: Sequence[str]) -> list[int]:
    """Processes in the order of their ranks: those of a node follow each other, nodes as they come first.

    Example: processes on the nodes a, b, a, b: ``[0, 2, 1, 3]``.
    """
    first = {node: nodes.index(node) for node in nodes}
    return sorted(range(len(nodes)), key=lambda process: (first[nodes[process]], process))


def shard_ranks(seats: Sequence[Seat], state: float) -> int:
    """Neighbouring ranks that hold the model once; see `shards_by_default`.

    Where nodes differ, groups of so many ranks that every one of them lies within a node.

    Args:
        seats: of the ranks, in their order.
        state: bytes of master weights, gradients and moments.
    """
    inside = math.gcd(*Counter(seat.node for seat in seats).values())
    return shards_by_default(len(seats), inside, state, min(seat.memory for seat in seats))
