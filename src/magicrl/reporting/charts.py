"""SVG drawings of a page (lines, bars, intervals) with their legend, CSV and table of values.

The page's style sheet colours the drawings, so that one drawing fits a light, a dark and a printed page.
docs/start/reading-a-report.md explains why they are not drawn by a plotting package.
"""

from __future__ import annotations

import base64
import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from markupsafe import Markup, escape

from magicrl.evaluation.statistics import Interval
from magicrl.reporting.wording import measured, number_text
from magicrl.training.diagnosis import ACCURACY, Measure

Point: TypeAlias = tuple[float, float]
Points: TypeAlias = tuple[Point, ...]
Band: TypeAlias = tuple[tuple[float, float, float], ...]
Unit: TypeAlias = Literal["percent", "number", "seconds"]
Sign: TypeAlias = Literal["line", "area", "dot", "diamond", "limit", "target"]
Bar: TypeAlias = tuple[str, float, str]
"""Name, value, and the text after the bar."""
Mark: TypeAlias = tuple[float, str]
"""x and label of a vertical line, for example where a stage began."""

WIDTH = 460
"""Width of every drawing in SVG units. The page scales it to its card."""
PALETTE = ("#1a3fc9", "#c65a06", "#0a8f63", "#8a1457", "#7a7f96", "#4a3a05")
"""Colours of the series on a light page. Any two differ (CIE76 above 20) with each kind of colour blindness. Lines also
differ in their dashes."""
DARK_PALETTE = ("#5c95ff", "#ff8048", "#8fe8c4", "#ffa6f0", "#8b9299", "#fdf3a2")
DASHES = ("none", "7 3", "2.5 2.5", "10 3 2.5 3", "5 4", "14 4")
"""Dash patterns of the first, second, ... line of a drawing."""
MOST_DRAWN = 700
"""Maximum number of points of one line in a drawing. The CSV has all points."""
TABLE_ROWS = 12
"""Maximum number of rows in the table of values below a chart."""
LEFT, RIGHT, TOP, BOTTOM = 48, 20, 20, 38
TALL, COMPACT = 236, 150
LETTER = 8.0
"""Width of a letter at the largest size on a page, in SVG units."""

_SHAPES = (
    ".line{fill:none;stroke-width:1.9;stroke-linejoin:round}.faint{stroke-width:1;stroke-opacity:.3;fill:none}"
    ".steps{stroke-dasharray:3 3;stroke-width:1.4}.band{stroke:none;fill-opacity:.16}"
    ".area{stroke-width:.8;fill-opacity:.85}.whisker{stroke-width:3;stroke-linecap:round;stroke-opacity:.55}"
    ".thin{stroke-width:1.4}.grid,.axis,.mark,.target{fill:none}.mark{stroke-dasharray:3 3}"
    ".target{stroke-dasharray:6 4;stroke-width:1.2}"
)
_ALONE = (
    "text{font:11px system-ui,sans-serif;fill:#4a5260}.title{font-size:13px;font-weight:600;fill:#171b22}"
    ".rowlabel{fill:#171b22;font-size:12px}"
    ".grid{stroke:#e4e7ec}.axis{stroke:#9aa2ae}.mark{stroke:#5c6470}.target{stroke:#171b22}.area{stroke:#fff}"
)


class LegendEntry(NamedTuple):
    """One entry of a legend. ``color`` is an index of the palette."""

    label: str
    sign: Sign
    color: int = 0
    dash: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class FigureView:
    """One figure of a page."""

    name: str  # file name of the exports, without suffix
    title: str
    svg: Markup  # several drawings, one of them visible, where the x axis can be chosen
    frame: Markup  # title and legend of an exported drawing; the page's script inserts the visible drawing
    legend: tuple[tuple[Markup, str], ...]  # (sign, label)
    csv: str = ""  # a link; empty where the page's script writes the CSV from its curves
    note: str = ""
    table: tuple[tuple[str, ...], ...] = ()  # head and rows of some values, for screen readers
    hover: Mapping[str, Any] | None = None  # data for the crosshair


def page_css() -> str:
    """Return the style of drawings in a page, with the palette as variables for light, dark and printed pages."""
    light, dark = ("".join(f"--c{i}:{c};" for i, c in enumerate(p)) for p in (PALETTE, DARK_PALETTE))
    return (
        f":root{{{light}}}@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"
        f"{_SHAPES}{_series_css([f'var(--c{i})' for i in range(len(PALETTE))])}.area{{stroke:var(--card)}}"
    )


def file_css() -> str:
    """Return the style of a drawing in a file of its own, which is always light."""
    return _ALONE + _SHAPES + _series_css(PALETTE)


def _series_css(colors: Sequence[str]) -> str:
    """Return the classes of stroke (s0...), fill (f0...) and dash (d0...)."""
    rules = [f".s{i}{{stroke:{c}}}.f{i}{{fill:{c}}}" for i, c in enumerate(colors)]
    return "".join(rules) + "".join(f".d{i}{{stroke-dasharray:{dash}}}" for i, dash in enumerate(DASHES))


def variant_swatch(slot: int) -> Markup:
    """Return the sign of a variant, in the style of its lines."""
    return swatch(LegendEntry("", "line", slot % len(PALETTE), (slot + slot // 6) % 6))


def swatch(entry: LegendEntry) -> Markup:
    """Return a legend's sign as an element for the page."""
    return Markup(f'<svg class="key" viewBox="0 0 22 14" aria-hidden="true">{_sign(entry, 0, 7)}</svg>')


def _sign(entry: LegendEntry, x: float, y: float) -> str:
    """Return the sign of a legend entry, 22 units wide, with its middle at height ``y``."""
    middle, color = x + 11, entry.color
    return {
        "line": f'<path class="line s{color} d{entry.dash}" d="M{x:g} {y:g}h22"/>',
        "area": f'<rect class="area f{color}" x="{x + 5:g}" y="{y - 6:g}" width="12" height="12" rx="2"/>',
        "dot": f'<path class="whisker s{color}" d="M{x + 1:g} {y:g}h20"/>'
        f'<circle class="f{color}" cx="{middle:g}" cy="{y:g}" r="4.5"/>',
        "diamond": _diamond(color, middle, y),
        "limit": f'<path class="line s{color} steps" d="M{x:g} {y:g}h22"/>',
        "target": f'<path class="target" d="M{x:g} {y:g}h22"/>',
    }[entry.sign]


def _diamond(color: int, x: float, y: float) -> str:
    return f'<path class="f{color}" d="M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z"/>'


def picture(key: str, description: str, height: float, body: str) -> Markup:
    """Return the ``<svg>`` element of a drawing in a page. ``body`` is markup."""
    return Markup(
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height:g}" role="img" data-chart="{escape(key)}" '
        f'aria-label="{escape(description)}">{body}</svg>'
    )


def picture_file(
    title: str, height: float, legend: Sequence[LegendEntry], *, description: str = "", body: str = "", style: str = ""
) -> Markup:
    """Return a drawing as a file with title and legend. Without body and style, the page's script inserts them."""
    longest = max((len(entry.label) for entry in legend), default=0)
    per_row = 1 if longest > 32 else 2 if longest > 18 else 3
    whole = height + 24 + 18 * -(-len(legend) // per_row)
    entries: list[str] = []
    for i, entry in enumerate(legend):
        x, y = 12 + (WIDTH - 24) / per_row * (i % per_row), height + 18 * (i // per_row)
        entries.append(_sign(entry, x, y + 8) + f'<text x="{x + 28:g}" y="{y + 12:g}">{escape(entry.label)}</text>')
    return Markup(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {whole:g}" width="{2 * WIDTH}" '
        f'height="{2 * whole:g}"><title>{escape(description or title)}</title>'
        f"<style>{style}</style>"
        f'<rect width="{WIDTH}" height="{whole:g}" fill="#fff"/>'
        f'<text class="title" x="12" y="17">{escape(title)}</text>'
        f'<g transform="translate(0 18)">{body}{"".join(entries)}</g></svg>'
    )


def figure_view(
    key: str,
    title: str,
    drawing: tuple[float, Sequence[str]],
    *,
    described: Iterable[str],
    legend: Sequence[LegendEntry],
    rows: Iterable[Sequence[object]],
    note: str,
) -> FigureView:
    """Return a figure without crosshair.

    Args:
        key: file name of the exports.
        title: title of the figure.
        drawing: height and markup.
        described: descriptions of the rows, for screen readers.
        legend: entries of the legend.
        rows: rows of the CSV.
        note: text below the figure.
    """
    height, body = drawing
    return FigureView(
        name=key,
        title=title,
        svg=picture(key, f"{title}. {'; '.join(described)}", height, "".join(body)),
        frame=picture_file(title, height, legend),
        legend=tuple((swatch(entry), entry.label) for entry in legend),
        csv=_link(csv_text(rows)),
        note=note,
    )


def csv_text(rows: Iterable[Sequence[object]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def _link(table: str) -> str:
    """Return a CSV table as a data link."""
    return f"data:text/csv;charset=utf-8;base64,{base64.b64encode(table.encode()).decode()}"


def nice_ticks(low: float, high: float, most: int) -> list[float]:
    """Return about ``most`` or fewer round tick values (1, 2 or 5 times a power of ten) that cover [low, high]."""
    if not high > low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / max(1, most)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1.0, 2.0, 5.0, 10.0) if m * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = max(0, 1 - math.floor(math.log10(step)))
    return [round(i * step, digits) for i in range(first, last + 1)]


def text(x: float, y: float, words: str, anchor: str = "middle", kind: str = "tick") -> str:
    """Return a text element. ``words`` are escaped."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


def line(kind: str, x: tuple[float, float], y: tuple[float, float]) -> str:
    """Return a straight line between two corners."""
    return f'<line class="{kind}" x1="{x[0]:.1f}" x2="{x[1]:.1f}" y1="{y[0]:.1f}" y2="{y[1]:.1f}"/>'


def box(color: int, corner: tuple[float, float], width: float, height: float, words: str) -> str:
    """Return a bar with ``words`` as its tooltip."""
    return (
        f'<rect class="area f{color}" x="{corner[0]:g}" y="{corner[1]:g}" width="{max(1.0, width):.1f}" '
        f'height="{height:g}"><title>{escape(words)}</title></rect>'
    )


def x_grid(ticks: Iterable[tuple[float, str]], top: float, bottom: float) -> list[str]:
    """Return vertical lines at x with a label below, for drawings that consist of rows."""
    return [line("grid", (x, x), (top, bottom)) + text(x, bottom + 16, words) for x, words in ticks]


def bars_view(
    key: str,
    title: str,
    x_name: str,
    bars: Sequence[Bar],
    note: str = "",
    *,
    unit: Unit = "number",
    color: int = 0,
    left: int = 96,
    limit: tuple[float, str] | None = None,
) -> FigureView:
    """Return a figure of horizontal bars.

    Args:
        key: file name of the exports.
        title: title of the figure.
        x_name: label of the x axis.
        bars: from top to bottom.
        note: text below the figure.
        unit: unit of the values.
        color: index of the palette.
        left: width reserved for names, in SVG units.
        limit: position and label of a vertical line that no bar should cross.
    """
    right, top, row = 96, 4, 19
    longest = max([value for _, value, _ in bars] + ([limit[0]] if limit else []), default=1.0)
    ticks = nice_ticks(0.0, longest or 1.0, 4)
    letters = int(left // LETTER)
    scale = (WIDTH - left - right) / ticks[-1]
    bottom = top + row * len(bars)
    limit_at = None if limit is None else left + limit[0] * scale
    parts = x_grid([(left + tick * scale, tick_label(tick, unit)) for tick in ticks], top, bottom)
    described: list[str] = []
    for i, (name, value, words) in enumerate(bars):
        y = top + row * i
        described.append(f"{name}: {measured(value, unit)}" + (f" ({words})" if words else ""))
        width = max(1.0, value * scale)
        words_at = left + width + 5
        if limit_at is not None and words_at - 3 < limit_at < words_at + LETTER * len(words):
            words_at = limit_at + 5  # else the line would cross the text
        shown = name if len(name) <= letters else name[: letters - 1] + "…"
        parts.append(text(left - 6, y + 13.5, shown, "end", "rowlabel token"))
        parts.append(box(color, (left, y + 3), width, row - 6, described[-1]))
        parts.append(text(words_at, y + 13.5, words, "start"))
    if limit_at is not None:
        parts.append(line("target", (limit_at, limit_at), (top, bottom)))
    parts.append(text((left + WIDTH - right) / 2, bottom + 32, x_name))
    rows = [["name", x_name, "words"], *([name, repr(value), words] for name, value, words in bars)]
    entries = [LegendEntry(limit[1], "target")] if limit else []
    return figure_view(key, title, (bottom + 40, parts), described=described, legend=entries, rows=rows, note=note)


class IntervalRow(NamedTuple):
    """A row of scores: its label and two intervals, shares in [0, 1]. ``apart`` draws a rule above the row."""

    label: str
    before: Interval | None
    after: Interval | None
    apart: bool = False


def intervals_view(
    key: str,
    title: str,
    rows: Sequence[IntervalRow],
    note: str,
    *,
    best: float | None = None,
    words: tuple[str, str] = ("before", "after"),
    measure: Measure = ACCURACY,
) -> FigureView:
    """Return a figure of intervals: in each row ``before`` (grey, upper) and ``after`` (coloured, lower).

    The axis of shares begins at 0 and ends at 100 %, or earlier where all intervals are low. The axis of mean rewards
    includes 0 and all intervals.

    Args:
        key: file name of the exports.
        title: title of the figure.
        rows: from top to bottom.
        note: text below the figure.
        best: position of a dashed line, the initial checkpoint's best mean.
        words: names of ``before`` and ``after``.
        measure: unit of the values.
    """
    height, parts, entries = _intervals(rows, best, words, measure)
    table: list[Sequence[object]] = [["row", *(f"{word}{end}" for word in words for end in ("", ", low", ", high"))]]
    for row in rows:
        sides = [(i.mean, i.low, i.high) if i else ("",) * 3 for i in (row.before, row.after)]
        table.append([row.label, *sides[0], *sides[1]])
    described = [_interval_words(row, words, measure) for row in rows]
    return figure_view(key, title, (height, parts), described=described, legend=entries, rows=table, note=note)


def interval_file(title: str, rows: Sequence[IntervalRow], *, words: tuple[str, str], measure: Measure) -> Markup:
    """Return the drawing of `intervals_view` as a file."""
    height, parts, entries = _intervals(rows, None, words, measure)
    described = "; ".join(_interval_words(row, words, measure) for row in rows)
    description, body = f"{title}. {described}", "".join(parts)
    return picture_file(title, height, entries, description=description, body=body, style=file_css())


def _intervals(
    rows: Sequence[IntervalRow], best: float | None, words: tuple[str, str], measure: Measure
) -> tuple[float, list[str], list[LegendEntry]]:
    """Return height, markup and legend of a drawing of intervals."""
    right, top = 22, 10
    above = 18 if any(len(row.label) > 11 for row in rows) else 0  # long labels are above their rows
    left = 22 if above else 84
    pair = any(row.before and row.after for row in rows)
    pitch = ((34 if pair else 20) + above) if above else 52 if pair else 34
    bottom = top + pitch * len(rows)
    shown = [interval for row in rows for interval in (row.before, row.after) if interval is not None]
    shares = measure is ACCURACY
    highest = max((interval.high for interval in shown), default=1.0)
    if shares:
        ticks = nice_ticks(0.0, min(1.0, max(0.05, highest)), 5)
    else:
        lowest = min((interval.low for interval in shown), default=0.0)
        ticks = nice_ticks(min(0.0, lowest), max(0.0, highest), 5)

    def at(value: float) -> float:
        place = (value - ticks[0]) / (ticks[-1] - ticks[0])
        return left + min(1.0, max(0.0, place)) * (WIDTH - left - right)

    parts = x_grid([(at(tick), f"{100 * tick:g}%" if shares else f"{tick:g}") for tick in ticks], top, bottom)
    for i, row in enumerate(rows):
        y = top + pitch * i
        if row.apart:
            parts.append(line("axis", (left, WIDTH - right), (y, y)))
        middle = y + above + (pitch - above) / 2
        place = (left, y + 14, row.label, "start") if above else (left - 10, middle + 4, row.label, "end")
        parts.append(text(*place, "rowlabel"))
        gap = 0 if row.before is None or row.after is None else 8 if above else 9
        pairs = ((row.before, words[0], 4, middle - gap), (row.after, words[1], 0, middle + gap))
        for interval, word, color, where in pairs:
            if interval is not None:
                span = f" (95 %: {measure.value(interval.low)} to {measure.value(interval.high)})"
                known = span if interval.low < interval.high else ""
                parts.append(
                    f"<g><title>{escape(f'{word}: {measure.value(interval.mean)}{known}')}</title>"
                    + line(f"whisker s{color}", (at(interval.low), at(interval.high)), (where, where))
                    + f'<circle class="f{color}" cx="{at(interval.mean):.1f}" cy="{where:.1f}" r="5.5"/></g>'
                )
    if best is not None:  # not through the rows of pass@k
        end = top + pitch * next((i for i, row in enumerate(rows) if row.apart), len(rows))
        parts.append(line("target", (at(best), at(best)), (top, end)))
    parts.append(text((left + WIDTH - right) / 2, bottom + 32, "share of responses" if shares else measure.name))
    entries = [LegendEntry(words[0], "dot", 4)] if any(row.before for row in rows) else []
    entries += [LegendEntry(words[1], "dot")] if any(row.after for row in rows) else []
    entries += [LegendEntry("initial checkpoint's best temperature", "target")] if best is not None else []
    return bottom + 38, parts, entries


def _interval_words(row: IntervalRow, words: tuple[str, str], measure: Measure) -> str:
    """Write ``1: 24.0 % before, 54.3 % after``."""
    described = [f"{measure.value(i.mean)} {word}" for word, i in zip(words, (row.before, row.after), strict=True) if i]
    return f"{row.label}: {', '.join(described) or 'not measured'}"


# Charts: lines over the training steps or another x.


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line of a chart.

    ``style`` is ``faint`` for raw values behind their running mean (not in the legend), ``steps`` for limits, and
    ``marks`` for single measurements (one sign each, the band as a whisker, no connecting line).
    """

    label: str  # in the legend and in the CSV's head
    points: Points  # (x, y), x ascending
    color: int = 0  # index of the palette, 0 to 5
    style: Literal["line", "faint", "steps", "marks"] = "line"
    band: Band = ()  # (x, low, high), drawn behind the line
    dots: bool = False  # draw each point as well, for series that are not measured at every step


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A chart over the training steps or another x."""

    key: str  # file name of the exports
    title: str
    series: tuple[Series, ...]  # the most important first: it is drawn last, on top; of stacked areas the lowest
    unit: Unit = "number"
    note: str = ""  # text below the chart
    y_low: float | None = None  # ends of the y axis; None: from the data
    y_high: float | None = None
    target: tuple[float, str] | None = None  # a horizontal line with its label
    marks: tuple[Mark, ...] = ()
    x_name: str = "training step"
    x_word: str = "step"  # name of a single x, in the crosshair's box and the CSV
    x_range: tuple[float, float] | None = None  # fixed, so that charts below each other align
    x_whole: bool = True  # ticks at whole numbers only
    x_log: bool = False  # logarithmic x axis; all x must be positive
    x_ticks: tuple[float, ...] = ()
    stacked: bool = False  # the series are areas that add up
    compact: bool = False  # about half as tall

    @property
    def empty(self) -> bool:
        return not any(series.points for series in self.series)


class PlotArea:
    """The plot area of a chart in SVG units, and its data range."""

    def __init__(self, chart: Chart) -> None:
        series = stacked(chart.series) if chart.stacked else chart.series
        xs = [x for s in series for x, _ in s.points] or [0.0, 1.0]
        ys = [y for s in series for _, y in s.points]
        ys += [value for s in series for _, low, high in s.band for value in (low, high)]
        ys = ys or [0.0, 1.0]
        if chart.target is not None:
            ys.append(chart.target[0])
        low = min(ys) if chart.y_low is None else chart.y_low
        high = max(ys) if chart.y_high is None else chart.y_high
        if high - low < 1e-12:
            room = 0.01 if chart.unit == "percent" else 1.0
            low, high = (low, low + room) if chart.y_low is not None else (low - room / 2, low + room / 2)
        x_low, x_high = chart.x_range or (min(xs), max(xs))
        if x_high <= x_low:
            x_low, x_high = (x_low / 1.5, x_high * 1.5) if chart.x_log else (x_low - 0.5, x_high + 0.5)
        self.x_low, self.x_high, self.x_log = x_low, x_high, chart.x_log
        self.y_ticks = nice_ticks(low, high, 3 if chart.compact else 5)
        self.height = COMPACT if chart.compact else TALL
        self.bottom = self.height - BOTTOM

    def x(self, value: float) -> float:
        low, high = self.x_low, self.x_high
        if self.x_log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.y_ticks[0]) / (self.y_ticks[-1] - self.y_ticks[0])
        return self.bottom - min(1.0, max(0.0, share)) * (self.bottom - TOP)


def chart_view(chart: Chart) -> FigureView:
    """Return the figure of a chart for a page, with crosshair."""
    entries = legend(chart)
    alike = len(entries) == 1 and entries[0].label.lower() == chart.title.lower()
    series = [
        {"label": s.label, "color": s.color, "points": [[x, float(f"{y:.5g}")] for x, y in thinned(s.points)]}
        for s in chart.series
        if s.points
    ]
    return FigureView(
        name=chart.key,
        title=chart.title,
        svg=draw(chart),
        frame=picture_file(chart.title, PlotArea(chart).height, entries),
        legend=() if alike else tuple((swatch(entry), entry.label) for entry in entries),
        csv=_link(to_csv(chart)),
        note=chart.note,
        table=values_table(chart),
        hover=hover_data(chart) | {"series": series},
    )


def hover_data(chart: Chart) -> dict[str, Any]:
    """Return the x range and the units for the crosshair. Charts of one ``group`` share their crosshair."""
    frame = PlotArea(chart)
    sides = {"left": LEFT, "right": WIDTH - RIGHT, "width": WIDTH, "bottom": frame.bottom}
    words = {"unit": chart.unit, "word": chart.x_word, "log": chart.x_log, "group": chart.x_word}
    return sides | {"low": frame.x_low, "high": frame.x_high} | words


def values_table(chart: Chart) -> tuple[tuple[str, ...], ...]:
    """Return head and rows of the chart's values at about a dozen evenly spaced x, including both ends."""
    series = [s for s in chart.series if s.style != "faint" and s.points]
    xs = sorted({x for s in series for x, _ in s.points})
    values = [{x: measured(y, chart.unit) for x, y in s.points} for s in series]
    rows = [(f"{x:g}", *(column.get(x, "–") for column in values)) for x in evenly(xs, TABLE_ROWS)]
    return ((chart.x_word, *(s.label for s in series)), *rows) if rows else ()


def evenly(values: Sequence[float], most: int) -> list[float]:
    """Return at most ``most`` of ``values``, evenly spaced by index, including both ends."""
    last = len(values) - 1
    if last < most:
        return list(values)
    return [values[i] for i in sorted({round(i * last / (most - 1)) for i in range(most)})]


def to_csv(chart: Chart) -> str:
    """Return every value of the chart as CSV: a row per x, a column per series and per end of its band."""
    columns: list[tuple[str, dict[float, float]]] = []
    for series in chart.series:
        columns.append((series.label, dict(series.points)))
        if series.band:
            columns.append((f"{series.label}, low", {x: low for x, low, _ in series.band}))
            columns.append((f"{series.label}, high", {x: high for x, _, high in series.band}))
    xs = sorted({x for _, values in columns for x in values})
    head = [chart.x_word, *(name for name, _ in columns)]
    return csv_text([head, *([f"{x:g}", *(repr(v[x]) if x in v else "" for _, v in columns)] for x in xs)])


def draw(chart: Chart, *, alone: bool = False) -> Markup:
    """Return the chart as an ``<svg>`` element; with ``alone`` as a file with colours, title and legend."""
    frame, entries = PlotArea(chart), legend(chart)
    parts = _axes(frame, chart) + _marks(frame, chart.marks)
    dashes = {entry.label: entry.dash for entry in entries}
    if chart.stacked:
        areas = reversed(stacked(chart.series))
        parts += [f'<path class="area f{s.color}" d="{_band_path(frame, s.band)}"/>' for s in areas]
    else:
        # raw values first, behind all lines; the first line is the most important one and is drawn last
        for _, series in sorted(enumerate(chart.series), key=lambda item: (item[1].style != "faint", -item[0])):
            parts += _line(frame, series, dashes.get(series.label, 0))
    if chart.target is not None:
        y = frame.y(chart.target[0])
        parts.append(line("target", (LEFT, WIDTH - RIGHT), (y, y)))
        parts.append(text(WIDTH - RIGHT, round(y - 5, 1), chart.target[1], "end"))
    body, words = "".join(parts), describe(chart)
    if alone:
        return picture_file(chart.title, frame.height, entries, description=words, body=body, style=file_css())
    cross = '<line class="cross" visibility="hidden" y1="0" y2="0"/>'
    return picture(chart.key, words, frame.height, body + cross)


def legend(chart: Chart) -> list[LegendEntry]:
    """Return the chart's legend. Lines differ in dash as well as in colour."""
    found: list[LegendEntry] = []
    lines = 0
    for series in chart.series:
        if series.style == "faint" or not series.points:
            continue
        if chart.stacked or series.style in ("steps", "marks"):
            sign: Sign = "area" if chart.stacked else "limit" if series.style == "steps" else "diamond"
            found.append(LegendEntry(series.label, sign, series.color))
        else:
            found.append(LegendEntry(series.label, "line", series.color, (lines + lines // 6) % 6))
            lines += 1
    return found


def describe(chart: Chart) -> str:
    """Return the chart in one sentence, for screen readers."""
    named = [s for s in chart.series if s.style != "faint" and s.points]
    ends = [f"{s.label} {tick_label(round(s.points[-1][1], 4), chart.unit)}" for s in named]
    last = max((s.points[-1][0] for s in chart.series if s.points), default=0.0)
    where = f"{chart.x_word} {last:g}" if chart.x_whole or chart.x_log else f"{last:.4g} {chart.x_word}"
    return f"{chart.title}. At {where}: {', '.join(ends) or 'nothing'}."


def tick_label(value: float, unit: Unit) -> str:
    """Return the label of a value on the y axis."""
    if unit == "percent":
        return f"{100 * value:g}%"
    size = abs(value)
    if size >= 10_000:
        words = f"{value / 1000:g}k" if size < 1e6 else f"{value:.3g}"
    else:
        words = (
            number_text(value) if size == 0 or size >= 1e-4 else f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")
        )
    return words + (" s" if unit == "seconds" else "")


def thinned(points: Points, most: int = MOST_DRAWN) -> Points:
    """Return at most ``most`` points, the means of neighbouring ones."""
    if len(points) <= most:
        return points
    size = math.ceil(len(points) / most)
    chunks = [points[i : i + size] for i in range(0, len(points), size)]
    return tuple((sum(x for x, _ in c) / len(c), sum(y for _, y in c) / len(c)) for c in chunks)


def stacked(series: Sequence[Series]) -> tuple[Series, ...]:
    """Return each series on top of the previous ones, as a band between two sums. Missing values count as 0."""
    below = dict.fromkeys(sorted({x for s in series for x, _ in s.points}), 0.0)
    layers: list[Series] = []
    for s in series:
        values = dict(s.points)
        top = {x: y + values.get(x, 0.0) for x, y in below.items()}
        band = tuple((x, below[x], top[x]) for x in top)
        layers.append(Series(label=s.label, points=tuple(top.items()), color=s.color, band=band))
        below = top
    return tuple(layers)


def _axes(frame: PlotArea, chart: Chart) -> list[str]:
    parts: list[str] = []
    right, bottom = WIDTH - RIGHT, frame.bottom
    for tick in frame.y_ticks:
        y = frame.y(tick)
        parts.append(line("grid", (LEFT, right), (y, y)))
        parts.append(text(LEFT - 6, round(y + 4, 1), tick_label(tick, chart.unit), "end"))
    ticks = nice_ticks(frame.x_low, frame.x_high, 5)
    kept = [t for t in ticks if frame.x_low <= t <= frame.x_high and (t == int(t) or not chart.x_whole)]
    if chart.x_ticks:  # fixed ticks are thinned from the right until they have room
        kept = []
        for tick in sorted(chart.x_ticks, reverse=True):
            if not kept or frame.x(kept[-1]) - frame.x(tick) >= 5 * LETTER:
                kept.append(tick)
    for tick in sorted(kept):
        x = frame.x(tick)
        # response limits above ten thousand tokens in their usual form: 32768 as 32k
        words = f"{tick / 1024:g}k" if tick >= 10_000 and tick % 1024 == 0 else f"{tick:g}"
        parts.append(line("axis", (x, x), (bottom, bottom + 4)) + text(x, bottom + 16, words))
    parts.append(line("axis", (LEFT, right), (bottom, bottom)))
    parts.append(text((LEFT + right) / 2, frame.height - 4, chart.x_name))
    return parts


def _marks(frame: PlotArea, marks: Sequence[Mark]) -> list[str]:
    """Return a line per mark, with as long a label as its neighbours leave room for."""
    parts: list[str] = []
    taken = float(LEFT)
    for i, (at, words) in enumerate(marks):
        x = frame.x(at)
        room = frame.x(marks[i + 1][0]) if i + 1 < len(marks) else float(WIDTH)
        parts.append(line("mark", (x, x), (TOP - 12, frame.bottom)))
        for label in (words, words.partition(":")[0]):
            width = LETTER * len(label) + 4
            right, left = x + width <= room, x - width >= taken
            if right or left:
                parts.append(text(x + 4 if right else x - 4, TOP - 6, label, "start" if right else "end"))
                taken = x + width if right else x
                break
        else:
            taken = x
    return parts


def _line(frame: PlotArea, series: Series, dash: int) -> list[str]:
    color, at = series.color, [(frame.x(x), frame.y(y)) for x, y in thinned(series.points)]
    if series.style == "marks":
        whiskers = [(frame.x(x), frame.y(low), frame.y(high)) for x, low, high in series.band]
        parts = [f'<path class="thin s{color}" d="M{x:.1f} {low:.1f}V{high:.1f}"/>' for x, low, high in whiskers]
        return parts + [_diamond(color, x, y) for x, y in at]
    parts = [f'<path class="band f{color}" d="{_band_path(frame, series.band)}"/>'] if series.band else []
    if series.dots or len(at) == 1:
        parts += [f'<circle class="dot f{color}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y in at]
    if len(at) > 1:
        shape = {"faint": "faint", "steps": "line steps"}.get(series.style, f"line d{dash}")
        parts.append(f'<path class="{shape} s{color}" d="{_path(at, steps=series.style == "steps")}"/>')
    return parts


def _path(at: Sequence[Point], *, steps: bool = False) -> str:
    parts = [f"{f'H{x:.1f}' if steps else ''}L{x:.1f} {y:.1f}" for x, y in at[1:]]
    return f"M{at[0][0]:.1f} {at[0][1]:.1f}" + "".join(parts)


def _band_path(frame: PlotArea, band: Band) -> str:
    upper = [(frame.x(x), frame.y(high)) for x, high in thinned(tuple((x, high) for x, _, high in band))]
    lower = [(frame.x(x), frame.y(low)) for x, low in thinned(tuple((x, low) for x, low, _ in band))]
    return f"{_path([*upper, *lower[::-1]])}Z"
