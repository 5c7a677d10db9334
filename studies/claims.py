"""Verdicts on claims: holds, does not hold or undecided, each with effect, interval and p-values.

The initial checkpoint is the unit. A claim compares values paired by checkpoint and seed (same checkpoint, prompts and
random numbers), averaged over the seeds of a checkpoint. Student's test runs on the means of the checkpoints. With
equally many seeds per checkpoint this is the interval of the two-level model (checkpoints, and seeds within them),
because a mean carries both spreads (Snedecor and Cochran, *Statistical Methods*, the nested analysis of variance).

A claim says "at least ``bar``" and is tested against that bar from both sides: against "the effect is at most the bar"
it holds, against "the effect is at least the bar" it does not. An equality holds by two one-sided tests (Schuirmann,
1987) and does not hold if the difference exceeds the margin. Holm's correction covers both sides of all claims; a claim
above ``LEVEL`` on both sides is undecided. Fewer than three checkpoints decide nothing.

A claim has a premise, measured on the same runs: a condition without which it is about nothing (that something
collapsed, if control is said to repair collapse). If it is unmet the claim is undecided, whatever its p-values.
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

from magicrl.evaluation.statistics import holm
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
Runs: TypeAlias = Mapping[str, Mapping[tuple[int, int], Result]]  # by variant, then by (checkpoint, seed)
LEVEL = 0.05  # error of the whole suite, both sides of all claims
LEAST_STARTS = 3
"""Least number of checkpoints: two that agree by chance, in a coarse measure, have no spread."""
MOST_STARTS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Measured value of a premise."""

    value: float  # mean over starts
    met: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Result of a claim."""

    claim: str  # its id
    decision: Decision  # after Holm's correction, see ``decide``
    effect: float  # mean over checkpoints: a difference in the claim's direction, or a level
    low: float  # of its 95 % interval over starts
    high: float
    bar: float  # bound of the effect, or margin of an equality
    p_holds: float  # one-sided, uncorrected, if the truth were the bar or worse
    p_fails: float  # the same if the truth were the bar, or better
    starts: int  # units
    seeds: int  # runs of every variant in all, over the starts
    spread: float = math.nan  # standard deviation of the starts' means
    within: float = math.nan  # standard deviation between the seeds of a start, pooled; nan with one seed a start
    premise: Found | None = None  # None where the claim was not run
    # Checkpoints that would decide an undecided claim with this effect and spread, corrected for the undecided claims;
    # None if its premise is unmet or no number up to ``MOST_STARTS`` would.
    starts_needed: int | None = None


def decide(claims: Sequence[Claim], runs: Mapping[str, Runs], *, looks: int = 1) -> list[Verdict]:
    """Return the verdicts on ``claims``, corrected together.

    Args:
        claims: All claims of the suite.
        runs: Results of each ablation's variants, by the ablation's id.
        looks: Number of times the verdicts are computed; each has its share of ``LEVEL`` (Bonferroni).
    """
    raw = [examine(claim, runs.get(claim.id.split(".")[0], {})) for claim in claims]
    tested = [verdict for verdict in raw if verdict.decision != "not run"]
    level = LEVEL / looks
    corrected = holm([p for verdict in tested for p in (verdict.p_holds, verdict.p_fails)])
    sides = dict(zip([v.claim for v in tested], zip(corrected[::2], corrected[1::2], strict=True), strict=True))
    first = [_decided(v, sides[v.claim], level) if v.claim in sides else v for v in raw]
    left = sum(verdict.decision == "undecided" for verdict in first)
    return [_with_starts_needed(c, v, 1 - level / (2 * max(left, 1))) for c, v in zip(claims, first, strict=True)]


def examine(claim: Claim, runs: Runs) -> Verdict:
    """Return one uncorrected verdict with its premise; ``not run`` if fewer than two checkpoints have the data."""
    premise = examine_premise(claim.premise, runs)
    verdict = _tested(claim, runs)
    if verdict.decision == "not run" or premise is None:
        return replace(verdict, decision="not run")
    return replace(verdict, premise=premise)


def examine_premise(premise: Premise, runs: Runs) -> Found | None:
    """Return the premise's mean over checkpoints and whether it meets the bound, or None without any run."""
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
        # Both must hold (intersection-union test). One failure suffices, and there are two chances of one.
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
    """Test below the upper margin and above the lower one, each one-sided."""
    units, values = paired_values([(arm, claim.measure) for arm in (claim.arm, claim.than)], runs)
    delta = values[:, 0] - values[:, 1]
    upper = students(claim.id, units, delta, bar=claim.margin, below=True)
    lower = students(claim.id, units, delta, bar=-claim.margin)
    # Outside on either side suffices for a difference, and there are two chances of it.
    p_fails = min(1.0, 2 * min(upper.p_fails, lower.p_fails))
    return replace(upper, p_holds=max(upper.p_holds, lower.p_holds), p_fails=p_fails)


def kendall(values: Sequence[float] | NDArray[np.float64]) -> float:
    """Return Kendall's tau of ``values`` against their order: 1 strictly rising, -1 strictly falling.

    Example:
        >>> kendall([0.1, 0.3, 0.2])
        0.3333333333333333
    """
    signs = [float(np.sign(b - a)) for a, b in combinations(values, 2)]
    return sum(signs) / len(signs)


def paired_values(columns: Sequence[tuple[str, str]], runs: Runs) -> tuple[list[int], NDArray[np.float64]]:
    """Return the checkpoint of each row and ``[rows, columns]`` values.

    A column is a (variant, measure), a row a seed of a checkpoint that every variant has, with finite values only.
    """
    functions = [(runs.get(arm, {}), parse_measure(measure)) for arm, measure in columns]
    keys = sorted(set.intersection(*(set(by_unit) for by_unit, _ in functions)))
    rows = np.array([[function(by_unit[key]) for by_unit, function in functions] for key in keys], dtype=np.float64)
    rows = rows.reshape(-1, len(columns))
    whole = np.asarray(np.isfinite(rows).all(axis=1))
    return [start for (start, _), kept in zip(keys, whole.tolist(), strict=True) if kept], rows[whole]


def _by_start(units: Sequence[int], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ``[checkpoints]`` means of ``values``, ``[rows]``."""
    starts = np.array(units)
    return np.array([values[starts == start].mean() for start in dict.fromkeys(units)])


def students(
    claim: str, units: Sequence[int], values: NDArray[np.float64], *, bar: float, below: bool = False
) -> Verdict:
    """Test the checkpoints' means against ``bar`` from both sides with Student's test.

    Args:
        claim: Its id.
        units: Checkpoint of each value.
        values: ``[rows]``, one per seed of a checkpoint.
        bar: Bound of the mean.
        below: Whether the claim holds for means below the bar.
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
    free = len(values) - n  # degrees of freedom of the spread within starts
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
    """Return the number of checkpoints that would decide an effect ``gap`` away from its bar, at this spread.

    The result is None above ``MOST_STARTS``.
    """
    for n in range(LEAST_STARTS, MOST_STARTS + 1):
        if float(stdtrit(n - 1, quantile)) * spread / math.sqrt(n) < gap:
            return n
    return None


WORDS = {"holds": "holds", "does not hold": "**does not hold**", "undecided": "undecided", "not run": "not run"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """Numbers of a verdict as they are printed."""

    effect: str
    interval: str
    bar: str


def numbers_of(claim: Claim, verdict: Verdict) -> Numbers:
    """Return the numbers of a verdict table's columns."""
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
    """Return the verdict's word, with a note if the premise is unmet."""
    unmet = verdict.premise is not None and not verdict.premise.met
    return WORDS[verdict.decision] + (", premise unmet" if unmet else "")


def shown_premise(claim: Claim, verdict: Verdict) -> str:
    """Return a premise with its measured value."""
    if verdict.premise is None:
        return claim.premise.says
    met = "met" if verdict.premise.met else "unmet"
    bound = f"needed {claim.premise.direction} {_number(claim.premise.bound)}"
    return f"{claim.premise.says} {met}: {_number(verdict.premise.value)}, {bound}"


def starts_of(verdict: Verdict) -> str:
    """Return the number of checkpoints, of seeds if several, and the number that would decide the claim."""
    text = str(verdict.starts) if verdict.seeds == verdict.starts else f"{verdict.starts} ({verdict.seeds} seeds)"
    if verdict.decision != "undecided" or verdict.premise is None or not verdict.premise.met:
        return text
    more = f"about {verdict.starts_needed} would decide" if verdict.starts_needed else "no number would decide"
    return f"{text} ({more})"


def shown_verdict(claim: Claim, verdict: Verdict) -> str:
    """Return verdict, effect, interval and checkpoints in one bracket."""
    if verdict.decision == "not run":
        return "(not run)"
    numbers = numbers_of(claim, verdict)
    return (
        f"({claim.id} {word_of(verdict)}: {numbers.effect}, {numbers.interval}; "
        f"needed {numbers.bar}; checkpoints {starts_of(verdict)})"
    )
