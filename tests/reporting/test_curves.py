"""Curves of arms: means over the same runs, bands, x axes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from magicrl.reporting.arms import Arm, group_runs
from magicrl.reporting.curves import (
    COMPARED,
    MOST_POINTS,
    Compared,
    ComparedChart,
    arm_axes,
    arm_curve,
    axis_scale,
    compared_charts,
    evenly,
    positions,
    totals,
)
from magicrl.reporting.read_folders import read_run

from .conftest import write_arm

FIGURES = {figure.key: figure for group in COMPARED for figure in group.figures}


def compared_chart(arms: Sequence[Arm], figure: Compared) -> ComparedChart | None:
    return next(iter(compared_charts(arms, [figure], arm_axes(arms))), None)


def test_the_mean_is_over_the_same_runs_at_every_step_and_longer_ones_go_on_alone() -> None:
    short = ((1.0, 0.0), (2.0, 0.2))
    long = ((1.0, 1.0), (2.0, 0.6), (3.0, 0.9), (4.0, 1.0))
    curve = arm_curve([short, (), long])
    assert [(p.step, p.mean, p.low, p.high, p.runs) for p in curve.points] == [
        (1.0, 0.5, 0.0, 1.0, 2),
        (2.0, 0.4, 0.2, 0.6, 2),
    ]
    assert curve.tails == ((2, ((2.0, 0.6), (3.0, 0.9), (4.0, 1.0))),)


def test_steps_that_a_run_lacks_are_left_out_not_guessed() -> None:
    curve = arm_curve([((1.0, 1.0), (3.0, 3.0)), ((1.0, 1.0), (2.0, 5.0), (3.0, 3.0))])
    assert [p.step for p in curve.points] == [1.0, 3.0]


def test_runs_without_a_common_step_are_drawn_alone() -> None:
    curve = arm_curve([((1.0, 1.0), (2.0, 2.0)), ((5.0, 5.0), (6.0, 6.0))])
    assert curve.points == ()
    assert [run for run, _ in curve.tails] == [0, 1]


def test_long_curves_keep_their_ends() -> None:
    picked = evenly([float(i) for i in range(5000)], MOST_POINTS)
    assert (len(picked), picked[0], picked[-1]) == (MOST_POINTS, 0.0, 4999.0)


def test_axes_count_tokens_seconds_and_device_hours(arm_folders: list[Path]) -> None:
    path = arm_folders[0] / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"devices": 8}))
    run = read_run(arm_folders[0])
    assert positions(run, "steps")[40.0] == 40
    assert positions(run, "tokens")[2.0] == 640
    assert positions(run, "wall")[4.0] == pytest.approx(7.0)
    assert positions(run, "gpu-hours")[40.0] == pytest.approx(40 * 1.75 * 8 / 3600)
    assert totals(run)["wall"] == pytest.approx(70.0)


def test_a_sum_with_gaps_is_no_axis(tmp_path: Path) -> None:
    whole, gap = (write_arm(tmp_path / str(seed), seed) for seed in (0, 1))
    rows = (gap / "metrics.jsonl").read_text().splitlines()
    row = json.loads(rows[3])
    row["values"]["tokens/sampled"] = None
    (gap / "metrics.jsonl").write_text("\n".join([*rows[:3], json.dumps(row), *rows[4:]]) + "\n")
    axes = arm_axes(group_runs([read_run(whole), read_run(gap)]))
    assert axes.arms["tokens"] == [{}]
    assert len(axes.arms["wall"][0]) == 40


@pytest.mark.parametrize(
    ("axis", "largest", "name"),
    [
        ("tokens", 3e9, "billion response tokens sampled"),
        ("tokens", 1500.0, "response tokens sampled"),
        ("wall", 8000.0, "hours of training steps"),
        ("gpu-hours", 3.0, "device hours"),
        ("gpu-hours", 0.01, "device seconds"),
    ],
)
def test_an_axis_has_a_readable_unit(axis: str, largest: float, name: str) -> None:
    scale = axis_scale(axis, largest)  # type: ignore[arg-type]
    assert scale.name == name
    assert largest / scale.divisor >= 2


def test_a_chart_has_an_arm_a_line_with_its_band_over_every_axis(arm_folders: list[Path]) -> None:
    arms = group_runs([read_run(folder) for folder in arm_folders])
    compared = compared_chart(arms, FIGURES["truncation"])
    assert compared is not None
    assert list(compared.charts) == ["steps", "tokens", "wall", "gpu-hours"]
    ratio = compared_chart(arms, FIGURES["ratio_max"])
    assert ratio is not None
    lines = ratio.charts["tokens"].series
    assert [line.label for line in lines] == ["loss magic", "loss ppo"]
    assert lines[0].band[0] == pytest.approx((0.32, 1.0, 1.1))
    assert lines[0].points[-1] == pytest.approx((12.8, 1.05))
    assert ratio.charts["steps"].marks[0].label == "stage 2: T = 64"


def test_metrics_that_only_one_arm_has_are_shown_of_that_arm(tmp_path: Path) -> None:
    folders = [
        write_arm(tmp_path / "a", 0, without=("learner/ratio_max",)),
        write_arm(tmp_path / "b", 0, loss="ppo"),
    ]
    arms = group_runs([read_run(folder) for folder in folders])
    compared = compared_chart(arms, FIGURES["ratio_max"])
    assert compared is not None
    assert [len(curve.points) for curve in compared.curves] == [0, 40]
    assert compared_chart(arms, FIGURES["kl"]) is None
