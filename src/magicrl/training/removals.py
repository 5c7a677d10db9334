"""Which problems a filter removed, by source and by difficulty."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

from magicrl.records import Problem

Removals: TypeAlias = dict[str, dict[str, tuple[int, int]]]
"""``source`` and ``difficulty`` -> name -> (removed, all)."""


def removals(problems: Sequence[Problem], removed: Collection[str]) -> Removals:
    """How many of ``problems`` have a key among ``removed``, by source and by difficulty.

    The difficulty is a generated problem's level, else the released schema's ``model_difficulty``: the number of failed
    samples of each model, so that such a problem counts once for every model. Problems without either are ``unknown``.

    Example:
        >>> easy = Problem(id="a", prompt="1+1?", golds=("2",), verifier="exact", source="sums", level=1)
        >>> hard = Problem(id="b", prompt="9+9?", golds=("18",), verifier="exact", source="sums", level=2)
        >>> removals([easy, hard], {easy.key})
        {'source': {'sums': (1, 2)}, 'difficulty': {'level 1': (1, 1), 'level 2': (0, 1)}}
    """
    gone = set(removed)
    found: Removals = {"source": {}, "difficulty": {}}
    for problem in problems:
        names = [("source", problem.source), *(("difficulty", name) for name in difficulties_of(problem))]
        for kind, name in names:
            dropped, total = found[kind].get(name, (0, 0))
            found[kind][name] = (dropped + (problem.key in gone), total + 1)
    return {kind: dict(sorted(counts.items())) for kind, counts in found.items()}


def difficulties_of(problem: Problem) -> list[str]:
    """What is known of a problem's difficulty."""
    if problem.level is not None:
        return [f"level {problem.level}"]
    info: Any = problem.extra.get("extra_info")
    table: Any = info.get("model_difficulty") if isinstance(info, Mapping) else None
    if not isinstance(table, Mapping) or not table:
        return ["unknown"]
    return [f"{model}: {failed} failed" for model, failed in table.items() if failed is not None]


def in_words(counts: Mapping[str, tuple[int, int]]) -> str:
    """``sums 1 of 2, stories 0 of 5``."""
    return ", ".join(f"{name} {removed} of {total}" for name, (removed, total) in counts.items())
