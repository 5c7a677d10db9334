"""Answers in every notation that one meets: each gold with right spellings and with wrong neighbours.

The tables are text files beside this one: ``=`` a gold, ``+`` what says the same, ``-`` what does not; ``~`` what says
the same and is known to be missed. The "unmet" ones and the one on equality were written whole before they were run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from magicrl.verifiers.base import JudgeOptions
from magicrl.verifiers.maths.maths_verifier import MathsVerifier

VERIFIER = MathsVerifier(JudgeOptions())
# as a worker does: what the first integral loads would count against its CPU limit
VERIFIER.judge([r"\int_0^1 2x \, dx"], r"\boxed{\int_0^1 2y \, dy}")


@dataclass
class Row:
    gold: str
    right: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def table(name: str) -> list[Row]:
    rows: list[Row] = []
    for line in Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines():
        mark, _, rest = line.partition(" ")
        if mark == "=":
            rows.append(Row(rest))
        elif mark in ("+", "-"):
            (rows[-1].right if mark == "+" else rows[-1].wrong).extend(rest.split(" || "))
    assert all(row.wrong for row in rows)
    return rows


TABLES = ("spellings.txt", "unmet_first.txt", "unmet_second.txt", "equality.txt")
BOXED = [row for name in TABLES for row in table(name)]
RUNNING = [row for name in ("running_text.txt", "running_first.txt", "running_second.txt") for row in table(name)]


@pytest.mark.parametrize("row", BOXED, ids=lambda row: row.gold)
def test_in_a_box(row: Row) -> None:
    boxed = {one: VERIFIER.judge([row.gold], f"\\boxed{{{one}}}").correct for one in (row.gold, *row.right, *row.wrong)}
    assert [one for one in (row.gold, *row.right) if not boxed[one]] == []
    assert [one for one in row.wrong if boxed[one]] == []


@pytest.mark.parametrize("row", RUNNING, ids=lambda row: row.gold)
def test_in_running_text(row: Row) -> None:
    assert [one for one in row.right if not VERIFIER.judge([row.gold], one).correct] == []
    assert [one for one in row.wrong if VERIFIER.judge([row.gold], one).correct] == []


@pytest.mark.parametrize(
    ("response", "gold", "correct"),
    [
        ("So answer = 48, no: one more.\n#### 66", "66", True),
        ("So answer = 48, no: one more.\n#### 66", "48", False),
        ("The answer is 48.\n#### 1,066\n", "1066", True),
        ("### Final answer\n18", "18", True),  # a heading, and the answer under it
        ("#### 66\nThe answer is 48.", "48", True),  # the line is not the last one
        ("The answer is 48.\n#### Conclusion", "48", True),  # a heading
    ],
)
def test_a_last_line_behind_four_hashes_is_the_answer(response: str, gold: str, correct: bool) -> None:
    assert VERIFIER.judge([gold], response).correct is correct
