"""The head's Triton kernels compared with the torch path: on CUDA, or in Triton's interpreter.

TRITON_INTERPRET=1 pytest tests/unit/models/test_head_triton.py      # needs triton, which CPU builds of torch lack
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from magicrl.models.head import TRITON_INSTALLED, HeadOptions, Tiles, logprobs_and_entropies

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
NARROW = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter multiplies bfloat16's bits

pytestmark = [
    pytest.mark.skipif(not TRITON_INSTALLED, reason="no GPU: Triton comes with CUDA builds of torch"),
    pytest.mark.skipif(
        not INTERPRETED and not torch.cuda.is_available(), reason="no CUDA device, and TRITON_INTERPRET is not set"
    ),
]

TILES = Tiles(tokens=16, words=32, inner=16, group=2, words_per_program=2, warps=4, stages=2)
OPTIONS = [
    HeadOptions(),
    HeadOptions(temperature=0.6, valid_vocab=90),
    HeadOptions(scale=0.25, softcap=2.0, temperature=0.8),
    HeadOptions(chunk_tokens=7, temperature=1.3),
    HeadOptions(float32=True, temperature=0.6),
]


def inputs(dtype: torch.dtype, tokens: int = 37, vocab: int = 103, width: int = 24) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, width, generator=generator).to(DEVICE, dtype) for n in (tokens, vocab))
    targets = torch.randint(0, 90, (tokens,), generator=generator).to(DEVICE)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def results(dtype: torch.dtype, options: HeadOptions, *, bias: bool, entropy: bool) -> Iterator[Tensor]:
    hidden, weight, targets = inputs(dtype)
    offsets = torch.linspace(-1, 1, len(weight), device=DEVICE).to(dtype).requires_grad_() if bias else None
    logprobs, entropies = logprobs_and_entropies(hidden, weight, targets, options, offsets)
    mix = torch.linspace(-1, 2, len(hidden), device=DEVICE)
    loss = (mix * logprobs).sum() + ((0.3 * mix.flip(0) * entropies).sum() if entropy else 0.0)
    loss.backward()
    yield from (logprobs.detach(), entropies.detach())
    yield from (t.grad for t in (hidden, weight, offsets) if t is not None and t.grad is not None)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (NARROW, 2e-2)])
def test_kernels_equal_the_torch_path(
    options: HeadOptions, bias: bool, entropy: bool, dtype: torch.dtype, tolerance: float
) -> None:
    ours = results(dtype, replace(options, backend="triton", tiles=TILES), bias=bias, entropy=entropy)
    plain = results(dtype, replace(options, backend="torch"), bias=bias, entropy=entropy)
    for one, other in zip(ours, plain, strict=True):
        assert one.dtype == other.dtype
        assert float((one - other).float().norm()) <= tolerance * float(other.float().norm())


@pytest.mark.parametrize("tiles", [Tiles(tokens=16, words=16, inner=32, words_per_program=1), replace(TILES, words=64)])
def test_tile_sizes_change_nothing(tiles: Tiles) -> None:
    expected = results(torch.float32, HeadOptions(backend="triton", tiles=TILES), bias=False, entropy=True)
    found = results(torch.float32, HeadOptions(backend="triton", tiles=tiles), bias=False, entropy=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (NARROW, 2e-2)])
def test_the_tiles_that_a_dtype_gets(dtype: torch.dtype, tolerance: float) -> None:
    ours = results(dtype, HeadOptions(backend="triton", temperature=0.7), bias=False, entropy=True)
    plain = results(dtype, HeadOptions(backend="torch", temperature=0.7), bias=False, entropy=True)
    for one, other in zip(ours, plain, strict=True):
        assert float((one - other).float().norm()) <= tolerance * float(other.float().norm())


def test_a_float32_head_is_not_rounded() -> None:
    hidden, weight, targets = inputs(NARROW)
    exact = (hidden.detach().double() @ weight.detach().double().T).log_softmax(1)
    exact = exact.gather(1, targets[:, None])[:, 0]
    errors = [
        float((logprobs_and_entropies(hidden, weight, targets, options)[0].double() - exact).abs().max())
        for options in (HeadOptions(backend="triton", tiles=TILES, float32=wide) for wide in (False, True))
    ]
    assert errors[1] < 1e-5 < 1e-3 < errors[0]


def test_large_logits_stay_exact() -> None:
    hidden = torch.ones(1, 16, device=DEVICE)
    weight = torch.zeros(70, 16, device=DEVICE)
    weight[3] = weight[65] = 40.0
    options = HeadOptions(backend="triton", tiles=TILES)
    logprobs, entropies = logprobs_and_entropies(hidden, weight, torch.tensor([65], device=DEVICE), options)
    two = torch.tensor(2.0).log().item()
    assert logprobs.item() == pytest.approx(-two, rel=1e-6)
    assert entropies.item() == pytest.approx(two, rel=1e-6)


def test_float64_is_refused() -> None:
    hidden, weight, targets = inputs(torch.float64)
    with pytest.raises(ValueError, match="backend='torch'"):
        logprobs_and_entropies(hidden, weight, targets, HeadOptions(backend="triton"))
