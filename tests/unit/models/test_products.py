"""Products where the CPU emulates bfloat16: those of float32, rounded once, in every part of learner and engine."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from builders import SIZES, request, train_sample
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from magicrl.config.algorithm_schema import AlgorithmConfig
from magicrl.config.model_schema import ModelConfig, OptimizerConfig
from magicrl.models import cpu_kernels, decoding, linear, products
from magicrl.models.attention import ScoreRules, attend_rows
from magicrl.models.linear import LinearForward, linear_product, use_gradient_sums
from magicrl.models.loading import load_policy
from magicrl.models.packing import ATTENTION_NAME, register_attention
from magicrl.models.products import is_widened
from magicrl.records import TrainBatch
from magicrl.rollout.engine_settings import EngineSettings
from magicrl.rollout.in_process import InProcessEngine
from magicrl.training.learner import LocalLearner
from magicrl.training.objective import LearnerSettings
from magicrl.training.protocols import Controls

BF16 = torch.bfloat16


@pytest.fixture
def emulating(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behave as on a processor without bfloat16 products, whatever this one has."""
    for module in (products, linear, decoding):
        monkeypatch.setattr(module, "widens_bfloat16", lambda: True)
    monkeypatch.setattr(cpu_kernels, "library", lambda: None)


class Products(TorchDispatchMode):
    """Counts torch's operators that multiply bfloat16 matrices."""

    NAMES = (*("mm", "addmm", "bmm", "baddbmm", "linear", "_linear"), "_scaled_dot_product", "scaled_dot_product")

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = Counter[str](), Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.startswith(self.NAMES):
            given = [x.dtype for x in args if isinstance(x, Tensor) and x.device.type == "cpu"]
            (self.narrow if BF16 in given else self.wide)[name] += 1
        return func(*args, **kwargs or {})


def model_of(config: Any) -> Any:
    register_attention()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation=ATTENTION_NAME)
    return model.eval()


@pytest.mark.usefixtures("emulating")
def test_a_linear_layer_rounds_once_forward_and_backward() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, grad = (
        torch.randn(*shape, generator=generator).to(BF16) for shape in ((2, 3, 64), (5, 64), (5,), (2, 3, 5))
    )
    given = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
    found = linear_product(*given)
    found.backward(grad)
    wide = [tensor.double().requires_grad_() for tensor in (x, weight, bias)]
    expected = F.linear(*wide)
    expected.backward(grad.double())
    pairs = [(found, expected), *((a.grad, b.grad) for a, b in zip(given, wide, strict=True))]
    for ours, right in pairs:
        assert ours is not None
        assert right is not None
        assert ours.dtype == BF16
        # half a unit in the last place of bfloat16, which has 8 bits
        assert ((ours.double() - right).abs() <= right.abs() * 2**-8 + 1e-6).all()


def test_only_bfloat16_on_a_cpu_is_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    for emulates in (True, False):
        monkeypatch.setattr(products, "widens_bfloat16", lambda emulates=emulates: emulates)
        assert is_widened(torch.ones(1, dtype=BF16)) == emulates
        assert not is_widened(torch.ones(1))
        assert not is_widened(torch.ones(1, dtype=BF16, device="meta"))


@pytest.mark.parametrize(
    ("flags", "widens"),
    [
        ("GenuineIntel avx512f", True),
        ("GenuineIntel avx512f avx512_bf16", True),
        ("GenuineIntel avx512f avx512_bf16 amx_bf16", False),
        ("AuthenticAMD avx512f avx512_bf16", False),
    ],
)
def test_an_intel_processor_without_amx_multiplies_in_float32(
    monkeypatch: pytest.MonkeyPatch, flags: str, widens: bool
) -> None:
    monkeypatch.setattr(products, "processor_flags", lambda: frozenset(flags.split()))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    assert products.widens_bfloat16.__wrapped__() == widens


@pytest.mark.usefixtures("emulating")
def test_a_copied_layer_uses_its_own_weight() -> None:
    layer = nn.Linear(4, 3, bias=False, dtype=BF16)
    use_gradient_sums(layer)
    other = deepcopy(layer)
    with torch.no_grad():
        other.weight.zero_()
    x = torch.ones(2, 4, dtype=BF16)
    assert not other(x).any()
    assert torch.equal(layer(x), (x.float() @ layer.weight.float().T).to(BF16))


@pytest.mark.usefixtures("emulating")
def test_loading_replaces_the_forward_of_linear_layers(tiny_models: tuple[Path, Path]) -> None:
    layers = [module for module in load_policy(tiny_models[0]).model.modules() if type(module) is nn.Linear]
    assert layers
    assert all(isinstance(layer.forward, LinearForward) for layer in layers)


CONFIGS = {"fused": LlamaConfig(**SIZES), "biased": Qwen3Config(**SIZES, head_dim=8, attention_bias=True)}


@pytest.mark.usefixtures("emulating")
@pytest.mark.parametrize("kind", CONFIGS)
def test_every_product_of_learner_and_engine_is_widened(kind: str) -> None:
    settings = LearnerSettings(
        algorithm=AlgorithmConfig(), optimizer=OptimizerConfig(), model=ModelConfig(dtype="bfloat16")
    )
    learner = LocalLearner(model_of(CONFIGS[kind]), settings)
    model = model_of(CONFIGS[kind]).to(BF16)
    use_gradient_sums(model)  # as loading does
    engine = InProcessEngine(
        model,
        EngineSettings(model="", max_rows=4, memory_limit_mb=256),
        end_tokens=frozenset(),
        decode=str,
        valid_vocab=40,
        max_context=512,
    )
    samples = [
        train_sample([1, 2, 3], [4, 5, 6, 7], advantage=1.0),
        train_sample([1, 2], list(range(3, 20)) * 20, advantage=-1.0),  # wider than attention's own limit
    ]
    controls = Controls(clip_low=0.2, clip_high=0.28, temperature=1.0, learning_rate=1e-3)
    with Products() as counted:
        assert np.isfinite(learner.update(TrainBatch.of(samples), controls)["loss"])
        engine.submit([request(0, np.arange(300) % 40, size=2, limit=4)])
        assert len(list(engine.finished())) == 1
    assert counted.wide.total() > 20
    assert not counted.narrow


@pytest.mark.usefixtures("emulating")
@pytest.mark.parametrize("rules", [ScoreRules(), ScoreRules(softcap=5.0), ScoreRules(window=3)], ids=repr)
def test_attention_is_that_of_float32(rules: ScoreRules) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 300, heads, 16, generator=generator).to(BF16) for heads in (4, 2, 2))
    with Products() as counted:
        found = attend_rows(q, k, v, 0.25, rules)
    assert not counted.narrow
    expected = attend_rows(q.float(), k.float(), v.float(), 0.25, rules)
    torch.testing.assert_close(found.float(), expected, atol=0.02, rtol=0.02)
