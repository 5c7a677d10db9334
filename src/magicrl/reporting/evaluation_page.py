"""The blocks of a page over evaluations: scores, test-time scaling, Table 13 beside, responses, settings.

Scaling curves are accuracy over response limits and mean length, and pass@k and maj@k over samples, a line a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from magicrl.config.loader import leaves
from magicrl.evaluation.comparison import compare
from magicrl.evaluation.presets import TABLE13_SETS, Table13Row, average, table13
from magicrl.reporting.variants import differing, path_labels, setting_names, setting_rows
from magicrl.reporting.charts import PALETTE, Chart, IntervalRow, Series, variant_swatch, chart_view, intervals_view
from magicrl.reporting.page import Block, block, crosshairs
from magicrl.reporting.read_folders import (
    BenchmarkResult,
    Interval,
    RecordedEvaluation,
    Scaling,
    by_benchmark,
)
from magicrl.reporting.samples import MOST_PROBLEMS, evaluation_browsers

EXACT = "Exact only while the sampler does not know the limit and no forced answer is used."
"""Must stand at every figure over limits that is computed from one set of samples."""

WIDE = 5
"""The factor from the least to the largest x from which on an axis grows by factors."""


def evaluation_blocks(evaluations: Sequence[RecordedEvaluation]) -> tuple[Block, ...]:
    """The blocks of these evaluations; the first is what the others are held against."""
    names = evaluation_names(evaluations)
    browsers = evaluation_browsers(evaluations, names)
    responses = {"sets": browsers, "most": MOST_PROBLEMS} if browsers else None
    blocks = (
        _scores(evaluations, names),
        _scaling(evaluations, names),
        _table13(evaluations, names),
        block("responses", "Responses", responses, template="samples"),
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
            suffixes = setting_names(tables) if differing(tables) else folders
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
    flat = {} if first is None else leaves({**first.settings, "samples": first.samples})
    left_out = ("problems.", "benchmark", "sampling.seed", "engine.model")
    return {k: v for k, v in flat.items() if not k.startswith(left_out) and not k.endswith("sha256")}


def _scores(evaluations: Sequence[RecordedEvaluation], names: Sequence[str]) -> Block | None:
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
                "against": told,
            }
            for (i, result), told in zip(results, against, strict=True)
        ]
        samples = {result.samples for _, result in results}
        word = f"avg@{samples.pop()}" if len(samples) == 1 else "avg@k"
        view = intervals_view(
            "scores" if len(found) == 1 else f"scores_{position}",
            f"Accuracy, {word}",
            [IntervalRow(names[i], None, result.accuracy) for i, result in results],
            "Bars are 95 % intervals; the unit of each is the problem, not the sample.",
            words=("", word),
        )
        compared, graded = (any(isinstance(told, Mapping) for told in against), any(r.reward for _, r in results))
        told = {"name": benchmark, "title": results[0][1].title, "view": view, "rows": rows}
        sets.append(told | {"compared": compared, "graded": graded, "notes": _score_notes(rows)})
    return block("scores", "Scores", {"sets": sets})


def _against(first: Path, other: Path, benchmark: str) -> Any:
    """The paired comparison with the first evaluation that has the benchmark, or a sentence why there is none."""
    try:
        row = compare(first, other)["benchmarks"][benchmark]
    except ValueError as error:
        return str(error)
    return row if row["comparable"] else str(row["why"])


def _score_notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    unjudged = [(row["name"], row["result"].not_judged) for row in rows]
    notes = [f"{name}: {count} samples could not be judged and count nowhere." for name, count in unjudged if count]
    for row in rows:
        name, told = row["name"], row["against"]
        if isinstance(told, Mapping) and told["settings_differ"]:
            differ = "; ".join(told["settings_differ"])
            notes.append(f"{name}: settings differ too, so that the difference is of both: {differ}.")
        elif isinstance(told, str) and told:
            notes.append(f"{name}: no difference, {told}.")
    return notes


def _scaling(evaluations: Sequence[RecordedEvaluation], names: Sequence[str]) -> Block | None:
    found = by_benchmark(evaluations)
    sets: list[dict[str, Any]] = []
    for position, (benchmark, results) in enumerate(found.items(), start=1):
        curves = [NamedScaling(names[i], i, result.scaling) for i, result in results]
        charts = scaling_charts(curves, "" if len(found) == 1 else f"{position}_")
        if charts:
            sets.append({"name": benchmark, "panels": [[chart_view(chart)] for chart in charts]})
    hover = crosshairs(view for one in sets for panel in one["panels"] for view in panel)
    data = {"sets": sets, "several": len(found) > 1}
    shown = Block(key="scaling", title="Test-time scaling", template="scaling.html.j2", data=data, hover=hover)
    return shown if sets else None


def _table13(evaluations: Sequence[RecordedEvaluation], names: Sequence[str]) -> Block | None:
    """The report's rows and these evaluations' below, where they put one of its three sets."""
    own: list[dict[str, Any]] = []
    for evaluation, name in zip(evaluations, names, strict=True):
        scores = {s: evaluation.benchmarks[s] for s in TABLE13_SETS if s in evaluation.benchmarks}
        if scores:
            row = Table13Row(model=name, **{s: 100 * result.accuracy.mean for s, result in scores.items()})
            differs = {s: ", ".join(result.table13.get("differs") or ()) for s, result in scores.items()}
            own.append(
                {
                    "row": row,
                    "average": average(row),
                    "intervals": {s: result.accuracy for s, result in scores.items()},
                    "differs": [f"{s}: {reasons}" for s, reasons in differs.items() if reasons],
                }
            )
    paper = [{"row": row, "average": average(row)} for row in table13().rows]
    data = {"paper": paper, "own": own, "sets": TABLE13_SETS, "note": table13().note}
    return block("table13", "Beside Table 13", data if own else None)


def _settings(evaluations: Sequence[RecordedEvaluation], names: Sequence[str]) -> Block | None:
    """What differs first, then everything that was recorded of each."""
    tables = [
        leaves({name: {**result.settings, "samples": result.samples} for name, result in e.benchmarks.items()})
        for e in evaluations
    ]
    rows = setting_rows([[table] for table in tables], lambda key: not key.endswith(("seed", "sha256")))
    whole: list[dict[str, Any]] = []
    for evaluation, name in zip(evaluations, names, strict=True):
        told = {benchmark: leaves(_recorded(result)) for benchmark, result in evaluation.benchmarks.items()}
        head = {"name": name, "path": str(evaluation.path), "written": evaluation.written}
        whole.append(head | {"benchmarks": told})
    return block("eval_settings", "Settings and provenance", {"names": names, "rows": rows, "whole": whole})


def _recorded(result: BenchmarkResult) -> dict[str, Any]:
    first = {"scored_sha256": result.scored_sha256, "whole_set": result.whole_set, "samples": result.samples}
    return {**first, **result.settings, "model": result.model, "environment": result.environment}


# Test-time scaling.


class NamedScaling(NamedTuple):
    """The curves of one evaluation under the name that the figure gives it, in a slot of the palette."""

    name: str
    slot: int
    scaling: Scaling


def scaling_charts(curves: Sequence[NamedScaling], key: str = "") -> tuple[Chart, ...]:
    """Every scaling figure that there are data for: accuracy against the response limit and against the mean length of
    a response as the limit grows, pass@k and maj@k against k. ``key`` goes before the names of the exports."""
    limits: list[Series] = []
    for c in curves:
        limits.append(_line(c, ((p.limit, p.accuracy) for p in c.scaling.over_limits)))
        if c.scaling.fresh:
            limits.append(_line(c, ((p.limit, p.accuracy) for p in c.scaling.fresh), anew=True))
    knowing = [c.name for c in curves if not c.scaling.exact]
    cut = f"Computed from one set of long samples: what is longer than a limit counts as wrong there. {EXACT}"
    cut += f" Not exact for: {'; '.join(knowing)}." if knowing else ""
    spent = f"Mean tokens of a response as the limit grows, and what it gets right at that limit. {EXACT}"
    lengths = [_line(c, _efficiency(c.scaling)) for c in curves]
    passed = [_line(c, ((p.k, p.passed) for p in c.scaling.over_samples)) for c in curves]
    voted = [_line(c, ((p.k, p.majority) for p in c.scaling.over_samples if p.majority)) for c in curves]
    one = "Chance that at least one of k samples is right (unbiased)."
    most = "Chance that the most frequent answer of k samples is right."
    by_limit, by_length = "Accuracy against the response limit", "Accuracy against mean length"
    charts = (
        _scaling_chart(f"{key}over_limits", by_limit, limits, "response limit, tokens", "limit", cut),
        _scaling_chart(f"{key}efficiency", by_length, lengths, "mean tokens of a response", "tokens", spent),
        _scaling_chart(f"{key}pass_at_k", "pass@k against samples", passed, "samples k", "samples", one),
        _scaling_chart(f"{key}maj_at_k", "maj@k against samples", voted, "samples k", "samples", most),
    )
    return tuple(chart for chart in charts if not chart.empty)


def _efficiency(told: Scaling) -> list[tuple[float, Interval]]:
    """Points of mean length and accuracy; results of before they were recorded have those of the limits."""
    of_limits = [(p.mean_tokens.mean, p.accuracy) for p in told.over_limits if p.mean_tokens is not None]
    return [(p.mean_tokens, p.accuracy) for p in told.efficiency] or of_limits


def _line(curve: NamedScaling, points: Iterable[tuple[float, Interval]], *, anew: bool = False) -> Series:
    ordered = sorted(((x, value) for x, value in points if x > 0), key=lambda point: point[0])
    return Series(
        label=f"{curve.name}, sampled anew" if anew else curve.name,
        points=tuple((float(x), value.mean) for x, value in ordered),
        band=tuple((float(x), value.low, value.high) for x, value in ordered),
        color=curve.slot % len(PALETTE),
        style="marks" if anew else "line",
        dots=not anew,
    )


def _scaling_chart(key: str, title: str, series: Sequence[Series], x_name: str, x_word: str, note: str) -> Chart:
    xs = sorted({x for s in series for x, _ in s.points})
    by_factors = len(xs) > 1 and xs[-1] >= WIDE * xs[0]
    if not all(x == int(x) for x in xs):  # round ticks: 1, 2 and 5 times powers of ten
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
        x_whole=False,
        x_ticks=tuple(xs) if by_factors else (),
    )
