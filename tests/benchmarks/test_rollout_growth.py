"""The script that measures how a rollout's cost grows runs from end to end on a tiny model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import bench_models
import pytest
import rollout_growth
from measure import ROOT


def test_growth_writes_points_picture_and_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_models, "MODELS", tmp_path)
    output, page = tmp_path / "growth.json", tmp_path / "performance.md"
    script = str(ROOT / "benchmarks" / "rollout_growth.py")
    monkeypatch.setattr(sys, "argv", [script, "--quick", "--output", str(output), "--page", str(page)])
    rollout_growth.main()
    points = json.loads(output.read_text())["points"]
    assert {point["question"] for point in points} == {"rows", "context", "group"}
    assert all(point["decode_tokens_per_cpu_s"] > 0 for point in points)
    circles = ElementTree.parse(tmp_path / "growth.svg").findall(".//{*}circle")
    assert len(circles) == 2 + 2 * 2 + 2 * 2
    assert "(growth.svg)" in page.read_text()
