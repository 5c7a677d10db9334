"""Values of each figure; means over the same runs, bands, x axes."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from magicrl.reporting.charts import Chart, Series, chart_view, draw, evenly, legend
from magicrl.reporting.curves import (
    METRICS,
    MOST_POINTS,
    ComparedChart,
    Metric,
    axis_scale,
    compared_charts,
    figure_groups,
    positions,
    variant_axes,
    variant_curve,
)
from magicrl.reporting.read_folders import read_run
from magicrl.reporting.variants import Variant, group_runs

from .conftest import write_variant


def rewrite(folder: Path, **changes: Any) -> None:
    """Change metrics (``area__name``) of every step."""
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["values"] |= {key.replace("__", "/"): value for key, value in changes.items()}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def charts(folder: Path) -> dict[str, Chart]:
    return {c.key: c for _, panels, _ in figure_groups(read_run(folder)) for panel in panels for c in panel}


def labels(chart: Chart) -> list[str]:
    return [entry.label for entry in legend(chart)]


def test_keys_of_figures_are_unique_since_they_name_the_exports() -> None:
    keys = [figure.key for group in METRICS for panel in group.panels for figure in panel]
    assert len(keys) == len(set(keys))
    compared = [metric.compared for group in METRICS for metric in group.metrics if metric.compared]
    assert len(compared) == len(set(compared))


def test_every_metric_of_the_table_is_drawn_and_every_figure_has_metrics_of_one_unit() -> None:
    for group in METRICS:
        figures = [figure for panel in group.panels for figure in panel]
        assert {m.figure for m in group.metrics if m.figure} == {figure.key for figure in figures}
        for figure in figures:
            lines = [m for m in group.metrics if m.figure == figure.key]
            assert len({m.unit for m in lines}) == 1, figure.key
            assert figure.title or lines[0].title, figure.key
        for metric in group.metrics:
            assert metric.figure or metric.compared, metric.key
            assert not metric.compared or (metric.title and metric.note), metric.key
            assert not metric.figure or metric.label, metric.key


def test_the_test_stands_in_the_accuracy_figure_before_and_after(run_folder: Path) -> None:
    test = charts(run_folder)["accuracy"].series[-1]
    assert (test.label, test.style) == ("test at temperature 1", "marks")
    assert test.points == ((0.0, 0.46), (40.0, 0.90))
    assert [(round(low, 2), round(high, 2)) for _, low, high in test.band] == [(0.43, 0.49), (0.87, 0.93)]
    assert {c.x_range for c in charts(run_folder).values()} == {(0.0, 40.0)}, "one x axis for all"
    assert 'class="thin s3"' in draw(charts(run_folder)["accuracy"])


def test_the_main_test_is_the_recipe_s_first(run_folder: Path) -> None:
    other = json.loads((run_folder / "evaluations" / "after.json").read_text()) | {"set": "a_later_set"}
    (run_folder / "evaluations" / "aaa.json").write_text(json.dumps(other))
    assert read_run(run_folder).sets == ("a_later_set", "test"), "no recipe: in the order of the files"
    config = (run_folder / "config.toml").read_text()
    (run_folder / "config.toml").write_text(config + "[data.test.test]\n[data.test.a_later_set]\n")
    assert read_run(run_folder).sets == ("test", "a_later_set")


def test_every_step_figure_has_the_stage_marks(run_folder: Path) -> None:
    for chart in charts(run_folder).values():
        assert [x for x, _ in chart.marks] == [21.0]
        assert "stage 2: T = 64" in draw(chart)


def test_filtered_accuracy_is_shown_only_where_it_differs(run_folder: Path) -> None:
    assert "train, filtered prompts as solved" not in labels(charts(run_folder)["accuracy"])
    rewrite(run_folder, train__accuracy_unfiltered__mean=0.99)
    assert "train, filtered prompts as solved" in labels(charts(run_folder)["accuracy"])


def test_groups_become_shares_and_zeros_are_left_out(run_folder: Path) -> None:
    rejected = charts(run_folder)["rejected"]
    assert labels(rejected) == ["equal rewards, not all right", "all responses right"]
    assert rejected.series[1].points[0] == (1.0, 0.25)
    rewrite(run_folder, train__not_judged__ratio=0.1, groups__refilled=0)
    assert labels(charts(run_folder)["truncation"]) == ["truncated", "not judged"]
    assert "refilled" not in charts(run_folder)
    rewrite(run_folder, groups__refilled=4)
    assert charts(run_folder)["refilled"].series[0].points[0] == (1.0, 4.0)
    assert "turns" not in charts(run_folder), "no environment took part"
    rewrite(run_folder, environment__turns=2.5)
    assert charts(run_folder)["turns"].series[0].points[0] == (1.0, 2.5)


def test_the_ratio_has_its_band_and_validation_its_error(run_folder: Path) -> None:
    rewrite(
        run_folder,
        learner__ratio_mean=1.0, learner__ratio_min=0.5, learner__ratio_max=2.0,
        validation__accuracy__mean=0.99, validation__accuracy__standard_error=0.1,
    )  # fmt: skip
    found = charts(run_folder)
    assert found["ratio"].series[0].band[0] == (1.0, 0.5, 2.0)
    validation = next(s for s in found["accuracy"].series if s.label == "validation")
    assert validation.band[0] == (1.0, pytest.approx(0.99 - 0.1959964), 1.0)


def test_entropy_has_a_target_only_where_the_run_has_one(run_folder: Path) -> None:
    assert charts(run_folder)["entropy"].note.endswith("on at or below the target.")
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        del row["values"]["entropy/target"]
    (run_folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chart = charts(run_folder)["entropy"]
    assert chart.title == "Entropy"
    assert "target" not in chart.note


def test_figures_that_say_nothing_are_left_out_and_a_line_says_why(run_folder: Path) -> None:
    on_policy: dict[str, Any] = {f"learner__ratio_{which}": 1.0 for which in ("mean", "min", "max")}
    rewrite(run_folder, **on_policy, learner__clip_ratio=0.0, learner__grad_norm=2.0, entropy__alpha=0.0)
    assert not {"ratio", "clip"} & charts(run_folder).keys()
    notes = {group.key: note for group, _, note in figure_groups(read_run(run_folder))}
    assert "ρ is exactly 1" in notes["policy"]
    assert "alpha" not in charts(run_folder) or "α, in the loss" not in labels(charts(run_folder)["alpha"])
    rewrite(run_folder, learner__ratio_max=1.5)
    assert "ratio" in charts(run_folder), "one token off is worth a look"
    assert {group.key: note for group, _, note in figure_groups(read_run(run_folder))}["policy"] == ""


def test_lines_of_a_figure_differ_in_dash_as_well_as_in_colour(run_folder: Path) -> None:
    entries = [e for e in legend(charts(run_folder)["accuracy"]) if e.sign == "line"]
    assert len({e.dash for e in entries}) == len({e.color for e in entries}) == len(entries) == 2
    assert entries[0].label == "train"
    assert entries[0].dash == 0, "the main line is solid"


def test_labels_of_crowded_marks_give_way() -> None:
    marks = tuple((float(x), f"stage {x}: T = 1024") for x in (2, 20, 24, 28, 90, 99))
    line = Series(label="x", points=((0.0, 0.0), (100.0, 1.0)))
    drawn = draw(Chart(key="k", title="t", series=(line,), marks=marks, x_range=(0.0, 100.0)))
    told = re.findall(r'<text class="tick" x="([\d.]+)" y="14" text-anchor="(\w+)">([^<]+)<', drawn)
    ends = sorted(
        (float(x), float(x) + 8 * len(t)) if anchor == "start" else (float(x) - 8 * len(t), float(x))
        for x, anchor, t in told
    )
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends)), told
    assert ends[-1][1] <= 460
    assert drawn.count('class="mark"') == 6
    assert "stage 28: T = 1024" in {t for _, _, t in told}
    assert len(told) < 6, "a line without room has no label"


def test_each_figure_has_its_values_in_words(run_folder: Path) -> None:
    head, *rows = chart_view(charts(run_folder)["accuracy"]).table
    assert head == ("step", "train", "train, not truncated", "test at temperature 1")
    assert rows[0] == ("0", "–", "–", "46.0 %")
    assert rows[-1][0] == "40"
    assert len(rows) == 12


FIGURES = {metric.compared: metric for group in METRICS for metric in group.metrics}


def compared_chart(variants: Sequence[Variant], figure: Metric) -> ComparedChart | None:
    return next(iter(compared_charts(variants, [figure], variant_axes(variants))), None)


def test_the_mean_is_over_the_same_runs_at_every_step_and_longer_ones_go_on_alone() -> None:
    short = ((1.0, 0.0), (2.0, 0.2))
    long = ((1.0, 1.0), (2.0, 0.6), (3.0, 0.9), (4.0, 1.0))
    points, tails = variant_curve([short, (), long])
    assert points == [
        (1.0, 0.5, 0.0, 1.0, 2),
        (2.0, 0.4, 0.2, 0.6, 2),
    ]
    assert tails == [(2, ((2.0, 0.6), (3.0, 0.9), (4.0, 1.0)))]
    lacking, _ = variant_curve([((1.0, 1.0), (3.0, 3.0)), ((1.0, 1.0), (2.0, 5.0), (3.0, 3.0))])
    assert [step for step, *_ in lacking] == [1.0, 3.0], "a step that a run lacks is not guessed"
    points, tails = variant_curve([((1.0, 1.0), (2.0, 2.0)), ((5.0, 5.0), (6.0, 6.0))])
    assert (points, [run for run, _ in tails]) == ([], [0, 1])


def test_long_curves_keep_their_ends() -> None:
    picked = evenly([float(i) for i in range(5000)], MOST_POINTS)
    assert (len(picked), picked[0], picked[-1]) == (MOST_POINTS, 0.0, 4999.0)


def test_axes_count_tokens_seconds_and_device_hours(variant_folders: list[Path]) -> None:
    path = variant_folders[0] / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"devices": 8}))
    run = read_run(variant_folders[0])
    assert positions(run, "steps")[40.0] == 40
    assert positions(run, "tokens")[2.0] == 640
    assert positions(run, "wall")[4.0] == pytest.approx(7.0)
    assert positions(run, "gpu-hours")[40.0] == pytest.approx(40 * 1.75 * 8 / 3600)
    assert positions(run, "wall")[40.0] == pytest.approx(70.0)


def test_a_sum_with_gaps_is_no_axis(tmp_path: Path) -> None:
    whole, gap = (write_variant(tmp_path / str(seed), seed) for seed in (0, 1))
    rows = (gap / "metrics.jsonl").read_text().splitlines()
    row = json.loads(rows[3])
    row["values"]["tokens/sampled"] = None
    (gap / "metrics.jsonl").write_text("\n".join([*rows[:3], json.dumps(row), *rows[4:]]) + "\n")
    young = write_variant(tmp_path / "2", 2, steps=0)
    axes = variant_axes(group_runs([read_run(folder) for folder in (whole, gap, young)]))
    assert axes.variants["tokens"] == [{}]
    assert len(axes.variants["wall"][0]) == 40
    assert axes.variants["wall"][0][40.0] == axes.runs["wall"][0][0][40.0], "a run that has not begun moves nothing"


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
    name_found, divisor = axis_scale(axis, largest)  # type: ignore[arg-type]
    assert name_found == name
    assert largest / divisor >= 2


def test_a_chart_has_an_variant_a_line_with_its_band_over_every_axis(variant_folders: list[Path]) -> None:
    variants = group_runs([read_run(folder) for folder in variant_folders])
    compared = compared_chart(variants, FIGURES["truncation"])
    assert compared is not None
    assert list(compared[2]) == ["steps", "tokens", "wall", "gpu-hours"]
    assert compared[2]["steps"].note.endswith("Lower is better.")
    ratio = compared_chart(variants, FIGURES["ratio_max"])
    assert ratio is not None
    lines = ratio[2]["tokens"].series
    assert [line.label for line in lines] == ["loss magic", "loss ppo"]
    assert lines[0].band[0] == pytest.approx((0.32, 1.0, 1.1))
    assert lines[0].points[-1] == pytest.approx((12.8, 1.05))
    assert ratio[2]["steps"].marks[0][1] == "stage 2: T = 64"


def test_a_compared_curve_jumps_where_a_stage_began(variant_folders: list[Path]) -> None:
    for folder in variant_folders:
        path = folder / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            row["values"]["train/truncation/ratio"] = float(row["stage"])
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    compared = compared_chart(group_runs([read_run(folder) for folder in variant_folders]), FIGURES["truncation"])
    assert compared is not None
    assert [mean for _, mean, *_ in compared[1][0][0]] == [0.0] * 20 + [1.0] * 20


def test_metrics_that_only_one_variant_has_are_shown_of_that_variant(tmp_path: Path) -> None:
    folders = [
        write_variant(tmp_path / "a", 0, without=("learner/ratio_max",)),
        write_variant(tmp_path / "b", 0, loss="ppo"),
    ]
    variants = group_runs([read_run(folder) for folder in folders])
    compared = compared_chart(variants, FIGURES["ratio_max"])
    assert compared is not None
    assert [len(points) for points, _ in compared[1]] == [0, 40]
    assert compared_chart(variants, FIGURES["kl"]) is None


def test_each_of_several_rewards_is_a_line(run_folder: Path) -> None:
    assert "rewards" not in charts(run_folder)
    parts: dict[str, Any] = {"reward/maths/mean": 0.5, "reward/brief/mean": 0.25, "reward/brief/digits": 3.0}
    failed: dict[str, Any] = {"reward/maths/not_judged/ratio": 0.0, "reward/brief/not_judged/ratio": 0.5}
    rewrite(run_folder, **{key.replace("/", "__"): value for key, value in (parts | failed).items()})
    assert labels(charts(run_folder)["rewards"]) == ["maths", "brief"]
    assert labels(charts(run_folder)["rewards_not_judged"]) == ["brief"]


def test_graded_rewards_have_a_figure_of_their_own(run_folder: Path, variant_folders: list[Path]) -> None:
    step = json.loads((run_folder / "metrics.jsonl").read_text().splitlines()[4])
    rewrite(run_folder, train__reward__mean=step["values"]["train/accuracy/mean"])
    rewrite(run_folder, train__accuracy__mean=step["values"]["train/accuracy/mean"])
    assert "reward" not in charts(run_folder), "of right and wrong alone it is the accuracy"
    graded: dict[str, Any] = {"train__reward__mean": -0.5, "validation__reward__mean": 1.5}
    rewrite(run_folder, **graded, validation__reward__standard_error=0.1)
    chart = charts(run_folder)["reward"]
    assert labels(chart) == ["train", "validation"]
    assert chart.series[-1].band[0] == (1.0, pytest.approx(1.5 - 0.1959964), pytest.approx(1.5 + 0.1959964))
    for folder in variant_folders:
        rewrite(folder, **graded)
    variants = group_runs([read_run(folder) for folder in variant_folders])
    assert compared_chart(variants, FIGURES["reward"]) is not None
