"""FSDP2 with one rank equals the learner of one process: over NCCL with a CUDA device, over gloo without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import train_sample
from learning import learning
from local_ranks import LocalLauncher

from magicrl.config.cluster_schema import LearnerPlacement
from magicrl.config.model_schema import ModelConfig, TinyModelConfig
from magicrl.distributed.learner.learner import DistributedLearner
from magicrl.models.loading import load_policy, save_policy
from magicrl.models.small_models import make_tiny
from magicrl.records import TrainBatch, TrainSample
from magicrl.training.learner import LocalLearner
from magicrl.training.protocols import Controls

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONTROLS = Controls(alpha=0.05, temperature=0.8, learning_rate=1e-3)
WORDS = tuple(f"w{i}" for i in range(30))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sizes = TinyModelConfig(hidden_size=64, layers=2, heads=4, intermediate_size=128, max_context=128)
    return save_policy(*make_tiny(sizes, WORDS, 0), tmp_path / "model")


def samples() -> Iterator[TrainSample]:
    rng = np.random.default_rng(0)
    for index in range(8):
        prompt, tokens = (rng.integers(2, len(WORDS), size) for size in (7, rng.integers(5, 90)))
        logprobs = rng.normal(-3, 0.5, len(tokens)).astype(np.float32)
        advantage = float(rng.normal())
        yield train_sample(
            prompt, tokens, advantage=advantage, group_index=index // 4, sample_index=index % 4,
            sampler_logprobs=logprobs, old_logprobs=logprobs,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"] if DEVICE == "cuda" else ["float32"])
def test_one_rank_is_the_local_learner(folder: Path, dtype: str) -> None:
    settings = learning(model=ModelConfig(dtype=dtype, micro_batch_tokens=200, head_chunk_tokens=32), loss="dapo")
    local = load_policy(folder, device=DEVICE)
    one = LocalLearner(local.model, settings, tokenizer=local.tokenizer, valid_vocab=local.valid_vocab)
    many = DistributedLearner(
        load_policy(folder), settings, launcher=LocalLauncher(environment={"OMP_NUM_THREADS": "1"}),
        placement=LearnerPlacement(ranks=1), device=DEVICE, threads=1,
    )  # fmt: skip
    near = 1e-4 if dtype == "float32" else 0.03
    try:
        batch = TrainBatch.of(list(samples()))
        for _ in range(3):
            expected, found = one.update(batch, CONTROLS), many.update(batch, CONTROLS)
            assert dict(found) == pytest.approx(dict(expected), rel=near, abs=near)
        ours, theirs = many.weights(), one.weights()
        assert list(ours) == list(theirs)
        for name, value in theirs.items():
            moved = float((ours[name].cpu().float() - value.cpu().float()).norm() / value.cpu().float().norm())
            assert moved < near, name
    finally:
        many.close()
