"""The page of a repeated step, from a small object like that of ``magicrl explain --step N --json``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.unit.reporting.conftest import HOSTILE
from tests.unit.reporting.test_run_page import asks_for_nothing

from magicrl.commands.explain import explain_figures, explain_summary, group_rows, write_explain_page


def group(problem: str, *, text: str = "7", norm: float = 1.0, learned: bool = True) -> dict[str, Any]:
    response = {
        "outcome": "correct", "status": "matched", "truncated": False, "reward": 1.0, "advantage": 1.0,
        "tokens": [text, "!"], "logprob": [-0.5, -0.1], "change": [0.1, 0.0], "norm": [0.001, 1.0],
    }  # fmt: skip
    return {
        "problem": problem, "prompt": "3 + 4", "learned_from": learned, "gain": 0.5, "norm": norm,
        "responses": [response],
    }  # fmt: skip


@pytest.fixture
def found() -> dict[str, Any]:
    update = {
        "sgd_steps": 1, "learning_rate": 1e-4, "alpha": 0.0, "norm": 0.1, "own_norm": 0.1, "entropy": 0.5,
        "entropy_change": 0.0, "grad_norms": [{"recorded": 1.0, "float64": 1.0}],
    }  # fmt: skip
    return {
        "run": "runs/toy", "step": 3, "seconds": 1.0, "equal": True, "from_checkpoint": 2, "warnings": [],
        "checks": [{"name": "metrics", "equal": True, "recorded": "a" * 64, "repeated": "a" * 64, "note": ""}],
        "update": update, "what_if": [],
        "groups": [group("first"), group("second", text=HOSTILE, norm=-2.0), group("third", learned=False)],
    }  # fmt: skip


def test_groups_are_listed_by_the_size_of_their_share(found: dict[str, Any]) -> None:
    found["groups"][2]["gain"] = 0.0  # not trained on, and not changed
    head, rows = group_rows(found)
    assert [dict(zip(head, row, strict=True)) for row in rows] == [
        {"group": "2", "problem": "second", "mean reward": "1", "norm": "-2", "gain": "+0.5"},
        {"group": "1", "problem": "first", "mean reward": "1", "norm": "+1", "gain": "+0.5"},
    ]


def test_each_comparison_with_the_recording_is_a_figure(found: dict[str, Any]) -> None:
    found["checks"] += [
        {"name": "weights", "equal": False, "recorded": "b" * 64, "repeated": "c" * 64, "note": ""},
        {"name": "rollouts", "equal": None, "recorded": None, "repeated": "d" * 64, "note": "not recorded"},
    ]
    compared = [
        ("metrics", f"equal, SHA-256 {'a' * 16}"),
        ("weights", f"NOT equal: {'b' * 16} recorded, {'c' * 16} repeated"),
        ("rollouts", "not compared: not recorded"),
    ]
    assert explain_figures(found)[1:5] == [*compared, ("SGD steps", "1, rate 0.0001, alpha 0")]
    found["update"]["sgd_steps"] = 0
    assert explain_figures(found)[1:] == [*compared, ("update", "none: every group was rejected")]


def test_the_page_begins_with_what_the_step_did(found: dict[str, Any], tmp_path: Path) -> None:
    found["update"]["entropy_change"] = -0.02
    text = "Step 3 made 1 update with 2 of 3 groups: in 2 of these the better responses became more likely relative to"
    assert explain_summary(found).startswith(text)
    assert explain_summary(found).endswith("the entropy fell by 0.02 to 0.48 nats per token.")
    page = write_explain_page(found, tmp_path / "page.html").read_text()
    assert page.index(text) < page.index("equal to the recording")
    found["update"]["sgd_steps"] = 0
    assert explain_summary(found).startswith("Step 3 changed no weight")


def test_tokens_stay_text_and_are_as_dark_as_their_share(found: dict[str, Any], tmp_path: Path) -> None:
    page = write_explain_page(found, tmp_path / "page.html").read_text()
    assert asks_for_nothing(page).count("script") == 2
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "\x1b" not in page
    assert "0.001, once<" in page
    assert "+3, 3 times<" in page
    assert re.findall(r'<span class="(e\d)" title="norm \+1, log-prob [^"]+">!</span>', page) == ["e4"] * 3
