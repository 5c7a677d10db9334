"""How much of each step every worker had nothing to do, from the spans of ``timeline.jsonl``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from magicrl.reporting.bars import Bar, BarPlot
from magicrl.reporting.canvas import PALETTE
from magicrl.reporting.charts import Chart, Points, with_running_mean
from magicrl.reporting.figures import stage_marks
from magicrl.reporting.run_folder import RecordedRun
from magicrl.reporting.timeline import Span
from magicrl.reporting.wording import percent

MOST_LINES = len(PALETTE)
MOST_BARS = 24


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
        x_range=_range(run),
    )


def idle_bars(shares: Mapping[str, Points]) -> BarPlot:
    """Each worker's mean over all steps."""
    return BarPlot(
        key="idle_by_worker",
        title="Idle time, mean over the run",
        x_name="share of the steps' wall clock",
        unit="percent",
        color=4,
        bars=tuple(
            Bar(name=worker, value=_mean(points), words=percent(_mean(points)))
            for worker, points in list(shares.items())[:MOST_BARS]
        ),
    )


def _mean(points: Points) -> float:
    return sum(y for _, y in points) / len(points) if points else 0.0


def _range(run: RecordedRun) -> tuple[float, float] | None:
    """The x axis of the figures above."""
    steps = [float(row.step) for row in run.metrics]
    return (0.0 if run.sets else min(steps), max(steps)) if steps else None
