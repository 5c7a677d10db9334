"""avg@k and pass@k with intervals that respect the clustering of samples within problems.

Samples of one problem are not independent, so the unit of every interval is the problem: the standard
error comes from the spread of the per-problem means. The interval is Wilson's at the effective number
of observations n_eff = p(1-p)/se^2, which keeps it inside [0, 1] and never lets it shrink to a point
where all problems agree (n_eff is then the number of problems).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

MOST_ENUMERATED = 16
"""Problems with a difference up to which a permutation test goes through all sign patterns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A share in [0, 1] with its 95 % interval.

    Attributes:
        mean: the mean over problems of the per-problem values.
        low: lower end of the interval.
        high: upper end.
        standard_error: of the mean, clustered by problem; 0 where all problems agree.
        problems: how many problems.
    """

    mean: float
    low: float
    high: float
    standard_error: float
    problems: int

    def as_dict(self) -> dict[str, float | int]:
        return {
            "mean": self.mean,
            "low": self.low,
            "high": self.high,
            "standard_error": self.standard_error,
            "problems": self.problems,
        }


def share(per_problem: Sequence[float] | NDArray[np.float64], confidence: float = 0.95) -> Estimate:
    """The mean of per-problem shares (each in [0, 1]) with its clustered interval.

    Raises:
        ValueError: no problems, or a value outside [0, 1].
    """
    values = np.asarray(per_problem, dtype=np.float64)
    n = len(values)
    if n == 0:
        raise ValueError("no judged problems: there is nothing to average")
    if values.min() < 0 or values.max() > 1:
        raise ValueError(f"per-problem shares must lie in [0, 1], got {values.min()} to {values.max()}")
    mean = float(values.mean())
    error = float(values.std(ddof=1) / math.sqrt(n)) if n > 1 else 0.0
    effective = mean * (1 - mean) / error**2 if error > 0 else float(n)
    low, high = wilson(mean, max(effective, 1.0), confidence)
    return Estimate(mean=mean, low=low, high=high, standard_error=error, problems=n)


def wilson(mean: float, n: float, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a share ``mean`` seen in ``n`` (effective) observations."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
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
    if samples - correct < k:
        return 1.0
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def majority_at_k(right: int, wrong: Sequence[int], silent: int, k: int, *, draws: int = 2000) -> float:
    """maj@k of one problem: the chance that the most frequent answer of k of its samples is the right one.

    The k samples are drawn without replacement; of several answers with as many votes each is equally likely to be
    taken. Exact where all samples are taken (or k is 1); otherwise the mean of ``draws`` draws with a fixed seed.

    Args:
        right: samples that give the right answer.
        wrong: samples of each wrong answer.
        silent: samples that give none; they vote for nothing.
        k: votes.
        draws: of the estimate where it is none of the exact cases.

    Raises:
        ValueError: fewer than k samples.
    """
    colours = np.array([right, *wrong, silent], dtype=np.int64)
    total = int(colours.sum())
    if not 1 <= k <= total:
        raise ValueError(f"maj@{k} needs at least {k} samples, there are {total}")
    if k == 1:
        return right / total
    if k == total:
        drawn = colours[None]
    else:
        drawn = np.random.Generator(np.random.PCG64(0)).multivariate_hypergeometric(colours, k, size=draws)
    counts = drawn[:, :-1]
    most = counts.max(axis=1, keepdims=True)
    won = (counts[:, 0] == most[:, 0]) & (counts[:, 0] > 0)
    ties = (counts == most).sum(axis=1)
    return float(np.mean(won / ties))


@dataclass(frozen=True, kw_only=True, slots=True)
class Mean:
    """A mean of per-problem values with its standard error and 95 % interval (Student's t, clustered by problem)."""

    mean: float
    low: float
    high: float
    standard_error: float
    problems: int

    def as_dict(self) -> dict[str, float | int]:
        return asdict(self)


def mean_of(per_problem: Sequence[float] | NDArray[np.float64], confidence: float = 0.95) -> Mean:
    """The mean of one value a problem, e.g. its mean response length.

    Raises:
        ValueError: no problems.
    """
    values = np.asarray(per_problem, dtype=np.float64)
    n = len(values)
    if n == 0:
        raise ValueError("no problems: there is nothing to average")
    mean = float(values.mean())
    error = float(values.std(ddof=1) / math.sqrt(n)) if n > 1 else 0.0
    half = float(stdtrit(n - 1, 0.5 + confidence / 2)) * error if n > 1 else 0.0
    return Mean(mean=mean, low=mean - half, high=mean + half, standard_error=error, problems=n)


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A paired difference of two models on the same problems, with its 95 % interval."""

    mean: float
    low: float
    high: float
    problems: int


def paired_difference(
    after: Sequence[float] | NDArray[np.float64],
    before: Sequence[float] | NDArray[np.float64],
    *,
    confidence: float = 0.95,
    resamples: int = 4000,
) -> Difference:
    """Mean of ``after - before`` over the same problems; interval by a bootstrap over problems (fixed seed).

    Where every problem differs by the same amount (mostly by nothing) the bootstrap is a point, which would claim
    certainty. Then the interval is Bonett and Price's adjusted one for paired shares: a problem more that is won and
    one more that is lost.
    """
    delta = np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)
    if len(delta) == 0:
        raise ValueError("no problems to compare")
    if np.ptp(delta) == 0:
        low, high = _adjusted(delta, confidence)
    else:
        rng = np.random.Generator(np.random.PCG64(0))
        means = delta[rng.integers(0, len(delta), size=(resamples, len(delta)))].mean(axis=1)
        low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Difference(mean=float(delta.mean()), low=float(low), high=float(high), problems=len(delta))


def paired_scores(after: Sequence[float | None], before: Sequence[float | None]) -> Difference | None:
    """The paired difference over the problems that both tests judged, in the same order; None for fewer than two."""
    if len(after) != len(before):
        return None
    pairs = [(a, b) for a, b in zip(after, before, strict=True) if a is not None and b is not None]
    return paired_difference([a for a, _ in pairs], [b for _, b in pairs]) if len(pairs) > 1 else None


def _adjusted(delta: NDArray[np.float64], confidence: float) -> tuple[float, float]:
    """Bonett and Price's interval (2012): with +1 and -1 added; the observed mean lies in it."""
    padded = np.append(delta, (1.0, -1.0))
    half = NormalDist().inv_cdf(0.5 + confidence / 2) * float(padded.std() / math.sqrt(len(padded)))
    mean, observed = float(padded.mean()), float(delta.mean())
    return max(-1.0, min(mean - half, observed)), min(1.0, max(mean + half, observed))


def permutation_test(delta: Sequence[float] | NDArray[np.float64], *, draws: int = 100_000) -> float:
    """Two-sided p-value of a paired permutation test over problems: which of the two models is which is exchanged.

    Under the null hypothesis the sign of each problem's difference is a coin. All sign patterns are enumerated while
    there are at most 2^16 of them (problems without a difference change nothing and are left out); otherwise
    ``draws`` are drawn with a fixed seed and the observed one is counted among them, so that p is never 0.

    Args:
        delta: one difference a problem, e.g. of the shares of right samples.
        draws: of the sampled test.

    Raises:
        ValueError: no problems.
    """
    values = np.asarray(delta, dtype=np.float64)
    if len(values) == 0:
        raise ValueError("no problems to compare")
    moved = np.abs(values[values != 0])
    if len(moved) == 0:
        return 1.0
    observed = abs(float(values.sum())) - 1e-12 * float(moved.sum())  # sums in another order differ in the last bit
    if len(moved) <= MOST_ENUMERATED:
        sums = np.zeros(1)
        for size in moved:
            sums = np.concatenate([sums + size, sums - size])
        return float(np.mean(np.abs(sums) >= observed))
    rng = np.random.Generator(np.random.PCG64(0))
    extreme = 0
    for start in range(0, draws, 1000):
        signs = rng.integers(0, 2, size=(min(1000, draws - start), len(moved)), dtype=np.int8) * 2.0 - 1.0
        extreme += int(np.sum(np.abs(signs @ moved) >= observed))
    return (extreme + 1) / (draws + 1)
