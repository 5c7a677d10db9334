"""Predicates that a checker function may call by name: is this a permutation, a tree, a path, an order?

They take plain lists (tokens of an output, edges as pairs) and answer False to whatever is not of the right form,
so that a checker of three lines is safe against hostile output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

Edge = tuple[int, int]


def integers(text: str) -> list[int] | None:
    """The whole text as integers in ASCII digits, or None."""
    tokens = text.split()
    if any(not token.lstrip("+-").isascii() or not token.lstrip("+-").isdigit() for token in tokens):
        return None
    return [int(token) for token in tokens]


def is_permutation(items: Sequence[int], count: int, first: int = 1) -> bool:
    """``items`` are ``first`` to ``first + count - 1`` in any order."""
    return len(items) == count and set(items) == set(range(first, first + count))


def same_items(items: Iterable[Any], others: Iterable[Any]) -> bool:
    """The same items in any order, each as often."""
    return sorted(items, key=repr) == sorted(others, key=repr)


def _neighbours(edges: Iterable[Edge], directed: bool) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for one, other in edges:
        found.setdefault(one, set()).add(other)
        found.setdefault(other, set())
        if not directed:
            found[other].add(one)
    return found


def is_connected(nodes: Sequence[int], edges: Iterable[Edge]) -> bool:
    """Every node is reached from the first over undirected edges."""
    near = _neighbours(edges, directed=False)
    if not nodes:
        return True
    seen, waiting = {nodes[0]}, deque([nodes[0]])
    while waiting:
        for other in near.get(waiting.popleft(), ()):
            if other not in seen:
                seen.add(other)
                waiting.append(other)
    return all(node in seen for node in nodes)


def is_tree(nodes: Sequence[int], edges: Sequence[Edge]) -> bool:
    """The edges join exactly these nodes, without a cycle."""
    known = set(nodes)
    ends_known = all(one in known and other in known for one, other in edges)
    return ends_known and len(edges) == len(known) - 1 and is_connected(nodes, edges)


def is_spanning_tree(nodes: Sequence[int], edges: Iterable[Edge], chosen: Sequence[Edge]) -> bool:
    """``chosen`` is a tree over all nodes, made of given edges."""
    given = {frozenset(edge) for edge in edges}
    return all(frozenset(edge) in given for edge in chosen) and is_tree(nodes, chosen)


def is_path(
    edges: Iterable[Edge], path: Sequence[int], start: int, end: int, *, directed: bool = False, simple: bool = False
) -> bool:
    """``path`` leads from start to end over given edges; ``simple``: no node twice."""
    if not path or path[0] != start or path[-1] != end or (simple and len(set(path)) != len(path)):
        return False
    near = _neighbours(edges, directed)
    return all(other in near.get(one, ()) for one, other in pairwise(path))


def is_topological_order(nodes: Sequence[int], edges: Iterable[Edge], order: Sequence[int]) -> bool:
    """``order`` holds every node once, each edge leading forward."""
    if len(order) != len(nodes) or set(order) != set(nodes):
        return False
    place = {node: index for index, node in enumerate(order)}
    return all(place[one] < place[other] for one, other in edges)


def is_colouring(edges: Iterable[Edge], colours: dict[int, Any]) -> bool:
    """Neighbours differ."""
    return all(one in colours and other in colours and colours[one] != colours[other] for one, other in edges)


def is_matching(edges: Iterable[Edge], chosen: Sequence[Edge]) -> bool:
    """Chosen edges are given ones and share no node."""
    given = {frozenset(edge) for edge in edges}
    ends = [node for edge in chosen for node in edge]
    return all(frozenset(edge) in given for edge in chosen) and len(set(ends)) == len(ends)


def is_close(found: float, wanted: float, tolerance: float = 1e-6) -> bool:
    """Within the tolerance, absolute or relative."""
    return abs(found - wanted) <= tolerance * max(1.0, abs(wanted))


_OFFERED: tuple[Callable[..., Any], ...] = (
    integers,
    is_permutation,
    same_items,
    is_connected,
    is_tree,
    is_spanning_tree,
    is_path,
    is_topological_order,
    is_colouring,
    is_matching,
    is_close,
)
TOOLS = {function.__name__: function for function in _OFFERED}
