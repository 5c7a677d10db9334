"""avg@k, pass@k and maj@k with intervals that respect the clustering of samples within problems.

Samples of one problem are not independent, nor are problems with one prompt or of one template: the unit of every
interval is the cluster (``Problem.cluster``), a problem by itself where nothing else is said. The standard error of a
mean over n problems in G clusters is the cluster-robust one, se^2 = G/(G-1) sum_g (sum_{i in g} (x_i - mean))^2 / n^2,
which for clusters of one is the ordinary one. The interval of a share is Wilson's at the effective number of
observations n_eff = p(1-p)/se^2, which keeps it inside [0, 1] and never lets it shrink to a point where all problems
agree (n_eff is then G). Where clusters are fewer than problems, Student's quantile with G - 1 degrees of freedom stands
for the normal one: templates are few.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from magicrl.evaluation.samples import SampleRow

Z95 = NormalDist().inv_cdf(0.975)
RESAMPLES = 4000
"""Of the bootstrap of a paired difference."""
SIGNS = 100_000
"""Drawn sign patterns of a permutation test over many clusters."""
MOST_ENUMERATED = 16
"""Clusters with a difference up to which a permutation test goes through all sign patterns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A share in [0, 1], or another mean over problems, with its 95 % interval.

    ``standard_error`` is clustered by problem, 0 where all problems agree; ``clusters``: distinct prompts or templates.
    """

    mean: float
    low: float
    high: float
    standard_error: float
    problems: int
    clusters: int

    def as_dict(self) -> dict[str, float | int]:
        return asdict(self)


Values: TypeAlias = Sequence[float] | NDArray[np.float64]
Clusters: TypeAlias = Sequence[Hashable] | None
"""One name a problem; problems of one name are dependent. None: every problem stands by itself."""


def share(per_problem: Values, clusters: Clusters = None) -> Estimate:
    """The mean of per-problem shares (each in [0, 1]) with its clustered interval.

    Raises:
        ValueError: no problems, or a value outside [0, 1].
    """
    values = np.asarray(per_problem, dtype=np.float64)
    if len(values) and (values.min() < 0 or values.max() > 1):
        raise ValueError(f"per-problem shares must lie in [0, 1], got {values.min()} to {values.max()}")
    mean, error, groups = _clustered(values, clusters)
    # all clusters agree: the formula would give infinitely many observations
    effective = mean * (1 - mean) / error**2 if error > 0 else float(groups)
    # few clusters: Student's quantile for the normal one
    quantile = student(groups - 1) if 1 < groups < len(values) else Z95
    low, high = wilson(mean, max(effective, 1.0), quantile)
    return Estimate(mean=mean, low=low, high=high, standard_error=error, problems=len(values), clusters=groups)


def mean_of(per_problem: Values, clusters: Clusters = None) -> Estimate:
    """The mean of one value a problem, e.g. its mean response length, with Student's interval.

    Raises:
        ValueError: no problems.
    """
    values = np.asarray(per_problem, dtype=np.float64)
    mean, error, groups = _clustered(values, clusters)
    half = student(groups - 1) * error if groups > 1 else 0.0
    n = len(values)
    return Estimate(mean=mean, low=mean - half, high=mean + half, standard_error=error, problems=n, clusters=groups)


def _clustered(values: NDArray[np.float64], clusters: Clusters) -> tuple[float, float, int]:
    """Mean, its standard error, number of clusters."""
    if len(values) == 0:
        raise ValueError("no judged problems: there is nothing to average")
    mean = float(values.mean())
    sums = _sums(values - mean, clusters)
    return mean, _error(sums, len(values)), len(sums)


def _sums(values: NDArray[np.float64], clusters: Clusters) -> NDArray[np.float64]:
    """``[G]`` the sum of the values of each cluster, in the order of the clusters' first problems."""
    if clusters is None:
        return values
    places = numbered(clusters)
    assert len(places) == len(values), f"{len(places)} clusters of {len(values)} problems"
    return np.bincount(places, weights=values).astype(np.float64)


def _error(sums: NDArray[np.float64], n: int) -> float:
    """Standard error of a mean over ``n`` problems from the clusters' summed deviations; 0 with one cluster."""
    groups = len(sums)
    return float(np.sqrt(np.sum(sums**2) * groups / (groups - 1)) / n) if groups > 1 else 0.0


def student(degrees: int) -> float:
    """Two-sided 95 % quantile of Student's t."""
    return float(stdtrit(degrees, 0.975))


def wilson(mean: float, n: float, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of a share ``mean`` seen in ``n`` (effective) observations; ``z``: the quantile."""
    centre = (mean + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """Unbiased pass@k of one problem: the chance that k of its samples, drawn without replacement, hold a right one.

    Raises:
        ValueError: fewer than k samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, there are {samples}")
    # too few wrong samples to fill a draw of k: each draw holds a right one
    if samples - correct < k:
        return 1.0
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def majority_at_k(right: int, wrong: Sequence[int], silent: int, k: int, *, draws: int = 2000) -> float:
    """maj@k of one problem: the chance that the most frequent answer of k of its samples is the right one.

    The k samples are drawn without replacement; of several answers with as many votes each is equally likely to be
    taken. Exact where all samples are taken (or k is 1); otherwise the mean of ``draws`` draws with a fixed seed.

    ``right`` counts the samples of the right answer, ``wrong`` those of each wrong one; ``silent`` ones give none and
    vote for nothing.

    Raises:
        ValueError: fewer than k samples.
    """
    # colours of an urn: drawing k samples without replacement is a multivariate hypergeometric draw
    colours = np.array([right, *wrong, silent], dtype=np.int64)
    total = int(colours.sum())
    if not 1 <= k <= total:
        raise ValueError(f"maj@{k} needs at least {k} samples, there are {total}")
    if k == 1:
        return right / total
    rng = np.random.Generator(np.random.PCG64(0))
    drawn = colours[None] if k == total else rng.multivariate_hypergeometric(colours, k, size=draws)
    # without the silent ones, which vote for nothing
    counts = drawn[:, :-1]
    most = counts.max(axis=1, keepdims=True)
    # > 0: where all drawn samples are silent nothing has won
    won = (counts[:, 0] == most[:, 0]) & (counts[:, 0] > 0)
    ties = (counts == most).sum(axis=1)
    return float(np.mean(won / ties))


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A paired difference of two models on the same problems, with its 95 % interval."""

    mean: float
    low: float
    high: float
    problems: int
    clusters: int


def paired_difference(after: Values, before: Values, clusters: Clusters = None, *, span: float = 1.0) -> Difference:
    """Mean of ``after - before`` over the same problems; interval by a bootstrap over problems (fixed seed).

    Where clusters are fewer than problems it is Student's on the cluster-robust standard error: a bootstrap over few
    clusters comes out too narrow. Where every problem differs by the same amount (mostly by nothing) both are a point,
    which would claim certainty. Then the interval is Bonett and Price's adjusted one for paired shares: a cluster more
    that is won and one more that is lost. ``span`` is the largest difference that a problem can have.
    """
    delta = np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)
    n = len(delta)
    if n == 0:
        raise ValueError("no problems to compare")
    mean = float(delta.mean())
    sums = _sums(delta - mean, clusters)
    groups = len(sums)
    if groups == 1 or np.ptp(delta) == 0:
        low, high = _adjusted(np.full(groups, mean), span)
    elif groups < n:
        half = student(groups - 1) * _error(sums, n)
        low, high = max(-span, mean - half), min(span, mean + half)
    else:
        rng = np.random.Generator(np.random.PCG64(0))
        means = delta[rng.integers(0, n, size=(RESAMPLES, n))].mean(axis=1)
        low, high = np.quantile(means, [0.025, 0.975])
    return Difference(mean=mean, low=float(low), high=float(high), problems=n, clusters=groups)


def paired_scores(
    after: Sequence[float | None], before: Sequence[float | None], clusters: Clusters = None, *, span: float = 1.0
) -> Difference | None:
    """The paired difference over the problems that both tests judged, in the same order; None for fewer than two."""
    if len(after) != len(before):
        return None
    named = range(len(after)) if clusters is None else clusters
    told = [(a, b, c) for a, b, c in zip(after, before, named, strict=True) if a is not None and b is not None]
    return paired_difference(*zip(*told, strict=True), span=span) if len(told) > 1 else None


def _adjusted(delta: NDArray[np.float64], span: float) -> tuple[float, float]:
    """Bonett and Price's interval (2012): with +span and -span added; the observed mean lies in it."""
    padded = np.append(delta, (span, -span))
    half = Z95 * float(padded.std() / math.sqrt(len(padded)))
    mean, observed = float(padded.mean()), float(delta.mean())
    return max(-span, min(mean - half, observed)), min(span, max(mean + half, observed))


def permutation_test(delta: Values, clusters: Clusters = None) -> float:
    """Two-sided p-value of a paired permutation test over clusters: which of the two models is which is exchanged.

    Under the null hypothesis the sign of each cluster's summed difference is a coin. All sign patterns are enumerated
    while there are at most 2^16 of them (clusters without a difference change nothing and are left out); otherwise
    ``SIGNS`` are drawn with a fixed seed and the observed one is counted among them, so that p is never 0.

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """What one evaluation at one temperature found."""

    accuracy: Estimate  # avg@k, the mean over problems of the share of right samples
    per_problem: tuple[float, ...]  # share right, in the problems' order (NaN where none was judged)
    pass_at: dict[int, Estimate]  # by k, over the problems that have k judged samples
    majority_at: dict[int, Estimate] = field(default_factory=dict[int, Estimate])
    length: Estimate  # mean response tokens
    truncation: Estimate  # share of responses cut at the limit
    entropy: float | None  # mean nats per token, None where the engine cannot tell
    boxed_and_stopped: float  # share of responses that ended by themselves and gave an answer to judge
    samples: int  # most judged samples of a problem
    not_judged: int  # samples that could not be judged, and count nowhere
    clusters: tuple[int, ...]  # equal for problems of one prompt or template: the unit of the intervals
    reward: Estimate | None = None  # mean reward, None where no reward is graded (it is then the accuracy)
    reward_per_problem: tuple[float, ...] = ()  # as ``per_problem``, where rewards are graded


def score_rows(
    problems: Sequence[Sequence[SampleRow]],
    clusters: Sequence[Hashable],
    *,
    pass_at: Sequence[int] = (),
    majority_at: Sequence[int] = (),
) -> Score:
    """The score of every problem's rows (``by_problem`` makes the argument).

    Args:
        problems: judged samples of each problem.
        clusters: ``Problem.cluster`` of each.
        pass_at, majority_at: every k.

    Raises:
        ValueError: no sample was judged, or fewer samples than a k asked for.
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
        return mean_over(share, lambda rows: pass_at_k(sum(row.correct for row in rows), len(rows), k), least=k)

    def voted(k: int) -> Estimate:
        return mean_over(share, lambda rows: majority_at_k(*votes(rows), k), least=k)

    # weighted by tokens: nats per token of all responses, not of the mean response
    told = [(row.entropy, row.tokens) for row in every if row.entropy is not None]
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
        entropy=float(np.average([e for e, _ in told], weights=[t for _, t in told])) if told else None,
        boxed_and_stopped=float(np.mean([row.extracted is not None and row.finish_reason == "stop" for row in every])),
        samples=max(counted),
        not_judged=len(every) - sum(counted),
        clusters=numbers,
        reward=mean_over(mean_of, lambda rows: float(np.mean([row.reward for row in rows]))) if graded else None,
        reward_per_problem=tuple(earned),
    )


def numbered(clusters: Sequence[Hashable]) -> tuple[int, ...]:
    """Clusters by number, in the order in which they come.

    Example:
        >>> numbered(["b", "a", "b"])
        (0, 1, 0)
    """
    known: dict[Hashable, int] = {}
    return tuple(known.setdefault(name, len(known)) for name in clusters)


def votes(rows: Sequence[SampleRow]) -> tuple[int, list[int], int]:
    """The votes of one problem's samples: for the right answer, for each wrong one, and for none.

    Right answers are one answer however they are written (the verifier said so); wrong ones are told apart by their
    text without spaces and case. A response that gave no answer, or was cut, votes for nothing.
    """
    right = sum(row.correct for row in rows)
    silent = sum(not row.correct and (row.extracted is None or row.truncated) for row in rows)
    wrong = Counter(
        "".join((row.extracted or "").split()).casefold()
        for row in rows
        if not row.correct and row.extracted is not None and not row.truncated
    )
    return right, sorted(wrong.values(), reverse=True), silent
