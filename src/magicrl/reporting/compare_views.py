"""A comparison's figures as the page shows them: one drawing an x axis, of which one is shown, and their curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from magicrl.reporting.arms import Arm
from magicrl.reporting.canvas import PALETTE, picture_frame
from magicrl.reporting.charts import Chart
from magicrl.reporting.compared import ComparedChart, tail_label
from magicrl.reporting.curves import ArmAxes, Axis
from magicrl.reporting.svg import draw, frame_of, legend
from magicrl.reporting.views import FigureView, plot_area, signs, values_table

AXIS_WORDS: Mapping[Axis, str] = {
    "steps": "steps",
    "tokens": "tokens",
    "wall": "wall time",
    "gpu-hours": "device hours",
}


def compared_view(compared: ComparedChart, axis: Axis) -> FigureView:
    """One figure; ``axis`` is the one that is shown first."""
    shown = compared.charts.get(axis) or next(iter(compared.charts.values()))
    entries = legend(shown)
    drawings = [_marked(draw(chart), key, hidden=key != axis) for key, chart in compared.charts.items()]
    none = Markup(f'<p class="note no-axis"{" hidden" if axis in compared.charts else ""}>No arm has this x axis.</p>')
    return FigureView(
        name=compared.figure.key,
        title=compared.figure.title,
        svg=Markup("").join([*drawings, none]),
        frame=picture_frame(title=shown.title, height=frame_of(shown)[0].height, legend=entries),
        legend=signs(entries),
        note=compared.figure.note,
        table=values_table(shown),
    )


def _marked(svg: Markup, axis: Axis, *, hidden: bool) -> Markup:
    """The drawing with the axis that it belongs to."""
    return Markup(str(svg).replace("<svg ", f'<svg data-axis="{axis}"{" hidden" if hidden else ""} ', 1))


class CurvePool:
    """The values of many figures for the page's script: each list of x once, however many curves lie over it."""

    def __init__(self, arms: Sequence[Arm], axes: ArmAxes) -> None:
        self._arms = arms
        self._axes = axes
        self._lists: dict[tuple[float, ...], int] = {}
        self._curves: dict[str, list[dict[str, Any]]] = {}
        self._charts: dict[str, dict[str, Any]] = {}

    def add(self, compared: ComparedChart) -> None:
        """One figure with all its drawings."""
        curves: list[dict[str, Any]] = []
        for slot, curve in enumerate(compared.curves):
            arm = self._arms[slot]
            if curve.points:
                band = any(p.runs > 1 for p in curve.points)
                entry: dict[str, Any] = {
                    "label": arm.name,
                    "color": slot % len(PALETTE),
                    "runs": curve.points[0].runs,
                    "x": self._x(slot, None, [p.step for p in curve.points]),
                    "y": [_digits(p.mean) for p in curve.points],
                }
                if band:
                    entry |= {"low": [_digits(p.low) for p in curve.points]}
                    entry |= {"high": [_digits(p.high) for p in curve.points]}
                curves.append(entry)
            for run, points in curve.tails:
                curves.append(
                    {
                        "label": tail_label(arm, run),
                        "alone": True,
                        "runs": 1,
                        "x": self._x(slot, run, [x for x, _ in points]),
                        "y": [_digits(y) for _, y in points],
                    }
                )
        self._curves[compared.figure.key] = curves
        for axis, chart in compared.charts.items():
            self._charts[chart.key] = _chart(chart, compared.figure.key, axis)

    def hover(self) -> dict[str, Any]:
        """All of it."""
        return {
            **self._charts,
            "#x": [list(values) for values in self._lists],
            "#curves": self._curves,
            "#axes": {axis: "step" if axis == "steps" else scale.name for axis, scale in self._axes.scales.items()},
        }

    def _x(self, slot: int, run: int | None, steps: Sequence[float]) -> dict[str, int]:
        """Which list of x holds these steps of an arm (or of one of its runs), by axis."""
        found: dict[str, int] = {}
        for axis in self._axes.scales:
            at = self._axes.arms[axis][slot] if run is None else self._axes.runs[axis][slot][run]
            if all(step in at for step in steps):
                values = tuple(_digits(at[step]) for step in steps)
                found[axis] = self._lists.setdefault(values, len(self._lists))
        return found


def _chart(chart: Chart, curves: str, axis: Axis) -> dict[str, Any]:
    return plot_area(chart) | {"curves": curves, "axis": axis}


def _digits(value: float) -> float:
    """Six digits: what a table needs, at half the size."""
    short = float(f"{value:.6g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short
