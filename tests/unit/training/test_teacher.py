"""On-policy distillation: the loss compared with the KL by enumeration, and the teacher's prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from magicrl.algorithms.loss_terms import LossOutputs, loss_terms
from magicrl.algorithms.losses import LOSSES
from magicrl.algorithms.token_weights import NOT_GIVEN, LossInputs
from magicrl.records import Problem
from magicrl.training.teacher import informed

WORDS = 5


def terms(
    logprobs: torch.Tensor, scored: torch.Tensor, weights: torch.Tensor, advantage: float = 0.0, **more: Any
) -> LossOutputs:
    inputs = LossInputs(
        logprobs=logprobs,
        advantages=torch.full_like(logprobs, advantage),
        loss_mask=more.pop("loss_mask", torch.ones(len(logprobs), dtype=torch.bool)),
        sample_index=torch.arange(len(logprobs)),
        teacher_logprobs=scored,
        old_logprobs=more.pop("old_logprobs", NOT_GIVEN),
        clip_high=more.pop("clip_high", 0.2),
    )
    return loss_terms(LOSSES["magic"], inputs, weights, **more)


# --- the loss ---------------------------------------------------------------------------------------------------------


def test_its_expected_gradient_is_that_of_the_reverse_kl() -> None:
    """Weight every word of a vocabulary with its probability: the exact expectation over samples."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(WORDS, generator=generator, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(WORDS, generator=generator, dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    kl = (logprobs.exp() * (logprobs - teacher)).sum()
    (expected,) = torch.autograd.grad(kl, logits, retain_graph=True)
    outputs = terms(logprobs, teacher, logprobs.detach().exp(), teacher=0.7)
    (found,) = torch.autograd.grad(outputs.loss, logits)
    assert torch.allclose(found, 0.7 * expected, atol=1e-15, rtol=1e-12)


def test_one_token_by_hand() -> None:
    # rho = e^(-1 - -1.2) = e^0.2, advantage 0.5 + 2 (-0.7 - -1.2) = 1.5, clipped at 1.1: 1.1 * 1.5.
    values = [torch.tensor([value], dtype=torch.float64) for value in (-1.0, -0.7, 1.0)]
    old = torch.tensor([-1.2], dtype=torch.float64)
    outputs = terms(*values, advantage=0.5, teacher=2.0, old_logprobs=old, clip_high=0.1)
    assert outputs.loss.item() == pytest.approx(-1.65, abs=1e-14)
    assert outputs.clipped.tolist() == [True]
    assert outputs.metrics.values()["teacher_kl"] == pytest.approx(-0.5, abs=1e-14)


def test_a_token_without_loss_counts_in_nothing() -> None:
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([-0.5, -torch.inf], dtype=torch.float64)
    outputs = terms(logprobs, teacher, torch.ones(2), teacher=1.0, loss_mask=torch.tensor([True, False]))
    assert outputs.loss.item() == -0.5
    outputs.loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-0.5, 0.0]
    assert outputs.metrics.values()["teacher_kl"] == -0.5


def test_its_log_probs_must_be_there() -> None:
    inputs = LossInputs(
        logprobs=torch.zeros(1),
        advantages=torch.zeros(1),
        loss_mask=torch.ones(1, dtype=torch.bool),
        sample_index=torch.zeros(1),
    )
    with pytest.raises(ValueError, match="needs the teacher's log-probs"):
        loss_terms(LOSSES["magic"], inputs, torch.ones(1), teacher=1.0)
    assert "teacher_kl" not in loss_terms(LOSSES["magic"], inputs, torch.ones(1)).metrics.values()


# --- its prompt -------------------------------------------------------------------------------------------------------


def test_its_prompt_names_the_reference_answer_once() -> None:
    problem = Problem(verifier="maths", source="test", id="a", prompt="What is {reference}?", references=("7", "seven"))
    shown = informed(problem, r"{prompt} It is {reference}, not \frac{1}{2}.").prompt
    assert shown == r"What is {reference}? It is 7, not \frac{1}{2}."
