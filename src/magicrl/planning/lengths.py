"""Response lengths: a log-normal cut at T, with an atom there for the responses that T truncates. `read_measured` takes
them, and the share of groups that survive rejection, from the ``metrics.jsonl`` of a run that exists.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from math import exp, log, sqrt
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import ndtr

MEAN_AT_32K = 12_500  # mean response of R1-Distill-Qwen-7B trained from scratch at T = 32K, tokens: published
SIGMA = 0.8  # spread of the logarithm of lengths, where no run has been measured: assumed, since not published
SHARED = 0.5  # how much of that spread a group shares: assumed
KEPT = 0.6  # share of the groups that survive rejection: assumed


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Lengths of responses in tokens, end token included."""

    median: float  # of the untruncated distribution
    sigma: float  # standard deviation of the logarithm
    limit: int  # T; longer responses have exactly this length
    # share of the logarithm's variance that the responses of a group have in common (hard problems are long for every
    # sample), 0 to 1
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

    # the mean grows with the median from almost 0 to almost T, so that there is one root between
    root = cast(float, brentq(gap, log(mean) - 5 * sigma - sigma**2, log(limit) + 6 * sigma))
    return Lengths(median=exp(root), sigma=sigma, limit=limit, shared=shared)


@cache
def reasoning_lengths(
    limit: int, mean_at_32k: float = MEAN_AT_32K, sigma: float = SIGMA, shared: float = SHARED
) -> Lengths:
    """Lengths of an R1-distilled model in training from scratch, under another T."""
    return lengths_of_mean(mean_at_32k, sigma, 32768, shared).at(limit)


WINDOW = 20  # last steps that are averaged
NINTH_DECILE = 1.2815515655446004  # standard normal quantile of 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a run's last steps looked like."""

    lengths: Lengths  # under the T of those steps
    kept: float  # share of the groups that was trained on


def read_measured(folder: Path) -> Measured:
    """The last steps of a run folder.

    Raises:
        ValueError: no metrics, or fewer than one step.
    """
    path = folder / "metrics.jsonl"
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not the metrics of a run: {error}; name a run folder of magicrl train") from None
    if not records:
        raise ValueError(f"{path}: holds no step yet")
    last = [record["values"] for record in records if record["stage"] == records[-1]["stage"]][-WINDOW:]
    limit = int(last[-1]["stage/max_tokens"])
    keys = ("length/mean", "length/q50", "length/q90", "groups/trained", "groups/sampled")
    mean = {key: float(np.mean([values[key] for values in last])) for key in keys}
    median, ninth = mean["length/q50"], mean["length/q90"]
    inside = 0 < median < ninth < limit  # a decile at T says nothing of the spread
    sigma = min(2.0, max(0.05, log(ninth / median) / NINTH_DECILE)) if inside else SIGMA
    lengths = lengths_of_mean(min(mean["length/mean"], 0.99 * limit), sigma, limit, SHARED)
    return Measured(lengths=lengths, kept=min(1.0, max(mean["groups/trained"] / mean["groups/sampled"], 0.01)))
