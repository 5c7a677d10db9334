"""Test-time scaling from one set of long samples (Fig. 8 of the report): no further sampling.

At a limit L a response of more than L tokens counts as truncated, that is as wrong. That is exact only while the
sampler does not know the limit, and where no answer is forced at it; the result says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from magicrl.evaluation.samples import SampleRow
from magicrl.evaluation.scoring import votes
from magicrl.evaluation.statistics import majority_at_k, mean_of, pass_at_k, share

SHORTEST_LIMIT = 16


def limits_up_to(max_tokens: int) -> list[int]:
    """T and its halves down to 16 tokens, ascending.

    Example:
        >>> limits_up_to(100)
        [25, 50, 100]
    """
    limits = [max_tokens]
    while limits[-1] // 2 >= SHORTEST_LIMIT:
        limits.append(limits[-1] // 2)
    return limits[::-1]


def powers_up_to(most: int) -> list[int]:
    """1, 2, 4, ... and ``most`` itself.

    Example:
        >>> powers_up_to(6)
        [1, 2, 4, 6]
    """
    powers = [1]
    while powers[-1] * 2 <= most:
        powers.append(powers[-1] * 2)
    return powers if powers[-1] == most else [*powers, most]


def limit_curve(problems: Sequence[Sequence[SampleRow]], limits: Sequence[int]) -> list[dict[str, Any]]:
    """Accuracy, truncation and mean tokens at every response limit, clustered by problem.

    Args:
        problems: rows of each problem, sampled at a limit that is no shorter than any of ``limits``.
        limits: in tokens, the end token included.

    Raises:
        ValueError: a response was cut before one of the limits, so that nobody knows what it would have become.
    """
    judged = [rows for rows in ([row for row in rows if row.counted] for rows in problems) if rows]
    cut = min((row.tokens for rows in judged for row in rows if row.truncated), default=None)
    if cut is not None and cut < max(limits):
        raise ValueError(f"a response was cut at {cut} tokens: no limit beyond that can be computed, got {max(limits)}")
    points: list[dict[str, Any]] = []
    for limit in limits:
        right = [float(np.mean([row.correct and row.tokens <= limit for row in rows])) for rows in judged]
        over = [float(np.mean([row.tokens > limit or row.truncated for row in rows])) for rows in judged]
        spent = [float(np.mean([min(row.tokens, limit) for row in rows])) for rows in judged]
        points.append(
            {
                "limit": limit,
                "accuracy": share(right).as_dict(),
                "truncation": share(over).as_dict(),
                "mean_tokens": mean_of(spent).as_dict(),
            }
        )
    return points


def sample_curve(
    problems: Sequence[Sequence[SampleRow]], counts: Sequence[int], *, vote: bool = True
) -> list[dict[str, Any]]:
    """pass@k and (with ``vote``) maj@k for every k, over the problems that have k judged samples."""
    tallies = [votes([row for row in rows if row.counted]) for rows in problems]
    points: list[dict[str, Any]] = []
    for k in counts:
        enough = [tally for tally in tallies if tally[0] + sum(tally[1]) + tally[2] >= k]
        if not enough:
            continue
        passed = [pass_at_k(right, right + sum(wrong) + silent, k) for right, wrong, silent in enough]
        point: dict[str, Any] = {"k": k, "pass": share(passed).as_dict()}
        if vote:
            point["majority"] = share([majority_at_k(*tally, k) for tally in enough]).as_dict()
        points.append(point)
    return points


def accuracy_at_mean_length(curve: Sequence[dict[str, Any]], tokens: float) -> float | None:
    """Token efficiency: the accuracy that a limit gives at which a response costs ``tokens`` on average.

    Linear between the curve's points; None beyond them.
    """
    spent = [point["mean_tokens"]["mean"] for point in curve]
    right = [point["accuracy"]["mean"] for point in curve]
    if not spent or not spent[0] <= tokens <= spent[-1]:
        return None
    return float(np.interp(tokens, spent, right))


def scaling(
    problems: Sequence[Sequence[SampleRow]], max_tokens: int, *, knows_limit: bool, vote: bool = True
) -> dict[str, Any]:
    """Both curves, and whether the one over limits is exact."""
    most = max(sum(row.counted for row in rows) for rows in problems)
    return {
        "over_limits": limit_curve(problems, limits_up_to(max_tokens)),
        "exact": not knows_limit,
        "assumption": "a response longer than a limit counts as wrong there; exact while the sampler does not know the "
        "limit and no answer is forced at it",
        "over_samples": sample_curve(problems, powers_up_to(most), vote=vote),
    }
