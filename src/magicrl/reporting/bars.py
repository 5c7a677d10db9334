"""Horizontal bars: one row a name, its value as a length."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass

from markupsafe import Markup, escape

from magicrl.reporting.canvas import WIDTH, Entry, picture
from magicrl.reporting.charts import Unit, nice_ticks
from magicrl.reporting.svg import tick_label
from magicrl.reporting.wording import measured

LEFT, RIGHT, TOP, ROW, BOTTOM = 96, 96, 4, 19, 40
LETTER = 8
"""Width of a letter of a name, at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One row; ``words`` stand behind the bar."""

    name: str
    value: float
    words: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class BarPlot:
    """Rows, the longest bar usually first.

    Attributes:
        color: slot of the palette.
        left: room for the names, in SVG units.
        limit: a vertical line that no bar should pass, with its words.
    """

    key: str
    title: str
    x_name: str
    bars: tuple[Bar, ...]
    unit: Unit = "number"
    color: int = 0
    left: int = LEFT
    limit: tuple[float, str] | None = None


def bars_height(plot: BarPlot) -> float:
    """Of the drawing, in SVG units."""
    return TOP + ROW * len(plot.bars) + BOTTOM


def bars_legend(plot: BarPlot) -> tuple[Entry, ...]:
    """What the dashed line means; nothing without one."""
    return (Entry(label=plot.limit[1], sign="target"),) if plot.limit else ()


def draw_bars(plot: BarPlot) -> Markup:
    """The plot as an ``<svg>`` for the page."""
    longest = max([bar.value for bar in plot.bars] + ([plot.limit[0]] if plot.limit else []), default=1.0)
    ticks = nice_ticks(0.0, longest or 1.0, 4)
    left, letters = plot.left, plot.left // LETTER
    scale = (WIDTH - left - RIGHT) / ticks[-1]
    bottom = TOP + ROW * len(plot.bars)
    limit = None if plot.limit is None else left + plot.limit[0] * scale
    parts = [
        f'<line class="grid" x1="{left + tick * scale:.1f}" x2="{left + tick * scale:.1f}" y1="{TOP}" y2="{bottom}"/>'
        f'<text class="tick" x="{left + tick * scale:.1f}" y="{bottom + 15}" text-anchor="middle">'
        f"{tick_label(tick, plot.unit)}</text>"
        for tick in ticks
    ]
    for i, bar in enumerate(plot.bars):
        y = TOP + ROW * i
        name = bar.name if len(bar.name) <= letters else bar.name[: letters - 1] + "…"
        width = max(1.0, bar.value * scale)
        words_at = left + width + 5
        if limit is not None and words_at - 3 < limit < words_at + LETTER * len(bar.words):
            words_at = limit + 5  # the line would go through them
        parts.append(
            f'<text class="rowlabel token" x="{left - 6}" y="{y + 13.5}" text-anchor="end">{escape(name)}</text>'
            f'<rect class="area f{plot.color}" x="{left}" y="{y + 3}" width="{width:.1f}" height="{ROW - 6}">'
            f"<title>{escape(_words(bar, plot.unit))}</title></rect>"
            f'<text class="tick" x="{words_at:.1f}" y="{y + 13.5}">{escape(bar.words)}</text>'
        )
    if limit is not None:
        parts.append(f'<line class="target" x1="{limit:.1f}" x2="{limit:.1f}" y1="{TOP}" y2="{bottom}"/>')
    middle = (left + WIDTH - RIGHT) / 2
    parts.append(
        f'<text class="tick" x="{middle:.1f}" y="{bottom + 32}" text-anchor="middle">{escape(plot.x_name)}</text>'
    )
    return picture(
        key=plot.key,
        title=plot.title,
        description=f"{plot.title}. " + "; ".join(_words(bar, plot.unit) for bar in plot.bars),
        height=bars_height(plot),
        body="".join(parts),
        legend=bars_legend(plot),
        alone=False,
    )


def bars_csv(plot: BarPlot) -> str:
    """Name, value and words of every row."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["name", plot.x_name, "words"])
    writer.writerows([bar.name, repr(bar.value), bar.words] for bar in plot.bars)
    return out.getvalue()


def _words(bar: Bar, unit: Unit) -> str:
    return f"{bar.name}: {measured(bar.value, unit)}" + (f" ({bar.words})" if bar.words else "")
