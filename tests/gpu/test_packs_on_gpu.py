"""The kernel for packed rows, compared with buckets of similar length, on one CUDA device. Skipped without a device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from builders import SIZES, train_sample
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from magicrl.config.model_schema import ModelConfig
from magicrl.models.attention import PLAIN, ScoreRules, capability_of, supports_varlen
from magicrl.models.packing import PackedContext, SharedLayout, SharedPromptContext
from magicrl.models.scorer import PolicyScorer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
LENGTHS = (1, 700, 33, 1500, 64, 257, 128, 5)


def context_of(shared: bool) -> tuple[PackedContext | SharedPromptContext, int]:
    if not shared:
        return PackedContext(LENGTHS, "cuda"), sum(LENGTHS)
    layout = SharedLayout(prompts=(200, 65), owners=(0, 1, 0, 1, 0, 0, 1, 0), responses=(*LENGTHS[:-1], 0))
    return SharedPromptContext(layout, "cuda"), 265 + sum(LENGTHS[:-1])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("rules", [PLAIN, ScoreRules(window=3), ScoreRules(window=100)], ids=repr)
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(12, 2, 128), (8, 8, 64), (4, 1, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_is_as_near_to_float32_as_buckets(
    dtype: torch.dtype, heads: int, kv_heads: int, width: int, rules: ScoreRules, shared: bool
) -> None:
    context, tokens = context_of(shared)
    assert supports_varlen(capability_of(torch.device("cuda")), dtype, (width, width), rules, max(LENGTHS))
    generator = torch.Generator("cuda").manual_seed(0)
    given = [torch.randn(1, tokens, n, width, generator=generator, device="cuda") for n in (heads, kv_heads, kv_heads)]
    pull = torch.randn(1, tokens, heads, width, generator=generator, device="cuda")

    def results(way: str, computed_in: torch.dtype) -> list[Tensor]:
        # the same rounding, also where the kernel computes with higher precision
        q, k, v = (x.to(dtype).to(computed_in).transpose(1, 2).requires_grad_() for x in given)
        out = getattr(context, way).attend(q, k, v, width**-0.5, rules)
        grads = torch.autograd.grad((out * pull.to(dtype).to(computed_in)).sum(), (q, k, v))
        return [x.detach().float() for x in (out, *grads)]

    exact, buckets = results("buckets", torch.float32), results("buckets", dtype)
    for found, plain, expected in zip(results("varlen", dtype), buckets, exact, strict=True):
        errors = [float((x - expected).norm() / expected.norm()) for x in (found, plain)]
        assert errors[0] < 2 * errors[1] + 1e-3
        assert errors[0] < 0.02


def test_the_learner_goes_to_the_kernel() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES, head_dim=16)).to("cuda", torch.bfloat16)
    scorer = PolicyScorer(model, ModelConfig(micro_batch_tokens=500, gradient_checkpointing=True))
    rng = np.random.default_rng(0)
    samples = [train_sample([3, 4, 5, 6], rng.integers(2, 40, 9), sample_index=index) for index in range(4)]
    for _, batch in scorer.micro_batches(samples):
        assert isinstance(batch.attention, SharedPromptContext)
        logprobs, _ = scorer.forward(batch, 1.0)
        logprobs.sum().backward()
        assert "varlen" in vars(batch.attention)
        assert "buckets" not in vars(batch.attention)
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
