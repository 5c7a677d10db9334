"""The page that compares training runs, evaluations, or both: scores of variants, settings that differ, curves, runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from magicrl.evaluation.samples import RESULTS
from magicrl.reporting.variants import (
    Variant,
    variant_scores,
    decides,
    group_runs,
    path_labels,
    run_settings,
    setting_rows,
)
from magicrl.reporting.charts import (
    PALETTE,
    FigureView,
    IntervalRow,
    variant_swatch,
    chart_view,
    draw,
    intervals_view,
    plot_area,
)
from magicrl.reporting.curves import (
    AXES,
    METRICS,
    VariantAxes,
    Axis,
    ComparedChart,
    variant_axes,
    compared_charts,
    devices,
    positions,
    tail_label,
)
from magicrl.reporting.evaluation_page import evaluation_blocks
from magicrl.reporting.page import Block, block, render_page, write_page
from magicrl.reporting.read_folders import (
    RecordedEvaluation,
    RecordedRun,
    TemperatureScore,
    read_evaluation_folder,
    read_run,
)
from magicrl.reporting.samples import MOST_PROBLEMS, variant_browsers
from magicrl.reporting.wording import temperature
from magicrl.training.diagnosis import measure_of
from magicrl_verifiers.progress import duration

LAST_STEPS = 5
"""Steps over which a run's last numbers are averaged."""
AXIS_WORDS: Mapping[Axis, str] = {
    "steps": "steps",
    "tokens": "tokens",
    "wall": "wall time",
    "gpu-hours": "device hours",
}


class LeftOut(NamedTuple):
    """A folder that was asked for and is not on the page, and why."""

    folder: str
    why: str


class WrittenComparison(NamedTuple):
    """The page, and what could not be put on it."""

    path: Path
    left_out: tuple[LeftOut, ...]


def is_evaluation(folder: Path) -> bool:
    """Whether ``magicrl eval`` wrote this folder; a folder with neither mark is taken for a run."""
    return not (folder / "run.json").exists() and ((folder / RESULTS).exists() or any(folder.glob("*/job.json")))


def write_comparison(
    folders: Sequence[Path],
    output: Path,
    *,
    axis: Axis = "steps",
    keys: Sequence[str] | None = None,
    command: str = "",
) -> WrittenComparison:
    """Write a page over run folders, evaluation folders, or both.

    A folder that cannot be read is left out, and the page says so; it is an error only where none is left.

    Args:
        folders: in the order of the page; the others are held against the first run (or evaluation).
        output: the page.
        axis: the x axis that is shown first.
        keys: settings that make the variants; default: all in which runs differ but for seed and bookkeeping.
        command: what made the page, for its foot.

    Raises:
        ValueError: the same folder twice, no folder that can be read, a key that no run has, or the page cannot be
            written.
    """
    doubled = [folder for i, folder in enumerate(folders) if folder.resolve() in {f.resolve() for f in folders[:i]}]
    if doubled:
        raise ValueError(f"{doubled[0]} is named twice; a run counts once in a comparison")
    runs: list[RecordedRun] = []
    evaluations: list[RecordedEvaluation] = []
    left_out: list[LeftOut] = []
    for folder in folders:
        try:
            if is_evaluation(folder):
                evaluations.append(read_evaluation_folder(folder))
            else:
                runs.append(read_run(folder))
        except ValueError as error:
            left_out.append(LeftOut(str(folder), str(error)))
    if not runs and not evaluations:
        raise ValueError("none of the folders can be read:\n" + "\n".join(f"  {item.why}" for item in left_out))
    if keys is not None and not runs:
        raise ValueError(f"--group-by {keys[0]}: there is no run among the folders, only evaluations")
    variants = group_runs(runs, keys) if runs else ()
    missing = block("left_out", "Left out", {"folders": left_out} if left_out else None)
    blocks = [missing] if missing is not None else []
    blocks += comparison_blocks(variants, axis) if variants else ()
    blocks += evaluation_blocks(evaluations) if evaluations else ()
    facts = [("variants", str(len(variants))), ("runs", str(len(runs)))] if runs else []
    facts += [("training steps", str(sum(len(run.metrics) for run in runs)))] if runs else []
    facts += [("evaluations", str(len(evaluations)))] if evaluations else []
    samples = sum(b.problems * b.samples for evaluation in evaluations for b in evaluation.benchmarks.values())
    facts += [("samples", f"{samples:,}")] if samples else []
    facts += [("left out", str(len(left_out)))] if left_out else []
    names = [run.name for run in runs] or [name for evaluation in evaluations for name in evaluation.benchmarks]
    page = render_page(_title(names), facts, blocks, command, "comparison" if runs else "evaluation")
    return WrittenComparison(write_page(page, output), tuple(left_out))


def _title(names: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(names))
    return " · ".join(distinct[:4]) + (f" and {len(distinct) - 4} more" if len(distinct) > 4 else "")


def comparison_blocks(variants: Sequence[Variant], axis: Axis) -> tuple[Block, ...]:
    """The blocks of a comparing page; ``axis`` is the x axis that is shown first."""
    axes = variant_axes(variants)
    runs = [run for variant in variants for run in variant.runs]
    labels = dict(zip((run.path for run in runs), path_labels([run.path for run in runs]), strict=True))
    browsers = variant_browsers(variants)
    blocks = (
        block("variants", "Variants", {"rows": _variant_rows(variants), "notes": _notes(variants, axes, labels)}),
        _score_block(variants),
        _settings(variants, labels),
        *_figures(variants, axes, axis),
        block("samples", "Test responses", {"sets": browsers, "most": MOST_PROBLEMS} if browsers else None),
        _runs(variants, labels),
    )
    return tuple(block for block in blocks if block is not None)


def _variant_rows(variants: Sequence[Variant]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for i, variant in enumerate(variants):
        status, steps = [run.status for run in variant.runs], [len(run.metrics) for run in variant.runs]
        every = ", ".join(f"{status.count(word)} {word}" for word in dict.fromkeys(status))
        rows.append(
            {
                "sign": variant_swatch(i),
                "name": variant.name,
                "runs": len(variant.runs),
                "seeds": ", ".join(str(run.run.get("seed", "–")) for run in variant.runs),
                "status": status[0] if len(set(status)) == 1 else every,
                "steps": "–".join(f"{count:,}" for count in dict.fromkeys((min(steps), max(steps)))),
            }
        )
    return rows


def _notes(variants: Sequence[Variant], axes: VariantAxes, labels: Mapping[Path, str]) -> list[str]:
    """How curves were made where runs are unlike, in sentences."""
    notes: list[str] = []
    if any(len(variant.runs) > 1 for variant in variants):
        notes.append(
            "Runs that differ only in their seed are one variant. Lines are the mean over a variant's runs, the band goes "
            "from its smallest to its largest run: it is no confidence interval."
        )
    empty = [labels[run.path] for variant in variants for run in variant.runs if not run.metrics]
    if empty:
        notes.append(f"Without a training step so far, and in no curve: {'; '.join(empty)}.")
    unlike = [
        variant.name for variant in variants if len({len(run.metrics) for run in variant.runs if run.metrics}) > 1
    ]
    if unlike:
        notes.append(
            f"Runs of unlike length: {'; '.join(unlike)}. The mean ends with the shortest run, so that no jump comes "
            "from a run that has ended; faint lines show the others alone."
        )
    going = [
        variant.name for variant in variants if any(run.status not in ("finished", "stopped") for run in variant.runs)
    ]
    if going:
        notes.append(f"Not finished: {'; '.join(going)}. The page shows what was recorded when it was made.")
    for axis in AXES[1:]:
        at = axes.variants.get(axis, [{} for _ in variants])
        without = [
            variant.name
            for variant, x in zip(variants, at, strict=True)
            if any(run.metrics for run in variant.runs) and not x
        ]
        if without:
            notes.append(f"No curve over {AXIS_WORDS[axis]}, since a step did not record it: {'; '.join(without)}.")
    return notes


def _score_block(variants: Sequence[Variant]) -> Block | None:
    scores = variant_scores(variants)
    names = list(dict.fromkeys(score.set_name for score in scores))
    sets: list[dict[str, Any]] = []
    for i, name in enumerate(names, start=1):
        of_set = [score for score in scores if score.set_name == name]
        view = intervals_view(
            "test" if len(names) == 1 else f"test_{i}",
            f"{of_set[0].measure.name.capitalize()} at temperature {temperature(of_set[0].temperature)}",
            [IntervalRow(variant.variant, variant.before, variant.after) for variant in of_set[0].variants],
            "Mean over a variant's runs, with 95 % intervals over problems.",
            measure=of_set[0].measure,
        )
        sets.append({"name": name, "view": view, "scores": of_set})
    signs = [variant_swatch(i) for i in range(len(variants))]
    return block("variant_scores", "Test scores", {"sets": sets, "signs": signs} if sets else None)


def _settings(variants: Sequence[Variant], labels: Mapping[Path, str]) -> Block | None:
    """Every setting that is not the same in all runs, a column a variant; where a variant's runs differ, all its values."""
    runs = [run for variant in variants for run in variant.runs]
    settings = iter(run_settings(runs))
    rows = setting_rows([[next(settings) for _ in variant.runs] for variant in variants], decides)
    without = [labels[run.path] for run in runs if not run.config]
    data = {"variants": [variant.name for variant in variants], "rows": rows, "without": without}
    return block("settings", "Settings that differ", data if rows or without else None)


def _figures(variants: Sequence[Variant], axes: VariantAxes, axis: Axis) -> list[Block]:
    if not axes.scales:
        return []
    first: Axis = axis if axis in axes.scales else "steps"
    groups = [(group, compared_charts(variants, group.metrics, axes)) for group in METRICS]
    shown = [(group, charts) for group, charts in groups if charts]
    choices = [(key, AXIS_WORDS[key]) for key in axes.scales]
    # the values of all figures are told once, with the last of them
    values = curve_values(variants, axes, [chart for _, charts in shown for chart in charts])
    common = {"axes": choices if len(choices) > 1 else (), "axis": first, "note": ""}
    blocks: list[Block] = []
    for group, charts in shown:
        data = common | {"group": group.key, "panels": [[compared_view(chart, first)] for chart in charts]}
        hover = values if group is shown[-1][0] else {}
        blocks.append(Block(key=group.key, title=group.title, template="figures.html.j2", data=data, hover=hover))
    return blocks


def _runs(variants: Sequence[Variant], labels: Mapping[Path, str]) -> Block | None:
    """What each run spent and where it ended."""
    sets = list(dict.fromkeys(name for variant in variants for run in variant.runs for name in run.sets))
    measure = measure_of([row for variant in variants for run in variant.runs for row in run.metrics])
    rows: list[dict[str, Any]] = []
    for slot, variant in enumerate(variants):
        for run in variant.runs:
            tokens, wall, hours = (max(positions(run, axis).values(), default=None) for axis in AXES[1:])
            commit, plus, rest = str((run.environments or [{}])[-1].get("git") or "").partition("+")
            rows.append(
                {
                    "sign": variant_swatch(slot),
                    "variant": variant.name,
                    "label": labels[run.path],
                    "seed": str(run.run.get("seed", "–")),
                    "status": run.status,
                    "steps": len(run.metrics),
                    "tokens": tokens,
                    "wall": duration(wall),
                    "device": "–" if hours is None else f"{hours:.3g}",
                    "devices": devices(run),
                    "score": measure.value(last_mean(run, f"train/{measure.key}/mean")),
                    "entropy": last_mean(run, "entropy/exact/mean", "entropy/sampled/mean"),
                    "truncation": last_mean(run, "train/truncation/ratio"),
                    "length": last_mean(run, "length/mean"),
                    "tests": [_final_test(run, name) for name in sets],
                    "commit": commit[:10] + plus + rest,
                    "path": str(run.path),
                }
            )
    commits = len({row["commit"] for row in rows})
    data = {"rows": rows, "measure": measure, "sets": sets, "last": LAST_STEPS, "commits": commits}
    return block("runs", "Runs", data)


def last_mean(run: RecordedRun, *keys: str) -> float | None:
    """The mean of a metric over the run's last steps that have it (``LAST_STEPS``); None where none has."""
    values = [value for _, value in run.points(*keys)[-LAST_STEPS:]]
    return sum(values) / len(values) if values else None


def _final_test(run: RecordedRun, set_name: str) -> str:
    scores = getattr(run.evaluation("after", set_name), "temperatures", None)
    if not scores:
        return "–"
    last: TemperatureScore = scores[max(scores)]
    measure = measure_of(rewards=[last.reward])
    told = last.score(measure)
    return measure.value(None if told is None else told.mean)


def compared_view(compared: ComparedChart, axis: Axis) -> FigureView:
    """One figure with a drawing an x axis; ``axis`` is the one that is shown first."""
    shown = chart_view(compared.charts.get(axis) or next(iter(compared.charts.values())))
    drawings: list[Markup] = []
    for key, chart in compared.charts.items():
        marked = f'<svg data-axis="{key}"{"" if key == axis else " hidden"} '
        drawings.append(Markup(str(draw(chart)).replace("<svg ", marked, 1)))
    none = Markup(
        f'<p class="note no-axis"{" hidden" if axis in compared.charts else ""}>No variant has this x axis.</p>'
    )
    # the page's script writes the values and shows the crosshair from what `curve_values` tells
    svg = Markup("").join([*drawings, none])
    return replace(shown, name=compared.metric.compared, svg=svg, csv="", hover=None)


def curve_values(variants: Sequence[Variant], axes: VariantAxes, figures: Sequence[ComparedChart]) -> dict[str, Any]:
    """The values of all figures for the page's script: each list of x once, however many curves lie over it."""
    lists: dict[tuple[float, ...], int] = {}

    def x_lists(tables: Mapping[Axis, Mapping[float, float]], steps: Sequence[float]) -> dict[str, int]:
        """By axis, which list of x holds these steps."""
        whole = {axis: at for axis, at in tables.items() if all(step in at for step in steps)}
        return {a: lists.setdefault(tuple(_digits(at[s] for s in steps)), len(lists)) for a, at in whole.items()}

    charts: dict[str, Any] = {}
    curves: dict[str, list[dict[str, Any]]] = {}
    for figure in figures:
        key = figure.metric.compared
        curves[key] = []
        for slot, (variant, curve) in enumerate(zip(variants, figure.curves, strict=True)):
            if curve.points:
                steps, means, lows, highs, runs = zip(*curve.points, strict=True)
                at: dict[Axis, Mapping[float, float]] = {a: axes.variants[a][slot] for a in axes.scales}
                entry = {"label": variant.name, "color": slot % len(PALETTE), "runs": runs[0], "x": x_lists(at, steps)}
                ends = {"low": _digits(lows), "high": _digits(highs)} if max(runs) > 1 else {}
                curves[key].append(entry | {"y": _digits(means)} | ends)
            for run, points in curve.tails:
                steps, values = zip(*points, strict=True)
                at = {a: axes.runs[a][slot][run] for a in axes.scales}
                tail = {"label": tail_label(variant, run), "alone": True, "runs": 1}
                curves[key].append(tail | {"x": x_lists(at, steps), "y": _digits(values)})
        for axis, chart in figure.charts.items():
            charts[chart.key] = plot_area(chart) | {"curves": key, "axis": axis}
    words = {axis: "step" if axis == "steps" else scale.name for axis, scale in axes.scales.items()}
    return {**charts, "#x": [list(values) for values in lists], "#curves": curves, "#axes": words}


def _digits(values: Iterable[float]) -> list[float]:
    """Six digits: what a table needs, at half the size."""
    short = [float(f"{value:.6g}") for value in values]
    return [int(value) if value == int(value) and abs(value) < 1e15 else value for value in short]
