"""The kernel for rows: supported layers, its arguments, and results equal to those of buckets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from builders import SIZES, train_sample
from torch import Tensor
from transformers import AutoModelForCausalLM, MistralConfig, Qwen3Config
from varlen_kernel import Call, kernel_on_cpu

from magicrl.config.model_schema import ModelConfig
from magicrl.models.attention import EXACT, PLAIN, ScoreRules, capability_of, supports_varlen
from magicrl.models.packing import PackedContext, SharedLayout, SharedPromptContext
from magicrl.models.scorer import PolicyScorer
from magicrl.records import TrainSample

Calls = tuple[list[Call], list[Call]]
LAYOUTS = (
    SharedLayout(prompts=(4, 2), owners=(0, 1, 0, 0), responses=(3, 5, 1, 7)),
    SharedLayout(prompts=(3,), owners=(0, 0), responses=(0, 2)),
    SharedLayout(prompts=(3, 1, 3), owners=(2, 0, 1, 0, 2, 2), responses=(4, 0, 0, 6, 1, 2)),
    SharedLayout(prompts=(5, 2), owners=(0, 1), responses=(0, 0)),
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    with kernel_on_cpu(monkeypatch) as found:
        yield found


@pytest.mark.parametrize(
    ("expected", "changed"),
    [
        (True, {}),
        (True, {"dtype": torch.float16}),
        (True, {"capability": (8, 0)}),
        (True, {"capability": (12, 0)}),
        (True, {"widths": (256, 256)}),
        (True, {"rules": ScoreRules(window=64)}),
        (True, {"rules": ScoreRules(chunk=100)}),
        (False, {"capability": None}),
        (False, {"capability": (7, 5)}),
        (False, {"dtype": torch.float32}),
        (False, {"widths": (192, 128)}),
        (False, {"widths": (60, 60)}),
        (False, {"widths": (224, 224)}),
        (False, {"widths": (320, 320)}),
        (False, {"rules": ScoreRules(chunk=99)}),
        (False, {"rules": ScoreRules(softcap=50.0, window=64)}),
        (False, {"rules": ScoreRules(sinks=torch.zeros(4))}),
        (False, {"rules": EXACT}),
    ],
)
def test_which_layers_go_to_the_kernel(expected: bool, changed: dict[str, Any]) -> None:
    plain = {"capability": (9, 0), "dtype": torch.bfloat16, "widths": (128, 128), "rules": PLAIN, "longest": 100}
    assert supports_varlen(**plain | changed) is expected


def test_a_cpu_has_no_such_kernel() -> None:
    assert capability_of(torch.device("cpu")) is None


def test_what_a_context_sends_where(calls: Calls) -> None:
    heads = {"query": 4, "key": 2, "value": 2}
    given = {name: torch.randn(1, count, 6, 8, dtype=torch.bfloat16) for name, count in heads.items()}
    context = PackedContext([4, 2])
    context.attend(0, **given, scaling=0.3)
    assert "buckets" not in vars(context), "what no layer needs is not laid out"
    context.attend(1, **given, scaling=0.3, rules=ScoreRules(window=3))
    context.attend(1, **given, scaling=0.3, rules=ScoreRules(window=4))  # hides nothing
    context.attend(2, **given, scaling=0.3, rules=ScoreRules(softcap=1.0))
    windows = [(-1, 0), (2, 0), (-1, 0)]
    assert calls[0] == [Call([0, 4, 6], [0, 4, 6], (4, 4), window) for window in windows]


def test_a_row_with_shared_prompts_by_hand(calls: Calls) -> None:
    """Keys are both prompts, then each response's after its prompt's. The empty response is left out."""
    layout = SharedLayout(prompts=(2, 1), owners=(1, 0, 0), responses=(2, 0, 1))
    rows = torch.arange(6.0).view(1, 1, 6, 1).expand(1, 1, 6, 8).contiguous()
    # all keys are equal: a query gets the mean of the visible values
    out = SharedPromptContext(layout).varlen.attend(torch.ones_like(rows), torch.ones_like(rows), rows, 1.0)
    assert calls[0] == [Call([0, 2, 3, 5, 6], [0, 2, 3, 6, 9], (2, 3), (-1, 0))]
    # the row: prompts 0 1 and 2, responses 3 4 of the second prompt and 5 of the first
    assert out[0, :, 0, 0].tolist() == pytest.approx([0, 0.5, 2, (2 + 3) / 2, (2 + 3 + 4) / 3, (0 + 1 + 5) / 3])


def compared(context: PackedContext | SharedPromptContext, tokens: int, kv_heads: int, rules: ScoreRules) -> None:
    """Return outputs and gradients of the kernel and of buckets, in float64."""
    generator = torch.Generator().manual_seed(0)
    given = [
        torch.randn(1, tokens, heads, 8, dtype=torch.float64, generator=generator).transpose(1, 2).requires_grad_()
        for heads in (4, kv_heads, kv_heads)
    ]
    pull = torch.randn(1, tokens, 4, 8, dtype=torch.float64, generator=generator)
    found: list[list[Tensor]] = []
    for way in (context.varlen, context.buckets):
        out = way.attend(given[0], given[1], given[2], 0.3, rules)
        found.append([out, *torch.autograd.grad((out * pull).sum(), given)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 5, 17, 500])
@pytest.mark.parametrize("seed", range(3))
def test_packed_sequences_are_those_of_buckets(calls: Calls, seed: int, window: int | None, kv_heads: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 60, 1 + 6 * seed).tolist()
    compared(PackedContext(lengths), sum(lengths), kv_heads, ScoreRules(window=window))
    assert len(calls[0]) == len(calls[1]) == 1


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 3, 6, 500])
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_shared_prompts_are_those_of_buckets(
    calls: Calls, layout: SharedLayout, window: int | None, kv_heads: int
) -> None:
    tokens = sum(layout.prompts) + sum(layout.responses)
    compared(SharedPromptContext(layout), tokens, kv_heads, ScoreRules(window=window))
    assert len(calls[0]) == len(calls[1]) == 1


def test_the_kernel_keeps_less_than_buckets(calls: Calls) -> None:
    """Compare bytes that a layer's attention keeps for its backward pass: no padding, and no copy of a query."""
    layout = SharedLayout(prompts=(40,), owners=(0,) * 6, responses=(90, 35, 60, 88, 20, 71))
    tokens = sum(layout.prompts) + sum(layout.responses)
    given = [torch.randn(1, heads, tokens, 8).requires_grad_() for heads in (4, 2, 2)]

    def kept(way: str) -> int:
        seen: dict[int, Tensor] = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.setdefault(x.data_ptr(), x), lambda x: x):
            getattr(SharedPromptContext(layout), way).attend(*given, 0.3)
        return sum(x.untyped_storage().nbytes() for x in seen.values() if x.is_floating_point())

    assert kept("varlen") < 0.8 * kept("buckets")


def test_a_prompts_gradients_are_added_before_they_are_rounded(calls: Calls) -> None:
    layout = SharedLayout(prompts=(1,), owners=(0, 0, 0), responses=(1, 1, 1))
    query, key = torch.zeros(2, 1, 1, 4, 8, dtype=torch.bfloat16).requires_grad_()
    value = torch.zeros(1, 1, 4, 8, dtype=torch.bfloat16).requires_grad_()
    out = SharedPromptContext(layout).varlen.attend(query, key, value, 1.0)
    # the prompt's value gets its output's gradient and half of each response's: 1 + 3 * 2^-9
    weights = torch.tensor([1.0] + [2.0**-8] * 3).bfloat16().view(1, 4, 1, 1)
    (grad,) = torch.autograd.grad((out * weights).sum(), value)
    assert float(grad[0, 0, 0, 0]) == float(torch.tensor(1 + 3 * 2.0**-9).bfloat16()) > 1.0
    assert grad[0, 0, 1:, 0].tolist() == [2.0**-9] * 3


CONFIGS = {
    "windows": MistralConfig(**SIZES, sliding_window=8),
    "grouped": Qwen3Config(**SIZES | {"num_key_value_heads": 1}, head_dim=16),
}


def samples() -> list[TrainSample]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 40, size) for size in (9, 4, 20)]
    return [
        train_sample(prompts[group], rng.integers(2, 40, rng.choice([1, 3, 14])), group_index=group, sample_index=index)
        for group in range(3)
        for index in range(4)
    ]


def results(kind: str, *, share: bool, checkpoint: int | None) -> tuple[list[Tensor], int]:
    """Return log-probs and gradients of a model, and its forward passes."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]).double()
    scorer = PolicyScorer(
        model, ModelConfig(micro_batch_tokens=120, share_prompts=share, checkpoint_above_tokens=checkpoint)
    )
    found: list[Tensor] = []
    for _, batch in scorer.micro_batches(samples()):
        logprobs, _ = scorer.forward(batch, 0.7)
        (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
        found.append(logprobs.detach())
    return found + [p.grad for p in model.parameters() if p.grad is not None], len(found)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("checkpoint", [None, 1])
def test_a_model_computes_what_it_does_in_buckets(
    monkeypatch: pytest.MonkeyPatch, kind: str, share: bool, checkpoint: int | None
) -> None:
    expected, _ = results(kind, share=share, checkpoint=checkpoint)
    with kernel_on_cpu(monkeypatch) as (forwards, backwards):
        found, passes = results(kind, share=share, checkpoint=checkpoint)
    layers = SIZES["num_hidden_layers"]
    assert len(backwards) == layers * passes
    # `PolicyScorer` first probes in passes of few tokens; nothing is computed twice, checkpointed or not
    assert len([call for call in forwards if call.query_ends[-1] > 30]) == layers * passes
    assert {call.window for call in forwards[-layers:]} == {(7, 0) if kind == "windows" else (-1, 0)}
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)
