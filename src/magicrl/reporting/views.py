"""Figures as the page shows them: a drawing with its legend, values, exports and crosshair."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from magicrl.reporting.bars import BarPlot, bars_csv, bars_height, bars_legend, draw_bars
from magicrl.reporting.canvas import WIDTH, Entry, picture_frame, swatch
from magicrl.reporting.charts import Chart, Series, Unit, thinned, to_csv
from magicrl.reporting.svg import LEFT, RIGHT, draw, drawn_series, frame_of, legend, legend_entries
from magicrl.reporting.timeline import TimelineRow, draw_timeline, timeline_csv, timeline_height, timeline_legend
from magicrl.reporting.wording import measured

TABLE_ROWS = 12


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
    """

    name: str
    title: str
    svg: Markup
    frame: Markup
    legend: tuple[tuple[Markup, str], ...]
    csv: str = ""
    note: str = ""
    table: Table | None = None


def chart_view(chart: Chart) -> FigureView:
    """A chart over the training steps."""
    entries = legend(chart)
    alike = len(entries) == 1 and entries[0].label.lower() == chart.title.lower()
    return FigureView(
        name=chart.key,
        title=chart.title,
        svg=draw(chart),
        frame=picture_frame(title=chart.title, height=frame_of(chart)[0].height, legend=entries),
        legend=() if alike else signs(entries),
        csv=data_uri("text/csv", to_csv(chart)),
        note=chart.note,
        table=values_table(chart),
    )


def timeline_view(rows: Sequence[TimelineRow]) -> FigureView:
    """What ran when inside a few steps."""
    return FigureView(
        name="timeline",
        title="Inside a step",
        svg=draw_timeline(rows),
        frame=picture_frame(title="Inside a step", height=timeline_height(rows), legend=timeline_legend(rows)),
        legend=signs(timeline_legend(rows)),
        csv=data_uri("text/csv", timeline_csv(rows)),
        note="The step of median length and the slowest one of each stage. Judging that hid behind generation has no "
        "bar of its own; what no bar covers is bookkeeping.",
    )


def bars_view(plot: BarPlot, note: str) -> FigureView:
    """A bar plot as the page shows it."""
    return FigureView(
        name=plot.key,
        title=plot.title,
        svg=draw_bars(plot),
        frame=picture_frame(title=plot.title, height=bars_height(plot), legend=bars_legend(plot)),
        legend=signs(bars_legend(plot)),
        csv=data_uri("text/csv", bars_csv(plot)),
        note=note,
    )


def hover(chart: Chart) -> dict[str, Any]:
    """What the crosshair needs: the plot area, the x range and every line's values."""
    shown = {s.label for s in drawn_series(chart)}
    return plot_area(chart) | {
        "series": [
            {
                "label": s.label,
                "color": s.color,
                "points": [[x, float(f"{y:.5g}")] for x, y in thinned(s.points)],
            }
            for s in chart.series
            if s.points and s.label in shown
        ],
    }


def plot_area(chart: Chart) -> dict[str, Any]:
    """Where the chart's x go, and the words for its values; charts of one ``group`` share their crosshair."""
    frame, _ = frame_of(chart)
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


def signs(entries: Sequence[Entry]) -> tuple[tuple[Markup, str], ...]:
    """The legend of a page: each entry's sign and words."""
    return tuple((swatch(entry), entry.label) for entry in entries)


def data_uri(media_type: str, text: str) -> str:
    """``text`` as a link that needs no server."""
    return f"data:{media_type};charset=utf-8;base64,{base64.b64encode(text.encode()).decode()}"


def values_table(chart: Chart) -> Table | None:
    """The chart's values at about a dozen evenly spaced x, the first and the last among them."""
    series = legend_entries(chart)
    xs = sorted({x for s in series for x, _ in s.points})
    if not xs:
        return None
    last = len(xs) - 1
    picked = [xs[i] for i in sorted({round(i * last / (TABLE_ROWS - 1)) for i in range(TABLE_ROWS)})]
    values = [_lookup(s, chart.unit) for s in series]
    rows = tuple((f"{x:g}", *(column.get(x, "–") for column in values)) for x in picked)
    return Table(head=(chart.x_word, *(s.label for s in series)), rows=rows)


def _lookup(series: Series, unit: Unit) -> Mapping[float, str]:
    return {x: measured(y, unit) for x, y in series.points}
