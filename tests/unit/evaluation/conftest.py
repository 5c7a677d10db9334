"""Problems in the vocabulary of the tiny models."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import write_lines

ROWS = [{"id": f"p{i}", "problem": f"what is {i % 3} + {i % 2} ?", "answer": i % 3 + i % 2} for i in range(10)]


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    """Return ten problems with one-digit answers. Some have the same prompt."""
    return write_lines(tmp_path / "sums.jsonl", ROWS)


@pytest.fixture(scope="session")
def same_sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same file for objects that are made once."""
    return write_lines(tmp_path_factory.mktemp("sums") / "sums.jsonl", ROWS)
