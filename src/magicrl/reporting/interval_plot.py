"""The figure of the headline: scores before and after with 95 % intervals, a row a temperature or pass@k."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from magicrl.reporting.canvas import WIDTH, Entry, picture
from magicrl.reporting.charts import nice_ticks
from magicrl.reporting.run_folder import Interval
from magicrl.reporting.wording import percent

LEFT, RIGHT, TOP, ROW, BOTTOM = 84, 22, 10, 52, 34

BEFORE, AFTER = 4, 0
"""Slots of the palette."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IntervalRow:
    """One row: its label and the two intervals, shares in [0, 1]; ``apart`` draws a rule above it."""

    label: str
    before: Interval | None
    after: Interval | None
    apart: bool = False


def intervals_legend(rows: Sequence[IntervalRow], best: float | None) -> list[Entry]:
    """What the plot's signs mean."""
    entries = [
        Entry(label="before", sign="dot", color=BEFORE) if any(r.before for r in rows) else None,
        Entry(label="after", sign="dot", color=AFTER) if any(r.after for r in rows) else None,
        Entry(label="start's best temperature", sign="target") if best is not None else None,
    ]
    return [entry for entry in entries if entry is not None]


def draw_intervals(
    rows: Sequence[IntervalRow], best: float | None, *, key: str = "intervals", title: str = "", alone: bool = False
) -> Markup:
    """Before (grey, upper) and after (coloured, lower) in each row; dashed at ``best``, the start's best mean.

    The axis begins at 0 and ends at 100 %, or earlier where all intervals lie low.
    """
    highest = max((i.high for row in rows for i in (row.before, row.after) if i is not None), default=1.0)
    ticks = nice_ticks(0.0, min(1.0, max(0.05, highest)), 5)
    axis = _Axis(ticks[-1])
    bottom = TOP + ROW * len(rows)
    parts: list[str] = []
    for tick in ticks:
        x = axis.x(tick)
        parts.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>'
            f'<text class="tick" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{100 * tick:g}%</text>'
        )
    for i, row in enumerate(rows):
        middle = TOP + ROW * i + ROW / 2
        if row.apart:
            y = TOP + ROW * i
            parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(
            f'<text class="rowlabel" x="{LEFT - 10}" y="{middle + 4:.1f}" text-anchor="end">{escape(row.label)}</text>'
        )
        parts.append(axis.interval(row.before, middle - 9, BEFORE, "before"))
        parts.append(axis.interval(row.after, middle + 9, AFTER, "after"))
    if best is not None:
        end = TOP + ROW * next((i for i, row in enumerate(rows) if row.apart), len(rows))
        parts.append(f'<line class="target" x1="{axis.x(best):.1f}" x2="{axis.x(best):.1f}" y1="{TOP}" y2="{end}"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="tick" x="{middle:.1f}" y="{bottom + 32}" text-anchor="middle">share of answers</text>')
    return picture(
        key=key,
        title=title,
        description=f"{title}. " + "; ".join(_words(row) for row in rows),
        height=bottom + BOTTOM + 4,
        body="".join(parts),
        legend=intervals_legend(rows, best),
        alone=alone,
    )


def intervals_csv(rows: Sequence[IntervalRow]) -> str:
    """Every value of the plot, a row a row."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["row", *(f"{word}{end}" for word in ("before", "after") for end in ("", ", low", ", high"))])
    for row in rows:
        cells = [(i.mean, i.low, i.high) if i is not None else ("", "", "") for i in (row.before, row.after)]
        writer.writerow([row.label, *cells[0], *cells[1]])
    return out.getvalue()


def _words(row: IntervalRow) -> str:
    """``1: 24.0 % before, 54.3 % after``."""
    told = [f"{percent(i.mean)} {word}" for word, i in (("before", row.before), ("after", row.after)) if i is not None]
    return f"{row.label}: {', '.join(told) or 'not measured'}"


@dataclass(frozen=True, slots=True)
class _Axis:
    high: float

    def x(self, share: float) -> float:
        return LEFT + min(1.0, max(0.0, share / self.high)) * (WIDTH - LEFT - RIGHT)

    def interval(self, interval: Interval | None, y: float, color: int, word: str) -> str:
        if interval is None:
            return ""
        low, high, mean = self.x(interval.low), self.x(interval.high), self.x(interval.mean)
        title = f"{word}: {percent(interval.mean)} (95 %: {percent(interval.low)} to {percent(interval.high)})"
        return (
            f'<g><title>{escape(title)}</title><line class="whisker s{color}" x1="{low:.1f}" x2="{high:.1f}" '
            f'y1="{y:.1f}" y2="{y:.1f}"/><circle class="f{color}" cx="{mean:.1f}" cy="{y:.1f}" r="5.5"/></g>'
        )
