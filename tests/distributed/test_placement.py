"""Where ranks go on nodes with GPUs (Ray's count of them; none is there): together, so that wide replicas find room."""

from __future__ import annotations

from typing import Any

import pytest

from magicrl.distributed.assemble import rank_options
from magicrl.distributed.runtime import ClusterError

pytestmark = pytest.mark.slow


def test_ranks_share_as_few_nodes_as_they_can(three_nodes: Any) -> None:
    import ray
    from ray.util.placement_group import placement_group_table, remove_placement_group

    added = [three_nodes.add_node(num_cpus=4, num_gpus=4, object_store_memory=80 << 20) for _ in range(2)]
    options: list[dict[str, Any]] = []
    try:
        options = rank_options(4, gpus=True, seconds=60.0)
        group = options[0]["scheduling_strategy"].placement_group
        assert [option["scheduling_strategy"].placement_group_bundle_index for option in options] == [0, 1, 2, 3]
        assert len(set(placement_group_table(group)["bundles_to_node_id"].values())) == 1

        @ray.remote(num_gpus=4, num_cpus=1)
        def wide() -> str:
            return "placed"

        assert ray.get(wide.remote(), timeout=60.0) == "placed"
        with pytest.raises(ClusterError, match="8 free GPUs, each with a CPU, for the learner ranks"):
            rank_options(8, gpus=True, seconds=2.0)
    finally:
        if options:
            remove_placement_group(options[0]["scheduling_strategy"].placement_group)
        for node in added:
            three_nodes.remove_node(node)
