"""Response lengths: a log-normal cut at T, with an atom there for the responses that T truncates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, log, sqrt
from typing import cast

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import ndtr


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Lengths of responses in tokens, end token included.

    Attributes:
        median: of the untruncated distribution.
        sigma: standard deviation of the logarithm.
        limit: T; longer responses have exactly this length.
        shared: share of the logarithm's variance that the responses of a group have in common (hard problems are
            long for every sample), 0 to 1.
    """

    median: float
    sigma: float
    limit: int
    shared: float = 0.0

    def __post_init__(self) -> None:
        if not (self.median > 0 and self.sigma > 0 and self.limit >= 1 and 0 <= self.shared <= 1):
            raise ValueError(f"lengths need median > 0, sigma > 0, limit >= 1 and shared in [0, 1], got {self}")

    @property
    def truncated(self) -> float:
        """Share of the responses that end at T."""
        return float(ndtr(-(log(self.limit / self.median)) / self.sigma))

    @property
    def mean(self) -> float:
        """Mean length after truncation: E[min(X, T)]."""
        return self._moment(1)

    @property
    def mean_square(self) -> float:
        """E[min(X, T) squared], which attention's cost goes with."""
        return self._moment(2)

    def _moment(self, order: int) -> float:
        z = log(self.limit / self.median) / self.sigma
        below = exp(order * log(self.median) + (order * self.sigma) ** 2 / 2) * float(ndtr(z - order * self.sigma))
        return below + self.limit**order * self.truncated

    @property
    def mean_context(self) -> float:
        """Response tokens that a response token sees on average: half of E[L^2] / E[L]."""
        return self.mean_square / self.mean / 2

    def at(self, limit: int) -> Lengths:
        """The same responses under another T."""
        return replace(self, limit=limit)

    def sample(self, groups: int, group_size: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """``[groups, group_size]`` lengths, at least 1."""
        common = rng.standard_normal((groups, 1)) * sqrt(self.shared)
        own = rng.standard_normal((groups, group_size)) * sqrt(1 - self.shared)
        drawn = self.median * np.exp(self.sigma * (common + own))
        return np.clip(np.ceil(drawn), 1, self.limit).astype(np.int64)


def lengths_of_mean(mean: float, sigma: float, limit: int, shared: float = 0.0) -> Lengths:
    """The distribution whose mean after truncation at ``limit`` is ``mean``.

    Raises:
        ValueError: no distribution below T has such a mean.
    """
    if not 0 < mean < 0.999 * limit:
        raise ValueError(f"a mean length of {mean:g} tokens does not go with T = {limit}: it must be below T")

    def gap(log_median: float) -> float:
        return Lengths(median=exp(log_median), sigma=sigma, limit=limit).mean - mean

    root = cast(float, brentq(gap, log(mean) - 5 * sigma - sigma**2, log(limit) + 6 * sigma))
    return Lengths(median=exp(root), sigma=sigma, limit=limit, shared=shared)


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthCourse:
    """Lengths that change over training: the median goes geometrically from one end to the other.

    Attributes:
        start: at the first step.
        end: median at the last step.
    """

    start: Lengths
    end: float

    def at(self, progress: float) -> Lengths:
        """Lengths at ``progress`` of training, 0 to 1."""
        assert 0 <= progress <= 1
        return replace(self.start, median=self.start.median ** (1 - progress) * self.end**progress)
