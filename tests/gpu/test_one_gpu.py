"""Engine and learner on one CUDA device agree with the CPU. Skipped without a device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from builders import request, train_sample

from magicrl.config.model_schema import ModelConfig, TinyModelConfig
from magicrl.data.families import make_family, unique_problems
from magicrl.models.loading import load_policy, save_policy
from magicrl.models.prompts import PromptEncoder
from magicrl.models.small_models import make_tiny
from magicrl.records import RolloutGroup
from magicrl.rollout.engine_settings import EngineSettings
from magicrl.rollout.in_process import InProcessEngine
from magicrl.training.learner import LocalLearner
from magicrl.training.objective import LearnerSettings

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model, tokenizer = make_tiny(TinyModelConfig(), make_family("running_sum").vocabulary or (), 0)
    return save_policy(model, tokenizer, tmp_path / "model")


def make_engine(folder: Path, device: str, static_steps: bool | None = None) -> tuple[InProcessEngine, PromptEncoder]:
    policy = load_policy(folder, device=device)
    encoder = PromptEncoder(policy.tokenizer, 64)
    engine = InProcessEngine(
        policy.model,
        EngineSettings(model="", max_rows=16, memory_limit_mb=64),
        end_tokens=policy.end_tokens,
        decode=encoder.decode,
        valid_vocab=policy.valid_vocab,
        max_context=policy.max_context,
        static_steps=static_steps,
    )
    engine.load_weights({n: p.detach() for n, p in policy.model.named_parameters()}, 0)
    return engine, encoder


def sample(engine: InProcessEngine, encoder: PromptEncoder) -> list[RolloutGroup]:
    problems = unique_problems(make_family("running_sum"), seed=0, split="train", count=8)
    engine.submit([request(i, encoder.encode(p), limit=24, seed=1, asked=p) for i, p in enumerate(problems)])
    return sorted(engine.finished(), key=lambda g: g.request.draw)


def generate(folder: Path, device: str) -> list[RolloutGroup]:
    return sample(*make_engine(folder, device))


def same_share(one: list[RolloutGroup], other: list[RolloutGroup]) -> float:
    """Return the share of responses with equal tokens."""
    ours, theirs = ([c.tokens for group in groups for c in group.completions] for groups in (one, other))
    return float(np.mean([np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True)]))


def test_sampler_and_learner_agree_on_the_gpu(folder: Path) -> None:
    groups = generate(folder, "cuda")
    samples = [
        train_sample(
            group.request.prompt_tokens,
            completion.tokens,
            group_index=group.request.draw,
            sample_index=i,
            sampler_logprobs=completion.sampler_logprobs,
        )
        for group in groups
        for i, completion in enumerate(group.completions)
    ]
    learner = LocalLearner(
        load_policy(folder, device="cuda").model, LearnerSettings(model=ModelConfig(dtype="float32"))
    )
    logprobs, _ = learner.logprobs(samples, 1.0)
    gaps = [np.abs(ours - s.sampler_logprobs).max() for ours, s in zip(logprobs, samples, strict=True)]
    assert max(gaps) < 1e-3


def test_the_gpu_samples_what_the_cpu_samples(folder: Path) -> None:
    # the same random numbers; float32 may differ at near-ties
    assert same_share(generate(folder, "cuda"), generate(folder, "cpu")) > 0.9


def test_captured_steps_sample_what_plain_ones_do(folder: Path) -> None:
    """Compare CUDA graphs with the same kernels launched one by one, also after new weights and with another cache."""
    graphs, plain = (make_engine(folder, "cuda", static_steps=static) for static in (True, False))
    assert same_share(sample(*graphs), sample(*plain)) > 0.9
    captured = graphs[0].graphs_captured
    assert captured > 0
    policy = load_policy(folder, device="cuda")
    weights = {n: p.detach() * 1.1 for n, p in policy.model.named_parameters()}
    for engine, _ in (graphs, plain):
        engine.load_weights(weights, 1)
    found = sample(*graphs), sample(*plain)
    assert same_share(*found) > 0.9
    assert graphs[0].graphs_captured == captured, "weights written in place leave graphs right, and shapes come again"
    assert found[0][0].completions[0].policy_version == 1
    for engine, _ in (graphs, plain):
        engine.interrupt()  # drops the caches, and the graphs that read them
    assert same_share(sample(*graphs), sample(*plain)) > 0.9
    assert graphs[0].graphs_captured > captured
