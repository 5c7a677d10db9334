"""Weight transfer to engines: two units of memory at a time, never the whole model, and no wait without a limit."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from json_server import free_port
from processes import scripts
from rank_memory import config_of, sending
from torch.distributed import TCPStore
from transformers import AutoModelForCausalLM

from magicrl.config.cluster_schema import LearnerPlacement
from magicrl.distributed.learner.learner import DistributedLearner
from magicrl.distributed.learner.rank import LearnerRank
from magicrl.rollout import vllm_weights
from magicrl.rollout.vllm_weights import WeightGroup

SCRIPT = """
import json, sys
import torch, torch.distributed as dist
from torch.distributed._tools.mem_tracker import MemTracker
from magicrl.distributed.learner.sharding import RankSettings, ShardedModel, make_meshes
from magicrl.distributed.learner.rank import LearnerRank
from magicrl.rollout.vllm_weights import WeightGroup, join_group
from magicrl.rollout.weight_buckets import WeightInfo

role, folder, ranks, engines = int(sys.argv[1]), *sys.argv[2:]
torch.set_num_threads(1)
told = [WeightInfo(name, dtype, tuple(shape)) for name, dtype, shape in json.load(open("told.json"))]
if role == 2:  # an engine's worker
    from safetensors.torch import load_file
    group, kept = join_group(("127.0.0.1", int(engines)), 1, 2, 60, "cpu"), load_file(f"{folder}/model.safetensors")
    other = []
    for info in told:
        given = torch.empty(info.shape, dtype=getattr(torch, info.dtype))
        group.broadcast(given)
        if not torch.equal(given, kept[info.name].to(given.dtype)):
            other.append(info.name)
    print(json.dumps({"other": other}))
else:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{ranks}", rank=role, world_size=2)
    sharded = ShardedModel(RankSettings(folder=folder), make_meshes("cpu", 1), torch.device("cpu"))
    rank = LearnerRank("node")
    rank._rank, rank._sharded = role, sharded
    if role == 0:
        store = dist.TCPStore("127.0.0.1", int(engines), is_master=True, wait_for_workers=False)
        rank._receivers = WeightGroup(store, 0, 2, 60, "cpu")
    tracker = MemTracker()
    tracker.track_external(sharded.model)
    with tracker:
        rank.send_weights()
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
        # the unit's shard in the precision of the exchange may still be allocated
        assert unit < said[rank]["beside"] < 2.6 * unit < 0.5 * whole, "what is exchanged, and the unit made of it"


def test_the_32b_learner_never_has_the_model_whole(tmp_path: Path) -> None:
    found = sending(config_of("DeepSeek-R1-Distill-Qwen-32B"), 32, tmp_path)
    assert found["beside"] < 0.05 * found["whole"]
    assert found["beside"] == pytest.approx(2 * found["unit"], rel=1e-3)


def test_the_driver_copies_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray returns memory that may only be read."""
    values = np.ones(3, dtype=np.float32)
    values.flags.writeable = False
    learner = DistributedLearner.__new__(DistributedLearner)
    learner._placement = LearnerPlacement(ranks=2)
    monkeypatch.setattr(learner, "_rebuilds", 0, raising=False)
    monkeypatch.setattr(learner, "_call", lambda *_: [{"w": ("float32", values)}, None])
    assert learner.weights()["w"].data_ptr() == values.ctypes.data


class Nccl:
    """torch's NCCL group as `WeightGroup` uses it: each wait with its limit and its stream."""

    def __init__(self, made: dict[str, Any], _store: Any, place: int, size: int, options: Any) -> None:
        self.made = made
        made.update(place=place, size=size, limit=options._timeout, blocking=os.environ.get("TORCH_NCCL_BLOCKING_WAIT"))
        made |= {"sent": [], "waits": [], "aborted": made.get("aborted", 0)}

    def broadcast(self, tensors: list[torch.Tensor], _: Any) -> Any:
        self.made["sent"].append(current[-1])
        return SimpleNamespace(wait=self.made["waits"].append)

    def abort(self) -> None:
        self.made["aborted"] += 1


current = ["compute"]


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    made: dict[str, Any] = {}
    kind: Any = lambda *given: Nccl(made, *given)  # noqa: E731
    kind.Options = SimpleNamespace
    monkeypatch.setattr(dist, "ProcessGroupNCCL", kind, raising=False)
    monkeypatch.setattr(vllm_weights, "PrefixStore", lambda _, store: store)
    return made


def test_each_weight_is_sent_on_the_stream_of_its_unit_and_waited_for_under_the_limit(nccl: dict[str, Any]) -> None:
    """Use 28 layers of 7 weights: vLLM's own sender copies 84 of the 196 on another stream than the unit's."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    gathered: list[str] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for layer in range(28):
            for part in range(7):
                gathered.append(current[-1])
                yield f"{layer}.{part}", torch.zeros(9 << 10)

    rank = LearnerRank("node")
    rank._sharded = SimpleNamespace(stream=stream)  # type: ignore[assignment]
    rank._receivers = WeightGroup(store, 0, 1, 5.0, "cuda")
    assert (nccl["limit"], nccl["blocking"]) == (timedelta(seconds=5), "1"), "torch aborts at the limit"
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ, "the ranks' own groups keep torch's watchdog"
    rank.send_weights()
    assert nccl["sent"] == gathered == ["compute"] * 196
    assert nccl["waits"] == [timedelta(seconds=5)] * 196, "a unit is dropped after its weights were sent"


def test_who_joins_again_leaves_the_group_before(nccl: dict[str, Any]) -> None:
    """A communicator that is not destroyed keeps its GPU memory. `test_vllm_names.py` tests the workers."""
    rank = LearnerRank("node")
    rank._sharded = SimpleNamespace(stream=lambda: iter(()))  # type: ignore[assignment]
    rank._scorer = SimpleNamespace(device=torch.device("cuda"))  # type: ignore[assignment]
    for _ in range(3):
        rank.open_receivers_store()
        assert rank.join_receivers(1, 5.0) == ()
    assert nccl["aborted"] == 2
    rank.close()
    assert nccl["aborted"] == 3


def test_a_port_of_the_weight_group_is_held_from_the_moment_it_is_named() -> None:
    rank = LearnerRank("node", "127.0.0.2")
    assert rank.open_store()[0] == "127.0.0.2", "not the address of another network of the host"
    host, port = rank.open_receivers_store()
    assert host == "127.0.0.2"
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((host, port))


def test_a_worker_that_never_comes_is_waited_for_under_the_limit() -> None:
    rank = LearnerRank("node")
    rank._sharded = SimpleNamespace(stream=lambda: iter(()))  # type: ignore[assignment]
    rank._scorer = SimpleNamespace(device=torch.device("cpu"))  # type: ignore[assignment]
    rank.open_receivers_store()
    began = time.monotonic()
    assert rank.join_receivers(2, 0.5) is None
    assert time.monotonic() - began < 5
