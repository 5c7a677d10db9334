"""The figure of the headline: accuracy before and after with 95 % intervals, a row a temperature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from magicrl.reporting.run_folder import Interval
from magicrl.reporting.wording import percent

WIDTH, LEFT, RIGHT, TOP, ROW, BOTTOM = 460, 84, 22, 10, 58, 34


@dataclass(frozen=True, kw_only=True, slots=True)
class IntervalRow:
    """One row: its label and the two intervals, shares in [0, 1]."""

    label: str
    before: Interval | None
    after: Interval | None


def draw_intervals(rows: Sequence[IntervalRow], best: float | None) -> Markup:
    """Before (grey, upper) and after (coloured, lower) in each row; dashed at ``best``, the start's best mean."""
    bottom = TOP + ROW * len(rows)
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {bottom + BOTTOM}" role="img"><title>'
        f"{escape('Accuracy before and after with 95 % intervals at each temperature')}</title>"
    ]
    for tick in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        x = _x(tick)
        parts.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>'
            f'<text class="tick" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{100 * tick:.0f}%</text>'
        )
    if best is not None:
        parts.append(f'<line class="target" x1="{_x(best):.1f}" x2="{_x(best):.1f}" y1="{TOP}" y2="{bottom}"/>')
    for i, row in enumerate(rows):
        middle = TOP + ROW * i + ROW / 2
        parts.append(
            f'<text class="rowlabel" x="{LEFT - 10}" y="{middle + 4:.1f}" text-anchor="end">{escape(row.label)}</text>'
        )
        parts.append(_interval(row.before, middle - 10, 4, "before"))
        parts.append(_interval(row.after, middle + 10, 0, "after"))
    parts.append(f'<text class="tick" x="{_x(0.5):.1f}" y="{bottom + 31}" text-anchor="middle">accuracy</text></svg>')
    return Markup("".join(parts))


def _x(share: float) -> float:
    return LEFT + min(1.0, max(0.0, share)) * (WIDTH - LEFT - RIGHT)


def _interval(interval: Interval | None, y: float, color: int, word: str) -> str:
    if interval is None:
        return ""
    low, high, mean = _x(interval.low), _x(interval.high), _x(interval.mean)
    title = f"{word}: {percent(interval.mean)} (95 %: {percent(interval.low)} to {percent(interval.high)})"
    return (
        f'<g><title>{escape(title)}</title><line class="whisker s{color}" x1="{low:.1f}" x2="{high:.1f}" y1="{y:.1f}" '
        f'y2="{y:.1f}"/><circle class="f{color}" cx="{mean:.1f}" cy="{y:.1f}" r="5.5"/></g>'
    )
