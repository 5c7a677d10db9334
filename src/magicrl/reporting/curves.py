"""The figures of a run, as a table: which metrics go into which chart, in the order in which the page shows them.

``GROUPS`` says what is drawn; ``figure_groups`` reads a run's values into it and leaves out what has none.

The figures of a comparison, as a table: which metric each shows; ``compared_charts`` draws arms into them.

A further figure of the comparing report is a row of ``COMPARED``.

Curves of arms: the mean over an arm's runs with a band from the smallest to the largest, over several x axes.

Pure functions, no drawing: what the comparing report shows, and what other figures over arms are made of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from magicrl.reporting.arms import Arm
from magicrl.reporting.canvas import PALETTE
from magicrl.reporting.charts import (
    Band,
    Chart,
    Mark,
    Points,
    Series,
    Unit,
    running_mean_of_parts,
    smoothing_window,
    with_running_mean,
)
from magicrl.reporting.read_folders import RecordedRun
from magicrl.reporting.scores import Comparison, comparisons

Z95 = 1.959964

Look: TypeAlias = Literal["smooth", "line", "steps", "dots"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line of a figure.

    Attributes:
        key: its metric.
        label: its name in legend and CSV.
        color: slot of the palette.
        look: ``smooth`` draws a running mean before the raw values, ``dots`` marks each measurement.
        error: metric of its standard error, drawn as a 95 % band inside [0, 1].
        ends: metrics of the lower and upper end of a band.
        share_of: metric that the values are divided by, so that they become shares.
        unlike: left out where it equals this metric at every step.
        silent: left out where all its values (and ends) are this one: it would say nothing.
    """

    key: str
    label: str
    color: int = 0
    look: Look = "line"
    error: str | None = None
    ends: tuple[str, str] | None = None
    share_of: str | None = None
    unlike: str | None = None
    silent: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One figure; the fields are those of ``Chart``. ``target`` names a metric, ``tests`` adds the test's scores."""

    key: str
    title: str
    note: str
    lines: tuple[Line, ...]
    unit: Unit = "number"
    y_low: float | None = 0.0
    y_high: float | None = None
    target: str | None = None
    stacked: bool = False
    compact: bool = False
    tests: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Figures under one heading. ``panels`` holds one or more figures that share a card and its x axis."""

    key: str
    title: str
    panels: tuple[tuple[Figure, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FigureGroup:
    """A group with a run's values in it."""

    key: str
    title: str
    panels: tuple[tuple[Chart, ...], ...]
    note: str = ""


ACCURACY = Figure(
    key="accuracy",
    title="Accuracy",
    unit="percent",
    y_high=1.0,
    tests=True,
    note="Training: over all responses sampled in the step, and over those that were not cut at T. "
    "Validation and test have their 95 % intervals; the test is measured before and after training.",
    lines=(
        Line(key="train/accuracy/mean", label="train", color=0, look="smooth"),
        Line(key="train/accuracy_nontruncated/mean", label="train, not truncated", color=1, look="smooth"),
        Line(
            key="train/accuracy_unfiltered/mean",
            label="train, filtered prompts as solved",
            color=5,
            look="smooth",
            unlike="train/accuracy/mean",
        ),
        Line(
            key="validation/accuracy/mean",
            label="validation",
            color=2,
            look="dots",
            error="validation/accuracy/standard_error",
        ),
    ),
)
TRUNCATION = Figure(
    key="truncation",
    title="Truncated responses",
    unit="percent",
    compact=True,
    note="Share of the sampled responses that were cut at T; they earn no reward.",
    lines=(Line(key="train/truncation/ratio", label="truncated", color=1, look="smooth"),),
)
ENTROPY = Figure(
    key="entropy",
    title="Entropy against its target",
    target="entropy/target",
    note="Nats per response token, over the whole buffer before rejection. The bonus is on at or below the target.",
    lines=(
        Line(key="entropy/exact/mean", label="exact", color=0),
        Line(key="entropy/sampled/mean", label="sampled estimate", color=4),
    ),
)
ALPHA = Figure(
    key="alpha",
    title="Entropy coefficient",
    compact=True,
    note="α is c where entropy is at or below its target, else 0.",
    lines=(
        Line(key="entropy/alpha", label="α, in the loss", color=3, silent=0.0),
        Line(key="entropy/c", label="c, held by the controller", color=4, silent=0.0),
    ),
)
LENGTH = Figure(
    key="length",
    title="Response length",
    note="Tokens per response, the end token included.",
    lines=(
        Line(key="length/mean", label="mean", color=0),
        Line(key="length/q50", label="median", color=2),
        Line(key="length/q90", label="90th percentile", color=1),
        Line(key="length/q99", label="99th percentile", color=5),
        Line(key="stage/max_tokens", label="limit T", color=4, look="steps"),
    ),
)
REJECTED = Figure(
    key="rejected",
    title="Rejected groups",
    unit="percent",
    y_high=1.0,
    stacked=True,
    note="Share of the sampled groups that teach nothing, since all their rewards are equal, or that could not be "
    "judged.",
    lines=(
        Line(key="groups/rejected/all_wrong", label="all answers wrong", color=1, share_of="groups/sampled"),
        Line(key="groups/rejected/all_correct", label="all answers right", color=2, share_of="groups/sampled"),
        Line(key="groups/not_judged", label="not judged", color=4, share_of="groups/sampled", silent=0.0),
    ),
)
REFILLED = Figure(
    key="refilled",
    title="Groups sampled to refill the batch",
    note="Further groups of the step, in place of rejected ones.",
    compact=True,
    lines=(Line(key="groups/refilled", label="refilled", color=4, look="smooth", silent=0.0),),
)
RATIO = Figure(
    key="ratio",
    title="Probability ratio ρ",
    y_low=None,
    note="Mean, with the band from the smallest to the largest token. Exactly 1 when each batch is used once.",
    lines=(Line(key="learner/ratio_mean", label="ρ", ends=("learner/ratio_min", "learner/ratio_max"), silent=1.0),),
)
CLIP = Figure(
    key="clip",
    title="Clipped tokens",
    unit="percent",
    note="Share of the tokens whose gradient the clip took away. None can be when each batch is used once.",
    lines=(Line(key="learner/clip_ratio", label="clipped", color=1, look="smooth", silent=0.0),),
)
SAMPLER_GAP = Figure(
    key="sampler_gap",
    title="Gap between sampler and learner",
    note="Absolute difference of the log-probabilities that sampler and learner give to a token, in nats.",
    lines=(Line(key="learner/sampler_gap_mean", label="mean", look="smooth"),),
)
LARGEST_GAP = Figure(
    key="sampler_gap_max",
    title="Its largest value",
    compact=True,
    note="Of any token of the step.",
    lines=(Line(key="learner/sampler_gap_max", label="largest", color=1, look="smooth"),),
)
STALENESS = Figure(
    key="staleness",
    title="Staleness",
    note="Asynchronous runs: training steps between the policy that sampled and the learner, mean over tokens, and the "
    "most of any group since it began.",
    lines=(
        Line(key="staleness/mean", label="tokens", look="smooth"),
        Line(key="staleness/max", label="oldest group", color=1, look="smooth"),
    ),
)
CORRECTED = Figure(
    key="corrected",
    title="Stale and corrected tokens",
    unit="percent",
    compact=True,
    note="Share of the tokens that older policies sampled, and of those whose weight the correction capped or masked.",
    lines=(
        Line(key="staleness/older/ratio", label="older policies", look="smooth"),
        Line(key="learner/corrected_ratio", label="corrected", color=1, look="smooth", silent=0.0),
    ),
)
GRADIENT = Figure(
    key="gradient_norm",
    title="Gradient norm",
    note="Before clipping.",
    lines=(Line(key="learner/grad_norm", label="gradient norm", look="smooth"),),
)
KL = Figure(
    key="kl",
    title="KL to the reference",
    note="Mean of the k3 estimate, nats per token.",
    lines=(Line(key="learner/kl", label="KL", color=3, look="smooth", silent=0.0),),  # zeros: no reference
)
STEP_TIME = Figure(
    key="step_time",
    title="Time of a step",
    unit="seconds",
    stacked=True,
    note="The three parts add up to the step's wall clock; work that overlaps is counted once.",
    lines=(
        Line(key="time/rollout", label="rollout t_R", color=0),
        Line(key="time/train", label="training t_T", color=1),
        Line(key="time/other", label="other t_O", color=4),
    ),
)
THROUGHPUT = Figure(
    key="throughput",
    title="Tokens per second",
    compact=True,
    note="Sampled response tokens over the step's wall clock.",
    lines=(Line(key="tokens/per_second", label="tokens per second", color=2, look="smooth"),),
)
LONGEST = Figure(
    key="longest_response",
    title="Longest response's share of the rollout",
    unit="percent",
    compact=True,
    y_high=1.0,
    note="Seconds of the response that took longest over t_R: near 100 %, more accelerators would not shorten it.",
    lines=(
        Line(key="time/longest_response", label="longest response", color=3, look="smooth", share_of="time/rollout"),
    ),
)
JUDGING = Figure(
    key="judging",
    title="Judging",
    unit="seconds",
    compact=True,
    note="Seconds of all verifier workers together, and how long the step waited for them after generation.",
    lines=(
        Line(key="verify/seconds", label="work", color=2, look="smooth"),
        Line(key="time/verify_waited", label="waited for", color=1, look="smooth"),
    ),
)
IDLE = Figure(
    key="idle",
    title="Waiting",
    unit="seconds",
    note="Asynchronous runs: seconds of the step in which the learner waited for rollouts and verdicts, and in which "
    "the engine generated nothing.",
    lines=(
        Line(key="idle/learner/seconds", label="learner", color=0, look="smooth"),
        Line(key="idle/engine/seconds", label="engine", color=1, look="smooth"),
    ),
)

ON_POLICY = "On-policy: each batch is used once, so the probability ratio ρ is exactly 1 and no token is clipped."

GROUPS = (
    Group(
        key="learning",
        title="Learning curves",
        panels=((ACCURACY, TRUNCATION), (ENTROPY, ALPHA), (LENGTH,), (REJECTED, REFILLED)),
    ),
    Group(
        key="policy",
        title="Policy and sampler",
        panels=((RATIO,), (CLIP,), (SAMPLER_GAP, LARGEST_GAP), (STALENESS, CORRECTED), (GRADIENT,), (KL,)),
    ),
    Group(key="time", title="Time", panels=((STEP_TIME, LONGEST), (THROUGHPUT, JUDGING), (IDLE,))),
)


def figure_groups(run: RecordedRun) -> tuple[FigureGroup, ...]:
    """Every chart that the run has data for, with its stage marks and a common x axis."""
    groups: list[FigureGroup] = []
    for group in GROUPS:
        panels = [tuple(c for c in (_chart(run, f) for f in panel) if not c.empty) for panel in group.panels]
        if any(panels):
            shown = tuple(panel for panel in panels if panel)
            left_out = group.key == "policy" and not any(chart.key in ("ratio", "clip") for p in shown for chart in p)
            note = ON_POLICY if left_out and run.points("learner/ratio_mean") else ""
            groups.append(FigureGroup(key=group.key, title=group.title, panels=shown, note=note))
    return tuple(groups)


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


def _chart(run: RecordedRun, figure: Figure) -> Chart:
    steps = [float(row.step) for row in run.metrics]
    tested = bool(run.sets)
    target = run.points(figure.target) if figure.target else ()
    lines = tuple(series for line in figure.lines for series in _series(run, line))
    return Chart(
        key=figure.key,
        title=figure.title,
        note=figure.note,
        unit=figure.unit,
        y_low=figure.y_low,
        y_high=figure.y_high,
        stacked=figure.stacked,
        compact=figure.compact,
        target=(target[-1][1], f"target {target[-1][1]:g}") if target and any(s.points for s in lines) else None,
        series=lines + (_tests(run) if figure.tests and any(s.points for s in lines) else ()),
        marks=stage_marks(run),
        x_range=(0.0 if tested else min(steps), max(steps)) if steps else None,  # the start was tested at step 0
    )


def _series(run: RecordedRun, line: Line) -> tuple[Series, ...]:
    points = run.points(line.key)
    if line.share_of is not None:
        whole = dict(run.points(line.share_of))
        points = tuple((x, y / whole[x]) for x, y in points if whole.get(x))
    shown = [y for key in (line.key, *(line.ends or ())) for _, y in run.points(key)]
    if not points or (line.silent is not None and all(y == line.silent for y in shown)):
        return ()
    if line.unlike is not None and points == run.points(line.unlike):
        return ()
    if line.look == "smooth":
        return with_running_mean(line.label, points, line.color, [mark.x for mark in stage_marks(run)])
    return (
        Series(
            label=line.label,
            points=points,
            color=line.color,
            style="steps" if line.look == "steps" else "line",
            dots=line.look == "dots",
            band=_band(run, line, points),
        ),
    )


def _band(run: RecordedRun, line: Line, points: Points) -> Band:
    if line.error is not None:
        error = dict(run.points(line.error))
        return tuple((x, max(0.0, y - Z95 * error[x]), min(1.0, y + Z95 * error[x])) for x, y in points if x in error)
    if line.ends is not None:
        low, high = (dict(run.points(key)) for key in line.ends)
        return tuple((x, low[x], high[x]) for x, _ in points if x in low and x in high)
    return ()


def _tests(run: RecordedRun) -> tuple[Series, ...]:
    """The first test set before (step 0) and after training, at the temperature of training."""
    found = comparisons(run)
    at = found[0].training_temperature if found else None
    return (_test(run, found[0], at),) if at is not None else ()


def _test(run: RecordedRun, comparison: Comparison, at: float) -> Series:
    last = float(run.metrics[-1].step)
    pairs = [p for p in comparison.pairs if p.temperature == at]
    scores = [(x, s.accuracy) for p in pairs for x, s in ((0.0, p.before), (last, p.after)) if s is not None]
    return Series(
        label=f"test at temperature {at:g}",
        points=tuple((x, score.mean) for x, score in scores),
        band=tuple((x, score.low, score.high) for x, score in scores),
        color=3,
        style="marks",
    )


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
    charts: dict[Axis, Chart] = {
        axis: _compared_chart(arms, figure, curves, axes, axis, common) for axis in axes.scales
    }
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


def _compared_chart(
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


Axis: TypeAlias = Literal["steps", "tokens", "wall", "gpu-hours"]
AXES: tuple[Axis, ...] = ("steps", "tokens", "wall", "gpu-hours")

MOST_POINTS = 160
"""Steps of one curve; of a longer run evenly spaced ones are taken, the first and the last among them."""


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


def common_positions(tables: Sequence[Mapping[float, float]]) -> dict[float, float]:
    """Step -> mean x over the runs of an arm, for the steps that all of them have; empty where one recorded none."""
    if not tables or not all(tables):
        return {}
    steps = set(tables[0]).intersection(*tables[1:])
    return {step: sum(table[step] for table in tables) / len(tables) for step in sorted(steps)}


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
        means[axis] = [
            common_positions([table for table, run in zip(of_arm, arm.runs, strict=True) if run.metrics])
            for of_arm, arm in zip(runs[axis], arms, strict=True)
        ]
    return ArmAxes(scales=scales, runs=runs, arms=means)


def axis_scale(axis: Axis, largest: float) -> Scale:
    """A unit in which the largest x is a readable number."""
    if axis == "steps":
        return Scale(name="training step", divisor=1.0)
    if axis == "tokens":
        units = (("billion ", 1e9), ("million ", 1e6), ("thousand ", 1e3), ("", 1.0))
        word, divisor = next(unit for unit in units if largest >= 2 * unit[1] or unit[1] == 1)
        return Scale(name=f"{word}response tokens sampled", divisor=divisor)
    if axis == "wall":
        units = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
        word, divisor = next(unit for unit in units if largest >= 2 * unit[1] or unit[1] == 1)
        return Scale(name=f"{word} of training steps", divisor=divisor)
    units = (("hours", 1.0), ("minutes", 1 / 60), ("seconds", 1 / 3600))
    word, divisor = next(unit for unit in units if largest >= 2 * unit[1] or unit[0] == "seconds")
    return Scale(name=f"device {word}", divisor=divisor)


def totals(run: RecordedRun) -> Mapping[Axis, float | None]:
    """What a run has spent so far on each axis (steps, tokens, seconds, device hours); None: not recorded."""
    tables: dict[Axis, dict[float, float]] = {axis: positions(run, axis) for axis in AXES}
    found: dict[Axis, float | None] = {axis: max(table.values(), default=None) for axis, table in tables.items()}
    found["steps"] = float(len(run.metrics))
    return found
