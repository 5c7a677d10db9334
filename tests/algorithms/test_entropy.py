from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from tabular import exact_group

from magicrl.algorithms.entropy import clustered_mean, estimator_gap, estimators_agree, measure_entropy
from magicrl.records import Completion, FinishReason, frozen_floats, frozen_tokens


def completion(logprobs, entropies=None):
    return Completion(
        tokens=frozen_tokens([0] * len(logprobs)),
        text="",
        sampler_logprobs=frozen_floats(logprobs),
        sampler_entropies=None if entropies is None else frozen_floats(entropies),
        finish_reason=FinishReason.STOP,
        policy_version=0,
    )


def test_the_mean_is_over_tokens_not_over_responses():
    found = measure_entropy([completion([-1.0], [4.0]), completion([-2.0] * 3, [2.0] * 3)], "exact")
    assert found is not None
    assert found.mean == pytest.approx(10 / 4)
    assert found.tokens == 4
    assert measure_entropy([completion([-1.0]), completion([-2.0] * 3)], "sampled").mean == pytest.approx(7 / 4)


def test_standard_error_by_hand():
    # totals 4 and 6 over 1 and 3 tokens: mean 2.5, residuals 1.5 and -1.5, sqrt(4.5 * 2) / 4
    found = clustered_mean(np.array([4.0, 6.0]), np.array([1, 3]))
    assert found.standard_error == pytest.approx(3 / 4)
    assert math.isinf(clustered_mean(np.array([4.0]), np.array([2])).standard_error)


def test_standard_error_matches_repeated_sampling():
    rng = np.random.default_rng(0)
    means, errors = [], []
    for _ in range(400):
        lengths = rng.integers(1, 30, size=60)
        level = rng.normal(0.5, 0.1, size=60)  # tokens of a response share a level: they correlate
        found = clustered_mean(level * lengths, lengths)
        means.append(found.mean)
        errors.append(found.standard_error)
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.1)


def test_exact_is_unknown_when_one_response_lacks_it():
    assert measure_entropy([completion([-1.0], [1.0]), completion([-1.0])], "exact") is None
    assert estimator_gap([completion([-1.0])]) is None


def test_no_tokens_is_an_error():
    with pytest.raises(ValueError, match="at least one"):
        measure_entropy([], "sampled")
    with pytest.raises(ValueError, match="'median'"):
        measure_entropy([], "median")  # pyright: ignore[reportArgumentType]


def test_both_estimators_agree_on_what_was_really_sampled_and_not_otherwise():
    everything = exact_group(0)[0].completions
    rng = np.random.default_rng(1)
    sampled = [everything[int(i)] for i in rng.integers(0, len(everything), size=300)]
    gap = estimator_gap(sampled)
    assert gap is not None
    assert gap.standard_error > 0
    assert estimators_agree(gap)
    # Entropies taken at another temperature, or log-probs before the temperature, are found out.
    wrong = [dataclasses.replace(c, sampler_entropies=frozen_floats(c.sampler_entropies * 1.3)) for c in sampled]
    assert not estimators_agree(estimator_gap(wrong))
