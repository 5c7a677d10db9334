"""Model types of docs/guides/models.md in learner and engine, compared with transformers; states, snapshots,
loading."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import model_cases
import numpy as np
import pytest
import torch
from model_cases import CASES, CONTEXT, SIZES, WORDS
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForImageTextToText

from magicrl.models.loading import described_model, load_policy, load_shell
from magicrl.models.model_files import WeightFiles
from magicrl.models.small_models import make_tokenizer
from magicrl.records import RolloutGroup

# recurrent layers solve a triangular system, whose rounding depends on where chunks of 64 tokens begin
LOOSE = {"Qwen3-Next", "Qwen3.5", "Qwen3.5-MoE"}


@pytest.mark.parametrize("name", CASES)
def test_learner_and_engine_compute_what_plain_transformers_does(name: str) -> None:
    found = model_cases.compared(CASES[name])
    assert not [key for key in found if key.endswith("refused")], found
    assert found.pop("sampled_tokens") > 100
    bound = 3e-4 if name in LOOSE else 5e-5
    assert {key: value for key, value in found.items() if not value < bound} == {}


@pytest.mark.parametrize("name", ["Qwen3.5", "Gemma 4"])
def test_a_snapshot_holds_states_and_layers_of_every_shape(name: str) -> None:
    """The responses must continue in another engine with the same tokens."""
    model = model_cases.own_model(model_cases.plain_model(CASES[name]))
    asked = model_cases.requests([(11, 3, 20), (4, 2, 30), (9, 3, 12)])

    def answers(groups: list[RolloutGroup]) -> list[list[list[float]]]:
        ordered = sorted(groups, key=lambda group: group.request.draw)
        return [[[*c.tokens.tolist(), *c.sampler_logprobs.tolist()] for c in g.completions] for g in ordered]

    whole = answers(model_cases.finished(model_cases.make_engine(model, rows=5), asked))
    first, second = (model_cases.make_engine(model, rows=5) for _ in range(2))
    first.submit(asked)
    for _ in range(7):
        assert not first.turn(), "nothing has ended yet"
    second.resume(first.snapshot(), asked)
    assert answers(list(second.finished())) == whole


TOKENIZER = make_tokenizer([f"w{i}" for i in range(WORDS - 2)], CONTEXT)
_VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_IMAGE = {"image_size": 28, "patch_size": 14}
MULTIMODAL: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "Gemma 3",
        {
            "vision_config": {"model_type": "siglip_vision_model", **_IMAGE, **_VISION},
            "mm_tokens_per_image": 4,
            "image_token_index": 60,
        },
    ),
    "gemma4": (
        "Gemma 4",
        {
            "vision_config": {"num_key_value_heads": 2, "head_dim": 8, **_VISION},
            "audio_config": None,
            "image_token_id": 60,
            "audio_token_id": 61,
            "video_token_id": 62,
        },
    ),
    "llama4": (
        "Llama 4 text",
        {
            "vision_config": {
                **_VISION,
                **_IMAGE,
                "vision_output_dim": 16,
                "projector_input_dim": 16,
                "projector_output_dim": 16,
            }
        },
    ),
    "qwen3_5": (
        "Qwen3.5",
        {
            "vision_config": {
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
                "out_hidden_size": SIZES["hidden_size"],
            },
            "image_token_id": 60,
            "video_token_id": 61,
        },
    ),
}


def multimodal(name: str, folder: Path) -> Any:
    """Save a random multimodal model in ``folder``, as transformers does."""
    case, further = MULTIMODAL[name]
    config = AutoConfig.for_model(name, text_config=CASES[case].config(pad_token_id=0).to_dict(), **further)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize("name", MULTIMODAL)
def test_the_language_model_of_a_multimodal_folder_is_loaded_alone(name: str, tmp_path: Path) -> None:
    whole = multimodal(name, tmp_path)
    policy = load_policy(tmp_path)
    assert not [key for key, _ in policy.model.named_parameters() if "vision" in key]
    text = policy.model
    text.set_attn_implementation("sdpa")
    ids = torch.from_numpy(np.random.default_rng(0).integers(2, 50, (1, 20)))
    expected = whole(input_ids=ids, use_cache=False)
    torch.testing.assert_close(text(input_ids=ids, use_cache=False).logits, expected.logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["gemma3", "qwen3_5"])
def test_ranks_read_the_language_models_rows_under_its_own_names(name: str, tmp_path: Path) -> None:
    multimodal(name, tmp_path)
    shell = load_shell(tmp_path)
    files = WeightFiles(tmp_path, shell.model, str(tmp_path))
    with safe_open(tmp_path / "model.safetensors", framework="pt") as stored:
        (key,) = [key for key in stored.keys() if re.search(r"language_model.*layers\.1\.self_attn\.q_proj", key)]  # noqa: SIM118 (no mapping)
        expected = stored.get_tensor(key)[3:9]
    torch.testing.assert_close(files.rows("model.layers.1.self_attn.q_proj.weight", 3, 9), expected)


def test_a_quantised_model_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    config = CASES["gpt-oss"].config()
    config.quantization_config = {"quant_method": "mxfp4"}
    config.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((8).to_bytes(8, "little") + b"{}      ")
    for load in (described_model, load_policy):
        with pytest.raises(
            ValueError, match=r"is quantised \(mxfp4\); training needs the weights it was quantised from"
        ):
            load(tmp_path)
