"""The fit: planted unknowns are recovered, and the shipped calibration predicts the documented figures."""

from __future__ import annotations

import json
from dataclasses import replace
from math import exp, log
from pathlib import Path

import pytest
from published import UNKNOWNS, curve, fit, predict, rows

from magicrl.planning.costs import Efficiency, load_calibration

FIGURES = json.loads((Path(__file__).resolve().parents[3] / "benchmarks/results/plan-published.json").read_text())


def test_planted_unknowns_come_back() -> None:
    truth = Efficiency(kv=0.25, step_overhead=0.007, learner=0.4, other=0.02)
    planted = [replace(row, seconds=predict(row, truth)) for row in rows() if row.fitted]
    found = fit(planted)
    for name in UNKNOWNS:
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.02)
    with pytest.raises(ValueError, match="4 unknowns need as many rows"):
        fit(planted[:3])


def test_shipped_calibration_gives_the_committed_figures() -> None:
    calibration = load_calibration("H800-80G", 3584)
    assert calibration.name == "published"
    for row, line in zip(rows(), FIGURES["rows"], strict=True):
        assert line["row"] == row.name
        assert predict(row, calibration) == pytest.approx(line["predicted_seconds"], rel=0.005)
    # documented claims about rows that nothing was fitted on
    middle = [line for line in FIGURES["rows"] if line["row"] in ("T9 64 GPUs", "T9 128 GPUs")]
    assert all(abs(line["error"]) < 0.03 and not line["fitted"] for line in middle)


def test_plain_curve_goes_through_both_points() -> None:
    a, b = curve([(32, 375.0), (256, 205.0)])
    assert a + b / 32 == pytest.approx(375)
    assert a + b / 256 == pytest.approx(205)


def test_the_page_quotes_the_committed_figures() -> None:
    root = Path(__file__).resolve().parents[3]
    page = (root / "docs/guides/planning.md").read_text()
    lines = {line["row"]: line for line in FIGURES["rows"]}
    for gpus in (32, 64, 128, 256):
        line = lines[f"T9 {gpus} GPUs"]
        assert (
            f"| {line['published_seconds']:.0f} | {line['predicted_seconds']:.0f} | {100 * line['error']:+.1f} %"
            in page
        )
    measured = json.loads((root / "benchmarks/results/plan-cpu.json").read_text())
    for name in ("quickstart", "smollm2"):
        step = measured[name]["later_stages_predicted"]["step"]
        assert f"| {step['measured_seconds']:.3g} s | {step['predicted_seconds']:.3g} s |" in page


def test_the_shipped_factor_is_that_of_the_held_out_steps() -> None:
    told = json.loads((Path(__file__).resolve().parents[3] / "benchmarks/results/plan-held-out.json").read_text())
    shipped = load_calibration("H100-80G", 3584)
    assert shipped.factor == told["factor"]
    assert shipped.factor_from.startswith(f"{told['steps']} published steps")
    steps = [row for row in told["rows"] if row.get("setting", {}).get("part") == "step"]
    logs = [log(row["planned_seconds"] / row["published_seconds"]) for row in steps]
    # nine of ten new steps should be within it; for so few rows that is the largest residual
    assert exp(max(map(abs, logs))) == pytest.approx(told["factor"], rel=1e-3)
    assert all(row["flops_bound_seconds"] < min(row["planned_seconds"], row["published_seconds"]) for row in steps)
