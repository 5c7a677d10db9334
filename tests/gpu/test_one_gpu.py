"""Engine and learner on one CUDA device agree with the CPU. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from magicrl.config.schema import ModelConfig
from magicrl.config.sft_schema import TinyModelConfig
from magicrl.data.families import make_family, unique_problems
from magicrl.models.loading import load_policy, save_policy
from magicrl.models.prompts import PromptEncoder
from magicrl.models.tiny import make_tiny
from magicrl.records import RolloutGroup, RolloutRequest, SamplingParams, TrainSample
from magicrl.rollout.in_process import InProcessEngine
from magicrl.training.learner import LocalLearner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model, tokenizer = make_tiny(TinyModelConfig(), make_family("running_sum").vocabulary or (), 0)
    return save_policy(model, tokenizer, tmp_path / "model")


def generate(folder: Path, device: str) -> list[RolloutGroup]:
    policy = load_policy(folder, device=device)
    encoder = PromptEncoder(policy.tokenizer, 64)
    engine = InProcessEngine(
        policy.model,
        end_tokens=policy.end_tokens,
        decode=encoder.decode,
        valid_vocab=policy.valid_vocab,
        max_context=policy.max_context,
        max_rows=16,
        memory_limit_mb=64,
        device=device,
    )
    engine.load_weights({n: p.detach() for n, p in policy.model.named_parameters()}, 0)
    problems = unique_problems(make_family("running_sum"), seed=0, split="train", count=8)
    sampling = SamplingParams(temperature=1.0, max_tokens=24, seed=1)
    requests = [
        RolloutRequest(draw=i, problem=p, prompt_tokens=encoder.encode(p), group_size=4, sampling=sampling)
        for i, p in enumerate(problems)
    ]
    engine.submit(requests)
    return sorted(engine.finished(), key=lambda g: g.request.draw)


def test_sampler_and_learner_agree_on_the_gpu(folder: Path) -> None:
    groups = generate(folder, "cuda")
    samples = [
        TrainSample(
            prompt_tokens=group.request.prompt_tokens,
            tokens=completion.tokens,
            advantage=1.0,
            group_index=group.request.draw,
            sample_index=i,
            sampler_logprobs=completion.sampler_logprobs,
            policy_version=0,
        )
        for group in groups
        for i, completion in enumerate(group.completions)
    ]
    learner = LocalLearner(load_policy(folder, device="cuda").model, model_config=ModelConfig(dtype="float32"))
    logprobs, _ = learner.logprobs(samples, 1.0)
    gaps = [np.abs(ours - s.sampler_logprobs).max() for ours, s in zip(logprobs, samples, strict=True)]
    assert max(gaps) < 1e-3


def test_the_gpu_samples_what_the_cpu_samples(folder: Path) -> None:
    pairs = zip(generate(folder, "cuda"), generate(folder, "cpu"), strict=True)
    same = [
        np.array_equal(a.tokens, b.tokens) for g, h in pairs for a, b in zip(g.completions, h.completions, strict=True)
    ]
    assert np.mean(same) > 0.9  # the same random numbers; float32 may part at near-ties
