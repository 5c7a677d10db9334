"""The page that compares training runs, evaluations, or both: scores of arms, settings that differ, curves, runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from markupsafe import Markup

from magicrl.evaluation.samples import RESULTS
from magicrl.reporting.arms import (
    Arm,
    SetScores,
    arm_scores,
    decides,
    differing,
    group_runs,
    readable,
    run_labels,
    run_settings,
    written,
)
from magicrl.reporting.charts import (
    PALETTE,
    FigureView,
    arm_sign,
    draw,
    frame_of,
    legend,
    legend_signs,
    picture_file,
    plot_area,
    swatch,
    values_table,
)
from magicrl.reporting.curves import (
    AXES,
    ArmAxes,
    Axis,
    ComparedChart,
    arm_axes,
    compared_charts,
    devices,
    tail_label,
    totals,
)
from magicrl.reporting.evaluation_page import evaluation_blocks
from magicrl.reporting.metric_table import METRICS
from magicrl.reporting.page import Block, block, render_page, write_page
from magicrl.reporting.read_folders import RecordedEvaluation, RecordedRun, read_evaluation_folder, read_run
from magicrl.reporting.row_charts import IntervalRow, intervals_view
from magicrl.reporting.samples import MOST_PROBLEMS, arm_browsers
from magicrl.reporting.token_entropy import arms_entropy
from magicrl.reporting.wording import duration, percent, temperature


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenComparison:
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
        keys: settings that make the arms; default: all in which runs differ but for seed and bookkeeping.
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
            left_out.append(LeftOut(folder=str(folder), why=str(error)))
    if not runs and not evaluations:
        raise ValueError("none of the folders can be read:\n" + "\n".join(f"  {item.why}" for item in left_out))
    if keys is not None and not runs:
        raise ValueError(f"--group-by {keys[0]}: there is no run among the folders, only evaluations")
    arms = group_runs(runs, keys) if runs else ()
    missing = left_out_block(left_out)
    blocks: list[Block] = [missing] if missing is not None else []
    blocks += comparison_blocks(arms, axis) if arms else ()
    blocks += evaluation_blocks(evaluations) if evaluations else ()
    page = render_page(
        _title(arms, runs, evaluations),
        _comparison_facts(arms, runs, evaluations, left_out),
        blocks,
        command,
        _kind(runs),
    )
    return WrittenComparison(path=write_page(page, output), left_out=tuple(left_out))


def _kind(runs: Sequence[RecordedRun]) -> str:
    return "comparison" if runs else "evaluation"


def _title(arms: Sequence[Arm], runs: Sequence[RecordedRun], evaluations: Sequence[RecordedEvaluation]) -> str:
    if runs:
        names = list(dict.fromkeys(run.name for run in runs))
        return " · ".join(names) if len(names) <= 4 else f"{' · '.join(names[:3])} and {len(names) - 3} more"
    benchmarks = list(dict.fromkeys(name for evaluation in evaluations for name in evaluation.benchmarks))
    return ", ".join(benchmarks[:4]) + (" and more" if len(benchmarks) > 4 else "")


def _comparison_facts(
    arms: Sequence[Arm],
    runs: Sequence[RecordedRun],
    evaluations: Sequence[RecordedEvaluation],
    left_out: Sequence[LeftOut],
) -> list[tuple[str, str]]:
    facts = [("arms", str(len(arms))), ("runs", str(len(runs)))] if runs else []
    facts += [("training steps", str(sum(len(run.metrics) for run in runs)))] if runs else []
    facts += [("evaluations", str(len(evaluations)))] if evaluations else []
    samples = sum(b.problems * b.samples for evaluation in evaluations for b in evaluation.benchmarks.values())
    facts += [("samples", f"{samples:,}")] if samples else []
    return facts + ([("left out", str(len(left_out)))] if left_out else [])


LAST_STEPS = 5
"""Steps over which a run's last numbers are averaged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """A folder that was asked for and is not on the page, and why."""

    folder: str
    why: str


def comparison_blocks(arms: Sequence[Arm], axis: Axis) -> tuple[Block, ...]:
    """The blocks of a comparing page; ``axis`` is the x axis that is shown first."""
    scores = arm_scores(arms)
    axes = arm_axes(arms)
    blocks = (
        _arms(arms, axes),
        _score_block(arms, scores),
        _settings(arms),
        *_figures(arms, axes, axis),
        arms_entropy(arms),
        _samples(arms),
        _runs(arms),
    )
    return tuple(block for block in blocks if block is not None)


def left_out_block(folders: Sequence[LeftOut]) -> Block | None:
    """What could not be read: nothing that was asked for is missing in silence."""
    return block("left_out", "Left out", {"folders": folders}) if folders else None


def _arms(arms: Sequence[Arm], axes: ArmAxes) -> Block | None:
    rows = [
        {
            "sign": swatch(arm_sign(i)),
            "name": arm.name,
            "runs": len(arm.runs),
            "seeds": ", ".join(str(run.run.get("seed", "–")) for run in arm.runs),
            "status": _counted([run.status for run in arm.runs]),
            "steps": _counts([len(run.metrics) for run in arm.runs]),
        }
        for i, arm in enumerate(arms)
    ]
    return block("arms", "Arms", {"rows": rows, "notes": _notes(arms, axes)})


def _notes(arms: Sequence[Arm], axes: ArmAxes) -> list[str]:
    """How curves were made where runs are unlike, in sentences."""
    notes: list[str] = []
    if any(len(arm.runs) > 1 for arm in arms):
        notes.append(
            "Runs that differ only in their seed are one arm. Lines are the mean over an arm's runs, the band goes "
            "from its smallest to its largest run: it is no confidence interval."
        )
    empty = [label for label, run in _labelled(arms) if not run.metrics]
    if empty:
        notes.append(f"Without a training step so far, and in no curve: {'; '.join(empty)}.")
    unlike = [arm.name for arm in arms if len({len(run.metrics) for run in arm.runs if run.metrics}) > 1]
    if unlike:
        notes.append(
            f"Runs of unlike length: {'; '.join(unlike)}. The mean ends with the shortest run, so that no jump comes "
            "from a run that has ended; faint lines show the others alone."
        )
    going = [arm.name for arm in arms if any(run.status not in ("finished", "stopped") for run in arm.runs)]
    if going:
        notes.append(f"Not finished: {'; '.join(going)}. The page shows what was recorded when it was made.")
    for axis in AXES[1:]:
        at = axes.arms.get(axis, [{} for _ in arms])
        without = [arm.name for arm, x in zip(arms, at, strict=True) if any(run.metrics for run in arm.runs) and not x]
        if without:
            notes.append(f"No curve over {AXIS_WORDS[axis]}, since a step did not record it: {'; '.join(without)}.")
    return notes


def _counted(words: Sequence[str]) -> str:
    """``finished`` or ``2 finished, 1 running``."""
    found = dict.fromkeys(words)
    if len(found) == 1:
        return next(iter(found))
    return ", ".join(f"{words.count(word)} {word}" for word in found)


def _counts(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


def _score_block(arms: Sequence[Arm], scores: Sequence[SetScores]) -> Block | None:
    if not scores:
        return None
    names = list(dict.fromkeys(score.set_name for score in scores))
    sets: list[dict[str, Any]] = []
    for i, name in enumerate(names):
        of_set = [score for score in scores if score.set_name == name]
        sets.append(
            {
                "name": name,
                "view": _scores_view("test" if len(names) == 1 else f"test_{i + 1}", of_set[0]),
                "scores": of_set,
            }
        )
    return block("arm_scores", "Test scores", {"sets": sets, "signs": [swatch(arm_sign(i)) for i in range(len(arms))]})


def _scores_view(key: str, scores: SetScores) -> FigureView:
    return intervals_view(
        key,
        f"Accuracy at temperature {temperature(scores.temperature)}",
        [IntervalRow(label=arm.arm, before=arm.before, after=arm.after) for arm in scores.arms],
        "Mean over an arm's runs, with 95 % intervals over problems.",
    )


def _settings(arms: Sequence[Arm]) -> Block | None:
    """Every setting that is not the same in all runs, a column an arm; where an arm's runs differ, all its values."""
    settings = iter(run_settings([run for arm in arms for run in arm.runs]))
    tables = [[next(settings) for _ in arm.runs] for arm in arms]
    keys = differing([table for of_arm in tables for table in of_arm])
    rows = [
        {
            "key": key,
            "name": readable(key),
            "decides": decides(key),
            "cells": [", ".join(dict.fromkeys(written(table.get(key)) for table in of_arm)) for of_arm in tables],
        }
        for key in keys
    ]
    rows.sort(key=lambda row: not row["decides"])
    without = [label for label, run in _labelled(arms) if not run.config]
    if not rows and not without:
        return None
    return block("settings", "Settings that differ", {"arms": [a.name for a in arms], "rows": rows, "without": without})


def _labelled(arms: Sequence[Arm]) -> list[tuple[str, RecordedRun]]:
    runs = [run for arm in arms for run in arm.runs]
    return list(zip(run_labels(runs), runs, strict=True))


def _figures(arms: Sequence[Arm], axes: ArmAxes, axis: Axis) -> list[Block]:
    if not axes.scales:
        return []
    first: Axis = axis if axis in axes.scales else "steps"
    groups = [(group, compared_charts(arms, group.metrics, axes)) for group in METRICS]
    shown = [(group, charts) for group, charts in groups if charts]
    choices = [(key, AXIS_WORDS[key]) for key in axes.scales]
    # the values of all figures are told once, with the last of them
    values = curve_values(arms, axes, [chart for _, charts in shown for chart in charts])
    return [
        Block(
            key=group.key,
            title=group.title,
            template="figures.html.j2",
            data={
                "panels": [[compared_view(chart, first)] for chart in charts],
                "axes": choices if len(choices) > 1 else (),
                "axis": first,
                "group": group.key,
                "note": "",
            },
            hover=values if group is shown[-1][0] else {},
        )
        for group, charts in shown
    ]


def _samples(arms: Sequence[Arm]) -> Block | None:
    browsers = arm_browsers(arms)
    return block("samples", "Test responses", {"sets": browsers, "most": MOST_PROBLEMS}) if browsers else None


def _runs(arms: Sequence[Arm]) -> Block | None:
    """What each run spent and where it ended."""
    labels = dict(zip((id(run) for _, run in _labelled(arms)), (label for label, _ in _labelled(arms)), strict=True))
    sets = list(dict.fromkeys(name for arm in arms for run in arm.runs for name in run.sets))
    rows: list[dict[str, Any]] = []
    for slot, arm in enumerate(arms):
        for run in arm.runs:
            spent = totals(run)
            hours = spent["gpu-hours"]
            rows.append(
                {
                    "sign": swatch(arm_sign(slot)),
                    "arm": arm.name,
                    "label": labels[id(run)],
                    "seed": str(run.run.get("seed", "–")),
                    "status": run.status,
                    "steps": len(run.metrics),
                    "tokens": spent["tokens"],
                    "wall": duration(spent["wall"]),
                    "device": "–" if hours is None else f"{hours:.3g}",
                    "devices": devices(run),
                    "accuracy": last_mean(run, "train/accuracy/mean"),
                    "entropy": last_mean(run, "entropy/exact/mean", "entropy/sampled/mean"),
                    "truncation": last_mean(run, "train/truncation/ratio"),
                    "length": last_mean(run, "length/mean"),
                    "tests": [_final_test(run, name) for name in sets],
                    "commit": _commit(run),
                    "path": str(run.path),
                }
            )
    return block(
        "runs", "Runs", {"rows": rows, "sets": sets, "last": LAST_STEPS, "commits": len({r["commit"] for r in rows})}
    )


def last_mean(run: RecordedRun, *keys: str) -> float | None:
    """The mean of a metric over the run's last steps that have it (``LAST_STEPS``); None where none has."""
    values = [value for _, value in run.points(*keys)[-LAST_STEPS:]]
    return sum(values) / len(values) if values else None


def _final_test(run: RecordedRun, set_name: str) -> str:
    evaluation = run.evaluation("after", set_name)
    if evaluation is None or not evaluation.temperatures:
        return "–"
    return percent(evaluation.temperatures[max(evaluation.temperatures)].accuracy.mean)


def _commit(run: RecordedRun) -> str:
    """The git commit of the run's last session, shortened."""
    environments = cast("list[Any]", run.run.get("environments") or [{}])
    last: object = environments[-1]
    git = cast("Mapping[str, Any]", last).get("git") if isinstance(last, Mapping) else None
    commit, plus, rest = str(git or "").partition("+")
    return commit[:10] + plus + rest


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
        name=compared.metric.compared,
        title=compared.metric.title,
        svg=Markup("").join([*drawings, none]),
        frame=picture_file(shown.title, frame_of(shown).height, entries),
        legend=legend_signs(entries),
        note=shown.note,
        table=values_table(shown),
    )


def _marked(svg: Markup, axis: Axis, *, hidden: bool) -> Markup:
    """The drawing with the axis that it belongs to."""
    return Markup(str(svg).replace("<svg ", f'<svg data-axis="{axis}"{" hidden" if hidden else ""} ', 1))


def curve_values(arms: Sequence[Arm], axes: ArmAxes, figures: Sequence[ComparedChart]) -> dict[str, Any]:
    """The values of all figures for the page's script: each list of x once, however many curves lie over it."""
    lists: dict[tuple[float, ...], int] = {}

    def x_lists(tables: Mapping[str, Mapping[float, float]], steps: Sequence[float]) -> dict[str, int]:
        """By axis, which list of x holds these steps."""
        found: dict[str, int] = {}
        for axis, at in tables.items():
            if all(step in at for step in steps):
                found[axis] = lists.setdefault(tuple(_digits(at[step]) for step in steps), len(lists))
        return found

    charts: dict[str, Any] = {}
    curves: dict[str, list[dict[str, Any]]] = {}
    for figure in figures:
        key = figure.metric.compared
        curves[key] = []
        for slot, (arm, curve) in enumerate(zip(arms, figure.curves, strict=True)):
            if curve.points:
                at = {axis: axes.arms[axis][slot] for axis in axes.scales}
                entry: dict[str, Any] = {
                    "label": arm.name,
                    "color": slot % len(PALETTE),
                    "runs": curve.points[0].runs,
                    "x": x_lists(at, [p.step for p in curve.points]),
                    "y": [_digits(p.mean) for p in curve.points],
                }
                if any(p.runs > 1 for p in curve.points):
                    entry["low"] = [_digits(p.low) for p in curve.points]
                    entry["high"] = [_digits(p.high) for p in curve.points]
                curves[key].append(entry)
            for run, points in curve.tails:
                at = {axis: axes.runs[axis][slot][run] for axis in axes.scales}
                xs, ys = x_lists(at, [x for x, _ in points]), [_digits(y) for _, y in points]
                curves[key].append({"label": tail_label(arm, run), "alone": True, "runs": 1, "x": xs, "y": ys})
        for axis, chart in figure.charts.items():
            charts[chart.key] = plot_area(chart) | {"curves": key, "axis": axis}
    words = {axis: "step" if axis == "steps" else scale.name for axis, scale in axes.scales.items()}
    return {**charts, "#x": [list(values) for values in lists], "#curves": curves, "#axes": words}


def _digits(value: float) -> float:
    """Six digits: what a table needs, at half the size."""
    short = float(f"{value:.6g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short
