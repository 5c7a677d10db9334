"""What a chart shows, apart from how it is drawn: series, marks, axes' ticks, running means, CSV."""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

Point: TypeAlias = tuple[float, float]
Points: TypeAlias = tuple[Point, ...]
Band: TypeAlias = tuple[tuple[float, float, float], ...]
LineStyle: TypeAlias = Literal["line", "faint", "steps", "marks"]
Unit: TypeAlias = Literal["percent", "number", "seconds"]

MOST_DRAWN = 700
"""Points of one line in a drawing; the CSV always has all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line of a chart.

    Attributes:
        label: for the legend and the CSV's head.
        points: (x, y), x ascending.
        color: slot of the palette, 0 to 5.
        style: ``faint`` for raw values behind their running mean (left out of the legend), ``steps`` for limits,
            ``marks`` for single measurements: a sign each, its band as a whisker, no line between them.
        band: (x, low, high), drawn behind the line.
        dots: also draw each point, for series that are not measured at every step.
    """

    label: str
    points: Points
    color: int = 0
    style: LineStyle = "line"
    band: Band = ()
    dots: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A vertical line: something began at this x."""

    x: float
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A chart over the training steps, or over another x.

    Attributes:
        key: file name of its exports.
        title: what it shows.
        series: its lines, the most important first (it is drawn last, on top); with ``stacked`` areas that add
            up, the first at the bottom.
        unit: how values are written.
        note: one sentence on how to read it.
        y_low: fixed lower end of the y axis; default from the data.
        y_high: fixed upper end.
        target: a horizontal line with its label.
        marks: stage changes.
        x_name: what the x axis counts; ``x_word`` the same before a single value, in the crosshair's box and the CSV.
        x_range: fixed x axis, so that charts below one another align.
        x_whole: whether x counts something, so that there are ticks at whole numbers only.
        x_log: x grows by factors; all x must be positive.
        x_ticks: fixed ticks of the x axis.
        compact: half as tall.
    """

    key: str
    title: str
    series: tuple[Series, ...]
    unit: Unit = "number"
    note: str = ""
    y_low: float | None = None
    y_high: float | None = None
    target: tuple[float, str] | None = None
    marks: tuple[Mark, ...] = ()
    x_name: str = "training step"
    x_word: str = "step"
    x_range: tuple[float, float] | None = None
    x_whole: bool = True
    x_log: bool = False
    x_ticks: tuple[float, ...] = ()
    stacked: bool = False
    compact: bool = False

    @property
    def empty(self) -> bool:
        return not any(series.points for series in self.series)


def nice_ticks(low: float, high: float, most: int) -> list[float]:
    """Round tick values (1, 2 or 5 times a power of ten) that cover [low, high], at most about ``most``."""
    if not high > low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / max(1, most)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1.0, 2.0, 5.0, 10.0) if m * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = max(0, 1 - math.floor(math.log10(step)))
    return [round(i * step, digits) for i in range(first, last + 1)]


def running_mean(points: Points, window: int) -> Points:
    """Least-squares line through the ``window`` (odd) points around each point, read there.

    Away from the ends that is the centred mean, which does not lag. Near an end the window stays whole and
    moves inward, so that the last values are smooth too; no value leaves the range of its window.
    """
    count, size = len(points), min(window, len(points))
    if not count:
        return ()
    at = np.arange(count)
    first = np.clip(at - size // 2, 0, count - size)
    windows = np.lib.stride_tricks.sliding_window_view(np.array([y for _, y in points]), size)[first]
    middle, spread = (size - 1) / 2, size * (size * size - 1) / 12
    slopes = windows @ (np.arange(size) - middle) / spread if spread else np.zeros(count)
    means = windows.mean(axis=1) + slopes * (at - first - middle)
    smooth = np.clip(means, windows.min(axis=1), windows.max(axis=1))
    return tuple((x, float(y)) for (x, _), y in zip(points, smooth, strict=True))


def smoothing_window(count: int) -> int:
    """An odd window of about a twentieth of the run: 1 (none) below 30 points, at most 25."""
    return 1 if count < 30 else min(25, 2 * (count // 40) + 3)


def with_running_mean(label: str, points: Points, color: int, breaks: Sequence[float] = ()) -> tuple[Series, ...]:
    """A noisy line as faint raw values behind their running mean; as it is where it is short.

    ``breaks`` are the x at which something changed at once (a stage began): no mean reaches across them.
    """
    window = smoothing_window(len(points))
    if window == 1:
        return (Series(label=label, points=points, color=color),)
    return (
        Series(label=label, points=running_mean_of_parts(points, window, breaks), color=color),
        Series(label=f"{label} (each step)", points=points, color=color, style="faint"),
    )


def running_mean_of_parts(points: Points, window: int, breaks: Sequence[float]) -> Points:
    """The running mean of each part between ``breaks`` by itself."""
    return tuple(p for part in _parts(points, breaks) for p in running_mean(part, window))


def _parts(points: Points, breaks: Sequence[float]) -> list[Points]:
    edges = [-math.inf, *sorted(breaks), math.inf]
    return [tuple(p for p in points if a <= p[0] < b) for a, b in itertools.pairwise(edges)]


def thinned(points: Points, most: int = MOST_DRAWN) -> Points:
    """At most ``most`` points: means of neighbouring ones."""
    if len(points) <= most:
        return points
    size = math.ceil(len(points) / most)
    chunks = [points[i : i + size] for i in range(0, len(points), size)]
    return tuple((sum(x for x, _ in c) / len(c), sum(y for _, y in c) / len(c)) for c in chunks)


def stacked(series: Sequence[Series]) -> tuple[Series, ...]:
    """Each series on top of those before it: band from the sum below to the new sum. Missing values count 0."""
    xs = sorted({x for s in series for x, _ in s.points})
    below = dict.fromkeys(xs, 0.0)
    layers: list[Series] = []
    for s in series:
        values = dict(s.points)
        top = {x: below[x] + values.get(x, 0.0) for x in xs}
        layers.append(
            Series(
                label=s.label,
                points=tuple((x, top[x]) for x in xs),
                color=s.color,
                band=tuple((x, below[x], top[x]) for x in xs),
            )
        )
        below = top
    return tuple(layers)


def to_csv(chart: Chart) -> str:
    """Every value of the chart: a row an x, a column a series, its band's ends beside it."""
    columns: list[tuple[str, dict[float, float]]] = []
    for series in chart.series:
        columns.append((series.label, dict(series.points)))
        if series.band:
            columns.append((f"{series.label}, low", {x: low for x, low, _ in series.band}))
            columns.append((f"{series.label}, high", {x: high for x, _, high in series.band}))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([chart.x_word, *(name for name, _ in columns)])
    for x in sorted({x for _, values in columns for x in values}):
        writer.writerow([f"{x:g}", *(repr(v[x]) if x in v else "" for _, v in columns)])
    return out.getvalue()
