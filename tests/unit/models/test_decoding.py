"""The fused forward pass gives the logits of its model, and follows every change of the weights."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import builders
import pytest
import torch
from cpu_marks import served
from random_models import made
from torch import Tensor
from transformers import (
    Gemma2Config,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
)

from magicrl.models import cpu_kernels, decoding
from magicrl.models.decoding import fused_decoder
from magicrl.models.exact import ExactLinear, use_exact
from magicrl.models.head import Float32Head
from magicrl.models.packing import PackedContext

SIZES = builders.SIZES | {"max_position_embeddings": 4096}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama-yarn": LlamaConfig(**SIZES, rope_parameters=YARN, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=12),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "gemma": GemmaConfig(**SIZES, head_dim=16),
}
LENGTHS = (5, 9, 1, 40)
TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-5}  # transformers computes some steps in float32 in any case


def inputs() -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 40, (sum(LENGTHS),), generator=torch.Generator().manual_seed(2))
    return ids, torch.cat([torch.arange(n) + 1000 for n in LENGTHS])


@torch.inference_mode()
def both(model: Any, fused: Any) -> tuple[Tensor, Tensor]:
    """Return the logits of the fused pass and of the model itself."""
    ids, places = inputs()
    output = model(
        input_ids=ids[None], position_ids=places[None], use_cache=False, attention_context=PackedContext(LENGTHS)
    )
    return fused(ids, places, PackedContext(LENGTHS)), output.logits[0]


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_logits_are_the_models_own(kind: str, dtype: torch.dtype) -> None:
    model = made(CONFIGS[kind], dtype)
    before = model.state_dict()
    before = {name: value.clone() for name, value in before.items()}
    fused = fused_decoder(model)
    assert fused is not None
    found, expected = both(model, fused)
    assert float(expected.std()) > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[dtype])
    kept = torch.tensor([4, 13])
    with torch.inference_mode():
        torch.testing.assert_close(fused(*inputs(), PackedContext(LENGTHS), kept), found[kept], rtol=0, atol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@served
@pytest.mark.parametrize("exact", [False, True])
def test_kernels_serve_a_model_in_float32_too(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    spies = {name: Mock(wraps=getattr(cpu_kernels, name)) for name in ("normalised", "rotate", "gated")}
    for name, spy in spies.items():
        monkeypatch.setattr(decoding, name, spy)
    config = LlamaConfig(**SIZES)
    config.update({"hidden_size": 48, "head_dim": 32, "intermediate_size": 176})
    model = made(config, torch.float32)
    if exact:
        use_exact(model)
    found, expected = both(model, fused_decoder(model))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    layers = model.config.num_hidden_layers
    assert [spy.call_count for spy in spies.values()] == [2 * layers + 1, layers, layers]


WIDE = SIZES | {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96, "vocab_size": 64}


def spied(
    name: str, dtype: torch.dtype, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> tuple[Mock, int, torch.Tensor, torch.Tensor]:
    """Return the spy on a kernel of products, the model's products, and logits of both decoders."""
    spy = Mock(wraps=getattr(cpu_kernels, name))
    monkeypatch.setattr(decoding, name, spy)
    model = made(LlamaConfig(**WIDE), dtype)
    if exact:
        use_exact(model)
    return spy, 4 * model.config.num_hidden_layers + 1, *both(model, fused_decoder(model))


@served
@pytest.mark.parametrize("exact", [False, True])
def test_bfloat16_products_are_magicrls(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    spy, products, found, expected = spied("multiply", torch.bfloat16, exact, monkeypatch)
    assert spy.call_count == products
    assert float((found - expected).abs().mean()) < 0.02 * float(expected.abs().max())


@served
@pytest.mark.parametrize("exact", [False, True])
def test_float32_products_of_few_rows_are_magicrls(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    spy, products, found, expected = spied("multiply_rows", torch.float32, exact, monkeypatch)
    assert spy.call_count == products
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    layers = [torch.nn.Linear(64, 32, bias=not exact) for _ in range(2)]
    for layer in layers if exact else ():
        layer.__class__ = ExactLinear
    product = decoding.JoinedLinear(layers, exact=exact)
    for rows in (cpu_kernels.FEW_ROWS, cpu_kernels.FEW_ROWS + 1):
        spy.reset_mock()
        x = torch.randn(rows, 64)
        torch.testing.assert_close(product(x), torch.cat([layer(x) for layer in layers], dim=1))
        assert spy.call_count == (exact or rows == cpu_kernels.FEW_ROWS)


@served
def test_a_product_that_is_magicrls_follows_its_weights() -> None:
    layers = [torch.nn.Linear(64, 32, dtype=torch.bfloat16) for _ in range(2)]
    product, x = decoding.JoinedLinear(layers), torch.randn(3, 64).bfloat16()
    product.refresh()
    residual = torch.full((3, 64), 100.0, dtype=torch.bfloat16)
    for _ in range(2):
        expected = torch.cat([layer(x) for layer in layers], dim=1)
        torch.testing.assert_close(product(x), expected)
        torch.testing.assert_close(product.added(x, residual), residual + expected)
        with torch.no_grad():
            layers[1].weight.mul_(-2.0)
        product.refresh()


@pytest.mark.parametrize("kind", CONFIGS)
def test_bfloat16_is_as_near_to_float32_as_the_models_own_pass(kind: str) -> None:
    model = made(CONFIGS[kind], torch.bfloat16)
    fused = fused_decoder(model)
    found, own = both(model, fused)
    exact = made(CONFIGS[kind], torch.float32)
    exact.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    _, reference = both(exact, fused_decoder(exact))
    errors = [float((logits.float() - reference).abs().mean()) for logits in (found, own)]
    assert errors[0] < 1.2 * errors[1] + 1e-3, errors


@pytest.mark.parametrize("kind", ["llama", "gemma"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_float32_head_of_both_passes_is_the_product_of_the_same_weights(kind: str, dtype: torch.dtype) -> None:
    model = made(CONFIGS[kind], dtype)
    rounded, _ = both(model, fused_decoder(model))
    Float32Head.put_into(model)
    found, own = both(model, fused_decoder(model))
    assert rounded.dtype == dtype
    assert found.dtype == own.dtype == torch.float32
    # the body is the same, so only a rounding is missing
    torch.testing.assert_close(found, rounded.float(), rtol=torch.finfo(dtype).eps, atol=1e-3)
    assert not torch.equal(found, found.to(dtype).float())


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_weight_that_changes_is_followed(kind: str, dtype: torch.dtype) -> None:
    """Write each parameter in place, in turn: packed copies and joined views must show it."""
    model = made(CONFIGS[kind], dtype)
    if dtype == torch.float16:
        Float32Head.put_into(model)  # has another copy of the weight
    fused = fused_decoder(model)
    tolerance = 1e-6 if dtype == torch.float32 else 0.02
    last, _ = both(model, fused)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.add_(torch.randn_like(parameter) * 0.2)
        found, expected = both(model, fused)
        # The softmax cancels a key bias, so changing it must not change the logits.
        assert not torch.equal(found, last) or name.endswith("k_proj.bias"), name
        assert float((found - expected).abs().mean()) < tolerance * float(expected.abs().max()), name
        last = found


def test_two_passes_over_one_model_share_its_weights() -> None:
    model = made(CONFIGS["llama"], torch.float32)
    first, second = fused_decoder(model), fused_decoder(model)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(-2.0)
        model.model.layers[0].self_attn.k_proj.bias.add_(1.0)
    for decoder in (first, second):
        torch.testing.assert_close(*both(model, decoder), rtol=0, atol=1e-5)


def test_other_models_keep_their_own_pass() -> None:
    window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    others = [
        Gemma2Config(**SIZES, head_dim=16),  # soft-capped, norms after attention
        PhiConfig(**SIZES, partial_rotary_factor=0.5),
        MistralConfig(**SIZES, sliding_window=8),
        Qwen2Config(**SIZES, **window),
    ]
    assert [fused_decoder(made(config, torch.float32)) for config in others] == [None] * len(others)
    adapted = made(CONFIGS["llama"], torch.float32)
    adapted.model.layers[1].self_attn.o_proj = torch.nn.Sequential(adapted.model.layers[1].self_attn.o_proj)
    assert fused_decoder(adapted) is None
