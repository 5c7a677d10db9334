"""One sample's part of AdamW's step compared with torch's step, and the weights of a group's gain by hand."""

from __future__ import annotations

import pytest
import torch

from magicrl.algorithms.attribution import cosine, gain_weights, own_step


def test_the_own_part_of_a_step_is_torchs_without_momentum_and_decay() -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(5, dtype=torch.float64))
    optimizer = torch.optim.AdamW([weight], lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.2)
    first_before = torch.zeros(5, dtype=torch.float64)
    for step in range(1, 4):
        before = weight.detach().clone()
        weight.grad = torch.randn(5, dtype=torch.float64)
        optimizer.step()
        state = optimizer.state[weight]
        found = own_step(
            first_before,
            state["exp_avg"],
            state["exp_avg_sq"],
            step=step,
            learning_rate=0.1,
            betas=(0.8, 0.9),
            eps=1e-3,
        )
        root = (state["exp_avg_sq"] / (1 - 0.9**step)).sqrt() + 1e-3
        momentum = -0.1 * 0.8 * first_before / (1 - 0.8**step) / root
        torch.testing.assert_close(found, weight.detach() - before - momentum + 0.1 * 0.2 * before)
        first_before = state["exp_avg"].clone()


def test_the_weights_of_a_gain() -> None:
    rewards, lengths = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([2.0, 3.0, 5.0, 9.0])
    counted = torch.tensor([True, True, True, False])
    # mean of the counted 1/3, 10 tokens among them
    expected = torch.tensor([2 / 30, -1 / 30, -1 / 30, 0.0])
    torch.testing.assert_close(gain_weights(rewards, counted, lengths), expected)
    assert not gain_weights(torch.ones(3), torch.ones(3, dtype=torch.bool), torch.ones(3)).any()
    assert not gain_weights(rewards, torch.zeros(4, dtype=torch.bool), lengths).any()


def test_the_cosine_of_an_angle() -> None:
    assert cosine(torch.tensor([3.0, 4.0]), torch.tensor([4.0, 3.0])) == pytest.approx(0.96)
    assert cosine(torch.zeros(2), torch.ones(2)) is None
