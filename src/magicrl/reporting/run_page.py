"""The page of a training run: its sections, each a template and the data it shows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

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
    environments = run.run.get("environments") or [{}]
    started, ended = (
        str(environments[0].get("started") or run.run.get("started") or ""),
        str(run.run.get("ended") or ""),
    )
    facts = [
        ("status", run.status),
        ("training steps", str(len(run.metrics))),
        ("time in training steps", duration(training_seconds(run))),
        ("seed", str(run.run.get("seed", "–"))),
        ("started", moment(started)),
        ("ended", moment(ended)),
        ("error", str(run.run.get("error") or "")),
        ("machine", str(environments[0].get("machine") or run.run.get("machine") or "")),
    ]
    return [(label, value) for label, value in facts if value]


def run_blocks(run: RecordedRun) -> tuple[Block, ...]:
    """The blocks of a run's report, in order; those without data are left out."""
    browsers = run_browsers(run)
    rollouts = [step for step in shown_rollouts(run) if step]
    blocks = (
        block("verdict", "Did it learn?", run_verdict(run)),
        block("headline", "Result", headline(run)),
        _health(run),
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


def _health(run: RecordedRun) -> Block | None:
    """What the rules said while it ran."""
    findings = [event for event in run.events if event.get("kind") == "health"]
    return block("health", "Health", {"findings": findings, "steps": len(run.metrics), "rules": RULES})


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
    return block("stages", "Stages", {"rows": rows} if rows else None)


def _numbers(values: Iterable[object]) -> list[float]:
    return [float(v) for v in values if isinstance(v, (int, float))]


def _ends(values: Iterable[object]) -> float | None:
    found = _numbers(values)
    return sum(found) / len(found) if found else None


def _events(run: RecordedRun) -> Block | None:
    rows: list[dict[str, Any]] = []
    for event in run.events:
        known = ("kind", "step", "stage", "message", "time", "remedy")
        rest = {k: v for k, v in event.items() if k not in known}
        rows.append({**{k: event.get(k) for k in known}, "rest": json.dumps(rest, ensure_ascii=False) if rest else ""})
    return block("events", "Events", {"rows": rows} if rows else None)


_TOLD_APART = ("environments", "data", "schema_version")


def provenance(run: RecordedRun) -> dict[str, Any]:
    """The data of the provenance's template."""
    environments = [e for e in cast("list[Any]", run.run.get("environments") or []) if isinstance(e, Mapping)]
    rest = {key: value for key, value in run.run.items() if key not in _TOLD_APART}
    return {
        "sessions": [_session(cast("Mapping[str, Any]", e)) for e in environments],
        "software": _software([cast("Mapping[str, Any]", e) for e in environments]),
        "sets": _sets(run.run.get("data")),
        "facts": [(key.replace("_", " "), value) for key, value in flattened(rest) if value not in (None, "")],
        "folder": str(run.path),
    }


def _session(environment: Mapping[str, Any]) -> dict[str, str]:
    """One start or resumption: when, where, which commit."""
    known = {"started": moment(str(environment.get("started", ""))), "git": str(environment.get("git") or "")}
    machine = [str(environment[key]) for key in ("machine",) if environment.get(key)]
    machine += [f"{environment['threads']} threads"] if environment.get("threads") else []
    return known | {"machine": ", ".join(machine)}


def _software(environments: list[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Versions by package; where a resumption had another one, in order, with an arrow."""
    seen: dict[str, list[str]] = {}
    for environment in environments:
        versions: object = environment.get("versions")
        listed = cast("Mapping[str, Any]", versions) if isinstance(versions, Mapping) else {}
        for name, version in {"python": environment.get("python"), **listed}.items():
            history = seen.setdefault(name, [])
            if version is not None and (not history or history[-1] != str(version)):
                history.append(str(version))
    return [(name, " → ".join(history)) for name, history in seen.items() if history]


def _sets(data: object) -> list[dict[str, str]]:
    """The problem sets with their checksums."""
    if not isinstance(data, Mapping):
        return []
    rows: list[dict[str, str]] = []
    for name, facts in cast("Mapping[str, Any]", data).items():
        known = cast("Mapping[str, Any]", facts) if isinstance(facts, Mapping) else {"sha256": facts}
        problems = known.get("problems")
        if problems != 0:
            rows.append(
                {
                    "name": name.replace("/", ", "),
                    "problems": f"{problems:,}" if isinstance(problems, int) else "–",
                    "sha256": str(known.get("sha256", "")),
                    "rest": ", ".join(f"{k} {v}" for k, v in flattened(known) if k not in ("problems", "sha256")),
                }
            )
    return rows


def flattened(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Nested tables and lists as (dotted key, scalar), in order."""
    if isinstance(value, Mapping):
        table = cast("Mapping[str, Any]", value)
        return [row for k, v in table.items() for row in flattened(v, f"{prefix}.{k}" if prefix else str(k))]
    if isinstance(value, list):
        items = cast("list[Any]", value)
        return [row for i, v in enumerate(items) for row in flattened(v, f"{prefix}[{i}]")]
    return [(prefix, value)]
