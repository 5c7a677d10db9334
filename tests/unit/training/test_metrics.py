"""Metrics of a step by hand: rollouts and updates."""

from __future__ import annotations

import pytest
from builders import scored_group

from magicrl.training.metrics import merge_updates, rollout_metrics
from magicrl_verifiers.records import make_verdict


def test_the_updates_of_a_step_as_one() -> None:
    """Means weigh by tokens, extremes are the extremes, and the last learning rate counts."""
    updates = [
        {"tokens": 1, "loss": 1.0, "ratio_min": 0.9, "ratio_max": 1.1, "learning_rate": 1e-3},
        {"tokens": 3, "loss": 2.0, "ratio_min": 0.5, "ratio_max": 2.0, "learning_rate": 2e-3},
    ]
    assert merge_updates(updates) == {
        "learner/sgd_steps": 2,
        "tokens/trained": 4,
        "learner/loss": 1.75,
        "learner/ratio_min": 0.5,
        "learner/ratio_max": 2.0,
        "learner/learning_rate": 2e-3,
    }


def test_a_truncated_response_and_one_without_an_answer_are_not_answered() -> None:
    matched, mismatch, none = make_verdict("matched"), make_verdict("mismatch"), make_verdict("no_answer")
    group = scored_group(matched, mismatch, none, matched, truncated=1)
    assert group.answered.tolist() == [True, True, False, False]
    values = rollout_metrics([group, scored_group(make_verdict("no_code"))])
    assert values["train/answered/ratio"] == 2 / 5
    assert values["train/accuracy/mean"] == pytest.approx(1 / 5)


def test_lengths_of_right_and_wrong_responses_leave_out_those_without_a_verdict() -> None:
    right, wrong, failed = make_verdict("matched"), make_verdict("mismatch"), make_verdict("worker_lost")
    values = rollout_metrics([scored_group(right, wrong, right, failed, lengths=(1, 2, 4, 8)), scored_group(failed)])
    assert values["length/right/mean"] == 2.5
    assert values["length/wrong/mean"] == 2.0
    assert rollout_metrics([scored_group(wrong)])["length/right/mean"] is None
