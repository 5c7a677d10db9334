"""When `make bench-check` fails, and that each part of it measures."""

from __future__ import annotations

from pathlib import Path

import bench_check
import bench_models
import head_speed
import pytest


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [
        ((2.0, 2.02, 1.98), "ok"),
        ((1.72, 1.71, 1.73), "ok"),  # 14 % below: within what two runs of one commit differ by
        ((1.68, 1.67, 1.69), "slower"),
        ((1.6, 1.9, 1.4), "ok"),  # 20 % below the committed ratio, but its own repetitions spread as much
        ((4.0, 1.0, 0.4), "too noisy"),
        ((3.0, 3.0, 3.0), "ok"),
    ],
)
def test_a_ratio_fails_beyond_its_noise(measured: tuple[float, ...], verdict: str) -> None:
    assert bench_check.Outcome(name="x", committed=2.0, measured=measured).verdict == verdict


@pytest.mark.benchmark
def test_every_part_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_models, "MODELS", tmp_path)
    assert len(bench_check.head_ratios(head_speed.CASES["quick"][0], 2)) == 2
    assert min(bench_check.rollout_ratios(bench_check.rollout_speed.QUICK[0], 2)) > 0
    assert min(bench_check.learner_ratios(bench_check.learner_speed.QUICK[0], 2)) > 0


def test_a_missing_figure_says_what_writes_it() -> None:
    with pytest.raises(SystemExit, match="make bench"):
        bench_check.committed("head", "no such case")
