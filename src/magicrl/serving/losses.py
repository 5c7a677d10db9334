"""The Tinker API's losses (tinker-docs.thinkingmachines.ai/tinker/losses): a value per target token, to be summed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from magicrl.algorithms.losses import LossInputs, Surrogate, clipped_ratio, clipped_weight, unclipped_ratio

Inputs = Mapping[str, Tensor]
"""``loss_fn_inputs`` by name, ``[tokens]`` each."""
Config = Mapping[str, float]
"""``loss_fn_config``."""


def cross_entropy(logprobs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """Return -w log p."""
    return -inputs["weights"] * logprobs


def policy_loss(
    logprobs: Tensor, inputs: Inputs, config: Config, *, surrogate: Callable[[LossInputs], Surrogate]
) -> Tensor:
    """Return minus a row's surrogate, with the ratio to the sampler's log-probs."""
    sampled = inputs["logprobs"]
    given = LossInputs(
        logprobs=logprobs,
        advantages=inputs["advantages"],
        loss_mask=torch.ones_like(logprobs, dtype=torch.bool),
        sample_index=torch.zeros_like(logprobs, dtype=torch.int64),
        old_logprobs=sampled,
        sampler_logprobs=sampled,
        ratio=(logprobs - sampled).exp(),
        # The API names the bounds of the ratio, and a row their distance to 1.
        clip_low=1 - config.get("clip_low_threshold", 1.0),
        clip_high=config.get("clip_high_threshold", 1.0) - 1,
    )
    return -surrogate(given).values


def dro(logprobs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """Return -(A log p - beta / 2 (log p - log q)^2), with the sampler's q."""
    penalty = (logprobs - inputs["logprobs"]).square()
    return -(inputs["advantages"] * logprobs - 0.5 * config["beta"] * penalty)


class Loss(NamedTuple):
    """A loss of the API.

    Attributes:
        inputs: Names of its ``loss_fn_inputs``, without ``target_tokens``.
        config: Its ``loss_fn_config`` with defaults. The client must give what has none.
        values: Function of log-probs, inputs and config that returns the value of each token.
    """

    inputs: tuple[str, ...]
    config: Mapping[str, float | None]
    values: Callable[[Tensor, Inputs, Config], Tensor]


_POLICY = ("logprobs", "advantages")
LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(("weights",), {}, cross_entropy),
    "importance_sampling": Loss(_POLICY, {}, partial(policy_loss, surrogate=unclipped_ratio)),
    "ppo": Loss(
        _POLICY,
        {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        partial(policy_loss, surrogate=clipped_ratio),
    ),
    "cispo": Loss(
        _POLICY,
        # The API's documentation states no defaults.
        {"clip_low_threshold": None, "clip_high_threshold": None},
        partial(policy_loss, surrogate=clipped_weight),
    ),
    "dro": Loss(_POLICY, {"beta": None}, dro),
}


def complete_config(name: str, given: Config) -> Config:
    """Return the config of a loss with its defaults.

    Raises:
        ValueError: The loss is unknown, or a value is missing, unknown or out of range.
    """
    if name not in LOSSES:
        raise ValueError(f"loss_fn {name!r} is not served; use one of {', '.join(LOSSES)}")
    wanted = LOSSES[name].config
    unknown, whole = sorted(set(given) - set(wanted)), {**wanted, **given}
    if unknown:
        raise ValueError(f"loss_fn_config of {name!r} has no {', '.join(unknown)}; it has: {', '.join(wanted) or '-'}")
    complete = {key: value for key, value in whole.items() if value is not None}
    if len(complete) < len(whole):
        lacking = ", ".join(sorted(set(whole) - set(complete)))
        raise ValueError(f"loss_fn_config of {name!r} needs {lacking}: the API documents no default")
    if not complete.get("clip_low_threshold", 1.0) <= 1 <= complete.get("clip_high_threshold", 1.0):
        raise ValueError(f"loss_fn_config of {name!r} bounds the ratio, so that 1 is within; got {complete}")
    return complete
