"""The headline's figure: its axis, its rows and its export."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

from magicrl.reporting.interval_plot import IntervalRow, draw_intervals, intervals_csv, intervals_legend
from magicrl.reporting.read_folders import Interval, read_run
from magicrl.reporting.scores import comparisons, interval_rows, intervals_view


def interval(low: float, mean: float, high: float) -> Interval:
    return Interval(mean=mean, low=low, high=high)


def test_the_axis_begins_at_zero_and_ends_above_the_highest_interval() -> None:
    low = draw_intervals([IntervalRow(label="1", before=interval(0.01, 0.02, 0.08), after=None)], None)
    assert re.findall(r">([\d.]+%)<", low) == ["0%", "2%", "4%", "6%", "8%"]
    high = draw_intervals([IntervalRow(label="1", before=interval(0.2, 0.9, 0.97), after=None)], None)
    assert re.findall(r">([\d.]+%)<", high)[-1] == "100%"


def test_pass_at_k_stands_apart_below_the_temperatures(run_folder: Path) -> None:
    rows = interval_rows(comparisons(read_run(run_folder))[0])
    assert [(row.label, row.apart) for row in rows] == [
        ("0 (greedy)", False), ("0.6", False), ("1", False), ("pass@16", True),
    ]  # fmt: skip
    drawn = draw_intervals(rows, 0.47)
    target = re.search(r'class="target"[^>]* y2="(\d+)"', drawn)
    rule = re.search(r'class="axis"[^>]* y1="(\d+)"', drawn)
    assert target is not None
    assert rule is not None
    assert target.group(1) == rule.group(1), "the start's best accuracy is no pass@k"


def test_the_export_holds_every_interval_and_the_sentence_every_mean(run_folder: Path) -> None:
    (comparison,) = comparisons(read_run(run_folder))
    rows = list(csv.DictReader(io.StringIO(intervals_csv(interval_rows(comparison)))))
    assert [row["row"] for row in rows] == ["0 (greedy)", "0.6", "1", "pass@16"]
    assert (float(rows[1]["before"]), float(rows[1]["after, high"])) == (0.47, 0.97)
    assert "0.6: 47.0 % before, 94.0 % after" in intervals_view("test", comparison).svg


def test_the_legend_names_only_what_is_there() -> None:
    row = IntervalRow(label="1", before=interval(0.1, 0.2, 0.3), after=None)
    assert [entry.label for entry in intervals_legend([row], None)] == ["before"]
