"""The page of a run: self-contained, escaped, with its provenance, and written even if half of the run is missing."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from magicrl.reporting.page import MOST_CHARACTERS, shortened
from magicrl.reporting.read_folders import read_run
from magicrl.reporting.run_page import provenance, write_run_page

from .conftest import write_run

VOID = {"meta", "link", "img", "br", "input", "hr"}
INSIDE_SVG = {"line", "path", "rect", "circle"}


class Page(HTMLParser):
    """Parser of the page's elements that checks that every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack, f"</{tag}> closes nothing"
        assert self.stack.pop() == tag

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_run_page(write_run(tmp_path_factory.mktemp("page") / "run")).read_text(encoding="utf-8")


def asks_for_nothing(page: str) -> Page:
    parsed = Page(page)
    for tag, attributes in parsed.elements:
        for name in ("src", "href", "srcset", "action", "data"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:")), (tag, name, value)
    assert "@import" not in page
    assert "url(" not in page
    assert "http" not in re.sub(r'http-equiv|xmlns="http://www.w3.org/2000/svg"', "", page)
    return parsed


def test_the_page_asks_for_nothing_and_what_a_model_wrote_stays_text(page: str) -> None:
    parsed = asks_for_nothing(page)
    assert parsed.count("script") == 2, "the values and the page's own script, nothing of a response"
    assert parsed.count("img") == 0
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "{{ 7*7 }}" in page, "no second rendering"
    assert "\x1b" not in page
    assert "\x00" not in page
    assert "\u202e" not in page
    assert "⟨U+202E⟩" in page
    assert "3 + 4 &lt;b&gt;?&lt;/b&gt;" in page


def test_only_our_script_may_run(page: str) -> None:
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    script = re.search(r"<script>(.*?)</script>", page, re.DOTALL)
    assert policy is not None
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script.group(1).encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy.group(1).replace("&#39;", "'")
    assert "default-src 'none'" in policy.group(1).replace("&#39;", "'")


def test_the_headline_states_the_rise_against_the_start_s_best_temperature(page: str) -> None:
    assert "46.0\u00a0% → 90.0\u00a0%" in page
    assert "+43.0 points" in page
    assert "over the initial checkpoint&#39;s best temperature, 0.6: 47.0\u00a0%" in page
    assert "pass@16" in page
    assert "87.5 % → 87.5 %" in page, "boxed"


def test_every_block_of_a_whole_run_is_there(page: str) -> None:
    anchors = re.findall(r'<section id="(\w+)"', page)
    assert anchors == [
        "headline", "health", "learning", "time", "stages", "samples", "events", "configuration", "provenance",
    ]  # fmt: skip
    assert "stage 2: T = 64" in page
    assert '<td data-label="its own settings" class="words">τ 0.7, KL β 0.001</td>' in page
    assert "target 0.2" in page
    assert "converged: bound 0.01" in page
    shown = re.findall(r'<td data-label="train accuracy, first → last 5 steps">([^<]+)</td>', page)
    assert shown == ["43.0 % → 58.0 %", "63.0 % → 78.0 %"], "steps 1 to 5, 16 to 20, 21 to 25, 36 to 40"
    assert "numpy" in page


def test_entropy_and_alpha_share_their_x_axis(page: str) -> None:
    hover = re.search(r'id="hover">(.*?)</script>', page)
    assert hover is not None
    charts = json.loads(hover.group(1))
    keys = ("low", "high", "left", "right")
    assert [charts["entropy"][k] for k in keys] == [charts["alpha"][k] for k in keys]
    assert charts["accuracy"]["series"][0]["points"]


def test_figures_are_exported_as_svg_png_and_csv(page: str) -> None:
    elements = Page(page).elements
    links = {a["download"]: a["href"] for t, a in elements if t == "a" and a.get("download")}
    names = [a["data-name"] for t, a in elements if a.get("data-name")]
    assert {f"{name}.csv" for name in names} == set(links)
    assert len(set(names)) == len(names)
    assert {"accuracy", "entropy", "alpha", "step_time"} <= set(names)
    for kind in ("svg", "png"):
        assert sum(a.get("data-save") == kind for _, a in elements) == len(names)
    frames = re.findall(r"<template>(<svg.*?</svg>)</template>", page, re.DOTALL)
    assert len(frames) == len(names), "a file's title and legend, into which the script puts the drawing"
    for frame in frames:
        ElementTree.fromstring(frame)
    csv = base64.b64decode(str(links["step_time.csv"]).partition("base64,")[2]).decode().splitlines()
    assert csv[0] == "step,rollout t_R,training t_T,other t_O"
    assert csv[1] == "1,1.0,0.5,0.25"
    assert len(csv) == 41


def test_health_findings_come_with_their_remedies(run_folder: Path) -> None:
    told = {"kind": "health", "rule": "own <rule>", "severity": "warning", "step": 2, "message": "m", "remedy": "do r"}
    with (run_folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(told) + "\n")
    page = write_run_page(run_folder).read_text()
    assert "own &lt;rule&gt;" in page
    assert "do r" in page


@pytest.mark.parametrize(
    ("outcome", "badge"), [("learned", "correct"), ("undecided", "warning"), ("no_signal", "critical")]
)
def test_the_verdict_has_its_colour(outcome: str, badge: str, run_folder: Path) -> None:
    run = json.loads((run_folder / "run.json").read_text())
    facts = {"steps": 40, "updates": 40}
    verdict = {"outcome": outcome, "title": "the verdict", "reason": "its reason", "facts": facts}
    (run_folder / "run.json").write_text(json.dumps(run | {"learning": verdict}))
    assert f'<strong class="badge {badge}">the verdict</strong>' in write_run_page(run_folder).read_text()


@pytest.mark.parametrize(("gradient", "shown"), [(0.0, True), (0.3, False), (None, False)])
def test_groups_with_different_rewards_are_not_called_a_gradient(
    gradient: float | None, shown: bool, run_folder: Path
) -> None:
    run = json.loads((run_folder / "run.json").read_text())
    facts = {"steps": 40, "updates": 40, "largest_gradient": gradient, "answers": {"mixed": 0.333}}
    verdict = {"outcome": "nothing_to_learn", "title": "the verdict", "reason": "its reason", "facts": facts}
    (run_folder / "run.json").write_text(json.dumps(run | {"learning": verdict}))
    page = write_run_page(run_folder).read_text()
    assert "33.3 % of the groups had different rewards" in page
    assert ("the gradient was 0 in every update" in page) == shown


def test_only_a_rise_whose_interval_is_above_zero_is_green(run_folder: Path) -> None:
    path = run_folder / "evaluations" / "after.json"
    document = json.loads(path.read_text())
    document["temperatures"]["1.0"]["per_problem"] = [1.0] * 48 + [0.0] * 52
    path.write_text(json.dumps(document))
    page = write_run_page(run_folder).read_text()
    assert re.findall(r'<td class="(\w*)">\+([\d.]+)', page) == [("good", "55.0"), ("good", "47.0"), ("", "2.0")]


def test_other_samples_and_problems_stand_at_their_numbers(run_folder: Path) -> None:
    """Only the test before training has the samples of ``start_pass_at``; 3 problems have fewer than 16 verdicts."""
    for name, samples in (("before", 64), ("after", 16)):
        path = run_folder / "evaluations" / f"{name}.json"
        document = json.loads(path.read_text())
        score = document["temperatures"]["1.0"]
        score["samples"] = samples
        score["accuracy"]["problems"], score["pass_at"]["16"]["problems"] = 100, 97 if name == "after" else 100
        path.write_text(json.dumps(document))
    page = write_run_page(run_folder).read_text()
    assert re.findall("100 × ([^<]+)</td>", page) == ["1", "16", "64 → 16"]
    assert page.count("<small>97 of 100 problems</small>") == 1


def test_a_run_that_has_only_begun_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"schema_version": 1, "status": "running", "name": "<young>"}')
    page = write_run_page(tmp_path, tmp_path / "page.html").read_text()
    Page(page)
    assert "&lt;young&gt;" in page
    assert "No training step" in page


@pytest.mark.parametrize("missing", ["events.jsonl", "metrics.jsonl", "config.toml", "evaluations/before.json"])
def test_a_report_bears_with_a_missing_file(make_run: Callable[[str], Path], missing: str) -> None:
    folder = make_run("part")
    (folder / missing).unlink()
    Page(write_run_page(folder).read_text())


def test_a_report_bears_with_sparse_metrics(run_folder: Path) -> None:
    rows = [
        {"step": s, "stage": 0, "values": {"train/accuracy/mean": None, "entropy/sampled/mean": 0.3}} for s in (1, 2)
    ]
    (run_folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_run_page(run_folder).read_text()
    assert 'data-chart="entropy"' in page
    assert 'data-chart="accuracy"' not in page


def test_an_unwritable_output_is_named(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for nowhere in (run_folder / "run.json", run_folder / "none"):
        with pytest.raises(ValueError, match=f"there is no folder {nowhere}; create it, or choose another --output"):
            write_run_page(run_folder, nowhere / "page.html")
        assert not nowhere.is_dir(), "no folder is made for a mistyped name"
    (run_folder / "page.html").mkdir()
    with pytest.raises(ValueError, match="cannot be written"):
        write_run_page(run_folder, run_folder / "page.html")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"No space left on device.*full\.html"):  # has another exit status
        write_run_page(run_folder, run_folder / "full.html")


def test_long_responses_are_cut_on_the_page_and_say_so() -> None:
    assert shortened("x" * MOST_CHARACTERS) == "x" * MOST_CHARACTERS
    assert shortened("x" * (MOST_CHARACTERS + 7)).endswith("[… 7 more characters in the evaluation's file]")


def test_a_resumption_on_other_versions_shows_both(run_folder: Path) -> None:
    run = json.loads((run_folder / "run.json").read_text())
    run["environments"].append(
        {"started": "2026-01-03T00:00:00+00:00", "versions": {"numpy": "2.2"}, "git": "abc+changes", "threads": 2}
    )
    run["data"] = {
        "train": {"problems": 4000, "sha256": "f" * 64, "dropped": 3},
        "validation": {"problems": 0, "sha256": "0"},
        "test/held_out": {"problems": 200, "sha256": "e" * 64},
    }
    run["dropped_overlong"] = 0
    (run_folder / "run.json").write_text(json.dumps(run))
    told = provenance(read_run(run_folder))
    assert ("numpy", "2.1 → 2.2") in told["software"]
    assert [(s["name"], s["problems"], s["rest"]) for s in told["sets"]] == [
        ("train", "4,000", "dropped 3"),
        ("test, held_out", "200", ""),
    ]
    assert told["sessions"][1] == {"started": "2026-01-03 00:00 UTC", "git": "abc+changes", "machine": "2 threads"}
    assert ("dropped overlong", 0) in told["facts"]
    page = write_run_page(run_folder).read_text()
    for word in ("abc+changes", "f" * 64, "2.1 → 2.2", "two cores"):
        assert word in page


def test_what_is_no_table_is_borne_with(run_folder: Path) -> None:
    (run_folder / "run.json").write_text('{"schema_version": 1, "environments": ["?"], "data": {"train": "abc"}}')
    told = provenance(read_run(run_folder))
    assert told["sets"][0]["sha256"] == "abc"
    assert told["sessions"] == []


def test_the_page_states_the_command_that_makes_it(run_folder: Path) -> None:
    output = run_folder / "page.html"
    assert f"magicrl report {run_folder} --output {output}" in write_run_page(run_folder, output).read_text()


def test_graded_rewards_stand_beside_the_accuracies(run_folder: Path) -> None:
    assert "mean reward" not in write_run_page(run_folder).read_text()
    path = run_folder / "evaluations" / "after.json"
    document = json.loads(path.read_text())
    document["temperatures"]["1.0"]["reward"] = {"mean": 1.25, "low": 1.0, "high": 1.5}
    path.write_text(json.dumps(document))
    page = write_run_page(run_folder).read_text()
    assert "1.25<small>1 to 1.5</small>" in page
    assert '<td data-label="reached right_from">' in page
