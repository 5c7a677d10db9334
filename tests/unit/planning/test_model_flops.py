"""Model FLOPs compared with values counted by hand, and with torch's counter while a small model runs."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from magicrl.planning.costs import SequenceWork, generation_flops, sequence_work, update_flops
from magicrl.planning.hardware import known_hardware, peak_flops
from magicrl.planning.shapes import ModelShape, shape_from_config

# d 4, ff 8, one layer of 152 parameters, 2 query heads of width 2, 10 vocabulary entries: a head of 40 parameters
TOY = ModelShape(
    name="toy", hidden=4, intermediate=8, layers=1, heads=2, kv_heads=1, head_dim=2, vocabulary=10, tied=True
)
LAYER, HEAD, ATTENTION = 2 * 152, 2 * 40, 4 * 1 * 2 * 2


def test_a_prompt_counts_once_and_a_last_token_predicts_nothing() -> None:
    assert sequence_work([(2, [1, 3])]) == SequenceWork(tokens=4, predicted=4, seen=1 + 2 + 3 + 4, prompts=2)
    assert sequence_work([(2, [1]), (2, [3])]).seen == 2 * (1 + 2) + 3 + 4, "two draws, two prompts"
    assert sequence_work([(2, [1, 3])]) + sequence_work([(1, [1])]) == sequence_work([(2, [1, 3]), (1, [1])])


def test_seen_is_a_loop_over_every_token() -> None:
    groups = [(5, [1, 7, 2]), (3, [4]), (9, [6, 6])]
    seen = 0
    for prompt, responses in groups:
        seen += sum(position + 1 for position in range(prompt))
        for response in responses:
            seen += sum(prompt + position + 1 for position in range(response - 1))
    assert sequence_work(groups).seen == seen


def test_generation_and_update_by_hand() -> None:
    work = sequence_work([(2, [1, 3])])
    forward = 4 * LAYER + 4 * HEAD + 10 * ATTENTION
    assert generation_flops(TOY, work) == forward
    assert update_flops(TOY, work) == 3 * forward
    assert generation_flops(TOY, SequenceWork()) == update_flops(TOY, SequenceWork()) == 0.0


def test_with_adapters_frozen_weights_need_no_gradient() -> None:
    work = sequence_work([(2, [1, 3])])
    products = 4 * LAYER + 4 * HEAD
    assert update_flops(TOY, work, adapters=30) == 2 * products + 3 * 10 * ATTENTION + 4 * 6 * 30


@pytest.mark.parametrize("tied", [True, False])
def test_as_torch_counts_a_small_model(tied: bool) -> None:
    """torch counts only products (no norms), and both halves of the attention, as if every token saw all tokens."""
    config = LlamaConfig(
        vocab_size=101, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=24, tie_word_embeddings=tied,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.set_attn_implementation("eager")
    shape = shape_from_config(config.to_dict(), "small")
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters
    tokens = 33
    ids = torch.arange(tokens)[None]
    with FlopCounterMode(display=False) as forward:
        loss = model(input_ids=ids, use_cache=False).logits.sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    work = SequenceWork(tokens=tokens, predicted=tokens, seen=tokens * tokens)
    norms = 2 * tokens * (3 * 2 * 64)
    assert forward.get_total_flops() == generation_flops(shape, work) - norms
    both = forward.get_total_flops() + backward.get_total_flops()
    assert both == update_flops(shape, work) - 3 * norms


def test_the_peak_is_that_of_the_exact_device() -> None:
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("NVIDIA H20") == 148e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == known_hardware()["A100-80G"].flops
    assert peak_flops("NVIDIA H100 PCIe") is None, "slower than the one with NVLink"
    assert peak_flops("cpu") is None
