"""Timeline of a step: choice of steps, lanes, positions of bars, and idle time."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from magicrl.reporting.read_folders import RunFolderError, read_run
from magicrl.reporting.run_page import (
    Lanes,
    TimelineSpan,
    busy_seconds,
    idle_bars,
    idle_chart,
    idle_shares,
    read_timeline,
    run_blocks,
    timeline_rows,
    timeline_view,
)


def rows_of(folder: Path) -> list[tuple[str, Lanes]]:
    return timeline_rows(read_run(folder), read_timeline(folder / "timeline.jsonl"))


def test_each_stage_shows_its_typical_and_its_slowest_step(rich_run: Path) -> None:
    path = rich_run / "timeline.jsonl"
    path.write_text(
        path.read_text().replace('"step": 7, "start": 1.175, "end": 2.5', '"step": 7, "start": 1, "end": 9')
    )
    labels = [label for label, _ in rows_of(rich_run)]
    assert labels[:2] == ["step 1, typical", "step 7, slowest"]
    assert len(labels) == 3, "where all are alike one step stands for the stage"


def test_each_worker_has_its_lane_and_its_overlapping_work_a_second_one(rich_run: Path) -> None:
    row = rows_of(rich_run)[0]
    assert [[span.what for span in lane] for lane in row[1]] == [["verify"], ["rollout", "train"]]
    path = rich_run / "timeline.jsonl"
    path.write_text(path.read_text().replace('"judge"', '"local"'))
    row = rows_of(rich_run)[0]
    assert [[span.what for span in lane] for lane in row[1]] == [["rollout", "train"], ["verify"]]


def test_bars_are_as_long_as_the_work(rich_run: Path) -> None:
    rows = rows_of(rich_run)
    view = timeline_view(rows)
    ElementTree.fromstring(view.svg)
    bars = re.findall(r'class="area f(\d)" x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', view.svg)
    verify, rollout, train = [(float(x), float(w)) for _, x, w in bars[:3]]
    assert verify[1] / rollout[1] == pytest.approx(1.0 / (1 + 1 / 40), rel=0.01)
    assert sum(rollout) == pytest.approx(train[0], abs=0.2)
    assert [words for _, words in view.legend] == ["verify", "rollout", "train"]
    exported = list(csv.DictReader(io.StringIO(base64.b64decode(view.csv.partition(",")[2]).decode())))
    assert exported[0] == {"step": "1", "worker": "judge", "what": "verify", "start": "0.5", "end": "1.5"}


def test_of_many_workers_those_that_worked_longest_and_shortest_are_drawn(run_folder: Path) -> None:
    workers = [("local", 9.0), *((f"replica {n}", 1.0 + n / 10) for n in range(20))]
    lines = [
        json.dumps({"worker": worker, "what": "rollout", "step": 1, "start": 0, "end": seconds})
        for worker, seconds in workers
    ]
    (run_folder / "timeline.jsonl").write_text("\n".join(lines) + "\n")
    (row,) = rows_of(run_folder)
    shown = ["local", *(f"replica {n}" for n in (*range(6), *range(14, 20)))]
    assert [lane[0].worker for lane in row[1]] == shown, "and by their numbers: 2 before 14"
    assert row[0] == "step 1, typical (without 8 workers in between)"


def test_a_broken_span_is_named(rich_run: Path) -> None:
    (rich_run / "timeline.jsonl").write_text('{"step": 1, "start": 0}\n')
    with pytest.raises(RunFolderError, match=r"timeline\.jsonl:1: a span needs"):
        rows_of(rich_run)


def test_a_run_without_timeline_has_no_rows(run_folder: Path) -> None:
    assert rows_of(run_folder) == []


def test_lanes_of_several_workers_carry_their_names(rich_run: Path) -> None:
    drawn = timeline_view(rows_of(rich_run)).svg
    labels = re.findall(r'y="([\d.]+)" text-anchor="(?:start|end)">([^<]+)<', drawn)
    heights = {text: float(y) for y, text in reversed(labels)}
    assert heights["step 1, typical"] < heights["judge"] < heights["local"], "a step's line, then its workers'"
    bars = [float(y) for y in re.findall(r'class="area f\d" x="[\d.]+" y="([\d.]+)"', drawn)]
    assert bars[0] < heights["judge"] < bars[0] + 15


def span(worker: str, start: float, end: float, step: int = 1) -> TimelineSpan:
    return TimelineSpan(worker=worker, what="rollout", step=step, start=start, end=end)


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
    assert "b: 50.0 %" in idle_bars(shares).svg


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
