"""Micro-batch plans, packed rows, attention inside each sequence, and shared prompts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import builders
import numpy as np
import pytest
import torch
from builders import train_sample
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from magicrl.config.model_schema import ModelConfig
from magicrl.models.packing import (
    MAX_ATTENTION_PADDING,
    PackedBatch,
    PackedContext,
    families,
    packed_with_shared_prompts,
    plan_micro_batches,
    shared_layout,
)
from magicrl.models.scorer import PolicyScorer
from magicrl.records import TrainSample
from magicrl.selfcheck.slow_loss import in_own_precision


def random_lengths(seed: int, count: int, low: int = 1, high: int = 200) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(low, high) for _ in range(count)]


def sample(prompt: Sequence[int], response: Sequence[int], group: int = 3, index: int = 0) -> TrainSample:
    return train_sample(prompt, response, group_index=group, sample_index=index)


def test_plan_by_hand() -> None:
    assert plan_micro_batches([5, 3, 9, 2, 3], token_budget=8) == [[2], [0, 1], [3, 4]]
    assert plan_micro_batches([], token_budget=8) == []
    # two micro-batches are enough, and 6 + 4 is better balanced than 8 + 2
    assert plan_micro_batches([2, 3, 3, 2], token_budget=8) == [[1, 2], [0, 3]]
    with pytest.raises(ValueError, match="token_budget must be >= 1"):
        plan_micro_batches([1], token_budget=0)


@pytest.mark.parametrize("seed", range(20))
def test_plan_keeps_its_promises(seed: int) -> None:
    lengths = random_lengths(seed, 60)
    budget = random.Random(seed).randint(100, 2000)
    plan = plan_micro_batches(lengths, budget)
    assert sorted(i for part in plan for i in part) == list(range(60))
    sizes = [sum(lengths[i] for i in part) for part in plan]
    assert all(size <= budget or len(part) == 1 for size, part in zip(sizes, plan, strict=True))
    shared = [size for size in sizes if size <= budget]
    # no more micro-batches than samples of this size require, and none much fuller than the others
    assert len(shared) <= sum(shared) / max(budget - 199, 1) + 1
    if len(shared) > 1:
        assert max(shared) - sum(shared) / len(shared) <= max(lengths)
    assert plan == plan_micro_batches(list(lengths), budget)


def test_packed_batch_by_hand() -> None:
    batch = PackedBatch.of([sample([7, 8], [9]), sample([4], [5, 6])])
    assert batch.input_ids.tolist() == [[7, 8, 4, 5]]  # nothing is predicted from 9 and 6
    assert batch.position_ids.tolist() == [[0, 1, 0, 1]]
    assert batch.predict_index.tolist() == [1, 2, 3]
    assert batch.targets.tolist() == [9, 5, 6]
    assert batch.response_lengths == (1, 2)


def test_packed_batch_names_an_empty_sample() -> None:
    with pytest.raises(ValueError, match="sample 1 of group 3 has 0 prompt and 1 response"):
        PackedBatch.of([sample([1], [2]), sample([], [2], index=1)])
    with pytest.raises(ValueError, match="sample 1 of group 3 has 2 prompt and 0 response"):
        PackedBatch.of([sample([1], [2]), sample([2, 2], [], index=1)])


def separate_attention(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scaling: float) -> Tensor:
    """Compute each sequence separately, by the formula."""
    outputs: list[Tensor] = []
    repeat = q.shape[1] // k.shape[1]
    for qs, ks, vs in zip(*(x[0].split(lengths, dim=1) for x in (q, k, v)), strict=True):
        scores = scaling * qs @ ks.repeat_interleave(repeat, 0).transpose(1, 2)
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        outputs.append((weights @ vs.repeat_interleave(repeat, 0)).transpose(0, 1))
    return torch.cat(outputs)[None]


@pytest.mark.parametrize(
    "lengths",
    [[5], [4, 4, 4], [1, 9, 2, 17, 16, 15, 3], random_lengths(1, 30, high=80), [3, 1], [100, 90, 64, 65, 2]],
)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_is_that_of_each_sequence_alone(lengths: list[int], kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [
        # the layout of projections: heads after tokens, transposed
        torch.randn(1, sum(lengths), heads, 8, dtype=torch.float64, generator=generator)
        .transpose(1, 2)
        .requires_grad_()
        for heads in (4, kv_heads, kv_heads)
    ]
    pull = torch.randn(1, sum(lengths), 4, 8, dtype=torch.float64, generator=generator)
    found: list[list[Tensor]] = []
    for ours in (True, False):
        if ours:
            out = PackedContext(lengths).attend(0, tensors[0], tensors[1], tensors[2], 0.3)
        else:
            out = separate_attention(tensors[0], tensors[1], tensors[2], lengths, 0.3)
        found.append([out, *torch.autograd.grad((out * pull).sum(), tensors)])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)


def test_a_broken_sequence_does_not_reach_the_others() -> None:
    lengths = [6, 5, 6, 2]
    query, key, value = (torch.randn(1, 2, 19, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))
    value[0, :, 6:11] = torch.nan
    value.requires_grad_()
    out = PackedContext(lengths).attend(0, query, key, value, 1.0)
    rows = out[0].isnan().any(dim=(1, 2))
    assert rows.tolist() == [False] * 6 + [True] * 5 + [False] * 8


@pytest.mark.parametrize("seed", range(10))
def test_attention_padding_is_bounded(seed: int) -> None:
    lengths = random_lengths(seed, 50, high=500)
    context = PackedContext(lengths)
    assert len(context.buckets._padding._source) <= sum(lengths) / (1 - MAX_ATTENTION_PADDING)


@pytest.mark.parametrize("lengths", [[], [3, 0]])
def test_empty_sequences_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        PackedContext(lengths)


SIZES = builders.SIZES | {"num_hidden_layers": 3}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES | {"num_key_value_heads": 1}, head_dim=16),
}


def mixed_samples(seed: int = 0) -> list[TrainSample]:
    """Return groups with prompts of several lengths, one of them drawn twice, and responses of 1 to 30 tokens."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(2, 40, size=n).tolist() for n in (9, 9, 20, 1, 33)]
    return [
        sample(prompts[place], rng.integers(2, 40, size=rng.choice([1, 2, 5, 17, 30])).tolist(), group, index)
        for group, place in enumerate([0, 1, 2, 3, 4, 2])
        for index in range(5)
    ]


def model_of(kind: str, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    model = in_own_precision(AutoModelForCausalLM.from_config(CONFIGS[kind]).to(dtype))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def results(
    model: Any, samples: list[TrainSample], *, share: bool, budget: int, checkpointing: int | None = None
) -> tuple[dict[int, np.ndarray], list[torch.Tensor], int]:
    """Return log-probs and entropies by sample, the gradient of a weighted sum of both, and the tokens computed."""
    model.zero_grad()
    scorer = PolicyScorer(
        model, ModelConfig(micro_batch_tokens=budget, share_prompts=share, checkpoint_above_tokens=checkpointing)
    )
    found: dict[int, np.ndarray] = {}
    tokens = 0
    for members, batch in scorer.micro_batches(samples):
        assert batch.input_ids.shape[1] <= budget
        tokens += batch.input_ids.shape[1]
        logprobs, entropies = scorer.forward(batch, 0.7)
        ramps = [torch.linspace(-1, 1, len(samples[i].tokens), dtype=logprobs.dtype) * (i + 1) for i in members]
        pulls = torch.cat(ramps)
        (logprobs * pulls + entropies * pulls**2).sum().backward()
        parts = torch.stack([logprobs, entropies]).detach().split(batch.response_lengths, dim=1)
        found |= {i: part.double().numpy() for i, part in zip(members, parts, strict=True)}
    return found, [p.grad.double().clone() for p in model.parameters()], tokens


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("budget", [64, 150, 10_000])
@pytest.mark.parametrize("checkpointing", [None, 1, 100])
def test_logprobs_and_gradients_are_those_of_separate_copies(kind: str, budget: int, checkpointing: int | None) -> None:
    samples, model = mixed_samples(), model_of(kind)
    plain, plain_gradient, plain_tokens = results(model, samples, share=False, budget=10_000)
    shared, gradient, tokens = results(model, samples, share=True, budget=budget, checkpointing=checkpointing)
    assert shared.keys() == plain.keys()
    for index in plain:
        np.testing.assert_allclose(shared[index], plain[index], rtol=1e-10, atol=1e-10)
    for mine, theirs in zip(gradient, plain_gradient, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-9)
    assert tokens < plain_tokens


def test_bfloat16_stays_as_near_as_the_plain_layout() -> None:
    samples = mixed_samples()
    exact, _, _ = results(model_of("llama", torch.float32), samples, share=False, budget=10_000)
    plain, _, _ = results(model_of("llama", torch.bfloat16), samples, share=False, budget=10_000)
    shared, _, _ = results(model_of("llama", torch.bfloat16), samples, share=True, budget=10_000)
    errors = [max(float(np.abs(found[i] - exact[i]).max()) for i in exact) for found in (plain, shared)]
    assert errors[1] < 1.5 * errors[0] + 1e-3


def test_a_row_by_hand() -> None:
    batch = packed_with_shared_prompts([sample([7, 8], [9]), sample([4], [5, 6]), sample([7, 8], [3, 2, 1])])
    assert batch.input_ids.tolist() == [[7, 8, 4, 5, 3, 2]]
    assert batch.position_ids.tolist() == [[0, 1, 0, 1, 2, 3]]
    assert batch.predict_index.tolist() == [1, 2, 3, 1, 4, 5]
    assert batch.targets.tolist() == [9, 5, 6, 3, 2, 1]
    assert batch.response_lengths == (1, 2, 3)


def test_what_sharing_saves() -> None:
    layout, _ = shared_layout([sample([1, 2, 3, 4], [5, 6, 7]), sample([1, 2, 3, 4], [5])])
    assert (layout.prompts, layout.owners, layout.responses) == ((4,), (0, 0), (2, 0))
    assert layout.saved == 4 / 10


def test_families_stay_together_as_far_as_they_fit() -> None:
    samples = [sample([1, 2], [3, 4]), sample([9], [5]), *(sample([1, 2], [3, 4]) for _ in range(3))]
    assert families(samples, 100) == [[0, 2, 3, 4], [1]]
    assert families(samples, 6) == [[0, 2], [3, 4], [1]]
    assert families(samples, 1) == [[0], [2], [3], [4], [1]]


def test_where_little_is_saved_the_plain_layout_is_used() -> None:
    scorer = PolicyScorer(model_of("llama"), ModelConfig(micro_batch_tokens=1000))
    different = [sample([place + 2] * 3, [5] * 40) for place in range(6)]
    ((_, batch),) = scorer.micro_batches(different)
    assert batch.input_ids.shape[1] == 6 * 42
