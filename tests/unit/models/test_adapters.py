"""LoRA adapters in PEFT's format: files, continuation, and rejected adapters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import train_sample
from model_cases import CASES, plain_model
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from magicrl.config.errors import RecipeError
from magicrl.config.model_schema import LoraConfig, ModelConfig, TinyModelConfig
from magicrl.models.adapters import LoraAdapters, adapter_shapes, check_adapters, read_adapters
from magicrl.models.packing import register_attention
from magicrl.models.small_models import make_tiny
from magicrl.records import TrainBatch
from magicrl.training.learner import LocalLearner
from magicrl.training.objective import LearnerSettings
from magicrl.training.protocols import Controls

LORA = LoraConfig(rank=3, alpha=8.0)
TOKENS = torch.tensor([[3, 5, 4, 6, 2]])


def learner(lora: LoraConfig | None = None, base: str = "") -> LocalLearner:
    config = TinyModelConfig(hidden_size=32, layers=2, heads=2, intermediate_size=48, max_context=64)
    model, tokenizer = make_tiny(config, [f"w{i}" for i in range(30)], 0)
    model.name_or_path = base  # as after loading from a folder
    return LocalLearner(model, LearnerSettings(model=ModelConfig(dtype="float32", lora=lora)), tokenizer=tokenizer)


def batch() -> TrainBatch:
    rng = np.random.default_rng(0)
    samples = [
        train_sample([3, 4], rng.integers(2, 32, 9).tolist(), advantage=(-1.0) ** i, sample_index=i) for i in range(4)
    ]
    return TrainBatch.of(samples)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Return a learner after two updates. ``base`` is the model it started from, ``model`` the one it wrote."""
    folder = tmp_path_factory.mktemp("lora")
    learner().save_hf(folder / "base")
    one = learner(LORA, str(folder / "base"))
    for _ in range(2):
        one.update(batch(), Controls(learning_rate=2e-2))
    one.save_hf(folder / "model")
    return one, folder


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(TOKENS).logits


def test_peft_loads_the_adapters_on_the_base(trained: tuple[Any, Path]) -> None:
    _, folder = trained
    register_attention()
    base, merged = (AutoModelForCausalLM.from_pretrained(folder / n, dtype=torch.float32) for n in ("base", "model"))
    plain = logits(base)
    theirs = logits(PeftModel.from_pretrained(base, str(folder / "model" / "adapter")))
    torch.testing.assert_close(theirs, logits(merged), atol=1e-5, rtol=0)
    assert (theirs - plain).abs().max() > 0.1
    assert json.loads((folder / "model/adapter/adapter_config.json").read_text())["base_model_name_or_path"] == str(
        folder / "base"
    )


def test_training_goes_on_from_a_folder_of_adapters(trained: tuple[Any, Path]) -> None:
    one, folder = trained
    start = LORA.model_copy(update={"start": str(folder / "model" / "adapter")})
    again = learner(start, str(folder / "base"))
    for name, tensor in one.adapters().items():
        assert torch.equal(again.adapters()[name], tensor)
    for name, tensor in one.weights().items():
        assert torch.equal(again.weights()[name], tensor)
    with pytest.raises(RecipeError, match=r"model\.lora\.start: .* adapters of .*base, and the start model is another"):
        learner(start, "another")


@pytest.mark.parametrize(
    ("recipe", "changes", "told"),
    [
        (LORA, {"base_model_name_or_path": "owner/other-7b"}, "adapters of owner/other-7b, and the start model is"),
        (LoraConfig(rank=4, alpha=8.0), {}, r"rank = 3, and the recipe's model\.lora\.rank is 4"),
        (LoraConfig(rank=3, alpha=9.0), {}, r"alpha = 8\.0"),
        (LORA, {"use_dora": True}, "use_dora"),
        (LORA, {"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        (LORA, {"peft_type": "IA3"}, "IA3 adapters"),
        (LORA, {"init_lora_weights": "pissa_niter_16"}, "changed the model's own weights"),
        (LORA, {"init_lora_weights": "olora"}, "changed the model's own weights"),
        (LORA, {"init_lora_weights": "lora_ga"}, "changed the model's own weights"),
        (LORA, {"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
    ],
)
def test_other_adapters_are_refused_by_name(
    trained: tuple[Any, Path], tmp_path: Path, recipe: LoraConfig, changes: dict[str, Any], told: str
) -> None:
    source = trained[1] / "model" / "adapter"
    (tmp_path / "adapter_model.safetensors").symlink_to(source / "adapter_model.safetensors")
    described = json.loads((source / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(described))
    check_adapters(tmp_path, LORA, "elsewhere/base")  # the same model in another folder
    (tmp_path / "adapter_config.json").write_text(json.dumps(described | changes))
    with pytest.raises(RecipeError, match=told):
        check_adapters(tmp_path, recipe, "elsewhere/base")


ATTENTION, MLP = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}
OF_TYPE = {"DeepSeek-V3": {"o_proj"}} | dict.fromkeys(("Qwen3-MoE", "Qwen3-Next", "gpt-oss", "Mixtral"), ATTENTION)
"""Layers of the default list that a model type has and that can be adapted, unless it has all of them."""


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
@pytest.mark.parametrize("name", CASES)
def test_default_layers_are_those_that_the_model_type_has(name: str) -> None:
    """Experts are tensors and not linear layers. PEFT would adapt them under the names of a shared expert's layers."""
    model, config = plain_model(CASES[name]), LoraConfig(rank=2)
    weights, shapes = dict(model.named_parameters()), adapter_shapes(model, config)
    adapters = LoraAdapters(model, config)
    expected = OF_TYPE.get(name, ATTENTION | MLP)
    assert {tensor.split(".")[-3] for tensor in shapes} == expected == set(adapters.config.target_modules)
    assert {tensor: tuple(value.shape) for tensor, value in adapters.tensors().items()} == shapes
    assert adapters.merged_weights().keys() == weights.keys()


@pytest.mark.parametrize(
    ("name", "modules", "told"),
    [
        ("Qwen3", ("q_proj", "gate_project"), r"gate_project: this model has no .* it has: down_proj, gate_proj, k_pr"),
        ("Qwen3", ("q_proj", "lm_head"), r"lm_head: this model has no .* it has: [^h]*gate_proj[^h]*$"),
        ("Qwen3", ("embed_tokens",), "embed_tokens: this model has no linear layers"),
        ("Qwen3-Next", ("up_proj",), r"up_proj: this model has no .* \(experts are not linear layers\)"),
    ],
)
def test_stated_layers_that_the_model_lacks_are_refused(name: str, modules: tuple[str, ...], told: str) -> None:
    with pytest.raises(RecipeError, match=told) as refused:
        LoraAdapters(plain_model(CASES[name]), LoraConfig(target_modules=modules))
    assert refused.value.key == "model.lora.target_modules"


def test_adapters_of_another_folder_of_the_same_name_are_refused(trained: tuple[Any, Path], tmp_path: Path) -> None:
    folder, base = trained[1] / "model" / "adapter", trained[1] / "base"
    check_adapters(folder, LORA, str(base))
    other = Path(shutil.copytree(base, tmp_path / "base"))
    check_adapters(folder, LORA, str(other))  # a copy
    weights = load_file(other / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, other / "model.safetensors")
    with pytest.raises(RecipeError, match=r"holds adapters of \S+base with other weights, and the start model is"):
        check_adapters(folder, LORA, str(other))


def test_adapters_of_other_shapes_are_refused_by_layer(trained: tuple[Any, Path]) -> None:
    folder = trained[1] / "model" / "adapter"
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "adapter_model.safetensors").items()}
    register_attention()
    base = AutoModelForCausalLM.from_pretrained(trained[1] / "base")
    assert adapter_shapes(base, LORA) == shapes
    assert read_adapters(folder, shapes, "x").keys() == shapes.keys()
    name = min(shapes)
    with pytest.raises(
        RecipeError, match=r"adapters of another model than x: 1 tensors differ, first model\.layers\.0"
    ):
        read_adapters(folder, shapes | {name: (3, 7)}, "x")
    with pytest.raises(RecipeError, match="holds no adapters in PEFT's format"):
        check_adapters(folder.parent, LORA, "x")
