"""The generator compared with its published vectors, and the properties that rollouts rely on.

Also sampling compared with the textbook: one cumulative sum in float64, every block boundary and rounding edge.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import chisquare, kstest

from magicrl.rollout.sampling import likely_tokens, philox4x32, sample_tokens, uniforms


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Use the known-answer vectors that the generator's authors published for philox4x32-10."""
    c0, c1, c2, c3 = (np.array([word], dtype=np.uint64) for word in counter)
    k0, k1 = (np.array([word], dtype=np.uint64) for word in key)
    assert tuple(int(word[0]) for word in philox4x32((c0, c1, c2, c3), (k0, k1))) == expected


def test_golden_values_and_broadcasting() -> None:
    """(0, 0, 0, 0): words 0x6627e8d5, 0xe169c58d give (w0 >> 5) * 2^26 + (w1 >> 6) of 2^53."""
    expected = ((0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)) / 2**53
    assert float(uniforms(0, 0, 0, 0)) == expected
    grid = uniforms(np.array([[3]]), np.arange(2**33, 2**33 + 4)[:, None], 5, np.arange(6))
    assert grid.shape == (4, 6)
    assert grid[2, 4] == float(uniforms(3, 2**33 + 2, 5, 4))


def test_every_argument_matters() -> None:
    base = (1, 2, 3, 4)
    values = {float(uniforms(*base))}
    for place in range(4):
        for step in (1, 2, 2**20):
            changed = list(base)
            changed[place] += step
            values.add(float(uniforms(*changed)))
    values.add(float(uniforms(2**40 + 1, 2, 3, 4)))
    values.add(float(uniforms(1, 2**40 + 2, 3, 4)))
    assert len(values) == 15


def test_uniform_and_independent_along_every_axis() -> None:
    grid = uniforms(11, np.arange(20)[:, None, None], np.arange(20)[:, None], np.arange(100))
    assert grid.min() >= 0.0
    assert grid.max() < 1.0
    assert kstest(grid.ravel(), "uniform").pvalue > 0.01
    bins = np.floor(grid * 8).astype(int)
    for left, right in ((bins[1:], bins[:-1]), (bins[:, 1:], bins[:, :-1]), (bins[..., 1:], bins[..., :-1])):
        assert chisquare(np.bincount((left * 8 + right).ravel(), minlength=64)).pvalue > 0.01


def textbook(logits: torch.Tensor, tau: float, uniforms: NDArray[np.float64]) -> NDArray[np.int64]:
    probabilities = torch.softmax(logits.double() / tau, -1).numpy()
    cumulative = probabilities.cumsum(1)
    return (cumulative <= uniforms[:, None] * cumulative[:, -1:]).sum(1)


@pytest.mark.parametrize("vocab", [1, 27, 256, 257, 512, 3000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equals_one_cumulative_sum(vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(200, vocab, generator=generator, dtype=torch.float64) * 3).to(dtype)
    points = np.random.default_rng(vocab).random(200)
    for tau in (1.0, 0.4):
        tokens, logprobs, entropies = sample_tokens(logits, np.full(200, tau), points, vocab)
        assert tokens.tolist() == textbook(logits, tau, points).tolist()
        expected = torch.log_softmax(logits.double() / tau, -1)
        bound = 1e-12 if dtype == torch.float64 else 2e-6
        chosen = expected.gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(logprobs.double(), chosen, rtol=0, atol=bound)
        torch.testing.assert_close(entropies.double(), -(expected.exp() * expected).sum(1), rtol=0, atol=bound * 4)


def test_by_hand() -> None:
    """Probabilities are 1/2, 1/4, 1/4: u = 0.4999 takes the first, 0.5 and 0.7499 the second, 0.75 the third."""
    logits = torch.log(torch.tensor([[2.0, 1.0, 1.0]], dtype=torch.float64)).expand(4, -1)
    tokens, logprobs, entropies = sample_tokens(logits, np.ones(4), np.array([0.4999, 0.5, 0.7499, 0.7501]), 3)
    assert tokens.tolist() == [0, 1, 1, 2]
    np.testing.assert_allclose(logprobs.numpy(), np.log([0.5, 0.25, 0.25, 0.25]), atol=1e-12)
    np.testing.assert_allclose(entropies.numpy(), 1.5 * np.log(2.0), atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [40, 700])
def test_edges_never_take_an_impossible_token(vocab: int, dtype: torch.dtype) -> None:
    """Use u = 0 and the largest u below 1, with impossible tokens at both ends, in blocks and as a whole block."""
    logits = torch.zeros(3, vocab, dtype=dtype)
    logits[:, :3] = -float("inf")
    logits[:, -5:] = -float("inf")
    logits[1, 3 : vocab - 6] = -1e4  # underflows to weight 0 next to the remaining token
    logits[2, : vocab // 2] = -float("inf")
    for point, expected in ((0.0, (3, vocab - 6, vocab // 2)), (1 - 2**-53, (vocab - 6,) * 3)):
        tokens, logprobs, entropies = sample_tokens(logits, np.ones(3), np.full(3, point), vocab)
        assert tuple(tokens.tolist()) == expected
        assert torch.isfinite(logprobs).all()
        assert torch.isfinite(entropies).all()
        torch.testing.assert_close(entropies[0].item(), np.log(vocab - 8), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_token_of_a_large_flat_vocabulary_can_come(dtype: torch.dtype) -> None:
    """Use a u in the middle of each token's interval: 1000 tokens, four blocks."""
    points = (np.arange(1000) + 0.5) / 1000
    tokens, *_ = sample_tokens(torch.zeros(1000, 1000, dtype=dtype), np.ones(1000), points, 1000)
    assert tokens.tolist() == list(range(1000))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_has_no_probability(dtype: torch.dtype) -> None:
    logits = torch.zeros(2, 10, dtype=dtype)
    logits[:, 6:] = 50.0
    tokens, _, entropies = sample_tokens(logits, np.array([1.0, 0.0]), np.array([0.999, 0.1]), 6)
    assert tokens.tolist() == [5, 0]
    np.testing.assert_allclose(entropies.numpy(), np.log(6.0), rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_temperature_zero_takes_the_largest_and_reports_at_one(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 30, generator=generator, dtype=torch.float64).to(dtype)
    tau = np.array([0.0, 1.0, 0.5, 0.0])
    tokens, logprobs, entropies = sample_tokens(logits, tau, np.full(4, 0.99), 30)
    expected = torch.log_softmax(logits.double() / torch.tensor([1.0, 1.0, 0.5, 1.0])[:, None], -1)
    for row in (0, 3):
        assert tokens[row] == logits[row].argmax()
    assert tokens.tolist()[1:3] != logits.argmax(-1).tolist()[1:3]
    chosen, bound = expected.gather(1, tokens[:, None])[:, 0], 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(logprobs.double(), chosen, rtol=0, atol=bound)
    torch.testing.assert_close(entropies.double(), -(expected.exp() * expected).sum(1), rtol=0, atol=bound)


def test_bfloat16_logits_are_computed_in_float32() -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(1)).bfloat16()
    tokens, logprobs, _ = sample_tokens(logits, np.ones(5), np.full(5, 0.3), 300)
    assert logprobs.dtype == torch.float32
    expected = torch.log_softmax(logits.float(), -1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected)


def kept(probabilities: list[float], tau: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> list[int]:
    logits = torch.tensor([probabilities], dtype=torch.float64).log()
    found = likely_tokens(logits, np.array([tau]), np.array([top_p]), np.array([top_k]))
    assert torch.equal(found[found.isfinite()], logits[found.isfinite()])
    return found[0].isfinite().nonzero()[:, 0].tolist()


def test_top_p_and_top_k_by_hand() -> None:
    four = [0.1, 0.5, 0.15, 0.25]
    assert kept(four) == [0, 1, 2, 3]
    assert kept(four, top_p=0.5) == [1], "0.5 is enough"
    assert kept(four, top_p=0.51) == [1, 3]
    assert kept(four, top_p=0.91) == [0, 1, 2, 3]
    assert kept(four, top_k=3) == [1, 2, 3]
    assert kept(four, top_k=3, top_p=0.8) == [1, 3], "of the three's 0.9 they have 0.833"
    assert kept(four, tau=0.5, top_p=0.72) == [1], "at tau 0.5 the first has 0.25 / 0.345 = 0.725"
    assert kept([0.4, 0.3, 0.3], top_k=2) == [0, 1, 2], "equally likely tokens are both kept"
    assert kept(four, tau=0.0, top_p=0.51) == [1, 3], "at 0 the probabilities are those of tau 1"
    assert kept(four, top_k=9) == [0, 1, 2, 3]


@pytest.mark.parametrize("spread", [0.05, 3.0])  # top-p keeps most of the vocabulary, and a few tokens
def test_top_p_and_top_k_equal_a_sorted_list(spread: float) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 3000, generator=generator, dtype=torch.float64) * spread
    tau, top_p = np.array([1.0, 0.6, 1.0, 0.0, 1.3, 1.0]), np.array([0.9, 0.95, 1.0, 0.5, 0.999, 1.0])
    top_k = np.array([0, 0, 700, 20, 2000, 0])
    found = likely_tokens(logits, tau, top_p, top_k)
    for row in range(6):
        order = logits[row].argsort(descending=True)[: top_k[row] or None].tolist()
        weights = (logits[row, order] / (tau[row] or 1.0)).softmax(-1).tolist()
        expected, mass = set[int](), 0.0
        for token, weight in zip(order, weights, strict=True):
            if mass < top_p[row]:
                expected.add(token)
            mass += weight
        assert {*found[row].isfinite().nonzero()[:, 0].tolist()} == (expected if row < 5 else {*range(3000)})
    tokens, logprobs, entropies = sample_tokens(found, tau, np.linspace(0, 0.999, 6), 3000)
    whole = (found / torch.from_numpy(np.where(tau > 0, tau, 1.0))[:, None]).log_softmax(-1)
    torch.testing.assert_close(logprobs, whole.gather(1, tokens[:, None])[:, 0])
    torch.testing.assert_close(entropies, torch.special.entr(whole.exp()).sum(-1))
