"""The rise over the start's best temperature and its interval."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from magicrl.reporting.read_folders import Interval, TemperatureScore, read_run
from magicrl.reporting.scores import comparisons, difference, rise


def test_difference_squares_and_adds_the_facing_halves() -> None:
    """Newcombe: the lower end takes after's lower and before's upper half, the upper end the other two."""
    change = difference(Interval(mean=0.4, low=0.37, high=0.48), Interval(mean=0.9, low=0.84, high=0.95))
    assert change.mean == pytest.approx(0.5)
    assert change.low == pytest.approx(0.5 - math.hypot(0.06, 0.08))
    assert change.high == pytest.approx(0.5 + math.hypot(0.05, 0.03))


def test_difference_agrees_with_newcombe_s_published_example() -> None:
    """56/70 against 48/80 with Wilson intervals: 0.2 (0.0524 to 0.3339), method 10 of Newcombe (1998)."""

    def wilson(hits: int, n: int) -> Interval:
        z, p = 1.959964, hits / n
        centre = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return Interval(mean=p, low=centre - half, high=centre + half)

    change = difference(wilson(48, 80), wilson(56, 70))
    assert (change.mean, change.low, change.high) == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)


def test_the_rise_is_stated_against_the_start_s_best_temperature(run_folder: Path) -> None:
    (comparison,) = comparisons(read_run(run_folder))
    assert comparison.start_best is not None
    assert comparison.start_best[0] == 0.6, "0.47 at 0.6 beats 0.46 at 1 and 0.40 at 0"
    assert comparison.training_temperature == 1.0
    rise = comparison.rise_over_best(1.0)
    assert rise is not None
    assert rise.change.mean == pytest.approx(0.90 - 0.47)
    assert rise.clear
    assert [p.temperature for p in comparison.pairs] == [0.0, 0.6, 1.0]
    same = comparison.pairs[2].rise
    assert same is not None
    assert same.mean == pytest.approx(0.90 - 0.46)


def test_the_rise_is_paired_by_problem_where_the_shares_are_told() -> None:
    """Every problem gains exactly 0.2, so the paired interval has no width; the unpaired one is wide."""

    def score(shares: tuple[float | None, ...]) -> TemperatureScore:
        return TemperatureScore(
            accuracy=Interval(mean=0.5, low=0.2, high=0.8), problems=3, samples=5, per_problem=shares
        )

    before, after = score((0.0, 0.4, 0.8, None)), score((0.2, 0.6, 1.0, 0.1))
    paired = rise(before, after)
    assert (paired.mean, paired.low, paired.high) == pytest.approx((0.2, 0.2, 0.2))
    assert rise(before, score((0.2, 0.6, 1.0))) == difference(before.accuracy, after.accuracy), "other problems"
    assert rise(score(()), score(())) == difference(before.accuracy, after.accuracy), "not told"


def test_a_run_without_its_after_has_no_rise(run_folder: Path) -> None:
    (run_folder / "evaluations" / "after.json").unlink()
    (comparison,) = comparisons(read_run(run_folder))
    assert comparison.training_temperature == 1.0, "what the start was tested at"
    assert comparison.rise_over_best(1.0) is None
    assert all(p.rise is None for p in comparison.pairs)
    assert set(comparison.pass_at("before")) == {16}
    assert comparison.pass_at("after") == {}
