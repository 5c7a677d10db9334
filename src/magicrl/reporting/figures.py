"""The figures of a run, as a table: which metrics go into which chart, in the order in which the page shows them.

``GROUPS`` says what is drawn; ``figure_groups`` reads a run's values into it and leaves out what has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from magicrl.reporting.charts import Band, Chart, Mark, Points, Series, Unit, with_running_mean
from magicrl.reporting.comparison import Comparison, comparisons
from magicrl.reporting.run_folder import RecordedRun

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
