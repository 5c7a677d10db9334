"""Votes of an earlier call, read without asking anybody."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from magicrl.pipeline.judging.problems import Judgement, Vote


def stored_judgements(folder: Path, problems: Collection[str], threshold: int) -> list[Judgement]:
    """Judgements of these problems from the ``votes.jsonl`` of ``judge_problems``, in the order of the file.

    Of votes with the same judge and index (asked for under other settings) the last counts. Of problems with equal
    statements, which share their votes, only the one that they were asked for is found.

    Args:
        folder: that holds ``votes.jsonl``.
        problems: ids.
        threshold: least number of votes for keeping.

    Raises:
        ValueError: there are no votes.
    """
    path = folder / "votes.jsonl"
    if not path.is_file():
        raise ValueError(f"{path}: no such file; give the folder of a judging step that has run")
    votes: dict[str, dict[tuple[str, int], Vote]] = {}
    with path.open(encoding="utf-8") as file:
        for line in file:
            if not line.endswith("\n"):
                break  # cut short by a kill
            fields: dict[str, Any] = json.loads(line)
            del fields["key"]
            vote = Vote(**fields)
            if vote.problem in problems:
                votes.setdefault(vote.problem, {})[vote.judge, vote.index] = vote
    return [_judgement(name, tuple(found.values()), threshold) for name, found in votes.items()]


def _judgement(name: str, votes: tuple[Vote, ...], threshold: int) -> Judgement:
    keeps = sum(vote.keep is True for vote in votes)
    valid = sum(vote.status == "valid" for vote in votes)
    return Judgement(problem=name, votes=votes, valid=valid, keeps=keeps, keep=keeps >= threshold)
