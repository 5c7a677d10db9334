"""The scripts for what no CI machine measures run from end to end on tiny sizes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import bench_models
import growth
import pytest
import tensor_memory
import torch
from common import ROOT, put_section


def drawn(monkeypatch: pytest.MonkeyPatch, folder: Path, what: str) -> tuple[dict[str, Any], str]:
    """The JSON and the page."""
    output, page = folder / "growth.json", folder / "performance.md"
    given = [what, "--quick", "--output", str(output), "--page", str(page)]
    monkeypatch.setattr(sys, "argv", [str(ROOT / "benchmarks" / "growth.py"), *given])
    monkeypatch.setattr(bench_models, "MODELS", folder)
    growth.main()
    return json.loads(output.read_text()), page.read_text() if page.exists() else ""


@pytest.mark.benchmark
def test_growth_of_a_learner_writes_its_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, page = drawn(monkeypatch, tmp_path, "learner")
    rows = found["sweeps"]["batch"]
    assert rows[1]["mib_above_state"] >= rows[0]["mib_above_state"] > 0
    assert f"| 8 |  | {rows[1]['response_tokens_per_cpu_s']:.0f} |" in page


@pytest.mark.benchmark
def test_growth_of_a_rollout_writes_points_and_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, page = drawn(monkeypatch, tmp_path, "rollout")
    points = found["points"]
    assert {point["question"] for point in points} == {"rows", "context", "group"}
    assert all(point["decode_tokens_per_cpu_s"] > 0 for point in points)
    assert page.count("\n| ") == 3 + len(points)


def test_a_long_response_tells_what_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = drawn(monkeypatch, tmp_path, "long-response")
    case = found["cases"]["tiny-64"]
    assert case["peak_gib"] > case["before_model_gib"] > 0
    assert case["gradient_norm"] > 0


def test_sections_leave_each_other_alone(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    for name, text in (("learner", "one"), ("rollout", "two"), ("learner", "three")):
        put_section(page, name, [text])
    text = page.read_text()
    assert "one" not in text
    assert text.index("three") < text.index("two")


def test_tensor_memory_counts_what_exists_at_once() -> None:
    def action() -> torch.Tensor:
        first = torch.ones(1 << 18) + 1  # two of 1 MiB, one gone again
        del first
        return torch.ones(1 << 17)

    assert tensor_memory.peak_of(action, "cpu") == 2 << 20
