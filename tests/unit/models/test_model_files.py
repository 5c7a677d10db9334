"""Rows read from weight files, compared with the model that transformers loads whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from magicrl.config.errors import RecipeError
from magicrl.models.loading import load_empty, load_policy, load_shell, save_policy
from magicrl.models.model_files import INDEX, WEIGHTS, WeightFiles, find_model
from magicrl.models.small_models import make_tokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e6}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
    "rope_theta": 5e5,
}
KINDS = {
    "llama": {},
    "llama3": {"rope_parameters": LLAMA3},
    "qwen2": {"tie_word_embeddings": True, "rope_parameters": YARN},
    "qwen3": {},
    "gemma3_text": {"tie_word_embeddings": True},
}


def made(folder: Path, kind: str = "qwen2", dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    config = AutoConfig.for_model("llama" if kind == "llama3" else kind, **{**SHAPE, **KINDS[kind], **changes})
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return save_policy(model, make_tokenizer([f"w{i}" for i in range(18)], 512), folder)


def opened(folder: Path) -> WeightFiles:
    return WeightFiles(folder, load_empty(folder), str(folder))


def edited(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def assert_rows_are_the_models(folder: Path) -> None:
    files = opened(folder)
    model = load_policy(folder).model
    for name, parameter in model.named_parameters(remove_duplicate=False):
        rows = parameter.shape[0]
        for start, stop in ((0, rows), (1, rows - 2), (rows - 1, rows)):
            assert torch.equal(files.rows(name, start, stop).float(), parameter[start:stop]), name


@pytest.mark.parametrize("kind", KINDS)
def test_empty_models_have_the_names_and_buffers_of_loaded_ones_and_no_data(kind: str, tmp_path: Path) -> None:
    folder = made(tmp_path / "model", kind)
    empty, whole = load_empty(folder), load_policy(folder).model
    assert all(parameter.is_meta for parameter in empty.parameters())
    named = {name: (p.shape, p.dtype) for name, p in whole.named_parameters(remove_duplicate=False)}
    assert {name: (p.shape, p.dtype) for name, p in empty.named_parameters(remove_duplicate=False)} == named
    expected, found = (dict(m.named_buffers(remove_duplicate=False)) for m in (whole, empty))
    assert found.keys() == expected.keys()
    assert any("inv_freq" in name for name in expected)
    for name, buffer in expected.items():
        assert found[name].dtype == buffer.dtype
        assert torch.equal(found[name], buffer), name
    assert not empty.training
    assert {m.config._attn_implementation for m in (empty, whole)} == {"magicrl"}  # pyright: ignore[reportPrivateUsage]
    assert_rows_are_the_models(folder)


def test_rows_of_many_files_and_of_bfloat16_files(tmp_path: Path) -> None:
    folder = made(tmp_path / "model", "llama", torch.bfloat16)
    assert opened(folder).rows("lm_head.weight", 0, 2).dtype == torch.bfloat16
    assert_rows_are_the_models(folder)
    weights = load_policy(folder, dtype="bfloat16").model
    (folder / WEIGHTS).unlink()
    weights.save_pretrained(folder, max_shard_size="2KB")
    assert (folder / INDEX).is_file()
    assert len(list(folder.glob("model-*.safetensors"))) > 3
    assert_rows_are_the_models(folder)


@pytest.mark.parametrize("stored", ["model.embed_tokens.weight", "lm_head.weight", "both"])
def test_a_tied_head_is_found_under_either_name(stored: str, tmp_path: Path) -> None:
    folder = made(tmp_path / "model", "qwen2")

    def rename(weights: dict[str, Tensor]) -> None:
        weight = weights.pop("model.embed_tokens.weight")
        names = ("model.embed_tokens.weight", "lm_head.weight") if stored == "both" else (stored,)
        weights.update({name: weight.clone() for name in names})

    edited(folder, rename)
    weight = load_file(folder / WEIGHTS)[stored if stored != "both" else "lm_head.weight"]
    files = opened(folder)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(files.rows(name, 3, 9), weight[3:9])
    assert not files.unused


def test_a_tied_head_with_values_of_its_own_is_an_error(tmp_path: Path) -> None:
    folder = made(tmp_path / "model", "qwen2")
    edited(folder, lambda weights: weights.update({"lm_head.weight": weights["model.embed_tokens.weight"] + 1}))
    with pytest.raises(ValueError, match=r"ties model\.embed_tokens\.weight and lm_head\.weight.*different values"):
        opened(folder).rows("lm_head.weight", 0, 1)


def test_what_does_not_fit_is_told_from_the_headers(tmp_path: Path) -> None:
    folder = made(tmp_path / "model", "llama")
    norm = load_file(folder / WEIGHTS)["model.norm.weight"]
    edited(folder, lambda weights: weights.update({"model.norm.weight": norm[:-1].clone()}))
    with pytest.raises(ValueError, match=r"weight model\.norm\.weight is \[15\] in the file and \[16\] by the config"):
        load_shell(folder)

    def renamed(weights: dict[str, Tensor]) -> None:
        weights["transformer.norm.weight"] = weights.pop("model.norm.weight")

    edited(folder, renamed)
    with pytest.raises(
        ValueError, match=r"lack 1 weights.*e\.g\. model\.norm\.weight \(they have others, e\.g\. trans"
    ):
        load_shell(folder)
    edited(folder, lambda weights: weights.update({"model.norm.weight": norm.to(torch.float8_e4m3fn)}))
    for load in (load_shell, load_policy):
        with pytest.raises(ValueError, match=r"weight model\.norm\.weight is stored as F8_E4M3.*quantised"):
            load(folder)


def test_rows_that_are_not_finite_are_told_by_whoever_reads_them(tmp_path: Path) -> None:
    folder = made(tmp_path / "model", "llama")

    def spoil(weights: dict[str, Tensor]) -> None:
        weights["model.layers.1.mlp.up_proj.weight"][5, 2] = float("nan")

    files = opened(edited(folder, spoil))
    name = "model.layers.1.mlp.up_proj.weight"
    assert files.rows(name, 0, 5).isfinite().all()
    with pytest.raises(ValueError, match=rf"weight {name} holds values that are not finite"):
        files.rows(name, 5, 6)


def test_a_shell_tells_what_a_loaded_model_tells(tmp_path: Path) -> None:
    folder = made(tmp_path / "model", "qwen3")
    shell, whole = load_shell(folder), load_policy(folder)
    assert all(parameter.is_meta for parameter in shell.model.parameters())
    for field in ("end_tokens", "max_context", "valid_vocab", "folder", "licence"):
        assert getattr(shell, field) == getattr(whole, field)
    assert shell.model.generation_config.eos_token_id == whole.model.generation_config.eos_token_id
    assert shell.tokenizer.get_vocab() == whole.tokenizer.get_vocab()


def test_the_short_name_of_the_option_is_explained_where_a_recipe_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match="use --model smollm2, or name that folder"):
        find_model("smollm2")
