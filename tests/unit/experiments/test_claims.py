"""Verdicts: hand-computed tests, Holm's correction, and every shipped predicate with a counter-example."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from scipy import stats

from magicrl.evaluation.statistics import holm
from studies.claims import Verdict, decide, kendall, starts_needed, students
from studies.definition import (
    SUITES,
    Claim,
    CrossingClaim,
    DifferenceClaim,
    EqualClaim,
    LevelClaim,
    OrderClaim,
    Premise,
    parse_measure,
    shipped_ablations,
)

STEPS = 200


def run_with(measures: Mapping[str, float]) -> dict[str, Any]:
    """Return a result whose measures have these values."""
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
        elif kind == "spread":  # alternating by this much gives that standard deviation
            curves[curve] = [1.0 + value * (-1) ** step for step in range(STEPS)]
        elif text.startswith("test@"):
            tests["after"]["1.0" if text == "test@best" else text.removeprefix("test@")] = value
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


def study(values: Mapping[str, Mapping[str, float]], starts: int = 6) -> dict[str, dict[tuple[int, int], Any]]:
    """Return runs of variants, ``{variant: {measure: value}}``, with a small spread between starting models."""
    noise = np.random.default_rng(0).normal(size=(len(values), starts))
    return {
        arm: {
            (start, 0): run_with({m: v * (1 + 1e-4 * noise[row, start]) for m, v in measures.items()})
            for start in range(starts)
        }
        for row, (arm, measures) in enumerate(values.items())
    }


def verdict_on(claim: Claim, values: Mapping[str, Mapping[str, float]], starts: int = 6) -> Verdict:
    """Return the verdict by its test. The made-up runs measure everything, and premises have a separate test."""
    always = Premise(says="", arm=claim.arms()[0], measure=claim.measure, direction="above", bound=-1e9)
    claim = claim.model_copy(update={"premise": always})
    return decide([claim], {claim.id.split(".")[0]: study(values, starts)})[0]


def satisfied_and_not(claim: Claim) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
    """Return values of the variants' measures under which the claim is clearly true, and clearly false."""
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
    """Return two variants, or one variant twice."""
    return {arm: {**one.get(arm, {}), **other.get(arm, {})} for arm in (*one, *other)}


SHIPPED = [claim for suite in SUITES for ablation in shipped_ablations(suite) for claim in ablation.claims]


@pytest.mark.parametrize("claim", SHIPPED, ids=lambda claim: claim.id)
def test_every_shipped_claim_can_hold_and_can_fail(claim: Claim) -> None:
    good, bad = satisfied_and_not(claim)
    for values in (good, bad):  # the made-up runs have the intended values
        for arm, measures in values.items():
            for text, value in measures.items():
                got = parse_measure(text)(run_with(measures))
                whole_steps = {"steps": 0.6, "tokens": 600.0}.get(text.partition(":")[0], 0.02)
                assert got == pytest.approx(value, rel=0.02, abs=whole_steps), (arm, text)
    assert verdict_on(claim, good).decision == "holds"
    assert verdict_on(claim, bad).decision == "does not hold"
    assert verdict_on(claim, good, starts=1).decision == "not run"


LEARNS = Premise(says="It learns.", arm="a", measure="test@1.0", direction="above", bound=0.0)
DIFFERENCE = DifferenceClaim(
    id="6.x", says="", measure="test@1.0", arm="a", than="b", direction="higher", effect=0.05, premise=LEARNS
)
EQUAL = EqualClaim(id="6.e", says="", measure="test@1.0", arm="a", than="b", margin=0.05, premise=LEARNS)


def runs(a: list[float], b: list[float], seeds: int = 1) -> dict[str, dict[str, dict[tuple[int, int], Any]]]:
    """Return values by starting model, with ``seeds`` consecutive ones from each."""
    return {
        "6": {
            arm: {divmod(row, seeds): run_with({"test@1.0": v}) for row, v in enumerate(values)}
            for arm, values in (("a", a), ("b", b))
        }
    }


def test_a_difference_is_students_test_of_the_pairs_against_the_bar() -> None:
    a, b = [0.8, 0.7, 0.9, 0.75], [0.6, 0.65, 0.7, 0.6]
    verdict = decide([DIFFERENCE], runs(a, b))[0]
    delta = [x - y for x, y in zip(a, b, strict=True)]  # .2 .05 .2 .15: mean .15, deviation .0707, error .0354
    assert verdict.p_holds == pytest.approx(stats.ttest_1samp(delta, 0.05, alternative="greater").pvalue)
    assert verdict.p_fails == pytest.approx(stats.ttest_1samp(delta, 0.05, alternative="less").pvalue)
    assert verdict.p_holds == pytest.approx(stats.t.sf(0.1 / 0.0353553, 3), rel=1e-4)
    interval = stats.ttest_rel(a, b).confidence_interval()
    assert (verdict.low, verdict.high) == pytest.approx((interval.low, interval.high))
    assert verdict.effect == pytest.approx(0.15)
    assert verdict.decision == "undecided", ".033 on one of two sides, against 0 it would have held"
    assert decide([DIFFERENCE.model_copy(update={"effect": 0.0})], runs(a, b))[0].decision == "holds"


def test_the_start_is_the_unit_not_the_run() -> None:
    a = [0.7, 0.9, 0.6, 0.8, 0.8, 1.0]  # three starting models of two seeds each: means .8, .7, .9
    verdict = decide([DIFFERENCE], runs(a, [0.5] * 6, seeds=2))[0]
    assert (verdict.starts, verdict.seeds) == (3, 6)
    assert verdict.spread == pytest.approx(0.1), "of .3, .2, .4"
    assert verdict.within == pytest.approx(math.sqrt(0.02)), "each start's two lie .1 about its mean: 6 x .01 over 3"
    half = stats.t.ppf(0.975, 2) * 0.1 / math.sqrt(3)
    assert (verdict.low, verdict.high) == pytest.approx((0.3 - half, 0.3 + half))
    assert verdict.p_holds == pytest.approx(stats.t.sf(0.25 / (0.1 / math.sqrt(3)), 2))
    copied = decide([DIFFERENCE], runs([x for x in (0.8, 0.7, 0.9) for _ in range(50)], [0.5] * 150, seeds=50))[0]
    assert copied.p_holds == pytest.approx(verdict.p_holds), "more seeds of the same starts are no more units"


def test_does_not_hold_is_a_corrected_test_too() -> None:
    short = runs([0.61, 0.611, 0.609, 0.61], [0.6, 0.6, 0.6, 0.6])
    assert decide([DIFFERENCE], short)[0].decision == "does not hold"
    almost = runs([0.66, 0.6, 0.63, 0.57], [0.6] * 4)  # mean .015: p .077 for failing
    assert decide([DIFFERENCE], almost)[0].decision == "undecided"
    others = [DIFFERENCE.model_copy(update={"id": f"6.{i}"}) for i in range(40)]
    near = runs([0.62, 0.6, 0.61, 0.59], [0.6] * 4)
    alone, among = decide([DIFFERENCE], near)[0], decide([DIFFERENCE, *others], near)[0]
    assert alone.p_fails == among.p_fails
    assert (alone.decision, among.decision) == ("does not hold", "undecided")


def test_a_look_takes_its_share_of_the_error() -> None:
    pair = runs([0.62, 0.6, 0.61, 0.59], [0.6] * 4)  # p .0030 for failing: twice that is below 0.05 / 4, not / 10
    assert decide([DIFFERENCE], pair, looks=4)[0].decision == "does not hold"
    assert decide([DIFFERENCE], pair, looks=10)[0].decision == "undecided"


def test_equality_is_two_one_sided_tests() -> None:
    close = decide([EQUAL], runs([0.6, 0.61, 0.59, 0.605], [0.6] * 4))[0]
    delta = [0.0, 0.01, -0.01, 0.005]
    upper, lower = (
        stats.ttest_1samp(delta, bound, alternative=side).pvalue for bound, side in ((0.05, "less"), (-0.05, "greater"))
    )
    assert close.p_holds == pytest.approx(max(upper, lower))
    assert close.effect == pytest.approx(0.00125)
    assert close.decision == "holds"
    for far in ([0.7, 0.71, 0.69, 0.705], [0.5, 0.51, 0.49, 0.505]):
        apart = decide([EQUAL], runs(far, [0.6] * 4))[0]
        side = stats.ttest_1samp([abs(x - 0.6) for x in far], 0.05, alternative="greater").pvalue
        assert apart.p_fails == pytest.approx(2 * side)
        assert apart.decision == "does not hold"
    assert decide([EQUAL], runs([0.5, 0.7, 0.6, 0.61], [0.6] * 4))[0].decision == "undecided"


def test_an_unmet_premise_leaves_a_claim_undecided() -> None:
    pair = runs([0.9, 0.91, 0.9, 0.89], [0.6] * 4)
    assert decide([DIFFERENCE], pair)[0].decision == "holds"
    premise = Premise(says="b collapses.", arm="a", than="b", measure="test@1.0", direction="below", bound=0.3)
    unmet = decide([DIFFERENCE.model_copy(update={"premise": premise})], pair)[0]
    assert unmet.premise is not None
    assert unmet.premise.value == pytest.approx(0.3)
    assert (unmet.premise.met, unmet.decision, unmet.starts_needed) == (False, "undecided", None)
    met = premise.model_copy(update={"bound": 0.31})
    assert decide([DIFFERENCE.model_copy(update={"premise": met})], pair)[0].decision == "holds"
    unmeasured = premise.model_copy(update={"measure": "kl@late"})
    assert decide([DIFFERENCE.model_copy(update={"premise": unmeasured})], pair)[0].decision == "not run"


def test_every_shipped_premise_is_measured_and_can_fail() -> None:
    """Check that no premise holds for every run: a value on its other side leaves the claim undecided."""
    for claim in SHIPPED:
        premise = claim.premise
        own, other = premise.measure, premise.than_measure or premise.measure
        assert premise.says.endswith("."), claim.id
        assert (own, premise.arm) != (other, premise.than), claim.id


def test_noise_is_undecided_and_says_how_many_starts_would_decide() -> None:
    verdict = decide([DIFFERENCE], runs([0.9, 0.5, 0.8, 0.62], [0.6, 0.6, 0.6, 0.6]))[0]
    assert verdict.decision == "undecided"
    assert verdict.starts_needed is not None
    assert verdict.starts_needed > 4


def test_two_starts_decide_nothing() -> None:
    assert decide([DIFFERENCE], runs([0.6, 0.6], [0.6, 0.6]))[0].decision == "undecided"
    assert decide([DIFFERENCE], runs([0.6] * 4, [0.6] * 4, seeds=2))[0].decision == "undecided"
    assert decide([DIFFERENCE], runs([0.6, 0.6, 0.6], [0.6, 0.6, 0.6]))[0].decision == "does not hold"


def test_only_units_that_both_arms_have_are_compared() -> None:
    pair = runs([0.9, 0.9, 0.9], [0.6, 0.6, 0.6])
    del pair["6"]["b"][2, 0]
    pair["6"]["a"][1, 0]["tests"]["after"] = {}
    assert decide([DIFFERENCE], pair)[0].starts == 1
    assert decide([DIFFERENCE], {})[0].decision == "not run"


def test_holm_by_hand() -> None:
    # sorted .01 .02 .03 .04: times 4, 3, 2, 1 is .04 .06 .06 .04; each at least the previous one
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([]) == []


def test_kendalls_tau_counts_pairs() -> None:
    assert kendall([1, 2, 3, 4]) == 1
    assert kendall([4, 3, 2, 1]) == -1
    assert kendall([1, 1, 1]) == 0
    assert kendall([2, 1, 3, 4]) == pytest.approx((5 - 1) / 6)


def test_starts_needed_is_where_the_interval_leaves_the_bar() -> None:
    needed = starts_needed(0.1, 0.1, quantile=0.975)
    assert needed is not None
    half = [stats.t.ppf(0.975, n - 1) * 0.1 / math.sqrt(n) for n in (needed - 1, needed)]
    assert half[0] > 0.1 > half[1]
    assert starts_needed(0.0, 0.1, quantile=0.975) is None, "an effect that is exactly the bar"


def test_students_by_hand() -> None:
    # 1, 2, 3 against 1: mean 2, deviation 1, error .577, t = 1.732 with 2 degrees: p = 1/2 - 1.732 / (2 sqrt(2 + 3))
    verdict = students("x", [0, 1, 2], np.array([1.0, 2.0, 3.0]), bar=1.0)
    assert verdict.p_holds == pytest.approx(0.5 - math.sqrt(3) / (2 * math.sqrt(5)))
    assert students("x", [0, 1, 2], np.array([1.0, 2.0, 3.0]), bar=1.0, below=True).p_fails == verdict.p_holds
    assert math.isnan(verdict.within)
