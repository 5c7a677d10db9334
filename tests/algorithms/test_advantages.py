from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from magicrl.algorithms.advantages import (
    Signal,
    group_advantages,
    group_signal,
    reject_zero_advantage,
    score_group,
    scored_advantages,
    select_refill,
    split_minibatches,
)


def test_correct_is_one_wrong_is_zero(make_group):
    scored = make_group("cwc")
    assert scored.rewards.tolist() == [1, 0, 1]
    assert scored.counted.tolist() == [True, True, True]


def test_a_truncated_response_scores_zero_even_if_its_text_is_correct(make_group):
    scored = make_group("ccw", "t.t")
    assert scored.rewards.tolist() == [0, 1, 0]
    assert scored.counted.all()


def test_not_judged_and_aborted_are_not_counted(make_group):
    scored = make_group("ncc", "..a")
    assert scored.counted.tolist() == [False, True, False]
    assert scored.rewards.tolist() == [0, 1, 0]


def test_a_lost_verdict_is_an_error(make_group):
    scored = make_group("cw")
    with pytest.raises(ValueError, match="2 completions but 1 verdicts"):
        score_group(scored.group, scored.verdicts[:1])


def test_scored_arrays_are_read_only(make_group):
    scored = make_group("cw")
    for array in (scored.rewards, scored.counted):
        assert isinstance(array, np.ndarray)
        assert not array.flags.writeable


def advantages(rewards, groups=None, **kwargs):
    masks = {k: torch.tensor(v, dtype=torch.bool) for k, v in kwargs.items() if k.endswith("_N")}
    rest = {k: v for k, v in kwargs.items() if not k.endswith("_N")}
    index = torch.tensor(groups if groups is not None else [0] * len(rewards))
    return group_advantages(torch.tensor(rewards, dtype=torch.float32), index, **masks, **rest)


def test_hand_computed_unbiased_std_and_epsilon():
    # mean 1/4, unbiased variance (9/16 + 3/16) / 3 = 1/4, std 1/2
    found = advantages([1, 0, 0, 0])
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([0.75 / 0.500001] + [-0.25 / 0.500001] * 3, rel=1e-12)


def test_groups_are_separate_and_may_be_interleaved():
    found = advantages([1, 5, 0, 5, 0, 7], groups=[9, -2, 9, -2, 9, -2])
    alone = [advantages([1, 0, 0]), advantages([5, 5, 7])]
    assert found[[0, 2, 4]].tolist() == pytest.approx(alone[0].tolist(), rel=1e-12)
    assert found[[1, 3, 5]].tolist() == pytest.approx(alone[1].tolist(), rel=1e-12)


def test_without_std_the_centred_reward_remains():
    assert advantages([1, 0, 0, 0], normalise_std=False).tolist() == [0.75, -0.25, -0.25, -0.25]


def test_mask_before_takes_truncated_responses_out_of_mean_and_std():
    found = advantages([1, 0, 0, 0], truncated_N=[0, 0, 1, 1], mask="before")
    std = math.sqrt(0.5)  # of 1 and 0
    assert found.tolist() == pytest.approx([0.5 / (std + 1e-6), -0.5 / (std + 1e-6), 0, 0], rel=1e-12)


def test_mask_after_keeps_them_in_mean_and_std():
    found = advantages([1, 0, 0, 0], truncated_N=[0, 0, 1, 1], mask="after")
    assert found.tolist() == pytest.approx([0.75 / 0.500001, -0.25 / 0.500001, 0, 0], rel=1e-12)


def test_mask_none_punishes_truncation():
    found = advantages([1, 0, 0, 0], truncated_N=[0, 0, 1, 1], mask="none")
    assert found[2] < 0
    assert found[2] == found[1]


def test_uncounted_responses_leave_the_group():
    found = advantages([1, 0, 0], counted_N=[1, 1, 0])
    assert found[2] == 0
    assert found[:2].tolist() == pytest.approx(advantages([1, 0]).tolist(), rel=1e-12)


@pytest.mark.parametrize(
    ("rewards", "kwargs"),
    [
        ([1.0], {}),
        ([1.0, 0.0], {"counted_N": [1, 0]}),
        ([1.0, 0.0], {"counted_N": [0, 0]}),
        ([1.0, 0.0, 0.0], {"truncated_N": [0, 1, 1], "mask": "before"}),
        ([0.1, 0.1, 0.1], {}),  # 0.1 is not exact in binary: its float mean differs from it
    ],
)
def test_no_information_is_exactly_zero_never_nan(rewards, kwargs):
    assert advantages(rewards, **kwargs).tolist() == [0.0] * len(rewards)


def test_a_mask_needs_truncation_and_must_be_known():
    with pytest.raises(ValueError, match="truncated"):
        advantages([1, 0], mask="before")
    with pytest.raises(ValueError, match="'both'"):
        advantages([1, 0], mask="both")


def test_records_in_their_order(make_group):
    found = scored_advantages([make_group("cwn"), make_group("cw", "t.")], mask="after")
    assert [len(a) for a in found] == [3, 2]
    assert found[0].tolist() == pytest.approx([*advantages([1, 0]).tolist(), 0.0], rel=1e-12)
    assert found[1].tolist() == [0.0, 0.0]  # the truncated one scored 0 as well
    assert scored_advantages([]) == []


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
