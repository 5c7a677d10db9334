"""The slot cache's two attentions give the logits of a plain forward, whatever the rows hold."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from magicrl.models.attention import ATTENTION_NAME, register_attention
from magicrl.models.slot_cache import (
    DecodeAttention,
    PrefillAttention,
    PromptRun,
    SlotCache,
    probe_cache_shape,
)

CPU = torch.device("cpu")
CONFIG = Qwen3Config(
    vocab_size=30,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    max_position_embeddings=64,
)


@pytest.fixture
def models() -> tuple[Any, Any]:
    """The same float64 weights with magicrl's attention and with transformers' own."""
    register_attention()
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(deepcopy(CONFIG), attn_implementation="sdpa").double().eval()
    ours = AutoModelForCausalLM.from_config(deepcopy(CONFIG), attn_implementation=ATTENTION_NAME).double().eval()
    ours.load_state_dict(plain.state_dict())
    return ours, plain


def spoiled_cache(model: Any, rows: int, capacity: int) -> SlotCache:
    """A cache whose memory held NaN before, as an allocator may hand out."""
    cache = SlotCache(probe_cache_shape(model, CPU), rows, capacity, CPU)
    for store in (*cache.keys, *cache.values):
        store.fill_(float("nan"))
    return cache


def test_the_probe_finds_the_shape(models: tuple[Any, Any]) -> None:
    shape = probe_cache_shape(models[0], CPU)
    assert (shape.layers, shape.kv_heads, shape.key_dim, shape.value_dim) == (3, 2, 12, 12)
    assert shape.bytes_per_token == 3 * 2 * 24 * 8


@torch.inference_mode()
def test_prefill_and_decode_equal_full_forwards(models: tuple[Any, Any]) -> None:
    """Five sequences of lengths 4, 4, 7, 1, 4 in rows of their own, then seven tokens each, first as they stand,
    then after row 1 was replaced by the last one: float64 logits within 1e-9 of plain forwards."""
    ours, plain = models
    generator = torch.Generator().manual_seed(1)
    lengths, rows = [1, 4, 4, 4, 7], [3, 0, 1, 4, 2]
    sequences = {row: torch.randint(0, 30, (n,), generator=generator) for n, row in zip(lengths, rows, strict=True)}
    cache = spoiled_cache(ours, 6, 20)
    runs = [
        PromptRun(start=0, length=1, rows=(3,)),
        PromptRun(start=1, length=4, rows=(0, 1, 4)),
        PromptRun(start=13, length=7, rows=(2,)),
    ]
    packed = torch.cat([sequences[row] for row in rows])
    positions = torch.cat([torch.arange(n) for n in lengths])

    def run(ids: torch.Tensor, places: torch.Tensor, context: Any) -> torch.Tensor:
        return ours(input_ids=ids[None], position_ids=places[None], use_cache=False, attention_context=context).logits[
            0
        ]

    logits = run(packed, positions, PrefillAttention(cache, runs))
    expected = torch.cat([plain(input_ids=sequences[row][None]).logits[0] for row in rows])
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)

    for step in range(7):
        if step == 3:
            cache.move(4, 1, len(sequences[4]))
            sequences[1] = sequences.pop(4)
        active = [sequences[row] for row in range(len(sequences))]
        held = torch.tensor([len(s) for s in active])
        fresh = torch.randint(0, 30, (len(active),), generator=generator)
        logits = run(fresh, held, DecodeAttention(cache, held, int(held.min()), int(held.max())))
        for row, token in enumerate(fresh):
            sequences[row] = torch.cat([sequences[row], token[None]])
            full = plain(input_ids=sequences[row][None]).logits[0, -1]
            torch.testing.assert_close(logits[row], full, rtol=0, atol=1e-9)


@torch.inference_mode()
def test_equal_lengths_need_no_mask(models: tuple[Any, Any]) -> None:
    ours, plain = models
    prompt = torch.tensor([5, 6, 7])
    cache = spoiled_cache(ours, 3, 10)
    run = [PromptRun(start=0, length=3, rows=(0,))]
    ours(
        input_ids=prompt[None],
        position_ids=torch.arange(3)[None],
        use_cache=False,
        attention_context=PrefillAttention(cache, run),
    )
    kept = cache.keep(0, 3)
    cache.repeat(0, slice(1, 2), 3)
    cache.restore(kept, slice(2, 3))
    fresh, held = torch.tensor([1, 2, 3]), torch.tensor([3, 3, 3])
    context = DecodeAttention(cache, held, 3, 3)
    logits = ours(input_ids=fresh[None], position_ids=held[None], use_cache=False, attention_context=context).logits[0]
    batch = torch.cat([prompt.expand(3, -1), fresh[:, None]], dim=1)
    torch.testing.assert_close(logits, plain(input_ids=batch).logits[:, -1], rtol=0, atol=1e-9)


def test_layers_of_different_shapes_are_refused() -> None:
    class Odd(torch.nn.Module):
        def forward(self, attention_context: Any, **_: Any) -> None:
            for layer, heads in enumerate((1, 2)):
                x = torch.zeros(1, heads, 1, 4)
                attention_context.attend(layer, x, x, x, 1.0)

    with pytest.raises(ValueError, match="one key/value shape"):
        probe_cache_shape(Odd(), CPU)
