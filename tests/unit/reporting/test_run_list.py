"""``magicrl runs`` and ``magicrl report --serve`` over written run folders."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from magicrl.commands.main import app
from magicrl.config.errors import RecipeError
from magicrl.config.loader import load_train_recipe, to_toml
from magicrl.reporting import run_list
from magicrl.reporting.comparison_page import write_comparison_page
from magicrl.reporting.run_page import REFRESH_SECONDS, LiveReport, report_server


def told(capsys: pytest.CaptureFixture[str], *words: object, status: int = 0) -> str:
    assert app([*map(str, words)], result_action="return_value") == status
    return capsys.readouterr().out


def listed(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, dict[str, Any]]:
    return {row["run"]: row for row in json.loads(told(capsys, "runs", *words, "--json"))}


def test_what_each_run_came_to_and_what_was_changed(
    variant_folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = variant_folders[0] / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    for row, share in ((rows[9], 0.25), (rows[19], 0.75), (rows[29], 0.5)):
        row["values"]["validation/accuracy/mean"] = share
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = listed(capsys, tmp_path)
    assert set(found) == {path.name for path in variant_folders}
    first, last = found[variant_folders[0].name], found[variant_folders[-1].name]
    assert (first["best"], first["last"], first["steps"]) == (0.75, 0.5, 40)
    assert first["train"] == pytest.approx(0.4 + 0.01 * 38)  # the mean of steps 36 to 40
    assert first["test"] == pytest.approx(0.90)  # after training, at the highest temperature
    tested = variant_folders[1] / "evaluations" / "after.json"
    scores = json.loads(tested.read_text())
    accuracy = {"mean": 0.6, "low": 0.5, "high": 0.7}
    scores["temperatures"]["0.7"] = {**scores["temperatures"]["1.0"], "accuracy": accuracy}
    tested.write_text(json.dumps(scores))
    assert listed(capsys, tmp_path)[variant_folders[1].name]["test"] == 0.6, "at training's where it was tested"
    assert "algorithm.loss" not in first["changed"]  # the same as in the shipped recipe of this name
    assert last["changed"]["algorithm.loss"] == "ppo"
    for folder in variant_folders:
        facts = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps(facts | {"name": "mine"}))
    found = listed(capsys, tmp_path)  # No shipped recipe: shows the settings in which runs of one name differ.
    assert found[variant_folders[0].name]["changed"] == {"run.seed": 0, "algorithm.loss": "magic"}


def test_settings_are_held_against_the_shipped_recipe(tmp_path: Path, make_run: Callable[[str], Path]) -> None:
    folder = make_run("lr")
    config = load_train_recipe(Path("quickstart"), ["optimizer.learning_rate=0.5", "run.seed=4"])
    (folder / "config.toml").write_text(to_toml(config, folder))
    (folder / "run.json").write_text(json.dumps({"schema_version": 1, "name": "quickstart", "status": "stopped"}))
    ((run,), _) = run_list.list_runs(tmp_path)
    assert run.changed == {"optimizer.learning_rate": 0.5, "run.seed": 4}


@pytest.mark.parametrize(
    ("condition", "kept"),
    [
        ("run.seed=1", 1),
        ("run.seed>=0", 2),
        ("run.seed<1", 1),
        ("status!=finished", 1),
        ("recipe~SMA", 2),
        ("best>0", 0),  # nothing was validated: not measured does not count as above 0
        ("best!=1", 2),
        ("entropy/exact/mean<0.31", 2),  # a metric: its last value is 0.3
    ],
)
def test_filters(condition: str, kept: int, variant_folders: list[Path]) -> None:
    facts = json.loads((variant_folders[0] / "run.json").read_text())
    (variant_folders[0] / "run.json").write_text(json.dumps(facts | {"status": "failed"}))
    runs = [run for run in run_list.list_runs(variant_folders[0].parent)[0] if run.recorded.path in variant_folders[:2]]
    assert len(run_list.where(runs, [condition])) == kept


def test_accuracies_and_mean_rewards_are_not_compared(variant_folders: list[Path]) -> None:
    path = variant_folders[0] / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["values"]["train/reward/mean"] = 3.0
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    runs = run_list.list_runs(variant_folders[0].parent)[0]
    said = r"--where train>0.1: train is an accuracy in some runs and a mean reward in others; choose runs of one kind"
    with pytest.raises(RecipeError, match=said):
        run_list.where(runs, ["train>0.1"])
    with pytest.raises(RecipeError, match=r"--sort train: train is an accuracy in some runs"):
        run_list.ordered(runs, "train", reverse=True)
    assert len(run_list.where(runs, ["algorithm.loss=ppo", "train>0.1"])) == 2


def test_a_killed_run_is_not_called_running(variant_folders: list[Path]) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    for folder, writer in zip(variant_folders, (gone.pid, os.getpid()), strict=False):
        facts = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps(facts | {"status": "running"}))
        (folder / ".lock").write_text(str(writer))
    (variant_folders[2] / ".lock").write_text(str(gone.pid))
    runs = {run.recorded.path: run for run in run_list.list_runs(variant_folders[0].parent)[0]}
    assert [runs[path].columns["status"] for path in variant_folders[:3]] == ["killed?", "running", "finished"]
    assert len(run_list.where(list(runs.values()), ["status=running"])) == 1
    write_comparison_page(variant_folders, variant_folders[0].parent / "page.html")
    page = (variant_folders[0].parent / "page.html").read_text()
    assert page.count("killed?</td>") == 1
    assert "1 killed?, 1 running" in page


@pytest.mark.parametrize(
    ("condition", "kept"),
    [
        ("started>2026-11-28 20:09", [1, 2]),
        ("started>2026-11-28 20:10", [1, 2]),  # as the table shows it
        ("started<=2026-11-28T20:10:30+00:00", [0, 1]),
        ("started>=2026-11-28 21:10:30+01:00", [1, 2]),
        ("started<2026-11-28", []),
        ("started>2026-11-28", [0, 1, 2]),
        ("started~20:10", [1]),
    ],
)
def test_times_are_compared_as_times(condition: str, kept: list[int], variant_folders: list[Path]) -> None:
    for clock, folder in zip(("05:00:00", "20:10:30", "22:00:00"), variant_folders, strict=False):
        facts = json.loads((folder / "run.json").read_text())
        facts["environments"] = [{"started": f"2026-11-28T{clock}+00:00"}]
        (folder / "run.json").write_text(json.dumps(facts))
    runs = run_list.list_runs(variant_folders[0].parent)[0]
    runs = [run for run in runs if run.recorded.path in variant_folders[:3]]
    found = {run.recorded.path for run in run_list.where(runs, [condition])}
    assert found == {variant_folders[i] for i in kept}


def test_a_time_that_is_none_is_refused(variant_folders: list[Path]) -> None:
    runs, _ = run_list.list_runs(variant_folders[0].parent)
    with pytest.raises(RecipeError, match=r"--where started>yesterday: started is a time.* as in started>2026-"):
        run_list.where(runs, ["started>yesterday"])


def test_a_name_that_no_run_has_is_refused_with_the_nearest(variant_folders: list[Path]) -> None:
    runs, _ = run_list.list_runs(variant_folders[0].parent)
    with pytest.raises(RecipeError, match=r"did you mean .*algorithm\.loss"):
        run_list.where(runs, ["algorithm.los=ppo"])
    with pytest.raises(RecipeError, match="a condition is NAME=VALUE"):
        run_list.where(runs, ["loss"])
    for wanted in ("best>=abc", "run.seed<one", "entropy/exact/mean=nan"):
        with pytest.raises(RecipeError, match=rf"--where {wanted}: .* is a number, and '\w+' is none; as in \S+0\.5"):
            run_list.where(runs, [wanted])
    with pytest.raises(RecipeError, match="no run has that name"):
        run_list.find_run(runs, "nowhere")


def test_order_puts_runs_without_the_value_last(variant_folders: list[Path]) -> None:
    runs, _ = run_list.list_runs(variant_folders[0].parent)
    trained = [run.columns["train"] for run in run_list.ordered(runs, "train", reverse=True)]
    assert trained == sorted(trained, reverse=True)
    assert len(set(trained)) > 1
    lines = (variant_folders[0] / "metrics.jsonl").read_text()
    (variant_folders[0] / "metrics.jsonl").write_text("")
    runs, _ = run_list.list_runs(variant_folders[0].parent)
    assert run_list.ordered(runs, "train", reverse=True)[-1].recorded.path == variant_folders[0]
    assert run_list.ordered(runs, "train", reverse=False)[-1].recorded.path == variant_folders[0]
    (variant_folders[1] / "metrics.jsonl").write_text("".join(lines.splitlines(keepends=True)[:9]))
    runs, _ = run_list.list_runs(variant_folders[0].parent)
    assert [run.columns["steps"] for run in run_list.ordered(runs, "steps", reverse=False)] == [0, 9, 40, 40]


def test_the_newest_run_is_first_and_a_resume_makes_none_newer(variant_folders: list[Path]) -> None:
    for day, folder in zip((3, 5, 2, 4), variant_folders, strict=True):
        facts = json.loads((folder / "run.json").read_text())
        sessions = [{"started": f"2026-01-0{day}T00:00:00+00:00"}, {"started": "2026-02-01T00:00:00+00:00"}]
        (folder / "run.json").write_text(json.dumps(facts | {"environments": sessions[: 1 + (day == 2)]}))
    runs, _ = run_list.list_runs(variant_folders[0].parent)
    assert [str(run.columns["started"])[:10] for run in runs] == [f"2026-01-0{day}" for day in (5, 4, 3, 2)]


def test_the_command_sorts_and_reverses(
    variant_folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del variant_folders
    upwards = [row["train"] for row in listed(capsys, tmp_path, "--sort", "train").values()]
    assert upwards == sorted(upwards) != upwards[::-1]
    assert [row["train"] for row in listed(capsys, tmp_path, "--sort", "train", "--reverse").values()] == upwards[::-1]
    assert [*listed(capsys, tmp_path, "--reverse")] == [*listed(capsys, tmp_path)][::-1]


def test_table_two_side_by_side_and_the_page(
    variant_folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for width in ("60", "80", "160"):
        monkeypatch.setenv("COLUMNS", width)
        table = told(capsys, "runs", tmp_path)
        assert all(len(line) <= int(width) for line in table.splitlines())
        assert all(path.name in table for path in variant_folders)
    names = (variant_folders[0].name, variant_folders[-1].name)
    pair = told(capsys, "runs", tmp_path, "--compare", *names)
    assert "algorithm.loss" in pair
    for folder, digest in zip(variant_folders[:2], ("11111111", "22222222"), strict=True):
        facts = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps(facts | {"data": {"train": {"sha256": digest}}}))
    pair = told(capsys, "runs", tmp_path, "--compare", *(folder.name for folder in variant_folders[:2]))
    assert re.search(r"problems of data\.train +11111111 +22222222", pair)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("runs --compare a b --sort best", "--sort has no effect with --compare"),
        ("report a --serve --output page.html", "--output has no effect with --serve"),
        ("report a --port 8000", "--port needs --serve"),
        ("cluster doctor quickstart", r"quickstart has no \[cluster\] to check"),
    ],
)
def test_an_option_or_a_recipe_without_effect_is_refused(words: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        app(words.split(), result_action="return_value")


def test_a_broken_run_is_named_and_the_others_are_shown(
    variant_folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (variant_folders[0] / "run.json").write_text("{")
    assert app(["runs", str(tmp_path)], result_action="return_value") == 1
    seen = capsys.readouterr()
    assert "run.json:1: not valid JSON" in seen.err
    assert variant_folders[1].name in seen.out


def answer(server: Any, path: str = "/", host: str = "localhost:1") -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request("GET", path, headers={"Host": host})
    return connection.getresponse()


def test_the_served_page_follows_the_run(run_folder: Path) -> None:
    facts = json.loads((run_folder / "run.json").read_text())
    (run_folder / "run.json").write_text(json.dumps(facts | {"status": "running"}))
    with report_server(run_folder, 0) as server:
        assert server.server_address[0] == "127.0.0.1"
        Thread(target=server.serve_forever, daemon=True).start()
        first = answer(server)
        assert (first.status, first.getheader("Refresh")) == (200, str(REFRESH_SECONDS))
        assert "<dd>40</dd>" in first.read().decode()
        with (run_folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 41, "stage": 1, "values": {"train/accuracy/mean": 0.9}}) + "\n")
        assert "<dd>41</dd>" in answer(server).read().decode()
        (run_folder / "run.json").write_text(json.dumps(facts))
        assert answer(server).getheader("Refresh") is None  # The run has ended: the page does not re-read itself.
        assert answer(server, "/config.toml").status == 404
        assert answer(server, host="evil.example:1").status == 403
        server.shutdown()


def test_a_page_is_made_anew_only_where_the_run_has_written(run_folder: Path) -> None:
    report = LiveReport(run_folder)
    page = report.refresh()
    assert report.refresh() is page
    shutil.copy(run_folder / "evaluations" / "after.json", run_folder / "evaluations" / "again.json")
    assert report.refresh() is not page, "a test that was written in between"
    with pytest.raises(ValueError, match="no such folder"):
        LiveReport(run_folder / "nowhere")


def test_paths_are_shown_as_they_are_typed_here(
    tmp_path: Path, make_run: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = make_run("mine")
    config = load_train_recipe(Path("quickstart"), ["model=./models/mine", "data=/elsewhere/problems.jsonl"])
    (folder / "config.toml").write_text(to_toml(config, folder.absolute()))
    (folder / "run.json").write_text(json.dumps({"schema_version": 1, "name": "quickstart", "status": "stopped"}))
    ((run,), _) = run_list.list_runs(Path())
    assert run.changed["start.model"] == run.settings["start.model"] == "models/mine"
    assert run.changed["data.train.0.path"] == "/elsewhere/problems.jsonl"
