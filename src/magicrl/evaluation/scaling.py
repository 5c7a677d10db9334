"""Test-time scaling (Fig. 8 of the report): accuracy against the response limit, the length and the samples.

At a limit L a response of more than L tokens counts as truncated, that is, as wrong. One set of long samples therefore
gives the whole curve without further sampling. The curve is exact if the sampler does not know the limit and no answer
is forced at it. Fresh samples at each limit (``fresh_point``) show whether this holds. A response that was truncated
before the limit, by the turns of an environment or by a server's own limit, is wrong at every limit, as in avg@k.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from magicrl.evaluation.samples import SampleRow
from magicrl.evaluation.statistics import (
    Clusters,
    Estimate,
    Interval,
    majority_at_k,
    mean_of,
    paired_difference,
    share,
    unbiased_pass_at_k,
    votes,
)

SHORTEST_LIMIT = 16
MARKS = {"+": (True, False, True), "-": (False, False, True), "~": (False, True, True), "?": (False, False, False)}
"""One character per sample in ``results.json``: right, wrong, truncated at the limit, not judged."""


class Marked(NamedTuple):
    """A sample in the form of ``results.json``."""

    tokens: int
    correct: bool
    truncated: bool
    counted: bool


Spent: TypeAlias = SampleRow | Marked
"""A sample for a curve over limits."""
Problems: TypeAlias = Sequence[Sequence[Spent]]


def mark(row: SampleRow) -> str:
    """Return the sample's character of ``MARKS``."""
    return "?" if not row.counted else "~" if row.truncated else "+" if row.correct else "-"


def from_marks(marks: str, tokens: Sequence[int]) -> list[Marked]:
    """Return the samples of a problem in ``results.json``.

    Raises:
        ValueError: an unknown character, or another number of tokens.
    """
    if set(marks) - set(MARKS) or len(marks) != len(tokens):
        raise ValueError(f"outcomes {marks!r} with {len(tokens)} tokens are no record of samples")
    return [Marked(n, *MARKS[character]) for character, n in zip(marks, tokens, strict=True)]


def limits_up_to(max_tokens: int) -> list[int]:
    """Return T and its halves down to 16 tokens, ascending.

    Example:
        >>> limits_up_to(100)
        [25, 50, 100]
    """
    halves = [max_tokens >> i for i in range(max_tokens.bit_length())]
    return [max_tokens, *(limit for limit in halves[1:] if limit >= SHORTEST_LIMIT)][::-1]


def powers_up_to(most: int) -> list[int]:
    """Return 1, 2, 4, ... and ``most`` itself.

    Example:
        >>> powers_up_to(6)
        [1, 2, 4, 6]
    """
    return sorted({1 << i for i in range(most.bit_length())} | {most})


def samples_of_most(problems: Problems) -> int:
    """Return the number of judged samples that 95 % of the problems with any have: the largest k of pass@k and maj@k.

    Hard problems have more samples without a verdict. At a larger k the scores would cover the easier problems only.
    """
    counts = sorted(count for count in (sum(row.counted for row in rows) for rows in problems) if count)
    return counts[len(counts) // 20] if counts else 0


def _judged(problems: Problems, clusters: Clusters = None) -> tuple[list[list[Spent]], Clusters]:
    """Return the judged samples of the problems that have any, and the clusters of these problems."""
    kept = [[row for row in rows if row.counted] for rows in problems]
    named = None if clusters is None else [name for rows, name in zip(kept, clusters, strict=True) if rows]
    return [rows for rows in kept if rows], named


def _right_within(rows: Sequence[Spent], limit: int) -> float:
    """Return the share of a problem's judged samples that are right within ``limit`` tokens."""
    # J = E[p_nontrunc r_nontrunc]: a response longer than the limit earns nothing
    return sum(row.correct and row.tokens <= limit for row in rows) / len(rows)


def limit_curve(problems: Problems, limits: Sequence[int], clusters: Clusters = None) -> list[dict[str, Any]]:
    """Return accuracy, truncation and mean tokens at every response limit, with clustered intervals.

    Args:
        problems: rows of each problem, sampled at a limit not below any of ``limits``.
        limits: limits in tokens, including the end token.
        clusters: clusters of the problems.
    """
    judged, clusters = _judged(problems, clusters)
    points: list[dict[str, Any]] = []
    for limit in limits:
        right = [_right_within(rows, limit) for rows in judged]
        over = [float(np.mean([row.tokens > limit or row.truncated for row in rows])) for rows in judged]
        # a response that is longer than the limit costs the limit
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
    """Return pass@k and (with ``vote``) maj@k for every k, over the problems with k judged samples."""
    judged = [[row for row in rows if row.counted] for rows in problems]
    named = range(len(judged)) if clusters is None else clusters
    points: list[dict[str, Any]] = []
    for k in counts:
        enough = [(votes(rows), len(rows), name) for rows, name in zip(judged, named, strict=True) if len(rows) >= k]
        if enough:
            groups = [name for _, _, name in enough]
            passed = [unbiased_pass_at_k(tally[0], n, k) for tally, n, _ in enough]
            points.append({"k": k, "pass": share(passed, groups).as_dict()})
            if vote:
                points[-1]["majority"] = share([majority_at_k(*tally, k) for tally, _, _ in enough], groups).as_dict()
    return points


def mean_length_within(problems: Problems, limit: int) -> float:
    """Return the mean tokens of a response, over problems, if all were truncated at ``limit``."""
    judged, _ = _judged(problems)
    return sum(sum(min(row.tokens, limit) for row in rows) / len(rows) for rows in judged) / len(judged)


def limit_for_mean_length(problems: Problems, tokens: float) -> int | None:
    """Return the largest limit at which a response costs at most ``tokens`` on average.

    None if even one token per response is more, or if the samples are shorter without any limit, so that nothing is
    known about longer ones.
    """
    judged, _ = _judged(problems)
    longest = max((row.tokens for rows in judged for row in rows), default=0)
    # 1e-9: the mean at the longest response is that of the samples, and must count as reached
    if not 1 <= tokens <= mean_length_within(judged, longest) + 1e-9:
        return None
    # the mean never falls as the limit grows, so a binary search finds the limit
    limits = range(1, longest + 1)
    return bisect.bisect_right(limits, tokens + 1e-9, key=lambda limit: mean_length_within(judged, limit))


def accuracy_at_mean_length(problems: Problems, tokens: float, clusters: Clusters = None) -> Estimate | None:
    """Return the token efficiency: the accuracy at the limit at which a response costs ``tokens`` on average.

    It is computed from the samples, not from points of a curve; None beyond them. The interval is that of the accuracy
    at this limit, and ignores that the limit was found from the same samples.
    """
    limit = limit_for_mean_length(problems, tokens)
    judged, named = _judged(problems, clusters)
    return None if limit is None else share([_right_within(rows, limit) for rows in judged], named)


def efficiency(problems: Problems, max_tokens: int, clusters: Clusters = None) -> list[dict[str, Any]]:
    """Return the accuracy at mean lengths of 16, 32, 64, ... tokens and at the mean length of the samples."""
    own = mean_length_within(problems, max_tokens)
    lengths = [float(n) for n in (SHORTEST_LIMIT << i for i in range(max_tokens.bit_length())) if n < own]
    points: list[dict[str, Any]] = []
    for tokens in [*lengths, own]:
        found, limit = accuracy_at_mean_length(problems, tokens, clusters), limit_for_mean_length(problems, tokens)
        if found is not None:
            points.append({"mean_tokens": tokens, "limit": limit, "accuracy": found.as_dict()})
    return points


def paired_within(
    first: Problems, second: Problems, limits: tuple[int, int], clusters: Clusters = None
) -> tuple[Estimate, Interval] | None:
    """Return the score of ``second``, and ``first`` minus it, each within its limit, over problems judged in both."""
    named = range(len(first)) if clusters is None else clusters
    judged = [([r for r in a if r.counted], [r for r in b if r.counted]) for a, b in zip(first, second, strict=True)]
    pairs = [
        (_right_within(a, limits[0]), _right_within(b, limits[1]), name)
        for (a, b), name in zip(judged, named, strict=True)
        if a and b
    ]
    if not pairs:
        return None
    ours, theirs, groups = zip(*pairs, strict=True)
    return share(theirs, groups), paired_difference(ours, theirs, groups)


def fresh_point(
    limit: int,
    fresh: Sequence[Sequence[SampleRow]],
    cut: Sequence[Sequence[SampleRow]],
    max_tokens: int,
    clusters: Clusters = None,
) -> dict[str, Any]:
    """Return the scores of fresh samples at ``limit``, and their difference from the long samples truncated there.

    ``cut`` are the long samples of the same problems, in the same order, at the limit ``max_tokens``. Beyond it they
    are not comparable, and the keys ``cut`` and ``difference`` are None.
    """
    (point,) = limit_curve(fresh, [limit], clusters)
    found = None if limit > max_tokens else paired_within(fresh, cut, (limit, limit), clusters)
    old, change = (None, None) if found is None else (found[0].as_dict(), asdict(found[1]))
    return point | {"samples": max(len(rows) for rows in fresh), "cut": old, "difference": change}


def scaling(
    problems: Sequence[Sequence[SampleRow]],
    max_tokens: int,
    clusters: Clusters = None,
    *,
    knows_limit: bool,
    vote: bool = True,
    turns: bool = False,
    fresh: Mapping[int, Sequence[Sequence[SampleRow]]] | None = None,
) -> dict[str, Any]:
    """Return all curves of one set of samples, and whether the curve over limits is exact.

    ``turns``: an environment's limit of turns truncates responses, too. It does so at every response limit.
    """
    early = sum(row.counted and row.truncated and row.tokens < max_tokens for rows in problems for row in rows)
    return {
        "over_limits": limit_curve(problems, limits_up_to(max_tokens), clusters),
        # how a response would have continued that a server truncated earlier is unknown
        "exact": not knows_limit and (turns or not early),
        "truncated_early": early,
        "assumption": "a response longer than a limit counts as wrong there, and one that the engine truncated earlier "
        "everywhere; exact while the sampler does not know the limit, no answer is forced at it, and the engine has no "
        "shorter limit",
        "fresh": [
            fresh_point(limit, rows, problems, max_tokens, clusters) for limit, rows in sorted((fresh or {}).items())
        ],
        "over_samples": sample_curve(problems, powers_up_to(samples_of_most(problems)), clusters, vote=vote),
        "efficiency": efficiency(problems, max_tokens, clusters),
    }
