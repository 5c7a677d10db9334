"""Length distributions compared with samples, and the closed form of a rollout with simulated decode steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magicrl.planning.costs import DecodeCost
from magicrl.planning.workload import Lengths, StepTime, lengths_of_mean, rollout_seconds


def test_formulas_agree_with_samples() -> None:
    lengths, normal = Lengths(median=6000, sigma=0.8, limit=16384), np.random.default_rng(0).standard_normal(160000)
    drawn = np.minimum(np.ceil(6000 * np.exp(0.8 * normal)), 16384)
    assert np.mean(drawn == 16384) == pytest.approx(lengths.truncated, abs=0.006)
    assert drawn.mean() == pytest.approx(lengths.mean, rel=0.01)
    assert (drawn**2).mean() == pytest.approx(lengths.mean_square, rel=0.015)
    assert lengths.mean_context == lengths.mean_square / lengths.mean / 2
    for count in (4, 16, 100):
        assert lengths.longest(count) == pytest.approx(drawn.reshape(-1, count).max(axis=1).mean(), rel=0.12)
    assert lengths.longest(1) == lengths.mean
    assert lengths.longest(1000) == 16384


@settings(deadline=None)
@given(share=st.floats(0.02, 0.95), sigma=st.floats(0.1, 1.5), limit=st.integers(64, 65536))
def test_a_mean_is_met_and_a_larger_t_only_adds_tokens(share: float, sigma: float, limit: int) -> None:
    lengths = lengths_of_mean(share * limit, limit, sigma)
    assert lengths.mean == pytest.approx(share * limit, rel=1e-6)
    longer = lengths.at(2 * limit)
    assert longer.mean >= lengths.mean * (1 - 1e-9)
    assert longer.truncated <= lengths.truncated


def test_impossible_means_are_refused() -> None:
    with pytest.raises(ValueError, match="mean length of 9000 tokens does not fit T = 8192"):
        lengths_of_mean(9000, 8192)
    with pytest.raises(ValueError, match="median > 0"):
        Lengths(median=0, sigma=1, limit=10)


COST = DecodeCost(overhead=1.0, weights=2.0, sequence=0.0, context=0.01, prefill=0.001, row=0.1)


def played(lengths: list[int], prompt: int, batch: int) -> float:
    """Return the seconds of one replica, one decode step at a time. A free place in the batch is filled at once."""
    waiting, running, clock = list(lengths), [], COST.prefill * prompt
    while waiting or running:
        while waiting and len(running) < batch:
            running.append([0, waiting.pop(0)])
        clock += COST.step(len(running), sum(prompt + done for done, _ in running))
        running = [[done + 1, length] for done, length in running if done + 1 < length]
    return clock


def closed(lengths: list[int], prompt: int, batch: int) -> float:
    drawn = np.array(lengths)
    seconds, _ = rollout_seconds(
        COST, responses=len(drawn), batch=min(batch, len(drawn)), mean=float(drawn.mean()),
        mean_context=float((drawn * (drawn - 1) / 2).sum() / drawn.sum()), longest=float(drawn.max()), prompts=1,
        prompt=prompt,
    )  # fmt: skip
    return seconds


@given(lengths=st.lists(st.integers(1, 80), min_size=1, max_size=12), prompt=st.integers(1, 20))
def test_one_wave_of_responses_takes_what_single_steps_take(lengths: list[int], prompt: int) -> None:
    """Reading the weights hides the arithmetic at every batch size, so the closed form is exact."""
    assert closed(lengths, prompt, 12) == pytest.approx(played(lengths, prompt, 12))


@pytest.mark.parametrize("batch", [8, 32, 64])
def test_several_waves_take_about_what_single_steps_take(batch: int) -> None:
    lengths = np.random.default_rng(batch).integers(1, 200, 128).tolist()
    assert closed(lengths, 8, batch) == pytest.approx(played(lengths, 8, batch), rel=0.1)


def test_each_schedule_waits_for_its_slower_side() -> None:
    """The learner takes 10 s, of which 1 s for the weights. The rollout takes 20 s, with a full batch 14 s."""
    parts = StepTime(rollout=20, learn=5, logprobs=1, sync=1, outside=3, busy=14, batch=1)
    assert (parts.other, parts.learner) == (5, 10)
    assert [parts.seconds(staleness) for staleness in (0, 1, 2)] == [30, 21, 15]
    fast = StepTime(rollout=4, learn=5, logprobs=1, sync=1, outside=3, busy=2, batch=1)
    assert [fast.seconds(staleness) for staleness in (0, 1, 2)] == [14, 10, 10]
    long = StepTime(rollout=60, learn=5, logprobs=1, sync=1, outside=3, busy=2, batch=1)
    assert [long.seconds(staleness) for staleness in (2, 4)] == [30, 15], "a response spans no more steps than that"
