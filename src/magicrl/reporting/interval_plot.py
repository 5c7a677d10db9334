"""The figure of the headline: scores before and after with 95 % intervals, a row a temperature or pass@k."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from markupsafe import Markup, escape

from magicrl.reporting.canvas import WIDTH, Entry, picture
from magicrl.reporting.charts import nice_ticks
from magicrl.reporting.read_folders import Interval
from magicrl.reporting.wording import percent

LEFT, RIGHT, TOP, ROW, BOTTOM = 84, 22, 10, 52, 38
LONGEST = 11
"""Characters of a label that stands beside its row; where one is longer, all stand above theirs."""
ABOVE = 18
"""What a label above its row takes, in SVG units; the plot then begins at the left edge."""

BEFORE, AFTER = 4, 0
"""Slots of the palette."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IntervalRow:
    """One row: its label and the two intervals, shares in [0, 1]; ``apart`` draws a rule above it."""

    label: str
    before: Interval | None
    after: Interval | None
    apart: bool = False


Words: TypeAlias = tuple[str, str]


def intervals_legend(
    rows: Sequence[IntervalRow], best: float | None, words: Words = ("before", "after")
) -> list[Entry]:
    """What the plot's signs mean."""
    entries = [
        Entry(label=words[0], sign="dot", color=BEFORE) if any(r.before for r in rows) else None,
        Entry(label=words[1], sign="dot", color=AFTER) if any(r.after for r in rows) else None,
        Entry(label="start's best temperature", sign="target") if best is not None else None,
    ]
    return [entry for entry in entries if entry is not None]


def intervals_height(rows: Sequence[IntervalRow]) -> float:
    """Of the drawing, in SVG units."""
    return TOP + _pitch(rows) * len(rows) + BOTTOM


def draw_intervals(
    rows: Sequence[IntervalRow],
    best: float | None,
    *,
    key: str = "intervals",
    title: str = "",
    words: Words = ("before", "after"),
    alone: bool = False,
) -> Markup:
    """Before (grey, upper) and after (coloured, lower) in each row; dashed at ``best``, the start's best mean.

    The axis begins at 0 and ends at 100 %, or earlier where all intervals lie low. ``words`` name the two.
    """
    highest = max((i.high for row in rows for i in (row.before, row.after) if i is not None), default=1.0)
    ticks = nice_ticks(0.0, min(1.0, max(0.05, highest)), 5)
    axis = _Axis(ticks[-1], 22 if _above(rows) else LEFT)
    pitch = _pitch(rows)
    bottom = TOP + pitch * len(rows)
    parts: list[str] = []
    for tick in ticks:
        x = axis.x(tick)
        parts.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>'
            f'<text class="tick" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{100 * tick:g}%</text>'
        )
    for i, row in enumerate(rows):
        if row.apart:
            y = TOP + pitch * i
            parts.append(f'<line class="axis" x1="{axis.left}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(_row(row, axis, TOP + pitch * i, pitch, above=_above(rows), words=words))
    if best is not None:
        end = TOP + pitch * next((i for i, row in enumerate(rows) if row.apart), len(rows))
        parts.append(f'<line class="target" x1="{axis.x(best):.1f}" x2="{axis.x(best):.1f}" y1="{TOP}" y2="{end}"/>')
    middle = (axis.left + WIDTH - RIGHT) / 2
    parts.append(f'<text class="tick" x="{middle:.1f}" y="{bottom + 32}" text-anchor="middle">share of answers</text>')
    return picture(
        key=key,
        title=title,
        description=f"{title}. " + "; ".join(_words(row, words) for row in rows),
        height=intervals_height(rows),
        body="".join(parts),
        legend=intervals_legend(rows, best, words),
        alone=alone,
    )


def _above(rows: Sequence[IntervalRow]) -> bool:
    return any(len(row.label) > LONGEST for row in rows)


def _pitch(rows: Sequence[IntervalRow]) -> int:
    """Height of a row: less where none has two intervals, more where labels stand above."""
    pair = any(row.before and row.after for row in rows)
    return ((34 if pair else 20) + ABOVE) if _above(rows) else ROW if pair else 34


def _row(row: IntervalRow, axis: _Axis, top: float, pitch: int, *, above: bool, words: Words) -> str:
    both = row.before is not None and row.after is not None
    taken = ABOVE if above else 0
    middle = top + taken + (pitch - taken) / 2
    at, anchor, y = (axis.left, "start", top + 14) if above else (axis.left - 10, "end", middle + 4)
    label = f'<text class="rowlabel" x="{at}" y="{y:.1f}" text-anchor="{anchor}">{escape(row.label)}</text>'
    apart = (8 if above else 9) if both else 0
    first = axis.interval(row.before, middle - apart, BEFORE, words[0])
    return label + first + axis.interval(row.after, middle + apart, AFTER, words[1])


def intervals_csv(rows: Sequence[IntervalRow], words: Words = ("before", "after")) -> str:
    """Every value of the plot, a row a row."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["row", *(f"{word}{end}" for word in words for end in ("", ", low", ", high"))])
    for row in rows:
        cells = [(i.mean, i.low, i.high) if i is not None else ("", "", "") for i in (row.before, row.after)]
        writer.writerow([row.label, *cells[0], *cells[1]])
    return out.getvalue()


def _words(row: IntervalRow, words: Words) -> str:
    """``1: 24.0 % before, 54.3 % after``."""
    told = [f"{percent(i.mean)} {word}" for word, i in zip(words, (row.before, row.after), strict=True) if i]
    return f"{row.label}: {', '.join(told) or 'not measured'}"


@dataclass(frozen=True, slots=True)
class _Axis:
    high: float
    left: int

    def x(self, share: float) -> float:
        return self.left + min(1.0, max(0.0, share / self.high)) * (WIDTH - self.left - RIGHT)

    def interval(self, interval: Interval | None, y: float, color: int, word: str) -> str:
        if interval is None:
            return ""
        low, high, mean = self.x(interval.low), self.x(interval.high), self.x(interval.mean)
        title = f"{word}: {percent(interval.mean)} (95 %: {percent(interval.low)} to {percent(interval.high)})"
        return (
            f'<g><title>{escape(title)}</title><line class="whisker s{color}" x1="{low:.1f}" x2="{high:.1f}" '
            f'y1="{y:.1f}" y2="{y:.1f}"/><circle class="f{color}" cx="{mean:.1f}" cy="{y:.1f}" r="5.5"/></g>'
        )
