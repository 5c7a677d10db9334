"""Drawing charts over the training steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from magicrl.reporting.canvas import WIDTH, Entry, diamond, picture
from magicrl.reporting.charts import Band, Chart, Mark, Points, Series, Unit, nice_ticks, stacked, thinned
from magicrl.reporting.wording import number

LEFT, RIGHT, TOP, BOTTOM = 48, 20, 20, 38
TALL, COMPACT = 236, 150
LETTER = 8.0
"""Width of a letter of a mark's label at the largest size that the page draws it."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The plot area of a chart in SVG units, and the data range it shows."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    height: int
    x_log: bool = False

    @property
    def bottom(self) -> float:
        return self.height - BOTTOM

    def x(self, value: float) -> float:
        low, high = self.x_low, self.x_high
        if self.x_log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.y_low) / (self.y_high - self.y_low)
        return self.bottom - min(1.0, max(0.0, share)) * (self.bottom - TOP)


def frame_of(chart: Chart) -> tuple[Frame, list[float]]:
    """Where the chart's data go, and the ticks of its y axis."""
    series = drawn_series(chart)
    xs = [x for s in series for x, _ in s.points] or [0.0, 1.0]
    ys = [y for s in series for _, y in s.points] + [v for s in series for _, low, high in s.band for v in (low, high)]
    ys = ys or [0.0, 1.0]
    if chart.target is not None:
        ys.append(chart.target[0])
    low = min(ys) if chart.y_low is None else chart.y_low
    high = max(ys) if chart.y_high is None else chart.y_high
    if high - low < 1e-12:
        room = 0.01 if chart.unit == "percent" else 1.0
        low, high = (low, low + room) if chart.y_low is not None else (low - room / 2, low + room / 2)
    ticks = nice_ticks(low, high, 3 if chart.compact else 5)
    x_low, x_high = chart.x_range or (min(xs), max(xs))
    if x_high <= x_low:
        x_low, x_high = (x_low / 1.5, x_high * 1.5) if chart.x_log else (x_low - 0.5, x_high + 0.5)
    return Frame(x_low, x_high, ticks[0], ticks[-1], COMPACT if chart.compact else TALL, chart.x_log), ticks


def drawn_series(chart: Chart) -> tuple[Series, ...]:
    """The chart's series as they are drawn: stacked where it says so."""
    return stacked(chart.series) if chart.stacked else chart.series


def draw(chart: Chart, *, alone: bool = False) -> Markup:
    """The chart as an ``<svg>`` element; ``alone`` as a file with colours, title and legend of its own."""
    frame, ticks = frame_of(chart)
    parts = _axes(frame, ticks, chart)
    parts += _marks(frame, chart.marks)
    dashes = {entry.label: entry.dash for entry in legend(chart)}
    if chart.stacked:
        parts += [_area(frame, series) for series in reversed(drawn_series(chart))]
    else:
        behind = [s for s in chart.series if s.style == "faint"]
        front = [s for s in chart.series if s.style != "faint"]
        for series in (*reversed(behind), *reversed(front)):
            parts += _line(frame, series, dashes.get(series.label, 0))
    if chart.target is not None:
        parts.append(_target(frame, *chart.target))
    if not alone:
        parts.append('<line class="cross" visibility="hidden" y1="0" y2="0"/>')
    return picture(
        key=chart.key,
        title=chart.title,
        description=describe(chart),
        height=frame.height,
        body="".join(parts),
        legend=legend(chart),
        alone=alone,
    )


def legend_entries(chart: Chart) -> list[Series]:
    """The series that need naming."""
    return [s for s in chart.series if s.style != "faint" and s.points]


def legend(chart: Chart) -> list[Entry]:
    """The chart's legend; lines differ in dash as well as in colour."""
    found: list[Entry] = []
    lines = 0
    for series in legend_entries(chart):
        if chart.stacked or series.style in ("steps", "marks"):
            sign = "area" if chart.stacked else "limit" if series.style == "steps" else "diamond"
            found.append(Entry(label=series.label, sign=sign, color=series.color))
        else:
            found.append(Entry(label=series.label, sign="line", color=series.color, dash=(lines + lines // 6) % 6))
            lines += 1
    return found


def tick_label(value: float, unit: Unit) -> str:
    """A value as the y axis writes it."""
    if unit == "percent":
        return f"{100 * value:g}%"
    size = abs(value)
    if size >= 10_000:
        text = f"{value / 1000:g}k" if size < 1e6 else f"{value:.3g}"
    else:
        text = number(value) if size == 0 or size >= 1e-4 else f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")
    return text + (" s" if unit == "seconds" else "")


def describe(chart: Chart) -> str:
    """The chart in one sentence, for those who cannot see it."""
    ends = [f"{s.label} {tick_label(round(s.points[-1][1], 4), chart.unit)}" for s in legend_entries(chart)]
    last = max((s.points[-1][0] for s in chart.series if s.points), default=0.0)
    where = f"{chart.x_word} {last:g}" if chart.x_whole or chart.x_log else f"{last:.4g} {chart.x_word}"
    return f"{chart.title}. At {where}: {', '.join(ends) or 'nothing'}."


def _axes(frame: Frame, ticks: Sequence[float], chart: Chart) -> list[str]:
    parts: list[str] = []
    for tick in ticks:
        y = frame.y(tick)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick_label(tick, chart.unit)}</text>'
        )
    for tick in _x_ticks(frame, chart):
        x = frame.x(tick)
        parts.append(
            f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{frame.bottom:.1f}" y2="{frame.bottom + 4:.1f}"/>'
            f'<text class="tick" x="{x:.1f}" y="{frame.bottom + 16:.1f}" text-anchor="middle">{_short(tick)}</text>'
        )
    parts.append(
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{frame.bottom:.1f}" y2="{frame.bottom:.1f}"/>'
        f'<text class="tick" x="{(LEFT + WIDTH - RIGHT) / 2:.1f}" y="{frame.height - 4}" '
        f'text-anchor="middle">{escape(chart.x_name)}</text>'
    )
    return parts


def _x_ticks(frame: Frame, chart: Chart) -> list[float]:
    """Ticks inside the axis; fixed ones thinned from the right until they leave room."""
    if not chart.x_ticks:
        ticks = nice_ticks(frame.x_low, frame.x_high, 5)
        return [t for t in ticks if frame.x_low <= t <= frame.x_high and (t == int(t) or not chart.x_whole)]
    kept: list[float] = []
    for tick in sorted(chart.x_ticks, reverse=True):
        if not kept or frame.x(kept[-1]) - frame.x(tick) >= 5 * LETTER:
            kept.append(tick)
    return kept[::-1]


def _short(value: float) -> str:
    """A tick of the x axis; limits beyond ten thousand tokens in their customary form, ``32768`` as ``32k``."""
    if value >= 10_000 and value % 1024 == 0:
        return f"{value / 1024:g}k"
    return f"{value:g}"


def _marks(frame: Frame, marks: Sequence[Mark]) -> list[str]:
    """A line a mark, labelled as fully as its neighbours leave room."""
    parts: list[str] = []
    taken = float(LEFT)
    for i, mark in enumerate(marks):
        x = frame.x(mark.x)
        room = frame.x(marks[i + 1].x) if i + 1 < len(marks) else float(WIDTH)
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 12}" y2="{frame.bottom:.1f}"/>')
        for label in (mark.label, mark.label.partition(":")[0]):
            width = LETTER * len(label) + 4
            right, left = x + width <= room, x - width >= taken
            if right or left:
                at, anchor = (x + 4, "start") if right else (x - 4, "end")
                parts.append(
                    f'<text class="tick" x="{at:.1f}" y="{TOP - 6}" text-anchor="{anchor}">{escape(label)}</text>'
                )
                taken = x + width if right else x
                break
        else:
            taken = x
    return parts


def _target(frame: Frame, value: float, label: str) -> str:
    y = frame.y(value)
    return (
        f'<line class="target" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="tick" x="{WIDTH - RIGHT}" y="{y - 5:.1f}" text-anchor="end">{escape(label)}</text>'
    )


def _line(frame: Frame, series: Series, dash: int) -> list[str]:
    if series.style == "marks":
        return [
            f'<path class="thin s{series.color}" d="M{frame.x(x):.1f} {frame.y(low):.1f}V{frame.y(high):.1f}"/>'
            for x, low, high in series.band
        ] + [diamond(series.color, frame.x(x), frame.y(y)) for x, y in series.points]
    parts: list[str] = []
    if series.band:
        parts.append(f'<path class="band f{series.color}" d="{_band_path(frame, series.band)}"/>')
    points = thinned(series.points)
    if series.dots or len(points) == 1:
        parts += [
            f'<circle class="dot f{series.color}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="2.6"/>'
            for x, y in points
        ]
    if len(points) > 1:
        shape = {"faint": "faint", "steps": "line steps"}.get(series.style, f"line d{dash}")
        path = _path(frame, points, steps=series.style == "steps")
        parts.append(f'<path class="{shape} s{series.color}" d="{path}"/>')
    return parts


def _area(frame: Frame, series: Series) -> str:
    return f'<path class="area f{series.color}" d="{_band_path(frame, series.band)}"/>'


def _path(frame: Frame, points: Points, *, steps: bool) -> str:
    parts: list[str] = []
    for i, (x, y) in enumerate(points):
        if i and steps:
            parts.append(f"H{frame.x(x):.1f}")
        parts.append(f"{'L' if i else 'M'}{frame.x(x):.1f} {frame.y(y):.1f}")
    return "".join(parts)


def _band_path(frame: Frame, band: Band) -> str:
    upper = _path(frame, thinned(tuple((x, high) for x, _, high in band)), steps=False)
    lower = _path(frame, thinned(tuple((x, low) for x, low, _ in band))[::-1], steps=False)
    return f"{upper}{lower.replace('M', 'L', 1)}Z"
