"""Idle time of workers, from the spans of a timeline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from magicrl.reporting.read_folders import read_run
from magicrl.reporting.run_page import busy_seconds, idle_bars, idle_chart, idle_shares, run_blocks
from magicrl.reporting.timeline import Span, read_timeline


def span(worker: str, start: float, end: float, step: int = 1) -> Span:
    return Span(worker=worker, what="rollout", step=step, start=start, end=end)


def test_overlapping_work_is_busy_once_and_only_inside_the_step() -> None:
    spans = [span("w", 2.0, 3.0), span("w", 0.0, 1.0), span("w", 0.5, 1.5), span("w", 0.6, 0.7), span("w", 9.0, 12.0)]
    assert busy_seconds(spans, 10.0) == pytest.approx(1.5 + 1.0 + 1.0)


def test_idle_is_the_share_of_the_steps_wall_clock(rich_run: Path) -> None:
    """Steps are recorded as 1.75 s and their spans as 2.5 s: the longer one counts."""
    run = read_run(rich_run)
    shares = idle_shares(run, read_timeline(rich_run / "timeline.jsonl"))
    assert list(shares) == ["judge", "local"], "the most idle first"
    assert shares["judge"][0] == (1.0, pytest.approx(1 - 1.0 / 2.5))
    assert shares["local"][0] == (1.0, pytest.approx(0.0))


def test_a_worker_without_work_in_a_step_idled_through_it(run_folder: Path) -> None:
    rows = [("a", 1), ("b", 1), ("a", 2)]
    lines = [
        json.dumps({"worker": worker, "what": "rollout", "step": step, "start": 0, "end": 1.75})
        for worker, step in rows
    ]
    (run_folder / "timeline.jsonl").write_text("\n".join(lines) + "\n")
    shares = idle_shares(read_run(run_folder), read_timeline(run_folder / "timeline.jsonl"))
    assert shares["b"] == ((1.0, 0.0), (2.0, 1.0))
    assert idle_bars(shares).bars[0].value == 0.5


def test_the_page_has_time_by_part_the_longest_response_and_idle_time(rich_run: Path) -> None:
    path = rich_run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["values"] |= {"time/longest_response": 0.75, "verify/seconds": 0.5, "time/verify_waited": 0.01}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    block = next(block for block in run_blocks(read_run(rich_run)) if block.key == "time")
    views = [view.name for panel in block.data["panels"] for view in panel]
    assert views == ["step_time", "longest_response", "judging", "timeline", "idle", "idle_by_worker"]
    assert block.hover["longest_response"]["series"][0]["points"][0] == [1.0, 0.75]
    assert set(block.hover) == {"step_time", "longest_response", "judging", "idle"}


def test_one_process_says_what_its_idle_time_is(rich_run: Path) -> None:
    run = read_run(rich_run)
    spans = [s for s in read_timeline(rich_run / "timeline.jsonl") if s.worker == "local"]
    assert "bookkeeping" in idle_chart(run, idle_shares(run, spans)).note
    assert "bookkeeping" not in idle_chart(run, idle_shares(run, [*spans, span("judge", 0, 1)])).note
