"""Charts whose rows stand below each other: bars, and scores with their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from markupsafe import escape

from magicrl.reporting.charts import (
    LETTER,
    WIDTH,
    Entry,
    FigureView,
    Unit,
    figure_view,
    line,
    nice_ticks,
    text,
    tick_label,
    x_grid,
)
from magicrl.reporting.read_folders import Interval
from magicrl.reporting.wording import measured, percent

# Bars: one row a name, its value as a length.


Bar: TypeAlias = tuple[str, float, str]
"""Name, value, and the words behind the bar."""


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
    """Horizontal bars, the longest usually first.

    ``left`` is the room for names, in SVG units; ``limit`` a vertical line that no bar should pass, with its words.
    """
    right, top, row = 96, 4, 19
    longest = max([value for _, value, _ in bars] + ([limit[0]] if limit else []), default=1.0)
    ticks = nice_ticks(0.0, longest or 1.0, 4)
    letters = int(left // LETTER)
    scale = (WIDTH - left - right) / ticks[-1]
    bottom = top + row * len(bars)
    limit_at = None if limit is None else left + limit[0] * scale
    parts = x_grid([(left + tick * scale, tick_label(tick, unit)) for tick in ticks], top, bottom)
    told: list[str] = []
    for i, (name, value, words) in enumerate(bars):
        y = top + row * i
        told.append(f"{name}: {measured(value, unit)}" + (f" ({words})" if words else ""))
        width = max(1.0, value * scale)
        words_at = left + width + 5
        if limit_at is not None and words_at - 3 < limit_at < words_at + LETTER * len(words):
            words_at = limit_at + 5  # the line would go through them
        shown = name if len(name) <= letters else name[: letters - 1] + "…"
        parts.append(text(left - 6, y + 13.5, shown, "end", "rowlabel token"))
        parts.append(
            f'<rect class="area f{color}" x="{left}" y="{y + 3}" width="{width:.1f}" height="{row - 6}">'
            f"<title>{escape(told[-1])}</title></rect>"
        )
        parts.append(text(words_at, y + 13.5, words, "start"))
    if limit_at is not None:
        parts.append(line("target", (limit_at, limit_at), (top, bottom)))
    parts.append(text((left + WIDTH - right) / 2, bottom + 32, x_name))
    return figure_view(
        key=key,
        title=title,
        description="; ".join(told),
        height=bottom + 40,
        body=parts,
        legend=(Entry(label=limit[1], sign="target"),) if limit else (),
        rows=[["name", x_name, "words"], *([name, repr(value), words] for name, value, words in bars)],
        note=note,
    )


# Intervals: scores with their 95 % intervals, a row a temperature, pass@k or arm.


@dataclass(frozen=True, kw_only=True, slots=True)
class IntervalRow:
    """One row: its label and the two intervals, shares in [0, 1]; ``apart`` draws a rule above it."""

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
) -> FigureView:
    """Before (grey, upper) and after (coloured, lower) in each row; dashed at ``best``, the start's best mean.

    The axis begins at 0 and ends at 100 %, or earlier where all intervals lie low. ``words`` name the two.
    """
    right, top = 22, 10
    above = 18 if any(len(row.label) > 11 for row in rows) else 0  # a long label stands above its row
    left = 22 if above else 84
    pair = any(row.before and row.after for row in rows)
    pitch = ((34 if pair else 20) + above) if above else 52 if pair else 34
    bottom = top + pitch * len(rows)
    highest = max((i.high for row in rows for i in (row.before, row.after) if i is not None), default=1.0)
    ticks = nice_ticks(0.0, min(1.0, max(0.05, highest)), 5)

    def at(share: float) -> float:
        return left + min(1.0, max(0.0, share / ticks[-1])) * (WIDTH - left - right)

    parts = x_grid([(at(tick), f"{100 * tick:g}%") for tick in ticks], top, bottom)
    for i, row in enumerate(rows):
        y = top + pitch * i
        if row.apart:
            parts.append(line("axis", (left, WIDTH - right), (y, y)))
        middle = y + above + (pitch - above) / 2
        place = (left, y + 14, row.label, "start") if above else (left - 10, middle + 4, row.label, "end")
        parts.append(text(*place, "rowlabel"))
        gap = 0 if row.before is None or row.after is None else 8 if above else 9
        for interval, word, color, where in (
            (row.before, words[0], 4, middle - gap),
            (row.after, words[1], 0, middle + gap),
        ):
            if interval is not None:
                span = f"{percent(interval.low)} to {percent(interval.high)}"
                parts.append(
                    f"<g><title>{escape(f'{word}: {percent(interval.mean)} (95 %: {span})')}</title>"
                    + line(f"whisker s{color}", (at(interval.low), at(interval.high)), (where, where))
                    + f'<circle class="f{color}" cx="{at(interval.mean):.1f}" cy="{where:.1f}" r="5.5"/></g>'
                )
    if best is not None:  # of accuracies: it ends where the rows of pass@k begin
        end = top + pitch * next((i for i, row in enumerate(rows) if row.apart), len(rows))
        parts.append(line("target", (at(best), at(best)), (top, end)))
    parts.append(text((left + WIDTH - right) / 2, bottom + 32, "share of answers"))
    entries = [Entry(label=words[0], sign="dot", color=4)] if any(r.before for r in rows) else []
    entries += [Entry(label=words[1], sign="dot", color=0)] if any(r.after for r in rows) else []
    entries += [Entry(label="start's best temperature", sign="target")] if best is not None else []
    return figure_view(
        key=key,
        title=title,
        description="; ".join(_interval_words(row, words) for row in rows),
        height=bottom + 38,
        body=parts,
        legend=entries,
        rows=[
            ["row", *(f"{word}{end}" for word in words for end in ("", ", low", ", high"))],
            *(
                [
                    row.label,
                    *(v for i in (row.before, row.after) for v in ((i.mean, i.low, i.high) if i else ("",) * 3)),
                ]
                for row in rows
            ),
        ],
        note=note,
    )


def _interval_words(row: IntervalRow, words: tuple[str, str]) -> str:
    """``1: 24.0 % before, 54.3 % after``."""
    told = [f"{percent(i.mean)} {word}" for word, i in zip(words, (row.before, row.after), strict=True) if i]
    return f"{row.label}: {', '.join(told) or 'not measured'}"
