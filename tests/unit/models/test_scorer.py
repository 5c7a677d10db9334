"""Models whose layers mix sequences of one row are rejected on every path, sound ones are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from builders import SIZES
from model_cases import CASES, own_model, plain_model
from transformers import PreTrainedModel

from magicrl.config.model_schema import ModelConfig
from magicrl.models.packing import ATTENTION_NAME, register_attention
from magicrl.models.recurrent import check_layers, keep_sequences_apart
from magicrl.models.scorer import PolicyScorer, check_attention, check_isolation
from magicrl.rollout.engine_settings import EngineSettings
from magicrl.rollout.in_process import InProcessEngine

HALF = ["linear_attention", "full_attention"] * 2
DELTA = {
    "head_dim": 8,
    "layer_types": HALF,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_n_groups": 1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SOUND: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Gemma": {"head_dim": 8},
    "Qwen3Moe": {"head_dim": 8, **EXPERTS},
    "Qwen3_5Text": DELTA,
    "Qwen3Next": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 16},
}
MIXING: dict[str, dict[str, Any]] = {
    "GraniteMoeHybrid": {
        **MAMBA,
        "layer_types": ["mamba", "attention"] * 2,
        "mamba_d_head": 16,
        "num_local_experts": 0,
        "shared_intermediate_size": 32,
    },
    "FalconH1": {**MAMBA, "head_dim": 8, "mamba_d_ssm": 32, "mamba_d_head": 8},
    "Bamba": {**MAMBA, "attn_layer_indices": [1, 3], "mamba_d_head": 16},
    "Lfm2": {"layer_types": ["conv", "full_attention"] * 2},
}
WORDS = SIZES["vocab_size"]


def random_model(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    register_attention()
    config = getattr(transformers, f"{name}Config")(
        **SIZES | {"num_hidden_layers": 4, "eos_token_id": 2},
        **(SOUND | MIXING)[name],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
    return model.eval()


def engine(model: PreTrainedModel) -> InProcessEngine:
    return InProcessEngine(
        model,
        EngineSettings(model="", max_rows=2, memory_limit_mb=16),
        end_tokens=frozenset({2}),
        decode=lambda tokens: " ".join(map(str, tokens)),
        valid_vocab=WORDS,
        max_context=32,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SOUND)
def test_models_whose_sequences_can_be_kept_apart_pass(name: str, dtype: torch.dtype) -> None:
    model = random_model(name, dtype)
    keep_sequences_apart(model)
    check_isolation(model)
    check_attention(model)


@pytest.mark.parametrize("name", MIXING)
def test_layers_that_carry_state_are_named_before_weights_are_read(name: str) -> None:
    with torch.device("meta"):
        model = random_model(name)
    layer = {"Lfm2": "Lfm2ShortConv", "GraniteMoeHybrid": "GraniteMoeHybridMambaLayer"}.get(name, f"{name}Mixer")
    with pytest.raises(ValueError, match=layer):
        check_layers(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_that_is_told_more_than_is_listened_to_is_refused(dtype: torch.dtype) -> None:
    model = random_model("Llama", dtype)
    attention = model.get_decoder().layers[1].self_attn  # pyright: ignore[reportIndexIssue]
    check_attention(model)
    attention.scaling = 0.1
    check_attention(model)
    # a special mask, only in transformers' plain attention
    own = attention.forward
    attention.forward = lambda *a, attention_mask=None, **k: own(
        *a, attention_mask=None if isinstance(attention_mask, torch.Tensor) else attention_mask, **k
    )
    with pytest.raises(ValueError, match=r"attention of LlamaForCausalLM .* does more"):
        check_attention(model)
    assert model.config._attn_implementation == ATTENTION_NAME


@pytest.mark.parametrize("name", ["Mixtral", "Gemma 4 mixture"])
def test_tokens_that_rounding_sends_to_other_experts_are_no_other_attention(name: str) -> None:
    check_attention(own_model(plain_model(CASES[name], hidden_size=64)).to(torch.bfloat16))


@pytest.mark.parametrize("name", MIXING)
def test_models_that_carry_state_are_refused_by_learner_and_engine(name: str) -> None:
    model = random_model(name)
    reason = rf"{type(model).__name__} \(model type '{model.config.model_type}'\) mixes sequences that share a row"
    with pytest.raises(ValueError, match=reason):
        PolicyScorer(model)
    with pytest.raises(ValueError, match=reason):
        PolicyScorer(random_model(name), ModelConfig(share_prompts=False))
    with pytest.raises(ValueError, match=reason):
        engine(random_model(name))


def test_rows_of_one_prompt_are_probed_too() -> None:
    model = random_model("Llama")

    def leaks_where_prompts_are_shared(batch: Any) -> torch.Tensor:
        hidden = model.get_decoder()(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            attention_context=batch.attention,
        ).last_hidden_state[0]
        shares = type(batch.attention).__name__ == "SharedPromptContext"
        return hidden + hidden.roll(5, 0) if shares else hidden

    check_isolation(model, hidden=leaks_where_prompts_are_shared, shared=False)
    with pytest.raises(ValueError, match="mixes sequences"):
        check_isolation(model, hidden=leaks_where_prompts_are_shared)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bound_is_that_of_the_precision_that_is_computed_in(dtype: torch.dtype) -> None:
    """Sharded models have float32 weights and compute in bfloat16, where the number of rows changes the rounding."""
    model = random_model("Llama")

    def rounded_by_the_layout(batch: Any) -> torch.Tensor:
        hidden = model.get_input_embeddings()(batch.input_ids)[0]
        return (hidden * (1.01 if len(hidden) > 8 else 1)).to(dtype)

    if dtype == torch.bfloat16:
        check_isolation(model, hidden=rounded_by_the_layout)
    else:
        with pytest.raises(ValueError, match="mixes sequences"):
            check_isolation(model, hidden=rounded_by_the_layout)


def test_positions_that_go_on_from_one_sequence_to_the_next_are_refused() -> None:
    model = random_model("Llama")

    def counts_over_the_row(batch: Any) -> torch.Tensor:
        hidden = model.get_input_embeddings()(batch.input_ids)[0]
        return hidden + 0.01 * torch.arange(len(hidden))[:, None]

    with pytest.raises(ValueError, match="mixes sequences"):
        check_isolation(model, hidden=counts_over_the_row)
