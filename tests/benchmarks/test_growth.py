"""The scripts for what no CI machine measures run from end to end on tiny sizes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import bench_models
import learner_growth
import pytest
import rollout_growth
import tensor_memory
import torch
from measure import ROOT
from page_sections import put_section


def test_growth_of_a_learner_writes_its_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, page = tmp_path / "growth.json", tmp_path / "performance.md"
    script = str(ROOT / "benchmarks" / "learner_growth.py")
    monkeypatch.setattr(sys, "argv", [script, "--quick", "--output", str(output), "--page", str(page)])
    learner_growth.main()
    rows = json.loads(output.read_text())["sweeps"]["batch"]
    assert rows[1]["mib_above_state"] >= rows[0]["mib_above_state"] > 0
    assert f"| 8 |  | {rows[1]['response_tokens_per_cpu_s']:.0f} |" in page.read_text()


def test_growth_of_a_rollout_writes_points_and_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_models, "MODELS", tmp_path)
    output, page = tmp_path / "growth.json", tmp_path / "performance.md"
    script = str(ROOT / "benchmarks" / "rollout_growth.py")
    monkeypatch.setattr(sys, "argv", [script, "--quick", "--output", str(output), "--page", str(page)])
    rollout_growth.main()
    points = json.loads(output.read_text())["points"]
    assert {point["question"] for point in points} == {"rows", "context", "group"}
    assert all(point["decode_tokens_per_cpu_s"] > 0 for point in points)
    assert page.read_text().count("\n| ") == 3 + len(points)


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
