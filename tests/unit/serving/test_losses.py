"""The API's losses: values by hand, and gradients against a loop over tokens."""

from __future__ import annotations

import math

import pytest
import torch

from magicrl.serving.losses import LOSSES, complete_config

LOGPROBS, SAMPLED = [-1.0, -0.5, -2.0, -0.1], [-1.2, -0.9, -1.0, -0.1]
ADVANTAGES, WEIGHTS = [1.0, -0.5, 2.0, 0.0], [0.0, 1.0, 0.5, -2.0]


def by_hand(loss: str, logprob: float, index: int, config: dict[str, float]) -> float:
    """Return the loss of one token, as the API's documentation writes it."""
    ratio, advantage = math.exp(logprob - SAMPLED[index]), ADVANTAGES[index]
    low, high = config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", 0.0)
    return {
        "cross_entropy": -WEIGHTS[index] * logprob,
        "importance_sampling": -ratio * advantage,
        "ppo": -min(ratio * advantage, min(max(ratio, low), high) * advantage),
        # The clipped ratio is a constant for the gradient, so it is taken at the present log-prob.
        "cispo": -min(max(math.exp(LOGPROBS[index] - SAMPLED[index]), low), high) * logprob * advantage,
        "dro": -(logprob * advantage - 0.5 * config.get("beta", 0.0) * (logprob - SAMPLED[index]) ** 2),
    }[loss]


@pytest.mark.parametrize(
    ("loss", "config"),
    [
        ("cross_entropy", {}),
        ("importance_sampling", {}),
        ("ppo", {}),
        ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 1.1}),
        ("cispo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3}),
        ("dro", {"beta": 0.3}),
    ],
)
def test_losses_and_gradients_are_those_of_the_api(loss: str, config: dict[str, float]) -> None:
    logprobs = torch.tensor(LOGPROBS, dtype=torch.float64, requires_grad=True)
    inputs = {"weights": WEIGHTS, "logprobs": SAMPLED, "advantages": ADVANTAGES}
    tensors = {name: torch.tensor(values, dtype=torch.float64) for name, values in inputs.items()}
    whole = complete_config(loss, config)
    values = LOSSES[loss].values(logprobs, tensors, whole)
    expected = [by_hand(loss, logprob, index, dict(whole)) for index, logprob in enumerate(LOGPROBS)]
    assert values.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    (gradient,) = torch.autograd.grad(values.sum(), logprobs)
    step = 1e-6
    slopes = [
        (by_hand(loss, x + step, i, dict(whole)) - by_hand(loss, x - step, i, dict(whole))) / (2 * step)
        for i, x in enumerate(LOGPROBS)
    ]
    assert gradient.tolist() == pytest.approx(slopes, rel=1e-6, abs=1e-8)


def test_the_default_of_ppo_is_a_clip_of_a_fifth() -> None:
    assert complete_config("ppo", {"clip_high_threshold": 1.5}) == {
        "clip_low_threshold": 0.8,
        "clip_high_threshold": 1.5,
    }


@pytest.mark.parametrize(
    ("loss", "config", "message"),
    [
        ("gspo", {}, "loss_fn 'gspo' is not served; use one of cross_entropy, importance_sampling, ppo, cispo, dro"),
        ("ppo", {"beta": 1.0}, "loss_fn_config of 'ppo' has no beta; it has: clip_low_threshold, clip_high_threshold"),
        ("cross_entropy", {"beta": 1.0}, "loss_fn_config of 'cross_entropy' has no beta; it has: -"),
        ("dro", {}, "loss_fn_config of 'dro' needs beta: the API documents no default"),
        ("ppo", {"clip_low_threshold": 0.2, "clip_high_threshold": 0.2}, "bounds the ratio, so that 1 is within; got"),
        ("ppo", {"clip_low_threshold": 1.2}, "bounds the ratio, so that 1 is within; got"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(loss: str, config: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        complete_config(loss, config)
