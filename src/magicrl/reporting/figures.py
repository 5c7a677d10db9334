"""The figures of a run: which metrics go into which chart, grouped as the page shows them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from magicrl.reporting.charts import Band, Chart, Mark, Points, Series, with_running_mean
from magicrl.reporting.run_folder import RecordedRun

Z95 = 1.959964


@dataclass(frozen=True, kw_only=True, slots=True)
class FigureGroup:
    """Charts that belong together. ``panels`` holds one or more charts that share a card and its x axis."""

    key: str
    title: str
    panels: tuple[tuple[Chart, ...], ...]


def figure_groups(run: RecordedRun) -> tuple[FigureGroup, ...]:
    """Every chart that the run has data for, with its stage marks and a common x axis."""
    groups = (
        FigureGroup(
            key="learning",
            title="Learning curves",
            panels=(
                (_accuracy(run), _truncation(run)),
                (_entropy(run), _alpha(run)),
                (_lengths(run),),
                (_rejected(run), _refilled(run)),
            ),
        ),
        FigureGroup(
            key="policy",
            title="Policy and sampler",
            panels=((_ratio(run),), (_clip(run),), (_gap(run),), (_gradient(run),), (_kl(run),)),
        ),
        FigureGroup(
            key="time",
            title="Time",
            panels=((_time(run),), (_throughput(run),)),
        ),
    )
    return tuple(g for g in (_finished(run, group) for group in groups) if g.panels)


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


def _finished(run: RecordedRun, group: FigureGroup) -> FigureGroup:
    """The group without charts that have no data, all with marks and the run's x axis."""
    steps = [float(row.step) for row in run.metrics]
    x_range = (min(steps), max(steps)) if steps else None
    marks = stage_marks(run)
    panels = (
        tuple(replace(chart, marks=marks, x_range=x_range) for chart in panel if not chart.empty)
        for panel in group.panels
    )
    return replace(group, panels=tuple(panel for panel in panels if panel))


def _line(run: RecordedRun, key: str, label: str, color: int) -> tuple[Series, ...]:
    return _smooth(run, run.points(key), label, color)


def _smooth(run: RecordedRun, points: Points, label: str, color: int) -> tuple[Series, ...]:
    return with_running_mean(label, points, color, [mark.x for mark in stage_marks(run)])


def _plain(points: Points, label: str, color: int, style: str = "line") -> Series:
    return Series(label=label, points=points, color=color, style="dashed" if style == "dashed" else "line")


def _error_band(points: Points, errors: Points) -> Band:
    """95 % band from standard errors of shares, kept inside [0, 1]."""
    error = dict(errors)
    return tuple(
        (x, max(0.0, y - Z95 * error[x]), min(1.0, y + Z95 * error[x])) for x, y in points if error.get(x) is not None
    )


def _accuracy(run: RecordedRun) -> Chart:
    validation = run.points("validation/accuracy/mean")
    train, unfiltered = run.points("train/accuracy/mean"), run.points("train/accuracy_unfiltered/mean")
    differs = any(a != b for a, b in zip(train, unfiltered, strict=False))
    band = _error_band(validation, run.points("validation/accuracy/standard_error"))
    return Chart(
        key="accuracy",
        title="Accuracy",
        unit="percent",
        y_low=0.0,
        y_high=1.0,
        note="Training accuracy over all responses sampled in the step, and over those that were not cut at T. "
        "Validation has its 95 % band.",
        series=(
            *_line(run, "train/accuracy_nontruncated/mean", "train, not truncated", 1),
            *_line(run, "train/accuracy/mean", "train", 0),
            *(_smooth(run, unfiltered, "train, filtered prompts as solved", 5) if differs else ()),
            Series(label="validation", points=validation, color=2, band=band, dots=True),
        ),
    )


def _truncation(run: RecordedRun) -> Chart:
    return Chart(
        key="truncation",
        title="Truncated responses",
        unit="percent",
        y_low=0.0,
        compact=True,
        note="Share of the sampled responses that were cut at T; they earn no reward.",
        series=_line(run, "train/truncation/ratio", "truncated", 1),
    )


def _entropy(run: RecordedRun) -> Chart:
    target = run.points("entropy/target")
    return Chart(
        key="entropy",
        title="Entropy against its target",
        y_low=0.0,
        note="Nats per response token, over the whole buffer before rejection. The bonus is on below the target.",
        target=(target[-1][1], f"target {target[-1][1]:g}") if target else None,
        series=(
            _plain(run.points("entropy/sampled/mean"), "sampled estimate", 4, "dashed"),
            _plain(run.points("entropy/exact/mean"), "exact", 0),
        ),
    )


def _alpha(run: RecordedRun) -> Chart:
    return Chart(
        key="alpha",
        title="Entropy coefficient",
        y_low=0.0,
        compact=True,
        note="α is c where entropy is at or below its target, else 0.",
        series=(
            _plain(run.points("entropy/c"), "c, held by the controller", 4, "dashed"),
            _plain(run.points("entropy/alpha"), "α, in the loss", 3),
        ),
    )


def _lengths(run: RecordedRun) -> Chart:
    limit = Series(label="limit T", points=run.points("stage/max_tokens"), color=4, style="steps")
    return Chart(
        key="length",
        title="Response length",
        y_low=0.0,
        note="Tokens per response, the end token included.",
        series=(
            limit,
            _plain(run.points("length/q99"), "99th percentile", 5),
            _plain(run.points("length/q90"), "90th percentile", 1),
            _plain(run.points("length/mean"), "mean", 0),
            _plain(run.points("length/q50"), "median", 2),
        ),
    )


def _ratio(run: RecordedRun) -> Chart:
    mean = run.points("learner/ratio_mean")
    low, high = dict(run.points("learner/ratio_min")), dict(run.points("learner/ratio_max"))
    band: Band = tuple((x, low[x], high[x]) for x, _ in mean if x in low and x in high)
    return Chart(
        key="ratio",
        title="Probability ratio ρ",
        note="Mean, with the band from the smallest to the largest token. Exactly 1 when each batch is used once.",
        series=(Series(label="ρ", points=mean, color=0, band=band),),
    )


def _clip(run: RecordedRun) -> Chart:
    return Chart(
        key="clip",
        title="Clipped tokens",
        unit="percent",
        y_low=0.0,
        note="Share of the tokens whose gradient the clip took away.",
        series=_line(run, "learner/clip_ratio", "clipped", 1),
    )


def _gap(run: RecordedRun) -> Chart:
    return Chart(
        key="sampler_gap",
        title="Gap between sampler and learner",
        y_low=0.0,
        note="Absolute difference of the log-probabilities that sampler and learner give to a token, in nats.",
        series=(
            *_line(run, "learner/sampler_gap_max", "largest", 4),
            *_line(run, "learner/sampler_gap_mean", "mean", 0),
        ),
    )


def _shares(run: RecordedRun, key: str) -> Points:
    """A count of groups as a share of those sampled."""
    sampled = dict(run.points("groups/sampled"))
    return tuple((x, y / sampled[x]) for x, y in run.points(key) if sampled.get(x))


def _rejected(run: RecordedRun) -> Chart:
    wrong, right = _shares(run, "groups/rejected/all_wrong"), _shares(run, "groups/rejected/all_correct")
    parts = (
        Series(label="all answers wrong", points=wrong, color=1),
        Series(label="all answers right", points=right, color=2),
    )
    whole = (Series(label="rejected", points=run.points("groups/rejected/ratio"), color=0),)
    return Chart(
        key="rejected",
        title="Rejected groups",
        unit="percent",
        y_low=0.0,
        y_high=1.0,
        stacked=True,
        note="Share of the sampled groups that teach nothing, since all their rewards are equal.",
        series=parts if wrong or right else whole,
    )


def _refilled(run: RecordedRun) -> Chart:
    points = run.points("groups/refilled")
    return Chart(
        key="refilled",
        title="Groups sampled to refill the batch",
        y_low=0.0,
        compact=True,
        series=_smooth(run, points, "refilled", 4) if any(y for _, y in points) else (),
    )


def _time(run: RecordedRun) -> Chart:
    return Chart(
        key="step_time",
        title="Time of a step",
        unit="seconds",
        y_low=0.0,
        stacked=True,
        note="The three parts add up to the step's wall clock; work that overlaps is counted once.",
        series=(
            Series(label="rollout t_R", points=run.points("time/rollout"), color=0),
            Series(label="training t_T", points=run.points("time/train"), color=1),
            Series(label="other t_O", points=run.points("time/other"), color=4),
        ),
    )


def _throughput(run: RecordedRun) -> Chart:
    return Chart(
        key="throughput",
        title="Tokens per second",
        y_low=0.0,
        note="Sampled response tokens over the step's wall clock.",
        series=_line(run, "tokens/per_second", "tokens per second", 2),
    )


def _gradient(run: RecordedRun) -> Chart:
    return Chart(
        key="gradient_norm",
        title="Gradient norm",
        y_low=0.0,
        note="Before clipping.",
        series=_line(run, "learner/grad_norm", "gradient norm", 0),
    )


def _kl(run: RecordedRun) -> Chart:
    points = run.points("learner/kl")
    return Chart(
        key="kl",
        title="KL to the reference",
        y_low=0.0,
        note="Mean of the k3 estimate, nats per token.",
        series=_smooth(run, points, "KL", 3) if any(y for _, y in points) else (),  # zeros: no reference
    )
