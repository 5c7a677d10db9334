"""Prompts computed once: the same log-probs and gradients as each response with its own copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from own_precision import in_own_precision
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from magicrl.models.packing import families, packed_with_shared_prompts, shared_layout
from magicrl.models.scorer import PolicyScorer
from magicrl.records import TrainSample, frozen_floats, frozen_tokens

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "eos_token_id": 1,
}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2),
    "qwen3": Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=16),
}


def sample(prompt: Sequence[int], response: Sequence[int], group: int = 0, index: int = 0) -> TrainSample:
    return TrainSample(
        prompt_tokens=frozen_tokens(prompt),
        tokens=frozen_tokens(response),
        advantage=1.0,
        group_index=group,
        sample_index=index,
        sampler_logprobs=frozen_floats([0.0] * len(response)),
        policy_version=0,
    )


def mixed_samples(seed: int = 0) -> list[TrainSample]:
    """Groups with prompts of equal and of different lengths, one prompt drawn twice, responses of 1 to 30 tokens."""
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
    """Log-probs and entropies by sample, the gradient of a weighted sum of both, and the tokens computed."""
    model.zero_grad()
    scorer = PolicyScorer(model, micro_batch_tokens=budget, share_prompts=share, checkpoint_above_tokens=checkpointing)
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
@pytest.mark.parametrize("checkpointing", [None, 0, 100])
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
    scorer = PolicyScorer(model_of("llama"), micro_batch_tokens=1000)
    different = [sample([place + 2] * 3, [5] * 40) for place in range(6)]
    ((_, batch),) = scorer.micro_batches(different)
    assert batch.input_ids.shape[1] == 6 * 42
