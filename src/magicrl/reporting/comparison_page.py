"""The page that compares training runs, evaluations, or both: scores of arms, settings that differ, curves, runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from magicrl.evaluation.samples import RESULTS
from magicrl.reporting.arms import Arm, arm_scores, decides, group_runs, path_labels, run_settings, setting_rows
from magicrl.reporting.charts import (
    PALETTE,
    FigureView,
    IntervalRow,
    arm_swatch,
    chart_view,
    draw,
    intervals_view,
    plot_area,
)
from magicrl.reporting.curves import (
    AXES,
    METRICS,
    ArmAxes,
    Axis,
    ComparedChart,
    arm_axes,
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
from magicrl.reporting.samples import MOST_PROBLEMS, arm_browsers
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
            left_out.append(LeftOut(str(folder), str(error)))
    if not runs and not evaluations:
        raise ValueError("none of the folders can be read:\n" + "\n".join(f"  {item.why}" for item in left_out))
    if keys is not None and not runs:
        raise ValueError(f"--group-by {keys[0]}: there is no run among the folders, only evaluations")
    arms = group_runs(runs, keys) if runs else ()
    missing = block("left_out", "Left out", {"folders": left_out} if left_out else None)
    blocks = [missing] if missing is not None else []
    blocks += comparison_blocks(arms, axis) if arms else ()
    blocks += evaluation_blocks(evaluations) if evaluations else ()
    facts = [("arms", str(len(arms))), ("runs", str(len(runs)))] if runs else []
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


def comparison_blocks(arms: Sequence[Arm], axis: Axis) -> tuple[Block, ...]:
    """The blocks of a comparing page; ``axis`` is the x axis that is shown first."""
    axes = arm_axes(arms)
    runs = [run for arm in arms for run in arm.runs]
    labels = dict(zip((run.path for run in runs), path_labels([run.path for run in runs]), strict=True))
    browsers = arm_browsers(arms)
    blocks = (
        block("arms", "Arms", {"rows": _arm_rows(arms), "notes": _notes(arms, axes, labels)}),
        _score_block(arms),
        _settings(arms, labels),
        *_figures(arms, axes, axis),
        block("samples", "Test responses", {"sets": browsers, "most": MOST_PROBLEMS} if browsers else None),
        _runs(arms, labels),
    )
    return tuple(block for block in blocks if block is not None)


def _arm_rows(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for i, arm in enumerate(arms):
        status, steps = [run.status for run in arm.runs], [len(run.metrics) for run in arm.runs]
        every = ", ".join(f"{status.count(word)} {word}" for word in dict.fromkeys(status))
        rows.append(
            {
                "sign": arm_swatch(i),
                "name": arm.name,
                "runs": len(arm.runs),
                "seeds": ", ".join(str(run.run.get("seed", "–")) for run in arm.runs),
                "status": status[0] if len(set(status)) == 1 else every,
                "steps": "–".join(f"{count:,}" for count in dict.fromkeys((min(steps), max(steps)))),
            }
        )
    return rows


def _notes(arms: Sequence[Arm], axes: ArmAxes, labels: Mapping[Path, str]) -> list[str]:
    """How curves were made where runs are unlike, in sentences."""
    notes: list[str] = []
    if any(len(arm.runs) > 1 for arm in arms):
        notes.append(
            "Runs that differ only in their seed are one arm. Lines are the mean over an arm's runs, the band goes "
            "from its smallest to its largest run: it is no confidence interval."
        )
    empty = [labels[run.path] for arm in arms for run in arm.runs if not run.metrics]
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


def _score_block(arms: Sequence[Arm]) -> Block | None:
    scores = arm_scores(arms)
    names = list(dict.fromkeys(score.set_name for score in scores))
    sets: list[dict[str, Any]] = []
    for i, name in enumerate(names, start=1):
        of_set = [score for score in scores if score.set_name == name]
        view = intervals_view(
            "test" if len(names) == 1 else f"test_{i}",
            f"{of_set[0].measure.name.capitalize()} at temperature {temperature(of_set[0].temperature)}",
            [IntervalRow(arm.arm, arm.before, arm.after) for arm in of_set[0].arms],
            "Mean over an arm's runs, with 95 % intervals over problems.",
            measure=of_set[0].measure,
        )
        sets.append({"name": name, "view": view, "scores": of_set})
    signs = [arm_swatch(i) for i in range(len(arms))]
    return block("arm_scores", "Test scores", {"sets": sets, "signs": signs} if sets else None)


def _settings(arms: Sequence[Arm], labels: Mapping[Path, str]) -> Block | None:
    """Every setting that is not the same in all runs, a column an arm; where an arm's runs differ, all its values."""
    runs = [run for arm in arms for run in arm.runs]
    settings = iter(run_settings(runs))
    rows = setting_rows([[next(settings) for _ in arm.runs] for arm in arms], decides)
    without = [labels[run.path] for run in runs if not run.config]
    data = {"arms": [arm.name for arm in arms], "rows": rows, "without": without}
    return block("settings", "Settings that differ", data if rows or without else None)


def _figures(arms: Sequence[Arm], axes: ArmAxes, axis: Axis) -> list[Block]:
    if not axes.scales:
        return []
    first: Axis = axis if axis in axes.scales else "steps"
    groups = [(group, compared_charts(arms, group.metrics, axes)) for group in METRICS]
    shown = [(group, charts) for group, charts in groups if charts]
    choices = [(key, AXIS_WORDS[key]) for key in axes.scales]
    # the values of all figures are told once, with the last of them
    values = curve_values(arms, axes, [chart for _, charts in shown for chart in charts])
    common = {"axes": choices if len(choices) > 1 else (), "axis": first, "note": ""}
    blocks: list[Block] = []
    for group, charts in shown:
        data = common | {"group": group.key, "panels": [[compared_view(chart, first)] for chart in charts]}
        hover = values if group is shown[-1][0] else {}
        blocks.append(Block(key=group.key, title=group.title, template="figures.html.j2", data=data, hover=hover))
    return blocks


def _runs(arms: Sequence[Arm], labels: Mapping[Path, str]) -> Block | None:
    """What each run spent and where it ended."""
    sets = list(dict.fromkeys(name for arm in arms for run in arm.runs for name in run.sets))
    measure = measure_of([row for arm in arms for run in arm.runs for row in run.metrics])
    rows: list[dict[str, Any]] = []
    for slot, arm in enumerate(arms):
        for run in arm.runs:
            tokens, wall, hours = (max(positions(run, axis).values(), default=None) for axis in AXES[1:])
            commit, plus, rest = str((run.environments or [{}])[-1].get("git") or "").partition("+")
            rows.append(
                {
                    "sign": arm_swatch(slot),
                    "arm": arm.name,
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
    none = Markup(f'<p class="note no-axis"{" hidden" if axis in compared.charts else ""}>No arm has this x axis.</p>')
    # the page's script writes the values and shows the crosshair from what `curve_values` tells
    svg = Markup("").join([*drawings, none])
    return replace(shown, name=compared.metric.compared, svg=svg, csv="", hover=None)


def curve_values(arms: Sequence[Arm], axes: ArmAxes, figures: Sequence[ComparedChart]) -> dict[str, Any]:
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
        for slot, (arm, curve) in enumerate(zip(arms, figure.curves, strict=True)):
            if curve.points:
                steps, means, lows, highs, runs = zip(*curve.points, strict=True)
                at: dict[Axis, Mapping[float, float]] = {a: axes.arms[a][slot] for a in axes.scales}
                entry = {"label": arm.name, "color": slot % len(PALETTE), "runs": runs[0], "x": x_lists(at, steps)}
                ends = {"low": _digits(lows), "high": _digits(highs)} if max(runs) > 1 else {}
                curves[key].append(entry | {"y": _digits(means)} | ends)
            for run, points in curve.tails:
                steps, values = zip(*points, strict=True)
                at = {a: axes.runs[a][slot][run] for a in axes.scales}
                tail = {"label": tail_label(arm, run), "alone": True, "runs": 1}
                curves[key].append(tail | {"x": x_lists(at, steps), "y": _digits(values)})
        for axis, chart in figure.charts.items():
            charts[chart.key] = plot_area(chart) | {"curves": key, "axis": axis}
    words = {axis: "step" if axis == "steps" else scale.name for axis, scale in axes.scales.items()}
    return {**charts, "#x": [list(values) for values in lists], "#curves": curves, "#axes": words}


def _digits(values: Iterable[float]) -> list[float]:
    """Six digits: what a table needs, at half the size."""
    short = [float(f"{value:.6g}") for value in values]
    return [int(value) if value == int(value) and abs(value) < 1e15 else value for value in short]
