"""The tiny reasoner: size, seeding, tokenizer round trips, no custom code in its folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from magicrl.config.model_schema import TinyModelConfig
from magicrl.models.loading import load_policy
from magicrl.models.small_models import make_miniature, make_tiny, make_tokenizer

SYMBOLS = ("L", "S1", "S2", ":", ",", "0", "1", "2")


def test_default_size_and_tied_embeddings() -> None:
    model, tokenizer = make_tiny(TinyModelConfig(), SYMBOLS, seed=0)
    # embeddings once (tied), two layers of attention, MLP and two norms, the last norm
    layer = 4 * 64 * 64 + 3 * 64 * 176 + 2 * 64
    assert sum(p.numel() for p in model.parameters()) == len(tokenizer) * 64 + 2 * layer + 64
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert len(tokenizer) == len(SYMBOLS) + 2


@pytest.mark.parametrize("stated", [{}, {"tie_word_embeddings": False}, {"tie_word_embeddings": True}])
def test_a_miniature_ties_its_head_where_the_real_model_does(tmp_path: Path, stated: dict[str, bool]) -> None:
    real = {"model_type": "qwen2", "num_attention_heads": 14, "num_key_value_heads": 2, **stated}
    model = load_policy(make_miniature(real, tmp_path / "small", max_context=64)).model
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == stated.get("tie_word_embeddings", False)
    sizes = model.config
    assert (sizes.num_attention_heads, sizes.num_key_value_heads) == (8, 2), "as many of each as the heads allow"


def test_seed_decides_the_weights_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = make_tiny(TinyModelConfig(), SYMBOLS, seed=1)[0].state_dict()
    assert torch.equal(torch.rand(3), expected)
    again = make_tiny(TinyModelConfig(), SYMBOLS, seed=1)[0].state_dict()
    other = make_tiny(TinyModelConfig(), SYMBOLS, seed=2)[0].state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_tokens_are_symbols_and_decode_joins_them_by_single_spaces() -> None:
    tokenizer = make_tokenizer(SYMBOLS, 32)
    ids = tokenizer("L 1 2 :  S2 ,\n0")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["L", "1", "2", ":", "S2", ",", "0"]
    assert tokenizer.decode(ids) == "L 1 2 : S2 , 0"
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "L 1 2 : S2 , 0"


@pytest.mark.parametrize("symbol", ["a b", "", "<end>", "L"])
def test_unusable_symbols_are_refused(symbol: str) -> None:
    with pytest.raises(ValueError, match="symbol"):
        make_tokenizer(["L", symbol], 32)


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match="multiple of heads 3"):
        make_tiny(TinyModelConfig(heads=3), SYMBOLS, seed=0)
