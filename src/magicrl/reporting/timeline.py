"""What every worker did inside the training steps (``timeline.jsonl``): bars of a few steps, and idle time of all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

from magicrl.reporting.charts import (
    PALETTE,
    WIDTH,
    Chart,
    Entry,
    FigureView,
    Points,
    bars_view,
    box,
    figure_view,
    nice_ticks,
    text,
    x_grid,
)
from magicrl.reporting.curves import stage_marks, steps_range, with_running_mean
from magicrl.reporting.read_folders import RecordedRun, RunFolderError, read_lines
from magicrl.reporting.wording import duration, number, percent

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
