"""Two model types of docs/guides/models.md in vLLM: its log-probs and its weights after an update are plain
transformers'."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import vllm_cases
from model_cases import CASES, plain_model
from safetensors.torch import load_file, save_file

from magicrl.models.loading import load_policy, save_policy
from magicrl.rollout.vllm_weights import as_saved, check_shapes, saved_shapes


@pytest.mark.parametrize("name", ["Mixtral", "DeepSeek-V3", "Gemma 4"])
def test_a_learners_weights_become_those_of_its_folder(name: str, tmp_path: Path) -> None:
    """Stacked experts are split, and tensors that the learner does not train come from the files."""
    save_policy(plain_model(CASES[name], pad_token_id=0), vllm_cases.TOKENIZER, tmp_path / "model")
    learner = dict(load_policy(tmp_path / "model").model.named_parameters())
    shapes = saved_shapes(tmp_path / "model")
    with pytest.raises(ValueError, match="no weights were given for"):
        check_shapes({n: tuple(p.shape) for n, p in learner.items()}, shapes, tied=False)
    found = as_saved({n: p.detach() for n, p in learner.items()}, tmp_path / "model")
    expected = load_file(tmp_path / "model" / "model.safetensors")
    check_shapes({n: tuple(p.shape) for n, p in found.items()}, shapes, tied="lm_head.weight" not in expected)
    assert all(torch.equal(found[n], value) for n, value in expected.items())


def test_files_that_the_index_does_not_name_are_no_weights(tmp_path: Path) -> None:
    """Clones of Mistral's models also hold consolidated.safetensors: the same weights under other names."""
    folder = save_policy(plain_model(CASES["DeepSeek-V3"], pad_token_id=0), vllm_cases.TOKENIZER, tmp_path / "model")
    expected = load_file(folder / "model.safetensors")
    other = {f"layers.{name}": torch.zeros(1) for name in expected}
    biases = {name: value + 1 for name, value in expected.items() if name.endswith("_bias")}
    save_file(other | biases, folder / "consolidated.safetensors")
    assert saved_shapes(folder) == {name: tuple(value.shape) for name, value in expected.items()}
    learner = dict(load_policy(folder).model.named_parameters())
    found = as_saved({name: value.detach() for name, value in learner.items()}, folder)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_what_vllm_samples_with_is_the_model_also_after_an_update() -> None:
    found = vllm_cases.found_in_a_process(["Mixtral", "Gemma 2"])
    for name, row in found.items():
        assert row.keys() == {"vllm_logprob", "vllm_synced"}, (name, row)
        assert max(row.values()) < 2e-4, (name, row)
