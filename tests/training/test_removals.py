"""What a filter removed, counted by source and difficulty as a run's events tell it."""

from __future__ import annotations

from typing import Any

from magicrl.records import Problem
from magicrl.training.curriculum import difficulties_of, in_words, removals


def problem(name: str, source: str, **more: Any) -> Problem:
    return Problem(id=f"#{name}", key=name, prompt="?", golds=("1",), verifier="exact", source=source, **more)


def released(name: str, table: object) -> Problem:
    return problem(name, "numina", extra={"extra_info": {"index": 1, "model_difficulty": table}})


def test_by_source_and_by_difficulty() -> None:
    problems = [problem("a", "sums", level=1), problem("b", "sums", level=2), released("c", {"7B": 3, "32B": 1})]
    found = removals(problems, ["a", "c", "not among them"])
    assert found["source"] == {"numina": (1, 1), "sums": (1, 2)}
    assert found["difficulty"] == {
        "32B: 1 failed": (1, 1),
        "7B: 3 failed": (1, 1),
        "level 1": (1, 1),
        "level 2": (0, 1),
    }
    assert in_words(found["source"]) == "numina 1 of 1, sums 1 of 2"


def test_a_difficulty_that_nobody_told_is_unknown() -> None:
    for odd in (problem("a", "s"), released("b", {}), released("c", None), problem("d", "s", extra={"extra_info": 3})):
        assert difficulties_of(odd) == ["unknown"]
