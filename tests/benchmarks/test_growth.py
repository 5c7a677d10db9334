"""The scripts for what no CI machine measures run from end to end on tiny sizes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import learner_growth
import pytest
import tensor_memory
import torch
from measure import ROOT
from page_sections import put_section


def test_growth_writes_its_section_and_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, page = tmp_path / "growth.json", tmp_path / "performance.md"
    script = str(ROOT / "benchmarks" / "learner_growth.py")
    monkeypatch.setattr(sys, "argv", [script, "--quick", "--output", str(output), "--page", str(page)])
    learner_growth.main()
    rows = json.loads(output.read_text())["sweeps"]["batch"]
    assert rows[1]["mib_above_state"] >= rows[0]["mib_above_state"] > 0
    pictures = sorted(path.name for path in tmp_path.glob("*.svg"))
    assert pictures == ["growth-learner-batch-memory.svg", "growth-learner-batch-rate.svg"]
    assert all(name in page.read_text() for name in pictures)


def test_sections_leave_each_other_alone(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    for name, text in (("learner", "one"), ("rollout", "two"), ("learner", "three")):
        put_section(page, name, text)
    text = page.read_text()
    assert "one" not in text
    assert text.index("three") < text.index("two")


def test_tensor_memory_counts_what_exists_at_once() -> None:
    def action() -> torch.Tensor:
        first = torch.ones(1 << 18) + 1  # two of 1 MiB, one gone again
        del first
        return torch.ones(1 << 17)

    assert tensor_memory.peak_of(action, "cpu") == 2 << 20
