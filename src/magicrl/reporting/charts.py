"""The drawings of a page as SVG: what all share, and charts of lines with legend, CSV and values in words.

The page's style sheet colours the drawings, so that one drawing serves a light, a dark and a printed page. Why no
plotting package draws them: docs/report.md.
"""

from __future__ import annotations

import base64
import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from markupsafe import Markup, escape

from magicrl.reporting.wording import measured, number

Point: TypeAlias = tuple[float, float]
Points: TypeAlias = tuple[Point, ...]
Band: TypeAlias = tuple[tuple[float, float, float], ...]
LineStyle: TypeAlias = Literal["line", "faint", "steps", "marks"]
Unit: TypeAlias = Literal["percent", "number", "seconds"]
Sign: TypeAlias = Literal["line", "area", "dot", "diamond", "limit", "target"]

WIDTH = 460
"""Of every drawing, in SVG units; a page scales it to its card."""

PALETTE = ("#1a3fc9", "#c65a06", "#0a8f63", "#8a1457", "#7a7f96", "#4a3a05")
"""Light colours of the series. Any two stay apart (CIE76 above 20) with each kind of colour blindness, and lines
differ in their dashes besides."""

DARK_PALETTE = ("#5c95ff", "#ff8048", "#8fe8c4", "#ffa6f0", "#8b9299", "#fdf3a2")
"""The same on a dark page."""

DASHES = ("none", "7 3", "2.5 2.5", "10 3 2.5 3", "5 4", "14 4")
"""Of the first, second, ... line of a drawing."""

MOST_DRAWN = 700
"""Points of one line in a drawing; the CSV always has all."""

TABLE_ROWS = 12
"""Of the values in words below a chart."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One entry of a legend: its words, its sign, the palette's slot and the dash of its line."""

    label: str
    sign: Sign
    color: int = 0
    dash: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Some values of a figure in words: a head, and rows whose first cell is their heading."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FigureView:
    """One figure of a page.

    Attributes:
        name: of its exports, without ending.
        title: its heading.
        svg: the drawing; several of which one is shown, where the x axis can be chosen.
        frame: title and legend of the drawing as a file, into which the page puts what it shows.
        legend: (sign, words) pairs.
        csv: its data as a link; empty where the page writes them from the curves it holds.
        note: how to read it.
        table: some of its values, for those who cannot see the drawing.
        hover: what the crosshair needs; None for a drawing without.
    """

    name: str
    title: str
    svg: Markup
    frame: Markup
    legend: tuple[tuple[Markup, str], ...]
    csv: str = ""
    note: str = ""
    table: Table | None = None
    hover: Mapping[str, Any] | None = None


# Style, legends and the frame of a drawing.


def page_css() -> str:
    """The palette as variables of a light, a dark and a printed page, and what the drawings need."""
    light = "".join(f"--c{i}:{c};" for i, c in enumerate(PALETTE))
    dark = "".join(f"--c{i}:{c};" for i, c in enumerate(DARK_PALETTE))
    variables = [f"var(--c{i})" for i in range(len(PALETTE))]
    return (
        f":root{{{light}}}@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"
        f"{_SHAPES}{_series_css(variables)}.area{{stroke:var(--card)}}"
    )


def file_css() -> str:
    """The style of a drawing as a file: always light."""
    return _ALONE + _SHAPES + _series_css(PALETTE)


def _series_css(colors: Sequence[str]) -> str:
    """Classes of stroke (s0...), fill (f0...) and dash (d0...)."""
    rules = [f".s{i}{{stroke:{c}}}.f{i}{{fill:{c}}}" for i, c in enumerate(colors)]
    return "".join(rules) + "".join(f".d{i}{{stroke-dasharray:{dash}}}" for i, dash in enumerate(DASHES))


def arm_sign(slot: int) -> Entry:
    """The legend's entry of an arm, as its lines are drawn."""
    return Entry(label="", sign="line", color=slot % len(PALETTE), dash=(slot + slot // 6) % 6)


def swatch(entry: Entry) -> Markup:
    """A legend's sign as an element of its own, for the page."""
    return Markup(f'<svg class="key" viewBox="0 0 22 14" aria-hidden="true">{_sign(entry, 0, 7)}</svg>')


def legend_signs(entries: Sequence[Entry]) -> tuple[tuple[Markup, str], ...]:
    """The legend of a page: each entry's sign and words."""
    return tuple((swatch(entry), entry.label) for entry in entries)


def _sign(entry: Entry, x: float, y: float) -> str:
    """The sign of a legend entry, 22 wide, with its middle at height ``y``."""
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
    """The ``<svg>`` of a drawing in a page; ``body`` is markup."""
    return Markup(
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height:g}" role="img" data-chart="{escape(key)}" '
        f'aria-label="{escape(description)}">{body}</svg>'
    )


def picture_file(
    title: str, height: float, legend: Sequence[Entry], *, description: str = "", body: str = "", style: str = ""
) -> Markup:
    """A drawing as a file with its own title and legend. Without body and style: the page's script puts them in."""
    longest = max((len(entry.label) for entry in legend), default=0)
    per_row = 1 if longest > 32 else 2 if longest > 18 else 3
    pitch = (WIDTH - 24) / per_row
    whole = height + 24 + 18 * -(-len(legend) // per_row)
    entries = "".join(
        _sign(entry, 12 + pitch * (i % per_row), height + 18 * (i // per_row) + 8)
        + f'<text x="{12 + pitch * (i % per_row) + 28:g}" y="{height + 18 * (i // per_row) + 12:g}">'
        + f"{escape(entry.label)}</text>"
        for i, entry in enumerate(legend)
    )
    return Markup(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {whole:g}" width="{2 * WIDTH}" '
        f'height="{2 * whole:g}"><title>{escape(description or title)}</title>'
        f"<style>{style}</style>"
        f'<rect width="{WIDTH}" height="{whole:g}" fill="#fff"/>'
        f'<text class="title" x="12" y="17">{escape(title)}</text>'
        f'<g transform="translate(0 18)">{body}{entries}</g></svg>'
    )


def figure_view(
    *,
    key: str,
    title: str,
    description: str,
    height: float,
    body: Iterable[str],
    legend: Sequence[Entry],
    rows: Iterable[Sequence[object]],
    note: str,
) -> FigureView:
    """A figure without crosshair from its drawing (``body`` is markup) and the ``rows`` of its CSV."""
    return FigureView(
        name=key,
        title=title,
        svg=picture(key, f"{title}. {description}", height, "".join(body)),
        frame=picture_file(title, height, legend),
        legend=legend_signs(legend),
        csv=data_uri("text/csv", csv_text(rows)),
        note=note,
    )


def csv_text(rows: Iterable[Sequence[object]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def data_uri(media_type: str, text: str) -> str:
    """``text`` as a link that needs no server."""
    return f"data:{media_type};charset=utf-8;base64,{base64.b64encode(text.encode()).decode()}"


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


def text(x: float, y: float, words: str, anchor: str = "middle", kind: str = "tick") -> str:
    """Words of a drawing, escaped."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


def line(kind: str, x: tuple[float, float], y: tuple[float, float]) -> str:
    """A straight line between two corners."""
    return f'<line class="{kind}" x1="{x[0]:.1f}" x2="{x[1]:.1f}" y1="{y[0]:.1f}" y2="{y[1]:.1f}"/>'


def x_grid(ticks: Iterable[tuple[float, str]], top: float, bottom: float) -> list[str]:
    """Vertical lines at x with their words below, for drawings whose rows stand below each other."""
    return [line("grid", (x, x), (top, bottom)) + text(x, bottom + 16, words) for x, words in ticks]


# Charts: lines over the training steps, or over another x.


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
        y_low, y_high: fixed ends of the y axis; default from the data.
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


LEFT, RIGHT, TOP, BOTTOM = 48, 20, 20, 38
TALL, COMPACT = 236, 150
LETTER = 8.0
"""Width of a letter at the largest size that the page draws it."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The plot area of a chart in SVG units, and the data range it shows."""

    x_low: float
    x_high: float
    y_ticks: tuple[float, ...]
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
        share = (value - self.y_ticks[0]) / (self.y_ticks[-1] - self.y_ticks[0])
        return self.bottom - min(1.0, max(0.0, share)) * (self.bottom - TOP)


def frame_of(chart: Chart) -> Frame:
    """Where the chart's data go."""
    series = stacked(chart.series) if chart.stacked else chart.series
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
    x_low, x_high = chart.x_range or (min(xs), max(xs))
    if x_high <= x_low:
        x_low, x_high = (x_low / 1.5, x_high * 1.5) if chart.x_log else (x_low - 0.5, x_high + 0.5)
    ticks = tuple(nice_ticks(low, high, 3 if chart.compact else 5))
    return Frame(x_low, x_high, ticks, COMPACT if chart.compact else TALL, chart.x_log)


def chart_view(chart: Chart) -> FigureView:
    """A chart as the page shows it, with its crosshair."""
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
        frame=picture_file(chart.title, frame_of(chart).height, entries),
        legend=() if alike else legend_signs(entries),
        csv=data_uri("text/csv", to_csv(chart)),
        note=chart.note,
        table=values_table(chart),
        hover=plot_area(chart) | {"series": series},
    )


def plot_area(chart: Chart) -> dict[str, Any]:
    """Where the chart's x go, and the words for its values; charts of one ``group`` share their crosshair."""
    frame = frame_of(chart)
    return {
        "left": LEFT,
        "right": WIDTH - RIGHT,
        "width": WIDTH,
        "bottom": frame.bottom,
        "low": frame.x_low,
        "high": frame.x_high,
        "unit": chart.unit,
        "word": chart.x_word,
        "log": chart.x_log,
        "group": chart.x_word,
    }


def values_table(chart: Chart) -> Table | None:
    """The chart's values at about a dozen evenly spaced x, the first and the last among them."""
    series = [s for s in chart.series if s.style != "faint" and s.points]
    xs = sorted({x for s in series for x, _ in s.points})
    if not xs:
        return None
    last = len(xs) - 1
    picked = [xs[i] for i in sorted({round(i * last / (TABLE_ROWS - 1)) for i in range(TABLE_ROWS)})]
    values = [{x: measured(y, chart.unit) for x, y in s.points} for s in series]
    rows = tuple((f"{x:g}", *(column.get(x, "–") for column in values)) for x in picked)
    return Table(head=(chart.x_word, *(s.label for s in series)), rows=rows)


def to_csv(chart: Chart) -> str:
    """Every value of the chart: a row an x, a column a series, its band's ends beside it."""
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
    """The chart as an ``<svg>`` element; ``alone`` as a file with colours, title and legend of its own."""
    frame, entries = frame_of(chart), legend(chart)
    parts = _axes(frame, chart) + _marks(frame, chart.marks)
    dashes = {entry.label: entry.dash for entry in entries}
    if chart.stacked:
        areas = reversed(stacked(chart.series))
        parts += [f'<path class="area f{s.color}" d="{_band_path(frame, s.band)}"/>' for s in areas]
    else:
        raw = [series for series in chart.series if series.style == "faint"]
        front = [series for series in chart.series if series.style != "faint"]
        for series in (*reversed(raw), *reversed(front)):  # the first is the most important: drawn last, on top
            parts += _line(frame, series, dashes.get(series.label, 0))
    if chart.target is not None:
        y = frame.y(chart.target[0])
        parts.append(line("target", (LEFT, WIDTH - RIGHT), (y, y)))
        parts.append(text(WIDTH - RIGHT, round(y - 5, 1), chart.target[1], "end"))
    description = describe(chart)
    if alone:
        return picture_file(
            chart.title, frame.height, entries, description=description, body="".join(parts), style=file_css()
        )
    parts.append('<line class="cross" visibility="hidden" y1="0" y2="0"/>')
    return picture(chart.key, description, frame.height, "".join(parts))


def legend(chart: Chart) -> list[Entry]:
    """The chart's legend; lines differ in dash as well as in colour."""
    found: list[Entry] = []
    lines = 0
    for series in chart.series:
        if series.style == "faint" or not series.points:
            continue
        if chart.stacked or series.style in ("steps", "marks"):
            sign: Sign = "area" if chart.stacked else "limit" if series.style == "steps" else "diamond"
            found.append(Entry(label=series.label, sign=sign, color=series.color))
        else:
            found.append(Entry(label=series.label, sign="line", color=series.color, dash=(lines + lines // 6) % 6))
            lines += 1
    return found


def describe(chart: Chart) -> str:
    """The chart in one sentence, for those who cannot see it."""
    named = [s for s in chart.series if s.style != "faint" and s.points]
    ends = [f"{s.label} {tick_label(round(s.points[-1][1], 4), chart.unit)}" for s in named]
    last = max((s.points[-1][0] for s in chart.series if s.points), default=0.0)
    where = f"{chart.x_word} {last:g}" if chart.x_whole or chart.x_log else f"{last:.4g} {chart.x_word}"
    return f"{chart.title}. At {where}: {', '.join(ends) or 'nothing'}."


def tick_label(value: float, unit: Unit) -> str:
    """A value as the y axis writes it."""
    if unit == "percent":
        return f"{100 * value:g}%"
    size = abs(value)
    if size >= 10_000:
        words = f"{value / 1000:g}k" if size < 1e6 else f"{value:.3g}"
    else:
        words = number(value) if size == 0 or size >= 1e-4 else f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")
    return words + (" s" if unit == "seconds" else "")


def thinned(points: Points, most: int = MOST_DRAWN) -> Points:
    """At most ``most`` points: means of neighbouring ones."""
    if len(points) <= most:
        return points
    size = math.ceil(len(points) / most)
    chunks = [points[i : i + size] for i in range(0, len(points), size)]
    return tuple((sum(x for x, _ in c) / len(c), sum(y for _, y in c) / len(c)) for c in chunks)


def stacked(series: Sequence[Series]) -> tuple[Series, ...]:
    """Each series on top of those before it: band from the sum below to the new sum. Missing values count 0."""
    below = dict.fromkeys(sorted({x for s in series for x, _ in s.points}), 0.0)
    layers: list[Series] = []
    for s in series:
        values = dict(s.points)
        top = {x: y + values.get(x, 0.0) for x, y in below.items()}
        band = tuple((x, below[x], top[x]) for x in top)
        layers.append(Series(label=s.label, points=tuple(top.items()), color=s.color, band=band))
        below = top
    return tuple(layers)


def _axes(frame: Frame, chart: Chart) -> list[str]:
    parts: list[str] = []
    right, bottom = WIDTH - RIGHT, frame.bottom
    for tick in frame.y_ticks:
        y = frame.y(tick)
        parts.append(line("grid", (LEFT, right), (y, y)))
        parts.append(text(LEFT - 6, round(y + 4, 1), tick_label(tick, chart.unit), "end"))
    for tick in _x_ticks(frame, chart):
        x = frame.x(tick)
        # limits beyond ten thousand tokens in their customary form: 32768 as 32k
        words = f"{tick / 1024:g}k" if tick >= 10_000 and tick % 1024 == 0 else f"{tick:g}"
        parts.append(line("axis", (x, x), (bottom, bottom + 4)) + text(x, bottom + 16, words))
    parts.append(line("axis", (LEFT, right), (bottom, bottom)))
    parts.append(text((LEFT + right) / 2, frame.height - 4, chart.x_name))
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


def _marks(frame: Frame, marks: Sequence[Mark]) -> list[str]:
    """A line a mark, labelled as fully as its neighbours leave room."""
    parts: list[str] = []
    taken = float(LEFT)
    for i, mark in enumerate(marks):
        x = frame.x(mark.x)
        room = frame.x(marks[i + 1].x) if i + 1 < len(marks) else float(WIDTH)
        parts.append(line("mark", (x, x), (TOP - 12, frame.bottom)))
        for label in (mark.label, mark.label.partition(":")[0]):
            width = LETTER * len(label) + 4
            right, left = x + width <= room, x - width >= taken
            if right or left:
                parts.append(text(x + 4 if right else x - 4, TOP - 6, label, "start" if right else "end"))
                taken = x + width if right else x
                break
        else:
            taken = x
    return parts


def _line(frame: Frame, series: Series, dash: int) -> list[str]:
    color = series.color
    if series.style == "marks":
        return [
            f'<path class="thin s{color}" d="M{frame.x(x):.1f} {frame.y(low):.1f}V{frame.y(high):.1f}"/>'
            for x, low, high in series.band
        ] + [_diamond(color, frame.x(x), frame.y(y)) for x, y in series.points]
    parts: list[str] = []
    if series.band:
        parts.append(f'<path class="band f{color}" d="{_band_path(frame, series.band)}"/>')
    points = thinned(series.points)
    if series.dots or len(points) == 1:
        parts += [
            f'<circle class="dot f{color}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="2.6"/>' for x, y in points
        ]
    if len(points) > 1:
        shape = {"faint": "faint", "steps": "line steps"}.get(series.style, f"line d{dash}")
        path = _path(frame, points, steps=series.style == "steps")
        parts.append(f'<path class="{shape} s{color}" d="{path}"/>')
    return parts


def _path(frame: Frame, points: Points, *, steps: bool = False) -> str:
    parts: list[str] = []
    for i, (x, y) in enumerate(points):
        if i and steps:
            parts.append(f"H{frame.x(x):.1f}")
        parts.append(f"{'L' if i else 'M'}{frame.x(x):.1f} {frame.y(y):.1f}")
    return "".join(parts)


def _band_path(frame: Frame, band: Band) -> str:
    upper = _path(frame, thinned(tuple((x, high) for x, _, high in band)))
    lower = _path(frame, thinned(tuple((x, low) for x, low, _ in band))[::-1])
    return f"{upper}{lower.replace('M', 'L', 1)}Z"
