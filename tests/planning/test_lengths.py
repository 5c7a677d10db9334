"""Length distributions: their formulas against samples, and their course over training."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magicrl.planning.workload import Lengths, lengths_of_mean


@pytest.mark.parametrize("shared", [0.0, 0.6])
def test_formulas_agree_with_samples(shared: float) -> None:
    lengths = Lengths(median=6000, sigma=0.8, limit=16384, shared=shared)
    drawn = lengths.sample(20000, 8, np.random.default_rng(0)).astype(float)
    assert drawn.max() == 16384
    assert np.mean(drawn == 16384) == pytest.approx(lengths.truncated, abs=0.006)
    assert drawn.mean() == pytest.approx(lengths.mean, rel=0.01)
    assert (drawn**2).mean() == pytest.approx(lengths.mean_square, rel=0.015)
    assert lengths.mean_context == lengths.mean_square / lengths.mean / 2


def test_what_a_group_shares_shows_in_its_logarithms() -> None:
    lengths = Lengths(median=100, sigma=0.5, limit=10**9, shared=0.6)
    logs = np.log(lengths.sample(20000, 2, np.random.default_rng(1)).astype(float))
    assert np.corrcoef(logs[:, 0], logs[:, 1])[0, 1] == pytest.approx(0.6, abs=0.02)


@settings(deadline=None)
@given(share=st.floats(0.02, 0.95), sigma=st.floats(0.1, 1.5), limit=st.integers(64, 65536))
def test_a_mean_is_met_and_a_larger_t_only_adds_tokens(share: float, sigma: float, limit: int) -> None:
    lengths = lengths_of_mean(share * limit, limit, sigma)
    assert lengths.mean == pytest.approx(share * limit, rel=1e-6)
    longer = lengths.at(2 * limit)
    assert longer.mean >= lengths.mean * (1 - 1e-9)
    assert longer.truncated <= lengths.truncated


def test_impossible_means_are_refused() -> None:
    with pytest.raises(ValueError, match="mean length of 9000 tokens does not go with T = 8192"):
        lengths_of_mean(9000, 8192)
    with pytest.raises(ValueError, match="median > 0"):
        Lengths(median=0, sigma=1, limit=10)
