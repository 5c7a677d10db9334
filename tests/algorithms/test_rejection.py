from __future__ import annotations

import numpy as np
import pytest

from magicrl.algorithms.advantages import (
    Signal,
    group_signal,
    reject_zero_advantage,
    scored_advantages,
    select_refill,
    split_minibatches,
)


@pytest.mark.parametrize(
    ("outcomes", "finish", "mask", "signal"),
    [
        ("cwc", "...", "none", Signal.MIXED),
        ("ccc", "...", "none", Signal.ALL_CORRECT),
        ("www", "...", "none", Signal.ALL_WRONG),
        ("ccc", "..t", "none", Signal.MIXED),
        ("ccc", "..t", "after", Signal.MIXED),
        ("ccc", "..t", "before", Signal.ALL_CORRECT),
        ("cww", ".tt", "before", Signal.TOO_FEW),
        ("cnn", "...", "none", Signal.TOO_FEW),
        ("ccn", "...", "none", Signal.ALL_CORRECT),
    ],
)
def test_signal_follows_the_counted_rewards_of_the_mask(make_group, outcomes, finish, mask, signal):
    group = make_group(outcomes, finish)
    assert group_signal(group, mask) is signal
    has_advantage = bool(np.any(scored_advantages([group], mask=mask)[0] != 0))
    assert has_advantage == (signal is Signal.MIXED)


def test_rejection_counts_by_reason(make_group):
    found = reject_zero_advantage([make_group(o) for o in ("cc", "cw", "ww", "nc", "wc", "ww")])
    assert found.kept == (1, 4)
    assert (found.all_correct, found.all_wrong, found.too_few, found.rejected) == (1, 2, 1, 4)


def test_refill_takes_issue_order_not_finish_order(make_group):
    draws = [5, 1, 4, 2, 3]  # the order in which they finished
    groups = [make_group("cc" if draw == 2 else "cw", draw=draw) for draw in draws]
    assert [draws[i] for i in select_refill(groups, 3)] == [1, 3, 4]
    assert len(select_refill(groups, 99)) == 4
    with pytest.raises(ValueError, match="-1"):
        select_refill(groups, -1)


def split(num_groups, mode, seed=0, parts=4, size=8):
    return split_minibatches(
        num_groups, num_parts=parts, prompts_per_part=size, mode=mode, rng=np.random.default_rng(seed)
    )


@pytest.mark.parametrize("num_groups", [0, 1, 3, 4, 5, 17, 30, 32])
@pytest.mark.parametrize("mode", ["keep_n_sgd", "keep_d_t"])
def test_every_survivor_is_in_exactly_one_part(num_groups, mode):
    parts = split(num_groups, mode)
    assert sorted(i for part in parts for i in part) == list(range(num_groups))
    assert all(parts)  # no empty mini-batch


def test_keep_n_sgd_keeps_the_number_of_steps():
    assert [len(part) for part in split(17, "keep_n_sgd")] == [5, 4, 4, 4]
    assert [len(part) for part in split(3, "keep_n_sgd")] == [1, 1, 1]


def test_keep_d_t_keeps_the_size():
    assert [len(part) for part in split(17, "keep_d_t")] == [8, 8, 1]
    assert [len(part) for part in split(16, "keep_d_t")] == [8, 8]


@pytest.mark.parametrize("mode", ["keep_n_sgd", "keep_d_t"])
def test_each_pass_draws_anew_and_reproducibly(mode):
    rng = np.random.default_rng(0)
    first, second = (split_minibatches(16, num_parts=4, prompts_per_part=4, mode=mode, rng=rng) for _ in range(2))
    assert first != second
    assert first == split(16, mode, size=4)


def test_bad_arguments_name_their_value():
    with pytest.raises(ValueError, match="'halves'"):
        split(4, "halves")
    with pytest.raises(ValueError, match="0"):
        split(4, "keep_d_t", size=0)
