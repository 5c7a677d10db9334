"""Pages contain the committed results, and another machine can make the results again."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tools import gpu_page, metrics_page
from tools.benchmark_page import CLAIMS, PAGE, PLANNING, held_out, second_machine, value_at
from tools.pages import MARKED, RESULTS, put_section, shown


def test_every_marked_number_is_its_files_number() -> None:
    text = PAGE.read_text()
    marked = list(MARKED.finditer(text))
    assert len(marked) == text.count("<!--="), "a marker without a number before it"
    assert len(marked) > 10
    for match in marked:
        assert match["text"] == shown(value_at(match["path"]), match["text"]), match[0]


def test_tables_are_those_of_the_results() -> None:
    assert "\n".join(["<!-- begin second-machine -->", "", *second_machine(), ""]) in CLAIMS.read_text()
    assert "\n".join(["<!-- begin held-out -->", "", *held_out(), ""]) in PLANNING.read_text()
    cases = json.loads(gpu_page.JSON.read_text())["cases"] if gpu_page.JSON.exists() else {}
    assert "\n".join(gpu_page.section(cases)) in gpu_page.PAGE.read_text()


def test_the_table_of_metrics_is_that_of_the_toml() -> None:
    assert "\n".join(metrics_page.section()) in metrics_page.PAGE.read_text(), "python -m tools.metrics_page"
    units = {key: unit for key, unit, _ in (row.split(" | ") for row in metrics_page.section()[2:])}
    assert units["| `train/accuracy/mean`"] == "share, 0 to 1"
    assert units["| `time/longest_response`"] == "seconds"  # as recorded; the figure divides it by another


def test_gpu_figures_of_several_calls_come_together(tmp_path: Path) -> None:
    for name, cases in (("a", {"x": {"v": 1}, "y": {"v": 1}}), ("b", {"y": {"failed": "no kernel"}})):
        (tmp_path / name).write_text(json.dumps({"cases": cases}))
    figures = tmp_path / "all.json"
    gpu_page.add(figures, [tmp_path / "a"])
    gpu_page.add(figures, [tmp_path / "b"])
    assert json.loads(figures.read_text()) == {"cases": {"x": {"v": 1}, "y": {"failed": "no kernel"}}}
    assert gpu_page.section({})[-1].endswith("**Not measured** yet.")


def test_sections_leave_each_other_alone(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    for name, text in (("learner", "one"), ("rollout", "two"), ("learner", "three")):
        put_section(page, name, [text])
    text = page.read_text()
    assert "one" not in text
    assert text.index("three") < text.index("two")


@pytest.mark.parametrize(
    ("value", "like", "expected"),
    [(2.345, "9.9", "2.3"), (0.4171, "3%", "42%"), (1520.4, "7", "1520"), (0.05554, "1.0%", "5.6%")],
)
def test_numbers_keep_their_decimals(value: float, like: str, expected: str) -> None:
    assert shown(value, like) == expected


@pytest.mark.parametrize("figure", sorted(RESULTS.rglob("*.json")), ids=lambda path: path.name)
def test_recorded_commands_can_be_run_on_another_machine(figure: Path) -> None:
    assert not re.search(r'[" =]/(home|root|tmp|work)/', figure.read_text())
