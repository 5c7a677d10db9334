"""Small line charts as SVG: how a cost grows. One panel a question, a logarithmic axis below, values at the points.

Readable on a light and on a dark page: lines and text take ``currentColor`` or a colour that both bear.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 360, 220, 46, 34, 14, 40
_COLOURS = ("#2a78c8", "#c8641e")


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One chart."""

    title: str  # what is shown, with its unit
    axis: str  # what varies
    points: Sequence[tuple[float, float]]  # ``(x, y)``, x positive


def chart(panels: Sequence[Panel], columns: int = 2) -> str:
    """The panels in rows of ``columns``, each with its own scale from 0."""
    rows = -(-len(panels) // columns)
    width, height = columns * _WIDTH, rows * _HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" font-family="system-ui, sans-serif" font-size="11" color="#777">'
    ]
    for index, panel in enumerate(panels):
        x, y = index % columns * _WIDTH, index // columns * _HEIGHT
        parts.append(f'<g transform="translate({x} {y})">{_panel(panel, _COLOURS[index % columns])}</g>')
    return "".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, colour: str) -> str:
    xs, ys = zip(*panel.points, strict=True)
    low, high, top = math.log(min(xs)), math.log(max(xs)), max(ys) * 1.12 or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        share = (math.log(x) - low) / max(high - low, 1e-9)
        across = _LEFT + 16 + share * (_WIDTH - _LEFT - _RIGHT - 32)
        return round(across, 1), round(_HEIGHT - _BOTTOM - y / top * (_HEIGHT - _TOP - _BOTTOM), 1)

    floor = _HEIGHT - _BOTTOM
    parts = [
        f'<text x="{_LEFT}" y="16" font-weight="600" fill="currentColor">{html.escape(panel.title)}</text>',
        f'<path d="M{_LEFT} {_TOP}V{floor}H{_WIDTH - _RIGHT}" fill="none" stroke="currentColor" stroke-width="1"/>',
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 6}" text-anchor="middle" fill="currentColor">'
        f"{html.escape(panel.axis)}</text>",
    ]
    dots = [place(x, y) for x, y in panel.points]
    parts.append(
        f'<polyline points="{" ".join(f"{x},{y}" for x, y in dots)}" fill="none" stroke="{colour}" stroke-width="2"/>'
    )
    for (x, y), (across, up) in zip(panel.points, dots, strict=True):
        parts.append(
            f'<circle cx="{across}" cy="{up}" r="3" fill="{colour}"/>'
            f'<text x="{across}" y="{up - 7}" text-anchor="middle" fill="currentColor">{_short(y)}</text>'
            f'<text x="{across}" y="{floor + 14}" text-anchor="middle" fill="currentColor">{_short(x)}</text>'
        )
    return "".join(parts)


def _short(value: float) -> str:
    """Three digits at most, thousands and millions by letter."""
    for size, letter in ((1e6, "M"), (1e3, "K")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"
