"""The page that compares training runs, evaluations, or both: scores, differing settings, curves, responses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from markupsafe import Markup

from magicrl.config.loader import leaves
from magicrl.evaluation.comparison import compare_pair, correct
from magicrl.evaluation.presets import TABLE13_SETS, average, table13
from magicrl.evaluation.samples import RESULTS
from magicrl.evaluation.statistics import Interval
from magicrl.reporting.charts import (
    PALETTE,
    Chart,
    FigureView,
    IntervalRow,
    Series,
    chart_view,
    draw,
    hover_data,
    intervals_view,
    variant_swatch,
)
from magicrl.reporting.curves import (
    AXES,
    METRICS,
    Axis,
    ComparedChart,
    VariantAxes,
    compared_charts,
    positions,
    tail_label,
    variant_axes,
)
from magicrl.reporting.page import PageBlock, block, crosshairs, render_page, write_page
from magicrl.reporting.read_folders import (
    LAST_STEPS,
    RecordedEvaluation,
    RecordedRun,
    by_benchmark,
    is_run,
    read_evaluation_folder,
    read_run,
)
from magicrl.reporting.samples import MOST_PROBLEMS, evaluation_browsers, variant_browsers
from magicrl.reporting.scores import other_grading, variant_scores
from magicrl.reporting.variants import (
    Variant,
    decides,
    differing,
    group_runs,
    path_labels,
    run_settings,
    setting_names,
    setting_rows,
)
from magicrl.reporting.wording import temperature_text, unjudged_note
from magicrl.training.diagnosis import ACCURACY, REWARD, measure_of
from magicrl_verifiers.progress import duration

AXIS_WORDS: Mapping[Axis, str] = {
    "steps": "steps",
    "tokens": "tokens",
    "wall": "wall time",
    "gpu-hours": "device hours",
}


def is_evaluation(folder: Path) -> bool:
    """Return whether ``magicrl eval`` wrote this folder. A folder without the files of either counts as a run."""
    return not (folder / "run.json").exists() and ((folder / RESULTS).exists() or any(folder.glob("*/job.json")))


def write_comparison_page(
    folders: Sequence[Path],
    output: Path,
    *,
    axis: Axis = "steps",
    keys: Sequence[str] | None = None,
    command: str = "",
) -> list[tuple[str, str]]:
    """Write a page over run folders, evaluation folders, or both.

    A folder that cannot be read is left out, and the page says so. It is an error only where no folder is left.

    Args:
        folders: in the order of the page. The others are compared with the first run (or evaluation).
        output: path of the page.
        axis: the x axis that is shown first.
        keys: settings that define the variants. Default: every setting but seed and bookkeeping.
        command: command that made the page, for its foot.

    Returns:
        (folder, reason) of the folders that were left out.

    Raises:
        ValueError: the same folder twice, no folder that can be read, a key that no run has, or the page cannot be
            written.
    """
    doubled = [folder for i, folder in enumerate(folders) if folder.resolve() in {f.resolve() for f in folders[:i]}]
    if doubled:
        raise ValueError(f"{doubled[0]} is named twice; name each run once")
    runs: list[RecordedRun] = []
    evaluations: list[RecordedEvaluation] = []
    left_out: list[tuple[str, str]] = []
    for folder in folders:
        try:
            if is_evaluation(folder):
                evaluations.append(read_evaluation_folder(folder))
            else:
                runs.append(read_run(folder))
        except ValueError as error:
            # The pattern runs/* also finds the initial models, which magicrl train writes next to the runs.
            if folder.name != "models" or not folder.is_dir() or is_run(path.name for path in folder.iterdir()):
                left_out.append((str(folder), str(error)))
    if not runs and not evaluations:
        raise ValueError("none of the folders can be read:\n" + "\n".join(f"  {why}" for _, why in left_out))
    if keys is not None and not runs:
        raise ValueError(f"--group-by {keys[0]}: the folders have no run, only evaluations")
    variants = group_runs(runs, keys) if runs else ()
    blocks = [block("left_out", "Left out", {"folders": left_out} if left_out else None)]
    blocks += comparison_blocks(variants, axis) if variants else ()
    blocks += evaluation_blocks(evaluations) if evaluations else ()
    facts = [("variants", str(len(variants))), ("runs", str(len(runs)))] if runs else []
    facts += [("training steps", str(sum(len(run.metrics) for run in runs)))] if runs else []
    facts += [("evaluations", str(len(evaluations)))] if evaluations else []
    samples = sum(b.problems * b.samples for evaluation in evaluations for b in evaluation.benchmarks.values())
    facts += [("samples", f"{samples:,}")] if samples else []
    facts += [("left out", str(len(left_out)))] if left_out else []
    names = [run.name for run in runs] or [name for evaluation in evaluations for name in evaluation.benchmarks]
    distinct = list(dict.fromkeys(names))
    title = " · ".join(distinct[:4]) + (f" and {len(distinct) - 4} more" if len(distinct) > 4 else "")
    write_page(render_page(title, facts, blocks, command, "comparison" if runs else "evaluation"), output)
    return left_out


def comparison_blocks(variants: Sequence[Variant], axis: Axis) -> list[PageBlock | None]:
    """Return the sections of the variants. ``axis`` is the x axis that is shown first."""
    axes = variant_axes(variants)
    runs = [run for variant in variants for run in variant.runs]
    labels = dict(zip((run.path for run in runs), path_labels([run.path for run in runs]), strict=True))
    browsers = variant_browsers(variants)
    # a column per variant with all values of its runs
    settings = iter(run_settings(runs))
    tables = [[next(settings) for _ in variant.runs] for variant in variants]
    rows = setting_rows(tables, decides)
    mixed = sorted({key for table in tables for key in differing(table) if decides(key)})
    without = [labels[run.path] for run in runs if not run.config]
    differ = {"variants": [variant.name for variant in variants], "rows": rows, "without": without}
    shown: list[dict[str, Any]] = []
    for i, variant in enumerate(variants):
        status, steps = [run.shown_status for run in variant.runs], [len(run.metrics) for run in variant.runs]
        every = ", ".join(f"{status.count(word)} {word}" for word in dict.fromkeys(status))
        shown.append(
            {
                "sign": variant_swatch(i),
                "name": variant.name,
                "runs": len(variant.runs),
                "seeds": ", ".join(str(run.run.get("seed", "–")) for run in variant.runs),
                "status": status[0] if len(set(status)) == 1 else every,
                "steps": "–".join(f"{count:,}" for count in dict.fromkeys((min(steps), max(steps)))),
            }
        )
    return [
        block("variants", "Variants", {"rows": shown, "notes": _notes(variants, axes, labels, mixed)}),
        _score_block(variants),
        block("settings", "Settings that differ", differ if rows or without else None),
        *_figures(variants, axes, axis),
        block("samples", "Test responses", {"sets": browsers, "most": MOST_PROBLEMS} if browsers else None),
        _runs(variants, labels),
    ]


def _notes(
    variants: Sequence[Variant], axes: VariantAxes, labels: Mapping[Path, str], mixed: Sequence[str]
) -> list[str]:
    """Return sentences on how the curves were made where runs differ in length, status or records, or in the settings
    ``mixed`` within a variant.
    """
    several = (
        f"Runs of one variant also differ in {', '.join(mixed)}, which --group-by does not name. "
        if mixed
        else "Runs that differ only in their seed are one variant. "
    ) + (
        "Lines are the mean over a variant's runs. The band goes from the smallest to the largest run: it is not a "
        "confidence interval."
    )
    empty = [labels[run.path] for variant in variants for run in variant.runs if not run.metrics]
    unlike = [
        variant.name for variant in variants if len({len(run.metrics) for run in variant.runs if run.metrics}) > 1
    ]
    going = [
        variant.name for variant in variants if any(run.status not in ("finished", "stopped") for run in variant.runs)
    ]
    sentences = [
        (empty, "No training step so far, and therefore no curve: {}."),
        (
            unlike,
            "Runs of different length: {}. The mean ends with the shortest run, so that the end of a run causes no "
            "jump. Faint lines show the longer runs.",
        ),
        (going, "Not finished: {}. The page shows what was recorded when it was made."),
    ]
    for axis in AXES[1:]:
        at = axes.variants.get(axis, [{} for _ in variants])
        without = [
            variant.name
            for variant, x in zip(variants, at, strict=True)
            if any(run.metrics for run in variant.runs) and not x
        ]
        sentences.append((without, f"No curve over {AXIS_WORDS[axis]}, because a step did not record it: {{}}."))
    notes = [several] if any(len(variant.runs) > 1 for variant in variants) else []
    return notes + [sentence.format("; ".join(names)) for names, sentence in sentences if names]


def _score_block(variants: Sequence[Variant]) -> PageBlock | None:
    scores = variant_scores(variants)
    names = list(dict.fromkeys(score["set_name"] for score in scores))
    sets: list[dict[str, Any]] = []
    for i, name in enumerate(names, start=1):
        of_set = [score for score in scores if score["set_name"] == name]
        measure = of_set[0]["measure"]
        view = intervals_view(
            "test" if len(names) == 1 else f"test_{i}",
            f"{measure.name.capitalize()} at temperature {temperature_text(of_set[0]['temperature'])}",
            [IntervalRow(row["variant"], row["before"], row["after"]) for row in of_set[0]["variants"]],
            "Mean over a variant's runs, with 95 % intervals over problems.",
            measure=measure,
        )
        sets.append({"name": name, "view": view, "scores": of_set, "notes": _test_notes(variants, of_set[0])})
    signs = [variant_swatch(i) for i in range(len(variants))]
    return block("variant_scores", "Test scores", {"sets": sets, "signs": signs} if sets else None)


def _test_notes(variants: Sequence[Variant], score: Mapping[str, Any]) -> list[str]:
    """Return sentences on what else differs between the tests of each variant and those of the first."""
    name, rows = score["set_name"], score["variants"]
    tested = [[run for run in variant.runs if run.evaluation("after", name)] for variant in variants]
    notes: list[str] = []
    shown = temperature_text(score["temperature"])
    for row, runs in zip(rows, tested, strict=True):
        trained = {run.training_temperature(e) for run in runs if (e := run.evaluation("after", name))}
        for other in sorted(t for t in trained if t is not None and t != score["temperature"]):
            notes.append(
                f"{row['variant']}: trained at temperature {temperature_text(other)}, at which its test scores in the "
                f"table of runs are; here all are at temperature {shown}."
            )
        if row["against"] is not None and sorted(row["seeds"]) != sorted(rows[0]["seeds"]):
            own, others = (", ".join(seeds) for seeds in (row["seeds"], rows[0]["seeds"]))
            notes.append(f"{row['variant']}: seeds {own} are compared with seeds {others} of the first variant.")
        twice = [seed for seed, count in Counter(row["seeds"]).items() if count > 1 and seed != "–"]
        if twice:
            notes.append(
                f"{row['variant']}: several runs have the seed {', '.join(twice)}; a repeated or copied run is no "
                "further evidence."
            )
        first = next((run for of_variant in tested for run in of_variant), None)
        lines = [line for run in runs if first for line in other_grading(first, run, name)]
        if lines:
            differ = "; ".join(dict.fromkeys(lines))
            notes.append(
                f"{row['variant']}: settings of the test differ too and may explain a part of the difference: {differ}."
            )
    return notes


def _figures(variants: Sequence[Variant], axes: VariantAxes, axis: Axis) -> list[PageBlock]:
    if not axes.names:
        return []
    first: Axis = axis if axis in axes.names else "steps"
    groups = [(group, compared_charts(variants, group.metrics, axes)) for group in METRICS]
    shown = [(group, charts) for group, charts in groups if charts]
    choices = [(key, AXIS_WORDS[key]) for key in axes.names]
    # the values of all figures are on the page once, with the last figure
    values = curve_values(variants, axes, [chart for _, charts in shown for chart in charts])
    common = {"axes": choices if len(choices) > 1 else (), "axis": first, "note": ""}
    blocks: list[PageBlock] = []
    for group, charts in shown:
        data = common | {"group": group.key, "panels": [[compared_view(chart, first)] for chart in charts]}
        hover = values if group is shown[-1][0] else {}
        blocks.append(PageBlock(key=group.key, title=group.title, template="figures.html.j2", data=data, hover=hover))
    return blocks


def _runs(variants: Sequence[Variant], labels: Mapping[Path, str]) -> PageBlock | None:
    """Return the table of runs: cost and final metrics."""
    sets = list(dict.fromkeys(name for variant in variants for run in variant.runs for name in run.sets))
    measure = measure_of([row for variant in variants for run in variant.runs for row in run.metrics])
    rows: list[dict[str, Any]] = []

    def final_test(run: RecordedRun, set_name: str) -> str:
        evaluation = run.evaluation("after", set_name)
        if evaluation is None or (at := run.training_temperature(evaluation)) is None:
            return "–"
        last = evaluation.temperatures[at]
        return REWARD.value(last.reward.mean) if last.reward else ACCURACY.value(last.accuracy.mean)

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
                    "status": run.shown_status,
                    "steps": len(run.metrics),
                    "tokens": tokens,
                    "wall": duration(wall),
                    "device": "–" if hours is None else f"{hours:.3g}",
                    "devices": run.devices,
                    "score": measure.value(run.last_mean(f"train/{measure.key}/mean")),
                    "entropy": run.last_mean("entropy/exact/mean", "entropy/sampled/mean"),
                    "truncation": run.last_mean("train/truncation/ratio"),
                    "length": run.last_mean("length/mean"),
                    "tests": [final_test(run, name) for name in sets],
                    "commit": commit[:10] + plus + rest,
                    "path": str(run.path),
                }
            )
    commits = len({row["commit"] for row in rows})
    data = {"rows": rows, "measure": measure, "sets": sets, "last": LAST_STEPS, "commits": commits}
    return block("runs", "Runs", data)


def compared_view(compared: ComparedChart, axis: Axis) -> FigureView:
    """Return one figure with a drawing per x axis. ``axis`` is shown first."""
    metric, _, charts = compared
    shown = chart_view(charts.get(axis) or next(iter(charts.values())))
    drawings: list[Markup] = []
    for key, chart in charts.items():
        marked = f'<svg data-axis="{key}"{"" if key == axis else " hidden"} '
        drawings.append(Markup(str(draw(chart)).replace("<svg ", marked, 1)))
    none = Markup(f'<p class="note no-axis"{" hidden" if axis in charts else ""}>No variant recorded this x axis.</p>')
    # the page's script reads the values for CSV and crosshair from `curve_values`
    svg = Markup("").join([*drawings, none])
    return replace(shown, name=metric.compared, svg=svg, csv="", hover=None)


def curve_values(variants: Sequence[Variant], axes: VariantAxes, figures: Sequence[ComparedChart]) -> dict[str, Any]:
    """Return the values of all figures for the page's script, each list of x only once."""
    lists: dict[tuple[float, ...], int] = {}

    def x_lists(tables: Mapping[Axis, Mapping[float, float]], steps: Sequence[float]) -> dict[str, int]:
        """Return by axis the index of the list of x for these steps."""
        whole = {axis: at for axis, at in tables.items() if all(step in at for step in steps)}
        return {a: lists.setdefault(tuple(_digits(at[s] for s in steps)), len(lists)) for a, at in whole.items()}

    charts: dict[str, Any] = {}
    curves: dict[str, list[dict[str, Any]]] = {}
    for metric, of_variants, drawn in figures:
        key = metric.compared
        curves[key] = []
        for slot, (variant, (common, tails)) in enumerate(zip(variants, of_variants, strict=True)):
            if common:
                steps, means, lows, highs, runs = zip(*common, strict=True)
                at: dict[Axis, Mapping[float, float]] = {a: axes.variants[a][slot] for a in axes.names}
                entry = {"label": variant.name, "color": slot % len(PALETTE), "runs": runs[0], "x": x_lists(at, steps)}
                ends = {"low": _digits(lows), "high": _digits(highs)} if max(runs) > 1 else {}
                curves[key].append(entry | {"y": _digits(means)} | ends)
            for run, points in tails:
                steps, values = zip(*points, strict=True)
                at = {a: axes.runs[a][slot][run] for a in axes.names}
                tail = {"label": tail_label(variant, run), "alone": True, "runs": 1}
                curves[key].append(tail | {"x": x_lists(at, steps), "y": _digits(values)})
        for axis, chart in drawn.items():
            charts[chart.key] = hover_data(chart) | {"curves": key, "axis": axis}
    words = {axis: "step" if axis == "steps" else name for axis, name in axes.names.items()}
    return {**charts, "#x": [list(values) for values in lists], "#curves": curves, "#axes": words}


def _digits(values: Iterable[float]) -> list[float]:
    """Round to six digits, enough for a table at half the size."""
    short = [float(f"{value:.6g}") for value in values]
    return [int(value) if value == int(value) and abs(value) < 1e15 else value for value in short]


# Evaluations of `magicrl eval`: scores, test-time scaling, Table 13, responses, settings.

EXACT = "Exact only while the sampler does not know the limit and no forced answer is used."
"""Required at every figure over limits that is computed from one set of samples."""

WIDE = 5
"""Ratio of the largest to the smallest x from which an axis is logarithmic."""


def evaluation_blocks(evaluations: Sequence[RecordedEvaluation]) -> list[PageBlock | None]:
    """Return the sections of these evaluations. The others are compared with the first."""
    names = evaluation_names(evaluations)
    browsers = evaluation_browsers(evaluations, names)
    responses = {"sets": browsers, "most": MOST_PROBLEMS} if browsers else None
    return [
        _scores(evaluations, names),
        _scaling(evaluations, names),
        _table13(evaluations, names),
        block("responses", "Responses", responses, template="samples"),
        _evaluation_settings(evaluations, names),
    ]


def evaluation_names(evaluations: Sequence[RecordedEvaluation]) -> list[str]:
    """Return a name for each evaluation: its model, and the differing settings where a model occurs several times."""
    models = [e.model for e in evaluations]
    distinct = list(dict.fromkeys(models))
    paths = [Path(model) for model in distinct]
    for i, path in enumerate(paths):  # the model of a run is named by the run folder
        while path.name in ("model", "run") and path.parent.name:
            path = path.parent
        paths[i] = path
    short = dict(zip(distinct, path_labels(paths), strict=True))
    names = [short[model] for model in models]
    for model in distinct:
        members = [i for i, other in enumerate(models) if other == model]
        if len(members) > 1:
            tables: list[dict[str, Any]] = []
            for i in members:  # the settings that determined the samples, without problems, seed and checksums
                first = next(iter(evaluations[i].benchmarks.values()), None)
                flat = {} if first is None else leaves({**first.settings, "samples": first.samples})
                other = ("problems.", "benchmark", "sampling.seed")
                tables.append({k: v for k, v in flat.items() if not (k.startswith(other) or k.endswith("sha256"))})
            folders = path_labels([evaluations[i].path for i in members])
            suffixes = setting_names(tables) if differing(tables) else folders
            for i, suffix in zip(members, suffixes, strict=True):
                names[i] = f"{short[model]}, {suffix}"
    return names


def _scores(evaluations: Sequence[RecordedEvaluation], names: Sequence[str]) -> PageBlock | None:
    found = by_benchmark(evaluations)
    sets: list[dict[str, Any]] = []
    for position, (benchmark, results) in enumerate(found.items(), start=1):
        folders = [evaluations[i].path for i, _ in results]
        against = ["", *(_against(folders[0], folder, benchmark) for folder in folders[1:])]
        rows = [
            {
                "sign": variant_swatch(i),
                "name": names[i],
                "result": result,
                "passes": max(result.pass_at.items(), default=None, key=lambda item: item[0]),
                "votes": max(result.majority_at.items(), default=None, key=lambda item: item[0]),
                "against": difference,
            }
            for (i, result), difference in zip(results, against, strict=True)
        ]
        samples = {result.samples for _, result in results}
        word = f"avg@{samples.pop()}" if len(samples) == 1 else "avg@k"
        view = intervals_view(
            "scores" if len(found) == 1 else f"scores_{position}",
            f"Accuracy, {word}",
            [IntervalRow(names[i], None, result.accuracy) for i, result in results],
            "Bars are 95 % intervals over problems, not over samples.",
            words=("", word),
        )
        sets.append(
            {
                "name": benchmark,
                "title": results[0][1].title,
                "view": view,
                "rows": rows,
                "compared": any(isinstance(difference, Mapping) for difference in against),
                "graded": any(result.reward for _, result in results),
                "notes": _score_notes(rows),
            }
        )
    note = correct([row["against"] for one in sets for row in one["rows"] if isinstance(row["against"], dict)])
    if note:
        sets[-1]["notes"].append(f"{note}.")
    return block("scores", "Scores", {"sets": sets})


def _against(first: Path, other: Path, benchmark: str) -> Any:
    """Return the paired comparison with the first evaluation of the benchmark, or the reason why there is none."""
    try:
        row = compare_pair(first, other)["benchmarks"][benchmark]
    except ValueError as error:
        return str(error)
    return row if row["comparable"] else str(row["why"])


def _score_notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    notes = [
        f"{row['name']}: {unjudged_note(found.not_judged, found.problems * found.samples, found.truncation.mean)}."
        for row in rows
        if (found := row["result"]).not_judged
    ]
    for row in rows:
        name, difference = row["name"], row["against"]
        if isinstance(difference, Mapping) and difference["settings_differ"]:
            differ = "; ".join(difference["settings_differ"])
            notes.append(f"{name}: settings differ too and may explain a part of the difference: {differ}.")
        elif isinstance(difference, str) and difference:
            notes.append(f"{name}: no difference, {difference}.")
    return notes


def _scaling(evaluations: Sequence[RecordedEvaluation], names: Sequence[str]) -> PageBlock | None:
    found = by_benchmark(evaluations)
    sets: list[dict[str, Any]] = []
    for position, (benchmark, results) in enumerate(found.items(), start=1):
        curves = [(names[i], i, result.scaling) for i, result in results]
        charts = scaling_charts(curves, "" if len(found) == 1 else f"{position}_")
        if charts:
            sets.append({"name": benchmark, "panels": [[chart_view(chart)] for chart in charts]})
    hover = crosshairs(view for one in sets for panel in one["panels"] for view in panel)
    data = {"sets": sets, "several": len(found) > 1}
    shown = PageBlock(key="scaling", title="Test-time scaling", template="scaling.html.j2", data=data, hover=hover)
    return shown if sets else None


def _table13(evaluations: Sequence[RecordedEvaluation], names: Sequence[str]) -> PageBlock | None:
    """Return the report's Table 13 with a row for each of these evaluations that has one of its three sets."""
    own: list[dict[str, Any]] = []
    for evaluation, name in zip(evaluations, names, strict=True):
        scores = {s: evaluation.benchmarks[s] for s in TABLE13_SETS if s in evaluation.benchmarks}
        if scores:
            row: dict[str, Any] = {"model": name, **dict.fromkeys(TABLE13_SETS)}
            row |= {s: 100 * result.accuracy.mean for s, result in scores.items()}
            differs = {s: ", ".join(result.table13.get("differs") or ()) for s, result in scores.items()}
            own.append(
                {
                    "row": row,
                    "average": average(row),
                    "intervals": {s: result.accuracy for s, result in scores.items()},
                    "differs": [f"{s}: {reasons}" for s, reasons in differs.items() if reasons],
                }
            )
    rows, note = table13()
    paper = [{"row": row, "average": average(row)} for row in rows]
    data = {"paper": paper, "own": own, "sets": TABLE13_SETS, "note": note}
    return block("table13", "Next to Table 13", data if own else None)


def _evaluation_settings(evaluations: Sequence[RecordedEvaluation], names: Sequence[str]) -> PageBlock | None:
    """Return the settings that differ, then all recorded facts of each evaluation."""
    tables = [
        leaves({name: {**result.settings, "samples": result.samples} for name, result in e.benchmarks.items()})
        for e in evaluations
    ]
    rows = setting_rows([[table] for table in tables], lambda key: not key.endswith(("seed", "sha256")))
    whole: list[dict[str, Any]] = []
    for evaluation, name in zip(evaluations, names, strict=True):
        facts: dict[str, Any] = {}
        for benchmark, result in evaluation.benchmarks.items():
            first = {key: getattr(result, key) for key in ("scored_sha256", "whole_set", "samples")}
            last = {"model": result.model, "environment": result.environment}
            facts[benchmark] = leaves({**first, **result.settings, **last})
        head = {"name": name, "path": str(evaluation.path), "written": evaluation.written}
        whole.append(head | {"benchmarks": facts})
    return block("eval_settings", "Settings and provenance", {"names": names, "rows": rows, "whole": whole})


# Test-time scaling.

NamedScaling: TypeAlias = tuple[str, int, Mapping[str, Any]]
"""Name of an evaluation, its index of the palette, and its ``scaling`` in ``results.json``."""


def scaling_charts(curves: Sequence[NamedScaling], key: str = "") -> tuple[Chart, ...]:
    """Return the scaling figures with data: accuracy by response limit and by mean length, pass@k and maj@k by k.

    Args:
        curves: one per evaluation.
        key: prefix of the file names of the exports.
    """
    limits: list[Series] = []
    for name, slot, scaling in curves:
        limits.append(_line(name, slot, _curve(scaling, "over_limits", "limit")))
        if scaling.get("fresh"):
            limits.append(_line(name, slot, _curve(scaling, "fresh", "limit"), fresh=True))
    inexact = [name for name, _, scaling in curves if not scaling.get("exact", True)]
    computed = f"Computed from one set of long samples: a response longer than a limit counts as wrong there. {EXACT}"
    computed += f" Not exact for: {'; '.join(inexact)}." if inexact else ""
    spent = f"Mean tokens of a response as the limit grows, and the accuracy at that limit. {EXACT}"
    # older results have no curve of efficiency, but the mean tokens at each limit
    lengths = [
        _line(name, slot, _curve(s, "efficiency", "mean_tokens") or _curve(s, "over_limits", "mean_tokens"))
        for name, slot, s in curves
    ]
    passed = [_line(name, slot, _curve(scaling, "over_samples", "k", "pass")) for name, slot, scaling in curves]
    voted = [_line(name, slot, _curve(scaling, "over_samples", "k", "majority")) for name, slot, scaling in curves]
    fewer = "".join(f" {name}: {some}." for name, _, scaling in curves if (some := _fewer_problems(scaling)))
    one = f"Probability that at least one of k samples is right (unbiased).{fewer}"
    most = f"Probability that the most frequent answer of k samples is right.{fewer}"
    by_limit, by_length = "Accuracy by response limit", "Accuracy by mean length"
    charts = (
        _scaling_chart(f"{key}over_limits", by_limit, limits, "response limit, tokens", "limit", computed),
        _scaling_chart(f"{key}efficiency", by_length, lengths, "mean tokens of a response", "tokens", spent),
        _scaling_chart(f"{key}pass_at_k", "pass@k by samples", passed, "samples k", "samples", one),
        _scaling_chart(f"{key}maj_at_k", "maj@k by samples", voted, "samples k", "samples", most),
    )
    return tuple(chart for chart in charts if not chart.empty)


def _fewer_problems(scaling: Mapping[str, Any]) -> str:
    """Return the k at which problems are left out of pass@k, since they have fewer judged samples."""
    points: list[Mapping[str, Any]] = list(scaling.get("over_samples") or ())
    counts = [(point["k"], point["pass"].get("problems", 0)) for point in points]
    return ", ".join(f"k = {k} covers {n} of {counts[0][1]} problems" for k, n in counts if n < counts[0][1])


def _curve(scaling: Mapping[str, Any], curve: str, x: str, y: str = "accuracy") -> list[tuple[float, Interval]]:
    """Return (x, interval) of the points of a curve that have both."""
    points: list[Mapping[str, Any]] = list(scaling.get(curve) or ())
    found = [(point.get(x), point.get(y)) for point in points]
    # at each limit, the mean tokens are an interval themselves
    means = [(a["mean"] if isinstance(a, Mapping) else a, b) for a, b in found if a is not None and b is not None]
    return [(float(a), Interval(mean=b["mean"], low=b["low"], high=b["high"])) for a, b in means]


def _line(name: str, slot: int, points: Iterable[tuple[float, Interval]], *, fresh: bool = False) -> Series:
    ordered = sorted(((x, value) for x, value in points if x > 0), key=lambda point: point[0])
    return Series(
        label=f"{name}, new samples" if fresh else name,
        points=tuple((x, value.mean) for x, value in ordered),
        band=tuple((x, value.low, value.high) for x, value in ordered),
        color=slot % len(PALETTE),
        style="marks" if fresh else "line",
        dots=not fresh,
    )


def _scaling_chart(key: str, title: str, series: Sequence[Series], x_name: str, x_word: str, note: str) -> Chart:
    xs = sorted({x for s in series for x, _ in s.points})
    by_factors = len(xs) > 1 and xs[-1] >= WIDE * xs[0]
    whole = all(x == int(x) for x in xs)
    if not whole:  # round ticks: 1, 2 and 5 times powers of ten
        xs = [m * 10.0**e for e in range(8) for m in (1, 2, 5) if xs[0] <= m * 10.0**e <= xs[-1]]
    return Chart(
        key=key,
        title=title,
        series=tuple(series),
        unit="percent",
        y_low=0.0,
        note=note + " Bands are 95 % intervals over problems.",
        x_name=x_name,
        x_word=x_word,
        x_log=by_factors,
        x_whole=whole,
        x_ticks=tuple(xs) if by_factors else (),
    )
