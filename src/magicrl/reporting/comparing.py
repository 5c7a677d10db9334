"""The blocks of a page that compares runs: scores of arms, settings that differ, curves, single runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from magicrl.reporting.arm_scores import SetScores, arm_scores
from magicrl.reporting.arms import Arm, decides, differing, readable, run_labels, run_settings, written
from magicrl.reporting.blocks import Block
from magicrl.reporting.canvas import PALETTE, Entry, picture_frame, swatch
from magicrl.reporting.compare_views import AXIS_WORDS, CurvePool, compared_view
from magicrl.reporting.compared import COMPARED, compared_charts
from magicrl.reporting.curves import AXES, ArmAxes, Axis, arm_axes, devices, totals
from magicrl.reporting.entropy_blocks import arms_entropy
from magicrl.reporting.interval_plot import (
    IntervalRow,
    draw_intervals,
    intervals_csv,
    intervals_height,
    intervals_legend,
)
from magicrl.reporting.run_folder import RecordedRun
from magicrl.reporting.run_samples import arm_browsers
from magicrl.reporting.sample_browser import MOST_PROBLEMS
from magicrl.reporting.views import FigureView, data_uri, signs
from magicrl.reporting.wording import duration, percent, temperature

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
        _scores(arms, scores),
        _settings(arms),
        *_figures(arms, axes, axis),
        _token_entropy(arms),
        _samples(arms),
        _runs(arms),
    )
    return tuple(block for block in blocks if block is not None)


def left_out_block(folders: Sequence[LeftOut]) -> Block | None:
    """What could not be read: nothing that was asked for is missing in silence."""
    return _block("left_out", "Left out", {"folders": folders}) if folders else None


def _block(key: str, title: str, data: Mapping[str, Any]) -> Block:
    return Block(key=key, title=title, template=f"{key}.html.j2", data=data, hover={})


def arm_sign(slot: int) -> Entry:
    """The legend's entry of an arm, as its lines are drawn."""
    return Entry(label="", sign="line", color=slot % len(PALETTE), dash=(slot + slot // 6) % 6)


def _arms(arms: Sequence[Arm], axes: ArmAxes) -> Block:
    rows = [
        {
            "sign": swatch(arm_sign(i)),
            "name": arm.name,
            "runs": len(arm.runs),
            "seeds": ", ".join(str(run.run.get("seed", "–")) for run in arm.runs),
            "status": _counted([run.status for run in arm.runs]),
            "steps": _range([len(run.metrics) for run in arm.runs]),
        }
        for i, arm in enumerate(arms)
    ]
    return _block("arms", "Arms", {"rows": rows, "notes": _notes(arms, axes)})


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


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


def _scores(arms: Sequence[Arm], scores: Sequence[SetScores]) -> Block | None:
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
    return _block("arm_scores", "Test scores", {"sets": sets, "signs": [swatch(arm_sign(i)) for i in range(len(arms))]})


def _scores_view(key: str, scores: SetScores) -> FigureView:
    rows = [IntervalRow(label=arm.arm, before=arm.before, after=arm.after) for arm in scores.arms]
    title = f"Accuracy at temperature {temperature(scores.temperature)}"
    return FigureView(
        name=key,
        title=title,
        svg=draw_intervals(rows, None, key=key, title=title),
        frame=picture_frame(title=title, height=intervals_height(rows), legend=intervals_legend(rows, None)),
        legend=signs(intervals_legend(rows, None)),
        csv=data_uri("text/csv", intervals_csv(rows)),
        note="Mean over an arm's runs, with 95 % intervals over problems.",
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
    return _block(
        "settings", "Settings that differ", {"arms": [a.name for a in arms], "rows": rows, "without": without}
    )


def _labelled(arms: Sequence[Arm]) -> list[tuple[str, RecordedRun]]:
    runs = [run for arm in arms for run in arm.runs]
    return list(zip(run_labels(runs), runs, strict=True))


def _figures(arms: Sequence[Arm], axes: ArmAxes, axis: Axis) -> list[Block]:
    if not axes.scales:
        return []
    first: Axis = axis if axis in axes.scales else "steps"
    blocks: list[Block] = []
    pool = CurvePool(arms, axes)
    for group in COMPARED:
        charts = compared_charts(arms, group.figures, axes)
        for chart in charts:
            pool.add(chart)
        if charts:
            choices = [(key, AXIS_WORDS[key]) for key in axes.scales]
            data = {
                "panels": [[compared_view(chart, first)] for chart in charts],
                "axes": choices if len(choices) > 1 else (),
                "axis": first,
                "group": group.key,
                "note": "",
            }
            blocks.append(Block(key=group.key, title=group.title, template="figures.html.j2", data=data, hover={}))
    if blocks:
        last = blocks.pop()
        blocks.append(Block(key=last.key, title=last.title, template=last.template, data=last.data, hover=pool.hover()))
    return blocks


def _token_entropy(arms: Sequence[Arm]) -> Block | None:
    found = arms_entropy(arms)
    if found is None:
        return None
    data, crosshairs = found
    return Block(
        key="tokens", title="Where the policy is uncertain", template="figures.html.j2", data=data, hover=crosshairs
    )


def _samples(arms: Sequence[Arm]) -> Block | None:
    browsers = arm_browsers(arms)
    return _block("samples", "Test responses", {"sets": browsers, "most": MOST_PROBLEMS}) if browsers else None


def _runs(arms: Sequence[Arm]) -> Block:
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
    return _block(
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
