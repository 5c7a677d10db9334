"""Charts of the metrics of one run, and of the variants of a comparison. Pure functions, no HTML.

``metrics.toml`` defines each metric of a training step: its unit, which direction is better, and where it is drawn. To
add a figure, add a row there.

A comparison has one line per variant: the mean over its runs with a band from the smallest to the largest run, over
several x axes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

import numpy as np
from pydantic import BeforeValidator

from magicrl.config.loader import shipped_table
from magicrl.config.section import Section
from magicrl.evaluation.statistics import Z95
from magicrl.reporting.charts import PALETTE, Band, Chart, Mark, Points, Series, Unit, evenly
from magicrl.reporting.read_folders import RecordedRun
from magicrl.reporting.scores import comparisons
from magicrl.reporting.variants import Variant
from magicrl.training.diagnosis import ACCURACY, REWARD, Measure

Axis: TypeAlias = Literal["steps", "tokens", "wall", "gpu-hours"]
AXES: tuple[Axis, ...] = ("steps", "tokens", "wall", "gpu-hours")

MOST_POINTS = 160
"""Maximum number of steps of a compared curve. A longer run is thinned to evenly spaced steps, with both ends."""

ON_POLICY = "On-policy: each batch is used once, so the probability ratio ρ is exactly 1 and no token is clipped."


Low = Annotated[float | None, BeforeValidator(lambda value: None if value == "data" else value)]
"""Lower end of a y axis. ``"data"`` means the smallest value."""


class Metric(Section):
    """A metric of a training step. ``key`` is its key in ``metrics.jsonl``; ``*`` means any name."""

    key: str
    label: str = ""  # in the legend and the CSV of a figure
    unit: str  # "percent" is a share, 0 to 1
    title: str = ""  # title and note of a figure with only this metric
    note: str = ""
    better: Literal["higher", "lower", ""] = ""
    figure: str = ""  # figure of a run's page that has this metric as a line
    color: int = 0  # index of the palette
    # smooth: a running mean in front of the raw values; dots: each measurement is marked
    look: Literal["smooth", "line", "steps", "dots"] = "line"
    error: str | None = None  # metric of the standard error, drawn as a 95 % band; clipped to [0, 1] for shares
    ends: tuple[str, str] | None = None  # metrics of the ends of a band
    share_of: str | None = None  # metric of the same unit that the values are divided by
    unlike: str | None = None  # left out where it equals this metric at every step
    silent: float | None = None  # left out where all its values (and ends) equal this number
    compared: str = ""  # key of its figure in a comparison
    instead: str = ""  # metric that replaces it in a comparison at steps without this one
    exact: bool = False  # drawn in a comparison without running mean
    y_low: Low = 0.0  # ends of the y axis in a comparison
    y_high: float | None = None

    @property
    def axis(self) -> Unit:
        """Format of the values in a figure."""
        if self.share_of is not None or self.unit == "percent":
            return "percent"
        return "seconds" if self.unit == "seconds" else "number"


class Figure(Section):
    """A figure of a run's page. Its lines are the metrics that name it, its other fields those of ``Chart``.

    ``title`` and ``note`` default to those of its only metric.
    """

    key: str
    title: str = ""
    note: str = ""
    y_low: Low = 0.0
    y_high: float | None = None
    target: str | None = None  # a metric
    target_note: str = ""  # follows the note where there is a target
    stacked: bool = False
    compact: bool = False
    tests: bool = False  # includes the scores of the test set


class MetricGroup(Section):
    """Metrics and figures under one heading. The figures of one panel share a card and its x axis."""

    key: str
    title: str
    metrics: tuple[Metric, ...]
    panels: tuple[tuple[Figure, ...], ...]


METRICS = LEARNING, POLICY, TIME = shipped_table(
    "reporting/metrics.toml", dict[str, tuple[MetricGroup, MetricGroup, MetricGroup]]
)["groups"]


def figure_groups(run: RecordedRun) -> list[tuple[MetricGroup, list[tuple[Chart, ...]], str]]:
    """Return by group the panels of charts that the run has data for, and a note.

    The charts have the run's stage marks and a common x axis.
    """
    found: list[tuple[MetricGroup, list[tuple[Chart, ...]], str]] = []
    for group in METRICS:
        charts = [tuple(_chart(run, figure, group.metrics) for figure in panel) for panel in group.panels]
        panels = [tuple(chart for chart in panel if not chart.empty) for panel in charts]
        if shown := [panel for panel in panels if panel]:
            left_out = group.key == "policy" and not {"ratio", "clip"} & {chart.key for p in shown for chart in p}
            note = ON_POLICY if left_out and run.points("learner/ratio_mean") else ""
            found.append((group, shown, note))
    return found


def stage_marks(run: RecordedRun) -> tuple[Mark, ...]:
    """Return a mark where each stage after the first began, labelled with its T."""
    stages = list(enumerate(run.stages, start=1))[1:]
    return tuple(
        (float(first), f"stage {i}" + ("" if limit is None else f": T = {limit}")) for i, (_, first, _, limit) in stages
    )


def steps_range(run: RecordedRun) -> tuple[float, float] | None:
    """Return the x range of a run's figures. It begins at 0 where there is an evaluation before training."""
    steps = [float(row.step) for row in run.metrics]
    return (0.0 if run.sets else min(steps), max(steps)) if steps else None


def _chart(run: RecordedRun, figure: Figure, metrics: Sequence[Metric]) -> Chart:
    drawn = [one for metric in metrics if metric.figure == figure.key for one in _expanded(run, metric)]
    lines = tuple(series for metric in drawn for series in _series(run, metric))
    target = run.points(figure.target) if figure.target and lines else ()
    return Chart(
        key=figure.key,
        title=figure.title or drawn[0].title,
        note=" ".join(filter(None, (figure.note or drawn[0].note, figure.target_note if target else ""))),
        unit=drawn[0].axis if drawn else "number",
        y_low=figure.y_low,
        y_high=figure.y_high,
        stacked=figure.stacked,
        compact=figure.compact,
        target=(target[-1][1], f"target {target[-1][1]:g}") if target else None,
        series=lines
        + (_tests(run, ACCURACY if figure.key == ACCURACY.key else REWARD) if figure.tests and lines else ()),
        marks=stage_marks(run),
        x_range=steps_range(run),
    )


def _expanded(run: RecordedRun, metric: Metric) -> list[Metric]:
    """Return the metrics that a key with ``*`` matches, each with another color; a key without is itself."""
    if "*" not in metric.key:
        return [metric]
    before, _, after = metric.key.partition("*")
    keys = dict.fromkeys(key for row in run.metrics for key in row.values if key.startswith(before))
    found = [key.removeprefix(before).removesuffix(after) for key in keys if key.endswith(after)]
    labels = [metric.label.replace("*", name) for name in found]
    return [
        metric.model_copy(update={"key": f"{before}{name}{after}", "label": label, "color": color})
        for color, (name, label) in enumerate(zip(found, labels, strict=True))
    ]


def _values(run: RecordedRun, metric: Metric, *others: str) -> Points:
    """Return (step, value) of one run, divided by ``metric.share_of``. ``others`` fill steps without the metric."""
    points = run.points(metric.key, *others)
    if metric.share_of is None:
        return points
    whole = dict(run.points(metric.share_of))
    return tuple((x, y / whole[x]) for x, y in points if whole.get(x))


def _series(run: RecordedRun, metric: Metric) -> tuple[Series, ...]:
    points = _values(run, metric)
    shown = [y for key in (metric.key, *(metric.ends or ())) for _, y in run.points(key)]
    if not points or (metric.silent is not None and all(y == metric.silent for y in shown)):
        return ()
    if metric.unlike is not None and points == run.points(metric.unlike):
        return ()
    if metric.look == "smooth":
        return with_running_mean(metric.label, points, metric.color, [x for x, _ in stage_marks(run)])
    band: Band = ()
    if metric.error is not None:
        error = dict(run.points(metric.error))
        low, high = (0.0, 1.0) if metric.axis == "percent" else (-math.inf, math.inf)
        band = tuple((x, max(low, y - Z95 * error[x]), min(high, y + Z95 * error[x])) for x, y in points if x in error)
    elif metric.ends is not None:
        lows, highs = (dict(run.points(key)) for key in metric.ends)
        band = tuple((x, lows[x], highs[x]) for x, _ in points if x in lows and x in highs)
    dots, style = metric.look == "dots", "steps" if metric.look == "steps" else "line"
    return (Series(label=metric.label, points=points, color=metric.color, style=style, dots=dots, band=band),)


def _tests(run: RecordedRun, measure: Measure) -> tuple[Series, ...]:
    """Return the scores of the first test set before (step 0) and after training, at the temperature of training."""
    found = comparisons(run)
    at = found[0].training_temperature if found else None
    if at is None:
        return ()
    last = float(run.metrics[-1].step)
    pairs = [p for p in found[0].pairs if p.temperature == at]
    tests = [
        (x, test.score(measure)) for p in pairs for x, test in ((0.0, p.before), (last, p.after)) if test is not None
    ]
    scores = [(x, score) for x, score in tests if score is not None]
    if not scores:
        return ()
    points = tuple((x, score.mean) for x, score in scores)
    band = tuple((x, score.low, score.high) for x, score in scores)
    return (Series(label=f"test at temperature {at:g}", points=points, band=band, color=3, style="marks"),)


def running_mean(points: Points, window: int) -> Points:
    """Smooth by a least-squares line through the ``window`` (odd) points around each point.

    Away from the ends this is the centred mean, which does not lag. Near an end the window keeps its size and moves
    inward, so that the last values are smooth too. No value leaves the range of its window.
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
    """Return an odd window of about a twentieth of the run: 1 (none) below 30 points, at most 25."""
    return 1 if count < 30 else min(25, 2 * (count // 40) + 3)


def smoothed(points: Points, breaks: Sequence[float]) -> Points:
    """Return the running mean, never across ``breaks``, the x at which a stage began."""
    window = smoothing_window(len(points))
    if window == 1:
        return points
    edges = [-math.inf, *sorted(breaks), math.inf]
    parts = [tuple(p for p in points if a <= p[0] < b) for a, b in itertools.pairwise(edges)]
    return tuple(p for part in parts for p in running_mean(part, window))


def with_running_mean(label: str, points: Points, color: int, breaks: Sequence[float] = ()) -> tuple[Series, ...]:
    """Return faint raw values behind their running mean, or only the raw line where it is short."""
    line = Series(label=label, points=smoothed(points, breaks), color=color)
    if smoothing_window(len(points)) == 1:
        return (line,)
    return line, Series(label=f"{label} (each step)", points=points, color=color, style="faint")


# Comparisons: one line per variant.


VariantPoint: TypeAlias = tuple[float, float, float, float, int]
"""One training step of a variant: step, mean, smallest and largest value of its runs, and the number of runs."""
VariantCurve: TypeAlias = tuple[Sequence[VariantPoint], Sequence[tuple[int, Points]]]
"""One metric of a variant: the steps that all its runs have, and (index, points) of each run that is longer than the
shortest, from the last common step on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantAxes:
    """The positions of the steps of all variants on every x axis that at least one variant has recorded."""

    names: Mapping[Axis, str]  # title with unit
    runs: Mapping[Axis, Sequence[Sequence[Mapping[float, float]]]]  # by variant and run: step -> x
    # by variant: step -> mean x; empty where a run recorded none
    variants: Mapping[Axis, Sequence[Mapping[float, float]]]


ComparedChart: TypeAlias = tuple[Metric, Sequence[VariantCurve], Mapping[Axis, Chart]]
"""One metric of all variants: a curve per variant (empty where no run has the metric), and a chart over each x axis
that at least one variant has."""


def compared_charts(variants: Sequence[Variant], metrics: Sequence[Metric], axes: VariantAxes) -> list[ComparedChart]:
    """Return the charts of ``metrics`` in a comparison that at least one variant has, over every x axis."""
    marks = [[stage_marks(run) for run in variant.runs] for variant in variants]
    begun = [stage_marks(run) for variant in variants for run in variant.runs if run.metrics]
    common = begun[0] if begun and all(other == begun[0] for other in begun) else ()
    found: list[ComparedChart] = []
    for metric in metrics:
        if not metric.compared:
            continue
        others = [metric.instead] if metric.instead else []
        of_variants = [[_values(run, metric, *others) for run in variant.runs] for variant in variants]
        if metric.unlike and of_variants == [[run.points(metric.unlike) for run in v.runs] for v in variants]:
            continue
        if not metric.exact:
            of_variants = [
                [smoothed(points, [x for x, _ in m]) for points, m in zip(runs, ms, strict=True)]
                for runs, ms in zip(of_variants, marks, strict=True)
            ]
        shown = [y for runs in of_variants for run in runs for _, y in run]
        if metric.silent is not None and all(y == metric.silent for y in shown):
            continue
        curves = [variant_curve(runs) for runs in of_variants]
        if any(points for points, _ in curves):
            charts: dict[Axis, Chart] = {}
            for axis in axes.names:
                chart = _compared_chart(variants, metric, curves, axes, axis, common)
                charts |= {} if chart.empty else {axis: chart}
            found.append((metric, curves, charts))
    return found


def _compared_chart(
    variants: Sequence[Variant],
    metric: Metric,
    curves: Sequence[VariantCurve],
    axes: VariantAxes,
    axis: Axis,
    marks: tuple[Mark, ...],
) -> Chart:
    lines: list[Series] = []
    tails: list[Series] = []
    for slot, (variant, (every, beyond_common)) in enumerate(zip(variants, curves, strict=True)):
        at, color = axes.variants[axis][slot], slot % len(PALETTE)
        points = [point for point in every if point[0] in at]
        mean = tuple((at[step], value) for step, value, *_ in points)
        several = any(runs > 1 for *_, runs in points)
        band = tuple((at[step], low, high) for step, _, low, high, _ in points) if several else ()
        lines.append(Series(label=variant.name, points=mean, band=band, color=color, dots=metric.look == "dots"))
        for run, values in beyond_common:
            own = axes.runs[axis][slot][run]
            beyond = tuple((own[x], y) for x, y in values if x in own)
            tails.append(Series(label=tail_label(variant, run), points=beyond, color=color, style="faint"))
    ends = [x for at in axes.variants[axis] if at for x in (min(at.values()), max(at.values()))]
    shown = [x for series in (*lines, *tails) for x, _ in series.points]
    steps, name = axis == "steps", axes.names[axis]
    return Chart(
        key=f"{metric.compared}@{axis}",
        title=metric.title,
        note=metric.note + (f" {metric.better.capitalize()} is better." if metric.better else ""),
        unit=metric.axis,
        y_low=metric.y_low,
        y_high=metric.y_high,
        series=(*lines, *tails),
        marks=marks if steps else (),  # stage changes, where every run changed at the same step
        x_name=name,
        x_word="step" if steps else name,
        x_whole=steps,
        x_range=(min([*ends, *shown]) if steps else 0.0, max([*ends, *shown])) if shown else None,
    )


def tail_label(variant: Variant, index: int) -> str:
    """Return the label of a run that is drawn by itself."""
    return f"{variant.name}, run {index + 1} of {len(variant.runs)}"


def variant_curve(runs: Sequence[Points]) -> VariantCurve:
    """Return a variant's curve from the (step, value) points of each of its runs.

    The mean is over the same runs at every step, so that a run that ended earlier causes no jump. Beyond the end of
    the shortest run each longer one is a line of its own. Steps are never interpolated. With one run the band has no
    width. Runs without points are ignored.
    """
    tables = {i: dict(points) for i, points in enumerate(runs) if points}
    common = sorted(set.intersection(*(set(table) for table in tables.values()))) if tables else []
    points: list[VariantPoint] = []
    for step in evenly(common, MOST_POINTS):
        values = [table[step] for table in tables.values()]
        points.append((step, sum(values) / len(values), min(values), max(values), len(values)))
    tails: list[tuple[int, Points]] = []
    for i, table in tables.items():
        beyond = [step for step in sorted(table) if not common or step >= common[-1]]
        if len(beyond) > 1:
            tails.append((i, tuple((step, table[step]) for step in evenly(beyond, MOST_POINTS))))
    return points, tails


def positions(run: RecordedRun, axis: Axis) -> dict[float, float]:
    """Return by training step the x at its end: steps, response tokens, seconds or device hours.

    Tokens are all response tokens sampled so far (``tokens/sampled``), including those of rejected groups. Wall time
    is the sum of the steps' wall clocks (``time/step``), without evaluations, startup and pauses between sessions.
    Device hours are wall time in hours times ``run.devices``. Empty where a step did not record it.
    """
    if axis == "steps":
        return {float(row.step): float(row.step) for row in run.metrics}
    points = run.points("tokens/sampled" if axis == "tokens" else "time/step")
    if len(points) < len(run.metrics):
        return {}  # a sum with gaps would be too small
    factor = run.devices / 3600 if axis == "gpu-hours" else 1.0
    sums = itertools.accumulate(value * factor for _, value in points)
    return {step: total for (step, _), total in zip(points, sums, strict=True)}


def variant_axes(variants: Sequence[Variant]) -> VariantAxes:
    """Return all x axes of a comparison."""
    names: dict[Axis, str] = {}
    runs: dict[Axis, list[list[dict[float, float]]]] = {}
    means: dict[Axis, list[dict[float, float]]] = {}
    for axis in AXES:
        tables = [[positions(run, axis) for run in variant.runs] for variant in variants]
        largest = max((x for variant in tables for run in variant for x in run.values()), default=None)
        if largest is None:
            continue
        names[axis], divisor = axis_scale(axis, largest)
        runs[axis] = [[{step: x / divisor for step, x in run.items()} for run in variant] for variant in tables]
        means[axis] = []
        for of_variant, variant in zip(runs[axis], variants, strict=True):
            begun = [at for at, run in zip(of_variant, variant.runs, strict=True) if run.metrics]
            common = set(begun[0]).intersection(*begun[1:]) if begun else ()
            means[axis].append({step: sum(at[step] for at in begun) / len(begun) for step in sorted(common)})
    return VariantAxes(names=names, runs=runs, variants=means)


_UNITS: Mapping[Axis, tuple[str, tuple[tuple[str, float], ...]]] = {
    "steps": ("training step", (("", 1.0),)),
    "tokens": ("{}response tokens sampled", (("billion ", 1e9), ("million ", 1e6), ("thousand ", 1e3), ("", 1.0))),
    "wall": ("{} of training steps", (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))),
    "gpu-hours": ("device {}", (("hours", 1.0), ("minutes", 1 / 60), ("seconds", 1 / 3600))),
}


def axis_scale(axis: Axis, largest: float) -> tuple[str, float]:
    """Return the title of an x axis with a unit in which ``largest`` is readable, and the divisor of its values."""
    words, units = _UNITS[axis]
    name, divisor = next((unit for unit in units if largest >= 2 * unit[1]), units[-1])
    return words.format(name), divisor
