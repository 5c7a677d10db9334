"""Decoding in steps of fixed shapes: the same responses, and only operations that a CUDA graph can repeat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from magicrl.models import decoding
from magicrl.models.decoding import StaticDecoder, StepShape, fused_decoder, static_decoder
from magicrl.models.kv_cache import SlotCache, probe_cache_shape
from magicrl.records import RolloutGroup

Make = Callable[..., Any]
FUSED = ("llama", "llama-tied", "qwen2-bias", "qwen3-qknorm", "gemma")
ENDS = frozenset({1, 2, 3, 4})


def drain(engine: Any, requests: Any) -> list[RolloutGroup]:
    engine.submit(requests)
    return sorted(engine.finished(), key=lambda g: g.request.draw)


def assert_same(one: list[RolloutGroup], other: list[RolloutGroup]) -> None:
    for left, right in zip(one, other, strict=True):
        for a, b in zip(left.completions, right.completions, strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_allclose(a.sampler_logprobs, b.sampler_logprobs, rtol=0, atol=1e-6)


@pytest.fixture
def static_engine(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Return engines with fixed shapes. Lengths are rounded up to few tokens, so that shapes change on the way."""
    monkeypatch.setattr(decoding, "_LEAST", 4)
    return lambda *args, **options: make_engine(*args, static_steps=True, **options)


@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("rows", [1, 7, 24])
def test_the_same_responses_as_without(
    make_reference: Make, make_engine: Make, static_engine: Make, make_requests: Make, kind: str, rows: int
) -> None:
    """Cover refills, partial groups, rows that end and move, and lengths across several shapes."""
    model = make_reference(kind)
    requests = make_requests(count=10, group_size=3, limit=30)
    plain = drain(make_engine(model, end_tokens=ENDS, max_rows=rows), requests)
    assert_same(drain(static_engine(model, end_tokens=ENDS, max_rows=rows), requests), plain)
    assert len({len(c) for g in plain for c in g.completions}) > 5, "the test wants responses of many lengths"


def test_weights_in_flight_and_snapshots(
    make_reference: Make, make_engine: Make, static_engine: Make, make_requests: Make
) -> None:
    """New weights between two tokens take effect, and each kind of engine continues the other's responses."""
    models = [make_reference("llama", seed=seed) for seed in (0, 1)]
    requests = make_requests(count=8, limit=25)

    def run(first: Any, second: Any) -> list[RolloutGroup]:
        first.load_weights(dict(models[0].named_parameters()), 0)
        first.submit(requests)
        early = first.advance(60)
        first.load_weights(dict(models[1].named_parameters()), 1)
        early += first.advance(40)
        second.load_weights(dict(models[1].named_parameters()), 1)
        done = {group.request.draw for group in early}
        second.resume(first.snapshot(), [r for r in requests if r.draw not in done])
        return sorted([*early, *second.finished()], key=lambda g: g.request.draw)

    makes = (make_engine, static_engine)
    found = [run(one(models[0], max_rows=6), other(models[0], max_rows=6)) for one in makes for other in makes]
    for other in found[1:]:
        assert_same(found[0], other)
    assert any(c.version_spans for g in found[0] for c in g.completions)


def test_the_shape_is_rounded_up_and_long_rows_stand_apart(make_reference: Make) -> None:
    shape = probe_cache_shape(_ours(make_reference), torch.device("cpu"))
    cache = SlotCache(shape, 20, 100, 1000, torch.device("cpu"), whole=True)
    lengths = np.array([700, 300, 90, 60, 50, 40, 30, 20, 9, 8, 7, 0])
    owners = np.array([0, 0, 1, 0, 1, 1, 2, 2, 2, 2, 2, 0])
    found = StepShape.of(cache, owners, np.full(12, 70), lengths)
    # 12 rows -> 16, of which the last 8 hold at most 9 tokens and the new one: 64; rows 4 to 7 at most 51: 64; rows 2
    # and 3 at most 91: 96; rows 0 and 1 at most 701: 768
    assert found.tiers == ((16, 64), (4, 96), (2, 768))
    assert (found.rows, found.prompts, found.members, found.prompt_tokens) == (16, 4, 8, 96)
    assert StepShape.of(cache, np.arange(18), np.ones(18), np.zeros(18)).rows == 20, "no more rows than the cache has"


def _ours(make_reference: Make) -> Any:
    from transformers import AutoModelForCausalLM

    from magicrl.models.packing import ATTENTION_NAME, register_attention

    register_attention()
    reference = make_reference("llama", torch.float32)
    model = AutoModelForCausalLM.from_config(reference.config, attn_implementation=ATTENTION_NAME)
    model.load_state_dict(reference.state_dict())
    return model.eval()


class Noted(TorchDispatchMode):
    """Recorder of every operation with the shapes of its tensors and the addresses of earlier ones."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat = torch.utils._pytree.tree_leaves((args, kwargs or {}))
        self.operations.append((str(func), [tuple(t.shape) if isinstance(t, torch.Tensor) else t for t in flat]))
        return func(*args, **(kwargs or {}))


SYNCHRONISES = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "unique", "masked_select", "_to_cpu", "item")


@torch.inference_mode()
def test_a_step_does_the_same_whatever_it_is_about(make_reference: Make) -> None:
    """Check the condition of a graph with other tokens, lengths and owners of one shape.

    The same operations on the same shapes must follow, and none may wait for the device.
    """
    model = _ours(make_reference)
    cache = SlotCache(probe_cache_shape(model, torch.device("cpu")), 8, 20, 100, torch.device("cpu"), whole=True)
    decoder = static_decoder(fused_decoder(model), model)
    assert isinstance(decoder, StaticDecoder)
    steps: list[list[Any]] = []
    for seed in (0, 1):
        rng = np.random.default_rng(seed)
        owners = np.array([[0, 1, 2, 0, 1, 2], [2, 2, 1, 0, 0, 1]][seed])
        held = np.sort(rng.integers(0, 60, 6))[::-1].copy()
        decoder(cache, rng.integers(0, 40, 6), owners=owners, prompt_lengths=rng.integers(1, 20, 6), held=held)
        ((_, step),) = decoder._steps[cache].items()
        with Noted() as noted:
            step.run()
        steps.append(noted.operations)
    assert steps[0] == steps[1]
    assert len(steps[0]) > 50
    names = {name for name, _ in steps[0]}
    assert not {name for name in names if any(word in name for word in SYNCHRONISES)}


def test_replaced_weights_drop_what_was_captured(make_reference: Make) -> None:
    model = _ours(make_reference)
    cache = SlotCache(probe_cache_shape(model, torch.device("cpu")), 4, 8, 8, torch.device("cpu"), whole=True)
    decoder = static_decoder(fused_decoder(model), model)
    assert decoder is not None
    one = np.zeros(1, dtype=np.int64)
    with torch.inference_mode():
        decoder(cache, one, owners=one, prompt_lengths=one + 1, held=one)
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
    decoder.reload()
    assert len(decoder._steps) == 1, "written in place: what was captured stays right"
    model.lm_head.weight.data = model.lm_head.weight.data.clone()
    decoder.reload()
    assert len(decoder._steps) == 0
    with torch.inference_mode():
        decoder(cache, one, owners=one, prompt_lengths=one + 1, held=one)
    del cache
    assert len(decoder._steps) == 0, "they go with their cache"


@pytest.mark.parametrize("kind", ["gemma2", "mistral-window"])
def test_other_models_decode_without(make_reference: Make, static_engine: Make, make_requests: Make, kind: str) -> None:
    engine = static_engine(make_reference(kind))
    assert engine._static is None
    assert drain(engine, make_requests(count=2, limit=2))
