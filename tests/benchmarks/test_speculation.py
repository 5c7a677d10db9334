"""The replay of drafts on recorded tokens, by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from speculation import pass_cost, play


def test_without_drafts_every_token_is_a_pass() -> None:
    played = play([[[1, 2, 3], [4]]], cost=float, most=0, tail=None)
    assert (played.passes, played.drafted, played.cost) == (3, 0, 2 + 1 + 1)  # rows: 2, then 1, then 1


def test_a_repeated_response_is_drafted_from_itself() -> None:
    # 7 8 7 8 7: with 7 8 7 known the draft after "7" is "8 7"; both are right and the response ends
    played = play([[[7, 8, 7, 8, 7]]], cost=float, most=4, tail=None)
    assert played.kept == 2
    assert played.passes == 4
    assert played.cost == 1 + 1 + 1 + 3


def test_a_wrong_draft_costs_its_positions_and_changes_no_token() -> None:
    # after "7 8 7" the draft is "8 7"; what comes is 9
    played = play([[[7, 8, 7, 9]]], cost=float, most=4, tail=None)
    assert (played.kept, played.drafted, played.passes) == (0, 2, 4)


def test_drafts_begin_when_few_rows_are_left() -> None:
    groups = [[[7, 8, 7, 8, 7]], [[1, 2, 3, 4, 5]]]
    assert play(groups, cost=float, most=4, tail=1).drafted == 0  # both end at once
    assert play(groups, cost=float, most=4, tail=2).drafted > 0


def test_the_cost_of_a_pass_is_interpolated(tmp_path: Path) -> None:
    points = [{"question": "rows", "samples": n, "decode_tokens_per_cpu_s": n / s} for n, s in ((1, 2.0), (3, 4.0))]
    (tmp_path / "growth.json").write_text(json.dumps({"points": [*points, {"question": "context"}]}))
    cost, known = pass_cost(tmp_path / "growth.json")
    assert known == [(1.0, 2.0), (3.0, 4.0)]
    assert cost(2) == pytest.approx(3.0)
    assert cost(6) == pytest.approx(8.0)
