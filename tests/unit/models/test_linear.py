"""Gradients of weights of linear layers and embeddings: added to float32 sums, in every layer of a learner."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from builders import train_sample
from learning import learning
from random_models import made
from torch import Tensor, nn
from transformers import LlamaConfig

from magicrl.config.model_schema import LoraConfig, ModelConfig
from magicrl.models import cpu_kernels
from magicrl.models.linear import linear_product, use_gradient_sums
from magicrl.records import TrainBatch
from magicrl.training.learner import LocalLearner
from magicrl.training.protocols import Controls

BF16 = torch.bfloat16
served = pytest.mark.skipif(cpu_kernels.library() is None, reason="this CPU or system has no kernels")


@served
@pytest.mark.parametrize(
    ("rows", "columns", "width"), [(1, 1, 1), (5, 33, 31), (64, 32, 96), (100, 70, 100), (530, 48, 2100)]
)
def test_a_weights_gradient_is_added(rows: int, columns: int, width: int) -> None:
    pull, x = torch.randn(rows, columns).to(BF16), torch.randn(rows, width).to(BF16)
    before = torch.randn(columns, width)
    expected = before.double() + pull.double().T @ x.double()
    threads = torch.get_num_threads()
    found = []
    for count in (1, 2):
        torch.set_num_threads(count)
        total = before.clone()
        cpu_kernels.add_gradient(total, pull.T.contiguous().T, x)
        found.append(total)
    torch.set_num_threads(threads)
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-5, atol=1e-5 * rows**0.5)
    assert torch.equal(*found), "the result does not depend on the number of threads"


@served
def test_the_gradient_is_of_float32_and_autograd_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("magicrl.models.linear.adds_gradients", cpu_kernels.serves)  # as on AMX
    weight = nn.Parameter(torch.randn(8, 32).to(BF16))
    x, pull = torch.randn(2, 3, 32).to(BF16).requires_grad_(), torch.randn(2, 3, 8).to(BF16)
    (plain_x,) = torch.autograd.grad(linear_product(x, weight), x, pull)
    weight.gradient_sum = torch.ones(8, 32)  # pyright: ignore[reportAttributeAccessIssue]
    with torch.no_grad():
        linear_product(x, weight)
    linear_product(x, weight).backward(pull)
    assert weight.grad is None
    expected = 1 + pull.flatten(0, 1).float().T @ x.detach().flatten(0, 1).float()
    torch.testing.assert_close(weight.gradient_sum, expected)
    assert torch.equal(x.grad, plain_x)


@pytest.mark.parametrize("padding", [None, 2])
def test_an_embedding_adds_its_gradient(padding: int | None) -> None:
    layer = nn.Embedding(6, 4, padding_idx=padding, dtype=BF16)
    tokens, pull = torch.tensor([[1, 2, 1], [5, 1, 2]]), torch.randn(2, 3, 4).to(BF16)
    (dense,) = torch.autograd.grad(layer(tokens).float(), layer.weight, pull.float())
    layer.weight.gradient_sum = torch.ones(6, 4)  # pyright: ignore[reportAttributeAccessIssue]
    use_gradient_sums(layer)
    out = layer(tokens)
    assert torch.equal(out, layer.weight[tokens])
    out.backward(pull)
    assert layer.weight.grad is None
    torch.testing.assert_close(layer.weight.gradient_sum, 1 + dense.float(), rtol=2**-7, atol=2**-7)
    once = 1 + pull[1, 0].float()
    assert torch.equal(layer.weight.gradient_sum[5], once), "not rounded to bfloat16"
    with torch.no_grad():
        assert torch.equal(layer(tokens), out)
    other = deepcopy(layer)
    other(tokens).backward(pull)
    assert torch.equal(other.weight.grad[5], pull[1, 0]), "a copy has no sum yet"
    assert torch.equal(layer.weight.gradient_sum[5], once)


def gradients(
    monkeypatch: pytest.MonkeyPatch, by_kernel: bool, tied: bool = True, **settings: Any
) -> tuple[dict[str, Tensor], int]:
    """Return a learner's gradients of a few samples, and how often a kernel added one."""
    calls = []
    add = cpu_kernels.add_gradient
    with monkeypatch.context() as patch:
        serves = cpu_kernels.serves if by_kernel else lambda *_: False
        patch.setattr(cpu_kernels, "adds_gradients", serves)
        patch.setattr("magicrl.models.linear.adds_gradients", serves)
        for module in ("magicrl.models.linear", "magicrl.models.cpu_kernels"):
            patch.setattr(f"{module}.add_gradient", lambda *given: (calls.append(given[0].shape), add(*given)))
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = made(
            LlamaConfig(vocab_size=64, num_key_value_heads=1, tie_word_embeddings=tied, **sizes), torch.float32
        )
        one = LocalLearner(model, learning(model=ModelConfig(dtype="bfloat16", **settings)))
        rng = np.random.default_rng(0)
        samples = [train_sample(rng.integers(0, 64, 5), rng.integers(0, 64, 20), advantage=a) for a in (1.0, -0.5)]
        batch = TrainBatch.of(samples)
        for _ in range(2):  # the second micro-batch adds to the first one's sums
            one.accumulate(batch.samples, one.objective.sample_weights(batch), Controls(temperature=1.0))
        assert all(parameter.grad is None for parameter in model.parameters())
        return {name: value.clone() for name, value in one.gradients().items()}, len(calls)


@served
@pytest.mark.parametrize(
    "settings", [{}, {"tied": False}, {"exact": True}, {"checkpoint_above_tokens": 1}, {"gradient_checkpointing": True}]
)
def test_every_layer_of_a_learner_adds_its_gradient(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ours, calls = gradients(monkeypatch, True, **settings)
    theirs, none = gradients(monkeypatch, False, **settings)
    assert none == 0
    assert calls == 2 * (7 * 2 + 1), "two layers with seven products, and the head"
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        difference = (ours[name] - expected).norm() / expected.norm()
        assert difference < 2**-7, name
        if name.endswith(("proj.weight", "embed_tokens.weight")):
            assert not torch.equal(ours[name].to(BF16).float(), ours[name]), f"{name} was rounded"


@served
def test_adapters_add_their_gradients_and_the_model_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    ours, _ = gradients(monkeypatch, True, lora=LoraConfig(rank=4))
    theirs, _ = gradients(monkeypatch, False, lora=LoraConfig(rank=4))
    assert ours.keys() == theirs.keys()
    assert all("lora" in name for name in ours)
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, rtol=2**-5, atol=2**-7 * float(expected.abs().max()) + 1e-12)


@pytest.mark.parametrize(("flags", "expected"), [("amx_tile amx_bf16", True), ("", False)])
def test_only_tiles_are_faster_than_torch(flags: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "library", lambda: True)
    monkeypatch.setattr(cpu_kernels, "_instructions", lambda: (*cpu_kernels._AVX512, *flags.split()))
    assert cpu_kernels.adds_gradients(torch.zeros(2, 32, dtype=BF16)) is expected
    assert not cpu_kernels.adds_gradients(torch.zeros(2, 32))
