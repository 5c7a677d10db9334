"""When each part of a training step ran: ``timeline.jsonl`` as bars, for a few steps of the run."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from markupsafe import Markup, escape

from magicrl.reporting.canvas import WIDTH, Entry, picture
from magicrl.reporting.charts import nice_ticks
from magicrl.reporting.read_folders import RecordedRun, RunFolderError, read_lines
from magicrl.reporting.wording import duration, number

LOCAL = "local"
"""The worker that is the run's own process."""
LEFT, RIGHT, TOP, LANE, GAP, BOTTOM = 112, 20, 8, 15, 9, 38
MOST_ROWS = 8
MOST_WORKERS = 12
"""Of a step, beside the run's own process; of more there are those that worked longest and shortest."""
MOST_LETTERS = 15
"""Of a worker's name."""
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


def timeline_legend(rows: Sequence[TimelineRow]) -> list[Entry]:
    """What the colours mean, in order of first appearance."""
    names = dict.fromkeys(span.what for row in rows for lane in row.lanes for span in lane)
    return [Entry(label=name.replace("_", " "), sign="area", color=_COLORS.get(name, 4)) for name in names]


def timeline_height(rows: Sequence[TimelineRow]) -> float:
    """Of the drawing, in SVG units."""
    return TOP + sum(LANE * (len(row.lanes) + _titled(row)) + GAP for row in rows) + BOTTOM


def draw_timeline(rows: Sequence[TimelineRow], *, alone: bool = False) -> Markup:
    """A row a step, seconds to the right; what no bar covers is bookkeeping."""
    longest = max((span.end for row in rows for lane in row.lanes for span in lane), default=1.0)
    ticks = [tick for tick in nice_ticks(0.0, longest, 5) if tick <= longest]
    scale = (WIDTH - LEFT - RIGHT) / longest
    height = timeline_height(rows) - BOTTOM
    parts: list[str] = []
    for tick in ticks:
        x = LEFT + tick * scale
        parts.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{height}"/>'
            f'<text class="tick" x="{x:.1f}" y="{height + 16}" text-anchor="middle">{number(tick)}</text>'
        )
    y = float(TOP + GAP / 2)
    for row in rows:
        middle = y + LANE * (1 if _titled(row) else len(row.lanes)) / 2 + 4
        anchor, x = ("start", 4) if _titled(row) else ("end", LEFT - 8)
        parts.append(f'<text class="tick" x="{x}" y="{middle:.1f}" text-anchor="{anchor}">{escape(row.label)}</text>')
        y += LANE * _titled(row)
        named = ""
        for lane in row.lanes:
            if _titled(row) and lane[0].worker != named:
                named = lane[0].worker
                parts.append(
                    f'<text class="tick" x="{LEFT - 8}" y="{y + LANE / 2 + 3:.1f}" text-anchor="end">'
                    f"{escape(_short(named))}</text>"
                )
            parts += [_bar(span, LEFT + span.start * scale, (span.end - span.start) * scale, y) for span in lane]
            y += LANE
        y += GAP
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text class="tick" x="{middle:.1f}" y="{height + 32}" text-anchor="middle">seconds of the step</text>'
    )
    return picture(
        key="timeline",
        title="Inside a step",
        description="Inside a step. " + "; ".join(_words(row) for row in rows),
        height=height + BOTTOM,
        body="".join(parts),
        legend=timeline_legend(rows),
        alone=alone,
    )


def timeline_csv(rows: Sequence[TimelineRow]) -> str:
    """The drawn spans, a row each."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["step", "worker", "what", "start", "end"])
    for row in rows:
        writer.writerows([s.step, s.worker, s.what, s.start, s.end] for lane in row.lanes for s in lane)
    return out.getvalue()


def _bar(span: Span, x: float, width: float, y: float) -> str:
    words = f"{span.what.replace('_', ' ')}: {duration(span.end - span.start)} ({span.worker})"
    return (
        f'<rect class="area f{_COLORS.get(span.what, 4)}" x="{x:.1f}" y="{y:.1f}" width="{max(1.0, width):.1f}" '
        f'height="{LANE - 2}"><title>{escape(words)}</title></rect>'
    )


def _titled(row: TimelineRow) -> bool:
    """Whether lanes carry the names of workers, below a line with the step's."""
    return len({lane[0].worker for lane in row.lanes}) > 1


def _short(worker: str) -> str:
    return worker if len(worker) <= MOST_LETTERS else worker[: MOST_LETTERS - 1] + "…"


def _words(row: TimelineRow) -> str:
    spans = [span for lane in row.lanes for span in lane]
    return f"{row.label}: " + ", ".join(f"{s.what} {duration(s.end - s.start)}" for s in spans[:6])
