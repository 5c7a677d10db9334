"""The blocks of a report page: each is a template and the data it shows.

``run_blocks`` is the list for a training run; other parts of the project make pages of other lists.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from markupsafe import Markup

from magicrl.reporting.charts import Chart, thinned, to_csv
from magicrl.reporting.comparison import Comparison, comparisons
from magicrl.reporting.figures import FigureGroup, figure_groups
from magicrl.reporting.interval_plot import IntervalRow, draw_intervals
from magicrl.reporting.run_folder import EvaluatedSample, RecordedRun, SampledResponse
from magicrl.reporting.summary import training_seconds
from magicrl.reporting.svg import LEFT, RIGHT, WIDTH, draw, drawn_series, frame_of, legend_entries
from magicrl.reporting.wording import number, percent, points, temperature
from magicrl.training.health import check_run


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One section of a page.

    Attributes:
        key: its anchor.
        title: its heading and its entry in the page's contents.
        template: file under ``templates/blocks`` that shows ``data``.
        data: what the template reads, under the name ``data``.
        hover: chart key -> values for the crosshair.
    """

    key: str
    title: str
    template: str
    data: Mapping[str, Any]
    hover: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChartView:
    """A drawn chart with its legend and its exports."""

    chart: Chart
    svg: Markup
    legend: tuple[tuple[str, int, str], ...]
    downloads: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponsePair:
    """What the start and the trained model wrote on one problem at one temperature."""

    temperature: float
    before: SampledResponse | None
    after: SampledResponse | None


def run_blocks(run: RecordedRun) -> tuple[Block, ...]:
    """The blocks of a run's report, in order; those without data are left out."""
    blocks = (
        _headline(run),
        _health(run),
        *(_figures(group) for group in figure_groups(run)),
        _stages(run),
        _samples(run),
        _events(run),
        _configuration(run),
        _provenance(run),
    )
    return tuple(block for block in blocks if block is not None)


def _block(key: str, title: str, data: Mapping[str, Any], hover: Mapping[str, Any] | None = None) -> Block:
    return Block(key=key, title=title, template=f"{key}.html.j2", data=data, hover=hover or {})


def _headline(run: RecordedRun) -> Block | None:
    found = comparisons(run)
    sets = [
        {
            "comparison": c,
            "plot": _interval_plot(c),
            "passes": _passes(c),
            "tiles": _tiles(run, c),
            "boxed": any(s.boxed is not None for p in c.pairs for s in (p.before, p.after) if s is not None),
        }
        for c in found
    ]
    return _block("headline", "Result", {"sets": sets}) if sets else None


def _interval_plot(comparison: Comparison) -> Markup:
    best = comparison.start_best
    rows = [
        IntervalRow(
            label=temperature(pair.temperature),
            before=pair.before.accuracy if pair.before else None,
            after=pair.after.accuracy if pair.after else None,
        )
        for pair in comparison.pairs
    ]
    return draw_intervals(rows, None if best is None else best[1].accuracy.mean)


def _passes(comparison: Comparison) -> list[dict[str, Any]]:
    before, after = comparison.pass_at("before"), comparison.pass_at("after")
    return [
        {
            "k": k,
            "temperature": (before.get(k) or after[k])[0],
            "before": before[k][1] if k in before else None,
            "after": after[k][1] if k in after else None,
        }
        for k in sorted({*before, *after})
    ]


def _tiles(run: RecordedRun, comparison: Comparison) -> list[dict[str, str]]:
    """The few figures that matter most: value, what it is, and a word on it."""
    tiles: list[dict[str, str]] = []
    at = comparison.training_temperature
    rise = None if at is None else comparison.rise_over_best(at)
    if at is not None and rise is not None and comparison.after is not None:
        pair = next(p for p in comparison.pairs if p.temperature == at)
        old = "–" if pair.before is None else percent(pair.before.accuracy.mean)
        tiles.append(
            {
                "value": f"{old} → {percent(rise.after.mean)}",
                "label": f"accuracy at temperature {temperature(at)}",
                "detail": "before and after training",
            }
        )
        tiles.append(
            {
                "value": f"{points(rise.change.mean)} points",
                "label": f"over the start's best temperature ({temperature(rise.before_temperature)}: "
                f"{percent(rise.before.mean)})",
                "detail": f"95 %: {points(rise.change.low)} to {points(rise.change.high)}",
            }
        )
    entropy, target = run.points("entropy/exact/mean", "entropy/sampled/mean"), run.points("entropy/target")
    if entropy:
        tiles.append(
            {
                "value": f"{number(entropy[0][1], 2)} → {number(entropy[-1][1], 2)}",
                "label": "entropy, nats per token",
                "detail": f"target {target[-1][1]:g}" if target else "no target",
            }
        )
    lengths = run.points("length/mean")
    if lengths:
        tiles.append(
            {
                "value": f"{lengths[0][1]:.0f} → {lengths[-1][1]:.0f}",
                "label": "mean response length, tokens",
                "detail": "first and last training step",
            }
        )
    return tiles


def _health(run: RecordedRun) -> Block:
    """Findings of the rules over the metrics, and health events that the run recorded besides."""
    findings = [finding.as_event() for finding in check_run(run.metrics)]
    known = {finding["rule"] for finding in findings}
    recorded = [dict(e) for e in run.events if e.get("kind") == "health" and e.get("rule") not in known]
    rows = sorted(findings + recorded, key=lambda e: cast("int", e.get("step") or 0))
    return _block("health", "Health", {"findings": rows, "steps": len(run.metrics)})


def _figures(group: FigureGroup) -> Block:
    panels = [[_view(chart) for chart in panel] for panel in group.panels]
    hover = {chart.key: _hover(chart) for panel in group.panels for chart in panel}
    return Block(key=group.key, title=group.title, template="figures.html.j2", data={"panels": panels}, hover=hover)


def _view(chart: Chart) -> ChartView:
    return ChartView(
        chart=chart,
        svg=draw(chart),
        legend=tuple((s.label, s.color, s.style) for s in legend_entries(chart)),
        downloads=(
            ("SVG", f"{chart.key}.svg", data_uri("image/svg+xml", draw(chart, alone=True))),
            ("CSV", f"{chart.key}.csv", data_uri("text/csv", to_csv(chart))),
        ),
    )


def data_uri(media_type: str, text: str) -> str:
    """``text`` as a link that needs no server."""
    return f"data:{media_type};charset=utf-8;base64,{base64.b64encode(text.encode()).decode()}"


def _hover(chart: Chart) -> dict[str, Any]:
    """What the crosshair needs: the plot area, the x range and every line's values."""
    frame, _ = frame_of(chart)
    shown = {s.label: s for s in drawn_series(chart)}
    return {
        "left": LEFT,
        "right": WIDTH - RIGHT,
        "width": WIDTH,
        "bottom": frame.bottom,
        "low": frame.x_low,
        "high": frame.x_high,
        "unit": chart.unit,
        "series": [
            {"label": s.label, "color": s.color, "points": [[x, float(f"{y:.5g}")] for x, y in thinned(s.points)]}
            for s in chart.series
            if s.points and s.label in shown
        ],
    }


def _stages(run: RecordedRun) -> Block | None:
    configured = cast("list[dict[str, Any]]", run.config.get("stages") or [])
    rows: list[dict[str, Any]] = []
    for span in run.stages:
        steps = [row for row in run.metrics if span.first_step <= row.step <= span.last_step]
        recipe = configured[span.stage] if 0 <= span.stage < len(configured) else {}
        ended = next((e for e in run.events if e.get("kind") == "stage_end" and e.get("step") == span.last_step), None)
        rows.append(
            {
                "span": span,
                "recipe": recipe,
                "steps": len(steps),
                "first": _ends(row.values.get("train/accuracy/mean") for row in steps[:5]),
                "last": _ends(row.values.get("train/accuracy/mean") for row in steps[-5:]),
                "seconds": sum(_numbers(row.values.get("time/step") for row in steps)),
                "tokens": sum(_numbers(row.values.get("tokens/sampled") for row in steps)),
                "ended": "" if ended is None else str(ended.get("message", "")),
            }
        )
    return _block("stages", "Stages", {"rows": rows}) if rows else None


def _numbers(values: Iterable[object]) -> list[float]:
    return [float(v) for v in values if isinstance(v, (int, float))]


def _ends(values: Iterable[object]) -> float | None:
    found = _numbers(values)
    return sum(found) / len(found) if found else None


def _samples(run: RecordedRun) -> Block | None:
    sets: list[dict[str, Any]] = []
    for comparison in comparisons(run):
        old = {s.problem_id: s for s in (comparison.before.samples if comparison.before else ())}
        new = {s.problem_id: s for s in (comparison.after.samples if comparison.after else ())}
        problems = [
            {"problem": new.get(key) or old[key], "pairs": response_pairs(old.get(key), new.get(key))}
            for key in dict.fromkeys([*old, *new])
        ]
        if problems:
            sets.append({"name": comparison.set_name, "problems": problems})
    return _block("samples", "Responses", {"sets": sets}) if sets else None


def response_pairs(before: EvaluatedSample | None, after: EvaluatedSample | None) -> list[ResponsePair]:
    """The responses of both models to one problem side by side: by temperature, in order within it."""
    old = _by_temperature(before)
    new = _by_temperature(after)
    pairs: list[ResponsePair] = []
    for t in sorted({*old, *new}):
        left, right = old.get(t, []), new.get(t, [])
        for i in range(max(len(left), len(right))):
            pairs.append(
                ResponsePair(
                    temperature=t,
                    before=left[i] if i < len(left) else None,
                    after=right[i] if i < len(right) else None,
                )
            )
    return pairs


def _by_temperature(sample: EvaluatedSample | None) -> dict[float, list[SampledResponse]]:
    found: dict[float, list[SampledResponse]] = {}
    for response in sample.responses if sample else ():
        found.setdefault(response.temperature, []).append(response)
    return found


def _events(run: RecordedRun) -> Block | None:
    rows: list[dict[str, Any]] = []
    for event in run.events:
        known = ("kind", "step", "stage", "message", "time", "remedy")
        rest = {k: v for k, v in event.items() if k not in known}
        rows.append({**{k: event.get(k) for k in known}, "rest": json.dumps(rest, ensure_ascii=False) if rest else ""})
    return _block("events", "Events", {"rows": rows}) if rows else None


def _configuration(run: RecordedRun) -> Block | None:
    return _block("configuration", "Configuration", {"text": run.config_text}) if run.config_text else None


def _provenance(run: RecordedRun) -> Block:
    facts = [(k, v) for k, v in flattened(run.run) if v not in (None, "")]
    seconds = training_seconds(run)
    return _block("provenance", "Provenance", {"facts": facts, "seconds": seconds, "folder": str(run.path)})


def flattened(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Nested tables and lists as (dotted key, scalar), in order."""
    if isinstance(value, Mapping):
        table = cast("Mapping[str, Any]", value)
        return [row for k, v in table.items() for row in flattened(v, f"{prefix}.{k}" if prefix else str(k))]
    if isinstance(value, list):
        items = cast("list[Any]", value)
        return [row for i, v in enumerate(items) for row in flattened(v, f"{prefix}[{i}]")]
    return [(prefix, value)]
