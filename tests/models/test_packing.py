"""Micro-batch plans, packed rows, and attention that stays inside each sequence."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from magicrl.models.packing import MAX_ATTENTION_PADDING, PackedBatch, PackedContext, plan_micro_batches
from magicrl.records import TrainSample, frozen_floats, frozen_tokens


def random_lengths(seed: int, count: int, low: int = 1, high: int = 200) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(low, high) for _ in range(count)]


def sample(prompt: list[int], response: list[int], index: int = 0) -> TrainSample:
    return TrainSample(
        prompt_tokens=frozen_tokens(prompt),
        tokens=frozen_tokens(response),
        advantage=0.0,
        group_index=3,
        sample_index=index,
        sampler_logprobs=frozen_floats(np.zeros(len(response))),
        policy_version=0,
    )


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
    # no more micro-batches than samples of this size force, and none much fuller than the rest
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
    """Each sequence alone, by the formula."""
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
        # the layout that projections give: heads behind tokens, seen transposed
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
    assert context.padded_tokens <= sum(lengths) / (1 - MAX_ATTENTION_PADDING)
    assert context.longest == max(lengths)


@pytest.mark.parametrize("lengths", [[], [3, 0]])
def test_empty_sequences_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        PackedContext(lengths)
