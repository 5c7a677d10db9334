"""Verdicts: hand-computed tests, Holm's correction, and every shipped predicate against a counter-example."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from scipy import stats

from studies.claims import Verdict, decide, holm, kendall, seeds_needed
from studies.definition import (
    Claim,
    CrossingClaim,
    DifferenceClaim,
    EqualClaim,
    LevelClaim,
    OrderClaim,
    parse_measure,
    shipped_ablations,
)

STEPS = 200


def run_with(measures: Mapping[str, float]) -> dict[str, Any]:
    """A result whose measures have these values."""
    curves: dict[str, list[float]] = {"tokens": [1000.0 * s for s in range(1, STEPS + 1)]}
    tests: dict[str, dict[str, float]] = {"before": {}, "after": {}}
    for text, value in measures.items():
        kind, _, curve = text.partition(":")
        if found := re.fullmatch(r"(steps|tokens):(\w+)>(\S+)", text):
            steps = round(value if found[1] == "steps" else value / 1000)
            curves[found[2]] = [1.1 * float(found[3]) * (s >= steps - 4) for s in range(1, STEPS + 1)]  # five in a row
        elif kind == "held":
            held = round(value * (STEPS - 1))
            curves["entropy"] = [0.0] + [1.0] * held + [0.0] * (STEPS - 1 - held)
        elif kind == "drop":
            curves[curve] = [2.0] * (STEPS // 2) + [2.0 - value] * (STEPS // 2)
        elif kind == "spread":  # up and down by as much has that standard deviation
            curves[curve] = [1.0 + value * (-1) ** step for step in range(STEPS)]
        elif text.startswith("test@"):
            tests["after"][text.removeprefix("test@")] = value
        else:
            name, place = curve.split("@") if kind == "fall" else text.split("@")
            points = curves.setdefault(name, [value] * STEPS)
            points[_steps_of(place)] = [2.0 - value if kind == "fall" else value] * len(points[_steps_of(place)])
            points[:3] = [2.0] * 3 if kind == "fall" else points[:3]
    return {"curves": curves, "tests": tests}


def _steps_of(place: str) -> slice:
    if place == "late":
        return slice(STEPS // 2, None)
    return slice(0, 3) if place == "start" else slice(int(place) - 3, int(place) + 2)


def study(values: Mapping[str, Mapping[str, float]], seeds: int = 6) -> dict[str, dict[int, dict[str, Any]]]:
    """Runs of arms, ``{arm: {measure: value}}``, with a little spread between seeds."""
    noise = np.random.default_rng(0).normal(size=(len(values), seeds))
    return {
        arm: {
            seed: run_with({m: v * (1 + 1e-3 * noise[row, seed]) for m, v in measures.items()}) for seed in range(seeds)
        }
        for row, (arm, measures) in enumerate(values.items())
    }


def verdict_on(claim: Claim, values: Mapping[str, Mapping[str, float]], seeds: int = 6) -> Verdict:
    return decide([claim], {claim.id.split(".")[0]: study(values, seeds)})[0]


def satisfied_and_not(claim: Claim) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
    """Values of the arms' measures under which the claim is plainly true, and plainly false."""
    unit = 100_000.0 if claim.measure.startswith("tokens:") else 60.0 if claim.measure.startswith("steps:") else 0.4
    low, high = 0.2 * unit, unit
    if isinstance(claim, LevelClaim):
        above, below = claim.bound * 1.2 + 0.01, max(0.0, claim.bound * 0.8 - 0.01)
        good, bad = (above, below) if claim.direction == "above" else (below, above)
        return {claim.arm: {claim.measure: good}}, {claim.arm: {claim.measure: bad}}
    if isinstance(claim, OrderClaim):
        rising = [low + (high - low) * i / len(claim.along) for i in range(len(claim.along))]
        up = {arm: {claim.measure: v} for arm, v in zip(claim.along, rising, strict=True)}
        down = {arm: {claim.measure: v} for arm, v in zip(claim.along, rising[::-1], strict=True)}
        return (up, down) if claim.direction == "rising" else (down, up)
    if isinstance(claim, EqualClaim):
        same = {claim.arm: {claim.measure: high}, claim.than: {claim.measure: high}}
        return same, {claim.arm: {claim.measure: high}, claim.than: {claim.measure: high + 2 * claim.margin}}
    if isinstance(claim, CrossingClaim):
        crossing = {
            claim.arm: {claim.measure: high, claim.late: low},
            claim.than: {claim.measure: low, claim.late: high},
        }
        ahead = {claim.arm: {claim.measure: high, claim.late: high}, claim.than: {claim.measure: low, claim.late: low}}
        return crossing, ahead
    assert isinstance(claim, DifferenceClaim)
    gap = 1.5 * claim.effect + 0.1 * low
    return tuple(  # type: ignore[return-value]
        _two({claim.arm: {claim.measure: own}}, {claim.than: {claim.than_measure or claim.measure: other}})
        for own, other in sorted([(low + gap, low), (low, low + gap)], reverse=claim.direction == "higher")
    )


def _two(one: dict[str, dict[str, float]], other: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Both, of one arm or of two."""
    return {arm: {**one.get(arm, {}), **other.get(arm, {})} for arm in (*one, *other)}


SHIPPED = [claim for ablation in shipped_ablations() for claim in ablation.claims]


@pytest.mark.parametrize("claim", SHIPPED, ids=lambda claim: claim.id)
def test_every_shipped_claim_can_hold_and_can_fail(claim: Claim) -> None:
    good, bad = satisfied_and_not(claim)
    for values in (good, bad):  # the made-up runs have the values that they should have
        for arm, measures in values.items():
            for text, value in measures.items():
                got = parse_measure(text)(run_with(measures))
                whole_steps = {"steps": 0.6, "tokens": 600.0}.get(text.partition(":")[0], 0.02)
                assert got == pytest.approx(value, rel=0.02, abs=whole_steps), (arm, text)
    assert verdict_on(claim, good).decision == "holds"
    assert verdict_on(claim, bad).decision == "does not hold"
    assert verdict_on(claim, good, seeds=1).decision == "not run"


DIFFERENCE = DifferenceClaim(id="6.x", says="", measure="test@1.0", arm="a", than="b", direction="higher", effect=0.05)


def runs(a: list[float], b: list[float]) -> dict[str, dict[str, dict[int, dict[str, Any]]]]:
    rows = {arm: {seed: run_with({"test@1.0": v}) for seed, v in enumerate(vs)} for arm, vs in (("a", a), ("b", b))}
    return {"6": rows}


def test_a_difference_is_students_test_of_the_pairs() -> None:
    a, b = [0.8, 0.7, 0.9, 0.75], [0.6, 0.65, 0.7, 0.6]
    verdict = decide([DIFFERENCE], runs(a, b))[0]
    expected = stats.ttest_rel(a, b, alternative="greater")
    interval = stats.ttest_rel(a, b).confidence_interval()
    assert verdict.p == pytest.approx(expected.pvalue)
    assert (verdict.low, verdict.high) == pytest.approx((interval.low, interval.high))
    assert verdict.effect == pytest.approx(0.15)
    assert verdict.decision == "holds"


def test_a_clear_effect_that_is_too_small_does_not_hold() -> None:
    verdict = decide([DIFFERENCE], runs([0.61, 0.611, 0.609, 0.61], [0.6, 0.6, 0.6, 0.6]))[0]
    assert verdict.p < 0.001
    assert verdict.decision == "does not hold"


def test_noise_is_undecided_and_says_how_many_seeds_would_decide() -> None:
    verdict = decide([DIFFERENCE], runs([0.9, 0.5, 0.8, 0.6], [0.6, 0.6, 0.6, 0.6]))[0]
    assert verdict.decision == "undecided"
    assert verdict.seeds_needed is not None
    assert verdict.seeds_needed > 4


def test_two_seeds_decide_nothing() -> None:
    assert decide([DIFFERENCE], runs([0.6, 0.6], [0.6, 0.6]))[0].decision == "undecided"
    assert decide([DIFFERENCE], runs([0.6, 0.6, 0.6], [0.6, 0.6, 0.6]))[0].decision == "does not hold"


def test_holms_correction_can_take_a_verdict_away() -> None:
    others = [DIFFERENCE.model_copy(update={"id": f"6.{i}"}) for i in range(40)]
    pair = runs([0.8, 0.7, 0.9, 0.75], [0.6, 0.65, 0.7, 0.6])
    assert decide([DIFFERENCE], pair)[0].decision == "holds"
    undecided = decide([DIFFERENCE, *others], pair)[0]
    assert undecided.decision == "undecided"
    assert undecided.seeds_needed is not None
    assert undecided.seeds_needed > undecided.seeds, "more seeds than these: forty other claims share the error"


def test_only_seeds_that_both_arms_have_are_compared() -> None:
    pair = runs([0.9, 0.9, 0.9], [0.6, 0.6, 0.6])
    del pair["6"]["b"][2]
    pair["6"]["a"][1]["tests"]["after"] = {}
    assert decide([DIFFERENCE], pair)[0].seeds == 1
    assert decide([DIFFERENCE], {})[0].decision == "not run"


def test_holm_by_hand() -> None:
    # sorted .01 .02 .03 .04: times 4, 3, 2, 1 is .04 .06 .06 .04; each at least the one before
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([]) == []


def test_kendalls_tau_counts_pairs() -> None:
    assert kendall([1, 2, 3, 4]) == 1
    assert kendall([4, 3, 2, 1]) == -1
    assert kendall([1, 1, 1]) == 0
    assert kendall([2, 1, 3, 4]) == pytest.approx((5 - 1) / 6)


def test_seeds_needed_is_where_the_interval_leaves_the_null() -> None:
    needed = seeds_needed(0.1, 0.1, bar=0.05, null=0.0)
    assert needed is not None
    half = [stats.t.ppf(0.975, n - 1) * 0.1 / math.sqrt(n) for n in (needed - 1, needed)]
    assert half[0] > 0.1 > half[1]
    assert seeds_needed(0.05, 0.1, bar=0.05, null=0.05) is None, "an effect that is exactly the bound"
