"""How far votes agree with each other, and judges with a person."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def fleiss_kappa(counts: Sequence[tuple[int, int]]) -> float | None:
    """Agreement of several raters on two categories beyond chance (Fleiss 1971), 1 at best and 0 at chance.

    Problems may have different numbers of votes; each weighs the same in the observed agreement, and those with fewer
    than two votes do not count.

    Args:
        counts: votes for keeping and for dropping, by problem.

    Returns:
        None where no problem has two votes, or all votes are the same, so that kappa is 0/0.

    Example:
        >>> round(fleiss_kappa([(3, 0), (0, 3), (2, 1), (1, 2)]) or 0, 4)
        0.3333
    """
    rated = [(yes, no) for yes, no in counts if yes + no >= 2]
    if not rated:
        return None
    total = sum(yes + no for yes, no in rated)
    share = sum(yes for yes, _ in rated) / total
    by_chance = share**2 + (1 - share) ** 2
    if by_chance == 1:
        return None
    agreeing = [(yes * (yes - 1) + no * (no - 1)) / ((yes + no) * (yes + no - 1)) for yes, no in rated]
    observed = sum(agreeing) / len(agreeing)
    return (observed - by_chance) / (1 - by_chance)


def cohen_kappa(pairs: Iterable[tuple[bool, bool]]) -> float | None:
    """Agreement of two raters beyond chance (Cohen 1960); None where it is 0/0.

    Example:
        >>> cohen_kappa([(True, True), (False, False), (True, False), (True, True)])
        0.5
    """
    held = list(pairs)
    if not held:
        return None
    n = len(held)
    observed = sum(a == b for a, b in held) / n
    first, second = sum(a for a, _ in held) / n, sum(b for _, b in held) / n
    by_chance = first * second + (1 - first) * (1 - second)
    return None if by_chance == 1 else (observed - by_chance) / (1 - by_chance)


def strength(kappa: float | None) -> str:
    """A word for a kappa (Landis and Koch 1977), so that a weak judge is called one.

    Example:
        >>> strength(0.15), strength(0.7)
        ('weak: slight agreement', 'substantial agreement')
    """
    if kappa is None:
        return "not known: too few votes, or all the same"
    for limit, word in ((0.0, "worthless: no better than chance"), (0.2, "weak: slight agreement")):
        if kappa <= limit:
            return word
    for limit, word in ((0.4, "weak: fair agreement"), (0.6, "moderate agreement"), (0.8, "substantial agreement")):
        if kappa <= limit:
            return word
    return "almost perfect agreement"
