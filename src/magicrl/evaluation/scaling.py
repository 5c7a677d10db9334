"""Test-time scaling (Fig. 8 of the report): accuracy against the response limit, the length and the samples.

At a limit L a response of more than L tokens counts as truncated, that is as wrong. From one set of long samples that
gives the whole curve without further sampling. It is exact only while the sampler does not know the limit, and where
no answer is forced at it; samples that were drawn anew at each limit (``fresh_point``) show whether it holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np

from magicrl.evaluation.samples import SampleRow
from magicrl.evaluation.statistics import (
    Clusters,
    Estimate,
    majority_at_k,
    mean_of,
    paired_difference,
    pass_at_k,
    share,
    votes,
)

SHORTEST_LIMIT = 16
MARKS = {"+": (True, False, True), "-": (False, False, True), "~": (False, True, True), "?": (False, False, False)}
"""One character a sample in ``results.json``: right, wrong, cut at the limit, not judged."""


@dataclass(frozen=True, slots=True)
class Marked:
    """A sample as ``results.json`` keeps it."""

    tokens: int
    correct: bool
    truncated: bool
    counted: bool


Spent: TypeAlias = SampleRow | Marked
"""What a curve over limits reads of a sample."""


def mark(row: SampleRow) -> str:
    """The sample's character of ``MARKS``."""
    return "?" if not row.counted else "~" if row.truncated else "+" if row.correct else "-"


def from_marks(marks: str, tokens: Sequence[int]) -> list[Marked]:
    """The samples of a problem as ``results.json`` has them.

    Raises:
        ValueError: an unknown character, or another number of tokens.
    """
    if set(marks) - set(MARKS) or len(marks) != len(tokens):
        raise ValueError(f"outcomes {marks!r} with {len(tokens)} tokens are no record of samples")
    return [Marked(n, *MARKS[character]) for character, n in zip(marks, tokens, strict=True)]


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


def judged_only(problems: Sequence[Sequence[Spent]]) -> list[list[Spent]]:
    """Judged samples of the problems that have any."""
    return [rows for rows in ([row for row in rows if row.counted] for rows in problems) if rows]


def _where(wanted: Sequence[bool], clusters: Clusters) -> Clusters:
    """The clusters of the problems that are wanted."""
    return None if clusters is None else [c for c, one in zip(clusters, wanted, strict=True) if one]


def _judged_clusters(problems: Sequence[Sequence[Spent]], clusters: Clusters) -> Clusters:
    """The clusters of the problems that have judged samples."""
    return _where([any(row.counted for row in rows) for rows in problems], clusters)


def right_within(rows: Sequence[Spent], limit: int) -> float:
    """The share of a problem's judged samples that are right within ``limit`` tokens."""
    return sum(row.correct and row.tokens <= limit for row in rows) / len(rows)


def limit_curve(
    problems: Sequence[Sequence[Spent]], limits: Sequence[int], clusters: Clusters = None
) -> list[dict[str, Any]]:
    """Accuracy, truncation and mean tokens at every response limit, with clustered intervals.

    Args:
        problems: rows of each problem, sampled at a limit that is no shorter than any of ``limits``.
        limits: in tokens, the end token included.
        clusters: of the problems.

    Raises:
        ValueError: a response was cut before one of the limits, so that nobody knows what it would have become.
    """
    judged, clusters = judged_only(problems), _judged_clusters(problems, clusters)
    cut = min((row.tokens for rows in judged for row in rows if row.truncated), default=None)
    if cut is not None and cut < max(limits):
        raise ValueError(f"a response was cut at {cut} tokens: no limit beyond that can be computed, got {max(limits)}")
    points: list[dict[str, Any]] = []
    for limit in limits:
        right = [right_within(rows, limit) for rows in judged]
        over = [float(np.mean([row.tokens > limit or row.truncated for row in rows])) for rows in judged]
        spent = [float(np.mean([min(row.tokens, limit) for row in rows])) for rows in judged]
        points.append(
            {
                "limit": limit,
                "accuracy": share(right, clusters).as_dict(),
                "truncation": share(over, clusters).as_dict(),
                "mean_tokens": mean_of(spent, clusters).as_dict(),
            }
        )
    return points


def sample_curve(
    problems: Sequence[Sequence[SampleRow]], counts: Sequence[int], clusters: Clusters = None, *, vote: bool = True
) -> list[dict[str, Any]]:
    """pass@k and (with ``vote``) maj@k for every k, over the problems that have k judged samples."""
    tallies = [votes([row for row in rows if row.counted]) for rows in problems]
    points: list[dict[str, Any]] = []
    for k in counts:
        many = [tally[0] + sum(tally[1]) + tally[2] >= k for tally in tallies]
        enough, named = [tally for tally, one in zip(tallies, many, strict=True) if one], _where(many, clusters)
        if not enough:
            continue
        passed = [pass_at_k(right, right + sum(wrong) + silent, k) for right, wrong, silent in enough]
        point: dict[str, Any] = {"k": k, "pass": share(passed, named).as_dict()}
        if vote:
            point["majority"] = share([majority_at_k(*tally, k) for tally in enough], named).as_dict()
        points.append(point)
    return points


def mean_length_within(problems: Sequence[Sequence[Spent]], limit: int) -> float:
    """Mean tokens of a response, clustered by problem, if all were cut at ``limit``."""
    judged = judged_only(problems)
    return sum(sum(min(row.tokens, limit) for row in rows) / len(rows) for rows in judged) / len(judged)


def limit_for_mean_length(problems: Sequence[Sequence[Spent]], tokens: float) -> int | None:
    """The largest limit at which a response costs at most ``tokens`` on average.

    None where even one token a response is more, or where the samples are shorter than that without any limit (then
    nobody knows what longer ones would have become).
    """
    longest = max((row.tokens for rows in judged_only(problems) for row in rows), default=0)
    if not 1 <= tokens <= mean_length_within(problems, longest) + 1e-9:
        return None
    low, high = 1, longest
    while low < high:  # mean_length_within never falls as the limit grows
        middle = (low + high + 1) // 2
        low, high = (middle, high) if mean_length_within(problems, middle) <= tokens + 1e-9 else (low, middle - 1)
    return low


def accuracy_at_mean_length(
    problems: Sequence[Sequence[Spent]], tokens: float, clusters: Clusters = None
) -> Estimate | None:
    """Token efficiency: the accuracy at the limit at which a response costs ``tokens`` on average; None beyond.

    Computed from the samples, not from points of a curve. The interval is that of the accuracy at that limit; that
    the limit itself was found from the same samples is not in it.
    """
    limit = limit_for_mean_length(problems, tokens)
    if limit is None:
        return None
    right = [right_within(rows, limit) for rows in judged_only(problems)]
    return share(right, _judged_clusters(problems, clusters))


def efficiency(problems: Sequence[Sequence[Spent]], max_tokens: int, clusters: Clusters = None) -> list[dict[str, Any]]:
    """Accuracy at mean lengths of 16, 32, 64, ... tokens and at the samples' own."""
    own = mean_length_within(problems, max_tokens)
    lengths = [float(n) for n in (SHORTEST_LIMIT << i for i in range(max_tokens.bit_length())) if n < own]
    points: list[dict[str, Any]] = []
    for tokens in [*lengths, own]:
        found = accuracy_at_mean_length(problems, tokens, clusters)
        if found is not None:
            limit = limit_for_mean_length(problems, tokens)
            points.append({"mean_tokens": tokens, "limit": limit, "accuracy": found.as_dict()})
    return points


def fresh_point(
    limit: int,
    fresh: Sequence[Sequence[SampleRow]],
    cut: Sequence[Sequence[SampleRow]],
    max_tokens: int,
    clusters: Clusters = None,
) -> dict[str, Any]:
    """Scores of samples that were drawn anew at ``limit``, and how they differ from the long ones cut there.

    Args:
        limit: the response limit of ``fresh``.
        fresh: rows of each problem.
        cut: the long samples of the same problems, in the same order.
        max_tokens: their limit; with a longer ``limit`` they say nothing (``cut`` and ``difference`` are then None).
        clusters: of the problems.
    """
    (point,) = limit_curve(fresh, [limit], clusters)
    point |= {"samples": max(len(rows) for rows in fresh), "cut": None, "difference": None}
    if limit > max_tokens:
        return point
    judged = [([r for r in a if r.counted], [r for r in b if r.counted]) for a, b in zip(fresh, cut, strict=True)]
    named = _where([bool(new and old) for new, old in judged], clusters)
    pairs = [(right_within(new, limit), right_within(old, limit)) for new, old in judged if new and old]
    if pairs:
        new, old = zip(*pairs, strict=True)
        point["cut"] = share(old, named).as_dict()
        point["difference"] = asdict(paired_difference(new, old, named))
    return point


def scaling(
    problems: Sequence[Sequence[SampleRow]],
    max_tokens: int,
    clusters: Clusters = None,
    *,
    knows_limit: bool,
    vote: bool = True,
    fresh: Mapping[int, Sequence[Sequence[SampleRow]]] | None = None,
) -> dict[str, Any]:
    """All curves of one set of samples, and whether the one over limits is exact."""
    most = max(sum(row.counted for row in rows) for rows in problems)
    return {
        "over_limits": limit_curve(problems, limits_up_to(max_tokens), clusters),
        "exact": not knows_limit,
        "assumption": "a response longer than a limit counts as wrong there; exact while the sampler does not know the "
        "limit and no answer is forced at it",
        "fresh": [
            fresh_point(limit, rows, problems, max_tokens, clusters) for limit, rows in sorted((fresh or {}).items())
        ],
        "over_samples": sample_curve(problems, powers_up_to(most), clusters, vote=vote),
        "efficiency": efficiency(problems, max_tokens, clusters),
    }
