"""Verdicts on claims: holds, does not hold or undecided, each with its effect, interval and p-value.

Seeds are the unit. A claim that compares two arms pairs their runs by seed (the same supervised start, prompts and
random numbers), and its test is Student's on the paired differences. ``holds`` needs an effect of at least the stated
size and a one-sided p-value that Holm's correction over the suite leaves below 0.025: the suite is looked at twice, at
five seeds and at ten, and each look has half of 0.05. ``does not hold`` needs the opposite: the 95 % interval
excludes an effect of the stated size. Everything else is undecided, with the number of seeds at which an effect like
the measured one would be decided. Fewer than three seeds decide nothing.

Verdicts in words, in the units and the direction that a reader expects.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

from studies.definition import (
    Claim,
    CrossingClaim,
    DifferenceClaim,
    EqualClaim,
    LevelClaim,
    OrderClaim,
    Result,
    parse_measure,
)

Decision: TypeAlias = Literal["holds", "does not hold", "undecided", "not run"]
Runs: TypeAlias = Mapping[str, Mapping[int, Result]]  # results by arm and seed
LOOKS = 2  # how often the suite's verdicts are drawn: at five seeds and, as was decided then for all arms alike, at ten
LEVEL = 0.05 / LOOKS  # what Holm's correction may leave of a p-value, Bonferroni's share of one look
LEAST_SEEDS = 3
"""Fewer decide nothing: two runs that agree by chance, to the last digit of a coarse measure, have no spread."""
MOST_SEEDS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the runs say about a claim."""

    claim: str  # its id
    decision: Decision  # after Holm's correction, see ``decide``
    effect: float  # mean over seeds, in the direction that the claim states: at least ``bar`` is what it needs
    low: float  # of its 95 % interval
    high: float
    bar: float  # the least effect that counts
    # one-sided, before correction: of an effect of 0 or less (of less than ``bar``, for a level or an equality)
    p: float
    seeds: int  # runs an arm
    # for an undecided claim, the seeds at which an effect and spread like these would be decided, with the correction
    # for the claims that do not hold yet; None where no number up to ``MOST_SEEDS`` would
    seeds_needed: int | None = None
    spread: float = math.nan  # standard deviation over seeds
    null: float = 0.0  # what the test compares the effect with


def decide(claims: Sequence[Claim], runs: Mapping[str, Runs]) -> list[Verdict]:
    """The verdicts on ``claims``, corrected together.

    Args:
        claims: of the whole suite.
        runs: the results of each ablation's arms, by the ablation's id.
    """
    raw = [examine(claim, runs.get(claim.id.split(".")[0], {})) for claim in claims]
    tested = [verdict for verdict in raw if verdict.decision != "not run"]
    corrected = dict(zip([v.claim for v in tested], holm([v.p for v in tested]), strict=True))
    first = [_decided(verdict, corrected.get(verdict.claim)) for verdict in raw]
    left = sum(verdict.decision in ("undecided", "does not hold") for verdict in first)
    return [_with_seeds_needed(verdict, left) for verdict in first]


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: adjusted p-values, in the given order.

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


def examine(claim: Claim, runs: Runs) -> Verdict:
    """One claim, uncorrected; ``not run`` where an arm has fewer than two seeds with the measure."""
    if isinstance(claim, CrossingClaim):
        early = _difference(claim, runs, claim.measure, claim.measure, sign=1.0)
        late = _difference(claim, runs, claim.late, claim.late, sign=-1.0)
        if "not run" in (early.decision, late.decision):
            return replace(early, decision="not run")
        return max((early, late), key=lambda verdict: verdict.p)  # both must hold, so that the weaker one decides
    if isinstance(claim, DifferenceClaim):
        sign = 1.0 if claim.direction == "higher" else -1.0
        return _difference(claim, runs, claim.measure, claim.than_measure or claim.measure, sign=sign)
    if isinstance(claim, EqualClaim):
        return _equality(claim, runs)
    if isinstance(claim, OrderClaim):
        return _order(claim, runs)
    return _level(claim, runs)


def _difference(claim: DifferenceClaim | CrossingClaim, runs: Runs, own: str, other: str, *, sign: float) -> Verdict:
    values = _values([(claim.arm, own), (claim.than, other)], runs)
    delta = sign * (values[:, 0] - values[:, 1])
    return _verdict(claim.id, delta, bar=claim.effect, null=0.0)


def _level(claim: LevelClaim, runs: Runs) -> Verdict:
    sign = 1.0 if claim.direction == "above" else -1.0
    values = sign * _values([(claim.arm, claim.measure)], runs)[:, 0]
    return _verdict(claim.id, values, bar=sign * claim.bound, null=sign * claim.bound)


def _equality(claim: EqualClaim, runs: Runs) -> Verdict:
    """Two one-sided tests; the effect is the margin less the absolute difference, which must stay above 0."""
    values = _values([(arm, claim.measure) for arm in (claim.arm, claim.than)], runs)
    delta = values[:, 0] - values[:, 1]
    sides = [_verdict(claim.id, claim.margin + s * delta, bar=0.0, null=0.0) for s in (1.0, -1.0)]
    return max(sides, key=lambda verdict: verdict.p)


def _order(claim: OrderClaim, runs: Runs) -> Verdict:
    sign = 1.0 if claim.direction == "rising" else -1.0
    values = _values([(arm, claim.measure) for arm in claim.along], runs)
    return _verdict(claim.id, np.array([sign * kendall(row) for row in values]), bar=claim.effect, null=0.0)


def kendall(values: Sequence[float] | NDArray[np.float64]) -> float:
    """Kendall's tau of ``values`` against their order: 1 strictly rising, -1 strictly falling.

    Example:
        >>> kendall([0.1, 0.3, 0.2])
        0.3333333333333333
    """
    signs = [float(np.sign(b - a)) for a, b in combinations(values, 2)]
    return sum(signs) / len(signs)


def _values(columns: Sequence[tuple[str, str]], runs: Runs) -> NDArray[np.float64]:
    """``[seeds, columns]``, a column an (arm, measure): the seeds that every arm has, where both are numbers."""
    functions = [(runs.get(arm, {}), parse_measure(measure)) for arm, measure in columns]
    seeds = sorted(set.intersection(*(set(by_seed) for by_seed, _ in functions)))
    rows = np.array([[function(by_seed[seed]) for by_seed, function in functions] for seed in seeds], dtype=np.float64)
    rows = rows.reshape(-1, len(columns))
    return rows[np.isfinite(rows).all(axis=1)]


def _verdict(claim: str, values: NDArray[np.float64], *, bar: float, null: float) -> Verdict:
    """Student's test that the mean of ``values`` is above ``null``."""
    n = len(values)
    if n < 2:
        nan = math.nan
        return Verdict(claim=claim, decision="not run", effect=nan, low=nan, high=nan, bar=bar, p=nan, seeds=n)
    mean, spread = float(values.mean()), float(values.std(ddof=1))
    error = max(spread / math.sqrt(n), 1e-12)
    half = float(stdtrit(n - 1, 0.975)) * error
    return Verdict(
        claim=claim,
        decision="undecided",
        effect=mean,
        low=mean - half,
        high=mean + half,
        bar=bar,
        p=float(stdtr(n - 1, -(mean - null) / error)),
        seeds=n,
        spread=spread,
        null=null,
    )


def _decided(verdict: Verdict, corrected: float | None) -> Verdict:
    if corrected is None or verdict.seeds < LEAST_SEEDS:
        return verdict
    if corrected < LEVEL and verdict.effect >= verdict.bar:
        return replace(verdict, decision="holds")
    if verdict.high < verdict.bar:
        return replace(verdict, decision="does not hold")
    return verdict


def _with_seeds_needed(verdict: Verdict, left: int) -> Verdict:
    """``left`` claims share the error that Holm's correction allows: a large enough effect is asked for more."""
    if verdict.decision != "undecided":
        return verdict
    quantile = 1 - LEVEL / left if verdict.effect >= verdict.bar else 0.975
    needed = seeds_needed(verdict.effect, verdict.spread, bar=verdict.bar, null=verdict.null, quantile=quantile)
    return replace(verdict, seeds_needed=needed)


def seeds_needed(mean: float, spread: float, *, bar: float, null: float, quantile: float = 0.975) -> int | None:
    """Seeds at which an effect of this mean and spread would be decided; None above ``MOST_SEEDS``.

    Above the bar the interval must leave ``null``, below it the interval must leave the bar.
    """
    gap = mean - null if mean >= bar else bar - mean
    if gap <= 0:
        return None
    for n in range(LEAST_SEEDS, MOST_SEEDS + 1):
        if float(stdtrit(n - 1, quantile)) * spread / math.sqrt(n) < gap:
            return n
    return None


WORDS = {"holds": "holds", "does not hold": "**does not hold**", "undecided": "undecided", "not run": "not run"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """A verdict's numbers as they are printed: a level as it was measured, not turned round to be tested."""

    effect: str
    interval: str
    bar: str


def numbers_of(claim: Claim, verdict: Verdict) -> Numbers:
    """What the columns of a verdict table hold."""
    if isinstance(claim, LevelClaim):
        sign = 1.0 if claim.direction == "above" else -1.0
        low, high = sorted((sign * verdict.low, sign * verdict.high))
        return Numbers(
            effect=_number(sign * verdict.effect),
            interval=f"{_number(low)} to {_number(high)}",
            bar=f"{claim.direction} {_number(claim.bound)}",
        )
    interval = f"{_number(verdict.low)} to {_number(verdict.high)}"
    if isinstance(claim, EqualClaim):
        return Numbers(effect=f"{_number(verdict.effect)} of room", interval=interval, bar=f"±{_number(claim.margin)}")
    unit = " (tau)" if isinstance(claim, OrderClaim) else ""
    return Numbers(effect=_number(verdict.effect) + unit, interval=interval, bar=_number(verdict.bar))


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def seeds_of(verdict: Verdict) -> str:
    """The number of seeds; for an undecided claim with the number that would decide it."""
    if verdict.decision != "undecided":
        return str(verdict.seeds)
    more = f"about {verdict.seeds_needed} would decide" if verdict.seeds_needed else "no number would decide"
    return f"{verdict.seeds} ({more})"


def shown_verdict(claim: Claim, verdict: Verdict) -> str:
    """In one bracket: verdict, effect, interval, seeds."""
    if verdict.decision == "not run":
        return "(not run)"
    numbers = numbers_of(claim, verdict)
    return (
        f"({claim.id} {WORDS[verdict.decision]}: {numbers.effect}, {numbers.interval}; "
        f"needed {numbers.bar}; seeds {seeds_of(verdict)})"
    )
