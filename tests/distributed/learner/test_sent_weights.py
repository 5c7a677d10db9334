"""What sending weights to engines takes of memory: two units at a time, never the model; both sides' buckets agree."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from json_server import free_port
from processes import scripts
from rank_memory import config_of, sending
from transformers import AutoModelForCausalLM

from magicrl.config.cluster_schema import LearnerPlacement
from magicrl.distributed.learner.learner import DistributedLearner
from magicrl.rollout.vllm_weights import Rendezvous, VllmWeights, WeightSender
from magicrl.rollout.weight_buckets import BUCKET

SCRIPT = """
import json, sys
import torch, torch.distributed as dist
from torch.distributed._tools.mem_tracker import MemTracker
from magicrl.distributed.learner.sharding import Meshes, RankSettings, ShardedModel
from magicrl.rollout.vllm_weights import Rendezvous, WeightSender, gloo_broadcast, gloo_group
from magicrl.rollout.weight_buckets import WeightInfo

role, folder, ranks, engines = int(sys.argv[1]), *sys.argv[2:]
torch.set_num_threads(1)
met = Rendezvous(host="127.0.0.1", port=int(engines), size=2, seconds=60)
told = [WeightInfo(name, dtype, tuple(shape)) for name, dtype, shape in json.load(open("told.json"))]
if role == 2:  # an engine's worker
    from safetensors.torch import load_file
    group, kept = gloo_group(met, 1), load_file(f"{folder}/model.safetensors")
    other = []
    for info in told:
        given = torch.empty(info.shape, dtype=getattr(torch, info.dtype))
        gloo_broadcast(group, given)
        if not torch.equal(given, kept[info.name].to(given.dtype)):
            other.append(info.name)
    print(json.dumps({"other": other}))
else:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{ranks}", rank=role, world_size=2)
    sharded = ShardedModel(RankSettings(folder=folder), Meshes.make("cpu", 1), torch.device("cpu"))
    sender = WeightSender(met, role, told, sharded.stream)
    tracker = MemTracker()
    tracker.track_external(sharded.model)
    with tracker:
        sender.send()
    state = sum(p.to_local().numel() * 4 for p in sharded.trained().values())
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    print(json.dumps({"beside": peak["Total"] - state, "streamed": [name for name, _ in sharded.stream()]}))
"""


def test_two_ranks_send_a_unit_at_a_time_and_the_worker_has_every_weight(
    twelve_layers: tuple[Path, int, int], tmp_path: Path
) -> None:
    folder, whole, unit = twelve_layers
    made = AutoModelForCausalLM.from_pretrained(folder)
    ends = ("model.embed_tokens.weight", "lm_head.weight")
    order = sorted(made.state_dict(), key=lambda name: (name in (*ends, "model.norm.weight"), name not in ends))
    told = [(name, "bfloat16", tuple(made.state_dict()[name].shape)) for name in order]
    (tmp_path / "told.json").write_text(json.dumps(told))
    given = [str(folder), str(free_port()), str(free_port())]
    said = [json.loads(text) for text in scripts(SCRIPT, [[str(role), *given] for role in range(3)], tmp_path)]
    assert said[2] == {"other": []}
    for rank in range(2):
        # the unit's shard in the precision of the exchange may still be there
        assert unit < said[rank]["beside"] < 2.6 * unit < 0.5 * whole, "what is exchanged, and the unit made of it"


def test_the_32b_learner_never_has_the_model_whole(tmp_path: Path) -> None:
    found = sending(config_of("DeepSeek-R1-Distill-Qwen-32B"), 32, tmp_path)
    assert found["beside"] < 0.05 * found["whole"]
    assert found["beside"] == pytest.approx(2 * found["unit"], rel=1e-3)


def test_the_driver_copies_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray hands out memory that may only be read."""
    values = np.ones(3, dtype=np.float32)
    values.flags.writeable = False
    learner = DistributedLearner.__new__(DistributedLearner)
    learner._placement = LearnerPlacement(ranks=2)
    monkeypatch.setattr(learner, "_rebuilds", 0, raising=False)
    monkeypatch.setattr(learner, "_call", lambda *_: [{"w": ("float32", values)}, None])
    assert learner.weights()["w"].data_ptr() == values.ctypes.data


def test_sender_and_workers_join_small_weights_into_buckets_of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    made: dict[str, Any] = {}
    package = "vllm.distributed.weight_transfer"
    base: Any = ModuleType(f"{package}.base")
    base.ParamMeta, base.WeightSource = tuple, object
    engine: Any = ModuleType(f"{package}.nccl_engine")
    engine.NCCLTrainerInitInfo = dict
    engine.NCCLTrainerWeightTransferEngine = SimpleNamespace(trainer_init=lambda info, **_: made.update(sender=info))
    for module in (base, engine):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    met = Rendezvous(host="here", port=1, size=3, seconds=1.0)
    WeightSender(met, 0, (), lambda: iter(()))
    weights = VllmWeights.__new__(VllmWeights)
    told = SimpleNamespace(collective_rpc=lambda method, kwargs: made.update(worker=kwargs["init_info"]))
    weights._engine = told
    weights.join(met, 1)
    sizes = {side: info["packed_buffer_size_bytes"] for side, info in made.items()}
    assert sizes == {"sender": BUCKET, "worker": BUCKET}
