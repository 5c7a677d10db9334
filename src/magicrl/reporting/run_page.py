"""The page of a training run: its sections, each a template and the data it shows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, cast

from magicrl.config.loader import leaves
from magicrl.records import StepMetrics
from magicrl.reporting.charts import chart_view
from magicrl.reporting.curves import FigureGroup, figure_groups
from magicrl.reporting.page import Block, block, figures_block, render_page, write_page
from magicrl.reporting.read_folders import RecordedRun, read_run
from magicrl.reporting.samples import LEVELS, MOST_PROBLEMS, run_browsers, shown_rollouts
from magicrl.reporting.scores import headline, run_verdict, training_seconds
from magicrl.reporting.timeline import idle_bars, idle_chart, idle_shares, read_timeline, timeline_rows, timeline_view
from magicrl.reporting.token_entropy import run_entropy
from magicrl.reporting.wording import duration, moment
from magicrl.training.health import RULES


def write_report(run_folder: Path, output: Path | None = None) -> Path:
    """Write the report of ``run_folder`` to ``output`` (default: its ``report.html``) and return that path.

    A run that is not finished has a report too, of what there is.

    Raises:
        RunFolderError: no run folder, or a corrupt file in it.
        ValueError: the page cannot be written.
    """
    run = read_run(run_folder)
    command = f"magicrl report {run_folder}" + (f" --output {output}" if output is not None else "")
    page = render_page(run.name, _run_facts(run), run_blocks(run), command)
    return write_page(page, output or run_folder / "report.html")


def _run_facts(run: RecordedRun) -> list[tuple[str, str]]:
    recorded = {**run.run, **next(iter(run.environments), {})}
    facts = [
        ("status", run.status),
        ("training steps", str(len(run.metrics))),
        ("time in training steps", duration(training_seconds(run))),
        ("seed", str(run.run.get("seed", "–"))),
        ("started", moment(str(recorded.get("started") or ""))),
        ("ended", moment(str(run.run.get("ended") or ""))),
        ("error", str(run.run.get("error") or "")),
        ("machine", str(recorded.get("machine") or "")),
    ]
    return [(label, value) for label, value in facts if value]


def run_blocks(run: RecordedRun) -> tuple[Block, ...]:
    """The blocks of a run's report, in order; those without data are left out."""
    browsers = run_browsers(run)
    rollouts = [step for step in shown_rollouts(run) if step]
    findings = [event for event in run.events if event.get("kind") == "health"]
    blocks = (
        block("verdict", "Did it learn?", run_verdict(run)),
        block("headline", "Result", headline(run)),
        block("health", "Health", {"findings": findings, "steps": len(run.metrics), "rules": RULES}),
        *(_figures(run, group) for group in figure_groups(run)),
        run_entropy(run),
        _stages(run),
        block("samples", "Test responses", {"sets": browsers, "most": MOST_PROBLEMS} if browsers else None),
        block("rollouts", "Rollouts", {"steps": rollouts, "levels": LEVELS} if rollouts else None),
        _events(run),
        block("configuration", "Configuration", {"text": run.config_text} if run.config_text else None),
        block("provenance", "Provenance", provenance(run)),
    )
    return tuple(block for block in blocks if block is not None)


def _figures(run: RecordedRun, group: FigureGroup) -> Block:
    panels = [[chart_view(chart) for chart in panel] for panel in group.panels]
    if group.key == "time" and (spans := read_timeline(run.path / "timeline.jsonl")):
        idle = idle_shares(run, spans)
        if rows := timeline_rows(run, spans):
            panels.append([timeline_view(rows)])
        panels.append([chart_view(idle_chart(run, idle))])
        if len(idle) > 1:
            panels[-1].append(idle_bars(idle))
    return figures_block(group.key, group.title, panels, group.note)


def _stages(run: RecordedRun) -> Block | None:
    configured = cast("list[dict[str, Any]]", run.config.get("stages") or [])
    rows: list[dict[str, Any]] = []
    key = f"train/{run.measure.key}/mean"
    for span in run.stages:
        steps = [row for row in run.metrics if span.first_step <= row.step <= span.last_step]
        ended = next((e for e in run.events if e.get("kind") == "stage_end" and e.get("step") == span.last_step), {})
        first, last = _numbers(steps[:5], key), _numbers(steps[-5:], key)
        rows.append(
            {
                "span": span,
                "recipe": configured[span.stage] if 0 <= span.stage < len(configured) else {},
                "first": mean(first) if first else None,
                "last": mean(last) if last else None,
                "seconds": sum(_numbers(steps, "time/step")),
                "tokens": sum(_numbers(steps, "tokens/sampled")),
                "ended": str(ended.get("message", "")).removeprefix(f"stage {span.stage + 1} ended "),
            }
        )
    return block("stages", "Stages", {"rows": rows, "measure": run.measure} if rows else None)


def _numbers(steps: Sequence[StepMetrics], key: str) -> list[float]:
    return [float(value) for row in steps if isinstance(value := row.values.get(key), (int, float))]


def _events(run: RecordedRun) -> Block | None:
    rows: list[dict[str, Any]] = []
    for event in run.events:
        known = ("kind", "step", "stage", "message", "time", "remedy")
        rest = {k: v for k, v in event.items() if k not in known}
        rows.append({**{k: event.get(k) for k in known}, "rest": json.dumps(rest, ensure_ascii=False) if rest else ""})
    return block("events", "Events", {"rows": rows} if rows else None)


def provenance(run: RecordedRun) -> dict[str, Any]:
    """The data of the provenance's template."""
    told_apart = ("environments", "data", "schema_version")
    rest = leaves({key: value for key, value in run.run.items() if key not in told_apart})
    facts = {k: ", ".join(map(str, v)) if isinstance(v, list) else v for k, v in rest.items()}
    return {
        "sessions": [_session(environment) for environment in run.environments],
        "software": _software(run.environments),
        "sets": _sets(run.run.get("data")),
        "facts": [(key.replace("_", " "), value) for key, value in facts.items() if value not in (None, "")],
        "folder": str(run.path),
    }


def _session(environment: Mapping[str, Any]) -> dict[str, str]:
    """One start or resumption: when, where, which commit."""
    machine = [str(environment["machine"])] if environment.get("machine") else []
    machine += [f"{environment['threads']} threads"] if environment.get("threads") else []
    started, git = moment(str(environment.get("started", ""))), str(environment.get("git") or "")
    return {"started": started, "git": git, "machine": ", ".join(machine)}


def _software(environments: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Versions by package; where a resumption had another one, in order, with an arrow."""
    seen: dict[str, list[str]] = {}
    for environment in environments:
        for name, version in {"python": environment.get("python"), **(environment.get("versions") or {})}.items():
            history = seen.setdefault(name, [])
            if version is not None and (not history or history[-1] != str(version)):
                history.append(str(version))
    return [(name, " → ".join(history)) for name, history in seen.items() if history]


def _sets(data: object) -> list[dict[str, str]]:
    """The problem sets with their checksums."""
    rows: list[dict[str, str]] = []
    for name, facts in cast("dict[str, Any]", data if isinstance(data, dict) else {}).items():
        known = leaves(facts if isinstance(facts, dict) else {"sha256": facts})
        problems, sha256 = known.pop("problems", None), str(known.pop("sha256", ""))
        if problems != 0:
            count = f"{problems:,}" if isinstance(problems, int) else "–"
            rest = ", ".join(f"{key} {value}" for key, value in known.items())
            rows.append({"name": name.replace("/", ", "), "problems": count, "sha256": sha256, "rest": rest})
    return rows
