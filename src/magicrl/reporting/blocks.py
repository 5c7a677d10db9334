"""The blocks of a report page: each is a template and the data it shows.

``run_blocks`` is the list for a training run; other parts of the project make pages of other lists.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from magicrl.reporting.entropy_blocks import run_entropy
from magicrl.reporting.figures import FigureGroup, figure_groups
from magicrl.reporting.provenance import provenance
from magicrl.reporting.rollouts import LEVELS, shown_rollouts
from magicrl.reporting.run_folder import RecordedRun
from magicrl.reporting.run_samples import run_browsers
from magicrl.reporting.sample_browser import MOST_PROBLEMS
from magicrl.reporting.scores import headline, run_verdict
from magicrl.reporting.timeline import read_timeline, timeline_rows
from magicrl.reporting.views import bars_view, chart_view, hover, timeline_view
from magicrl.reporting.workers import idle_bars, idle_chart, idle_shares
from magicrl.training.health import RULES


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


def run_blocks(run: RecordedRun) -> tuple[Block, ...]:
    """The blocks of a run's report, in order; those without data are left out."""
    blocks = (
        _optional("verdict", "Did it learn?", run_verdict(run)),
        _optional("headline", "Result", headline(run)),
        _health(run),
        *(_figures(run, group) for group in figure_groups(run)),
        _token_entropy(run),
        _stages(run),
        _samples(run),
        _rollouts(run),
        _events(run),
        _optional("configuration", "Configuration", {"text": run.config_text} if run.config_text else None),
        _block("provenance", "Provenance", provenance(run)),
    )
    return tuple(block for block in blocks if block is not None)


def _block(key: str, title: str, data: Mapping[str, Any]) -> Block:
    return Block(key=key, title=title, template=f"{key}.html.j2", data=data, hover={})


def _optional(key: str, title: str, data: Mapping[str, Any] | None) -> Block | None:
    return None if data is None else _block(key, title, data)


def _health(run: RecordedRun) -> Block:
    """What the rules said while it ran."""
    findings = [event for event in run.events if event.get("kind") == "health"]
    return _block("health", "Health", {"findings": findings, "steps": len(run.metrics), "rules": RULES})


def _figures(run: RecordedRun, group: FigureGroup) -> Block:
    panels = [[chart_view(chart) for chart in panel] for panel in group.panels]
    crosshairs = {chart.key: hover(chart) for panel in group.panels for chart in panel}
    if group.key == "time" and (spans := read_timeline(run.path / "timeline.jsonl")):
        idle = idle_shares(run, spans)
        chart = idle_chart(run, idle)
        crosshairs[chart.key] = hover(chart)
        if rows := timeline_rows(run, spans):
            panels.append([timeline_view(rows)])
        panels.append([chart_view(chart)])
        if len(idle) > 1:
            panels[-1].append(bars_view(idle_bars(idle), "The most idle first."))
    return Block(
        key=group.key,
        title=group.title,
        template="figures.html.j2",
        data={"panels": panels, "axes": (), "note": group.note},
        hover=crosshairs,
    )


def _token_entropy(run: RecordedRun) -> Block | None:
    found = run_entropy(run)
    if found is None:
        return None
    data, crosshairs = found
    return Block(
        key="tokens", title="Where the policy is uncertain", template="figures.html.j2", data=data, hover=crosshairs
    )


def _rollouts(run: RecordedRun) -> Block | None:
    steps = [rollouts for rollouts in shown_rollouts(run) if rollouts]
    return _optional("rollouts", "Rollouts", {"steps": steps, "levels": LEVELS} if steps else None)


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
                "ended": ""
                if ended is None
                else str(ended.get("message", "")).removeprefix(f"stage {span.stage + 1} ended "),
            }
        )
    return _optional("stages", "Stages", {"rows": rows} if rows else None)


def _numbers(values: Iterable[object]) -> list[float]:
    return [float(v) for v in values if isinstance(v, (int, float))]


def _ends(values: Iterable[object]) -> float | None:
    found = _numbers(values)
    return sum(found) / len(found) if found else None


def _samples(run: RecordedRun) -> Block | None:
    browsers = run_browsers(run)
    return _optional("samples", "Test responses", {"sets": browsers, "most": MOST_PROBLEMS} if browsers else None)


def _events(run: RecordedRun) -> Block | None:
    rows: list[dict[str, Any]] = []
    for event in run.events:
        known = ("kind", "step", "stage", "message", "time", "remedy")
        rest = {k: v for k, v in event.items() if k not in known}
        rows.append({**{k: event.get(k) for k in known}, "rest": json.dumps(rest, ensure_ascii=False) if rest else ""})
    return _optional("events", "Events", {"rows": rows} if rows else None)
