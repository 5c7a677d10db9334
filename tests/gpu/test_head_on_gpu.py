"""The head's kernels at real sizes on one CUDA device: values, gradients, memory. Skipped without a device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from magicrl.models.head import Backend, HeadOptions, logprobs_and_entropies

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def results(backend: Backend, tokens: int, vocab: int, width: int) -> list[Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(vocab, width, generator=generator, device="cuda") * 2 / width**0.5).bfloat16()
    total = torch.zeros(vocab, width, device="cuda")
    targets = torch.randint(0, vocab, (tokens,), generator=generator, device="cuda")
    options = HeadOptions(temperature=0.8, backend=backend)
    weight.requires_grad_()
    logprobs, entropies = logprobs_and_entropies(hidden, weight, targets, options, weight_gradient=total)
    (logprobs * torch.linspace(-1, 1, tokens, device="cuda")).sum().add(0.1 * entropies.sum()).backward()
    assert hidden.grad is not None
    return [logprobs.detach(), entropies.detach(), hidden.grad, total]


@pytest.mark.parametrize(("tokens", "vocab", "width"), [(1000, 49152, 576), (4096, 151936, 1536)])
def test_kernels_equal_torch(tokens: int, vocab: int, width: int) -> None:
    for ours, plain in zip(
        results("triton", tokens, vocab, width), results("torch", tokens, vocab, width), strict=True
    ):
        assert float((ours - plain).float().norm()) <= 0.02 * float(plain.float().norm())


def test_memory_is_a_twentieth_of_whole_logits() -> None:
    tokens, vocab, width = 32768, 151936, 1536
    torch.cuda.reset_peak_memory_stats()
    results("triton", tokens, vocab, width)
    inputs = 2 * (tokens + vocab) * width * 4  # created in float32, kept in bfloat16; the weight's float32 gradient
    naive = tokens * vocab * (2 + 4 * 4)
    assert torch.cuda.max_memory_allocated() - inputs < 0.05 * naive
