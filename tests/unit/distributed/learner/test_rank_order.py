"""Order of processes as ranks, and the number of ranks that hold the model once."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from magicrl.config.cluster_schema import LearnerPlacement
from magicrl.config.model_schema import ModelConfig
from magicrl.distributed.learner.launchers import RankGroup
from magicrl.distributed.learner.learner import DistributedLearner, by_node, shard_ranks
from magicrl.distributed.learner.rank import LearnerRank
from magicrl.models.loading import load_shell
from magicrl.training.objective import LearnerSettings


@pytest.mark.parametrize(
    ("nodes", "order"), [("", []), ("aaa", [0, 1, 2]), ("abab", [0, 2, 1, 3]), ("bacab", [0, 4, 1, 3, 2])]
)
def test_the_processes_of_a_node_are_neighbours(nodes: str, order: list[int]) -> None:
    assert by_node(list(nodes)) == order


@pytest.mark.parametrize(
    ("nodes", "state", "expected"),
    [
        ("aaaabbbb", 80, 4),  # 20 per rank: a quarter of 80
        ("aaaabbbb", 81, 8),
        ("aaaabb", 40, 2),  # no group spans two nodes
        ("aaaabb", 41, 6),
        ("aaab", 20, 1),
        ("aaaa", 1e9, 4),
    ],
)
def test_a_node_holds_a_copy_where_it_has_room(nodes: str, state: float, expected: int) -> None:
    assert shard_ranks([(node, 80.0) for node in nodes], state) == expected


class TwoNodes(RankGroup):
    """Four processes that report the nodes a, b, a, b and record their configuration."""

    def __init__(self, memory: float) -> None:
        self._grace, self._memory = 0.0, memory
        self.configured: dict[int, tuple[Any, ...]] = {}

    def start(self, ranks: int, *, timeout: float) -> RankGroup:
        return self

    def stop(self) -> None:
        pass

    def _send(self, process: int, method: str, arguments: tuple[Any, ...]) -> Any:
        if method == "configure":
            self.configured[process] = arguments
        return process, method

    def _ready(self, calls: list[Any], seconds: float) -> Sequence[Any]:
        return calls

    def _receive(self, process: int, call: Any) -> Any:
        values = {"location": ("abab"[process], self._memory), "open_store": ("host", process)}
        return values.get(call[1], "device")


@pytest.mark.parametrize(
    ("memory", "asked", "shares_gpus", "expected"),
    [(1e12, None, False, 2), (1e12, None, True, 4), (1e3, None, False, 4), (1e3, 1, True, 1)],
)
def test_ranks_are_numbered_by_node_and_told_how_many_hold_the_model(
    start_folder: Path, memory: float, asked: int | None, shares_gpus: bool, expected: int
) -> None:
    group = TwoNodes(memory)
    DistributedLearner(
        load_shell(start_folder),
        LearnerSettings(model=ModelConfig(dtype="float32")),
        launcher=group,
        shares_gpus=shares_gpus,
        placement=LearnerPlacement(ranks=4, shard_ranks=asked),
    )
    assert {process: given[2] for process, given in group.configured.items()} == {0: 0, 2: 1, 1: 2, 3: 3}
    assert {given[1] for given in group.configured.values()} == {("host", 0)}
    assert {given[0].placement.shard_ranks for given in group.configured.values()} == {expected}


def test_a_store_holds_its_port_from_the_moment_that_it_is_told() -> None:
    rank = LearnerRank("a")
    place = rank.open_store()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(place)
