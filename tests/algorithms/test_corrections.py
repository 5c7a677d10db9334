"""Sampler corrections against numbers worked out by hand, and the second moment's mask over a whole mini-batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from magicrl.algorithms.losses import (
    LOSSES,
    M2PO,
    CorrectionInputs,
    LossInputs,
    correction_weights,
    loss_terms,
    second_moment_mask,
)
from magicrl.records import TrainBatch, TrainSample, frozen_floats, frozen_tokens
from magicrl.training.batches import with_policy_mask

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
    assert correction_weights(kind, CorrectionInputs(OLD, SAMPLER, 2.0)).tolist() == pytest.approx(expected)


def test_m2po_takes_the_kept_weights_as_they_are() -> None:
    mask = torch.tensor([True, True, False, True])
    assert correction_weights("m2po", CorrectionInputs(OLD, SAMPLER, 2.0, mask)).tolist() == pytest.approx(
        [0.5, 1.0, 0.0, 4.0]
    )
    with pytest.raises(ValueError, match="needs the mini-batch's second-moment mask"):
        correction_weights("m2po", CorrectionInputs(OLD, SAMPLER, 2.0))


def test_the_second_moment_by_hand() -> None:
    """Squares 0.01, 0.04, 0.25, 0.01: means of the smallest 1 to 4 are 0.01, 0.01, 0.02, 0.0775."""
    log_weights = torch.tensor([0.1, -0.2, 0.5, -0.1])
    assert second_moment_mask(log_weights, 0.04).tolist() == [True, True, False, True]
    assert second_moment_mask(log_weights, 0.0776).tolist() == [True] * 4
    assert second_moment_mask(log_weights, 0.0199).tolist() == [True, False, False, True]
    assert second_moment_mask(log_weights, 0.005).tolist() == [False] * 4
    assert second_moment_mask(torch.zeros(0), 0.04).tolist() == []
    assert second_moment_mask(torch.tensor([0.1, math.nan]), 0.04).tolist() == [True, False]
    with pytest.raises(ValueError, match="must be positive, got 0"):
        second_moment_mask(log_weights, 0.0)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(-3, 3), min_size=1, max_size=30),
    threshold=st.floats(1e-3, 2.0),
)
def test_the_mask_keeps_as_many_as_the_threshold_allows(values: list[float], threshold: float) -> None:
    log_weights = torch.tensor(values, dtype=torch.float64)
    kept = second_moment_mask(log_weights, threshold)
    squares = log_weights.square()
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
    """Weights 1/4: gradient -w * correction * A at rho = 1; the entropy term keeps all four tokens."""
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
    """The square 0.25 stands alone in its sample, where its mean would be too large; a huge one has no loss."""

    def sample(group: int, gaps: list[float], loss_mask: list[bool] | None = None) -> TrainSample:
        return TrainSample(
            prompt_tokens=frozen_tokens([1]),
            tokens=frozen_tokens([1] * len(gaps)),
            advantage=1.0,
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
            sample(1, [0.0] * 5),
            sample(2, [9.0, 0.1, 0.9], [False, True, True]),
        ]
    )
    masked = with_policy_mask(batch, second_moment_mask, 0.04)
    assert [s.policy_mask.tolist() for s in masked.samples if s.policy_mask is not None] == [
        [True],
        [True] * 5,
        [False, True, False],
    ]
    assert masked.num_loss_tokens == batch.num_loss_tokens
