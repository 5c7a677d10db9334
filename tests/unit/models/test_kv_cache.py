"""The slot cache's two attentions give the logits of a plain forward pass for any content of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from itertools import groupby
from typing import Any

import numpy as np
import pytest
import torch
from builders import SIZES
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from magicrl.models import kv_cache
from magicrl.models.kv_cache import (
    DecodeAttention,
    PrefillAttention,
    SlotCache,
    probe_cache_shape,
)
from magicrl.models.packing import ATTENTION_NAME, register_attention
from magicrl.models.recurrent import RecurrentState

CPU = torch.device("cpu")
CONFIG = Qwen3Config(**SIZES | {"num_hidden_layers": 3}, head_dim=12)


@pytest.fixture
def models() -> tuple[Any, Any]:
    """Return the same float64 weights with magicrl's attention and with transformers'."""
    register_attention()
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(deepcopy(CONFIG), attn_implementation="sdpa").double().eval()
    ours = AutoModelForCausalLM.from_config(deepcopy(CONFIG), attn_implementation=ATTENTION_NAME).double().eval()
    ours.load_state_dict(plain.state_dict())
    return ours, plain


def test_the_probe_finds_the_shape(models: tuple[Any, Any]) -> None:
    shape = probe_cache_shape(models[0], CPU)
    assert shape.attending == dict.fromkeys(range(3), (2, 12, 12))
    assert shape.bytes_per_token == 3 * 2 * 24 * 8


def logits_of(model: Any, ids: Tensor, places: Tensor, context: Any) -> Tensor:
    output = model(input_ids=ids[None], position_ids=places[None], use_cache=False, attention_context=context)
    return output.logits[0]


class Sequences:
    """Prompts in slots, responses in rows, and their tokens."""

    def __init__(self, model: Any, prompts: Sequence[int], rows: int, capacity: int) -> None:
        self.model = model
        self.cache = SlotCache(probe_cache_shape(model, CPU), rows, max(prompts), capacity, CPU)
        self.generator = torch.Generator().manual_seed(1)
        self.prompts = [self.tokens(n) for n in prompts]
        self.owners: list[int] = []
        self.responses: list[Tensor] = []

    def tokens(self, count: int) -> Tensor:
        return torch.randint(0, 40, (count,), generator=self.generator)

    def prefill(self) -> Tensor:
        """Return logits of all prompts, which are packed by length."""
        packed: list[int] = sorted(range(len(self.prompts)), key=lambda slot: len(self.prompts[slot]))
        runs = [(length, list(slots)) for length, slots in groupby(packed, key=lambda slot: len(self.prompts[slot]))]
        ids = torch.cat([self.prompts[slot] for slot in packed])
        places = torch.cat([torch.arange(len(self.prompts[slot])) for slot in packed])
        found = logits_of(self.model, ids, places, PrefillAttention(self.cache, runs))
        parts = dict(zip(packed, found.split([len(self.prompts[slot]) for slot in packed]), strict=True))
        return torch.cat([parts[slot] for slot in range(len(self.prompts))])

    def step(self) -> Tensor:
        """Append one token to each row, and return the logits after it."""
        fresh = self.tokens(len(self.owners))
        held = np.array([len(r) for r in self.responses])
        prompts = np.array([len(self.prompts[slot]) for slot in self.owners])
        context = DecodeAttention(
            self.cache, owners=np.array(self.owners), prompt_lengths=prompts, response_lengths=held
        )
        found = logits_of(self.model, fresh, torch.from_numpy(prompts + held), context)
        self.responses = [torch.cat([r, t[None]]) for r, t in zip(self.responses, fresh, strict=True)]
        return found

    def start(self, owners: Sequence[int]) -> None:
        self.owners += owners
        self.responses += [self.tokens(0) for _ in owners]

    def whole(self, row: int) -> Tensor:
        return torch.cat([self.prompts[self.owners[row]], self.responses[row]])


@torch.inference_mode()
@pytest.mark.parametrize("width", [2, 3, 64])
def test_prefill_and_decode_equal_full_forwards(
    models: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """Compare float64 logits with plain forward passes, within 1e-9.

    Prompts of lengths 4, 1, 7, 4 and 4 have 3, 1, 2, 1 and 1 responses. Some start later, and one ends with its prompt.
    Blocks are narrower than prompts and responses, and wider.
    """
    monkeypatch.setattr(kv_cache, "_PROMPT_BLOCK", width)
    monkeypatch.setattr(kv_cache, "_RESPONSE_BLOCK", width)
    monkeypatch.setattr(kv_cache, "_BLOCKS", 99)
    monkeypatch.setattr(kv_cache, "_MOVED", 1)  # one layer at a time
    ours, plain = models
    held = Sequences(ours, [4, 1, 7, 4, 4], rows=8, capacity=20)
    expected = torch.cat([plain(input_ids=prompt[None]).logits[0] for prompt in held.prompts])
    torch.testing.assert_close(held.prefill(), expected, rtol=0, atol=1e-9)
    held.start([0, 3, 1, 2])
    for step in range(9):
        if step == 4:
            held.start([0, 2, 4, 0])
        if step == 6:  # row 1 ends; the last row of its length takes its place, and so on
            held.cache.responses.move([(7, 3, len(held.responses[7])), (3, 1, len(held.responses[3]))])
            for target, source in ((1, 3), (3, 7)):
                held.responses[target], held.owners[target] = held.responses[source], held.owners[source]
            del held.responses[-1], held.owners[-1]
            held.cache.prompts.move([(4, 3, 4)])  # prompt 3 has no other response
            held.prompts[3] = held.prompts[4]
            held.owners = [3 if owner == 4 else owner for owner in held.owners]
        logits = held.step()
        for row in range(len(held.owners)):
            full = plain(input_ids=held.whole(row)[None]).logits[0, -1]
            torch.testing.assert_close(logits[row], full, rtol=0, atol=1e-9)


def test_blocks_are_few_and_take_no_more_than_asked_for(models: tuple[Any, Any]) -> None:
    shape = probe_cache_shape(models[0], CPU)
    for tokens, width in ((10, 10), (100, 64), (2048, 64), (16384, 512), (65536, 512)):
        store = SlotCache(shape, 1, 1, tokens, torch.device("meta")).responses
        assert store.width == width
        assert sum(used for _, used in store.spans(tokens)) == tokens


class Odd(torch.nn.Module):
    """A model in which layers 1 and 3 attend with different heads, and layer 2 has a state."""

    def forward(self, attention_context: Any, **_: Any) -> None:
        for layer, heads in ((1, 1), (3, 2)):
            x = torch.zeros(1, heads, 1, 4, dtype=getattr(self, "dtypes", {}).get(layer))
            attention_context.attend(layer, x, x, x, 1.0)
        state = RecurrentState(torch.zeros(1, 6, 3), torch.zeros(1, 2, 4, 5, dtype=torch.float64))
        attention_context.carry(2, torch.zeros(1, 1, 8), lambda x, _: (x, state))


def test_layers_of_different_shapes_have_stores_of_their_own() -> None:
    shape = probe_cache_shape(Odd(), CPU)
    assert shape.bytes_per_token == (1 + 2) * (4 + 4) * 4
    assert shape.bytes_per_row == 2 * (6 * 3 * 4 + 2 * 4 * 5 * 8)
    store = SlotCache(shape, 2, 5, 70, CPU).responses
    assert store.layers == [[1], [3]]
    assert [store.keys[layer][1].shape for layer in (1, 3)] == [(2, 1, 64, 4), (2, 2, 64, 4)]
    for layer in (1, 3):
        store.values[layer][1][0] = float(layer)
    store.states[2].memory[0] = 7.0
    store.move([(0, 1, 66)])
    assert [float(store.values[layer][1][1, 0, 1, 0]) for layer in (1, 3)] == [1.0, 3.0]
    assert float(store.values[1][1][1, 0, 2, 0]) == 0.0, "no more than the tokens that are there"
    assert (store.states[2].memory[1] == 7.0).all()


def test_layers_of_different_precisions_are_refused() -> None:
    odd = Odd()
    odd.dtypes = {1: torch.float64}  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match="in one precision"):
        probe_cache_shape(odd, CPU)
