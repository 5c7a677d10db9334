"""Loss methods: surrogates and rows. `token_weights.py` has reducers and corrections, `loss_terms.py` the loss itself.

Arrays are 1-D over the response tokens of a micro-batch, and ``sample_index`` is the response of each token.

A recipe names a row (``algorithm.loss``), a reducer and a correction through `magicrl.registry`: built-in ones by
name, a custom one as ``file.py:name``. Rows and functions declare which extra inputs they need, so that no unused
forward pass is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from magicrl.algorithms.token_weights import (  # custom parts import all of these from here
    Correction,  # noqa: F401  # pyright: ignore[reportUnusedImport]
    LossInputs,
    Need,
    Reducer,
    ReducerInputs,  # noqa: F401  # pyright: ignore[reportUnusedImport]
    constant,
    global_tokens,
    mean_of_response,  # noqa: F401  # pyright: ignore[reportUnusedImport]
    needs,  # noqa: F401  # pyright: ignore[reportUnusedImport]
    needs_of,
    prompt_mean,
    response_mean,
    sequence_sum,
)
from magicrl.records import TrainBatch
from magicrl.registry import BUILTINS, check_call, resolve

# --- inputs and outputs of a method -----------------------------------------------------------------------------


SurrogateInputs = LossInputs
CorrectionInputs = LossInputs
"""Earlier names of `LossInputs`, which custom parts may still import; results of studies are kept under the content of
their files."""


class Surrogate(NamedTuple):
    """Objective per token (to be maximised), and the tokens where the clip acted, ``[tokens]`` each.

    The clip acts on a token whose ratio is outside its bounds on the side where the row limits it. Some rows then
    remove the token's gradient, others bound its weight.
    """

    values: Tensor
    clipped: Tensor


# --- surrogates ----------------------------------------------------------------------------------------------


def nothing_clipped(s: LossInputs) -> Tensor:
    """Return all False, ``[tokens]``."""
    return torch.zeros_like(s.ratio, dtype=torch.bool)


def past_the_clip(s: LossInputs) -> tuple[Tensor, Tensor]:
    """Return where rho moved in the direction of the advantage past the clip: below 1 - eps_low and above 1 + eps_high,
    ``[tokens]``.
    """
    return (s.advantages < 0) & (s.ratio < 1 - s.clip_low), (s.advantages > 0) & (s.ratio > 1 + s.clip_high)


def clipped_ratio(s: LossInputs) -> Surrogate:
    """Return min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A). Clipped tokens have no gradient."""
    # The minimum makes the objective a lower bound: a token that moved the wrong way keeps the gradient that leads it
    # back.
    bounded = s.ratio.clamp(1 - s.clip_low, 1 + s.clip_high)
    values = torch.minimum(s.ratio * s.advantages, bounded * s.advantages)
    too_low, too_high = past_the_clip(s)
    return Surrogate(values, too_low | too_high)


def clipped_weight(s: LossInputs) -> Surrogate:
    """Return stop_gradient(clip(rho)) * A * log pi (CISPO). Every token keeps a gradient, and its weight is bounded."""
    # A token whose ratio is out of bounds still learns, through log pi.
    weight = s.ratio.detach().clamp(1 - s.clip_low, 1 + s.clip_high)
    return Surrogate(weight * s.advantages * s.logprobs, weight != s.ratio.detach())


def soft_gate(s: LossInputs, *, tau_positive: float, tau_negative: float) -> Surrogate:
    """Return 4 / tau * sigmoid(tau (rho - 1)) * A with tau by the sign of A (SAPO). The gradient fades instead of being
    clipped.

    Its derivative by rho is 4 sigmoid (1 - sigmoid) A, which is A at rho = 1 for any tau.
    """
    tau = torch.full_like(s.advantages, tau_negative).masked_fill(s.advantages > 0, tau_positive)
    return Surrogate(4 / tau * torch.sigmoid(tau * (s.ratio - 1)) * s.advantages, nothing_clipped(s))


def gradient_preserving_clip(s: LossInputs, *, beta_low: float, beta_high: float) -> Surrogate:
    """Return rho A, and beyond the clip beta (1 -+ eps) / stop_gradient(rho) * rho A (CE-GPPO, Eq. 8).

    A token without a gradient under PPO's clip gets the gradient at the bound times beta: ``beta_low`` where A < 0 and
    rho is too low, ``beta_high`` where A > 0 and rho is too high.
    """
    too_low, too_high = past_the_clip(s)
    bound = torch.full_like(s.ratio, beta_high * (1 + s.clip_high)).masked_fill(too_low, beta_low * (1 - s.clip_low))
    kept = torch.where(too_low | too_high, bound / s.ratio.detach() * s.ratio, s.ratio)
    return Surrogate(kept * s.advantages, too_low | too_high)


def flipped_ratio(s: LossInputs, *, dual_clip: float) -> Surrogate:
    """Return rho A where A < 0, and A with weight 1 / rho, at most ``dual_clip``, where A > 0. 0 beyond the clip
    (ASPO).

    The flipped weight is rho / stop_gradient(rho^2), so that its gradient is that of log pi times 1 / rho: a good token
    that became less likely is raised more, not less. ``dual_clip`` bounds the weight and does not stop the gradient.
    """
    too_low, too_high = past_the_clip(s)
    rho = s.ratio.detach()
    weight = torch.where(s.advantages > 0, (1 / rho).clamp(max=dual_clip), rho)
    values = weight * (s.ratio / rho) * s.advantages
    return Surrogate(values.masked_fill(too_low | too_high, 0.0), too_low | too_high)


Divergence: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Divergence of two policies at each token, from its log-probs under the learner and under the sampler, ``[tokens]``.
"""


def binary_tv(logprobs: Tensor, sampler_logprobs: Tensor) -> Tensor:
    """Return |pi - mu|: the total variation of "this token or another" under the two policies (DPPO's Binary-TV)."""
    return (logprobs.exp() - sampler_logprobs.exp()).abs()


def binary_kl(logprobs: Tensor, sampler_logprobs: Tensor) -> Tensor:
    """Return mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)), in nats: KL(mu || pi) of the same two (DPPO's
    Binary-KL).
    """
    # 1 - p without cancellation. A token of probability 1 leaves 0 for the others, and 0 log 0 is 0.
    tiny = torch.finfo(logprobs.dtype).tiny
    others, sampler_others = ((-torch.expm1(values)).clamp(min=tiny) for values in (logprobs, sampler_logprobs))
    return sampler_logprobs.exp() * (sampler_logprobs - logprobs) + sampler_others * (sampler_others / others).log()


def divergence_mask(s: LossInputs, *, divergence: Divergence) -> Surrogate:
    """Return rho A, and 0 for a token that moves away from the sampler's policy beyond a threshold (DPPO, Eq. 11 and
    12).

    Masked tokens: A > 0, more likely than when sampled, and a divergence above ``clip_high``; or A < 0, less likely,
    and a divergence above ``clip_low``. The paper's ratio is relative to the sampler too. With ``correction = "tis"``
    rho times the correction is that ratio.
    """
    now, then = s.logprobs.detach(), s.sampler_logprobs
    distance = divergence(now, then)
    too_high = (s.advantages > 0) & (now > then) & (distance > s.clip_high)
    too_low = (s.advantages < 0) & (now < then) & (distance > s.clip_low)
    return Surrogate((s.ratio * s.advantages).masked_fill(too_low | too_high, 0.0), too_low | too_high)


def unclipped_ratio(s: LossInputs) -> Surrogate:
    """Return rho * A. With rho = 1 its gradient is the policy gradient, that of A * log pi.

    Off-policy this is the importance-weighted objective without a clip, and its gradient is rho times that of A * log
    pi.
    """
    return Surrogate(s.ratio * s.advantages, nothing_clipped(s))


def log_likelihood(s: LossInputs) -> Surrogate:
    """Return log pi: SFT is the row without ratio, clip or advantage."""
    return Surrogate(s.logprobs, nothing_clipped(s))


# --- the table of methods --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class LossRow:
    """Definition of one method.

    Attributes:
        surrogate: The objective per token.
        reducer: Weights of the tokens, unless the recipe names another reducer.
        ratio_level: ``token``, or ``sequence`` for the geometric mean of a response's ratios.
        clip: The method's usual (eps_low, eps_high), or its thresholds. Recipes state their own. None means that a
            recipe cannot set them.
        normalise_std: Whether advantages are divided by the group's standard deviation.
        needs: Inputs that cost extra compute and that the surrogate reads.
        statistics: Function of the whole mini-batch, called once before the update. Every call of the surrogate gets
            its numbers or arrays by name. With ``@needs("old_logprobs")`` its samples carry these.
    """

    surrogate: Callable[[LossInputs], Surrogate]
    reducer: Reducer = global_tokens
    ratio_level: Literal["token", "sequence"] = "token"
    clip: tuple[float, float] | None = None
    normalise_std: bool = True
    needs: tuple[Need, ...] = ()
    statistics: Callable[[TrainBatch], Mapping[str, Any]] | None = None


# MAGIC, Eq. 3.1 of the report: the clipped ratio, averaged over all tokens of the mini-batch.
MAGIC = LossRow(surrogate=clipped_ratio, reducer=global_tokens, clip=(0.2, 0.2))
# DAPO (Yu et al. 2025): a higher upper clip.
DAPO = LossRow(surrogate=clipped_ratio, reducer=global_tokens, clip=(0.2, 0.28))
# Dr. GRPO (Liu et al. 2025): a constant denominator, and advantages without division by the standard deviation.
DR_GRPO = LossRow(surrogate=clipped_ratio, reducer=constant, clip=(0.2, 0.2), normalise_std=False)
# GRPO (Shao et al. 2024): mean over each response first.
GRPO = LossRow(surrogate=clipped_ratio, reducer=response_mean, clip=(0.2, 0.2))
# GSPO (Zheng et al. 2025): the ratio of the whole response.
GSPO = LossRow(surrogate=clipped_ratio, reducer=response_mean, ratio_level="sequence", clip=(3e-4, 4e-4))
# PPO (Schulman et al. 2017): sum over each response.
PPO = LossRow(surrogate=clipped_ratio, reducer=sequence_sum, clip=(0.2, 0.2))
# rho * A: the policy gradient with one update per step, the unclipped importance-weighted objective with several.
PG = LossRow(surrogate=unclipped_ratio, reducer=sequence_sum)
# CISPO (MiniMax 2025): the clip bounds a token's weight and never its gradient. 1 - eps_low = 0 is no lower bound,
# because rho is positive.
CISPO = LossRow(surrogate=clipped_weight, reducer=global_tokens, clip=(1.0, 4.0))
# Loss of ScaleRL (Khatri et al. 2025, arXiv 2510.13786): CISPO with a mean over each prompt first. The rest of that
# method are settings (docs/guides/custom-parts.md).
SCALERL = LossRow(surrogate=clipped_weight, reducer=prompt_mean, clip=(1.0, 4.0))
# SAPO (Gao et al. 2025, arXiv 2511.20347): a soft gate with the paper's temperatures, mean over responses.
SAPO = LossRow(surrogate=partial(soft_gate, tau_positive=1.0, tau_negative=1.05), reducer=response_mean)
# CE-GPPO (Su et al. 2025, arXiv 2509.20712, Eq. 8): clipped tokens keep a bounded gradient. The betas are the released
# ones.
CE_GPPO = LossRow(surrogate=partial(gradient_preserving_clip, beta_low=0.75, beta_high=1.0), clip=(0.2, 0.2))
# ASPO (Wang et al. 2025, arXiv 2510.06062): positive tokens have weight 1 / rho. The paper gives no bound of that
# weight, so this uses 3 as in dual-clip PPO (Ye et al. 2020, arXiv 1912.09729).
ASPO = LossRow(surrogate=partial(flipped_ratio, dual_clip=3.0), clip=(0.2, 0.2))
# DPPO (Qi et al. 2026, arXiv 2602.04879, Eq. 11 to 14): the clip pair are thresholds of a divergence from the sampler's
# policy. The values are those of public implementations.
DPPO = LossRow(surrogate=partial(divergence_mask, divergence=binary_tv), clip=(0.2, 0.2))
DPPO_KL = LossRow(surrogate=partial(divergence_mask, divergence=binary_kl), clip=(0.05, 0.05))
# SFT: the mean negative log-likelihood.
NLL = LossRow(surrogate=log_likelihood, reducer=global_tokens)

LOSSES: Mapping[str, LossRow] = MappingProxyType(
    {name: globals()[reference.rpartition(":")[2]] for name, reference in BUILTINS["loss"].items()}
)
"""Built-in rows by the names that recipes use."""


def loss_row(reference: str) -> LossRow:
    """Return the row that ``algorithm.loss`` names.

    Raises:
        ValueError: The name is unknown (the message lists the known ones), or does not name a row.
    """
    row = resolve("loss", reference)
    if not isinstance(row, LossRow):
        raise ValueError(
            f"loss {reference!r} is a {type(row).__name__}; it must be a magicrl.algorithms.losses.LossRow"
        )
    clip: Any = row.clip
    pair: tuple[Any, ...] = clip if isinstance(clip, tuple) else ()
    if clip is not None and (len(pair) != 2 or not all(isinstance(one, int | float) and one > 0 for one in pair)):
        raise ValueError(
            f"loss {reference!r} has clip = {clip!r}; it must be a pair of positive numbers (eps_low, eps_high) or None"
        )
    needs_of(row)
    needs_of(row.statistics)
    check_call(f"the surrogate of loss {reference!r}", row.surrogate, "LossInputs")
    return row
