"""Verdicts in words, in the units and the direction that a reader expects."""

from __future__ import annotations

from dataclasses import dataclass

from magicrl.experiments.claims import Verdict
from magicrl.experiments.definition import Claim, EqualClaim, LevelClaim, OrderClaim

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
