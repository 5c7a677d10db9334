"""The fused head compared with the plain formula on whole logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from magicrl.models import head, products
from magicrl.models.head import HeadOptions, logprobs_and_entropies, pieces


def naive(
    hidden: Tensor, weight: Tensor, targets: Tensor, options: HeadOptions, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    logits = (hidden @ weight.T).to(wide)
    if bias is not None:
        logits = logits + bias.to(wide)
    logits = logits * options.scale
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    logits = logits / options.temperature
    if options.valid_vocab is not None:
        logits = torch.where(torch.arange(len(weight)) < options.valid_vocab, logits, -torch.inf)
    logp = logits.log_softmax(-1)
    words = options.valid_vocab or len(weight)
    unlikely = logits[:, :words].topk(int(options.entropy_clamp * words), largest=False).indices
    kept = logits.scatter(1, unlikely, -torch.inf).log_softmax(-1)
    plogp = kept.exp() * kept.masked_fill(kept == -torch.inf, 0.0)
    return logp.gather(1, targets[:, None])[:, 0], -plogp.sum(-1)


def inputs(tokens: int, vocab: int, width: int, dtype: torch.dtype, valid: int | None = None) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens + vocab)
    hidden = torch.randn(tokens, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(0, valid or vocab, (tokens,), generator=generator)
    return hidden, weight, targets


OPTIONS = [
    HeadOptions(chunk_tokens=3),
    HeadOptions(chunk_tokens=100, temperature=0.6),
    HeadOptions(chunk_tokens=2, temperature=1.7, valid_vocab=9),
    HeadOptions(chunk_tokens=4, scale=0.25, softcap=2.0, temperature=0.8),
    HeadOptions(chunk_tokens=3, valid_vocab=9, temperature=1.3, softcap=2.0, entropy_clamp=0.4),
]


def test_two_words_by_hand() -> None:
    hidden, weight = torch.tensor([[1.0], [0.0]]), torch.tensor([[math.log(3.0)], [0.0]])
    logprobs, entropies = logprobs_and_entropies(hidden, weight, torch.tensor([0, 1]), HeadOptions())
    # first token: p = (3/4, 1/4); second: p = (1/2, 1/2)
    assert logprobs.tolist() == pytest.approx([math.log(0.75), math.log(0.5)], rel=1e-6)
    first = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    assert entropies.tolist() == pytest.approx([first, math.log(2.0)], rel=1e-6)
    # tau = 1/2 squares the odds: p = (9/10, 1/10)
    sharp, _ = logprobs_and_entropies(hidden, weight, torch.tensor([0, 1]), HeadOptions(temperature=0.5))
    assert sharp[0].item() == pytest.approx(math.log(0.9), rel=1e-6)


def test_the_least_likely_words_left_out_by_hand() -> None:
    # p = (4, 2, 1, 1) / 8: without the last two (2/3, 1/3) remain; without one of them the tie keeps both
    weight = torch.tensor([4.0, 2.0, 1.0, 1.0]).log()[:, None].requires_grad_()
    hidden, target = torch.ones(1, 1), torch.tensor([2])
    logprob, entropy = logprobs_and_entropies(hidden, weight, target, HeadOptions(entropy_clamp=0.5))
    assert logprob.item() == pytest.approx(math.log(1 / 8))  # over all tokens
    expected = math.log(3) - 2 / 3 * math.log(2)
    assert entropy.item() == pytest.approx(expected, rel=1e-6)
    entropy.sum().backward()
    assert weight.grad is not None
    pull = -2 / 3 * (math.log(2 / 3) + expected)
    assert weight.grad[:, 0].tolist() == pytest.approx([pull, -pull, 0.0, 0.0], abs=1e-7)
    _, tied = logprobs_and_entropies(hidden, weight, target, HeadOptions(entropy_clamp=0.25))
    assert tied.item() == pytest.approx(7 / 4 * math.log(2))  # of (4, 2, 1, 1) / 8
    with pytest.raises(ValueError, match="no entropy_clamp"):
        logprobs_and_entropies(hidden, weight, target, HeadOptions(entropy_clamp=0.5, backend="triton"))
    with pytest.raises(ValueError, match=r"\[0, 1\)"):
        HeadOptions(entropy_clamp=1.0)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_gradients_by_finite_differences(options: HeadOptions, with_bias: bool) -> None:
    hidden, weight, targets = inputs(7, 11, 4, torch.float64, options.valid_vocab)
    bias = torch.linspace(-1, 1, 11, dtype=torch.float64).requires_grad_() if with_bias else None

    def both(h: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor]:
        return logprobs_and_entropies(h, w, targets, options, b)

    assert torch.autograd.gradcheck(both, (hidden, weight, bias))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 2e-2)]
)
def test_values_and_gradients_equal_the_plain_formula(
    options: HeadOptions, dtype: torch.dtype, tolerance: float
) -> None:
    hidden, weight, targets = inputs(50, 40, 16, dtype, options.valid_vocab)
    mix = torch.linspace(-1, 2, 50)
    found: list[list[Tensor]] = []
    for function in (logprobs_and_entropies, naive):
        logprobs, entropies = function(hidden, weight, targets, options)
        (mix * logprobs + 0.3 * mix.flip(0) * entropies).sum().backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        found.append([logprobs.detach(), entropies.detach(), hidden.grad, weight.grad])
        hidden.grad = weight.grad = None
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype
        assert float((ours - theirs).norm()) <= tolerance * float(theirs.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_backward_pass_gets_the_logits_of_a_single_piece(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight, targets = inputs(16, 64, 16, dtype)
    multiply, computed = head.TorchHead._product, [0]

    def counted(self: head.TorchHead, rows: slice, words: slice) -> Tensor:
        computed[-1] += self.whole is None
        return multiply(self, rows, words)

    monkeypatch.setattr(head.TorchHead, "_product", counted)
    gradients: list[tuple[Tensor, ...]] = []
    for chunk, expected in ((16, [1, 0, 1]), (15, [2, 2, 2])):
        computed = [0]
        logprobs, entropies = logprobs_and_entropies(hidden, weight, targets, HeadOptions(chunk_tokens=chunk))
        # Autograd allows a second pass. It must not read what the first one overwrote.
        for _ in range(2):
            computed.append(0)
            loss = (logprobs + 0.3 * entropies).sum()
            gradients.append(torch.autograd.grad(loss, (hidden, weight), retain_graph=True))
        assert computed == expected
    for found in gradients[1:]:
        torch.testing.assert_close(found, gradients[0])


@pytest.fixture
def narrow_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make many pieces even for a small vocabulary."""
    monkeypatch.setattr(head, "_LEAST_WORDS", 4)
    monkeypatch.setattr(head, "_ADDED_ROWS", 3)
    monkeypatch.setattr(products, "_WIDEN_ROWS", 3)


def test_pieces_by_hand(narrow_pieces: None) -> None:
    # 2 x 10 logits at once: five tokens meet 4 vocabulary entries at a time (the minimum), so not all rows fit at once
    assert list(pieces(6, 10, 2)) == [
        (slice(0, 4), [slice(0, 5), slice(5, 6)]),
        (slice(4, 8), [slice(0, 5), slice(5, 6)]),
        (slice(8, 10), [slice(0, 5), slice(5, 6)]),
    ]
    assert list(pieces(4, 10, 2)) == [(slice(0, 5), [slice(0, 4)]), (slice(5, 10), [slice(0, 4)])]
    assert list(pieces(3, 10, 8)) == [(slice(0, 10), [slice(0, 3)])]


@pytest.mark.usefixtures("narrow_pieces")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize("given", [False, True])
def test_many_pieces_give_the_same_and_may_add_to_a_given_gradient(
    options: HeadOptions, dtype: torch.dtype, tolerance: float, given: bool
) -> None:
    hidden, weight, targets = inputs(50, 40, 16, dtype, options.valid_vocab)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total = torch.ones(40, 16, dtype=wide) if given else None
    mix = torch.linspace(-1, 2, 50)
    logprobs, entropies = logprobs_and_entropies(hidden, weight, targets, options, weight_gradient=total)
    (mix * logprobs + 0.3 * mix.flip(0) * entropies).sum().backward()
    if total is None:
        assert weight.grad is not None
        ours = weight.grad
    else:
        assert weight.grad is None, "the gradient was given twice"
        ours = total - 1
    mine, hidden.grad, weight.grad = hidden.grad, None, None
    values = naive(hidden, weight, targets, options)
    (mix * values[0] + 0.3 * mix.flip(0) * values[1]).sum().backward()
    for one, other in ((mine, hidden.grad), (ours, weight.grad)):
        assert one is not None
        assert other is not None
        assert float((one - other).norm()) <= tolerance * float(other.norm())


@pytest.mark.usefixtures("narrow_pieces")
@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_of_many_pieces_by_finite_differences(options: HeadOptions) -> None:
    hidden, weight, targets = inputs(7, 11, 4, torch.float64, options.valid_vocab)
    bias = torch.linspace(-1, 1, 11, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda h, w, b: logprobs_and_entropies(h, w, targets, options, b), (hidden, weight, bias)
    )


def test_padded_rows_have_no_probability_and_no_gradient() -> None:
    hidden, weight, targets = inputs(6, 12, 5, torch.float64, 9)
    padded = HeadOptions(valid_vocab=9)
    with torch.no_grad():
        weight[9:] = 50.0  # would take all the probability, and all the entropy
    logprobs, entropies = logprobs_and_entropies(hidden, weight, targets, padded)
    bare = logprobs_and_entropies(hidden, weight[:9], targets, HeadOptions())
    assert torch.equal(logprobs, bare[0])
    assert torch.equal(entropies, bare[1])
    (logprobs.sum() + entropies.sum()).backward()
    assert weight.grad is not None
    assert not weight.grad[9:].any()
    assert weight.grad[:9].any()


def test_all_logits_never_exist_at_once() -> None:
    hidden, weight, targets = inputs(4096, 500, 8, torch.float32)

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                self.elements = max(self.elements, out.untyped_storage().nbytes() // out.element_size())
            return out

    with Largest() as seen:
        logprobs, entropies = logprobs_and_entropies(hidden, weight, targets, HeadOptions(chunk_tokens=64))
        (logprobs.sum() + entropies.sum()).backward()
    assert seen.elements < 4096 * 500 // 10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_float32_head_by_hand(dtype: torch.dtype) -> None:
    """Check a case by hand: 1 + 2^-8 has no bfloat16, 1 + 2^-12 no float16, but both are sums of such products."""
    small = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-12
    hidden = torch.tensor([[1.0, small]], dtype=dtype)
    weight = torch.tensor([[1.0, 1.0], [1.0, 0.0]], dtype=dtype)
    targets = torch.tensor([0])
    rounded, wide = (
        logprobs_and_entropies(hidden, weight, targets, HeadOptions(float32=flag))[0].item() for flag in (False, True)
    )
    # two logits that differ by `small`: log sigmoid(small)
    assert rounded == pytest.approx(-math.log(2), abs=1e-7)
    assert wide == pytest.approx(-math.log1p(math.exp(-small)), abs=1e-7)


def test_a_float32_heads_gradient_is_that_of_the_widened_formula() -> None:
    hidden, weight, targets = inputs(30, 40, 16, torch.bfloat16)
    hidden, weight = (x.detach().requires_grad_() for x in (hidden, weight))
    options = HeadOptions(float32=True, chunk_tokens=7)
    logprobs, entropies = logprobs_and_entropies(hidden, weight, targets, options)
    (logprobs.sum() + 0.3 * entropies.sum()).backward()
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected = (wide[0] @ wide[1].T).log_softmax(1)
    (expected.gather(1, targets[:, None]).sum() - 0.3 * (expected.exp() * expected).sum()).backward()
    torch.testing.assert_close(logprobs.double(), expected.gather(1, targets[:, None])[:, 0], rtol=1e-5, atol=1e-5)
    for ours, theirs in zip((hidden, weight), wide, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert ours.grad.dtype == torch.bfloat16
        assert float((ours.grad.double() - theirs.grad).norm()) < 0.01 * float(theirs.grad.norm())


def test_a_frozen_weight_gets_no_gradient() -> None:
    hidden, weight, targets = inputs(5, 7, 3, torch.float32)
    frozen = weight.detach()
    logprobs, _ = logprobs_and_entropies(hidden, frozen, targets, HeadOptions())
    logprobs.sum().backward()
    assert hidden.grad is not None
    assert frozen.grad is None


def test_large_logits_stay_exact() -> None:
    hidden = torch.tensor([[1.0]])
    weight = torch.tensor([[300.0], [300.0], [-300.0]])
    logprobs, entropies = logprobs_and_entropies(hidden, weight, torch.tensor([0]), HeadOptions())
    assert logprobs.item() == pytest.approx(-math.log(2), rel=1e-6)
    assert entropies.item() == pytest.approx(math.log(2), rel=1e-6)


@pytest.mark.parametrize("token", [9, -1])
def test_a_token_outside_the_vocabulary_is_named(token: int) -> None:
    hidden, weight, _ = inputs(1, 12, 3, torch.float32)
    with pytest.raises(ValueError, match=rf"token {token} lies outside the vocabulary of 9"):
        logprobs_and_entropies(hidden, weight, torch.tensor([token]), HeadOptions(valid_vocab=9))


def test_settings_out_of_range_are_named() -> None:
    with pytest.raises(ValueError, match="temperature must be > 0"):
        HeadOptions(temperature=0.0)
    with pytest.raises(ValueError, match="chunk_tokens"):
        HeadOptions(chunk_tokens=0)
    hidden, weight, targets = inputs(2, 3, 2, torch.float64)
    with pytest.raises(ValueError, match="use backend='torch'"):  # no Triton here, or no kernels for float64
        logprobs_and_entropies(hidden, weight, targets, HeadOptions(backend="triton"))
    with pytest.raises(ValueError, match="valid_vocab is 4"):
        logprobs_and_entropies(hidden, weight, targets, HeadOptions(valid_vocab=4))
