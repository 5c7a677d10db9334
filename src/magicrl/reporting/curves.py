"""Charts from the metrics of runs, as the metric table says: of one run, and of the arms of a comparison.

A comparison has a line an arm: the mean over its runs with a band from the smallest to the largest, over several x
axes. Pure functions, no HTML.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from magicrl.reporting.arms import Arm
from magicrl.reporting.charts import PALETTE, Band, Chart, Mark, Points, Series
from magicrl.reporting.metric_table import METRICS, Figure, Metric
from magicrl.reporting.read_folders import RecordedRun
from magicrl.reporting.scores import comparisons

Z95 = 1.959964

Axis: TypeAlias = Literal["steps", "tokens", "wall", "gpu-hours"]
AXES: tuple[Axis, ...] = ("steps", "tokens", "wall", "gpu-hours")

MOST_POINTS = 160
"""Steps of one curve; of a longer run evenly spaced ones are taken, the first and the last among them."""

ON_POLICY = "On-policy: each batch is used once, so the probability ratio ρ is exactly 1 and no token is clipped."


@dataclass(frozen=True, kw_only=True, slots=True)
class FigureGroup:
    """A group with a run's values in it."""

    key: str
    title: str
    panels: tuple[tuple[Chart, ...], ...]
    note: str = ""


def figure_groups(run: RecordedRun) -> tuple[FigureGroup, ...]:
    """Every chart that the run has data for, with its stage marks and a common x axis."""
    found: list[FigureGroup] = []
    for group in METRICS:
        charts = [tuple(_chart(run, figure, group.metrics) for figure in panel) for panel in group.panels]
        panels = [tuple(chart for chart in panel if not chart.empty) for panel in charts]
        shown = tuple(panel for panel in panels if panel)
        if shown:
            left_out = group.key == "policy" and not any(chart.key in ("ratio", "clip") for p in shown for chart in p)
            note = ON_POLICY if left_out and run.points("learner/ratio_mean") else ""
            found.append(FigureGroup(key=group.key, title=group.title, panels=shown, note=note))
    return tuple(found)


def stage_marks(run: RecordedRun) -> tuple[Mark, ...]:
    """A mark where each stage after the first began, labelled with its limit."""
    return tuple(
        Mark(
            x=float(span.first_step),
            label=f"stage {i + 1}" if span.max_tokens is None else f"stage {i + 1}: T = {span.max_tokens}",
        )
        for i, span in enumerate(run.stages)
        if i
    )


def steps_range(run: RecordedRun) -> tuple[float, float] | None:
    """The x axis of a run's figures; it begins at 0 where the start was tested."""
    steps = [float(row.step) for row in run.metrics]
    return (0.0 if run.sets else min(steps), max(steps)) if steps else None


def _chart(run: RecordedRun, figure: Figure, metrics: Sequence[Metric]) -> Chart:
    drawn = [metric for metric in metrics if metric.figure == figure.key]
    lines = tuple(series for metric in drawn for series in _series(run, metric))
    measured = any(series.points for series in lines)
    target = run.points(figure.target) if figure.target else ()
    return Chart(
        key=figure.key,
        title=figure.title or drawn[0].title,
        note=figure.note or drawn[0].note,
        unit=drawn[0].unit,
        y_low=figure.y_low,
        y_high=figure.y_high,
        stacked=figure.stacked,
        compact=figure.compact,
        target=(target[-1][1], f"target {target[-1][1]:g}") if target and measured else None,
        series=lines + (_tests(run) if figure.tests and measured else ()),
        marks=stage_marks(run),
        x_range=steps_range(run),
    )


def _values(run: RecordedRun, metric: Metric) -> Points:
    """The (step, value) points of one run, as shares where the metric is one."""
    points = run.points(metric.key, *([metric.instead] if metric.instead else []))
    if metric.share_of is None:
        return points
    whole = dict(run.points(metric.share_of))
    return tuple((x, y / whole[x]) for x, y in points if whole.get(x))


def _series(run: RecordedRun, metric: Metric) -> tuple[Series, ...]:
    points = _values(run, Metric(key=metric.key, share_of=metric.share_of))  # exact and estimate have a line each
    shown = [y for key in (metric.key, *(metric.ends or ())) for _, y in run.points(key)]
    if not points or (metric.silent is not None and all(y == metric.silent for y in shown)):
        return ()
    if metric.unlike is not None and points == run.points(metric.unlike):
        return ()
    if metric.look == "smooth":
        return with_running_mean(metric.label, points, metric.color, [mark.x for mark in stage_marks(run)])
    return (
        Series(
            label=metric.label,
            points=points,
            color=metric.color,
            style="steps" if metric.look == "steps" else "line",
            dots=metric.look == "dots",
            band=_band(run, metric, points),
        ),
    )


def _band(run: RecordedRun, metric: Metric, points: Points) -> Band:
    if metric.error is not None:
        error = dict(run.points(metric.error))
        return tuple((x, max(0.0, y - Z95 * error[x]), min(1.0, y + Z95 * error[x])) for x, y in points if x in error)
    if metric.ends is not None:
        low, high = (dict(run.points(key)) for key in metric.ends)
        return tuple((x, low[x], high[x]) for x, _ in points if x in low and x in high)
    return ()


def _tests(run: RecordedRun) -> tuple[Series, ...]:
    """The first test set before (step 0) and after training, at the temperature of training."""
    found = comparisons(run)
    at = found[0].training_temperature if found else None
    if at is None:
        return ()
    last = float(run.metrics[-1].step)
    pairs = [p for p in found[0].pairs if p.temperature == at]
    scores = [(x, s.accuracy) for p in pairs for x, s in ((0.0, p.before), (last, p.after)) if s is not None]
    return (
        Series(
            label=f"test at temperature {at:g}",
            points=tuple((x, score.mean) for x, score in scores),
            band=tuple((x, score.low, score.high) for x, score in scores),
            color=3,
            style="marks",
        ),
    )


def running_mean(points: Points, window: int) -> Points:
    """Least-squares line through the ``window`` (odd) points around each point, read there.

    Away from the ends that is the centred mean, which does not lag. Near an end the window stays whole and
    moves inward, so that the last values are smooth too; no value leaves the range of its window.
    """
    count, size = len(points), min(window, len(points))
    if not count:
        return ()
    at = np.arange(count)
    first = np.clip(at - size // 2, 0, count - size)
    windows = np.lib.stride_tricks.sliding_window_view(np.array([y for _, y in points]), size)[first]
    middle, spread = (size - 1) / 2, size * (size * size - 1) / 12
    slopes = windows @ (np.arange(size) - middle) / spread if spread else np.zeros(count)
    means = windows.mean(axis=1) + slopes * (at - first - middle)
    smooth = np.clip(means, windows.min(axis=1), windows.max(axis=1))
    return tuple((x, float(y)) for (x, _), y in zip(points, smooth, strict=True))


def smoothing_window(count: int) -> int:
    """An odd window of about a twentieth of the run: 1 (none) below 30 points, at most 25."""
    return 1 if count < 30 else min(25, 2 * (count // 40) + 3)


def with_running_mean(label: str, points: Points, color: int, breaks: Sequence[float] = ()) -> tuple[Series, ...]:
    """A noisy line as faint raw values behind their running mean; as it is where it is short.

    ``breaks`` are the x at which something changed at once (a stage began): no mean reaches across them.
    """
    window = smoothing_window(len(points))
    if window == 1:
        return (Series(label=label, points=points, color=color),)
    return (
        Series(label=label, points=running_mean_of_parts(points, window, breaks), color=color),
        Series(label=f"{label} (each step)", points=points, color=color, style="faint"),
    )


def running_mean_of_parts(points: Points, window: int, breaks: Sequence[float]) -> Points:
    """The running mean of each part between ``breaks`` by itself."""
    return tuple(p for part in _parts(points, breaks) for p in running_mean(part, window))


def _parts(points: Points, breaks: Sequence[float]) -> list[Points]:
    edges = [-math.inf, *sorted(breaks), math.inf]
    return [tuple(p for p in points if a <= p[0] < b) for a, b in itertools.pairwise(edges)]


# Comparisons: a line an arm.


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedChart:
    """One metric with the arms in it.

    Attributes:
        metric: what it shows.
        curves: one an arm, in the arms' order; without points where no run of the arm has the metric.
        charts: the drawing over each x axis that has at least one arm.
    """

    metric: Metric
    curves: tuple[ArmCurve, ...]
    charts: Mapping[Axis, Chart]


def compared_charts(arms: Sequence[Arm], metrics: Sequence[Metric], axes: ArmAxes) -> list[ComparedChart]:
    """The metrics with a figure in comparisons that at least one arm has, with all arms over every x axis."""
    marks = [[stage_marks(run) for run in arm.runs] for arm in arms]
    drawn = (_compared(arms, metric, axes, marks) for metric in metrics if metric.compared)
    return [compared for compared in drawn if compared is not None]


_Marks: TypeAlias = Sequence[Sequence[tuple[Mark, ...]]]


def _compared(arms: Sequence[Arm], metric: Metric, axes: ArmAxes, marks: _Marks) -> ComparedChart | None:
    def points(run: RecordedRun, stages: Sequence[Mark]) -> Points:
        values = _values(run, metric)
        return values if metric.exact else smoothed(values, [mark.x for mark in stages])

    of_arms = [
        [points(run, stages) for run, stages in zip(arm.runs, of_arm, strict=True)]
        for arm, of_arm in zip(arms, marks, strict=True)
    ]
    if metric.silent is not None and not any(y != metric.silent for arm in of_arms for run in arm for _, y in run):
        return None
    curves = tuple(arm_curve(of_arm) for of_arm in of_arms)
    if not any(curve.points for curve in curves):
        return None
    common = _common_marks(arms, marks)
    charts: dict[Axis, Chart] = {
        axis: _compared_chart(arms, metric, curves, axes, axis, common) for axis in axes.scales
    }
    return ComparedChart(
        metric=metric, curves=curves, charts={a: chart for a, chart in charts.items() if not chart.empty}
    )


def compared_note(metric: Metric) -> str:
    """What the metric is, and which way is better."""
    return metric.note + (f" {metric.better.capitalize()} is better." if metric.better else "")


def arm_line(arm: Arm, slot: int, curve: ArmCurve, at: Mapping[float, float], *, dots: bool = False) -> Series:
    """The arm's line in the palette's slot, with its band where it has several runs; ``at`` gives a step's x."""
    points = [point for point in curve.points if point.step in at]
    return Series(
        label=arm.name,
        points=tuple((at[p.step], p.mean) for p in points),
        band=tuple((at[p.step], p.low, p.high) for p in points) if any(p.runs > 1 for p in points) else (),
        color=slot % len(PALETTE),
        dots=dots,
    )


def _compared_chart(
    arms: Sequence[Arm],
    metric: Metric,
    curves: Sequence[ArmCurve],
    axes: ArmAxes,
    axis: Axis,
    marks: tuple[Mark, ...],
) -> Chart:
    lines = [
        arm_line(arm, slot, curve, axes.arms[axis][slot], dots=metric.look == "dots")
        for slot, (arm, curve) in enumerate(zip(arms, curves, strict=True))
    ]
    tails = [s for i, arm in enumerate(arms) for s in _tails(arm, i, curves[i], axes.runs[axis][i])]
    ends = [x for at in axes.arms[axis] for x in (min(at.values(), default=0.0), max(at.values(), default=0.0)) if at]
    shown = [x for series in (*lines, *tails) for x, _ in series.points]
    scale = axes.scales[axis]
    return Chart(
        key=f"{metric.compared}@{axis}",
        title=metric.title,
        note=compared_note(metric),
        unit=metric.unit,
        y_low=metric.y_low,
        y_high=metric.y_high,
        series=(*lines, *tails),
        marks=marks if axis == "steps" else (),
        x_name=scale.name,
        x_word="step" if axis == "steps" else scale.name,
        x_whole=axis == "steps",
        x_range=(min([*ends, *shown]) if axis == "steps" else 0.0, max([*ends, *shown])) if shown else None,
    )


def _common_marks(arms: Sequence[Arm], marks: _Marks) -> tuple[Mark, ...]:
    """Stage changes, where every run changed at the same step."""
    of_runs = [
        m
        for arm, of_arm in zip(arms, marks, strict=True)
        for run, m in zip(arm.runs, of_arm, strict=True)
        if run.metrics
    ]
    return of_runs[0] if of_runs and all(other == of_runs[0] for other in of_runs) else ()


def _tails(arm: Arm, slot: int, curve: ArmCurve, at: Sequence[Mapping[float, float]]) -> list[Series]:
    """Runs beyond the end of the arm's shortest one, each over its own x."""
    return [
        Series(
            label=tail_label(arm, index),
            points=tuple((at[index][x], y) for x, y in points if x in at[index]),
            color=slot % len(PALETTE),
            style="faint",
        )
        for index, points in curve.tails
    ]


def tail_label(arm: Arm, index: int) -> str:
    """The name of a run that is drawn by itself."""
    return f"{arm.name}, run {index + 1} of {len(arm.runs)} alone"


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmPoint:
    """One training step of an arm: the mean over its runs and their smallest and largest value."""

    step: float
    mean: float
    low: float
    high: float
    runs: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmCurve:
    """One metric of an arm.

    Attributes:
        points: of the steps that every run of the arm has, ascending.
        tails: (run's index, its (step, value) points) of the runs that go on after the shortest has ended; each begins
            with the last common step.
    """

    points: tuple[ArmPoint, ...]
    tails: tuple[tuple[int, Points], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """The unit of an x axis: ``name`` for its title, and what its values are divided by."""

    name: str
    divisor: float


def smoothed(points: Points, breaks: Sequence[float]) -> Points:
    """The running mean as in a run's own report, never across ``breaks`` (stage changes)."""
    window = smoothing_window(len(points))
    return points if window == 1 else running_mean_of_parts(points, window, breaks)


def arm_curve(runs: Sequence[Points]) -> ArmCurve:
    """The arm's curve from the (step, value) points of its runs that have the metric.

    The mean is taken over the same runs at every step, so that no jump comes from a run that ended earlier: beyond the
    end of the shortest run each other one goes on by itself. Steps are never interpolated; with one run the band has
    no width.
    """
    tables = {i: dict(points) for i, points in enumerate(runs) if points}
    if not tables:
        return ArmCurve(points=(), tails=())
    common = sorted(set.intersection(*(set(table) for table in tables.values())))
    points = tuple(_point(step, [table[step] for table in tables.values()]) for step in evenly(common, MOST_POINTS))
    tails: list[tuple[int, Points]] = []
    for i, table in tables.items():
        beyond = [step for step in sorted(table) if not common or step >= common[-1]]
        if len(beyond) > 1:
            tails.append((i, tuple((step, table[step]) for step in evenly(beyond, MOST_POINTS))))
    return ArmCurve(points=points, tails=tuple(tails))


def _point(step: float, values: Sequence[float]) -> ArmPoint:
    return ArmPoint(step=step, mean=sum(values) / len(values), low=min(values), high=max(values), runs=len(values))


def evenly(values: Sequence[float], most: int) -> list[float]:
    """At most ``most`` of ``values``, evenly spaced by index, both ends among them."""
    last = len(values) - 1
    if last < most:
        return list(values)
    return [values[i] for i in sorted({round(i * last / (most - 1)) for i in range(most)})]


def devices(run: RecordedRun) -> int:
    """Accelerators (or CPU machines) that a run held: ``devices`` of run.json, 1 where a run records none."""
    recorded = run.run.get("devices")
    return recorded if isinstance(recorded, int) and recorded > 0 else 1


def positions(run: RecordedRun, axis: Axis) -> dict[float, float]:
    """Training step -> x of its end, in steps, response tokens, seconds or device hours; empty if it was not recorded.

    Tokens are all response tokens sampled so far (``tokens/sampled``), also those of rejected groups. Wall time is the
    sum of the steps' wall clocks (``time/step``): tests, the start and pauses between sessions are not in it. Device
    hours are wall time in hours times ``devices(run)``.
    """
    if axis == "steps":
        return {float(row.step): float(row.step) for row in run.metrics}
    points = run.points("tokens/sampled" if axis == "tokens" else "time/step")
    if len(points) < len(run.metrics):
        return {}  # a sum with gaps would be too small
    factor = devices(run) / 3600 if axis == "gpu-hours" else 1.0
    found: dict[float, float] = {}
    total = 0.0
    for step, value in points:
        total += value * factor
        found[step] = total
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmAxes:
    """Where the steps of all arms lie on every x axis, read once.

    Attributes:
        scales: the unit of each axis that at least one arm has recorded.
        runs: by axis, arm and run: step -> x, in that unit.
        arms: by axis and arm: step -> mean x over the arm's runs that have any step; empty where one recorded none.
    """

    scales: Mapping[Axis, Scale]
    runs: Mapping[Axis, Sequence[Sequence[Mapping[float, float]]]]
    arms: Mapping[Axis, Sequence[Mapping[float, float]]]


def arm_axes(arms: Sequence[Arm]) -> ArmAxes:
    """All axes of a comparison."""
    scales: dict[Axis, Scale] = {}
    runs: dict[Axis, list[list[dict[float, float]]]] = {}
    means: dict[Axis, list[dict[float, float]]] = {}
    for axis in AXES:
        tables = [[positions(run, axis) for run in arm.runs] for arm in arms]
        largest = max((x for arm in tables for run in arm for x in run.values()), default=None)
        if largest is None:
            continue
        scale = scales[axis] = axis_scale(axis, largest)
        runs[axis] = [[{step: x / scale.divisor for step, x in run.items()} for run in arm] for arm in tables]
        means[axis] = []
        for of_arm, arm in zip(runs[axis], arms, strict=True):
            begun = [at for at, run in zip(of_arm, arm.runs, strict=True) if run.metrics]
            common = set(begun[0]).intersection(*begun[1:]) if begun else ()
            means[axis].append({step: sum(at[step] for at in begun) / len(begun) for step in sorted(common)})
    return ArmAxes(scales=scales, runs=runs, arms=means)


_UNITS: Mapping[Axis, tuple[str, tuple[tuple[str, float], ...]]] = {
    "steps": ("training step", (("", 1.0),)),
    "tokens": ("{}response tokens sampled", (("billion ", 1e9), ("million ", 1e6), ("thousand ", 1e3), ("", 1.0))),
    "wall": ("{} of training steps", (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))),
    "gpu-hours": ("device {}", (("hours", 1.0), ("minutes", 1 / 60), ("seconds", 1 / 3600))),
}


def axis_scale(axis: Axis, largest: float) -> Scale:
    """A unit in which the largest x is a readable number."""
    words, units = _UNITS[axis]
    name, divisor = next((unit for unit in units if largest >= 2 * unit[1]), units[-1])
    return Scale(name=words.format(name), divisor=divisor)


def totals(run: RecordedRun) -> Mapping[Axis, float | None]:
    """What a run has spent so far on each axis (steps, tokens, seconds, device hours); None: not recorded."""
    tables: dict[Axis, dict[float, float]] = {axis: positions(run, axis) for axis in AXES}
    found: dict[Axis, float | None] = {axis: max(table.values(), default=None) for axis, table in tables.items()}
    found["steps"] = float(len(run.metrics))
    return found
