from __future__ import annotations

import math

import pytest
import torch

from magicrl.algorithms.advantages import group_advantages, scored_advantages


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
