"""docs/benchmarks.md says what the committed JSON files say."""

from __future__ import annotations

import re
from pathlib import Path

import common
import pytest
from benchmark_page import PAGE, second_machine, value_at


def test_every_marked_number_is_its_files_number() -> None:
    text = PAGE.read_text()
    marked = list(common.MARKED.finditer(text))
    assert len(marked) == text.count("<!--="), "a marker without a number before it"
    assert len(marked) > 10
    for match in marked:
        assert match["text"] == common.shown(value_at(match["path"]), match["text"]), match[0]


def test_the_second_machines_table_is_that_of_its_files() -> None:
    assert "\n".join(["<!-- begin second-machine -->", "", *second_machine(), ""]) in PAGE.read_text()


@pytest.mark.parametrize(
    ("value", "like", "expected"),
    [(2.345, "9.9", "2.3"), (0.4171, "3%", "42%"), (1520.4, "7", "1520"), (0.05554, "1.0%", "5.6%")],
)
def test_numbers_keep_their_decimals(value: float, like: str, expected: str) -> None:
    assert common.shown(value, like) == expected


@pytest.mark.parametrize("figure", sorted(common.COMMITTED.rglob("*.json")), ids=lambda path: path.name)
def test_recorded_commands_can_be_run_on_another_machine(figure: Path) -> None:
    assert not re.search(r'[" =]/(home|root|tmp|work)/', figure.read_text())
