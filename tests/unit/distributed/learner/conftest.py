"""A starting model with grouped heads, recorded rollouts with rejections, and ranks that several tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from builders import SIZES, completion, request
from local_ranks import LocalLauncher, LocalRanks
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from magicrl.algorithms.advantages import reject_zero_advantage, score_group
from magicrl.distributed.learner.launchers import RankGroup
from magicrl.models.loading import load_policy, save_policy
from magicrl.models.small_models import make_tokenizer
from magicrl.records import (
    Completion,
    Outcome,
    RolloutGroup,
    ScoredGroup,
    TrainSample,
    Verdict,
    frozen_floats,
)
from magicrl.rollout.recording import read_rollouts, write_rollouts
from magicrl.training.step import train_samples

VALID = 37


def _start(folder: Path, *, tied: bool) -> Path:
    config = LlamaConfig(
        **SIZES | {"num_hidden_layers": 3, "max_position_embeddings": 512, "eos_token_id": 1, "pad_token_id": 0},
        initializer_range=0.3,
        tie_word_embeddings=tied,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    return save_policy(model, make_tokenizer([f"w{i}" for i in range(VALID - 2)], 512), folder)


@pytest.fixture(scope="session")
def start_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make three layers, four query and two key/value heads, tied embeddings, a vocabulary padded by three rows."""
    return _start(tmp_path_factory.mktemp("start") / "model", tied=True)


@pytest.fixture(scope="session")
def untied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the same model with a separate head."""
    return _start(tmp_path_factory.mktemp("untied") / "model", tied=False)


@pytest.fixture(scope="session")
def twelve_layers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, int]:
    """Return a model's folder, its bytes and those of its largest unit in bfloat16."""
    folder = tmp_path_factory.mktemp("twelve")
    config = Qwen2Config(
        vocab_size=2048,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    return folder, 2 * sum(p.numel() for p in model.parameters()), 2 * 2048 * 64


def _group(draw: int, rng: np.random.Generator, rewards: Sequence[bool]) -> ScoredGroup:
    asked = request(draw, rng.integers(2, VALID, rng.integers(1, 12)), size=len(rewards), temperature=0.8, limit=40)
    completions: list[Completion] = []
    for _ in rewards:
        tokens = rng.integers(2, VALID, rng.integers(1, 40))
        completions.append(completion(tokens, sampler_logprobs=frozen_floats(rng.normal(-3, 1, len(tokens)))))
    verdicts = [Verdict(outcome=Outcome.CORRECT if r else Outcome.WRONG, status="") for r in rewards]
    return score_group(RolloutGroup(request=asked, completions=tuple(completions)), verdicts)


@pytest.fixture
def recorded(tmp_path: Path) -> list[TrainSample]:
    """Return survivors of seven recorded groups, two of them rejected: 5 groups, 19 responses of 1 to 39 tokens."""
    rng = np.random.default_rng(0)
    outcomes = [(1, 0, 0, 1), (1, 1, 1, 1), (0, 1, 0), (0, 0, 0, 0), (1, 0, 1, 1), (0, 1, 0, 0), (1, 0, 0, 0)]
    scored = [_group(draw, rng, [bool(r) for r in rewards]) for draw, rewards in enumerate(outcomes)]
    write_rollouts(tmp_path / "step-000001.parquet", 1, scored)
    again = [score_group(g, s.verdicts) for g, s in zip(read_rollouts(tmp_path), scored, strict=True)]
    kept = reject_zero_advantage(again).kept
    assert len(kept) == 5
    return train_samples([again[i] for i in kept], mask="none")


class SharedRanks:
    """A launcher whose processes serve one learner after the other. Smaller learners use the first of them."""

    def __init__(self) -> None:
        self._group: LocalRanks | None = None

    def start(self, ranks: int, *, timeout: float) -> RankGroup:
        if self._group is None or len(self._group.processes) < ranks:
            self.end()
            # torch's compiler itself takes minutes, so layers are only traced and split:
            # tests/unit/models/test_compiled.py
            traced = {"TORCH_COMPILE_OVERRIDE_BACKENDS": ">=0:eager"}
            environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **traced}
            self._group = cast(LocalRanks, LocalLauncher(environment=environment).start(ranks, timeout=timeout))
        return _First(self._group, ranks)

    def end(self) -> None:
        if self._group is not None:
            self._group.stop()


class _First(LocalRanks):
    """Some of a group's processes, which outlive it."""

    def __init__(self, group: LocalRanks, ranks: int) -> None:
        self._grace = 3.0
        self._pipes = group._pipes[:ranks]
        self.processes = group.processes[:ranks]

    def stop(self) -> None:
        pass


@pytest.fixture(scope="module")
def ranks() -> Iterator[SharedRanks]:
    shared = SharedRanks()
    yield shared
    shared.end()


@pytest.fixture
def untied(untied_folder: Path) -> Callable[[], Any]:
    return lambda: load_policy(untied_folder)


@pytest.fixture
def loaded(start_folder: Path) -> Callable[[], Any]:
    return lambda: load_policy(start_folder)
