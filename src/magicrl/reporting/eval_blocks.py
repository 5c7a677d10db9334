"""The blocks of a page over evaluations: scores, test-time scaling, Table 13 beside, responses, settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from magicrl.evaluation.comparison import compare
from magicrl.evaluation.presets import TABLE13_SETS, Table13Row, average, table13
from magicrl.reporting.arms import differing, flat_settings, path_labels, readable, setting_names, written
from magicrl.reporting.blocks import Block
from magicrl.reporting.canvas import picture_frame, swatch
from magicrl.reporting.comparing import arm_sign
from magicrl.reporting.entropy_blocks import MEANT, NamedTokens, entropy_charts
from magicrl.reporting.eval_folder import BenchmarkResult, RecordedEvaluation, by_benchmark, sample_rows
from magicrl.reporting.eval_samples import evaluation_browsers
from magicrl.reporting.interval_plot import (
    IntervalRow,
    draw_intervals,
    intervals_csv,
    intervals_height,
    intervals_legend,
)
from magicrl.reporting.sample_browser import MOST_PROBLEMS
from magicrl.reporting.scaling_figures import NamedScaling, scaling_charts
from magicrl.reporting.token_entropy import recorded
from magicrl.reporting.views import FigureView, chart_view, data_uri, hover, signs


def evaluation_blocks(evaluations: Sequence[RecordedEvaluation]) -> tuple[Block, ...]:
    """The blocks of these evaluations; the first is what the others are held against."""
    names = evaluation_names(evaluations)
    blocks = (
        _scores(evaluations, names),
        _scaling(evaluations, names),
        _table13(evaluations, names),
        _token_entropy(evaluations, names),
        _samples(evaluations, names),
        _settings(evaluations, names),
    )
    return tuple(block for block in blocks if block is not None)


def evaluation_names(evaluations: Sequence[RecordedEvaluation]) -> list[str]:
    """Each evaluation by its model; where one model stands several times, by the settings that differ as well."""
    models = [e.model for e in evaluations]
    distinct = list(dict.fromkeys(models))
    short = dict(zip(distinct, path_labels([_named(model) for model in distinct]), strict=True))
    names = [short[model] for model in models]
    for model in distinct:
        members = [i for i, other in enumerate(models) if other == model]
        if len(members) > 1:
            tables = [_settings_of(evaluations[i]) for i in members]
            folders = path_labels([evaluations[i].path for i in members])
            unlike = bool(differing(tables))
            suffixes = setting_names(tables) if unlike else folders
            for i, suffix in zip(members, suffixes, strict=True):
                names[i] = f"{short[model]}, {suffix}"
    return names


def _named(model: str) -> Path:
    """A model's path; a run's folder stands for the model in it."""
    path = Path(model)
    while path.name in ("model", "run") and path.parent.name:
        path = path.parent
    return path


def _settings_of(evaluation: RecordedEvaluation) -> dict[str, Any]:
    """What decided an evaluation's samples, beside problems, seed and the checksums of the weights."""
    first = next(iter(evaluation.benchmarks.values()), None)
    if first is None:
        return {}
    flat = flat_settings({**first.settings, "samples": first.samples})
    left_out = ("problems.", "benchmark", "sampling.seed", "engine.model")
    return {k: v for k, v in flat.items() if not k.startswith(left_out) and not k.endswith("sha256")}


def _scores(evaluations: Sequence[RecordedEvaluation], names: Sequence[str]) -> Block:
    against = [_against_first(evaluations, i) for i in range(len(evaluations))]
    found = by_benchmark(evaluations)
    sets: list[dict[str, Any]] = []
    for position, (benchmark, results) in enumerate(found.items()):
        rows = [
            {
                "sign": swatch(arm_sign(i)),
                "name": names[i],
                "result": result,
                "passes": _largest(result.pass_at),
                "votes": _largest(result.majority_at),
                "against": against[i].get(benchmark, ""),
                "first": i == results[0][0],
            }
            for i, result in results
        ]
        sets.append(
            {
                "name": benchmark,
                "title": results[0][1].title,
                "view": _scores_view("scores" if len(found) == 1 else f"scores_{position + 1}", results, names),
                "rows": rows,
                "compared": any(isinstance(against[i].get(benchmark), Mapping) for i, _ in results),
                "notes": _score_notes(benchmark, results, names, against),
            }
        )
    return Block(key="scores", title="Scores", template="scores.html.j2", data={"sets": sets}, hover={})


def _largest(by_k: Mapping[int, Any]) -> tuple[int, Any] | None:
    return (max(by_k), by_k[max(by_k)]) if by_k else None


def _against_first(evaluations: Sequence[RecordedEvaluation], index: int) -> dict[str, Any]:
    """By benchmark the paired comparison with the first evaluation that has it, or a sentence why there is none."""
    found: dict[str, Any] = {}
    for benchmark in evaluations[index].benchmarks:
        first = next(i for i, e in enumerate(evaluations) if benchmark in e.benchmarks)
        if first == index:
            continue
        try:
            row = compare(evaluations[first].path, evaluations[index].path)["benchmarks"][benchmark]
        except ValueError as error:
            found[benchmark] = str(error)
        else:
            found[benchmark] = row if row["comparable"] else str(row["why"])
    return found


def _score_notes(
    benchmark: str,
    results: Sequence[tuple[int, BenchmarkResult]],
    names: Sequence[str],
    against: Sequence[Mapping[str, Any]],
) -> list[str]:
    notes = [
        f"{names[i]}: {result.not_judged} samples could not be judged and count nowhere."
        for i, result in results
        if result.not_judged
    ]
    for i, _ in results:
        row = against[i].get(benchmark)
        if isinstance(row, Mapping) and row["settings_differ"]:
            differ = "; ".join(cast("list[str]", row["settings_differ"]))
            notes.append(f"{names[i]}: settings differ too, so that the difference is of both: {differ}.")
        elif isinstance(row, str):
            notes.append(f"{names[i]}: no difference, {row}.")
    return notes


def _scores_view(key: str, results: Sequence[tuple[int, BenchmarkResult]], names: Sequence[str]) -> FigureView:
    samples = {result.samples for _, result in results}
    word = f"avg@{samples.pop()}" if len(samples) == 1 else "avg@k"
    rows = [IntervalRow(label=names[i], before=None, after=result.accuracy) for i, result in results]
    words = ("", word)
    title = f"Accuracy, {word}"
    return FigureView(
        name=key,
        title=title,
        svg=draw_intervals(rows, None, key=key, title=title, words=words),
        frame=picture_frame(title=title, height=intervals_height(rows), legend=intervals_legend(rows, None, words)),
        legend=signs(intervals_legend(rows, None, words)),
        csv=data_uri("text/csv", intervals_csv(rows, words)),
        note="Bars are 95 % intervals; the unit of each is the problem, not the sample.",
    )


def _scaling(evaluations: Sequence[RecordedEvaluation], names: Sequence[str]) -> Block | None:
    panels: list[list[FigureView]] = []
    crosshairs: dict[str, Any] = {}
    found = by_benchmark(evaluations)
    sets: list[dict[str, Any]] = []
    for position, (benchmark, results) in enumerate(found.items()):
        curves = [NamedScaling(name=names[i], slot=i, scaling=result.scaling) for i, result in results]
        charts = scaling_charts(curves, "" if len(found) == 1 else f"{position + 1}_")
        panels = [[chart_view(chart)] for chart in charts]
        crosshairs |= {chart.key: hover(chart) for chart in charts}
        if panels:
            sets.append({"name": benchmark, "panels": panels})
    if not sets:
        return None
    data = {"sets": sets, "several": len(found) > 1}
    return Block(key="scaling", title="Test-time scaling", template="scaling.html.j2", data=data, hover=crosshairs)


def _table13(evaluations: Sequence[RecordedEvaluation], names: Sequence[str]) -> Block | None:
    """The report's rows and these evaluations' below, where they put one of its three sets."""
    own: list[dict[str, Any]] = []
    for evaluation, name in zip(evaluations, names, strict=True):
        scores = {s: evaluation.benchmarks[s] for s in TABLE13_SETS if s in evaluation.benchmarks}
        if not scores:
            continue
        row = Table13Row(model=name, **{s: 100 * result.accuracy.mean for s, result in scores.items()})
        differs = {s: cast("list[str]", list(result.table13.get("differs") or ())) for s, result in scores.items()}
        own.append(
            {
                "row": row,
                "average": average(row),
                "intervals": {s: result.accuracy for s, result in scores.items()},
                "differs": [f"{s}: {', '.join(reasons)}" for s, reasons in differs.items() if reasons],
            }
        )
    if not own:
        return None
    paper = [{"row": row, "average": average(row)} for row in table13().rows]
    data = {"paper": paper, "own": own, "sets": TABLE13_SETS, "note": table13().note}
    return Block(key="table13", title="Beside Table 13", template="table13.html.j2", data=data, hover={})


def _token_entropy(evaluations: Sequence[RecordedEvaluation], names: Sequence[str]) -> Block | None:
    """Where samples were kept with their tokens; of the first benchmark that has them."""
    for benchmark, results in by_benchmark(evaluations).items():
        named: list[tuple[int, NamedTokens]] = []
        for i, result in results:
            rows = sample_rows(evaluations[i].path / benchmark, result.samples)
            data = recorded(
                [(r.token_ids, r.token_entropies) for r in rows if r.token_ids is not None and r.token_entropies]
            )
            if data is not None:
                named.append((i, NamedTokens(name=names[i], data=data)))
        if named:
            charts = entropy_charts([tokens for _, tokens in named], [i for i, _ in named], prefix="samples_")
            note = f"All samples of {benchmark} that were kept with their tokens (--keep-tokens). {MEANT}"
            data_shown = {"panels": [[chart_view(chart)] for chart in charts], "axes": (), "note": note}
            return Block(
                key="model_tokens",
                title="Where the models are uncertain",
                template="figures.html.j2",
                data=data_shown,
                hover={chart.key: hover(chart) for chart in charts},
            )
    return None


def _samples(evaluations: Sequence[RecordedEvaluation], names: Sequence[str]) -> Block | None:
    browsers = evaluation_browsers(evaluations, names)
    if not browsers:
        return None
    return Block(
        key="responses",
        title="Responses",
        template="samples.html.j2",
        data={"sets": browsers, "most": MOST_PROBLEMS},
        hover={},
    )


def _settings(evaluations: Sequence[RecordedEvaluation], names: Sequence[str]) -> Block:
    """What differs first, then everything that was recorded of each."""
    tables = [
        flat_settings({name: {**result.settings, "samples": result.samples} for name, result in e.benchmarks.items()})
        for e in evaluations
    ]
    keys = differing(tables) if len(tables) > 1 else []
    rows = [
        {
            "key": key,
            "name": readable(key),
            "decides": not key.endswith(("seed", "sha256")),
            "cells": [written(table.get(key)) for table in tables],
        }
        for key in keys
    ]
    whole = [
        {
            "name": name,
            "path": str(evaluation.path),
            "written": evaluation.written,
            "benchmarks": {
                benchmark: flat_settings(
                    {
                        "scored_sha256": result.scored_sha256,
                        "whole_set": result.whole_set,
                        "samples": result.samples,
                        **result.settings,
                        "model": result.model,
                        "environment": result.environment,
                    }
                )
                for benchmark, result in evaluation.benchmarks.items()
            },
        }
        for evaluation, name in zip(evaluations, names, strict=True)
    ]
    data = {"names": names, "rows": rows, "whole": whole}
    return Block(
        key="eval_settings", title="Settings and provenance", template="eval_settings.html.j2", data=data, hover={}
    )
