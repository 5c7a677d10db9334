"""Inside a step: which steps, which lanes, and bars where the seconds say."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from magicrl.reporting.read_folders import RunFolderError, read_run
from magicrl.reporting.timeline import (
    TimelineRow,
    draw_timeline,
    read_timeline,
    timeline_csv,
    timeline_legend,
    timeline_rows,
)


def rows_of(folder: Path) -> list[TimelineRow]:
    return timeline_rows(read_run(folder), read_timeline(folder / "timeline.jsonl"))


def test_each_stage_shows_its_typical_and_its_slowest_step(rich_run: Path) -> None:
    path = rich_run / "timeline.jsonl"
    path.write_text(
        path.read_text().replace('"step": 7, "start": 1.175, "end": 2.5', '"step": 7, "start": 1, "end": 9')
    )
    labels = [row.label for row in rows_of(rich_run)]
    assert labels[:2] == ["step 1, typical", "step 7, slowest"]
    assert len(labels) == 3, "where all are alike one step stands for the stage"


def test_work_of_two_workers_lies_in_two_lanes(rich_run: Path) -> None:
    row = rows_of(rich_run)[0]
    assert [[span.what for span in lane] for lane in row.lanes] == [["verify"], ["rollout", "train"]]


def test_overlapping_work_of_one_worker_lies_in_two_lanes(rich_run: Path) -> None:
    path = rich_run / "timeline.jsonl"
    path.write_text(path.read_text().replace('"judge"', '"local"'))
    row = rows_of(rich_run)[0]
    assert [[span.what for span in lane] for lane in row.lanes] == [["rollout", "train"], ["verify"]]


def test_bars_are_as_long_as_the_work(rich_run: Path) -> None:
    rows = rows_of(rich_run)
    for alone in (False, True):
        ElementTree.fromstring(draw_timeline(rows, alone=alone))
    bars = re.findall(r'class="area f(\d)" x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', draw_timeline(rows))
    verify, rollout, train = [(float(x), float(w)) for _, x, w in bars[:3]]
    assert verify[1] / rollout[1] == pytest.approx(1.0 / (1 + 1 / 40), rel=0.01)
    assert sum(rollout) == pytest.approx(train[0], abs=0.2)
    assert [entry.label for entry in timeline_legend(rows)] == ["verify", "rollout", "train"]


def test_of_many_workers_those_that_worked_longest_and_shortest_are_drawn(run_folder: Path) -> None:
    workers = [("local", 9.0), *((f"replica {n}", 1.0 + n / 10) for n in range(20))]
    lines = [
        json.dumps({"worker": worker, "what": "rollout", "step": 1, "start": 0, "end": seconds})
        for worker, seconds in workers
    ]
    (run_folder / "timeline.jsonl").write_text("\n".join(lines) + "\n")
    (row,) = rows_of(run_folder)
    shown = ["local", *(f"replica {n}" for n in (*range(6), *range(14, 20)))]
    assert [lane[0].worker for lane in row.lanes] == shown, "and by their numbers: 2 before 14"
    assert row.label == "step 1, typical (without 8 workers in between)"


def test_the_export_holds_the_spans(rich_run: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(timeline_csv(rows_of(rich_run)))))
    assert rows[0] == {"step": "1", "worker": "judge", "what": "verify", "start": "0.5", "end": "1.5"}


def test_a_broken_span_is_named(rich_run: Path) -> None:
    (rich_run / "timeline.jsonl").write_text('{"step": 1, "start": 0}\n')
    with pytest.raises(RunFolderError, match=r"timeline\.jsonl:1: a span needs"):
        rows_of(rich_run)


def test_a_run_without_timeline_has_no_rows(run_folder: Path) -> None:
    assert rows_of(run_folder) == []


def test_lanes_of_several_workers_carry_their_names(rich_run: Path) -> None:
    drawn = draw_timeline(rows_of(rich_run))
    labels = re.findall(r'y="([\d.]+)" text-anchor="(?:start|end)">([^<]+)<', drawn)
    heights = {text: float(y) for y, text in reversed(labels)}
    assert heights["step 1, typical"] < heights["judge"] < heights["local"], "a step's line, then its workers'"
    bars = [float(y) for y in re.findall(r'class="area f\d" x="[\d.]+" y="([\d.]+)"', drawn)]
    assert bars[0] < heights["judge"] < bars[0] + 15
