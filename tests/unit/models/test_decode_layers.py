"""All layers of a decoding step in one call have the bits of the layers one by one."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import builders
import numpy as np
import pytest
import torch
from cpu_marks import served
from random_models import made
from torch import Tensor
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from magicrl.models import cpu_kernels
from magicrl.models.decoding import FusedDecoder, fused_decoder
from magicrl.models.exact import use_exact
from magicrl.models.exact_cache import AHEAD, ExactDecodeAttention, exact_lengths
from magicrl.models.kv_cache import DecodeAttention, SlotCache, probe_cache_shape

SIZES = builders.SIZES | {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96, "vocab_size": 64}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES),
    "biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
}
OWNERS, PROMPTS, HELD = np.array([0, 1, 0, 1, 1]), np.array([70, 33, 70, 33, 33]), np.array([40, 12, 3, 0, 0])


@torch.inference_mode()
def decoded(model: Any, *, exact: bool) -> tuple[list[Tensor], int]:
    """Return logits and cache after a step over a random cache, and the number of calls that ran all layers."""
    cpu = torch.device("cpu")
    shape = probe_cache_shape(model, cpu)
    lengths = exact_lengths(80, 64) if exact else (80, 64)
    cache = SlotCache(shape, 6, *lengths, cpu, ahead=AHEAD if exact else 0)
    torch.manual_seed(1)
    stores = [blocks for store in (cache.prompts, cache.responses) for part in (store.keys, store.values)
              for blocks in part.values()]  # fmt: skip
    for block in (block for blocks in stores for block in blocks):
        block.normal_()
    kind = ExactDecodeAttention if exact else DecodeAttention
    context = kind(cache, owners=OWNERS, prompt_lengths=PROMPTS, response_lengths=HELD)
    decoder = fused_decoder(model)
    assert decoder is not None
    calls, run_layers = 0, cpu_kernels.DecodeKernel.run_layers

    def counted(*given: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        run_layers(*given, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_kernels.DecodeKernel, "run_layers", counted)
        logits = decoder(torch.tensor([3, 9, 1, 60, 5]), torch.from_numpy(PROMPTS + HELD), context)
    return [logits, *(torch.stack(blocks) for blocks in stores)], calls


@served
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("name", "exact"), [*((name, False) for name in CONFIGS), ("llama", True), ("qwen3", True)])
def test_the_bits_are_those_of_the_layers_one_by_one(
    name: str, exact: bool, dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(CONFIGS[name], dtype)
    if exact:
        use_exact(model)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found, calls = decoded(model, exact=exact)
        monkeypatch.setattr(FusedDecoder, "_kernel_for", lambda *given: None)
        expected, without = decoded(model, exact=exact)
    finally:
        torch.set_num_threads(before)
    assert (calls, without) == (1, 0)
    assert float(expected[0].float().std()) > 0.1
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@served
@pytest.mark.parametrize("change", ["float64", "many rows", "an epsilon", "an epsilon of each layer", "an activation"])
def test_what_has_no_kernel_runs_layer_by_layer(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = deepcopy(CONFIGS["llama"])
    if change == "an activation":
        config.hidden_act = "gelu"
    model = made(config, torch.float64 if change == "float64" else torch.float32)
    for layer in model.model.layers[: {"an epsilon": 1, "an epsilon of each layer": None}.get(change, 0)]:
        layer.input_layernorm.variance_epsilon = 0.5
    if change == "many rows":
        monkeypatch.setattr("magicrl.models.decoding.FEW_ROWS", len(OWNERS) - 1)
    assert decoded(model, exact=False)[1] == 0
