"""Colours that everybody can read and distinguish; charts that are well-formed, aligned and safe; values by hand."""

from __future__ import annotations

import base64
import csv
import io
import itertools
import math
import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from xml.etree import ElementTree

import pytest

from magicrl.evaluation.statistics import Interval
from magicrl.reporting.charts import (
    DARK_PALETTE,
    DASHES,
    LEFT,
    PALETTE,
    RIGHT,
    TOP,
    WIDTH,
    Chart,
    IntervalRow,
    LegendEntry,
    PlotArea,
    Points,
    Series,
    bars_view,
    draw,
    file_css,
    intervals_view,
    legend,
    nice_ticks,
    page_css,
    picture_file,
    stacked,
    thinned,
    to_csv,
)
from magicrl.reporting.curves import running_mean, smoothing_window, with_running_mean
from magicrl.reporting.read_folders import read_run
from magicrl.reporting.scores import comparisons, headline, interval_rows

Triple = tuple[float, float, float]

# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
SEEN: dict[str, tuple[Triple, Triple, Triple]] = {
    "all colours": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900),
    ),
}  # fmt: skip


def linear(colour: str) -> list[float]:
    digits = colour.lstrip("#")
    digits = "".join(c * 2 for c in digits) if len(digits) == 3 else digits
    values = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    return [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]


def luminance(colour: str) -> float:
    red, green, blue = linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(a: str, b: str) -> float:
    """Return the contrast by WCAG 2."""
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def lab(colour: str, kind: str) -> Triple:
    rgb = linear(colour)
    r, g, b = (min(1.0, max(0.0, sum(m * v for m, v in zip(row, rgb, strict=True)))) for row in SEEN[kind])
    xyz = (
        (0.4124564 * r + 0.3575761 * g + 0.1804375 * b) / 0.95047,
        0.2126729 * r + 0.7151522 * g + 0.0721750 * b,
        (0.0193339 * r + 0.1191920 * g + 0.9503041 * b) / 1.08883,
    )
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("kind", SEEN)
@pytest.mark.parametrize("palette", [PALETTE, DARK_PALETTE], ids=["light", "dark"])
def test_any_two_series_are_told_apart(palette: tuple[str, ...], kind: str) -> None:
    for a, b in itertools.combinations(palette, 2):
        assert math.dist(lab(a, kind), lab(b, kind)) > 20, (a, b)


def test_each_line_of_a_drawing_has_its_own_dash() -> None:
    assert len(set(DASHES)) == len(DASHES) >= len(PALETTE)


def variables(scheme: str) -> dict[str, str]:
    """Return the page's colours in ``light``, ``dark`` or ``print``."""
    css = files("magicrl.reporting").joinpath("templates", "page.css").read_text(encoding="utf-8")
    parts = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    found = dict(re.findall(r"--(\w+): (#\w+)", parts[0]))
    if scheme != "light":
        found |= dict(re.findall(r"--(\w+): (#\w+)", parts[1 if scheme == "dark" else 2]))
    return found


@pytest.mark.parametrize("scheme", ["light", "dark", "print"])
def test_text_has_enough_contrast_on_every_ground(scheme: str) -> None:
    colours = variables(scheme)
    for text, ground in itertools.product(
        ("ink", "soft", "muted", "good", "bad", "warn", "accent"), ("bg", "card", "code")
    ):
        assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)


@pytest.mark.parametrize(("scheme", "palette"), [("light", PALETTE), ("dark", DARK_PALETTE)])
def test_series_stand_out_from_their_card(scheme: str, palette: tuple[str, ...]) -> None:
    assert all(contrast(colour, variables(scheme)["card"]) >= 3 for colour in palette)


def test_a_file_of_its_own_needs_no_page() -> None:
    legend = [
        LegendEntry(label="a <b> & c", sign=sign, color=i) for i, sign in enumerate(("line", "area", "dot", "diamond"))
    ]
    drawn = picture_file("<t>", 100, legend, description="<d>", style=file_css())
    ElementTree.fromstring(drawn)
    assert "var(" not in drawn
    assert "a &lt;b&gt; &amp; c" in drawn
    assert "&lt;t&gt;" in drawn
    assert "var(--c0)" in page_css()


@pytest.mark.parametrize(
    ("low", "high", "most", "ticks"),
    [
        (0.0, 1.0, 5, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.0, 0.073, 5, [0.0, 0.02, 0.04, 0.06, 0.08]),
        (1.0, 120.0, 5, [0.0, 50.0, 100.0, 150.0]),
        (-0.3, 0.3, 3, [-0.4, -0.2, 0.0, 0.2, 0.4]),
    ],
)
def test_ticks_are_round_and_cover_the_range(low: float, high: float, most: int, ticks: list[float]) -> None:
    assert nice_ticks(low, high, most) == pytest.approx(ticks)


@pytest.mark.parametrize("value", [0.0, 3.0, -2.5, 1e-9, 1e9])
def test_ticks_of_a_single_value_cover_it(value: float) -> None:
    ticks = nice_ticks(value, value, 5)
    assert ticks[0] <= value <= ticks[-1]
    assert len(set(ticks)) == len(ticks) >= 2


def line_of(*ys: float) -> Points:
    return tuple((float(i), y) for i, y in enumerate(ys, start=1))


def test_running_mean_is_centred_and_read_off_a_line_at_the_ends() -> None:
    smooth = running_mean(line_of(0, 3, 6, 0, 9), 3)
    # Inside: means of three. At the ends: the line through the last three, 3 - 3 and 5 + 1.5.
    assert [y for _, y in smooth] == pytest.approx([0, 3, 3, 5, 6.5])


def test_running_mean_stays_within_its_values() -> None:
    smooth = [y for _, y in running_mean(line_of(0.2, 0.9, 1, 1, 1, 1, 1, 0.9, 1, 1), 5)]
    assert max(smooth) <= 1


def test_a_line_shorter_than_its_window_is_still_smoothed() -> None:
    assert [y for _, y in running_mean(line_of(1, 2, 4), 25)] == pytest.approx(
        [7 / 3 - 1.5 + 1 / 6, 7 / 3, 7 / 3 + 1.5]
    )
    assert running_mean(line_of(5), 25) == line_of(5)
    assert running_mean((), 25) == ()


def test_no_mean_reaches_across_a_stage_change() -> None:
    step = line_of(*([0.0] * 30 + [1.0] * 30))
    smooth, raw = with_running_mean("x", step, 0, [31.0])
    assert raw.style == "faint"
    assert [y for _, y in smooth.points] == [y for _, y in step]
    blurred = with_running_mean("x", step, 0)[0]
    assert blurred.points[29][1] > 0, "without the break it does"


def test_short_lines_are_left_as_they_are() -> None:
    assert smoothing_window(29) == 1
    assert len(with_running_mean("x", line_of(1, 2, 3), 0)) == 1
    assert all(smoothing_window(n) % 2 for n in range(30, 5000, 7))


def test_stacked_areas_add_up_where_a_value_is_missing_too() -> None:
    a = Series(label="a", points=((1.0, 1.0), (2.0, 2.0)))
    b = Series(label="b", points=((2.0, 0.5),))
    low, top = stacked([a, b])
    assert low.band == ((1.0, 0.0, 1.0), (2.0, 0.0, 2.0))
    assert top.band == ((1.0, 1.0, 1.0), (2.0, 2.0, 2.5))


def test_thinning_keeps_the_mean_and_the_size() -> None:
    line = line_of(*(math.sin(i) for i in range(2100)))
    thin = thinned(line, 700)
    assert len(thin) == 700
    assert sum(y for _, y in thin) / 700 == pytest.approx(sum(y for _, y in line) / 2100)
    assert thinned(line[:10], 700) == line[:10]


def test_csv_has_every_value_exactly() -> None:
    chart = Chart(
        key="k",
        title="t",
        series=(
            Series(label="a, b", points=((1.0, 0.1), (2.0, 1 / 3))),
            Series(label="c", points=((2.0, 5.0),), band=((2.0, 4.0, 6.0),)),
        ),
    )
    rows = list(csv.reader(io.StringIO(to_csv(chart))))
    assert rows[0] == ["step", "a, b", "c", "c, low", "c, high"]
    assert rows[1] == ["1", "0.1", "", "", ""]
    assert float(rows[2][1]) == 1 / 3
    assert rows[2][2:] == ["5.0", "4.0", "6.0"]


CHART = Chart(
    key="k",
    title="A <title> & more",
    y_low=0.0,
    y_high=1.0,
    target=(0.5, "target"),
    marks=((5.0, "stage <2>"),),
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
    frame = PlotArea(CHART)
    assert (frame.y_ticks[0], frame.y_ticks[-1]) == (0.0, 1.0)
    assert frame.x(1.0) == LEFT
    assert frame.x(9.0) == WIDTH - RIGHT
    assert frame.y(0.0) == frame.bottom
    assert frame.y(1.0) == TOP
    assert frame.y(0.25) == pytest.approx(frame.bottom - 0.25 * (frame.bottom - TOP))
    assert f'd="M{LEFT:.1f} {frame.bottom:.1f}L{WIDTH - RIGHT:.1f} {TOP:.1f}"' in draw(CHART)
    assert frame.y(7.0) == TOP, "values outside a fixed axis stay in the plot"
    assert frame.y(-7.0) == frame.bottom
    assert f"H{frame.x(9.0):.1f}L{frame.x(9.0):.1f} {frame.y(0.6):.1f}" in draw(CHART), "limits are steps"
    assert [entry.label for entry in legend(CHART)] == ["up", "limit"], "raw values have no legend"


def test_the_axis_holds_the_band_and_the_target() -> None:
    line = Series(label="x", points=((1.0, 0.2), (2.0, 0.4)), band=((1.0, -0.9, 0.3), (2.0, 0.3, 1.9)))
    chart = Chart(key="k", title="t", series=(line,))
    assert (PlotArea(chart).y_ticks[0], PlotArea(chart).y_ticks[-1]) == (-1.0, 2.0)
    aimed = PlotArea(replace(chart, target=(3.0, "target")))
    assert aimed.y_ticks[-1] >= 3.0
    assert f'class="target" x1="48.0" x2="440.0" y1="{aimed.y(3.0):.1f}"' in draw(replace(chart, target=(3.0, "t")))


def test_a_band_goes_along_its_upper_end_and_back_along_its_lower_one() -> None:
    shape = re.search(r'class="band f0" d="M([^"]+)Z"', draw(CHART))
    assert shape is not None
    frame = PlotArea(CHART)
    corners = [(1.0, 0.1), (9.0, 1.0), (9.0, 0.9), (1.0, 0.0)]
    assert shape.group(1).split("L") == [f"{frame.x(x):.1f} {frame.y(y):.1f}" for x, y in corners]


def test_a_screen_reader_gets_the_last_values() -> None:
    assert 'aria-label="A &lt;title&gt; &amp; more. At step 9: up 1, limit 0.6."' in draw(CHART)


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
    frame = PlotArea(chart)
    assert frame.y_ticks[-1] >= 6.0
    tops = {float(m) for m in re.findall(r'class="area f\d" d="M[\d.]+ ([\d.]+)', draw(chart))}
    assert tops == {round(frame.y(v), 1) for v in (2.0, 4.0, 6.0)}


def interval(low: float, mean: float, high: float) -> Interval:
    return Interval(mean=mean, low=low, high=high)


def drawn(rows: list[IntervalRow], best: float | None = None) -> str:
    return intervals_view("k", "t", rows, "", best=best).svg


def test_intervals_are_drawn_with_their_ends() -> None:
    svg = drawn([IntervalRow(label="0 <greedy>", before=interval(0.0, 0.0, 0.5), after=None)], best=0.5)
    ElementTree.fromstring(svg)
    whisker = re.search(r'class="whisker s4" x1="([\d.]+)" x2="([\d.]+)"', svg)
    target = re.search(r'class="target" x1="([\d.]+)"', svg)
    assert whisker is not None
    assert target is not None
    assert whisker.group(2) == target.group(1), "both stand at one half"
    assert "0 &lt;greedy&gt;" in svg


def test_the_axis_begins_at_zero_and_ends_above_the_highest_interval() -> None:
    low = drawn([IntervalRow(label="1", before=interval(0.01, 0.02, 0.08), after=None)])
    assert re.findall(r">([\d.]+%)<", low) == ["0%", "2%", "4%", "6%", "8%"]
    high = drawn([IntervalRow(label="1", before=interval(0.2, 0.9, 0.97), after=None)])
    assert re.findall(r">([\d.]+%)<", high)[-1] == "100%"


def test_pass_at_k_stands_apart_below_the_temperatures(run_folder: Path) -> None:
    rows = interval_rows(comparisons(read_run(run_folder))[0])
    assert [(row.label, row.apart) for row in rows] == [
        ("0 (greedy)", False), ("0.6", False), ("1", False), ("pass@16", True),
    ]  # fmt: skip
    svg = drawn(rows, 0.47)
    target = re.search(r'class="target"[^>]* y2="([\d.]+)"', svg)
    rule = re.search(r'class="axis"[^>]* y1="([\d.]+)"', svg)
    assert target is not None
    assert rule is not None
    assert target.group(1) == rule.group(1), "the start's best accuracy is no pass@k"


def test_the_export_holds_every_interval_and_the_sentence_every_mean(run_folder: Path) -> None:
    shown = headline(read_run(run_folder))
    assert shown is not None
    view = shown["sets"][0]["view"]
    rows = list(csv.DictReader(io.StringIO(base64.b64decode(view.csv.partition(",")[2]).decode())))
    assert [row["row"] for row in rows] == ["0 (greedy)", "0.6", "1", "pass@16"]
    assert (float(rows[1]["before"]), float(rows[1]["after, high"])) == (0.47, 0.97)
    assert "0.6: 47.0 % before, 94.0 % after" in view.svg


def test_the_legend_names_only_what_is_there() -> None:
    row = IntervalRow(label="1", before=interval(0.1, 0.2, 0.3), after=None)
    assert [words for _, words in intervals_view("k", "t", [row], "").legend] == ["before"]


def test_bars_escape_their_names_and_export_their_values() -> None:
    view = bars_view("k", "t", "nats", [("<b>", 0.5, "2 times")])
    assert "&lt;b&gt;: 0.5 (2 times)" in view.svg
    assert base64.b64decode(view.csv.partition(",")[2]) == b"name,nats,words\n<b>,0.5,2 times\n"
