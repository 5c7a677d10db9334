"""The page of a plan: every section from the plan's JSON object, and rejections with changes that fit."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from magicrl.commands.main import app
from magicrl.commands.plan_page import cost_chart, gpu_chart, memory_views, plan_blocks
from magicrl.reporting.charts import bars_view

ROOT = Path(__file__).resolve().parents[3]
PAPER = str(ROOT / "studies/bases/paper-7b.toml")


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """Return the JSON object and the page of one call."""
    page = tmp_path_factory.mktemp("plan") / "plan.html"
    words = [PAPER, "--gpus", "8", "--gpu", "H800-80G", "--cost-per-gpu-hour", "2.5", "--hours", "24"]
    words += ["--compare", "gpus=16", "--compare", "gpus=1", "--page", str(page), "--json"]
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr("sys.stdout.write", said.append)
        assert app(["plan", *words], result_action="return_value") == 0
    return json.loads("".join(said)), page.read_text()


def test_the_page_says_what_the_json_says(planned: tuple[dict[str, Any], str]) -> None:
    facts, page = planned
    assert "DeepSeek-R1-Distill-Qwen-7B on 8 × H800-80G" in page
    assert f"{facts['cost']:,.2f}" in page
    assert f"{facts['steps_in_budget']} of 1000 steps" in page
    assert "does not fit on 1 x H800-80G" in page, "a refused alternative stands with its reason"
    assert "would make it fit" in page
    titles = [block.title for block in plan_blocks(facts) if block is not None]
    assert titles == ["Plan", "Alternatives", "Memory", "Time of a step", "Effect of changes", "More accelerators"]
    for name in (
        "memory_learner",
        "memory_engine",
        "step_over_gpus",
        "doubling",
        "hours_over_cost",
        "step_by_change",
    ):
        assert f'data-chart="{name}"' in page


def test_memory_is_drawn_against_the_budget(planned: tuple[dict[str, Any], str]) -> None:
    memory = planned[0]["memory_gib"]
    learner = memory_views(planned[0])[0]
    rows = list(csv.reader(io.StringIO(base64.b64decode(learner.csv.partition(",")[2]).decode())))
    assert rows[-1][0] == "together"
    assert float(rows[-1][1]) == pytest.approx(memory["learner_total"], abs=0.02)
    assert [words for _, words in learner.legend] == [f"usable, {memory['budget']:.1f} GiB"]


def test_the_plain_curve_goes_through_both_ends_of_the_sweep(planned: tuple[dict[str, Any], str]) -> None:
    points = [point for point in planned[0]["over_gpus"] if point["step_seconds"] is not None]
    step, rollout, curve = gpu_chart(points).series
    assert curve.points[0][1] == pytest.approx(step.points[0][1])
    assert curve.points[-1][1] == pytest.approx(step.points[-1][1])
    assert all(low <= y <= high for (_, y), (_, low, high) in zip(step.points, step.band, strict=True))
    assert all(r < s for (_, r), (_, s) in zip(rollout.points, step.points, strict=True))


def test_bars_of_a_plan_by_hand() -> None:
    """Steps of 36 and 18 s on 2 and 8 accelerators: 1000 of them take 10 and 5 hours on each accelerator."""
    stage = {"rollout_seconds": 20.0, "learn_seconds": 10.0, "other_seconds": 6.0, "hours_per_1000_steps": 10.0}
    stage |= {"step_seconds": 36.0, "hours": 10.0}
    seconds = {2: 36.0, 8: 18.0}
    facts = {
        "stages": [stage | {"max_tokens": 64}],
        "dtype": "bfloat16",
        "calibration": {"source": "s", "dtype": "bfloat16"},
        "staleness": 0,
        "memory_gib": {"fits": False, "budget": 3.0, "learner": {"a": 2.0, "b": 1.5}, "engine": {"c": 1.0}},
        "over_gpus": [
            {"gpus": gpus, "step_seconds": s, "rollout_seconds": s / 2, "step_seconds_90_percent": (s - 1, s + 1)}
            for gpus, s in seconds.items()
        ],
        "over_gpus_max_tokens": 64,
        "what_if": [
            {"change": "D_R 8", "seconds": 54.0, "ratio": 1.5},
            {"change": "4 accelerators", "seconds": None, "ratio": None},
        ],
    }
    panels = [panel for block in plan_blocks(facts) if block is not None for panel in block.data.get("panels", ())]
    found = {view.name: view for panel in panels for view in panel}

    def bars(name: str) -> dict[str, float]:
        rows = list(csv.reader(io.StringIO(base64.b64decode(found[name].csv.partition(",")[2]).decode())))
        return {row[0]: float(row[1]) for row in rows[1:]}

    assert bars("gpu_hours_by_gpus") == {"2": 20.0, "8": 40.0}
    assert bars("doubling") == {"2 → 8": 0.5}
    assert bars("step_by_change") == {"as planned": 36.0, "D_R 8": 54.0}
    assert "50.0 % (ideal 75.0 %)" in found["doubling"].svg
    assert bars("memory_learner") == {"a": 2.0, "b": 1.5, "together": 3.5}
    assert "The plan does not fit." in found["memory_learner"].note


def test_only_what_nothing_beats_is_on_the_frontier() -> None:
    """Compare three plans: 2 accelerators take longer and cost more than 4. A price scales only one axis."""
    points = [{"gpus": n, "step_seconds": s} for n, s in ((1, 36.0), (2, 30.0), (4, 7.2), (8, 6.84))]
    every, best = cost_chart(points, 2.0).series
    assert len(every.points) == 4
    assert best.points == ((16.0, 2.0), (30.4, 1.9))
    assert cost_chart(points, None).series[1].points == ((8.0, 2.0), (15.2, 1.9))


def test_one_machine_has_no_curve_over_accelerators(planned: tuple[dict[str, Any], str]) -> None:
    facts = planned[0] | {"over_gpus": planned[0]["over_gpus"][:1], "compare": []}
    assert [block.key for block in plan_blocks(facts) if block is not None] == ["plan", "memory", "time", "changes"]


@pytest.mark.parametrize("value", [0.5, 95.0, 99.0, 111.53, 127.0, 127.9, 130.0])
def test_the_line_of_the_limit_goes_through_no_words(value: float) -> None:
    drawing = bars_view("k", "t", "GiB", [("cache", value, f"{value:.2f}")], limit=(127.9, "usable")).svg
    line = float(re.findall(r'class="target" x1="([\d.]+)"', drawing)[0])
    words = float(re.findall(rf'x="([\d.]+)" y="[\d.]+" text-anchor="start">{value:.2f}', drawing)[0])
    assert not words - 2 < line < words + 6.5 * len(f"{value:.2f}")
