"""The page of a training run as a file and on a local server: its sections, each a template and its data.

One of them shows the work of every process inside the training steps (``timeline.jsonl``): bars of a few steps, and
the idle time of all steps.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import mean, median
from threading import Lock
from typing import Any, NamedTuple, TypeAlias, cast

from magicrl.config.loader import leaves
from magicrl.config.schema import STAGE_SETTINGS
from magicrl.reporting.charts import (
    PALETTE,
    WIDTH,
    Chart,
    FigureView,
    LegendEntry,
    Points,
    bars_view,
    box,
    chart_view,
    figure_view,
    nice_ticks,
    text,
    x_grid,
)
from magicrl.reporting.curves import MetricGroup, figure_groups, stage_marks, steps_range, with_running_mean
from magicrl.reporting.page import PageBlock, block, figures_block, render_page, write_page
from magicrl.reporting.read_folders import RecordedRun, RunFolderError, read_lines, read_run
from magicrl.reporting.samples import LEVELS, MOST_PROBLEMS, run_browsers, shown_rollouts
from magicrl.reporting.scores import headline, run_verdict
from magicrl.reporting.variants import stage_setting_name
from magicrl.reporting.wording import moment, number_text, percent
from magicrl.training.diagnosis import column
from magicrl.training.health import RULES
from magicrl_verifiers.progress import duration


def write_run_page(run_folder: Path, output: Path | None = None) -> Path:
    """Write the report of a run, finished or not, and return its path.

    Args:
        run_folder: the run.
        output: path of the page. Default: ``report.html`` in the run folder.

    Raises:
        RunFolderError: not a run folder, or a file in it is corrupt.
        ValueError: the page cannot be written.
    """
    page = report_page(read_run(run_folder), f" --output {output}" if output is not None else "")
    return write_page(page, output or run_folder / "report.html")


def report_page(run: RecordedRun, options: str = "") -> str:
    """Return the page of a run. ``options`` are those of the command, for the page's foot.

    Raises:
        RunFolderError: a file in the run folder is corrupt.
    """
    return render_page(run.name, run_facts(run), run_blocks(run), f"magicrl report {run.path}{options}")


def run_facts(run: RecordedRun) -> list[tuple[str, str]]:
    """Return (label, value) of the head of a run's page; values may be empty."""
    recorded = {**run.run, **next(iter(run.environments), {})}
    return [
        ("status", run.shown_status),
        ("training steps", str(len(run.metrics))),
        ("time in training steps", duration(run.training_seconds)),
        ("seed", str(run.run.get("seed", "–"))),
        ("started", moment(str(recorded.get("started") or ""))),
        ("ended", moment(str(run.run.get("ended") or ""))),
        ("error", str(run.run.get("error") or "")),
        ("machine", str(recorded.get("machine") or "")),
    ]


def run_blocks(run: RecordedRun) -> tuple[PageBlock, ...]:
    """Return the sections of a run's report in order, without those that have no data."""
    browsers = run_browsers(run)
    rollouts = [step for step in shown_rollouts(run) if step]
    findings = [event for event in run.events if event.get("kind") == "health"]
    known = ("kind", "step", "stage", "message", "time", "remedy")
    events: list[dict[str, Any]] = []
    for event in run.events:
        rest = {k: v for k, v in event.items() if k not in known}
        events.append({k: event.get(k) for k in known} | {"rest": json.dumps(rest, ensure_ascii=False) if rest else ""})
    blocks = (
        block("verdict", "Did it learn?", run_verdict(run)),
        block("headline", "Result", headline(run)),
        block("health", "Health", {"findings": findings, "steps": len(run.metrics), "rules": RULES}),
        *(_figures(run, group, panels, note) for group, panels, note in figure_groups(run)),
        _stages(run),
        block("samples", "Test responses", {"sets": browsers, "most": MOST_PROBLEMS} if browsers else None),
        block("rollouts", "Rollouts", {"steps": rollouts, "levels": LEVELS} if rollouts else None),
        block("events", "Events", {"rows": events} if events else None),
        block("configuration", "Configuration", {"text": run.config_text} if run.config_text else None),
        block("provenance", "Provenance", provenance(run)),
    )
    return tuple(block for block in blocks if block is not None)


def _figures(run: RecordedRun, group: MetricGroup, charts: Sequence[Sequence[Chart]], note: str) -> PageBlock:
    panels = [[chart_view(chart) for chart in panel] for panel in charts]
    if group.key == "time" and (spans := read_timeline(run.path / "timeline.jsonl")):
        idle = idle_shares(run, spans)
        if rows := timeline_rows(run, spans):
            panels.append([timeline_view(rows)])
        panels.append([chart_view(idle_chart(run, idle))])
        if len(idle) > 1:
            panels[-1].append(idle_bars(idle))
    return figures_block(group.key, group.title, panels, note)


def _stages(run: RecordedRun) -> PageBlock | None:
    configured = cast("list[dict[str, Any]]", run.config.get("stages") or [])
    rows: list[dict[str, Any]] = []
    key = f"train/{run.measure.key}/mean"
    for stage, first_step, last_step, limit in run.stages:
        steps = [row for row in run.metrics if first_step <= row.step <= last_step]
        recipe = configured[stage] if 0 <= stage < len(configured) else {}
        ended = next((e for e in run.events if e.get("kind") == "stage_end" and e.get("step") == last_step), {})
        first, last = column(steps[:5], key), column(steps[-5:], key)
        rows.append(
            {
                "steps": f"{first_step}–{last_step}",
                "limit": recipe.get("max_tokens", "–") if limit is None else limit,
                "recipe": recipe,
                "own": ", ".join(f"{stage_setting_name(key)} {recipe[key]}" for key in STAGE_SETTINGS if key in recipe),
                "first": mean(first) if first else None,
                "last": mean(last) if last else None,
                "seconds": sum(column(steps, "time/step")),
                "tokens": sum(column(steps, "tokens/sampled")),
                "ended": str(ended.get("message", "")).removeprefix(f"stage {stage + 1} ended "),
            }
        )
    return block("stages", "Stages", {"rows": rows, "measure": run.measure} if rows else None)


def provenance(run: RecordedRun) -> dict[str, Any]:
    """Return the data of the provenance's template."""
    separate = ("environments", "data", "schema_version")
    rest = leaves({key: value for key, value in run.run.items() if key not in separate})
    facts = {k: ", ".join(map(str, v)) if isinstance(v, list) else v for k, v in rest.items()}
    sessions: list[dict[str, str]] = []
    versions: dict[str, list[str]] = {}
    for environment in run.environments:
        machine = [str(environment["machine"])] if environment.get("machine") else []
        machine += [f"{environment['threads']} threads"] if environment.get("threads") else []
        started, git = moment(str(environment.get("started", ""))), str(environment.get("git") or "")
        sessions.append({"started": started, "git": git, "machine": ", ".join(machine)})
        for name, version in {"python": environment.get("python"), **(environment.get("versions") or {})}.items():
            history = versions.setdefault(name, [])
            if version is not None and (not history or history[-1] != str(version)):
                history.append(str(version))
    sets: list[dict[str, str]] = []
    data = run.run.get("data")
    for name, of_set in cast("dict[str, Any]", data if isinstance(data, dict) else {}).items():
        known = leaves(of_set if isinstance(of_set, dict) else {"sha256": of_set})
        problems, sha256 = known.pop("problems", None), str(known.pop("sha256", ""))
        if problems != 0:
            count = f"{problems:,}" if isinstance(problems, int) else "–"
            others = ", ".join(f"{key} {value}" for key, value in known.items())
            sets.append({"name": name.replace("/", ", "), "problems": count, "sha256": sha256, "rest": others})
    return {
        "sessions": sessions,
        # an arrow joins the versions of a package that a later session had in another one
        "software": [(name, " → ".join(history)) for name, history in versions.items() if history],
        "sets": sets,
        "facts": [(key.replace("_", " "), value) for key, value in facts.items() if value not in (None, "")],
        "folder": str(run.path),
    }


# The timeline inside the training steps.

LOCAL = "local"
"""Name of the run's own process among the workers."""
MOST_ROWS = 8
MOST_WORKERS = 12
"""Maximum number of workers of a step in addition to the run's own process: those that worked longest and shortest."""
MOST_BARS = 24
_COLORS = {"rollout": 0, "train": 1, "verify": 2, "old_logprobs": 3, "ref_logprobs": 5, "teacher_logprobs": 4}


class TimelineSpan(NamedTuple):
    """Work of one worker. ``start`` and ``end`` are in seconds since its step began."""

    worker: str
    what: str
    step: int
    start: float
    end: float


Lanes: TypeAlias = tuple[tuple[TimelineSpan, ...], ...]
"""Work in lanes. The spans of a lane do not overlap."""


def read_timeline(path: Path) -> tuple[TimelineSpan, ...]:
    """Read the spans of a run; empty if it recorded none.

    Raises:
        RunFolderError: a line is not a span.
    """
    spans: list[TimelineSpan] = []
    for line, row in read_lines(path):
        try:
            worker, what = str(row.get("worker", LOCAL)), str(row.get("what") or row["kind"])
            spans.append(TimelineSpan(worker, what, int(row["step"]), float(row["start"]), float(row["end"])))
        except (KeyError, TypeError, ValueError):
            raise RunFolderError(
                f"{path}:{line}: a span needs step (a whole number), start and end (seconds) and what or kind"
            ) from None
    return tuple(spans)


def timeline_rows(run: RecordedRun, spans: Sequence[TimelineSpan]) -> list[tuple[str, Lanes]]:
    """Return (label, lanes) of the typical and the slowest step of every stage."""
    by_step = _by_step(spans)
    ends = {step: max(span.end for span in inside) for step, inside in by_step.items()}
    chosen: dict[int, str] = {}
    for _, first, last, _ in run.stages:
        length = {step: end for step, end in ends.items() if first <= step <= last}
        if length:
            middle = median(length.values())
            chosen.setdefault(min(length, key=lambda step: abs(length[step] - middle)), "typical")
            chosen.setdefault(max(length, key=lambda step: length[step]), "slowest")
    rows: list[tuple[str, Lanes]] = []
    for step, word in sorted(chosen.items())[-MOST_ROWS:]:
        shown, left_out = _extremes(by_step[step])
        label = f"step {step}, {word}" + (f" (without {left_out} workers in between)" if left_out else "")
        rows.append((label, _lanes(shown)))
    return rows


def _by_step(spans: Iterable[TimelineSpan]) -> dict[int, list[TimelineSpan]]:
    found: dict[int, list[TimelineSpan]] = {}
    for span in spans:
        found.setdefault(span.step, []).append(span)
    return dict(sorted(found.items()))


def _extremes(spans: Sequence[TimelineSpan]) -> tuple[list[TimelineSpan], int]:
    """Return the spans of at most ``MOST_WORKERS`` workers and the run's own process, and the number left out."""
    seconds: dict[str, float] = {}
    for span in spans:
        if span.worker != LOCAL:
            seconds[span.worker] = seconds.get(span.worker, 0.0) + span.end - span.start
    by_work = sorted(seconds, key=lambda worker: seconds[worker])
    most = MOST_WORKERS // 2
    left_out = set(by_work[most:-most] if len(by_work) > MOST_WORKERS else ())
    return [span for span in spans if span.worker not in left_out], len(left_out)


def _lanes(spans: Sequence[TimelineSpan]) -> Lanes:
    """Return each worker's spans in one lane, or in several where they overlap."""
    lanes: list[list[TimelineSpan]] = []

    def order(span: TimelineSpan) -> tuple[str, int, float]:
        name, _, number = span.worker.rpartition(" ")  # ``replica 2`` comes before ``replica 10``
        return (name, int(number), span.start) if number.isdecimal() else (span.worker, 0, span.start)

    for span in sorted(spans, key=order):
        free = next((lane for lane in lanes if lane[-1].worker == span.worker and lane[-1].end <= span.start), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return tuple(tuple(lane) for lane in lanes)


def timeline_view(rows: Sequence[tuple[str, Lanes]]) -> FigureView:
    """Return a figure with a row per step and seconds on the x axis. Time without a bar is bookkeeping."""
    left, right, top, lane_height, gap = 112, 20, 8, 15, 9
    spans = [span for _, lanes in rows for lane in lanes for span in lane]
    longest = max((span.end for span in spans), default=1.0)
    scale = (WIDTH - left - right) / longest
    bars: list[str] = []
    y = top + gap / 2
    for label, lanes in rows:
        # lanes of several workers have the workers' names, below a line with the step
        named = len({lane[0].worker for lane in lanes}) > 1
        middle = y + lane_height * (1 if named else len(lanes)) / 2 + 4
        bars.append(text(4 if named else left - 8, middle, label, "start" if named else "end"))
        y += lane_height * named
        shown = ""
        for lane in lanes:
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
    ticks = [(left + tick * scale, number_text(tick)) for tick in nice_ticks(0.0, longest, 5) if tick <= longest]
    parts = [*x_grid(ticks, top, bottom), *bars, text((left + WIDTH - right) / 2, bottom + 32, "seconds of the step")]
    names = dict.fromkeys(span.what for span in spans)
    described: list[str] = []
    for label, lanes in rows:
        first = [span for lane in lanes for span in lane][:6]
        described.append(f"{label}: " + ", ".join(f"{s.what} {duration(s.end - s.start)}" for s in first))
    return figure_view(
        "timeline",
        "Inside a step",
        (bottom + 38, parts),
        described=described,
        legend=[LegendEntry(name.replace("_", " "), "area", _COLORS.get(name, 4)) for name in names],
        rows=[["step", "worker", "what", "start", "end"], *([s.step, s.worker, s.what, s.start, s.end] for s in spans)],
        note="The step of median length and the slowest one of each stage. Judging during generation has no bar of "
        "its own. Time without a bar is bookkeeping.",
    )


def busy_seconds(spans: Iterable[TimelineSpan], end: float) -> float:
    """Return the seconds up to ``end`` that at least one of the spans covers."""
    busy = reached = 0.0
    for span in sorted(spans, key=lambda s: s.start):
        begin, stop = max(span.start, reached), min(span.end, end)
        if stop > begin:
            busy += stop - begin
            reached = stop
    return busy


def idle_shares(run: RecordedRun, spans: Sequence[TimelineSpan]) -> dict[str, Points]:
    """Return by worker (step, share of the step's wall clock without work), the most idle worker first.

    A worker without work in a step was idle in all of it. A step without recorded length ends with its last span.
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
    """Return a chart of the idle share of the most idle workers by step."""
    marks, most = stage_marks(run), len(PALETTE)
    note = "Share of the step's wall clock in which a worker had no measured work."
    single = len(shares) == 1  # raw values of many workers would hide each other
    if single:
        note += " One process does everything in turn: the rest is bookkeeping."
    elif len(shares) > most:
        note += f" The {most} most idle of {len(shares)} workers."
    breaks = [x for x, _ in marks]
    drawn = [with_running_mean(w, points, i, breaks) for i, (w, points) in enumerate(list(shares.items())[:most])]
    return Chart(
        key="idle",
        title="Idle time by worker",
        unit="percent",
        y_low=0.0,
        compact=True,
        note=note,
        series=tuple(series for lines in drawn for series in lines[: 2 if single else 1]),
        marks=marks,
        x_range=steps_range(run),
    )


def idle_bars(shares: Mapping[str, Points]) -> FigureView:
    """Return a figure of each worker's mean over all steps."""
    means = [(worker, _mean(points), percent(_mean(points))) for worker, points in list(shares.items())[:MOST_BARS]]
    title, x_name, note = (
        "Idle time, mean over the run",
        "share of the steps' wall clock",
        "The most idle worker first.",
    )
    return bars_view("idle_by_worker", title, x_name, means, note, unit="percent", color=4)


def _mean(points: Points) -> float:
    return mean(y for _, y in points) if points else 0.0


# The page on a local server, rendered again whenever the run has written.

HOST = "127.0.0.1"
REFRESH_SECONDS = 10
"""Interval at which the browser reloads the page while the run is in progress."""
_WATCHED = ("run.json", "metrics.jsonl", "events.jsonl", "timeline.jsonl", "evaluations", "rollouts")


class LiveReport:
    """The current page of a run folder.

    Raises:
        RunFolderError: not a run folder, or a file in it is corrupt.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = Lock()
        self._written: object = None
        self.running = True
        self.page = ""
        self.refresh()

    def refresh(self) -> str:
        """Return the page, rendered again if a file of the run has changed."""
        with self._lock:
            paths = [path for name in _WATCHED if (path := self._folder / name).exists()]
            written = [(path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in paths]
            if written != self._written:
                run = read_run(self._folder)
                self.page, self.running, self._written = report_page(run), run.status == "running", written
            return self.page


def report_server(folder: Path, port: int) -> ThreadingHTTPServer:
    """Return a server of the run's page at ``/`` on the loopback interface. The caller runs and closes it.

    Args:
        folder: the run folder.
        port: 0 for a free one.

    Raises:
        RunFolderError: not a run folder, or a file in it is corrupt.
        ValueError: the port is taken.
    """
    report = LiveReport(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # a foreign page may send a browser here under another host name (DNS rebinding)
            if (self.headers.get("Host") or "").rpartition(":")[0] not in (HOST, "localhost"):
                self.send_error(HTTPStatus.FORBIDDEN)
            elif self.path != "/":
                self.send_error(HTTPStatus.NOT_FOUND)
            else:
                try:
                    page = report.refresh().encode("utf-8", "replace")
                except RunFolderError:  # a file is being written at this moment: the previous page
                    page = report.page.encode("utf-8", "replace")
                self.send_response(HTTPStatus.OK)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.send_header("Content-Length", str(len(page)))
                self.send_header("Cache-Control", "no-store")
                if report.running:
                    self.send_header("Refresh", str(REFRESH_SECONDS))
                self.end_headers()
                self.wfile.write(page)

        def log_message(self, format: str, *args: object) -> None:
            """Do not log requests."""

    try:
        return ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        raise ValueError(
            f"port {port} of {HOST} cannot be opened: {error.strerror}; --port 0 takes a free one"
        ) from None
