"""Layers that keep less for the backward pass: transformers' values and gradients, fewer bytes."""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from builders import SIZES
from cpu_marks import served
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, Olmo2Config, Qwen3Config
from transformers.activations import ACT2FN
from transformers.models.llama import modeling_llama

from magicrl.models.memory_efficient import (
    _Rotary,
    gated_linear,
    rms_norm,
    use_memory_efficient_layers,
    widened_attention,
)

LAYERS = {  # the norms and gated layers of two decoder layers and the last norm
    "llama": (LlamaConfig(**SIZES), 5),
    "qwen3": (Qwen3Config(**SIZES, head_dim=8), 9),
    "gemma2": (Gemma2Config(**SIZES, head_dim=8, hidden_activation="gelu_pytorch_tanh"), 9),
    "olmo2": (Olmo2Config(**SIZES), 9),
}


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@pytest.mark.parametrize("plus_one", [False, True])
def test_norm_by_finite_differences(plus_one: bool) -> None:
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-3, plus_one), (values(2, 3, 5), values(5, seed=1)))


@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh"])
def test_gated_layers_by_finite_differences(name: str) -> None:
    gate, up, weight = values(2, 3, 5), values(2, 3, 5, seed=1), values(4, 5, seed=2)
    assert torch.autograd.gradcheck(lambda g, u, w: gated_linear(g, u, w, ACT2FN[name]), (gate, up, weight))
    assert torch.autograd.gradcheck(lambda g, u: gated_linear(g, u, None, ACT2FN[name]), (gate, up))


@pytest.mark.parametrize("causal", [False, True])
def test_attention_by_finite_differences(causal: bool) -> None:
    count = 4 if causal else 6
    query, keys, entries = values(2, 4, 4, 3), values(2, count, 2, 3, seed=1), values(2, count, 2, 3, seed=2)
    mask = None if causal else torch.arange(6)[None] <= 2 + torch.arange(4)[:, None]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return widened_attention(q, k, v, 0.4, mask=mask, causal=causal)

    assert torch.autograd.gradcheck(attend, (query, keys, entries))
    plain = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (query, keys, entries)),
        attn_mask=mask, is_causal=causal, scale=0.4, enable_gqa=True,
    )  # fmt: skip
    torch.testing.assert_close(attend(query, keys, entries), plain.transpose(1, 2), rtol=1e-12, atol=1e-12)


def model_of(kind: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LAYERS[kind][0], dtype=dtype, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def gradients(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    logits = model(input_ids=torch.arange(20)[None] % 7, use_cache=False).logits.float()
    (logits.log_softmax(-1)[..., 3] * torch.linspace(-1, 2, 20)).sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def replaced(model: Any) -> Counter[str]:
    """Make the layers of a model memory-efficient, and count those that are by their function."""
    use_memory_efficient_layers(model)
    return Counter(m.forward.func.__name__ for m in model.modules() if isinstance(m.forward, partial))


@pytest.mark.parametrize("kind", LAYERS)
def test_models_give_what_they_gave(kind: str) -> None:
    model = model_of(kind, torch.float32)
    logits, expected = gradients(model)
    assert replaced(model) == {"_efficient_norm": LAYERS[kind][1], "_efficient_gated": 2}
    lean_logits, lean = gradients(model)
    torch.testing.assert_close(lean_logits, logits, rtol=1e-5, atol=1e-5)
    for name in expected:
        torch.testing.assert_close(lean[name], expected[name], rtol=1e-4, atol=1e-5)


def test_bfloat16_gradients_are_no_further_from_float32() -> None:
    _, exact = gradients(model_of("llama", torch.float32))
    model = model_of("llama", torch.bfloat16)
    errors: list[float] = []
    for lean in (False, True):
        if lean:
            assert replaced(model) == {"_efficient_norm": 5, "_efficient_gated": 2}
        _, found = gradients(model)
        errors.append(sum(float((found[n].float() - exact[n]).square().sum()) for n in exact) ** 0.5)
    assert errors[1] < 1.1 * errors[0]


@served
@pytest.mark.parametrize("heads", [1, 3])
def test_rotations_by_a_kernel_are_the_models(heads: int) -> None:
    own = modeling_llama.apply_rotary_pos_emb
    torch.manual_seed(0)
    q, k = (torch.randn(1, 5, n, 64).to(torch.bfloat16).requires_grad_() for n in (heads, 1))
    angles = torch.rand(1, 5, 32).repeat(1, 1, 2) * 6
    cos, sin = angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)
    wide = [x.detach().double().requires_grad_() for x in (q, k)]
    plain = own._own if isinstance(own, _Rotary) else own
    found = _Rotary(plain)(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    expected = plain(*(x.transpose(1, 2) for x in wide), cos.double(), sin.double())
    pull = [torch.randn_like(x) for x in found]
    gradients = torch.autograd.grad(found, (q, k), pull)
    wanted = torch.autograd.grad(expected, wide, [x.double() for x in pull])
    for one, other in zip((*found, *gradients), (*expected, *wanted), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2**-7, atol=2**-7)
    use_memory_efficient_layers(model_of("llama", torch.bfloat16))
    assert isinstance(modeling_llama.apply_rotary_pos_emb, _Rotary), "models of this file use it"


def test_tensors_without_memory_reach_no_kernel() -> None:
    """Fake tensors name the CPU as their device. A kernel that read one would end the process."""
    use_memory_efficient_layers(model_of("llama", torch.bfloat16))
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES | {"head_dim": 32}), dtype=torch.bfloat16)
        x, weight = torch.zeros(2, 64, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.bfloat16)
        assert rms_norm(x, weight, 1e-5).shape == (2, 64)
        assert gated_linear(x, x, None, nn.SiLU()).shape == (2, 64)
        assert model(input_ids=torch.zeros(1, 4, dtype=torch.int64), use_cache=False).logits.shape[:2] == (1, 4)


def kept_bytes(model: Any) -> int:
    seen: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    alive: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # otherwise its address would be used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(input_ids=torch.arange(30)[None], use_cache=False)
    return sum(seen.values())


def test_less_is_kept() -> None:
    model = model_of("llama", torch.bfloat16)
    before = kept_bytes(model)
    use_memory_efficient_layers(model)
    assert kept_bytes(model) < 0.75 * before


def test_a_layer_that_computes_something_else_stays() -> None:
    model = model_of("llama", torch.float32)

    def scaled(self: Any, x: Tensor) -> Tensor:
        return 2 * self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)

    model.model.norm.forward = scaled.__get__(model.model.norm)
    expected, _ = gradients(model)
    assert replaced(model)["_efficient_norm"] == 4
    torch.testing.assert_close(gradients(model)[0], expected, rtol=1e-5, atol=1e-5)


def test_an_adapter_in_the_layers_place_is_called() -> None:
    model = model_of("llama", torch.float32)

    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    for layer in model.model.layers:
        layer.mlp.down_proj.__class__ = Doubled
    expected, _ = gradients(model)
    assert replaced(model)["_efficient_gated"] == 2
    torch.testing.assert_close(gradients(model)[0], expected, rtol=1e-5, atol=1e-5)


def test_a_copy_has_its_own_weights() -> None:
    model = model_of("llama", torch.float32)
    use_memory_efficient_layers(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert gradients(other)[0].abs().max() > 0.1
