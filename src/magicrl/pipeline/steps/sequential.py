"""When a problem needs no further samples: the sequential test of the difficulty step. Pure functions."""

from __future__ import annotations

import math

from magicrl.pipeline.settings import EarlyStop


def chance_of_the_same(counted: int, total: int, prior: float) -> float:
    """The chance that all further samples turn out as all before did.

    The pass rate has a Beta(prior, prior) distribution; after ``counted`` equal outcomes the rest of ``total`` is equal
    with probability B(prior + total, prior) / B(prior + counted, prior).

    Example:
        >>> round(chance_of_the_same(4, 16, 0.5), 3)
        0.512
        >>> chance_of_the_same(16, 16, 0.5)
        1.0
    """
    assert 0 <= counted <= total, (counted, total)
    return math.exp(_log_beta(prior + total, prior) - _log_beta(prior + counted, prior))


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def is_closed(correct: int, counted: int, total: int, rule: EarlyStop) -> bool:
    """Whether it is settled that the problem is solved sometimes, or sure enough that it is never or always.

    Args:
        correct: right samples so far.
        counted: judged samples so far.
        total: N.
        rule: first round, confidence and prior.
    """
    if counted >= total or 0 < correct < counted:
        return True
    return counted >= rule.first and chance_of_the_same(counted, total, rule.prior) >= rule.confidence


def failures_of_sixteen(correct: int, counted: int) -> int:
    """``model_difficulty`` as it was released: failures of 16; 0 and 16 only where every sample says so.

    Example:
        >>> [failures_of_sixteen(correct, 8) for correct in (0, 1, 7, 8)]
        [16, 14, 2, 0]
        >>> failures_of_sixteen(63, 64)
        1
    """
    assert 0 <= correct <= counted
    assert counted > 0
    scaled = round(16 * (counted - correct) / counted)
    return min(max(scaled, int(correct < counted)), 16 - int(correct > 0))
