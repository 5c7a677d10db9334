"""The page of a training run: its sections, each a template and the data it shows.

Among them what every worker did inside the training steps (``timeline.jsonl``): bars of a few steps, idle time of all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple, cast

from magicrl.config.loader import leaves
from magicrl.config.schema import STAGE_SETTINGS
from magicrl.records import StepMetrics
from magicrl.reporting.variants import of_stage
from magicrl.reporting.charts import (
    PALETTE,
    WIDTH,
    Chart,
    Entry,
    FigureView,
    Points,
    bars_view,
    box,
    chart_view,
    figure_view,
    nice_ticks,
    text,
    x_grid,
)
from magicrl.reporting.curves import FigureGroup, figure_groups, stage_marks, steps_range, with_running_mean
from magicrl.reporting.page import Block, block, figures_block, render_page, write_page
from magicrl.reporting.read_folders import RecordedRun, RunFolderError, read_lines, read_run
from magicrl.reporting.samples import LEVELS, MOST_PROBLEMS, run_browsers, shown_rollouts
from magicrl.reporting.scores import headline, run_verdict, training_seconds
from magicrl.reporting.wording import moment, number, percent
from magicrl.training.health import RULES
from magicrl_verifiers.progress import duration


def write_report(run_folder: Path, output: Path | None = None) -> Path:
    """Write the report of ``run_folder`` to ``output`` (default: its ``report.html``) and return that path.

    A run that is not finished has a report too, of what there is.

    Raises:
        RunFolderError: no run folder, or a corrupt file in it.
        ValueError: the page cannot be written.
    """
    page = report_page(read_run(run_folder), f" --output {output}" if output is not None else "")
    return write_page(page, output or run_folder / "report.html")


def report_page(run: RecordedRun, options: str = "") -> str:
    """The page of a run; ``options`` of the command that made it stand at its foot.

    Raises:
        RunFolderError: a corrupt file in the run's folder.
    """
    return render_page(run.name, run_facts(run), run_blocks(run), f"magicrl report {run.path}{options}")


def run_facts(run: RecordedRun) -> list[tuple[str, str]]:
    """(label, value) of what the head of a run's page tells."""
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
        recipe = configured[span.stage] if 0 <= span.stage < len(configured) else {}
        ended = next((e for e in run.events if e.get("kind") == "stage_end" and e.get("step") == span.last_step), {})
        first, last = _numbers(steps[:5], key), _numbers(steps[-5:], key)
        rows.append(
            {
                "span": span,
                "recipe": recipe,
                "own": ", ".join(f"{of_stage(key)} {recipe[key]}" for key in STAGE_SETTINGS if key in recipe),
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


# Inside the training steps.

LOCAL = "local"
"""The worker that is the run's own process."""
MOST_ROWS = 8
MOST_WORKERS = 12
"""Of a step, beside the run's own process; of more there are those that worked longest and shortest."""
MOST_BARS = 24
_COLORS = {"rollout": 0, "train": 1, "verify": 2, "old_logprobs": 3, "ref_logprobs": 5}


class Span(NamedTuple):
    """Work of one worker: ``start`` and ``end`` in seconds since its step began."""

    worker: str
    what: str
    step: int
    start: float
    end: float


class TimelineRow(NamedTuple):
    """One step of the drawing: its label and its lanes; work of a lane does not overlap."""

    label: str
    lanes: tuple[tuple[Span, ...], ...]


def read_timeline(path: Path) -> tuple[Span, ...]:
    """The spans of a run; none if it recorded none.

    Raises:
        RunFolderError: a line that is no span.
    """
    spans: list[Span] = []
    for line, row in read_lines(path):
        try:
            worker, what = str(row.get("worker", LOCAL)), str(row.get("what") or row["kind"])
            spans.append(Span(worker, what, int(row["step"]), float(row["start"]), float(row["end"])))
        except (KeyError, TypeError, ValueError):
            raise RunFolderError(
                f"{path}:{line}: a span needs step (a whole number), start and end (seconds) and what or kind"
            ) from None
    return tuple(spans)


def timeline_rows(run: RecordedRun, spans: Sequence[Span]) -> list[TimelineRow]:
    """The drawing's rows: of every stage the typical and the slowest step."""
    by_step = _by_step(spans)
    ends = {step: max(span.end for span in inside) for step, inside in by_step.items()}
    chosen: dict[int, str] = {}
    for stage in run.stages:
        length = {step: end for step, end in ends.items() if stage.first_step <= step <= stage.last_step}
        if length:
            middle = median(length.values())
            chosen.setdefault(min(length, key=lambda step: abs(length[step] - middle)), "typical")
            chosen.setdefault(max(length, key=lambda step: length[step]), "slowest")
    rows: list[TimelineRow] = []
    for step, word in sorted(chosen.items())[-MOST_ROWS:]:
        shown, left_out = _extremes(by_step[step])
        label = f"step {step}, {word}" + (f" (without {left_out} workers in between)" if left_out else "")
        rows.append(TimelineRow(label, _lanes(shown)))
    return rows


def _by_step(spans: Iterable[Span]) -> dict[int, list[Span]]:
    found: dict[int, list[Span]] = {}
    for span in spans:
        found.setdefault(span.step, []).append(span)
    return dict(sorted(found.items()))


def _extremes(spans: Sequence[Span]) -> tuple[list[Span], int]:
    """The spans of at most ``MOST_WORKERS`` workers and the run's own process; how many workers are left out."""
    seconds: dict[str, float] = {}
    for span in spans:
        if span.worker != LOCAL:
            seconds[span.worker] = seconds.get(span.worker, 0.0) + span.end - span.start
    by_work = sorted(seconds, key=lambda worker: seconds[worker])
    most = MOST_WORKERS // 2
    left_out = set(by_work[most:-most] if len(by_work) > MOST_WORKERS else ())
    return [span for span in spans if span.worker not in left_out], len(left_out)


def _lanes(spans: Sequence[Span]) -> tuple[tuple[Span, ...], ...]:
    """A worker's spans in one lane, or in as many as overlap."""
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda s: (_natural(s.worker), s.start)):
        free = next((lane for lane in lanes if lane[-1].worker == span.worker and lane[-1].end <= span.start), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return tuple(tuple(lane) for lane in lanes)


def _natural(worker: str) -> tuple[str, int]:
    """By name and number: ``replica 2`` before ``replica 10``."""
    name, _, number = worker.rpartition(" ")
    return (name, int(number)) if number.isdecimal() else (worker, 0)


def timeline_view(rows: Sequence[TimelineRow]) -> FigureView:
    """A row a step, seconds to the right; what no bar covers is bookkeeping."""
    left, right, top, lane_height, gap = 112, 20, 8, 15, 9
    spans = [span for row in rows for lane in row.lanes for span in lane]
    longest = max((span.end for span in spans), default=1.0)
    scale = (WIDTH - left - right) / longest
    bars: list[str] = []
    y = top + gap / 2
    for row in rows:
        # lanes of several workers carry their names, below a line with the step's
        named = len({lane[0].worker for lane in row.lanes}) > 1
        middle = y + lane_height * (1 if named else len(row.lanes)) / 2 + 4
        bars.append(text(4 if named else left - 8, middle, row.label, "start" if named else "end"))
        y += lane_height * named
        shown = ""
        for lane in row.lanes:
            if named and lane[0].worker != shown:
                shown = lane[0].worker
                words = shown if len(shown) <= 15 else shown[:14] + "…"
                bars.append(text(left - 8, y + lane_height / 2 + 3, words, "end"))
            for span in lane:
                words = f"{span.what.replace('_', ' ')}: {duration(span.end - span.start)} ({span.worker})"
                corner = (round(left + span.start * scale, 1), y)
                width = (span.end - span.start) * scale
                bars.append(box(_COLORS.get(span.what, 4), corner, width, lane_height - 2, words))
            y += lane_height
        y += gap
    bottom = y - gap / 2
    ticks = [(left + tick * scale, number(tick)) for tick in nice_ticks(0.0, longest, 5) if tick <= longest]
    parts = [*x_grid(ticks, top, bottom), *bars, text((left + WIDTH - right) / 2, bottom + 32, "seconds of the step")]
    names = dict.fromkeys(span.what for span in spans)
    return figure_view(
        "timeline",
        "Inside a step",
        (bottom + 38, parts),
        told=[_words(row) for row in rows],
        legend=[Entry(name.replace("_", " "), "area", _COLORS.get(name, 4)) for name in names],
        rows=[["step", "worker", "what", "start", "end"], *([s.step, s.worker, s.what, s.start, s.end] for s in spans)],
        note="The step of median length and the slowest one of each stage. Judging that hid behind generation has no "
        "bar of its own; what no bar covers is bookkeeping.",
    )


def _words(row: TimelineRow) -> str:
    spans = [span for lane in row.lanes for span in lane]
    return f"{row.label}: " + ", ".join(f"{s.what} {duration(s.end - s.start)}" for s in spans[:6])


def busy_seconds(spans: Iterable[Span], end: float) -> float:
    """Seconds up to ``end`` that at least one of the spans covers."""
    busy = reached = 0.0
    for span in sorted(spans, key=lambda s: s.start):
        begin, stop = max(span.start, reached), min(span.end, end)
        if stop > begin:
            busy += stop - begin
            reached = stop
    return busy


def idle_shares(run: RecordedRun, spans: Sequence[Span]) -> dict[str, Points]:
    """Worker -> (step, share of the step's wall clock without work of it), the most idle worker first.

    A worker that did nothing in a step idled through it. Steps whose length was not recorded end with the last span.
    """
    lengths = dict(run.points("time/step"))
    found: dict[str, list[tuple[float, float]]] = {worker: [] for worker in sorted({s.worker for s in spans})}
    for step, inside in _by_step(spans).items():
        last = max(span.end for span in inside)
        length = max(lengths.get(float(step), last), last)
        for worker, points in found.items():
            busy = busy_seconds((s for s in inside if s.worker == worker), length)
            points.append((float(step), 1.0 - busy / length if length > 0 else 0.0))
    return dict(sorted(((w, tuple(p)) for w, p in found.items()), key=lambda item: -_mean(item[1])))


def idle_chart(run: RecordedRun, shares: Mapping[str, Points]) -> Chart:
    """Idle share of the most idle workers, step by step."""
    marks, most = stage_marks(run), len(PALETTE)
    note = "Share of the step's wall clock in which a worker had no measured work."
    alone = len(shares) == 1  # raw values of many would hide each other
    if alone:
        note += " One process does everything in turn: what is left is bookkeeping."
    elif len(shares) > most:
        note += f" The {most} most idle of {len(shares)} workers."
    breaks = [mark.x for mark in marks]
    drawn = [with_running_mean(w, points, i, breaks) for i, (w, points) in enumerate(list(shares.items())[:most])]
    return Chart(
        key="idle",
        title="Idle time by worker",
        unit="percent",
        y_low=0.0,
        compact=True,
        note=note,
        series=tuple(series for lines in drawn for series in lines[: 2 if alone else 1]),
        marks=marks,
        x_range=steps_range(run),
    )


def idle_bars(shares: Mapping[str, Points]) -> FigureView:
    """Each worker's mean over all steps."""
    means = [(worker, _mean(points), percent(_mean(points))) for worker, points in list(shares.items())[:MOST_BARS]]
    title, x_name, note = "Idle time, mean over the run", "share of the steps' wall clock", "The most idle first."
    return bars_view("idle_by_worker", title, x_name, means, note, unit="percent", color=4)


def _mean(points: Points) -> float:
    return mean(y for _, y in points) if points else 0.0
