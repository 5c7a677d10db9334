"""What every worker did inside the training steps (``timeline.jsonl``): bars of a few steps, and idle time of all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from markupsafe import escape

from magicrl.reporting.charts import (
    PALETTE,
    WIDTH,
    Chart,
    Entry,
    FigureView,
    Points,
    figure_view,
    nice_ticks,
    text,
    x_grid,
)
from magicrl.reporting.curves import stage_marks, steps_range, with_running_mean
from magicrl.reporting.read_folders import RecordedRun, RunFolderError, read_lines
from magicrl.reporting.row_charts import bars_view
from magicrl.reporting.wording import duration, number, percent

LOCAL = "local"
"""The worker that is the run's own process."""
MOST_ROWS = 8
MOST_WORKERS = 12
"""Of a step, beside the run's own process; of more there are those that worked longest and shortest."""
MOST_LINES = len(PALETTE)
MOST_BARS = 24
_COLORS = {"rollout": 0, "train": 1, "verify": 2, "old_logprobs": 3, "ref_logprobs": 5}


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Work of one worker: ``start`` and ``end`` in seconds since its step began."""

    worker: str
    what: str
    step: int
    start: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelineRow:
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
            spans.append(_span(row))
        except (KeyError, TypeError, ValueError):
            raise RunFolderError(
                f"{path}:{line}: a span needs step (a whole number), start and end (seconds) and what or kind"
            ) from None
    return tuple(spans)


def _span(row: Mapping[str, Any]) -> Span:
    return Span(
        worker=str(row.get("worker", LOCAL)),
        what=str(row.get("what") or row["kind"]),
        step=int(row["step"]),
        start=float(row["start"]),
        end=float(row["end"]),
    )


def chosen_steps(run: RecordedRun, spans: Iterable[Span]) -> list[tuple[int, str]]:
    """Steps worth seeing, with a word on each: of every stage the typical and the slowest one."""
    ends: dict[int, float] = {}
    for span in spans:
        ends[span.step] = max(span.end, ends.get(span.step, 0.0))
    chosen: dict[int, str] = {}
    for stage in run.stages:
        length = {step: end for step, end in ends.items() if stage.first_step <= step <= stage.last_step}
        if length:
            middle = median(length.values())
            chosen.setdefault(min(length, key=lambda step: abs(length[step] - middle)), "typical")
            chosen.setdefault(max(length, key=lambda step: length[step]), "slowest")
    return sorted(chosen.items())[-MOST_ROWS:]


def timeline_rows(run: RecordedRun, spans: Sequence[Span]) -> list[TimelineRow]:
    """The drawing's rows, of a run's ``spans``."""
    rows: list[TimelineRow] = []
    for step, word in chosen_steps(run, spans):
        shown, left_out = _extremes([span for span in spans if span.step == step])
        label = f"step {step}, {word}" + (f" (without {left_out} workers in between)" if left_out else "")
        rows.append(TimelineRow(label=label, lanes=_lanes(shown)))
    return rows


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
    longest = max((span.end for row in rows for lane in row.lanes for span in lane), default=1.0)
    scale = (WIDTH - left - right) / longest
    # lanes of several workers carry their names, below a line with the step's
    titled = [len({lane[0].worker for lane in row.lanes}) > 1 for row in rows]
    bottom = top + sum(lane_height * (len(row.lanes) + named) + gap for row, named in zip(rows, titled, strict=True))
    ticks = [tick for tick in nice_ticks(0.0, longest, 5) if tick <= longest]
    parts = x_grid([(left + tick * scale, number(tick)) for tick in ticks], top, bottom)
    y = float(top + gap / 2)
    for row, named in zip(rows, titled, strict=True):
        middle = y + lane_height * (1 if named else len(row.lanes)) / 2 + 4
        parts.append(text(4 if named else left - 8, middle, row.label, "start" if named else "end"))
        y += lane_height * named
        shown = ""
        for lane in row.lanes:
            if named and lane[0].worker != shown:
                shown = lane[0].worker
                words = shown if len(shown) <= 15 else shown[:14] + "…"
                parts.append(text(left - 8, y + lane_height / 2 + 3, words, "end"))
            for span in lane:
                words = f"{span.what.replace('_', ' ')}: {duration(span.end - span.start)} ({span.worker})"
                parts.append(
                    f'<rect class="area f{_COLORS.get(span.what, 4)}" x="{left + span.start * scale:.1f}" y="{y:.1f}" '
                    f'width="{max(1.0, (span.end - span.start) * scale):.1f}" height="{lane_height - 2}">'
                    f"<title>{escape(words)}</title></rect>"
                )
            y += lane_height
        y += gap
    parts.append(text((left + WIDTH - right) / 2, bottom + 32, "seconds of the step"))
    spans = [span for row in rows for lane in row.lanes for span in lane]
    names = dict.fromkeys(span.what for span in spans)
    return figure_view(
        key="timeline",
        title="Inside a step",
        description="; ".join(_words(row) for row in rows),
        height=bottom + 38,
        body=parts,
        legend=[Entry(label=name.replace("_", " "), sign="area", color=_COLORS.get(name, 4)) for name in names],
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
    by_step: dict[int, list[Span]] = {}
    for span in spans:
        by_step.setdefault(span.step, []).append(span)
    lengths = dict(run.points("time/step"))
    found: dict[str, list[tuple[float, float]]] = {worker: [] for worker in sorted({s.worker for s in spans})}
    for step, inside in sorted(by_step.items()):
        last = max(span.end for span in inside)
        length = max(lengths.get(float(step), last), last)
        for worker, points in found.items():
            busy = busy_seconds((s for s in inside if s.worker == worker), length)
            points.append((float(step), 1.0 - busy / length if length > 0 else 0.0))
    return dict(sorted(((w, tuple(p)) for w, p in found.items()), key=lambda item: -_mean(item[1])))


def idle_chart(run: RecordedRun, shares: Mapping[str, Points]) -> Chart:
    """Idle share of the most idle workers, step by step."""
    marks = stage_marks(run)
    note = "Share of the step's wall clock in which a worker had no measured work."
    alone = len(shares) == 1  # raw values of many would hide each other
    if alone:
        note += " One process does everything in turn: what is left is bookkeeping."
    elif len(shares) > MOST_LINES:
        note += f" The {MOST_LINES} most idle of {len(shares)} workers."
    return Chart(
        key="idle",
        title="Idle time by worker",
        unit="percent",
        y_low=0.0,
        compact=True,
        note=note,
        series=tuple(
            series
            for color, (worker, points) in enumerate(list(shares.items())[:MOST_LINES])
            for series in with_running_mean(worker, points, color, [mark.x for mark in marks])[: 2 if alone else 1]
        ),
        marks=marks,
        x_range=steps_range(run),
    )


def idle_bars(shares: Mapping[str, Points]) -> FigureView:
    """Each worker's mean over all steps."""
    means = [(worker, _mean(points), percent(_mean(points))) for worker, points in list(shares.items())[:MOST_BARS]]
    title = "Idle time, mean over the run"
    note = "The most idle first."
    return bars_view("idle_by_worker", title, "share of the steps' wall clock", means, note, unit="percent", color=4)


def _mean(points: Points) -> float:
    return sum(y for _, y in points) / len(points) if points else 0.0
