"""Intervals and pass@k against hand-computed values, scipy and enumeration."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from magicrl.evaluation.statistics import (
    mean_of,
    paired_difference,
    permutation_test,
    share,
    unbiased_pass_at_k,
    wilson,
)


def test_pass_at_k_is_the_mean_over_all_subsets() -> None:
    outcomes = [1, 1, 0, 0, 0, 0]
    for k in range(1, 7):
        by_enumeration = np.mean([max(subset) for subset in combinations(outcomes, k)])
        assert unbiased_pass_at_k(2, 6, k) == pytest.approx(by_enumeration, abs=1e-12)


def test_pass_at_k_needs_k_samples() -> None:
    with pytest.raises(ValueError, match="pass@8 needs at least 8 samples, there are 4"):
        unbiased_pass_at_k(1, 4, 8)


def test_wilson_matches_scipy() -> None:
    expected = stats.binomtest(7, 20).proportion_ci(method="wilson")
    assert wilson(7 / 20, 20) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_one_sample_a_problem_gives_nearly_the_binomial_interval() -> None:
    result = share([1.0] * 7 + [0.0] * 13)
    expected = stats.binomtest(7, 20).proportion_ci(method="wilson")
    assert result.low == pytest.approx(expected.low, abs=0.01)
    assert result.high == pytest.approx(expected.high, abs=0.01)


def test_many_samples_of_few_problems_do_not_shrink_the_interval() -> None:
    # ten problems, each all correct or all wrong: a thousand samples each change nothing
    result = share([1.0] * 5 + [0.0] * 5)
    assert result.high - result.low > 0.5


def test_agreement_of_all_problems_keeps_a_width() -> None:
    result = share([1.0] * 50)
    assert result.mean == 1.0
    assert result.high == 1.0
    assert 0.92 < result.low < 0.94


def test_coverage_of_the_interval_on_clustered_samples() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        p = rng.beta(0.6, 1.0, size=60)
        result = share(rng.binomial(8, p) / 8)
        hits += result.low <= 0.6 / 1.6 <= result.high
    assert 0.92 <= hits / 400 <= 0.98


def test_paired_difference_is_narrower_than_the_unpaired_one() -> None:
    rng = np.random.default_rng(1)
    difficulty = rng.uniform(0, 0.8, size=200)
    before = rng.binomial(16, difficulty) / 16
    after = rng.binomial(16, difficulty + 0.2) / 16
    result = paired_difference(after, before)
    assert result.low < 0.2 < result.high
    half = 1.96 * float(np.std(after - before)) / 200**0.5
    assert (result.high - result.mean, result.mean - result.low) == pytest.approx((half, half), rel=0.1)


def test_no_difference_on_few_problems_is_no_certainty() -> None:
    few, many = (paired_difference([0.25] * n, [0.25] * n) for n in (20, 2000))
    assert few.mean == many.mean == 0.0
    assert few.low == -few.high
    assert few.high == pytest.approx(1.96 * (2 / 22 / 22) ** 0.5, rel=1e-3)
    assert many.high < 0.002
    always = paired_difference([1.0] * 10, [0.0] * 10)
    assert always.high == 1.0
    assert 0.3 < always.low < 0.6


def test_agreement_up_to_rounding_is_no_certainty() -> None:
    thirds = [1 / 3] * 30  # their mean in floating point is not 1/3
    assert share(thirds).high - share(thirds).low > 0.3
    gain = paired_difference([2 / 3, 1.0] * 15, [1 / 3, 2 / 3] * 15)  # 2/3 - 1/3 and 1 - 2/3 differ in the last bit
    assert gain.high - gain.low > 0.15


def test_templates_of_equal_means_are_no_certainty() -> None:
    """Three templates of two problems each: one problem is won and one lost in each, so that no template differs."""
    found = paired_difference([1.0, 0.0] * 3, [0.0, 1.0] * 3, ["a", "a", "b", "b", "c", "c"])
    assert found.mean == 0.0
    assert found.low < -0.3
    assert found.high > 0.3


@pytest.mark.parametrize(
    ("delta", "low", "high"),
    [
        ([1.0] * 4 + [0.0] * 96, 0, 1),  # p = 0.125
        ([-1.0] * 4 + [0.0] * 96, -1, 0),
        ([1.0] * 6 + [0.0] * 94, 1, 1),  # p = 0.031
        ([0.25, 0.25, 0.5], 0, 1),
        ([1.0] * 5, 0, 1),
        ([0.5, 0.25, 0.25, 0.25, 0.0, -0.25] * 4, 1, 1),  # two dozen problems with 4 samples
    ],
)
def test_an_interval_excludes_zero_only_where_the_permutation_test_does(
    delta: list[float], low: int, high: int
) -> None:
    found = paired_difference(delta, [0.0] * len(delta))
    assert (np.sign(found.low), np.sign(found.high)) == (low, high)
    assert (permutation_test(delta) <= 0.05) == (low == high)
    doubled = paired_difference(np.tile(delta, 2), np.zeros(2 * len(delta)), [*range(len(delta))] * 2)
    assert len(delta) <= 6 or np.sign(doubled.low) == low, "the same with two problems per cluster"


def test_a_few_templates_show_a_rise_although_one_falls() -> None:
    """The permutation test of 6 templates has p = 0.0625 at best then, whatever the others gain."""
    gains = np.repeat([0.5, 0.6, 0.4, 0.5, 0.45, -0.02], 20)
    assert paired_difference(gains, np.zeros(120), np.repeat(np.arange(6), 20).tolist()).low > 0.1


def test_nothing_judged_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing to average"):
        share([])


def test_problems_of_one_cluster_count_once() -> None:
    """Use every problem twice: the same mean and, except for G/(G-1) and Student's quantile, the error of each once."""
    once = np.random.default_rng(0).binomial(8, 0.4, size=40) / 8
    twice, names = np.tile(once, 2), [f"p{i}" for i in range(40)] * 2
    alone, together, naive = share(once), share(twice, names), share(twice)
    assert (together.problems, together.clusters, naive.clusters) == (80, 40, 80)
    assert together.standard_error == pytest.approx(alone.standard_error, rel=1e-12)
    assert together.standard_error > 1.4 * naive.standard_error
    assert (together.low, together.high) == pytest.approx((alone.low, alone.high), abs=0.005)
    assert mean_of(twice, names).low == pytest.approx(mean_of(once).low, rel=1e-12)
    assert share(once, range(40)) == alone, "clusters of one change nothing"


def test_the_cluster_robust_error_by_hand() -> None:
    # mean 0.5; the clusters' summed deviations are a: 0.5, b: 0 + 0.5 + 0, c: -0.5 - 0.5
    result = share([1.0, 0.5, 1.0, 0.0, 0.5, 0.0], ["a", "b", "b", "c", "b", "c"])
    assert result.mean == 0.5
    assert result.standard_error == pytest.approx((3 / 2 * (0.5**2 + 0.5**2 + 1**2)) ** 0.5 / 6)
    # Wilson's bounds solve (p - x)^2 = t^2 x (1 - x) / n, with p (1 - p) / se^2 = 4 observations and Student's t
    for bound in (result.low, result.high):
        assert (0.5 - bound) ** 2 == pytest.approx(stats.t.ppf(0.975, 2) ** 2 * bound * (1 - bound) / 4)


def test_a_difference_by_template_and_its_permutations() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(400):  # 8 templates of 25 problems; the gain depends on the template
        gain = np.repeat(rng.normal(0.1, 0.1, size=8), 25)
        names = np.repeat(np.arange(8), 25).tolist()
        found = paired_difference(0.4 + gain, np.full(200, 0.4), names)
        hits += found.low <= 0.1 <= found.high
    assert 0.92 <= hits / 400 <= 0.98, "a bootstrap over 200 problems would cover a third"
    gains = np.repeat([0.3, 0.2, 0.4], 10)
    names = np.repeat(np.arange(3), 10).tolist()
    assert permutation_test(gains, names) == 2 / 2**3
    assert permutation_test(gains) == 1 / 100_001, "no finite number of drawn patterns shows that p is 0"
    same = paired_difference(np.full(30, 0.5), np.full(30, 0.5), names)
    assert same.low < 0 < same.high, "three clusters that agree prove nothing"
    one = paired_difference([1.0, 0.5], [0.0, 0.25], ["t", "t"])
    assert one.low < 0 < one.high, "one cluster has no spread"
