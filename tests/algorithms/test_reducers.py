from __future__ import annotations

import pytest
import torch

from magicrl.algorithms.losses import response_weights

LENGTHS = torch.tensor([3, 5, 4, 2])
GROUPS = torch.tensor([7, 7, 1, 1])


@pytest.mark.parametrize(
    ("reducer", "expected"),
    [
        ("global_tokens", [1 / 14] * 4),
        ("response_mean", [1 / 12, 1 / 20, 1 / 16, 1 / 8]),
        ("sequence_sum", [1 / 4] * 4),
        ("constant", [1 / 32] * 4),
    ],
)
def test_hand_computed_weights(reducer, expected):
    found = response_weights(reducer, LENGTHS, GROUPS, num_loss_tokens=14, max_tokens=8)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(expected, rel=1e-15)


def test_groups_of_unequal_size_weigh_the_same():
    groups = torch.tensor([0, 0, 0, 1])
    found = response_weights("sequence_sum", LENGTHS, groups, num_loss_tokens=14)
    assert found.tolist() == pytest.approx([1 / 6] * 3 + [1 / 2])
    means = response_weights("response_mean", LENGTHS, groups, num_loss_tokens=14)
    assert (means * LENGTHS).tolist() == pytest.approx([1 / 6] * 3 + [1 / 2])


def test_a_response_without_loss_tokens_has_no_weight():
    found = response_weights("response_mean", torch.tensor([0, 2]), torch.tensor([0, 0]), num_loss_tokens=2)
    assert found.tolist() == [0.0, 0.25]


def test_a_share_of_the_mini_batch_is_refused():
    with pytest.raises(AssertionError, match="T_k"):
        response_weights("global_tokens", LENGTHS[:2], GROUPS[:2], num_loss_tokens=14)


def test_user_errors():
    with pytest.raises(ValueError, match="max_tokens"):
        response_weights("constant", LENGTHS, GROUPS, num_loss_tokens=14)
    with pytest.raises(ValueError, match="'median'"):
        response_weights("median", LENGTHS, GROUPS, num_loss_tokens=14)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="without loss tokens"):
        response_weights("global_tokens", torch.tensor([0]), torch.tensor([0]), num_loss_tokens=0)
