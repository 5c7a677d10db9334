"""The figure beside lm_eval: every disagreement has a class and an id, and no text of a problem is in it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from harness_agreement import Item, number, tables, why

FIGURE = Path(__file__).resolve().parents[2] / "docs" / "figures" / "harness-agreement.json"
ITEM = Item(
    key="k",
    texts="samples",
    form="number",
    gold="18",
    response="It costs 18.",
    correct=False,
    judged_correct=False,
    cut=False,
    extracted="18 dollars",
)


def test_every_disagreement_of_the_figure_is_in_a_class() -> None:
    document = json.loads(FIGURE.read_text())
    cells = [cell for scorers in document["tables"].values() for cell in scorers.values()]
    assert len(cells) >= 12
    for cell in cells:
        differ = cell["only_magicrl_right"] + cell["only_lm_eval_right"]
        assert cell["texts"] == cell["both_right"] + cell["both_wrong"] + differ
        assert sum(found["count"] for found in cell["classes"].values()) == differ
        for found in cell["classes"].values():
            assert len(found["ids"]) == found["count"]
            assert all(re.fullmatch(r"[\w ,'/-]{3,60}", key) for key in found["ids"]), "ids, no texts"


@pytest.mark.parametrize(
    ("item", "scorer", "right", "read", "expected"),
    [
        (replace(ITEM, cut=True, judged_correct=True), "gsm8k", True, "18", "cut at the limit"),
        (replace(ITEM, correct=True), "gsm8k", False, "[invalid]", "the form lm_eval looks for"),
        (replace(ITEM, extracted=None), "gsm8k", True, "18", "no answer is marked"),
        (ITEM, "gsm8k", True, "18", "the same number is read"),
        (
            replace(ITEM, extracted="3", response="#### 18\nThe answer is 3"),
            "gsm8k",
            True,
            "18",
            "two answers are marked",
        ),
        (replace(ITEM, extracted="3"), "gsm8k", True, "18", "another answer is read"),
        (replace(ITEM, correct=True, extracted="18"), "gsm8k", False, "18.00", "the same number in another writing"),
        (replace(ITEM, correct=True, extracted="18"), "gsm8k", False, "7", "another number is read"),
        (
            replace(ITEM, correct=True, extracted="18", response="18 = 7"),
            "minerva_math500 math_verify",
            False,
            "7",
            "the answer is followed by",
        ),
        (replace(ITEM, correct=True), "hendrycks_math500", False, "x", "lm_eval reads all between"),
        (replace(ITEM, correct=True), "minerva_math500", False, "x", "written in another form"),
    ],
)
def test_classes_say_what_each_side_did(item: Item, scorer: str, right: bool, read: str, expected: str) -> None:
    assert expected in why(item, scorer, right, read)


def test_counts_and_classes_add_up() -> None:
    items = [ITEM, replace(ITEM, key="l", correct=True, judged_correct=True)]
    peers = {key: {"scores": {"gsm8k": 1.0}, "read": {"gsm8k": "18"}} for key in ("k", "l")}
    cell = tables(items, peers)["samples"]["gsm8k"]
    assert (cell["both_right"], cell["only_lm_eval_right"], cell["only_magicrl_right"]) == (1, 1, 0)
    assert [found["ids"] for found in cell["classes"].values()] == [["k"]]
    assert number("1,234.50") == number("1234.5") != number("1 or 2")
