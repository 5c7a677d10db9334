"""Drawn charts: well-formed, in place, and safe."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from magicrl.reporting.charts import Chart, Mark, Series
from magicrl.reporting.interval_plot import IntervalRow, draw_intervals
from magicrl.reporting.read_folders import Interval
from magicrl.reporting.svg import LEFT, RIGHT, TOP, WIDTH, draw, frame_of, legend_entries

CHART = Chart(
    key="k",
    title="A <title> & more",
    y_low=0.0,
    y_high=1.0,
    target=(0.5, "target"),
    marks=(Mark(x=5.0, label="stage <2>"),),
    series=(
        Series(label="up", points=((1.0, 0.0), (9.0, 1.0)), band=((1.0, 0.0, 0.1), (9.0, 0.9, 1.0))),
        Series(label="raw", points=((1.0, 0.2), (9.0, 0.4)), style="faint"),
        Series(label="limit", points=((1.0, 0.2), (9.0, 0.6)), style="steps", color=4),
    ),
)


def test_a_chart_is_well_formed_both_in_the_page_and_alone() -> None:
    for alone in (False, True):
        root = ElementTree.fromstring(draw(CHART, alone=alone))
        assert root.tag.endswith("svg")
    assert "A &lt;title&gt; &amp; more" in draw(CHART, alone=True)
    assert "stage &lt;2&gt;" in draw(CHART)


def test_points_land_where_the_axes_say() -> None:
    frame, ticks = frame_of(CHART)
    assert (frame.y_low, frame.y_high, ticks[0], ticks[-1]) == (0.0, 1.0, 0.0, 1.0)
    assert frame.x(1.0) == LEFT
    assert frame.x(9.0) == WIDTH - RIGHT
    assert frame.y(0.0) == frame.bottom
    assert frame.y(1.0) == TOP
    assert frame.y(0.25) == pytest.approx(frame.bottom - 0.25 * (frame.bottom - TOP))
    assert f'd="M{LEFT:.1f} {frame.bottom:.1f}L{WIDTH - RIGHT:.1f} {TOP:.1f}"' in draw(CHART)


def test_values_outside_a_fixed_axis_stay_in_the_plot() -> None:
    frame, _ = frame_of(CHART)
    assert frame.y(7.0) == TOP
    assert frame.y(-7.0) == frame.bottom


def test_limits_are_drawn_as_steps_and_raw_values_have_no_legend() -> None:
    frame, _ = frame_of(CHART)
    assert f"H{frame.x(9.0):.1f}L{frame.x(9.0):.1f} {frame.y(0.6):.1f}" in draw(CHART)
    assert [s.label for s in legend_entries(CHART)] == ["up", "limit"]


@pytest.mark.parametrize("ys", [(), (0.3,), (0.0, 0.0, 0.0), (1e-9, 2e-9), (1e12, -1e12)])
def test_odd_data_draw_without_error(ys: tuple[float, ...]) -> None:
    series = Series(label="x", points=tuple((float(i), y) for i, y in enumerate(ys)))
    drawn = draw(Chart(key="k", title="t", series=(series,)))
    ElementTree.fromstring(drawn)
    assert "nan" not in drawn
    assert "inf" not in drawn


def test_stacked_areas_reach_up_to_their_sum() -> None:
    chart = Chart(
        key="k",
        title="t",
        y_low=0.0,
        stacked=True,
        series=tuple(Series(label=n, points=((1.0, 2.0), (2.0, 2.0)), color=i) for i, n in enumerate("abc")),
    )
    frame, _ = frame_of(chart)
    assert frame.y_high >= 6.0
    tops = {float(m) for m in re.findall(r'class="area f\d" d="M[\d.]+ ([\d.]+)', draw(chart))}
    assert tops == {round(frame.y(v), 1) for v in (2.0, 4.0, 6.0)}


def test_intervals_are_drawn_with_their_ends() -> None:
    rows = [IntervalRow(label="0 <greedy>", before=Interval(mean=0.0, low=0.0, high=0.5), after=None)]
    drawn = draw_intervals(rows, best=0.5)
    ElementTree.fromstring(drawn)
    whisker = re.search(r'class="whisker s4" x1="([\d.]+)" x2="([\d.]+)"', drawn)
    target = re.search(r'class="target" x1="([\d.]+)"', drawn)
    assert whisker is not None
    assert target is not None
    assert whisker.group(2) == target.group(1), "both stand at one half"
    assert "0 &lt;greedy&gt;" in drawn
