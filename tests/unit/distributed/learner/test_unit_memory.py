"""The plan's temporary memory, compared with FSDP2 on fake tensors under torch's memory tracker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_memory import TERMS, planned_bytes, tracked
from torch.testing._internal.distributed.fake_pg import FakeStore

from magicrl.config.model_schema import LoraConfig, ModelConfig
from magicrl.distributed.learner.sharding import RankSettings, ShardedModel, make_meshes
from magicrl.training.objective import LearnerSettings

CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 16384,
    "tie_word_embeddings": False,
}
"""Embedding and head take 16 MiB each in float32, a layer 3.8: the former decide the peak."""
DEEP = CONFIG | {"vocab_size": 1024, "intermediate_size": 4096}
"""Embedding and head take 1 MiB each, a layer 13: a layer decides the peak."""


@pytest.mark.filterwarnings("ignore:.*backward hook:UserWarning")  # warning of the tracker
@pytest.mark.parametrize(
    "config", [CONFIG, DEEP, CONFIG | {"tie_word_embeddings": True}], ids=["ends", "layer", "tied"]
)
def test_the_plan_counts_what_fsdp2_holds(config: dict[str, Any], tmp_path: Path) -> None:
    for ranks, settings, told in ((8, {}, {}), (2, {"reduce_dtype": "bfloat16"}, {"reduce_bytes": 2.0})):
        master, transient = tracked(config, ranks, tmp_path, **settings)
        planned = planned_bytes(config, ranks, **told)
        assert planned["master"] == pytest.approx(master, rel=1e-3)
        assert sum(planned[term] for term in TERMS) == pytest.approx(transient, rel=0.03)


def test_a_rank_holds_its_part_of_the_reference_in_the_compute_precision(tmp_path: Path) -> None:
    """Use the plan's count, without the adapters of the policy."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"], **CONFIG}))
    learning = LearnerSettings(model=ModelConfig(lora=LoraConfig(rank=4)))
    settings = RankSettings(folder="the policy", learning=learning, reference=str(tmp_path))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        frozen = ShardedModel(settings, make_meshes("cpu", 1), torch.device("cpu"), frozen=True, fill=False)
        shards: list[Any] = [parameter.to_local() for parameter in frozen.model.parameters()]  # type: ignore[attr-defined]
    finally:
        dist.destroy_process_group()
    assert not frozen.trained()
    held = sum(shard.numel() * shard.element_size() for shard in shards)
    assert held == pytest.approx(planned_bytes(CONFIG, 8, reference=True)["reference"], rel=1e-3)
