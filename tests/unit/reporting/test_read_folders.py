"""Reading run folders: complete, new, truncated and broken ones."""

from __future__ import annotations

import json
import os
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from magicrl.commands.watch import WatchedRun
from magicrl.reporting.read_folders import RunFolderError, read_run
from magicrl.reporting.run_list import run_folders
from magicrl.reporting.run_page import write_run_page


def test_a_whole_run_is_read(run_folder: Path) -> None:
    run = read_run(run_folder)
    assert (run.name, run.status, len(run.metrics), len(run.events)) == ("small", "finished", 40, 2)
    assert [tuple(rest) for _, *rest in run.stages] == [(1, 20, 32), (21, 40, 64)]
    after = run.evaluation("after", "test")
    assert after is not None
    assert after.temperatures[1.0].accuracy.mean == 0.90
    assert after.temperatures[1.0].pass_at[16].mean == 0.9
    assert after.samples[0].references == ("7", "seven")
    assert run.sets == ("test",)


def test_points_leave_out_what_is_missing_and_fall_back(run_folder: Path) -> None:
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "stage": 1, "values": {"length/mean": Infinity, "entropy/target": NaN}}\n')
    run = read_run(run_folder)
    assert run.points("length/mean")[-1][0] == run.points("entropy/target")[-1][0] == 40.0, "no figure shows infinity"
    assert run.points("learner/clip_ratio") == ()
    assert run.points("nowhere") == ()
    assert run.points("nowhere", "length/mean")[3] == (4.0, 11.0)


def test_a_run_that_has_only_begun_is_read(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"schema_version": 1, "status": "running"}')
    run = read_run(tmp_path)
    assert (run.metrics, run.events, run.evaluations, run.stages) == ((), (), (), [])
    assert run.name == tmp_path.name


def test_a_torn_last_line_is_left_out(run_folder: Path) -> None:
    path = run_folder / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 41, "stage": 1, "val')
    assert [row.step for row in read_run(run_folder).metrics][-1] == 40


def test_steps_recorded_again_after_a_resume_replace_the_old_ones(run_folder: Path) -> None:
    path = run_folder / "metrics.jsonl"
    again = {"step": 31, "stage": 1, "values": {"train/accuracy/mean": 0.123}}
    path.write_text(path.read_text() + json.dumps(again) + "\n")
    metrics = read_run(run_folder).metrics
    assert [row.step for row in metrics] == list(range(1, 32))
    assert metrics[-1].values["train/accuracy/mean"] == 0.123


ROW = '{"step": 1, "stage": 0, "values": {}}\n'


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("run.json", "{", "run.json:1: not valid JSON"),
        ("run.json", "[]", "expected a JSON object, found list"),
        ("run.json", '{"schema_version": 99}', "schema_version 99 is newer"),
        ("config.toml", "a = ", "config.toml: not valid TOML"),
        ("metrics.jsonl", ROW + ROW[:20] + "\n" + ROW, "metrics.jsonl:2: not valid JSON"),
        ("events.jsonl", '{"kind": "resume", "step": 1}\n{broken}\n', "events.jsonl:2"),
        ("metrics.jsonl", '{"step": "x", "stage": 0, "values": {}}\n', "metrics.jsonl:1: a line needs step"),
        ("evaluations/after.json", '{"name": "after"}', "after.json: temperatures: Field required"),
        ("evaluations/after.json", '{"name": "after", "temperatures": {"hot": {}}}', "after.json: temperatures.hot"),
    ],
)
def test_what_is_corrupt_is_named(run_folder: Path, file: str, text: str, message: str) -> None:
    (run_folder / file).write_text(text)
    with pytest.raises(RunFolderError, match=re.escape(message)):
        read_run(run_folder)


def test_no_run_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no such folder"):
        read_run(tmp_path / "nowhere")
    (tmp_path / "log").touch()
    with pytest.raises(RunFolderError, match="log: a file, not a folder; give the run folder"):
        read_run(tmp_path / "log")
    with pytest.raises(RunFolderError, match=r"run\.json is missing"):
        read_run(tmp_path)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
    with pytest.raises(RunFolderError, match=rf"give a run in it: {tmp_path / 'one'}, {tmp_path / 'two'}$"):
        read_run(tmp_path)


def test_a_run_that_was_killed_while_its_initial_model_was_trained_is_known(tmp_path: Path) -> None:
    folder = tmp_path / "young"
    folder.mkdir()
    (folder / "config.toml").write_text('[run]\nname = "quickstart"\nseed = 3\n')
    with pytest.raises(RunFolderError, match=r"run\.json is missing"):
        read_run(folder)  # only a recipe, such as that of a model
    (folder / ".lock").write_text(str(2**31))
    run = read_run(folder)
    assert (run.name, run.shown_status, run.run["seed"], run.metrics) == ("quickstart", "killed?", 3, ())
    assert datetime.fromisoformat(run.environments[0]["started"]) <= datetime.now(UTC)
    assert run_folders(tmp_path) == [folder]
    assert "killed? continue with --resume" in WatchedRun(folder).state()
    write_run_page(folder)
    assert "<dd>killed?</dd>" in (folder / "report.html").read_text()
    (folder / ".lock").write_text(str(os.getpid()))
    assert WatchedRun(folder).state() == "quickstart: running"
