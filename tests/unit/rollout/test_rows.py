"""Rows in flight stay in order of descending length, and the reported moves are complete."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from magicrl.records import Problem, RolloutRequest, SamplingParams, frozen_tokens
from magicrl.rollout.requests import GroupProgress
from magicrl.rollout.rows import RowTable
from magicrl.rollout.sampling import uniforms


def _group(order: int, samples: int) -> GroupProgress:
    request = RolloutRequest(
        draw=order,
        problem=Problem(id=f"p{order}", prompt="", references=("1",), verifier="exact", source="test"),
        prompt_tokens=frozen_tokens([1] * (order + 1)),
        group_size=samples,
        sampling=SamplingParams(temperature=1.0, max_tokens=99, seed=0),
    )
    return GroupProgress(order=order, request=request, place=order)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), cohorts=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=5))
def test_rows_stay_by_descending_length_and_moves_are_complete(data: Any, cohorts: list[tuple[int, int]]) -> None:
    """Start groups one after the other with steps between, then end arbitrary rows.

    A cache that makes only the reported moves must hold in every row what the table says, as far as it is filled.
    """
    table = RowTable(24, 99)
    for order, (samples, steps) in enumerate(cohorts):
        table.start(_group(order, samples), samples, 0)
        for _ in range(steps):
            rows = slice(0, table.active)
            blank = np.zeros(table.active)
            table.record(rows, np.arange(table.active), blank, blank)

    def key(row: int) -> tuple[int, int]:
        return int(table.column("draw")[row]), int(table.column("sample")[row])

    held = [key(row) for row in range(table.active)]
    counts = {key(row): int(table.column("count")[row]) for row in range(table.active)}
    ended = data.draw(st.sets(st.integers(0, table.active - 1), min_size=1))
    left = {held[row] for row in range(table.active) if row not in ended}
    before = held.copy()
    moves = table.remove(sorted(ended))
    assert len({target for _, target, _ in moves}) == len(moves)
    for source, target, tokens in moves:
        assert tokens == counts[before[source]] - 1
        held[target] = before[source]
    assert table.active == len(left)
    assert held[: table.active] == [key(row) for row in range(table.active)]
    assert set(held[: table.active]) == left
    assert (np.diff(table.column("count")) <= 0).all()


def test_few_rows_move_when_one_of_many_ends() -> None:
    """Use three lengths of eight rows each: at most one move per length."""
    table = RowTable(24, 9)
    for order in range(3):
        table.start(_group(order, 8), 8, 0)
        blank = np.zeros(table.active)
        table.record(slice(0, table.active), blank.astype(int), blank, blank)
    assert [move[:2] for move in table.remove([2])] == [(7, 2), (15, 7), (23, 15)]
    assert table.remove([22]) == []


def test_a_prompt_that_moves_is_found_again() -> None:
    table = RowTable(6, 9)
    for order in range(3):
        table.start(_group(order, 2), 2, 0)
    table.moved_prompt(2, 0)
    assert table.column("owner").tolist() == [0, 0, 1, 1, 0, 0]


def test_every_position_has_its_own_random_number() -> None:
    """Check for any length of the response and any place of its row."""
    table = RowTable(4, 200)
    table.start(_group(3, 2), 2, 0)
    found = []
    for _ in range(150):
        found.append(table.next_uniforms(slice(0, 2)).copy())
        table.record(slice(0, 2), np.zeros(2, dtype=int), np.zeros(2), np.zeros(2))
    draw, samples = np.uint64(3), np.arange(2, dtype=np.uint64)[:, None]
    expected = uniforms(np.uint64(0), draw, samples, np.arange(150)[None, :])
    assert (expected == np.array(found).T).all()
    assert len(np.unique(expected)) == 300
