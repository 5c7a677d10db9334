"""The same question to verl: its released loss functions on the held-out cases of the loss check.

The functions are called as verl's own ``ppo_loss`` calls them, in two micro-batches with the counts of the whole
mini-batch. Groups have equal sizes, because verl takes the mean over responses where the reference takes the mean over
groups. All responses are judged and none is masked for its length, for which verl has no setting.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from magicrl.selfcheck.loss import Case, T, library_samples, random_case, slow_loss, slow_responses, tiny_model
from magicrl.selfcheck.setup import Proof, Setup, relative_error, worst
from magicrl.selfcheck.slow_loss import NOT_DIVIDED, Response

core: Any = importlib.import_module("verl.trainer.ppo.core_algos")  # without its partial types
corrections: Any = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
config: Any = importlib.import_module("verl.workers.config")
TOLERANCE = 1e-5
MEMBERS = 3
METHODS = {
    "dapo": ("vanilla", "token-mean"),
    "grpo": ("vanilla", "seq-mean-token-mean"),
    "dr_grpo": ("vanilla", "seq-mean-token-sum-norm"),
    "ppo": ("vanilla", "seq-mean-token-sum"),
    "gspo": ("gspo", "seq-mean-token-mean"),
    "cispo": ("cispo", "token-mean"),
    "sapo": ("sapo", "seq-mean-token-mean"),
    "dppo": ("dppo_tv", "token-mean"),
    "dppo_kl": ("dppo_kl", "token-mean"),
}
"""verl's ``loss_mode`` and ``loss_agg_mode`` of each row of `slow_loss`."""


def verl_loss(setup: Setup) -> Proof:
    """Return how far the gradients of verl's losses, and its advantages of RLOO, are from the slow reference."""
    cases = {(loss, i): held_out(loss, setup.seed, i) for loss in METHODS for i in range(2 if setup.quick else 8)}
    errors = {f"{loss}, case {i}": verl_error(case) for (loss, i), case in cases.items()}
    rloo = worst(map(rloo_error, cases.values()))
    # verl gives each token's weight to its own gradient (GSPO-token); the reference weighs the sequence's ratio.
    weighted = [
        f"{loss}, case {i}" for (loss, i), case in cases.items() if loss == "gspo" and case.correction != "none"
    ]
    defined = worst(errors[name] for name in weighted)
    same = {name: error for name, error in errors.items() if name not in weighted}
    off = [name for name, error in same.items() if not error <= TOLERANCE]
    named = f" ({', '.join(off)})" if off else ""
    return Proof(
        status="peer",
        figure=f"{len(off)} of {len(same)} cases of {len(METHODS)} losses differ by more than {TOLERANCE:.0e} in the "
        f"gradient{named}; worst {worst(same.values()):.1e}; advantages of RLOO by at most {rloo:.1e}; by definition: "
        f"{len(weighted)} cases of GSPO with a correction's weights {defined:.1e} (verl's tokens have each their own), "
        "and verl's dual clip, which the reference lacks and which is off",
        against="the same slow loops on the same cases, with groups of equal size; two micro-batches, counted as one",
        details=errors | {"RLOO": rloo},
    )


def held_out(loss: str, seed: int, number: int) -> Case:
    """Return a case of the loss check with groups of `MEMBERS` responses, all of them judged and none masked."""
    case = random_case(loss, seed, number)
    return replace(
        case,
        mask="none",
        groups=[members[:MEMBERS] for members in case.groups],
        truncated=[members[:MEMBERS] for members in case.truncated],
        rewards=[[reward or 0.0 for reward in members[:MEMBERS]] for members in case.rewards],
    )


def verl_error(case: Case) -> float:
    """Return the relative error of verl's gradient of a case."""
    model = tiny_model()
    samples = library_samples(case, model)
    weights = list(model.requires_grad_(True).parameters())
    responses, scored = slow_responses(case, model, samples)
    if case.loss.startswith("dppo"):  # verl has one old policy, and the reference measures the distance to the sampler
        responses = [replace(response, sampler=response.old) for response in responses]
    found, expected = (
        torch.autograd.grad(loss(case, responses, scored), weights, retain_graph=True) for loss in (of_verl, slow_loss)
    )
    return relative_error(found, expected)


def of_verl(case: Case, responses: Sequence[Response], scored: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return verl's loss of a case: policy term, entropy and KL."""
    mode, aggregation = METHODS[case.loss]
    logprobs, entropies = (pad_sequence(list(values), batch_first=True) for values in zip(*scored, strict=True))
    old, sampler, ref, mask = (
        pad_sequence([getattr(response, name) for response in responses], batch_first=True)
        for name in ("old", "sampler", "ref", "mask")
    )
    advantages = core.compute_grpo_outcome_advantage(
        *outcomes(case, mask), norm_adv_by_std_in_grpo=case.loss not in NOT_DIVIDED
    )[0]
    counts = {
        "dp_size": 1,
        "batch_num_tokens": int(mask.sum()),
        "global_batch_size": len(responses),
        "loss_scale_factor": T,
    }
    actor = config.ActorConfig(
        strategy="fsdp", rollout_n=MEMBERS, use_dynamic_bsz=True, clip_ratio_low=case.controls.clip_low,
        clip_ratio_high=case.controls.clip_high, clip_ratio_c=1e9, global_batch_info=counts,
    )  # fmt: skip
    trusted = None
    if case.correction != "none":  # a lower bound makes verl drop weights above the upper one instead of capping them
        threshold = "2.0" if case.correction == "tis" else "1e-30_2.0"
        trusted = corrections.compute_rollout_correction_weights(
            old - sampler, mask, rollout_is="token", rollout_is_threshold=threshold
        )[0]
    total = torch.zeros((), dtype=torch.float64)
    for part in (slice(0, MEMBERS), slice(MEMBERS, None)):
        policy = core.get_policy_loss_fn(mode)(
            old[part], logprobs[part], advantages[part], mask[part], aggregation, actor,
            None if trusted is None else trusted[part],
        )[0]  # fmt: skip
        kl = core.kl_penalty(logprobs[part], ref[part], "low_var_kl")
        entropy, kl = (core.agg_loss(each, mask[part], aggregation, **counts) for each in (entropies[part], kl))
        total = total + policy - case.controls.alpha * entropy + case.controls.kl_coefficient * kl
    return total


def outcomes(case: Case, mask: Tensor) -> tuple[Tensor, Tensor, Any]:
    """Return rewards at each response's first token, the mask, and the group of each response."""
    rewards = torch.zeros(mask.shape, dtype=torch.float64)
    rewards[:, 0] = torch.tensor([reward for members in case.rewards for reward in members])
    return rewards, mask, np.repeat(np.arange(len(case.rewards)), MEMBERS)


def rloo_error(case: Case) -> float:
    """Return the largest difference of verl's RLOO from each reward minus the mean of the others."""
    found = core.compute_rloo_outcome_advantage(*outcomes(case, torch.ones(len(case.rewards) * MEMBERS, 1)))[0]
    expected = [reward - (sum(group) - reward) / (MEMBERS - 1) for group in case.rewards for reward in group]  # pyright: ignore[reportArgumentType, reportCallIssue, reportOperatorIssue]
    return worst(abs(found[:, 0] - torch.tensor(expected)).tolist())
