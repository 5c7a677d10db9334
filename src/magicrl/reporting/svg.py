"""Drawing charts as SVG: in the page's colours, or standing alone with their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from magicrl.reporting.charts import Band, Chart, Points, Series, Unit, nice_ticks, stacked, thinned
from magicrl.reporting.wording import number

WIDTH = 460
LEFT, RIGHT, TOP, BOTTOM = 48, 20, 20, 36
TALL, COMPACT = 236, 150

PALETTE = ("#2257d6", "#d9480f", "#0a8560", "#8a3cc4", "#6b7480", "#a87900")
"""Light colours of the series, told apart with common colour-vision deficiencies; the page has dark ones too."""

_ALONE = (
    "text{font:11px system-ui,sans-serif;fill:#4a5260}.title{font-size:13px;font-weight:600;fill:#171b22}"
    ".grid{stroke:#e4e7ec}.axis{stroke:#9aa2ae}.mark{stroke:#6b7480;stroke-dasharray:3 3}"
    ".target{stroke:#171b22;stroke-dasharray:6 4}.line{fill:none;stroke-width:2;stroke-linejoin:round}"
    ".faint{stroke-width:1;stroke-opacity:.28}.dashed{stroke-dasharray:5 4}.band{stroke:none;fill-opacity:.16}"
    ".area{stroke:none;fill-opacity:.75}"
    + "".join(f".s{i}{{stroke:{c}}}.f{i}{{fill:{c}}}" for i, c in enumerate(PALETTE))
)


@dataclass(frozen=True, slots=True)
class Frame:
    """The plot area of a chart in SVG units, and the data range it shows."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    height: int

    @property
    def bottom(self) -> float:
        return self.height - BOTTOM

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

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
        x_low, x_high = x_low - 0.5, x_high + 0.5
    return Frame(x_low, x_high, ticks[0], ticks[-1], COMPACT if chart.compact else TALL), ticks


def drawn_series(chart: Chart) -> tuple[Series, ...]:
    """The chart's series as they are drawn: stacked where it says so."""
    return stacked(chart.series) if chart.stacked else chart.series


def draw(chart: Chart, *, alone: bool = False) -> Markup:
    """The chart as an ``<svg>`` element; ``alone`` adds colours, title and legend for a file of its own."""
    frame, ticks = frame_of(chart)
    legend = legend_entries(chart) if alone else []
    extra = 16 * ((len(legend) + 2) // 3) + 24 if alone else 0
    parts = [_open(chart, frame, extra, alone)]
    parts += _axes(frame, ticks, chart.unit)
    for mark in chart.marks:
        parts.append(_mark(frame, mark.x, mark.label))
    for series in reversed(drawn_series(chart)) if chart.stacked else chart.series:
        parts += _area(frame, series) if chart.stacked else _line(frame, series)
    if chart.target is not None:
        parts.append(_target(frame, *chart.target))
    for i, series in enumerate(legend):
        x, y = 12 + 148 * (i % 3), frame.height + 16 * (i // 3) + 6
        parts.append(
            f'<rect class="f{series.color}" x="{x}" y="{y}" width="10" height="10" rx="2"/>'
            f'<text x="{x + 15}" y="{y + 9}">{escape(series.label)}</text>'
        )
    parts.append('<line class="cross" visibility="hidden" y1="0" y2="0"/></svg>' if not alone else "</g></svg>")
    return Markup("".join(parts))


def legend_entries(chart: Chart) -> list[Series]:
    """The series that need naming."""
    return [s for s in chart.series if s.style != "faint" and s.points]


def tick_label(value: float, unit: Unit) -> str:
    """A value as the y axis writes it."""
    if unit == "percent":
        return f"{100 * value:g}%"
    text = number(value) if value == 0 or abs(value) >= 1e-4 else f"{value:g}"
    return text + (" s" if unit == "seconds" else "")


def describe(chart: Chart) -> str:
    """The chart in one sentence, for those who cannot see it."""
    ends = [f"{s.label} {tick_label(round(s.points[-1][1], 4), chart.unit)}" for s in legend_entries(chart)]
    last = max((s.points[-1][0] for s in chart.series if s.points), default=0.0)
    return f"{chart.title}. At step {last:g}: {', '.join(ends) or 'nothing'}."


def _open(chart: Chart, frame: Frame, extra: int, alone: bool) -> str:
    title = f"<title>{escape(describe(chart))}</title>"
    if not alone:
        box = f'viewBox="0 0 {WIDTH} {frame.height}"'
        return f'<svg class="chart" {box} role="img" data-chart="{escape(chart.key)}">{title}'
    height = frame.height + extra
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{2 * WIDTH}" '
        f'height="{2 * height}">{title}<style>{_ALONE}</style><rect width="{WIDTH}" height="{height}" fill="#fff"/>'
        f'<text class="title" x="12" y="17">{escape(chart.title)}</text><g transform="translate(0 16)">'
    )


def _axes(frame: Frame, ticks: Sequence[float], unit: Unit) -> list[str]:
    parts: list[str] = []
    for tick in ticks:
        y = frame.y(tick)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick_label(tick, unit)}</text>'
        )
    for tick in nice_ticks(frame.x_low, frame.x_high, 5):
        if tick != int(tick) or not frame.x_low <= tick <= frame.x_high:
            continue
        x = frame.x(tick)
        parts.append(
            f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{frame.bottom:.1f}" y2="{frame.bottom + 4:.1f}"/>'
            f'<text class="tick" x="{x:.1f}" y="{frame.bottom + 16:.1f}" text-anchor="middle">{tick:g}</text>'
        )
    parts.append(
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{frame.bottom:.1f}" y2="{frame.bottom:.1f}"/>'
        f'<text class="tick" x="{(LEFT + WIDTH - RIGHT) / 2:.1f}" y="{frame.height - 4}" '
        'text-anchor="middle">training step</text>'
    )
    return parts


def _mark(frame: Frame, value: float, label: str) -> str:
    x = frame.x(value)
    anchor, shift = ("end", -4) if x > WIDTH - 90 else ("start", 4)
    return (
        f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 12}" y2="{frame.bottom:.1f}"/>'
        f'<text class="tick" x="{x + shift:.1f}" y="{TOP - 6}" text-anchor="{anchor}">{escape(label)}</text>'
    )


def _target(frame: Frame, value: float, label: str) -> str:
    y = frame.y(value)
    return (
        f'<line class="target" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="tick" x="{WIDTH - RIGHT}" y="{y - 5:.1f}" text-anchor="end">{escape(label)}</text>'
    )


def _line(frame: Frame, series: Series) -> list[str]:
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
        shape = {"faint": " faint", "dashed": " dashed", "steps": " dashed"}.get(series.style, "")
        path = _path(frame, points, steps=series.style == "steps")
        parts.append(f'<path class="line s{series.color}{shape}" d="{path}"/>')
    return parts


def _area(frame: Frame, series: Series) -> list[str]:
    return [f'<path class="area f{series.color}" d="{_band_path(frame, series.band)}"/>']


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
