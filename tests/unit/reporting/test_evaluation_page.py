"""The page of evaluations: scores, scaling figures with their condition, Table 13 for comparison, responses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from magicrl.commands.evaluation_display import show_results
from magicrl.reporting.charts import draw
from magicrl.reporting.comparison_page import EXACT, evaluation_names, scaling_charts, write_comparison_page
from magicrl.reporting.read_folders import RunFolderError, read_evaluation_folder

from .conftest import write_evaluation
from .test_run_page import Page


def written(folders: list[Path], tmp_path: Path) -> str:
    write_comparison_page(folders, tmp_path / "page.html")
    return (tmp_path / "page.html").read_text(encoding="utf-8")


def test_every_block_is_there_and_hostile_responses_stay_text(evaluation_folders: list[Path], tmp_path: Path) -> None:
    page = written(evaluation_folders, tmp_path)
    parsed = Page(page)
    assert re.findall(r'<section id="(\w+)"', page) == [
        "scores",
        "scaling",
        "responses",
        "eval_settings",
    ]
    assert parsed.count("script") == 2
    assert parsed.count("img") == 0
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "Add &lt;b&gt;a&lt;/b&gt;" in page
    for difference in ("66.7 %", "50.0 %", "−16.7", "1 / 2 problems"):
        assert difference in page, "with intervals, paired"
    assert EXACT in page
    assert "Exact only while the sampler does not know the limit and no forced answer is used." in page
    for key in ("over_limits", "efficiency", "pass_at_k", "maj_at_k"):
        assert f'data-chart="{key}"' in page


def test_an_inexact_curve_is_named_and_fresh_samples_are_signs() -> None:
    share = {"mean": 0.5, "low": 0.4, "high": 0.6}
    scaling = {
        "over_limits": [{"limit": limit, "accuracy": share, "mean_tokens": share} for limit in (16, 128)],
        "exact": False,
        "over_samples": [{"k": 2, "pass": share, "majority": {"mean": 0.25, "low": 0.2, "high": 0.3}}],
        "fresh": [{"limit": 16, "accuracy": {"mean": 0.125, "low": 0.1, "high": 0.2}, "samples": 2}],
    }
    charts = scaling_charts([("m", 1, scaling)])
    chart = charts[0]
    assert "Not exact for: m." in chart.note
    assert [(s.label, s.style) for s in chart.series] == [("m", "line"), ("m, new samples", "marks")]
    assert [s.points for s in chart.series] == [((16.0, 0.5), (128.0, 0.5)), ((16.0, 0.125),)]
    assert chart.x_log, "limits grow by factors"
    assert [c.key for c in charts] == ["over_limits", "efficiency", "pass_at_k", "maj_at_k"]
    assert [c.series[0].points for c in charts[2:]] == [((2.0, 0.5),), ((2.0, 0.25),)]


def test_numbers_of_samples_are_whole_on_the_axis() -> None:
    share = {"mean": 0.5, "low": 0.4, "high": 0.6}
    scaling = {"over_samples": [{"k": k, "pass": share, "majority": share} for k in (1, 2)]}
    drawing = draw(scaling_charts([("m", 0, scaling)])[0])
    assert re.findall(r'class="tick"[^>]*>([^<]+)</text>', drawing.partition("samples k")[0])[-2:] == ["1", "2"]


def test_a_page_of_one_evaluation_explains_its_columns_and_no_p_value(
    evaluation_folders: list[Path], tmp_path: Path
) -> None:
    alone, compared = written(evaluation_folders[:1], tmp_path), written(evaluation_folders, tmp_path)
    for page in (alone, compared):
        assert "maj@k that the most frequent answer of k is right" in page
        assert "✂ truncated" in page
    assert "permutation test" in compared
    assert "permutation test" not in alone


def test_efficiency_comes_from_its_own_curve_where_there_is_one() -> None:
    share = {"mean": 0.5, "low": 0.4, "high": 0.6}
    limits = [{"limit": 16, "accuracy": share, "mean_tokens": {"mean": 9.0, "low": 8, "high": 10}}]
    old = {"over_limits": limits}
    new = {"over_limits": limits, "efficiency": [{"mean_tokens": 12.5, "accuracy": share}]}
    found = [scaling_charts([("m", 0, s)])[1].series[0].points for s in (old, new)]
    assert found == [((9.0, 0.5),), ((12.5, 0.5),)]


def test_the_browser_finds_what_changed(evaluation_folders: list[Path], tmp_path: Path) -> None:
    page = written(evaluation_folders, tmp_path)
    kinds = [set(str(a["data-kinds"]).split()) for _, a in Page(page).elements if "data-kinds" in a]
    assert kinds == [{"lost", "right", "wrong"}, {"won", "right", "wrong"}, {"right", "wrong"}]
    assert "start: right, better: wrong (1" in page
    assert "decided by string" in page
    assert "All 3 recorded problems are on this page." in page


def test_other_problems_of_the_same_ids_are_not_next_to_each_other(
    evaluation_folders: list[Path], tmp_path: Path
) -> None:
    problems = evaluation_folders[1] / "sums" / "problems.jsonl"
    problems.write_text(problems.read_text().replace("Add <b>a</b>", "Multiply <b>a</b>"))
    page = written(evaluation_folders, tmp_path)
    assert "All 4 recorded problems are on this page." in page
    assert "2 problems are not in all evaluations (by id, prompt and reference answer)" in page
    assert "start: right, better: wrong (" not in page, "the one of another prompt was not lost"
    assert "All 3 recorded" in written(evaluation_folders[:1], tmp_path)


def test_table_13_stands_beside_results_on_its_sets_with_what_differs(tmp_path: Path) -> None:
    folder = write_evaluation(tmp_path / "e", {"60": [True, False], "61": [False, False]}, name="aime24")
    page = written([folder], tmp_path)
    assert '<section id="table13"' in page
    assert "R1-Distill-Qwen-7B" in page
    assert "55.5" in page
    assert "is not comparable with the table: aime24: max_tokens 128 instead of 32768" in page


def test_evaluations_are_named_by_model_and_by_settings_where_that_is_the_same(tmp_path: Path) -> None:
    right = {"a": [True]}
    folders = [
        write_evaluation(tmp_path / "one", right, model="runs/x/model"),
        write_evaluation(tmp_path / "two", right, model="runs/x/model", temperature=0.6),
        write_evaluation(tmp_path / "three", right, model="runs/y/model"),
    ]
    names = evaluation_names([read_evaluation_folder(folder) for folder in folders])
    assert names == ["x, sampling temperature 1", "x, sampling temperature 0.6", "y"]
    twice = [folders[0], write_evaluation(tmp_path / "four", right, model="runs/x/model")]
    assert evaluation_names([read_evaluation_folder(f) for f in twice]) == ["x, one", "x, four"]


def test_results_that_are_missing_broken_or_newer_are_clear_errors(evaluation_folders: list[Path]) -> None:
    path = evaluation_folders[0] / "results.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"schema_version": 99}))
    with pytest.raises(RunFolderError, match="schema_version 99"):
        read_evaluation_folder(evaluation_folders[0])
    del document["benchmarks"]["sums"]["accuracy"]
    path.write_text(json.dumps(document))
    with pytest.raises(RunFolderError, match=r"results\.json: accuracy: Field required"):
        read_evaluation_folder(evaluation_folders[0])
    path.write_text("[]")
    with pytest.raises(RunFolderError, match="results"):
        read_evaluation_folder(evaluation_folders[0])
    path.unlink()
    with pytest.raises(RunFolderError, match="no results yet; finish the evaluation"):
        read_evaluation_folder(evaluation_folders[0])


def test_results_alone_make_a_page_without_responses(evaluation_folders: list[Path], tmp_path: Path) -> None:
    for path in evaluation_folders[0].glob("sums/*"):
        if path.is_file():
            path.unlink()
    page = written(evaluation_folders[:1], tmp_path)
    assert '<section id="responses"' not in page
    assert '<section id="scores"' in page


def test_graded_rewards_stand_beside_the_scores(evaluation_folders: list[Path], tmp_path: Path) -> None:
    path = evaluation_folders[1] / "results.json"
    document = json.loads(path.read_text())
    document["benchmarks"]["sums"]["reward"] = {"mean": 1.25, "low": 1.0, "high": 1.5}
    path.write_text(json.dumps(document))
    page = written(evaluation_folders, tmp_path)
    assert '<td data-label="mean reward"><span>1.25<small>1 to 1.5</small></span></td>' in page
    assert '<td data-label="mean reward">–</td>' in page, "the first model's rewards are not graded"


def test_pass_at_k_over_fewer_problems_says_so(evaluation_folders: list[Path], tmp_path: Path) -> None:
    path = evaluation_folders[1] / "results.json"
    document = json.loads(path.read_text())
    result = document["benchmarks"]["sums"]
    for score in (result["pass_at"]["2"], result["scaling"]["over_samples"][-1]["pass"]):
        score["problems"] = 2
    path.write_text(json.dumps(document))
    page = written(evaluation_folders, tmp_path)
    assert page.count("k = 2, 2 of 3 problems</small>") == 1
    assert "better: k = 2 covers 2 of 3 problems." in page
    console = Console(record=True, width=200)
    show_results(path, console)
    text = console.export_text()
    assert "sums: pass@2 is over the 2 of 3 problems with 2 judged samples" in text
    assert "maj@2 is over" not in text
