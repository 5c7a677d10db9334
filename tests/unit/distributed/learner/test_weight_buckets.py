"""Buckets of weights for a process on the same GPU: contents, placement, memory, and number of gathers."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from json_server import free_port
from processes import scripts
from rank_memory import config_of, sending
from torch import Tensor

from magicrl.config.cluster_schema import LearnerPlacement
from magicrl.distributed.learner.learner import DistributedLearner
from magicrl.rollout import weight_buckets
from magicrl.rollout.vllm_weights import TRANSPORTS, VllmWeights, transport
from magicrl.rollout.weight_buckets import WeightBucket, WeightInfo, device_identity, in_buckets, opened

CPU = torch.device("cpu")
HERE = device_identity(CPU)


def copied(bucket: WeightBucket) -> dict[str, Tensor]:
    """Return the weights that vLLM's receiver reads from a bucket."""
    info = bucket.update_info()
    parts = opened(info["ipc_handles"])[: sum(info["tensor_sizes"])].split(info["tensor_sizes"])
    fields = zip(info["names"], info["dtype_names"], info["shapes"], parts, strict=True)
    return {name: part.view(getattr(torch, dtype)).view(shape).clone() for name, dtype, shape, part in fields}


def test_buckets_hold_what_fits_in_the_order_of_the_stream() -> None:
    weights = {
        "a": torch.randn(3, 4),
        "b": torch.randn(6).bfloat16(),
        "c": torch.randn(1).bfloat16(),  # a float32 after it would begin inside a word
        "d": torch.randn(2),
        "large": torch.randn(40, 2),
        "e": torch.randn(2, 5).T,
    }
    found: list[list[str]] = []
    flags: list[tuple[bool, bool]] = []
    again: dict[str, Tensor] = {}
    memories: set[tuple[Any, ...]] = set()
    for bucket in in_buckets(lambda: iter(weights.items()), CPU, size=80):
        found.append([weight.name for weight in bucket.weights])
        flags.append((bucket.first, bucket.last))
        memories.add(bucket.handles[HERE])
        again |= copied(bucket)
    assert found == [["a", "b", "c"], ["d"], ["large"], ["e"]], "62 of 80 bytes; 320 do not fit, nor 40 beside them"
    assert flags == [(True, False), (False, False), (False, False), (False, True)]
    assert len(memories) == 2, "one memory, and a larger one from the weight on that needs it"
    assert not any(Path(name).exists() for name, _ in memories)
    assert all(torch.equal(again[name], weight) for name, weight in weights.items())


def test_a_bucket_lies_where_the_one_before_lay() -> None:
    weights = {name: torch.full((16,), float(n)) for n, name in enumerate("abc")}
    buckets = in_buckets(lambda: iter(weights.items()), CPU, size=64)
    first = next(buckets)
    assert copied(first)["a"].tolist() == [0.0] * 16
    assert next(buckets).handles == first.handles
    assert copied(first)["a"].tolist() == [1.0] * 16, "whoever has not copied it by now reads the next one"
    buckets.close()  # type: ignore[attr-defined]
    assert not Path(first.handles[HERE][0]).exists(), "a copy that is given up leaves nothing"


def test_each_device_has_the_handle_of_its_own_rank() -> None:
    told = (WeightInfo("w", "float32", (2,)),)
    given = [WeightBucket(told, (8,), {f"GPU-{n}": ("handle", n)}, True, False) for n in range(2)]
    merged = WeightBucket.merged(given)
    assert merged == WeightBucket(told, (8,), {"GPU-0": ("handle", 0), "GPU-1": ("handle", 1)}, True, False)
    with pytest.raises(ValueError, match=r"no learner rank on host .* has a bucket, only on: GPU-0, GPU-1"):
        opened(merged.handles)


def test_two_ranks_fill_each_its_own_and_the_driver_passes_no_weight_on(
    untied: Callable[[], Any], ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    placement = LearnerPlacement(ranks=2, shard_ranks=2)
    learner = DistributedLearner(untied(), launcher=ranks, placement=placement, threads=1)
    expected = learner.weights()
    answers: list[list[WeightBucket | None]] = []
    call = learner._call
    monkeypatch.setattr(learner, "_call", lambda *given: answers.append(call(*given)) or answers[-1])
    found: dict[str, Tensor] = {}
    buckets: Iterator[WeightBucket] = learner.buckets()
    for bucket in buckets:
        both = [copied(one) for one in answers[-1] if one is not None]
        assert len(both) == 2
        for name, weight in both[0].items():
            assert torch.equal(weight, both[1][name]), "each rank gathered it"
        found |= copied(bucket)
        assert len(pickle.dumps(bucket)) < 0.1 * sum(bucket.sizes)
    assert answers[-1] == [None, None]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    again = [name for bucket in learner.buckets() for name in copied(bucket)]
    assert again == list(found), "a fresh pass"
    learner.close()


SCRIPT = """
import json, sys
import torch, torch.distributed as dist
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode
from magicrl.distributed.learner.sharding import RankSettings, ShardedModel, make_meshes
from magicrl.rollout.weight_buckets import in_buckets

class Gathered(TorchDispatchMode):
    total = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "allgather" in str(func):
            self.total += args[0].numel() * args[0].element_size()
        return func(*args, **(kwargs or {}))

role, folder, port, size = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=role, world_size=2)
sharded = ShardedModel(RankSettings(folder=folder), make_meshes("cpu", 1), torch.device("cpu"))
state = sum(p.to_local().numel() * 4 for p in sharded.trained().values())
tracker, gathered = MemTracker(), Gathered()
tracker.track_external(sharded.model)
with tracker:
    buckets = sum(1 for _ in in_buckets(sharded.stream, torch.device("cpu"), size))
(peak,) = tracker.get_tracker_snapshot("peak").values()
with gathered:
    packed = sum(sum(bucket.sizes) for bucket in in_buckets(sharded.stream, torch.device("cpu"), size))
print(json.dumps({"buckets": buckets, "beside": peak["Total"] - state, "gathered": gathered.total, "packed": packed}))
"""


def test_every_weight_is_gathered_once_and_two_units_and_a_bucket_are_all_the_memory(
    twelve_layers: tuple[Path, int, int], tmp_path: Path
) -> None:
    """Check for any number of engines: each copies from the rank on its device."""
    folder, whole, unit = twelve_layers
    given = [str(folder), str(free_port()), str(unit)]
    for text in scripts(SCRIPT, [[str(role), *given] for role in range(2)], tmp_path):
        said = json.loads(text)
        assert said["packed"] == whole
        assert said["gathered"] == pytest.approx(whole, rel=0.01), "norms are padded to a row a rank"
        assert said["buckets"] >= 7
        assert 2 * unit < said["beside"] < 3.6 * unit < 0.6 * whole, "the unit, what is exchanged for it, the bucket"


def test_the_32b_learner_lends_a_bucket_of_its_largest_weight_and_never_the_model(tmp_path: Path) -> None:
    found = sending(config_of("DeepSeek-R1-Distill-Qwen-32B"), 32, tmp_path, lent=True)
    assert found["beside"] == pytest.approx(3 * found["unit"], rel=1e-3), "the unit twice, and its copy in the bucket"
    assert found["beside"] < 0.08 * found["whole"]


@pytest.mark.parametrize(
    ("gpus", "placed", "expected"),
    [(True, "apart", "group"), (True, "colocated", "ipc"), (False, "apart", "group"), (False, "colocated", "memory")],
)
def test_the_placement_decides_what_carries_weights(
    monkeypatch: pytest.MonkeyPatch, gpus: bool, placed: Any, expected: str
) -> None:
    assert TRANSPORTS[placed, gpus].removeprefix("magicrl_") == expected
    registered: dict[str, Any] = {}
    factory = SimpleNamespace(register_engine=registered.__setitem__)
    package: Any = SimpleNamespace(WeightTransferEngineFactory=factory)
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer", package)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    own: Any = {"magicrl_group": lambda: "group", "magicrl_memory": lambda: "memory"}
    monkeypatch.setattr("magicrl.rollout.vllm_weights._OWN_ENGINES", own)
    name = transport(placed)
    assert name == TRANSPORTS[placed, gpus]
    assert registered == ({} if expected == "ipc" else {name: expected}), "vLLM's own needs no registration"


class Workers:
    """vLLM's calls of its workers, and their replies out of order."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.active = False

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        if method in ("update_weights", "finish_weight_update") and not self.active:
            raise RuntimeError("no update was started")
        if method == "start_weight_update" and self.active:
            raise RuntimeError("already active")
        self.active = {"start_weight_update": True, "finish_weight_update": False}.get(method, self.active)
        self.told.append({"update_weights": "update"}.get(method, method.removesuffix("_weight_update")))
        if kwargs.get("update_info", {}).get("names") == ["bad"]:
            self.active = False
            raise ValueError("not a weight of this model")

    def apply_model(self, function: Any) -> None:
        self.told.append(function.__name__)


def lent(name: str, *, first: bool = False, last: bool = False) -> WeightBucket:
    return WeightBucket((WeightInfo(name, "float32", (1,)),), (4,), {HERE: ("file", 4)}, first, last)


@pytest.fixture
def workers() -> tuple[Workers, VllmWeights]:
    weights = VllmWeights.__new__(VllmWeights)
    weights._engine, weights.begun = Workers(), False
    weights._shapes, weights._tied = dict.fromkeys("abc", (1,)), False
    return weights._engine, weights


def test_the_workers_let_the_bucket_go_with_the_last_one(workers: tuple[Workers, VllmWeights]) -> None:
    """Otherwise the rank could not release its memory before the engine's cache needs it."""
    told, weights = workers
    weights.receive(lent("a", first=True))
    weights.receive(lent("b"))
    with pytest.raises(AssertionError, match="the last bucket"):
        weights.complete()
    weights.receive(lent("c", last=True))
    assert told.told == ["init_weight_transfer_engine", "start", "update", "update", "update", "finish"]
    weights.complete()
    assert told.told[-1] == "pack_again"


@pytest.mark.parametrize("failed", [False, True], ids=["sender-lost", "worker-failed"])
def test_what_broke_off_is_ended_before_anything_else_is_loaded(
    workers: tuple[Workers, VllmWeights], failed: bool
) -> None:
    told, weights = workers
    weights.receive(lent("a", first=True))
    if failed:
        with pytest.raises(ValueError, match="not a weight"):
            weights.receive(lent("bad"))
    told.told.clear()
    weights.abandon()
    assert (told.told, told.active) == ((["start"] if failed else []) + ["finish"], False)
    weights.abandon()
    weights._shapes = {"a": (1,)}
    weights.receive(lent("a", first=True, last=True))
    assert told.told[-3:] == ["start", "update", "finish"]


def test_weights_of_other_names_than_the_files_have_end_no_update(workers: tuple[Workers, VllmWeights]) -> None:
    """vLLM would ignore some of them and compute with the old weights."""
    told, weights = workers
    weights.receive(lent("a", first=True))
    with pytest.raises(ValueError, match="no weights were given for: b, c"):
        weights.receive(lent("a", last=True))
    assert weights.begun
    told.told.clear()
    with pytest.raises(ValueError, match="does not have: d"):
        weights.take([WeightInfo(name, "float32", (1,)) for name in "abcd"])
    assert told.told == []


def test_shared_memory_on_a_gpu_is_never_of_a_segment_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes could open such memory only by ptrace. Afterwards the allocator has its initial setting."""
    told: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *given, **options: told.append("allocated") or empty(*given, **options))
    for setting, expected in (
        ("expandable_segments:True,max_split_size_mb:64", ["expandable_segments:False", "allocated"]),
        ("max_split_size_mb:64", ["allocated"]),
    ):
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", setting)
        told.clear()
        assert weight_buckets._unmovable(8, CPU).numel() == 8
        assert told == expected + ([setting] if len(expected) > 1 else [])
