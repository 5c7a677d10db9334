"""A tiny model of random weights in a folder, and problems in its words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from magicrl.config.schema import TinyModelConfig
from magicrl.models.loading import save_policy
from magicrl.models.small_models import make_tiny

WORDS = ("what", "is", "0", "1", "2", "3", "4", "+", "?")


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two folders with models of one architecture and different random weights."""
    root = tmp_path_factory.mktemp("models")
    config = TinyModelConfig(hidden_size=32, layers=1, heads=2, intermediate_size=64, max_context=96)
    for seed in (0, 1):
        model, tokenizer = make_tiny(config, WORDS, seed)
        save_policy(model, tokenizer, root / str(seed))
    return root / "0", root / "1"


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    """Ten problems with one-digit answers."""
    rows = [{"id": f"p{i}", "problem": f"what is {i % 3} + {i % 2} ?", "answer": i % 3 + i % 2} for i in range(10)]
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
