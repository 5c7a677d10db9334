"""Inputs of a loss: the packed tokens of a micro-batch, which `loss_terms`, surrogates and corrections take."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

NOT_GIVEN = torch.empty(0)
"""Stands for the tensors that `loss_terms` fills in before it calls a surrogate or a correction."""


class LossInputs(NamedTuple):
    """``[tokens]`` tensors of a micro-batch, and numbers of the whole update. Log-probs are float32 or float64.

    Surrogates and corrections get 0 at tokens without loss.

    Attributes:
        logprobs: Log-probs of the policy in training, with gradient.
        advantages: Advantage of the token's response.
        loss_mask: bool, tokens that take part in the loss.
        sample_index: Row of the token's response in this micro-batch.
        old_logprobs: The learner's log-probs from before the step's first update. Default: ``logprobs``, detached, as
            with one update per step.
        sampler_logprobs: Log-probs that the engine reported. Default: ``old_logprobs`` (without an engine).
        ref_logprobs: Log-probs of the frozen reference model. None without one (declare it with ``needs``).
        teacher_logprobs: Log-probs of the teacher. None without one.
        entropy: Entropy of the full distribution, with gradient if alpha is not 0 or the row needs it.
        group_index: Group of the token's response. A group may be spread over micro-batches.
        policy_version: Version of the weights that sampled the token.
        policy_mask: bool, tokens that take part in the policy term. None means all. A token that it excludes stays in
            the entropy and KL terms and in every denominator.
        ratio: rho, or the geometric mean over the response (``ratio_level``), with gradient. `loss_terms` computes it,
            and clamps its logarithm (`MAX_LOG_RATIO`).
        clip_low: eps_low.
        clip_high: eps_high.
        cap: The recipe's ``correction_cap``.
        coefficients: Further coefficients of the controller, by name.
        statistics: Result of the row's ``statistics`` for the whole mini-batch, the same on every rank.
    """

    logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor
    sample_index: Tensor
    old_logprobs: Tensor = NOT_GIVEN
    sampler_logprobs: Tensor = NOT_GIVEN
    ref_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    group_index: Tensor | None = None
    policy_version: Tensor | None = None
    policy_mask: Tensor | None = None
    ratio: Tensor = NOT_GIVEN
    clip_low: float = 0.2
    clip_high: float = 0.2
    cap: float = 2.0
    coefficients: Mapping[str, float] = MappingProxyType({})
    statistics: Mapping[str, Any] = MappingProxyType({})
