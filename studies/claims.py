"""Verdicts on claims: holds, does not hold or undecided, each with its effect, interval and p-values.

The supervised start is the unit. What a claim compares is paired by start and seed (the same start, prompts and random
numbers), averaged over the seeds of a start, and Student's test is made on the starts' means: with as many seeds in
every start this is the interval of the two-level model (starts, and seeds within them), since a start's mean carries
both spreads (Snedecor and Cochran, *Statistical Methods*, the nested analysis of variance).

A claim says "at least ``bar``", and is tested against that bar from both sides: against "the effect is at most the
bar" it holds, against "the effect is at least the bar" it does not. An equality holds by two one-sided tests
(Schuirmann, 1987) and does not hold where the difference lies beyond the margin. Holm's correction goes over both
sides of all claims; what it leaves above ``LEVEL`` on both sides is undecided. Fewer than three starts decide nothing.

A claim has a premise, measured on the same runs: what has to be so for the claim to be about anything (that something
collapsed, where control is said to repair collapse). Where it is unmet the claim is undecided, whatever its p-values.

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
    Premise,
    Result,
    parse_measure,
)

Decision: TypeAlias = Literal["holds", "does not hold", "undecided", "not run"]
Runs: TypeAlias = Mapping[str, Mapping[tuple[int, int], Result]]  # results by arm, then by (start, seed)
LEVEL = 0.05  # of the whole suite, both sides of every claim together
LEAST_STARTS = 3
"""Fewer decide nothing: two starts that agree by chance, to the last digit of a coarse measure, have no spread."""
MOST_STARTS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What a premise's measure was."""

    value: float  # mean over starts
    met: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the runs say about a claim."""

    claim: str  # its id
    decision: Decision  # after Holm's correction, see ``decide``
    effect: float  # mean over starts: of a difference in the direction that the claim states, of a level as measured
    low: float  # of its 95 % interval over starts
    high: float
    bar: float  # what the effect is tested against; of an equality the margin
    p_holds: float  # one-sided, before correction: of an effect like this if the truth were the bar, or worse
    p_fails: float  # the same if the truth were the bar, or better
    starts: int  # units
    seeds: int  # runs of every arm in all, over the starts
    spread: float = math.nan  # standard deviation of the starts' means
    within: float = math.nan  # standard deviation between the seeds of a start, pooled; nan with one seed a start
    premise: Found | None = None  # None where the claim was not run
    # for an undecided claim whose premise is met, the starts at which an effect and spread like these would be decided,
    # with the correction for the claims that are undecided; None where no number up to ``MOST_STARTS`` would
    starts_needed: int | None = None


def decide(claims: Sequence[Claim], runs: Mapping[str, Runs], *, looks: int = 1) -> list[Verdict]:
    """The verdicts on ``claims``, corrected together.

    Args:
        claims: of the whole suite.
        runs: the results of each ablation's arms, by the ablation's id.
        looks: how often the suite's verdicts are drawn; each has its share of ``LEVEL`` (Bonferroni).
    """
    raw = [examine(claim, runs.get(claim.id.split(".")[0], {})) for claim in claims]
    tested = [verdict for verdict in raw if verdict.decision != "not run"]
    level = LEVEL / looks
    corrected = holm([p for verdict in tested for p in (verdict.p_holds, verdict.p_fails)])
    sides = dict(zip([v.claim for v in tested], zip(corrected[::2], corrected[1::2], strict=True), strict=True))
    first = [_decided(v, sides[v.claim], level) if v.claim in sides else v for v in raw]
    left = sum(verdict.decision == "undecided" for verdict in first)
    return [_with_starts_needed(c, v, 1 - level / (2 * max(left, 1))) for c, v in zip(claims, first, strict=True)]


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
    """One claim, uncorrected, with its premise; ``not run`` where fewer than two starts have what it asks for."""
    premise = examine_premise(claim.premise, runs)
    verdict = _tested(claim, runs)
    if verdict.decision == "not run" or premise is None:
        return replace(verdict, decision="not run")
    return replace(verdict, premise=premise)


def examine_premise(premise: Premise, runs: Runs) -> Found | None:
    """The mean over starts of the premise's measure and whether it meets the bound; None without any run."""
    columns = [(premise.arm, premise.measure)]
    if premise.than is not None:
        columns.append((premise.than, premise.than_measure or premise.measure))
    units, values = paired_values(columns, runs)
    if not len(values):
        return None
    value = float(_by_start(units, values[:, 0] - (values[:, 1] if values.shape[1] > 1 else 0.0)).mean())
    return Found(value=value, met=value > premise.bound if premise.direction == "above" else value < premise.bound)


def _tested(claim: Claim, runs: Runs) -> Verdict:
    if isinstance(claim, CrossingClaim):
        early = _difference(claim, runs, claim.measure, claim.measure, sign=1.0)
        late = _difference(claim, runs, claim.late, claim.late, sign=-1.0)
        weaker = max((early, late), key=lambda verdict: verdict.p_holds)
        # both must hold (intersection-union); one that fails is enough, and there are two chances of it
        return replace(weaker, p_fails=min(1.0, 2 * min(early.p_fails, late.p_fails)))
    if isinstance(claim, DifferenceClaim):
        sign = 1.0 if claim.direction == "higher" else -1.0
        return _difference(claim, runs, claim.measure, claim.than_measure or claim.measure, sign=sign)
    if isinstance(claim, EqualClaim):
        return _equality(claim, runs)
    if isinstance(claim, OrderClaim):
        sign = 1.0 if claim.direction == "rising" else -1.0
        units, values = paired_values([(arm, claim.measure) for arm in claim.along], runs)
        return students(claim.id, units, np.array([sign * kendall(row) for row in values]), bar=claim.effect)
    units, values = paired_values([(claim.arm, claim.measure)], runs)
    return students(claim.id, units, values[:, 0], bar=claim.bound, below=claim.direction == "below")


def _difference(claim: DifferenceClaim | CrossingClaim, runs: Runs, own: str, other: str, *, sign: float) -> Verdict:
    units, values = paired_values([(claim.arm, own), (claim.than, other)], runs)
    return students(claim.id, units, sign * (values[:, 0] - values[:, 1]), bar=claim.effect)


def _equality(claim: EqualClaim, runs: Runs) -> Verdict:
    """Two one-sided tests: below the upper margin and above the lower one."""
    units, values = paired_values([(arm, claim.measure) for arm in (claim.arm, claim.than)], runs)
    delta = values[:, 0] - values[:, 1]
    upper = students(claim.id, units, delta, bar=claim.margin, below=True)
    lower = students(claim.id, units, delta, bar=-claim.margin)
    # outside on either side is enough for a difference, and there are two chances of it
    p_fails = min(1.0, 2 * min(upper.p_fails, lower.p_fails))
    return replace(upper, p_holds=max(upper.p_holds, lower.p_holds), p_fails=p_fails)


def kendall(values: Sequence[float] | NDArray[np.float64]) -> float:
    """Kendall's tau of ``values`` against their order: 1 strictly rising, -1 strictly falling.

    Example:
        >>> kendall([0.1, 0.3, 0.2])
        0.3333333333333333
    """
    signs = [float(np.sign(b - a)) for a, b in combinations(values, 2)]
    return sum(signs) / len(signs)


def paired_values(columns: Sequence[tuple[str, str]], runs: Runs) -> tuple[list[int], NDArray[np.float64]]:
    """The start of each row, and ``[rows, columns]``: a column an (arm, measure), a row a start's seed that every arm
    has, where all are numbers."""
    functions = [(runs.get(arm, {}), parse_measure(measure)) for arm, measure in columns]
    keys = sorted(set.intersection(*(set(by_unit) for by_unit, _ in functions)))
    rows = np.array([[function(by_unit[key]) for by_unit, function in functions] for key in keys], dtype=np.float64)
    rows = rows.reshape(-1, len(columns))
    whole = np.asarray(np.isfinite(rows).all(axis=1))
    return [start for (start, _), kept in zip(keys, whole.tolist(), strict=True) if kept], rows[whole]


def _by_start(units: Sequence[int], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """``[starts]``: the mean of each start's ``values``, ``[rows]``."""
    starts = np.array(units)
    return np.array([values[starts == start].mean() for start in dict.fromkeys(units)])


def students(
    claim: str, units: Sequence[int], values: NDArray[np.float64], *, bar: float, below: bool = False
) -> Verdict:
    """Student's tests of the starts' means against ``bar``, from both sides.

    Args:
        claim: its id.
        units: the start of each value.
        values: ``[rows]``, one a start's seed.
        bar: what the mean is tested against.
        below: the claim holds where the mean is below the bar.
    """
    means = _by_start(units, values)
    n = len(means)
    if n < 2:
        nan = math.nan
        return Verdict(
            claim=claim,
            decision="not run",
            effect=nan,
            low=nan,
            high=nan,
            bar=bar,
            p_holds=nan,
            p_fails=nan,
            starts=n,
            seeds=len(values),
        )
    mean, spread = float(means.mean()), float(means.std(ddof=1))
    error = max(spread / math.sqrt(n), 1e-12)
    half = float(stdtrit(n - 1, 0.975)) * error
    is_above, is_below = (float(stdtr(n - 1, sign * (mean - bar) / error)) for sign in (-1.0, 1.0))
    free = len(values) - n  # of the spread within starts
    left = values - np.array([values[np.array(units) == start].mean() for start in units])
    return Verdict(
        claim=claim,
        decision="undecided",
        effect=mean,
        low=mean - half,
        high=mean + half,
        bar=bar,
        p_holds=is_below if below else is_above,
        p_fails=is_above if below else is_below,
        starts=n,
        seeds=len(values),
        spread=spread,
        within=math.sqrt(float((left**2).sum()) / free) if free else math.nan,
    )


def _decided(verdict: Verdict, corrected: tuple[float, float], level: float) -> Verdict:
    assert verdict.premise is not None, "a claim that was run has a premise"
    if verdict.starts < LEAST_STARTS or not verdict.premise.met:
        return verdict
    holds, fails = corrected
    return replace(verdict, decision="holds" if holds < level else "does not hold" if fails < level else "undecided")


def _with_starts_needed(claim: Claim, verdict: Verdict, quantile: float) -> Verdict:
    if verdict.decision != "undecided" or verdict.premise is None or not verdict.premise.met:
        return verdict
    equal = isinstance(claim, EqualClaim)
    gap = abs(verdict.bar - abs(verdict.effect)) if equal else abs(verdict.effect - verdict.bar)
    return replace(verdict, starts_needed=starts_needed(gap, verdict.spread, quantile=quantile))


def starts_needed(gap: float, spread: float, *, quantile: float) -> int | None:
    """Starts at which an effect that lies ``gap`` from its bar is decided, with this spread of the starts' means; None
    above ``MOST_STARTS``."""
    for n in range(LEAST_STARTS, MOST_STARTS + 1):
        if float(stdtrit(n - 1, quantile)) * spread / math.sqrt(n) < gap:
            return n
    return None


WORDS = {"holds": "holds", "does not hold": "**does not hold**", "undecided": "undecided", "not run": "not run"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """A verdict's numbers as they are printed."""

    effect: str
    interval: str
    bar: str


def numbers_of(claim: Claim, verdict: Verdict) -> Numbers:
    """What the columns of a verdict table hold."""
    interval = f"{_number(verdict.low)} to {_number(verdict.high)}"
    bar = _number(verdict.bar)
    if isinstance(claim, LevelClaim):
        bar = f"{claim.direction} {bar}"
    elif isinstance(claim, EqualClaim):
        bar = f"±{bar}"
    unit = " (tau)" if isinstance(claim, OrderClaim) else ""
    return Numbers(effect=_number(verdict.effect) + unit, interval=interval, bar=bar)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def word_of(verdict: Verdict) -> str:
    """The verdict's word, and whether it was the premise that left the claim undecided."""
    unmet = verdict.premise is not None and not verdict.premise.met
    return WORDS[verdict.decision] + (", premise unmet" if unmet else "")


def shown_premise(claim: Claim, verdict: Verdict) -> str:
    """A premise with what was measured."""
    if verdict.premise is None:
        return claim.premise.says
    met = "met" if verdict.premise.met else "unmet"
    bound = f"needed {claim.premise.direction} {_number(claim.premise.bound)}"
    return f"{claim.premise.says} {met}: {_number(verdict.premise.value)}, {bound}"


def starts_of(verdict: Verdict) -> str:
    """The number of starts, and of seeds where a start has several; with the starts that would decide it."""
    text = str(verdict.starts) if verdict.seeds == verdict.starts else f"{verdict.starts} ({verdict.seeds} seeds)"
    if verdict.decision != "undecided" or verdict.premise is None or not verdict.premise.met:
        return text
    more = f"about {verdict.starts_needed} would decide" if verdict.starts_needed else "no number would decide"
    return f"{text} ({more})"


def shown_verdict(claim: Claim, verdict: Verdict) -> str:
    """In one bracket: verdict, effect, interval, starts."""
    if verdict.decision == "not run":
        return "(not run)"
    numbers = numbers_of(claim, verdict)
    return (
        f"({claim.id} {word_of(verdict)}: {numbers.effect}, {numbers.interval}; "
        f"needed {numbers.bar}; checkpoints {starts_of(verdict)})"
    )
