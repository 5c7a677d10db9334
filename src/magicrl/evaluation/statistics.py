"""avg@k, pass@k and maj@k with intervals that respect the clustering of samples within problems.

Samples of one problem are not independent, nor are problems with one prompt or of one template: the unit of every
interval is the cluster (``Problem.cluster``), which is a single problem by default. The standard error of a
mean over n problems in G clusters is the cluster-robust one, se^2 = G/(G-1) sum_g (sum_{i in g} (x_i - mean))^2 / n^2,
which for clusters of one is the ordinary one. The interval of a share is Wilson's at the effective number of
observations n_eff = p(1-p)/se^2, which keeps it inside [0, 1] and never lets it shrink to a point where all problems
agree (n_eff is then G). With fewer clusters than problems, Student's quantile with G - 1 degrees of freedom replaces
the normal one, since templates are few.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from functools import lru_cache
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from magicrl.evaluation.samples import SampleRow
from magicrl_verifiers.maths.literals import plain_number
from magicrl_verifiers.maths.notation import canonical_notation
from magicrl_verifiers.progress import plural
from magicrl_verifiers.records import NO_ANSWER

Z95 = NormalDist().inv_cdf(0.975)
RESAMPLES = 4000
"""Number of resamples in the bootstrap of a paired difference."""
SIGNS = 100_000
"""Number of sign patterns drawn for a permutation test over many clusters."""
MOST_ENUMERATED = 16
"""Most clusters with a difference for which a permutation test enumerates all sign patterns."""
_FEW_TEMPLATES = 6
"""Most templates whose permutation test cannot reach 0.05 if a single one differs the other way (4 of 2^6 patterns)."""
_LONGEST_NUMBER = 60  # characters of a wrong answer that is read as a number
_UNIT_BEHIND = re.compile(r"\s*\\(?:text|mathrm)\s*\{[^{}\d]*\}$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A mean over problems, or a paired difference of two models on the same problems, with its 95 % interval.

    Where all problems have one value, or are one cluster, the interval of a mean (`mean_of`) is unknown: ``low`` and
    ``high`` are then the mean, and displays leave it out.
    """

    mean: float
    low: float
    high: float
    problems: int = 0  # 0 where a file does not record it
    clusters: int = 0  # distinct prompts or templates


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate(Interval):
    """A share in [0, 1], or another mean over problems."""

    standard_error: float  # cluster-robust; 0 if all problems agree

    def as_dict(self) -> dict[str, float | int]:
        return asdict(self)


Values: TypeAlias = Sequence[float] | NDArray[np.float64]
Clusters: TypeAlias = Sequence[Hashable] | None
"""One name per problem; problems with the same name are dependent. None: all problems are independent."""


def share(per_problem: Values, clusters: Clusters = None) -> Estimate:
    """Return the mean of per-problem shares (each in [0, 1]) with its clustered interval.

    Raises:
        ValueError: no problems, or a value outside [0, 1].
    """
    values = np.asarray(per_problem, dtype=np.float64)
    if len(values) and (values.min() < 0 or values.max() > 1):
        raise ValueError(f"per-problem shares must lie in [0, 1], got {values.min()} to {values.max()}")
    mean, error, groups = _clustered(values, clusters)
    # if all clusters agree, the formula would give infinitely many observations
    effective = mean * (1 - mean) / error**2 if error > 0 else float(groups)
    # with few clusters, Student's quantile instead of the normal one
    quantile = student(groups - 1) if 1 < groups < len(values) else Z95
    low, high = wilson(mean, max(effective, 1.0), quantile)
    return Estimate(mean=mean, low=low, high=high, standard_error=error, problems=len(values), clusters=groups)


def mean_of(per_problem: Values, clusters: Clusters = None) -> Estimate:
    """Return the mean of one value per problem, e.g. its mean response length, with Student's interval.

    Raises:
        ValueError: no problems.
    """
    values = np.asarray(per_problem, dtype=np.float64)
    mean, error, groups = _clustered(values, clusters)
    half = student(groups - 1) * error if groups > 1 else 0.0
    n = len(values)
    return Estimate(mean=mean, low=mean - half, high=mean + half, standard_error=error, problems=n, clusters=groups)


def _clustered(values: NDArray[np.float64], clusters: Clusters) -> tuple[float, float, int]:
    """Return the mean, its standard error and the number of clusters."""
    if len(values) == 0:
        raise ValueError("no judged problems: there is nothing to average")
    mean = float(values.mean())
    sums = _deviations(values, mean, clusters)
    return mean, _error(sums, len(values)), len(sums)


def _deviations(values: NDArray[np.float64], mean: float, clusters: Clusters) -> NDArray[np.float64]:
    """Return the clusters' summed deviations from the mean, all 0 if the clusters agree."""
    sums = _sums(values - mean, clusters)
    # rounding: the mean of 30 thirds is not 1/3, and an error of 1e-17 would make the interval a point
    sums[np.abs(sums) <= 1e-14 * np.abs(values).sum()] = 0.0
    return sums


def _sums(values: NDArray[np.float64], clusters: Clusters) -> NDArray[np.float64]:
    """Return ``[G]`` sums of the values of each cluster, in the order of the clusters' first problems."""
    if clusters is None:
        return values
    places = numbered(clusters)
    assert len(places) == len(values), f"{len(places)} clusters of {len(values)} problems"
    return np.bincount(places, weights=values).astype(np.float64)


def _error(sums: NDArray[np.float64], n: int) -> float:
    """Return the standard error of a mean over ``n`` problems from the clusters' summed deviations; 0 with one."""
    groups = len(sums)
    return float(np.sqrt(np.sum(sums**2) * groups / (groups - 1)) / n) if groups > 1 else 0.0


def student(degrees: int) -> float:
    """Return the two-sided 95 % quantile of Student's t."""
    return float(stdtrit(degrees, 0.975))


def wilson(mean: float, n: float, z: float = Z95) -> tuple[float, float]:
    """Return Wilson's score interval of a share ``mean`` in ``n`` (effective) observations; ``z``: the quantile."""
    centre = (mean + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def unbiased_pass_at_k(correct: int, samples: int, k: int) -> float:
    """Return the unbiased pass@k of one problem: the chance that k samples, without replacement, hold a right one.

    Raises:
        ValueError: fewer than k samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {plural(k, 'sample')}, there are {samples}")
    # with too few wrong samples for a draw of k, each draw holds a right one
    if samples - correct < k:
        return 1.0
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def majority_at_k(right: int, wrong: Sequence[int], silent: int, k: int, *, draws: int = 2000) -> float:
    """Return maj@k of one problem: the chance that the most frequent answer of k samples is the right one.

    The k samples are drawn without replacement. Several answers with equally many votes are equally likely to win. The
    result is exact if all samples are drawn (or k is 1), otherwise the mean of ``draws`` draws with a fixed seed.

    Args:
        right: number of samples with the right answer.
        wrong: number of samples with each wrong answer.
        silent: number of samples without an answer, which have no vote.
        k: number of samples drawn.
        draws: number of random draws.

    Raises:
        ValueError: fewer than k samples.
    """
    # colours of an urn: drawing k samples without replacement is a multivariate hypergeometric draw
    colours = np.array([right, *wrong, silent], dtype=np.int64)
    total = int(colours.sum())
    if not 1 <= k <= total:
        raise ValueError(f"maj@{k} needs at least {plural(k, 'sample')}, there are {total}")
    if k == 1:
        return right / total
    rng = np.random.Generator(np.random.PCG64(0))
    drawn = colours[None] if k == total else rng.multivariate_hypergeometric(colours, k, size=draws)
    # without the silent ones, which have no vote
    counts = drawn[:, :-1]
    most = counts.max(axis=1, keepdims=True)
    # > 0: if all drawn samples are silent, no answer has won
    won = (counts[:, 0] == most[:, 0]) & (counts[:, 0] > 0)
    ties = (counts == most).sum(axis=1)
    return float(np.mean(won / ties))


def paired_difference(
    after: Values, before: Values, clusters: Clusters = None, *, span: float = 1.0, p_value: float | None = None
) -> Interval:
    """Return the mean of ``after - before`` over the same problems, with an interval.

    The interval is a bootstrap over problems (fixed seed). With fewer clusters than problems it is Student's with the
    cluster-robust standard error, since a bootstrap over few clusters is too narrow. If all clusters differ by the same
    amount (mostly 0), both would be a point and claim certainty. Then the interval is Bonett and Price's adjusted one
    for paired shares, which adds one won and one lost cluster. ``span`` is a problem's largest possible difference.

    All three are too narrow where few problems differ: 4 of 100 won and none lost have p = 0.125. So the interval
    excludes zero only where `permutation_test` has p <= 0.05. A few templates are the exception: that test has too few
    patterns for them, and their mean differences are close to normal. A caller that has its ``p_value`` passes it.
    """
    delta = np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)
    n = len(delta)
    if n == 0:
        raise ValueError("no problems to compare")
    mean = float(delta.mean())
    sums = _deviations(delta, mean, clusters)
    groups = len(sums)
    if not sums.any():
        low, high = _adjusted(np.full(groups, mean), span)
    elif groups < n:
        half = student(groups - 1) * _error(sums, n)
        low, high = max(-span, mean - half), min(span, mean + half)
    else:
        rng = np.random.Generator(np.random.PCG64(0))
        means = delta[rng.integers(0, n, size=(RESAMPLES, n))].mean(axis=1)
        low, high = np.quantile(means, [0.025, 0.975])
    few_templates = groups < n and groups <= _FEW_TEMPLATES
    if (low > 0 or high < 0) and not few_templates:
        significant = _significant(delta, clusters) if p_value is None else p_value <= 0.05
        if not significant:
            low, high = min(low, 0.0), max(high, 0.0)
    return Interval(mean=mean, low=float(low), high=float(high), problems=n, clusters=groups)


def paired_scores(
    after: Sequence[float | None], before: Sequence[float | None], clusters: Clusters = None, *, span: float = 1.0
) -> Interval | None:
    """Return the paired difference over the problems that both evaluations judged; None for fewer than two.

    The problems of ``after`` and ``before`` have the same order.
    """
    if len(after) != len(before):
        return None
    named = range(len(after)) if clusters is None else clusters
    both = [(a, b, c) for a, b, c in zip(after, before, named, strict=True) if a is not None and b is not None]
    return paired_difference(*zip(*both, strict=True), span=span) if len(both) > 1 else None


def _adjusted(delta: NDArray[np.float64], span: float) -> tuple[float, float]:
    """Return Bonett and Price's interval (2012), with +span and -span added. It contains the observed mean."""
    padded = np.append(delta, (span, -span))
    half = Z95 * float(padded.std() / math.sqrt(len(padded)))
    mean, observed = float(padded.mean()), float(delta.mean())
    return max(-span, min(mean - half, observed)), min(span, max(mean + half, observed))


def _significant(delta: NDArray[np.float64], clusters: Clusters) -> bool:
    """Return whether `permutation_test` has p <= 0.05."""
    sums = _sums(delta, clusters)
    # Hoeffding: p <= 2 exp(-S^2 / (2 sum s^2)) for the sum S, which decides clear cases without a test
    clear = float(sums.sum()) ** 2 >= 2 * math.log(2 / 0.05) * float((sums**2).sum())
    return clear or permutation_test(delta, clusters) <= 0.05


def permutation_test(delta: Values, clusters: Clusters = None) -> float:
    """Return the two-sided p-value of a paired permutation test over clusters, which exchanges the two models.

    Under the null hypothesis the sign of each cluster's summed difference is random. Up to 2^16 sign patterns are
    enumerated, without the clusters that do not differ. Otherwise ``SIGNS`` are drawn with a fixed seed, and the
    observed pattern counts among them, so that p is never 0.

    Raises:
        ValueError: no problems.
    """
    values = np.asarray(delta, dtype=np.float64)
    if len(values) == 0:
        raise ValueError("no problems to compare")
    values = _sums(values, clusters)
    moved = np.abs(values[values != 0])
    if len(moved) == 0:
        return 1.0
    observed = abs(float(values.sum())) - 1e-12 * float(moved.sum())  # sums in another order differ in the last bit
    if len(moved) <= MOST_ENUMERATED:
        sums = np.zeros(1)
        # the sums of all sign patterns so far, with this cluster's difference added and subtracted
        for size in moved:
            sums = np.concatenate([sums + size, sums - size])
        return float(np.mean(np.abs(sums) >= observed))
    rng = np.random.Generator(np.random.PCG64(0))
    extreme = 0
    # a thousand patterns at a time: all at once would be [SIGNS, clusters]
    for _ in range(0, SIGNS, 1000):
        signs = rng.integers(0, 2, size=(1000, len(moved)), dtype=np.int8) * 2.0 - 1.0
        extreme += int(np.sum(np.abs(signs @ moved) >= observed))
    return (extreme + 1) / (SIGNS + 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values with Holm's step-down correction, in the given order.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    adjusted = [0.0] * len(p_values)
    worst = 0.0
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    for rank, index in enumerate(order):
        worst = max(worst, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = worst
    return adjusted


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """The scores of one evaluation at one temperature."""

    accuracy: Estimate  # avg@k, the mean over problems of the share of right samples
    per_problem: tuple[float, ...]  # share of right samples, in the problems' order (NaN without judged samples)
    pass_at: dict[int, Estimate]  # by k, over the problems with k judged samples
    majority_at: dict[int, Estimate] = field(default_factory=dict[int, Estimate])
    length: Estimate  # mean response tokens
    truncation: Estimate  # share of truncated responses
    entropy: float | None  # mean nats per token; None if the engine does not report it
    answered_and_stopped: float  # share of responses that ended before the limit and have an answer to judge
    samples: int  # most judged samples of a problem
    not_judged: int  # samples without a verdict, which count nowhere
    drawn: int  # all samples, judged or not
    clusters: tuple[int, ...]  # equal for problems of one prompt or template: the unit of the intervals
    reward: Estimate | None = None  # mean reward; None without graded rewards (it is then the accuracy)
    reward_per_problem: tuple[float, ...] = ()  # mean rewards like ``per_problem``, with graded rewards


def score_rows(
    problems: Sequence[Sequence[SampleRow]],
    clusters: Sequence[Hashable],
    *,
    pass_at: Sequence[int] = (),
    majority_at: Sequence[int] = (),
) -> Score:
    """Return the score of the rows of all problems.

    Args:
        problems: samples of each problem, as `by_problem` returns them.
        clusters: ``Problem.cluster`` of each.
        pass_at: all k of pass@k.
        majority_at: all k of maj@k.

    Raises:
        ValueError: no sample was judged, or there are fewer samples than a requested k.
    """
    numbers = numbered(clusters)
    every = [row for rows in problems for row in rows]
    judged = [[row for row in rows if row.counted] for rows in problems]
    counted = [len(rows) for rows in judged]
    if not any(counted):
        raise ValueError("no sample was judged: there is nothing to score")
    if max((*pass_at, *majority_at), default=0) > max(counted):
        raise ValueError(f"k = {max((*pass_at, *majority_at))}: no problem has more than {max(counted)} judged samples")

    def mean_over(
        estimate: Callable[[list[float], list[int]], Estimate],
        value: Callable[[Sequence[SampleRow]], float],
        rows: Sequence[Sequence[SampleRow]] = judged,
        least: int = 1,
    ) -> Estimate:
        kept = [(value(of_one), number) for of_one, number in zip(rows, numbers, strict=True) if len(of_one) >= least]
        return estimate([found for found, _ in kept], [number for _, number in kept])

    def passed(k: int) -> Estimate:
        return mean_over(
            share, lambda rows: unbiased_pass_at_k(sum(row.correct for row in rows), len(rows), k), least=k
        )

    def voted(k: int) -> Estimate:
        return mean_over(share, lambda rows: majority_at_k(*votes(rows), k), least=k)

    # weighted by tokens: nats per token of all responses, not of the mean response
    known = [(row.entropy, row.tokens) for row in every if row.entropy is not None]
    right = [sum(row.correct for row in rows) for rows in judged]
    graded = any(row.score is not None for row in every)
    earned = [float(np.mean([row.reward for row in rows])) if rows else math.nan for rows in judged] if graded else []
    return Score(
        accuracy=mean_over(share, lambda rows: sum(row.correct for row in rows) / len(rows)),
        per_problem=tuple(c / n if n else math.nan for c, n in zip(right, counted, strict=True)),
        pass_at={k: passed(k) for k in pass_at},
        majority_at={k: voted(k) for k in majority_at},
        length=mean_over(mean_of, lambda rows: float(np.mean([row.tokens for row in rows])), problems),
        truncation=mean_over(share, lambda rows: float(np.mean([row.truncated for row in rows])), problems),
        entropy=float(np.average([e for e, _ in known], weights=[t for _, t in known])) if known else None,
        answered_and_stopped=float(np.mean([r.status not in NO_ANSWER and r.finish_reason == "stop" for r in every])),
        samples=max(counted),
        not_judged=len(every) - sum(counted),
        drawn=len(every),
        clusters=numbers,
        reward=mean_over(mean_of, lambda rows: float(np.mean([row.reward for row in rows]))) if graded else None,
        reward_per_problem=tuple(earned),
    )


def numbered(clusters: Sequence[Hashable]) -> tuple[int, ...]:
    """Number the clusters in the order of their first problems.

    Example:
        >>> numbered(["b", "a", "b"])
        (0, 1, 0)
    """
    known: dict[Hashable, int] = {}
    return tuple(known.setdefault(name, len(known)) for name in clusters)


def votes(rows: Sequence[SampleRow]) -> tuple[int, list[int], int]:
    """Count the votes of one problem's samples: for the right answer, for each wrong one, and for none.

    All answers that the verifier found right are one answer. Wrong answers are one if they are the same number, or the
    same text without spaces and case. A truncated response, or one without an answer, has no vote.
    """
    right = sum(row.correct for row in rows)
    silent = sum(not row.correct and (row.extracted is None or row.truncated) for row in rows)
    wrong = Counter(
        _vote(row.extracted) for row in rows if not row.correct and row.extracted is not None and not row.truncated
    )
    return right, sorted(wrong.values(), reverse=True), silent


@lru_cache(maxsize=2**14)
def _vote(wrong: str) -> Fraction | str:
    """Return what a wrong answer votes for: the number that it is, else its text."""
    # a longer text may be slow to read
    if len(wrong) <= _LONGEST_NUMBER:
        number = plain_number(canonical_notation(_UNIT_BEHIND.sub("", wrong.strip())))
        if number is not None:
            return number.value
    return "".join(wrong.split()).casefold()
