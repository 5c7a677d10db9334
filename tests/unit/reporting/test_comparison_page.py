"""The page that compares runs: variants, and runs that are different, unfinished or broken."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from magicrl.commands.report import report
from magicrl.config.errors import RecipeError
from magicrl.reporting.comparison_page import write_comparison_page

from .conftest import HOSTILE, write_evaluation, write_rollout_recording, write_variant
from .test_curves import rewrite
from .test_run_page import Page, asks_for_nothing


def written(folders: list[Path], tmp_path: Path, **options: Any) -> str:
    write_comparison_page(folders, tmp_path / "page.html", **options)
    return (tmp_path / "page.html").read_text(encoding="utf-8")


def values(page: str) -> dict[str, Any]:
    found = re.search(r'id="hover">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found.group(1))


def test_every_block_is_there_and_nothing_is_asked_of_anywhere(variant_folders: list[Path], tmp_path: Path) -> None:
    write_rollout_recording(variant_folders[0])
    page = written(variant_folders, tmp_path)
    asks_for_nothing(page)
    assert re.findall(r'<section id="(\w+)"', page) == [
        "variants", "variant_scores", "settings", "learning", "policy", "time", "samples", "runs",
    ]  # fmt: skip
    # explanations of a band, an interval and a difference
    assert "from the smallest to the largest run: it is not a confidence interval" in page
    assert "differences are paired by problem" in page
    assert "+7.0" in page, "the second variant against the first"
    assert "runs: +4.5 to +9.5" in page
    assert "algorithm.loss" in page
    assert "75.5 %" in page, "the mean over a variant's runs and problems"
    assert '<td data-label="test after">90.0 %</td>' in page, "at the temperature of training"
    assert '<td data-label="train accuracy">78.0 %</td>' in page, "of steps 36 to 40"


def test_each_figure_is_drawn_over_every_axis_and_one_is_shown(variant_folders: list[Path], tmp_path: Path) -> None:
    page = written(variant_folders, tmp_path, axis="tokens")
    drawn = [a for tag, a in Page(page).elements if tag == "svg" and "data-axis" in a]
    assert {a["data-axis"] for a in drawn} == {"steps", "tokens", "wall", "gpu-hours"}
    assert {a["data-axis"] for a in drawn if "hidden" not in a} == {"tokens"}
    data = values(page)
    curve = data["#curves"]["entropy"][0]
    assert curve["label"] == "loss magic"
    assert data["#x"][curve["x"]["tokens"]][:2] == [0.32, 0.64]
    assert data["#axes"]["tokens"] == "thousand response tokens sampled"
    assert len(curve["y"]) == len(curve["low"]) == 40
    other = data["#curves"]["length"][0]
    assert other["x"] == curve["x"], "the same x are in the page once"


def test_runs_of_unlike_length_and_status_are_told(tmp_path: Path) -> None:
    folders = [
        write_variant(tmp_path / "a0", 0, steps=25, status="running"),
        write_variant(tmp_path / "a1", 1),
        write_variant(tmp_path / "b0", 0, loss="ppo", steps=0, status="running"),
    ]
    rewrite(folders[1], time__step=3.5)
    facts = json.loads((folders[2] / "run.json").read_text())
    sessions = [{"git": "1111111111aa"}, {"git": "2222222222bb+changes"}]
    (folders[2] / "run.json").write_text(json.dumps(facts | {"environments": sessions}))
    page = written(folders, tmp_path)
    assert "Runs of different length: loss magic." in page
    assert "Not finished: loss magic; loss ppo." in page
    assert "No training step so far, and therefore no curve: b0." in page
    assert "1 running, 1 finished" in page
    assert "<code>2222222222+changes</code>" in page, "the commit of the last session"
    data = values(page)
    (tail,) = [c for c in data["#curves"]["accuracy"] if c.get("alone")]
    assert (tail["label"], len(tail["y"])) == ("loss magic, run 2 of 2", 16)
    assert data["#axes"]["wall"] == "minutes of training steps"
    assert data["#x"][tail["x"]["wall"]][-1] == pytest.approx(40 * 3.5 / 60, rel=1e-5), "its own times"


def test_test_sets_of_two_sizes_are_told(tmp_path: Path) -> None:
    folders = [write_variant(tmp_path / "a", 0), write_variant(tmp_path / "b", 0, loss="ppo")]
    assert "intervals over the 4 problems;" in written(folders, tmp_path)
    path = folders[1] / "evaluations" / "after.json"
    document = json.loads(path.read_text())
    document["temperatures"]["1.0"] |= {"per_problem": [0.5, 1.0, 1.0], "problems": 3}
    path.write_text(json.dumps(document))
    assert "intervals over the 3 to 4 problems;" in written(folders, tmp_path)


def test_runs_without_any_metric_or_configuration_still_make_a_page(tmp_path: Path) -> None:
    folders = [tmp_path / "x", tmp_path / "y"]
    for folder in folders:
        folder.mkdir()
        (folder / "run.json").write_text('{"status": "running", "seed": 1}')
    page = written(folders, tmp_path)
    Page(page)
    assert "Without a <code>config.toml</code>: x, y." in page


def test_a_broken_folder_is_left_out_and_named(variant_folders: list[Path], tmp_path: Path) -> None:
    with (variant_folders[3] / "metrics.jsonl").open("a") as file:
        file.write("{broken\n{}\n")
    (tmp_path / "models" / "quickstart-start").mkdir(parents=True)  # what the pattern runs/* also finds
    folders = [*variant_folders, tmp_path / "models", tmp_path / "nowhere"]
    left_out = write_comparison_page(folders, tmp_path / "page.html")
    assert [Path(folder).name for folder, _ in left_out] == ["ppo-1", "nowhere"]
    page = (tmp_path / "page.html").read_text()
    assert '<section id="left_out"' in page
    assert "metrics.jsonl:41: not valid JSON" in page
    assert "no such folder" in page
    with pytest.raises(ValueError, match="none of the folders can be read"):
        write_comparison_page([tmp_path / "nowhere", tmp_path / "gone"], tmp_path / "page.html")


def test_a_broken_run_named_models_is_left_out_aloud(variant_folders: list[Path], tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "run.json").write_text("{broken")
    left_out = write_comparison_page([*variant_folders, tmp_path / "models"], tmp_path / "page.html")
    assert [Path(folder).name for folder, _ in left_out] == ["models"]


def test_settings_that_differ_within_a_variant_are_named(variant_folders: list[Path], tmp_path: Path) -> None:
    apart = written(variant_folders, tmp_path)
    assert "Runs that differ only in their seed are one variant" in apart
    together = written(variant_folders, tmp_path, keys=["stages.0.max_tokens"])
    assert "Runs of one variant also differ in algorithm.loss, which --group-by does not name" in together
    assert "Runs that differ only in their seed" not in together


def test_the_same_folder_twice_is_an_error(variant_folders: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="named twice"):
        write_comparison_page([variant_folders[0], variant_folders[0].parent / "." / "magic-0"], tmp_path / "page.html")


def test_hostile_names_and_settings_stay_text(tmp_path: Path) -> None:
    folders = [write_variant(tmp_path / str(seed), seed, loss=f"<script>alert({seed})</script>") for seed in (0, 1)]
    path = folders[0] / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"name": HOSTILE, "status": "<img src=x>"}))
    page = written(folders, tmp_path)
    parsed = Page(page)
    assert parsed.count("script") == 2
    assert parsed.count("img") == 0
    assert "\x1b" not in page


def test_a_page_of_many_variants_stays_small(tmp_path: Path) -> None:
    folders = [write_variant(tmp_path / f"{i}", 0, loss=f"loss-{i}", steps=400) for i in range(12)]
    page = written(folders, tmp_path)
    assert len(page) < 6_000_000
    series = values(page)["#curves"]["entropy"]
    assert {len(c["y"]) for c in series} == {160}
    signs = re.findall(r'class="line (s\d d\d)" d="M0 7h22"', page.split('id="variant_scores"')[0])
    assert len(set(signs)) == 12, "every variant's line can be told from every other"


def test_runs_and_evaluations_share_a_page(variant_folders: list[Path], tmp_path: Path) -> None:
    evaluation = write_evaluation(tmp_path / "eval", {"a": [True], "b": [False]})
    write_rollout_recording(variant_folders[0])
    page = written([*variant_folders[:1], evaluation], tmp_path)
    anchors = re.findall(r'<section id="(\w+)"', page)
    assert {"variants", "runs", "samples", "scores", "scaling", "responses"} <= set(anchors)
    names = [a["data-name"] for _, a in Page(page).elements if "data-name" in a]
    for found in (anchors, names):
        assert len(set(found)) == len(found), "each anchor and each file's name stands once"


def test_the_command_names_what_it_left_out_and_says_so_in_its_status(
    variant_folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "out.html"
    assert report(*variant_folders, output=page, x="wall", group_by=["algorithm.loss"]) == 0
    assert "--x wall --group-by algorithm.loss" in page.read_text()
    assert report(*variant_folders, tmp_path / "gone", output=page) == 1
    assert "left out" in capsys.readouterr().out
    with pytest.raises(RecipeError, match="at least one folder"):
        report()
    with pytest.raises(RecipeError, match="--x belongs to a comparison"):
        report(*variant_folders[:1], x="steps")
    assert report(*variant_folders[:1]) == 0
    assert (variant_folders[0] / "report.html").exists()
