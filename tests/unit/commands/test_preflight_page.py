"""The page of a check before a run, from a small object like that of ``magicrl preflight --json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.reporting.conftest import HOSTILE
from tests.unit.reporting.test_run_page import asks_for_nothing

from magicrl.commands.preflight import preflight_figures, preflight_verdict, write_preflight_page

SHARE = {"mean": 0.5, "low": 0.25, "high": 0.75}


@pytest.fixture
def found() -> dict[str, Any]:
    answers = {"groups": 8, "max_tokens": 24, "truncated": 0.125, "answered": 0.75}
    learnable = {
        "answers": answers, "group_size": 4, "lengths": [5, 9, 24], "pass_1": SHARE, "pass_all": SHARE, "signal": SHARE,
        "example": HOSTILE, "example_references": ["<b>37</b>"], "example_verdict": "wrong (not equal)",
    }  # fmt: skip
    reward = {
        "references": 40, "unread": 3, "consensus": 10, "against": 2, "second": {},
        "earned": {"an empty response": 0.0},
    }  # fmt: skip
    learnable["rewards"] = {"brief": {"weight": 0.5, "mean": 0.25, "signal": 0.75, "not_judged": 0.125}}
    return {
        "recipe": "toy", "seconds": 1.0, "findings": [], "learnable": learnable, "reward": reward, "longer": None,
        "template": {"prompt": "<b>", "end": "</s>", "system": ""}, "update": None, "cost": None,
    }  # fmt: skip


def test_the_figures_are_those_of_the_labels(found: dict[str, Any]) -> None:
    figures = dict(preflight_figures(found))
    assert figures["reference answers read"] == "37 of 40"
    assert figures["pass@1"] == "50.0 % (95 %: 25.0 % to 75.0 %)"
    assert figures["truncated"] == "12.5 % at T = 24"
    assert figures["reward brief, weight 0.5"] == "mean 0.25, unequal in 75.0 % of the groups, 12.5 % not judged"
    assert figures["problems × responses"] == "8 × 4"
    assert figures["sample answer"].endswith(": wrong (not equal); reference answer: <b>37</b>")
    for example, end in (("unbroken " + 78 * "x", "'… " + 78 * "x"), (90 * "x", "'… " + 80 * "x")):
        found["learnable"]["example"] = example
        assert dict(preflight_figures(found))["sample answer"].startswith(f"{end}':"), "from a whole word on"


def test_one_finding_that_stops_makes_the_recipe_unsound(found: dict[str, Any], tmp_path: Path) -> None:
    warning = {"name": "few_solved", "severity": "warning", "message": "m", "remedy": "r"}
    assert preflight_verdict(found).startswith("Sound")
    assert preflight_verdict(found | {"findings": [warning]}).endswith("learning, 1 warning.")
    stopped = found | {"findings": [warning, warning | {"name": "constant_reward", "severity": "stop"}]}
    assert preflight_verdict(stopped).startswith("Not sound: constant reward.")
    page = write_preflight_page(stopped, tmp_path / "page.html").read_text()
    assert asks_for_nothing(page).count("script") == 2, "an answer of the model stays text"
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "answer: wrong (not equal)" in page
    assert "&lt;b&gt;37&lt;/b&gt;" in page
