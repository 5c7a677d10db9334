"""The blocks of a page over evaluations: scores, test-time scaling, Table 13 beside, responses, settings.

Scaling curves are accuracy over response limits and mean length, and pass@k and maj@k over samples, a line a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

from magicrl.evaluation.comparison import compare
from magicrl.evaluation.presets import TABLE13_SETS, Table13Row, average, table13
from magicrl.reporting.arms import differing, flat_settings, path_labels, readable, setting_names, written
from magicrl.reporting.charts import PALETTE, Chart, FigureView, Series, arm_sign, chart_view, swatch
from magicrl.reporting.page import Block, block, crosshairs, figures_block
from magicrl.reporting.read_folders import (
    BenchmarkResult,
    Interval,
    RecordedEvaluation,
    Scaling,
    by_benchmark,
    sample_rows,
)
from magicrl.reporting.row_charts import IntervalRow, intervals_view
from magicrl.reporting.samples import MOST_PROBLEMS, evaluation_browsers
from magicrl.reporting.token_entropy import MEANT, NamedTokens, entropy_charts, recorded


def evaluation_blocks(evaluations: Sequence[RecordedEvaluation]) -> tuple[Block, ...]:
    """The blocks of these evaluations; the first is what the others are held against."""
    names = evaluation_names(evaluations)
    blocks = (
        _scores(evaluations, names),
        _scaling(evaluations, names),
        _table13(evaluations, names),
        _model_tokens(evaluations, names),
        _responses(evaluations, names),
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


def _scores(evaluations: Sequence[RecordedEvaluation], names: Sequence[str]) -> Block | None:
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
    return block("scores", "Scores", {"sets": sets})


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
    return intervals_view(
        key,
        f"Accuracy, {word}",
        [IntervalRow(label=names[i], before=None, after=result.accuracy) for i, result in results],
        "Bars are 95 % intervals; the unit of each is the problem, not the sample.",
        words=("", word),
    )


def _scaling(evaluations: Sequence[RecordedEvaluation], names: Sequence[str]) -> Block | None:
    found = by_benchmark(evaluations)
    sets: list[dict[str, Any]] = []
    for position, (benchmark, results) in enumerate(found.items()):
        curves = [NamedScaling(name=names[i], slot=i, scaling=result.scaling) for i, result in results]
        charts = scaling_charts(curves, "" if len(found) == 1 else f"{position + 1}_")
        if charts:
            sets.append({"name": benchmark, "panels": [[chart_view(chart)] for chart in charts]})
    if not sets:
        return None
    return Block(
        key="scaling",
        title="Test-time scaling",
        template="scaling.html.j2",
        data={"sets": sets, "several": len(found) > 1},
        hover=crosshairs(view for one in sets for panel in one["panels"] for view in panel),
    )


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
    return block("table13", "Beside Table 13", data)


def _model_tokens(evaluations: Sequence[RecordedEvaluation], names: Sequence[str]) -> Block | None:
    """Where samples were kept with their tokens; of the first benchmark that has them."""
    for benchmark, results in by_benchmark(evaluations).items():
        named: list[NamedTokens] = []
        for i, result in results:
            rows = sample_rows(evaluations[i].path / benchmark, result.samples)
            data = recorded(
                [(r.token_ids, r.token_entropies) for r in rows if r.token_ids is not None and r.token_entropies]
            )
            if data is not None:
                named.append((i, names[i], data))
        if named:
            charts = entropy_charts(named, prefix="samples_")
            note = f"All samples of {benchmark} that were kept with their tokens (--keep-tokens). {MEANT}"
            return figures_block(
                "model_tokens", "Where the models are uncertain", [[chart_view(chart)] for chart in charts], note
            )
    return None


def _responses(evaluations: Sequence[RecordedEvaluation], names: Sequence[str]) -> Block | None:
    browsers = evaluation_browsers(evaluations, names)
    data = {"sets": browsers, "most": MOST_PROBLEMS}
    return Block(key="responses", title="Responses", template="samples.html.j2", data=data) if browsers else None


def _settings(evaluations: Sequence[RecordedEvaluation], names: Sequence[str]) -> Block | None:
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
    return block("eval_settings", "Settings and provenance", {"names": names, "rows": rows, "whole": whole})


EXACT = "Exact only while the sampler does not know the limit and no forced answer is used."
"""Must stand at every figure over limits that is computed from one set of samples."""

WIDE = 5
"""The factor from the least to the largest x from which on an axis grows by factors."""

Curve: TypeAlias = Sequence[tuple[float, Interval]]


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedScaling:
    """The curves of one evaluation under the name that the figure gives it, in a slot of the palette."""

    name: str
    slot: int
    scaling: Scaling


def scaling_charts(curves: Sequence[NamedScaling], key: str = "") -> tuple[Chart, ...]:
    """Every scaling figure that there are data for; ``key`` goes before the names of the exports."""
    charts = (limit_chart(curves, key), length_chart(curves, key), pass_chart(curves, key), vote_chart(curves, key))
    return tuple(chart for chart in charts if not chart.empty)


def limit_chart(curves: Sequence[NamedScaling], key: str = "") -> Chart:
    """Accuracy against the response limit; signs are samples that were drawn anew at their limit."""
    lines = [_scaling_line(c, [(p.limit, p.accuracy) for p in c.scaling.over_limits]) for c in curves]
    fresh = [
        Series(
            label=f"{c.name}, sampled anew",
            points=tuple((float(p.limit), p.accuracy.mean) for p in c.scaling.fresh),
            band=tuple((float(p.limit), p.accuracy.low, p.accuracy.high) for p in c.scaling.fresh),
            color=c.slot % len(PALETTE),
            style="marks",
        )
        for c in curves
        if c.scaling.fresh
    ]
    knowing = [c.name for c in curves if not c.scaling.exact]
    note = f"Computed from one set of long samples: what is longer than a limit counts as wrong there. {EXACT}"
    note += f" Not exact for: {'; '.join(knowing)}." if knowing else ""
    return _scaling_chart(
        f"{key}over_limits",
        "Accuracy against the response limit",
        (*lines, *fresh),
        "response limit, tokens",
        "limit",
        note,
    )


def length_chart(curves: Sequence[NamedScaling], key: str = "") -> Chart:
    """Token efficiency: accuracy against the mean length of a response, as the limit grows."""
    lines: list[Series] = []
    for c in curves:
        told = [(p.mean_tokens, p.accuracy) for p in c.scaling.efficiency]
        of_limits = [(p.mean_tokens.mean, p.accuracy) for p in c.scaling.over_limits if p.mean_tokens is not None]
        lines.append(_scaling_line(c, told or of_limits))
    note = f"Mean tokens of a response as the limit grows, and what it gets right at that limit. {EXACT}"
    title = "Accuracy against mean length"
    return _scaling_chart(f"{key}efficiency", title, lines, "mean tokens of a response", "tokens", note)


def pass_chart(curves: Sequence[NamedScaling], key: str = "") -> Chart:
    """pass@k against k."""
    lines = [_scaling_line(c, [(p.k, p.passed) for p in c.scaling.over_samples]) for c in curves]
    note = "Chance that at least one of k samples is right (unbiased)."
    return _scaling_chart(f"{key}pass_at_k", "pass@k against samples", lines, "samples k", "samples", note)


def vote_chart(curves: Sequence[NamedScaling], key: str = "") -> Chart:
    """maj@k against k."""
    told = [[(p.k, p.majority) for p in c.scaling.over_samples if p.majority is not None] for c in curves]
    lines = [_scaling_line(c, points) for c, points in zip(curves, told, strict=True)]
    note = "Chance that the most frequent answer of k samples is right."
    return _scaling_chart(f"{key}maj_at_k", "maj@k against samples", lines, "samples k", "samples", note)


def _scaling_line(curve: NamedScaling, points: Curve) -> Series:
    ordered = sorted(((x, value) for x, value in points if x > 0), key=lambda point: point[0])
    return Series(
        label=curve.name,
        points=tuple((float(x), value.mean) for x, value in ordered),
        band=tuple((float(x), value.low, value.high) for x, value in ordered),
        color=curve.slot % len(PALETTE),
        dots=True,
    )


def _scaling_chart(key: str, title: str, series: Sequence[Series], x_name: str, x_word: str, note: str) -> Chart:
    xs = sorted({x for s in series for x, _ in s.points})
    whole = all(x == int(x) for x in xs)
    by_factors = len(xs) > 1 and xs[-1] >= WIDE * xs[0]
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
        x_whole=False,
        x_ticks=(tuple(xs) if whole else _round_ticks(xs)) if by_factors else (),
    )


def _round_ticks(xs: Sequence[float]) -> tuple[float, ...]:
    """1, 2 and 5 times powers of ten inside the range of ``xs``."""
    candidates = [m * 10.0**e for e in range(8) for m in (1, 2, 5)]
    return tuple(c for c in candidates if xs and xs[0] <= c <= xs[-1])
