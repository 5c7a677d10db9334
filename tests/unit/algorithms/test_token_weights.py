"""Weights of tokens by hand: reducers, sampler corrections, and the second moment's mask over a whole mini-batch."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from magicrl.algorithms.loss_terms import loss_terms
from magicrl.algorithms.losses import LOSSES
from magicrl.algorithms.token_weights import (
    M2PO,
    Correction,
    LossInputs,
    correction_of,
    correction_weights,
    reducer_of,
    response_weights,
    second_moment_mask,
)
from magicrl.records import TrainBatch, TrainSample, frozen_floats, frozen_tokens
from magicrl.training.step import with_policy_mask


def correction_inputs(old, sampler):
    everywhere = torch.ones(len(old), dtype=torch.bool)
    given = {"loss_mask": everywhere, "sample_index": torch.zeros(len(old), dtype=torch.int64)}
    return LossInputs(old, torch.ones(len(old)), **given, old_logprobs=old, sampler_logprobs=sampler)


def test_correction_errors():
    with pytest.raises(ValueError, match="'is'"):
        correction_of("is")
    inputs = correction_inputs(torch.zeros(3), torch.zeros(3))
    for returned, got in ((torch.ones(3, 1), r"\(3, 1\)"), (torch.tensor(2.0), r"\(\)"), ([1.0, 1.0, 1.0], "list")):
        own = Correction(name="own", weights=lambda _, returned=returned: returned)  # type: ignore[arg-type, misc]
        with pytest.raises(ValueError, match=rf"'own' must return a tensor of shape \(3,\); got {got}"):
            correction_weights(own, inputs)


FOUR_LENGTHS = torch.tensor([3, 5, 4, 2])
TWO_GROUPS = torch.tensor([7, 7, 1, 1])


@pytest.mark.parametrize(
    ("reducer", "expected"),
    [
        ("global_tokens", [1 / 14] * 4),
        ("response_mean", [1 / 12, 1 / 20, 1 / 16, 1 / 8]),
        ("prompt_mean", [1 / 16, 1 / 16, 1 / 12, 1 / 12]),
        ("sequence_sum", [1 / 4] * 4),
        ("constant", [1 / 32] * 4),
    ],
)
def test_hand_computed_weights(reducer, expected):
    found = response_weights(reducer_of(reducer), FOUR_LENGTHS, TWO_GROUPS, num_loss_tokens=14, max_tokens=8)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(expected, rel=1e-15)


def test_groups_of_unequal_size_weigh_the_same():
    groups = torch.tensor([0, 0, 0, 1])
    found = response_weights(reducer_of("sequence_sum"), FOUR_LENGTHS, groups, num_loss_tokens=14)
    assert found.tolist() == pytest.approx([1 / 6] * 3 + [1 / 2])
    means = response_weights(reducer_of("response_mean"), FOUR_LENGTHS, groups, num_loss_tokens=14)
    assert (means * FOUR_LENGTHS).tolist() == pytest.approx([1 / 6] * 3 + [1 / 2])
    fixed = response_weights(reducer_of("constant"), FOUR_LENGTHS, groups, num_loss_tokens=14, max_tokens=8)
    assert (fixed * 8).tolist() == pytest.approx([1 / 6] * 3 + [1 / 2])
    prompts = response_weights(reducer_of("prompt_mean"), FOUR_LENGTHS, groups, num_loss_tokens=14)
    assert prompts.tolist() == pytest.approx([1 / 24] * 3 + [1 / 4])


def test_a_response_without_loss_tokens_has_no_weight():
    found = response_weights(reducer_of("response_mean"), torch.tensor([0, 2]), torch.tensor([0, 0]), num_loss_tokens=2)
    assert found.tolist() == [0.0, 0.25]


def test_a_share_of_the_mini_batch_is_refused():
    with pytest.raises(AssertionError, match="T_k"):
        response_weights(reducer_of("global_tokens"), FOUR_LENGTHS[:2], TWO_GROUPS[:2], num_loss_tokens=14)


def test_reducer_errors():
    with pytest.raises(ValueError, match="max_tokens"):
        response_weights(reducer_of("constant"), FOUR_LENGTHS, TWO_GROUPS, num_loss_tokens=14)
    with pytest.raises(ValueError, match="'median'"):
        response_weights(reducer_of("median"), FOUR_LENGTHS, TWO_GROUPS, num_loss_tokens=14)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="without loss tokens"):
        response_weights(reducer_of("global_tokens"), torch.tensor([0]), torch.tensor([0]), num_loss_tokens=0)


# pi_old / pi_sampler: 0.5, 1, 1.5, 4
WEIGHTS = torch.tensor([0.5, 1.0, 1.5, 4.0], dtype=torch.float64)
SAMPLER = torch.log(torch.tensor([0.2, 0.5, 0.4, 0.1], dtype=torch.float64))
OLD = SAMPLER + WEIGHTS.log()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("none", [1.0, 1.0, 1.0, 1.0]),
        ("tis", [0.5, 1.0, 1.5, 2.0]),
        ("mis", [0.5, 1.0, 1.5, 0.0]),
    ],
)
def test_weights_by_hand(kind: str, expected: list[float]) -> None:
    found = correction_weights(correction_of(kind), correction_inputs(OLD.clone().requires_grad_(), SAMPLER))
    assert found.tolist() == pytest.approx(expected, rel=1e-12)
    assert not found.requires_grad


def test_m2po_takes_the_kept_weights_as_they_are() -> None:
    mask = torch.tensor([True, True, False, True])
    found = correction_weights(M2PO, correction_inputs(OLD, SAMPLER)._replace(policy_mask=mask))
    assert found.tolist() == pytest.approx([0.5, 1.0, 0.0, 4.0])
    with pytest.raises(ValueError, match="needs the mini-batch's second-moment mask"):
        correction_weights(M2PO, correction_inputs(OLD, SAMPLER))


def test_the_second_moment_by_hand() -> None:
    """Squares are 0.01, 0.04, 0.25, 0.01: means of the smallest 1 to 4 are 0.01, 0.01, 0.02, 0.0775."""
    log_weights = torch.tensor([0.1, -0.2, 0.5, -0.1])
    advantages = torch.tensor([1.0, -2.0, 0.5, -1.0])  # all four ratios moved with the advantage

    def kept(threshold: float) -> list[bool]:
        return second_moment_mask(log_weights, advantages, threshold).tolist()

    assert kept(0.04) == [True, True, False, True]
    assert kept(0.0776) == [True] * 4
    assert kept(0.0199) == [True, False, False, True]
    assert kept(0.005) == [False] * 4
    assert second_moment_mask(torch.zeros(0), torch.zeros(0), 0.04).tolist() == []
    assert second_moment_mask(torch.tensor([0.1, math.nan]), torch.ones(2), 0.04).tolist() == [True, False]


@pytest.mark.parametrize(
    ("advantages", "expected"),
    [
        # the large ratio of the third token moved against its advantage: only 0.01, 0.04 and 0.01 are in the mean
        ([1.0, -1.0, -1.0, -1.0], [True, True, True, True]),
        # Only 0.25 is in the mean. The others moved against their advantages.
        ([-1.0, 1.0, 1.0, 1.0], [True, True, False, True]),
        # an advantage of 0 has no direction
        ([1.0, -1.0, 0.0, 0.0], [True, True, True, True]),
    ],
)
def test_only_ratios_that_moved_with_the_advantage_count_and_leave(advantages, expected):
    log_weights = torch.tensor([0.1, -0.2, 0.5, -0.1])
    assert second_moment_mask(log_weights, torch.tensor(advantages), 0.04).tolist() == expected


@settings(max_examples=60, deadline=None)
@given(
    pairs=st.lists(st.tuples(st.floats(-3, 3), st.sampled_from([-1.5, 0.0, 1.0])), min_size=1, max_size=30),
    threshold=st.floats(1e-3, 2.0),
)
def test_the_mask_keeps_as_many_as_the_threshold_allows(pairs: list[tuple[float, float]], threshold: float) -> None:
    log_weights, advantages = (torch.tensor(column, dtype=torch.float64) for column in zip(*pairs, strict=True))
    kept = second_moment_mask(log_weights, advantages, threshold)
    moved = log_weights * advantages > 0
    assert kept[~moved].all()
    kept, squares = kept[moved], log_weights[moved].square()
    if kept.any():
        assert squares[kept].mean() <= threshold + 1e-12
    if not kept.all():
        left = squares[~kept]
        assert not kept.any() or left.min() >= squares[kept].max()
        one_more = torch.cat([squares[kept], left.min()[None]])
        assert one_more.mean() > threshold - 1e-12


def inputs(mask: torch.Tensor | None) -> tuple[LossInputs, torch.Tensor]:
    logprobs = OLD.clone().requires_grad_()
    made = LossInputs(
        logprobs=logprobs,
        advantages=torch.tensor([1.0, -1.0, 2.0, 1.0], dtype=torch.float64),
        loss_mask=torch.ones(4, dtype=torch.bool),
        sample_index=torch.tensor([0, 0, 1, 1]),
        old_logprobs=OLD,
        sampler_logprobs=SAMPLER,
        entropy=torch.ones(4, dtype=torch.float64),
        policy_mask=mask,
    )
    return made, logprobs


def test_a_masked_token_leaves_the_policy_term_and_no_denominator() -> None:
    """Weights are 1/4: gradient -w * correction * A at rho = 1. The entropy term keeps all four tokens."""
    given_, logprobs = inputs(torch.tensor([True, True, True, False]))
    weights = torch.full((4,), 0.25, dtype=torch.float64)
    out = loss_terms(LOSSES["magic"], given_, weights, alpha=0.1, correction=M2PO)
    out.loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-0.25 * 0.5, 0.25 * 1.0, -0.25 * 1.5 * 2, 0.0])
    assert float(out.loss.detach()) == pytest.approx(-0.25 * (0.5 - 1.0 + 3.0) - 0.1)
    values = out.metrics.values()
    assert values["tokens"] == 4
    assert values["corrected_ratio"] == 0.25
    unmasked, _ = inputs(None)
    with pytest.raises(ValueError, match="second-moment mask"):
        loss_terms(LOSSES["magic"], unmasked, weights, correction=M2PO)


def test_the_mask_looks_at_the_whole_mini_batch_and_at_loss_tokens_only() -> None:
    """The square 0.25 is the only one of its sample, whose mean would be too large. A very large square has no loss.

    The last sample's ratios moved against its advantage, so they are neither masked nor part of the mean.
    """

    def sample(
        group: int, gaps: list[float], loss_mask: list[bool] | None = None, advantage: float = 1.0
    ) -> TrainSample:
        return TrainSample(
            prompt_tokens=frozen_tokens([1]),
            tokens=frozen_tokens([1] * len(gaps)),
            advantage=advantage,
            group_index=group,
            sample_index=0,
            sampler_logprobs=frozen_floats([-2.0] * len(gaps)),
            policy_version=0,
            old_logprobs=frozen_floats([-2.0 + gap for gap in gaps]),
            loss_mask=None if loss_mask is None else np.array(loss_mask),
        )

    batch = TrainBatch.of(
        [
            sample(0, [0.5]),
            sample(1, [0.01] * 5),
            sample(2, [9.0, 0.1, 0.9], [False, True, True]),
            sample(2, [2.0, 2.0], advantage=-1.0),
        ]
    )
    masked = with_policy_mask(batch, M2PO, 0.04)
    assert [s.policy_mask.tolist() for s in masked.samples if s.policy_mask is not None] == [
        [True],
        [True] * 5,
        [False, True, False],
        [True, True],
    ]
    assert masked.num_loss_tokens == batch.num_loss_tokens


@pytest.mark.parametrize("kept", [torch.ones(1, dtype=torch.bool), torch.ones(3)])
def test_a_mask_of_a_wrong_shape_is_refused(kept: Tensor) -> None:
    sample = TrainSample(
        prompt_tokens=frozen_tokens([1]),
        tokens=frozen_tokens([2, 3, 4]),
        advantage=1.0,
        group_index=0,
        sample_index=0,
        sampler_logprobs=frozen_floats([-1.0] * 3),
        policy_version=0,
        old_logprobs=frozen_floats([-1.0] * 3),
    )
    mine = dataclasses.replace(M2PO, name="mine", batch_mask=lambda *_: kept)
    with pytest.raises(
        ValueError, match=r"correction 'mine': .* shape \[3\]; got (bool, shape \[1\]|float32, shape \[3\])"
    ):
        with_policy_mask(TrainBatch.of([sample]), mine, 0.04)
