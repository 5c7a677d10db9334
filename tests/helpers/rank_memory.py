"""Memory of a model that is spread over ranks, without its weights.

The module shards a model's shapes with FSDP2 like the learner and counts the bytes of one rank. torch's tracker follows
allocations in a backward pass on fake tensors, and while weights are sent to engines. Tests compare the results with
the estimates of ``magicrl plan``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from magicrl.config.cluster_schema import LearnerPlacement
from magicrl.config.loader import shipped_table
from magicrl.config.model_schema import ModelConfig
from magicrl.distributed.learner.sharding import RankSettings, ShardedModel, make_meshes
from magicrl.planning.memory import LearnerSetup, learner_memory
from magicrl.planning.shapes import COLUMNS, shape_from_config
from magicrl.rollout.weight_buckets import in_buckets
from magicrl.training.objective import LearnerSettings

TERMS = ("gathered", "reduced", "activations", "head")
"""Terms of the plan that are allocated temporarily."""


def config_of(name: str) -> dict[str, Any]:
    """Return the configuration of a model that the package knows by name."""
    return dict(zip(COLUMNS, shipped_table("planning/models.toml", dict[str, list[Any]])[name], strict=False))


def planned_bytes(config: Mapping[str, Any], ranks: int, **settings: Any) -> dict[str, float]:
    """Return the plan's terms for one token, whose activations are negligible."""
    setup = LearnerSetup(
        gpus=ranks, micro_batch_tokens=1, longest=1, checkpointing=False, head_chunk_tokens=1, **settings
    )
    return learner_memory(shape_from_config(config, "model"), setup, 0.0).terms()


def tracked(
    config: Mapping[str, Any], ranks: int, folder: Path, passes: int = 2, **settings: Any
) -> tuple[float, float]:
    """Return bytes of rank 0's master weights, and the peak above its state in the last of several passes over a token.

    ``settings`` are those of ``[cluster.learner]``.
    """
    described = {"architectures": [f"{str(config['model_type']).capitalize()}ForCausalLM"], **config}
    (folder / "config.json").write_text(json.dumps(described))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        meshes = make_meshes("cpu", 1)
        with FakeTensorMode():
            device = torch.device("cpu")
            told = RankSettings(folder=str(folder), placement=LearnerPlacement(ranks=ranks, **settings))
            sharded = ShardedModel(told, meshes, device, fill=False)
            state = sum(4.0 * p.to_local().numel() for p in sharded.trained().values())  # type: ignore[attr-defined]
            peak = _peak_of(sharded, passes) if passes else 0.0
    finally:
        dist.destroy_process_group()
    return state, peak - 2 * state  # gradients of an earlier pass are as large


def sending(config: Mapping[str, Any], ranks: int, folder: Path, *, lent: bool = False) -> dict[str, float]:
    """Return the bytes of a bfloat16 model, of its largest unit, and the peak on rank 0 above its state during sending.

    ``lent``: in buckets, to the engine on the rank's own device.
    """
    told = {"architectures": [f"{str(config['model_type']).capitalize()}ForCausalLM"], **config}
    (folder / "config.json").write_text(json.dumps(told))
    settings = RankSettings(folder=str(folder), learning=LearnerSettings(model=ModelConfig(dtype="bfloat16")))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        meshes = make_meshes("cpu", 1)
        with FakeTensorMode():
            sharded = ShardedModel(settings, meshes, torch.device("cpu"), fill=False)
            root: Any = sharded._root
            root.to_empty(device="cpu")
            sharded.run(lambda: None)
            root.reshard()
            state = sum(4.0 * p.to_local().numel() for p in sharded.trained().values())  # type: ignore[attr-defined]
            tracker = MemTracker()
            tracker.track_external(sharded.model)
            sizes: dict[str, float] = {}
            with tracker:
                if lent:
                    with mock.patch.object(torch, "from_file", _fake_file):
                        for bucket in in_buckets(sharded.stream, torch.device("cpu")):
                            sizes |= dict(zip((weight.name for weight in bucket.weights), bucket.sizes, strict=True))
                else:
                    sizes = {name: 2.0 * weight.numel() for name, weight in sharded.stream()}
    finally:
        dist.destroy_process_group()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    units = [sum(n for name, n in sizes.items() if name.startswith(start)) for start, _ in sharded.units() if start]
    return {"whole": sum(sizes.values()), "unit": max(units), "beside": peak["Total"] - state}


def _fake_file(name: str, *, shared: bool, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Replacement for a file operation without a fake version in torch."""
    del name, shared
    return torch.empty(size, dtype=dtype)


def _peak_of(sharded: ShardedModel, passes: int) -> float:
    root: Any = sharded._root
    root.to_empty(device="cpu")
    model: Any = sharded.model
    model.set_attn_implementation("sdpa")
    tokens = torch.zeros(1, 1, dtype=torch.long)

    def once(*, last: bool) -> None:
        sharded.begin_pass(last=last)
        sharded.run(lambda: model.lm_head(model.model(tokens, use_cache=False).last_hidden_state).sum()).backward()

    for _ in range(passes - 1):
        once(last=False)
    tracker = FSDPMemTracker(root)
    tracker.track_inputs((tokens,))
    with tracker:
        once(last=True)
    (found,) = tracker.get_tracker_snapshot("peak").values()
    return float(found["Total"])
