"""Wrong labels on purpose, for studies of what they cost (the report's ablation 1)."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from magicrl.records import Problem

MARK = "label"
"""Key of ``Problem.extra``; its value is "wrong" where the golds are another problem's."""


def with_wrong_labels(problems: Sequence[Problem], share: float) -> list[Problem]:
    """The problems in their order, about ``share`` of them with the golds of another one.

    Which ones, and whose golds they get, depends on ids alone: a larger share adds wrong labels and moves none.

    Args:
        problems: of one source.
        share: of wrong labels, 0 to 1.

    Raises:
        ValueError: all problems have the same golds, so that no other answer is at hand.
    """
    if not share:
        return list(problems)
    golds = sorted({problem.golds for problem in problems})
    if len(golds) < 2:
        raise ValueError(
            f"label_noise = {share:g}: all {len(problems)} problems have one answer; nothing is wrong for it"
        )
    return [_wrong(problem, golds) if _uniform(problem.key, "chosen") < share else problem for problem in problems]


def _wrong(problem: Problem, golds: Sequence[tuple[str, ...]]) -> Problem:
    """The problem with golds drawn from the others', each distinct answer alike; ``golds`` are sorted."""
    own = bisect_left(golds, problem.golds)
    place = int(_uniform(problem.key, "given") * (len(golds) - 1))
    given = golds[place if place < own else place + 1]
    return replace(problem, golds=given, extra={**problem.extra, MARK: "wrong"})


def _uniform(name: str, purpose: str) -> float:
    """A number in [0, 1) that is the name's own."""
    digest = hashlib.blake2b(f"{purpose}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
