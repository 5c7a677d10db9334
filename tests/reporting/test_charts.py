"""Ticks, running means, stacking, CSV: by hand."""

from __future__ import annotations

import csv
import io
import math

import pytest

from magicrl.reporting.charts import (
    Chart,
    Points,
    Series,
    nice_ticks,
    running_mean,
    smoothing_window,
    stacked,
    thinned,
    to_csv,
    with_running_mean,
)


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


def points(*ys: float) -> Points:
    return tuple((float(i), y) for i, y in enumerate(ys, start=1))


def test_running_mean_is_centred_and_read_off_a_line_at_the_ends() -> None:
    smooth = running_mean(points(0, 3, 6, 0, 9), 3)
    # inside, means of three; at the ends the line through the last three: 3 - 3 and 5 + 1.5
    assert [y for _, y in smooth] == pytest.approx([0, 3, 3, 5, 6.5])


def test_running_mean_stays_within_its_values() -> None:
    smooth = [y for _, y in running_mean(points(0.2, 0.9, 1, 1, 1, 1, 1, 0.9, 1, 1), 5)]
    assert max(smooth) <= 1


def test_a_line_shorter_than_its_window_is_still_smoothed() -> None:
    assert [y for _, y in running_mean(points(1, 2, 4), 25)] == pytest.approx([7 / 3 - 1.5 + 1 / 6, 7 / 3, 7 / 3 + 1.5])
    assert running_mean(points(5), 25) == points(5)
    assert running_mean((), 25) == ()


def test_running_mean_of_a_straight_line_is_the_line() -> None:
    line = points(*(2.0 * i for i in range(40)))
    assert [y for _, y in running_mean(line, 7)] == pytest.approx([y for _, y in line])


def test_no_mean_reaches_across_a_stage_change() -> None:
    step = points(*([0.0] * 30 + [1.0] * 30))
    smooth, raw = with_running_mean("x", step, 0, [31.0])
    assert raw.style == "faint"
    assert [y for _, y in smooth.points] == [y for _, y in step]
    blurred = with_running_mean("x", step, 0)[0]
    assert blurred.points[29][1] > 0, "without the break it does"


def test_short_lines_are_left_as_they_are() -> None:
    assert smoothing_window(29) == 1
    assert len(with_running_mean("x", points(1, 2, 3), 0)) == 1
    assert all(smoothing_window(n) % 2 for n in range(30, 5000, 7))


def test_stacked_areas_add_up_where_a_value_is_missing_too() -> None:
    a = Series(label="a", points=((1.0, 1.0), (2.0, 2.0)))
    b = Series(label="b", points=((2.0, 0.5),))
    low, top = stacked([a, b])
    assert low.band == ((1.0, 0.0, 1.0), (2.0, 0.0, 2.0))
    assert top.band == ((1.0, 1.0, 1.0), (2.0, 2.0, 2.5))


def test_thinning_keeps_the_mean_and_the_size() -> None:
    line = points(*(math.sin(i) for i in range(2100)))
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
