"""The figures of a comparison, as a table: which metric each shows; ``compared_charts`` draws arms into them.

A further figure of the comparing report is a row of ``COMPARED``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from magicrl.reporting.arms import Arm
from magicrl.reporting.canvas import PALETTE
from magicrl.reporting.charts import Chart, Mark, Points, Series, Unit
from magicrl.reporting.curves import ArmAxes, ArmCurve, Axis, arm_curve, smoothed
from magicrl.reporting.figures import stage_marks
from magicrl.reporting.run_folder import RecordedRun


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One figure of a comparison.

    Attributes:
        key: of the figure and its exports.
        title: its heading.
        metrics: the first of these that a step has.
        note: one sentence on what is drawn.
        unit: how values are written.
        smooth: each run's running mean instead of its values.
        sparse: not measured at every step: points are marked.
        share_of: metric that the values are divided by.
        y_low, y_high: fixed ends of the y axis.
        hide_zeros: left out where all values are 0.
    """

    key: str
    title: str
    metrics: tuple[str, ...]
    note: str
    unit: Unit = "number"
    smooth: bool = True
    sparse: bool = False
    share_of: str | None = None
    y_low: float | None = 0.0
    y_high: float | None = None
    hide_zeros: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedGroup:
    """Figures under one heading."""

    key: str
    title: str
    figures: tuple[Compared, ...]


COMPARED = (
    ComparedGroup(
        key="learning",
        title="Learning curves",
        figures=(
            Compared(
                key="accuracy",
                title="Training accuracy",
                metrics=("train/accuracy/mean",),
                unit="percent",
                note="Over all responses sampled in the step.",
            ),
            Compared(
                key="accuracy_nontruncated",
                title="Training accuracy of what was not cut",
                metrics=("train/accuracy_nontruncated/mean",),
                unit="percent",
                note="Over the responses that ended by themselves.",
            ),
            Compared(
                key="validation",
                title="Validation accuracy",
                metrics=("validation/accuracy/mean",),
                unit="percent",
                smooth=False,
                sparse=True,
                note="On problems that are not trained on.",
            ),
            Compared(
                key="entropy",
                title="Entropy",
                metrics=("entropy/exact/mean", "entropy/sampled/mean"),
                note="Nats per response token, before rejection; exact where it was recorded, else the estimate.",
            ),
            Compared(
                key="truncation",
                title="Truncated responses",
                metrics=("train/truncation/ratio",),
                unit="percent",
                note="Share of the sampled responses that were cut at T.",
            ),
            Compared(
                key="length",
                title="Mean response length",
                metrics=("length/mean",),
                note="Tokens per response, the end token included.",
            ),
            Compared(
                key="rejected",
                title="Rejected groups",
                metrics=("groups/rejected/ratio",),
                unit="percent",
                note="Share of the sampled groups that teach nothing, since all their rewards are equal.",
            ),
            Compared(
                key="alpha",
                title="Entropy coefficient α",
                metrics=("entropy/alpha",),
                smooth=False,
                hide_zeros=True,
                note="As it stood in the loss.",
            ),
        ),
    ),
    ComparedGroup(
        key="policy",
        title="Policy and sampler",
        figures=(
            Compared(
                key="ratio_max",
                title="Largest probability ratio ρ",
                metrics=("learner/ratio_max",),
                y_low=None,
                note="Of any token of the step; exactly 1 when each batch is used once.",
            ),
            Compared(
                key="ratio_min",
                title="Smallest probability ratio ρ",
                metrics=("learner/ratio_min",),
                y_low=None,
                note="Of any token of the step.",
            ),
            Compared(
                key="clip",
                title="Clipped tokens",
                metrics=("learner/clip_ratio",),
                unit="percent",
                hide_zeros=True,
                note="Share of the tokens whose gradient the clip took away.",
            ),
            Compared(
                key="kl",
                title="KL to the reference",
                metrics=("learner/kl",),
                hide_zeros=True,
                note="Mean of the k3 estimate, nats per token.",
            ),
            Compared(
                key="gradient_norm",
                title="Gradient norm",
                metrics=("learner/grad_norm",),
                note="Before clipping.",
            ),
            Compared(
                key="sampler_gap",
                title="Gap between sampler and learner",
                metrics=("learner/sampler_gap_mean",),
                note="Absolute difference of the log-probabilities that both give to a token, in nats.",
            ),
        ),
    ),
    ComparedGroup(
        key="time",
        title="Time",
        figures=(
            Compared(
                key="step_time",
                title="Time of a step",
                metrics=("time/step",),
                unit="seconds",
                note="Wall clock of a whole training step.",
            ),
            Compared(
                key="rollout_share",
                title="Share of generation in a step",
                metrics=("time/rollout",),
                share_of="time/step",
                unit="percent",
                y_high=1.0,
                note="Wall clock of the rollout over that of the step.",
            ),
            Compared(
                key="throughput",
                title="Tokens per second",
                metrics=("tokens/per_second",),
                note="Sampled response tokens over the step's wall clock.",
            ),
        ),
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedChart:
    """One figure with the arms in it.

    Attributes:
        figure: what it shows.
        curves: one an arm, in the arms' order; without points where no run of the arm has the metric.
        charts: the drawing over each x axis that has at least one arm.
    """

    figure: Compared
    curves: tuple[ArmCurve, ...]
    charts: Mapping[Axis, Chart]


def run_points(run: RecordedRun, figure: Compared, breaks: Sequence[float] = ()) -> Points:
    """The (step, value) points of one run, smoothed if the figure is, but never across ``breaks`` (stage changes)."""
    points = run.points(*figure.metrics)
    if figure.share_of is not None:
        whole = dict(run.points(figure.share_of))
        points = tuple((x, y / whole[x]) for x, y in points if whole.get(x))
    return smoothed(points, breaks) if figure.smooth else points


def compared_charts(arms: Sequence[Arm], figures: Sequence[Compared], axes: ArmAxes) -> list[ComparedChart]:
    """The figures that at least one arm has something to show in, with all arms over every x axis."""
    marks = [[stage_marks(run) for run in arm.runs] for arm in arms]
    drawn = (_compared(arms, figure, axes, marks) for figure in figures)
    return [compared for compared in drawn if compared is not None]


_Marks: TypeAlias = Sequence[Sequence[tuple[Mark, ...]]]


def _compared(arms: Sequence[Arm], figure: Compared, axes: ArmAxes, marks: _Marks) -> ComparedChart | None:
    points = [
        [run_points(run, figure, [m.x for m in of_run]) for run, of_run in zip(arm.runs, of_arm, strict=True)]
        for arm, of_arm in zip(arms, marks, strict=True)
    ]
    if figure.hide_zeros and not any(y for arm in points for run in arm for _, y in run):
        return None
    curves = tuple(arm_curve(of_arm) for of_arm in points)
    if not any(curve.points for curve in curves):
        return None
    common = _common_marks(arms, marks)
    charts: dict[Axis, Chart] = {axis: _chart(arms, figure, curves, axes, axis, common) for axis in axes.scales}
    drawn: dict[Axis, Chart] = {axis: chart for axis, chart in charts.items() if not chart.empty}
    return ComparedChart(figure=figure, curves=curves, charts=drawn)


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


def _chart(
    arms: Sequence[Arm],
    figure: Compared,
    curves: Sequence[ArmCurve],
    axes: ArmAxes,
    axis: Axis,
    marks: tuple[Mark, ...],
) -> Chart:
    lines = [
        arm_line(arm, slot, curve, axes.arms[axis][slot], dots=figure.sparse)
        for slot, (arm, curve) in enumerate(zip(arms, curves, strict=True))
    ]
    tails = [s for i, arm in enumerate(arms) for s in _tails(arm, i, curves[i], axes.runs[axis][i])]
    ends = [x for at in axes.arms[axis] for x in (min(at.values(), default=0.0), max(at.values(), default=0.0)) if at]
    shown = [x for series in (*lines, *tails) for x, _ in series.points]
    scale = axes.scales[axis]
    return Chart(
        key=f"{figure.key}@{axis}",
        title=figure.title,
        note=figure.note,
        unit=figure.unit,
        y_low=figure.y_low,
        y_high=figure.y_high,
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
