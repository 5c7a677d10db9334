"""Attention over a packed row by CPU kernels: values and gradients compared with float64, per sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from builders import SIZES, train_sample
from cpu_marks import served, sets
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from magicrl.config.model_schema import ModelConfig
from magicrl.models import cpu_kernels
from magicrl.models.attention import EXACT, PLAIN, ScoreRules, supports_row
from magicrl.models.cpu_rows import CpuRow, attend_row
from magicrl.models.packing import PackedContext, SharedLayout, SharedPromptContext
from magicrl.models.scorer import PolicyScorer

BF16 = torch.bfloat16
HEADS = {"SmolLM2": (9, 3, 64), "one key head": (3, 1, 32), "as many": (2, 2, 96), "wide": (4, 2, 256)}
# lengths around the kernels' blocks of 64 queries and 96 keys
ALONE = PackedContext([1, 2, 64, 65, 97, 200])
SHARED = SharedPromptContext(
    SharedLayout(prompts=(96, 1, 33), owners=(2, 0, 1, 0, 2, 2), responses=(130, 3, 70, 63, 1, 64))
)
CONTEXTS = {"alone": ALONE, "shared": SHARED}


def row_of(heads: tuple[int, int, int], tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    count, kv_heads, dim = heads
    found = (torch.randn(1, number, tokens, dim).to(BF16) for number in (count, kv_heads, kv_heads))
    q, k, v = (x.requires_grad_() for x in found)
    return q, k, v


def tokens_of(context: PackedContext | SharedPromptContext) -> int:
    return sum(context._sequences()[0])


def reference(context: PackedContext | SharedPromptContext, given: Sequence[Tensor], scaling: float) -> Tensor:
    """Return ``[1, tokens, heads, dim]`` in float64, one sequence at a time, from the same table of sequences."""
    queries, keys, source = context._sequences()
    keys = queries if keys is None else keys
    source = np.arange(sum(queries)) if source is None else source
    q, k, v = (x.double()[0] for x in given)
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    found: list[Tensor] = []
    for asked, seen, first, offset in zip(
        queries, keys, np.cumsum(queries) - queries, np.cumsum(keys) - keys, strict=True
    ):
        places = torch.from_numpy(source[offset : offset + seen])
        scores = q[:, first : first + asked] @ k[:, places].transpose(1, 2) * scaling
        hidden = torch.arange(seen)[None] > seen - asked + torch.arange(asked)[:, None]
        found.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v[:, places])
    return torch.cat(found, dim=1).transpose(0, 1)[None]


@pytest.fixture(params=sets, ids=lambda names: names[-1])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compute with each set of instructions that the processor has."""
    monkeypatch.setattr(cpu_kernels, "_SETS", (request.param,))
    cpu_kernels._found.cache_clear()
    yield
    monkeypatch.undo()
    cpu_kernels._found.cache_clear()


@served
@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("name", CONTEXTS)
def test_values_and_gradients_are_float64s_to_bfloat16s_rounding(name: str, heads: tuple[int, int, int]) -> None:
    context, scaling = CONTEXTS[name], heads[2] ** -0.5
    given = row_of(heads, tokens_of(context))
    out = context.attend(0, *given, scaling)
    expected = reference(context, given, scaling)
    pull = torch.randn_like(out)
    gradients = torch.autograd.grad(out, given, pull)
    wanted = torch.autograd.grad(expected, given, pull.double())
    torch.testing.assert_close(out.double(), expected, rtol=2**-7, atol=2**-7)
    for found, each in zip(gradients, wanted, strict=True):
        assert float((found - each).double().norm() / each.double().norm()) < 5e-3
    # also per token: a missing block would vanish in the norm of all
    off = (gradients[0] - wanted[0]).float().norm(dim=-1)
    assert float(off.max()) < 0.05 * float(wanted[0].float().norm(dim=-1).mean())


@served
def test_bits_depend_on_neither_threads_nor_other_sequences() -> None:
    given = row_of((6, 2, 64), 260)
    found: list[list[Tensor]] = []
    threads = torch.get_num_threads()
    pull = torch.randn(1, 260, 6, 64).to(BF16)
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            out = PackedContext([130, 30, 100]).attend(0, *given, 0.125)
            found.append([out, *torch.autograd.grad(out, given, pull)])
    finally:
        torch.set_num_threads(threads)
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)
    alone = [x[:, :, 130:160].detach().requires_grad_() for x in given]
    out = PackedContext([30]).attend(0, *alone, 0.125)
    assert torch.equal(out, found[0][0][:, 130:160])
    for own, whole in zip(torch.autograd.grad(out, alone, pull[:, 130:160]), found[0][1:], strict=True):
        assert torch.equal(own, whole[:, :, 130:160])


@served
def test_a_prompts_keys_get_the_gradients_of_all_their_responses() -> None:
    """Families are recognised by their first key, for any order of their sequences."""
    places = np.r_[0:2, 2:5, 0:2, 5, 2:5, 6:8, 0:2, 8:12]
    _, source, bounds = CpuRow([2, 3, 1, 2, 4], [2, 3, 3, 5, 6], places).tables
    assert bounds.tolist() == [0, 3, 5], "the first prompt with its two responses, the second with its one"
    assert len(source) == 19
    given = row_of((2, 1, 32), 12)
    context = SharedPromptContext(SharedLayout(prompts=(2, 3), owners=(0, 1, 0), responses=(1, 2, 4)))
    out = context.attend(0, *given, 0.3)
    (pulled,) = torch.autograd.grad(out[:, 8:].float().sum(), given[2])
    assert pulled[0, 0, :2].any(dim=-1).all(), "the last response looks at the first prompt"
    assert not pulled[0, 0, 2:8].any()


@served
def test_any_stride_but_that_of_the_last_axis() -> None:
    q, k, v = (x.detach() for x in row_of((4, 2, 32), 40))
    expected = PackedContext([40]).attend(0, q, k, v, 0.2)
    joint = torch.cat([x[0].transpose(0, 1) for x in (q, k, v)], dim=1)
    parts = (x.transpose(0, 1)[None] for x in joint.split([4, 2, 2], dim=1))
    assert torch.equal(PackedContext([40]).attend(0, *parts, 0.2), expected)
    turned = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v))
    assert torch.equal(PackedContext([40]).attend(0, *turned, 0.2), expected)


@served
def test_what_is_not_finite_reaches_who_sees_it_alone() -> None:
    q, k, v = (x.detach().clone() for x in row_of((2, 1, 32), 30))
    k[0, 0, 4] = torch.nan
    found = PackedContext([10, 20]).attend(0, q, k, v, 0.2).isnan()
    assert found[0, 4:10].all()
    assert not found[0, :4].any()
    assert not found[0, 10:].any()


def test_which_layers_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    q, _, v = row_of((2, 1, 64), 10)
    ours = cpu_kernels.missing() is None
    assert supports_row(q, v, PLAIN, 10) is ours
    assert supports_row(q, v, ScoreRules(window=10), 10) is ours
    assert supports_row(q, v, EXACT, 10) is ours
    for rules in (ScoreRules(window=9), ScoreRules(softcap=5.0), ScoreRules(sinks=torch.zeros(2))):
        assert not supports_row(q, v, rules, 10)
    assert not supports_row(q.float(), v.float(), PLAIN, 10)
    assert not supports_row(q, v[..., :32], PLAIN, 10)
    monkeypatch.setattr(cpu_kernels, "library", lambda: None)
    assert not supports_row(q, v, PLAIN, 10)
    out = PackedContext([10]).attend(0, *row_of((2, 1, 64), 10), 0.2)  # torch's attention
    torch.testing.assert_close(
        out.double(), reference(PackedContext([10]), row_of((2, 1, 64), 10), 0.2), rtol=2**-6, atol=2**-6
    )


@served
def test_layers_that_are_computed_anew_keep_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    library = cpu_kernels.library()
    assert library is not None

    class Counted:
        def __getattr__(self, name: str) -> object:
            return getattr(library, name)

        def attend_row(self, *given: object) -> None:
            calls.append(1)
            library.attend_row(*given)

    torch.manual_seed(0)
    config = Qwen3Config(**SIZES | {"head_dim": 32})
    model = AutoModelForCausalLM.from_config(config, dtype=BF16)
    scorer = PolicyScorer(model, ModelConfig(checkpoint_above_tokens=4))
    batch = scorer.pack([train_sample([1, 2, 3], [4, 5, 6, 7])], shared=False)
    monkeypatch.setattr(cpu_kernels, "library", Counted)
    logprobs, _ = scorer.forward(batch, 1.0)
    logprobs.sum().backward()
    assert len(calls) == config.num_hidden_layers, "once in each layer, and not again for the backward pass"


@served
def test_the_operator_is_sound() -> None:
    """Run torch's own checks of an operator: schema, autograd registration."""
    q, k, v = (x[0].detach().transpose(0, 1).requires_grad_() for x in row_of((2, 1, 32), 6))
    tables = CpuRow([4, 2]).tables
    torch.library.opcheck(attend_row, (q, k, v, *tables, 0.2), test_utils=("test_schema", "test_autograd_registration"))
