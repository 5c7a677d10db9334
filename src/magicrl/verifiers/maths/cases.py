"""Definitions by cases: the same values under the same conditions, in any order."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

from magicrl.verifiers.maths.answers import Answer, Piecewise

Same = Callable[[Answer, Answer], "bool | None"]
_MOST_PIECES = 6


def same_cases(gold: Piecewise, answer: Piecewise, same: Same) -> bool | None:
    """Whether every case of one is a case of the other; "otherwise" may stand for the one condition left over."""
    if len(gold.pieces) != len(answer.pieces) or len(gold.pieces) > _MOST_PIECES:
        return False
    unknown = False
    for order in permutations(answer.pieces):
        verdicts = [_same_case(one, other, same) for one, other in zip(gold.pieces, order, strict=True)]
        if all(verdict is True for verdict in verdicts):
            return True
        unknown = unknown or False not in verdicts
    return None if unknown else False


def _same_case(gold: tuple[Answer, Answer | None], answer: tuple[Answer, Answer | None], same: Same) -> bool | None:
    value = same(gold[0], answer[0])
    if value is not True or gold[1] is None or answer[1] is None:
        return value  # all other cases agree, so that "otherwise" is what is left
    return same(gold[1], answer[1])
