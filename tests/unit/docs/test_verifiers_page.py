"""docs/reference/maths-verifier.md: its examples run, its steps and statuses exist, its figures are measured."""

from __future__ import annotations

import doctest
import json
import re
from pathlib import Path

from magicrl_verifiers.maths.maths_verifier import CHEAP_STEPS
from magicrl_verifiers.records import OUTCOME_OF_STATUS

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "reference" / "maths-verifier.md"
FIGURES = ROOT / "benchmarks" / "results" / "maths-verifier.json"


def test_the_examples_run() -> None:
    results = doctest.testfile(str(PAGE), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.attempted > 5
    assert results.failed == 0


def test_every_step_and_status_is_named() -> None:
    text = PAGE.read_text()
    steps = re.findall(r"^\| `(\w+)` \| ", text, re.MULTILINE)
    assert [name for name, _ in CHEAP_STEPS] == [name for name in steps if name in dict(CHEAP_STEPS)]
    assert {"extraction", "boxes", "math_verify"} <= set(steps)
    table = text[text.index("| status | outcome |") :].split("\n## ")[0]
    programs = (PAGE.parent / "code-verifier.md").read_text().partition("## Statuses")[2].split("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", table + programs))
    graded = {"score_reached", "score_below", "reward_failed", "environment_failed"}
    assert named == set(OUTCOME_OF_STATUS) - graded, "a new status is on the page of its verifier"


def test_the_figures_are_those_of_the_last_measurement() -> None:
    figures = json.loads(FIGURES.read_text())
    marks = re.findall(r"([\d.,]+)<!--=([\w.]+)-->", PAGE.read_text())
    assert len(marks) > 10
    for shown, path in marks:
        value = figures
        for key in path.split("."):
            value = value[key]
        decimals = len(shown.partition(".")[2])
        assert shown.replace(",", "") == f"{value:.{decimals}f}", path
