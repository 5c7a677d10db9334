"""Colocated placement: rollout replicas and learner ranks that use the same GPUs in turn.

Ray gives out each GPU once. So one small actor a *bundle* holds the bundle's GPUs in Ray's books and tells their
numbers; the replica of the bundle sees all of them, each of its ranks one. Where a node dies, Ray places the bundle
anew and restarts that actor there; replicas and ranks that start meanwhile wait for its answer.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from magicrl.distributed.runtime import ClusterError, waited_for

_LEAST_CPUS = 0.01  # a bundle of nothing is refused by Ray


class _Holder:
    """Holds a bundle's GPUs."""

    def numbers(self) -> tuple[str, ...]:
        """Of its GPUs on the node, as ``CUDA_VISIBLE_DEVICES`` takes them; none on a CPU."""
        return tuple(str(number) for number in ray.get_gpu_ids())


class SharedBundles:
    """One bundle of a placement group for each replica and its learner ranks.

    Args:
        replicas: how many bundles.
        ranks_each: learner ranks in each, the GPUs over which its replica's model is spread.
        gpus: whether the cluster's GPUs are used.
        cpus: that a replica reserves.
        seconds: to wait for room.

    Raises:
        ClusterError: the cluster has no room for the bundles within ``seconds``.
    """

    def __init__(self, replicas: int, ranks_each: int, *, gpus: bool, cpus: float, seconds: float) -> None:
        self._each = ranks_each
        self._cpus = cpus
        bundle = {"CPU": max(cpus, _LEAST_CPUS)} | ({"GPU": float(ranks_each)} if gpus else {})
        self._group = placement_group([bundle] * replicas, strategy="PACK")
        what = f"room for {replicas} replicas with the {ranks_each} learner ranks that share each one's GPUs"
        try:
            waited_for(self._group.ready(), seconds, what)
        except ClusterError:
            remove_placement_group(self._group)  # or it would take what becomes free
            raise
        holder: Any = ray.remote(_Holder)
        options = {"num_cpus": 0, "num_gpus": ranks_each if gpus else 0, "max_restarts": -1, "max_task_retries": -1}
        self._holders: list[Any] = [holder.options(**options, **self._in(index)).remote() for index in range(replicas)]

    def replica(self, index: int) -> tuple[dict[str, Any], Any]:
        """A replica's actor options, and a reference to the numbers of its GPUs."""
        return {"num_cpus": self._cpus, "num_gpus": 0, **self._in(index)}, self._numbers(index)

    def rank_options(self, rank: int) -> dict[str, Any]:
        """A rank's actor options."""
        return {"num_cpus": 0, "num_gpus": 0, **self._in(rank // self._each)}

    def rank_gpu(self, rank: int) -> tuple[Any, int]:
        """A reference to the numbers of the GPUs of a rank's bundle, and its own place among them."""
        index, place = divmod(rank, self._each)
        return self._numbers(index), place

    def close(self) -> None:
        """Give the room back; whatever still lives in it is ended."""
        remove_placement_group(self._group)

    def _numbers(self, index: int) -> Any:
        return self._holders[index].numbers.remote()

    def _in(self, index: int) -> dict[str, Any]:
        return {
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        }


def see_only(numbers: Sequence[str]) -> None:
    """Have this process see these GPUs only; called before its first use of CUDA. None at all changes nothing."""
    if numbers:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(numbers)
