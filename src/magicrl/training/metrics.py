"""The metrics of a training step: buffer, entropy and updates. docs/reference/metrics.md lists their keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from magicrl.algorithms.advantages import Rejection
from magicrl.algorithms.entropy import AdaptiveEntropyController, EntropyController, EntropyEstimate, EntropyEstimator
from magicrl.records import ScoredGroup, reward_earned
from magicrl.training.diagnosis import Judging, SampledAnswers, unjudged_text
from magicrl.training.meters import StepClock, Values


def step_metrics(
    groups: Sequence[ScoredGroup],
    rejection: Rejection,
    updates: Sequence[Mapping[str, float]],
    *,
    kept: Sequence[ScoredGroup],
    refilled: int,
    max_tokens: int,
    control: Values,
    clock: StepClock,
    asynchronous: Values,
) -> Values:
    """Return every metric of a step except those of workers, speed and validation. The clock stops here.

    Args:
        groups: Whole buffer, before rejection.
        rejection: Rejection of ``groups``.
        updates: Metrics of each update.
        kept: Groups that the updates learn from: those not rejected, or with ``reject_zero_advantage`` off all that
            have a verdict.
        refilled: Number of groups sampled to replace rejected ones.
        max_tokens: T.
        control: Metrics of the entropy control before the updates.
        clock: Clock of the step.
        asynchronous: Metrics of staleness and queue, empty in synchronous mode.
    """
    tokens = np.array([group.group.num_tokens for group in groups])
    values: Values = {
        **rollout_metrics(groups),
        **control,
        "groups/rejected/ratio": (len(groups) - len(rejection.kept)) / len(groups),
        "groups/rejected/all_correct": rejection.all_correct,
        "groups/rejected/all_wrong": rejection.all_wrong,
        "groups/refilled": refilled,
        "groups/trained": len(kept),
        "groups/all_rejected": int(not kept),
        "tokens/rejected/ratio": 1.0 - float(tokens[list(rejection.kept)].sum()) / max(1, int(tokens.sum())),
        **merge_updates(updates),
        "stage/max_tokens": max_tokens,
    }
    times, others = clock.times(), clock.seconds("other")
    values |= {f"time/{part}": seconds for part, seconds in times.items()}
    values |= {f"time/{part}_cpu": clock.cpu.get(part, 0.0) for part in ("rollout", "train")}
    # In asynchronous mode a response also waits while the learner works.
    if not asynchronous:
        values["time/longest_response"] = max(c.seconds for g in groups for c in g.group.completions)
    values |= {f"time/other/{what}": seconds for what, seconds in others.items()}
    values["time/verify_waited"] = others.get("verify", 0.0)
    values |= asynchronous
    values["tokens/per_second"] = int(values["tokens/sampled"] or 0) / max(times["step"], 1e-9)
    # JSON has no NaN and no infinity.
    return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()}


def entropy_metrics(
    controller: EntropyController,
    estimates: Mapping[EntropyEstimator, EntropyEstimate],
    alpha: float,
    coefficients: Mapping[str, float],
) -> Values:
    """Return the controller's inputs and outputs of this step. Call it before the controller observes the entropy."""
    values: Values = {"entropy/alpha": alpha}
    values |= {f"entropy/coefficient/{name}": value for name, value in coefficients.items()}
    for estimator, estimate in estimates.items():
        values[f"entropy/{estimator}/mean"] = estimate.mean
        values[f"entropy/{estimator}/standard_error"] = estimate.standard_error
    # A custom controller has no c.
    if isinstance(controller, AdaptiveEntropyController):
        values |= {"entropy/c": controller.c, "entropy/target": controller.target}
    return values


def rollout_metrics(groups: Sequence[ScoredGroup]) -> Values:
    """Return accuracy, truncation and lengths over the step's whole buffer, before rejection.

    A response is correct if it was judged right and is not truncated. ``train/accuracy_nontruncated`` is r_nontrunc of
    J = E[p_nontrunc * r_nontrunc] (Fig. 6). It is None where all responses were truncated. The standard error is
    clustered by prompt: a prompt that was drawn twice is one observation.
    """
    rewards = np.concatenate([g.rewards[g.counted] for g in groups])
    correct = np.concatenate([g.correct[g.counted] for g in groups]).astype(np.float32)
    truncated = np.concatenate([g.truncated[g.counted] for g in groups])
    of_groups = [np.array([c.num_sampled for c in g.group.completions]) for g in groups]
    lengths = np.concatenate(of_groups)
    judged_lengths = np.concatenate([own[g.counted] for own, g in zip(of_groups, groups, strict=True)])
    finished = correct[~truncated]
    verified = [v.seconds for g in groups for v in g.verdicts]
    return {
        "train/accuracy/mean": _mean(correct),
        "train/accuracy/standard_error": mean_error(groups, lambda group: group.correct),
        "train/accuracy_nontruncated/mean": _mean(finished),
        "train/reward/mean": _mean(rewards),
        "train/answered/ratio": float(np.mean([one for g in groups for one in g.answered])),
        # Over all responses: one without a verdict can be truncated too.
        "train/truncation/ratio": float(np.mean([c.truncated for g in groups for c in g.group.completions])),
        "train/not_judged/ratio": float(np.mean([~counted for g in groups for counted in g.counted])),
        "length/mean": float(lengths.mean()),
        "length/min": int(lengths.min()),
        "length/max": int(lengths.max()),
        "length/q50": float(np.quantile(lengths, 0.5)),
        "length/q90": float(np.quantile(lengths, 0.9)),
        "length/q99": float(np.quantile(lengths, 0.99)),
        "length/right/mean": _mean(judged_lengths[correct == 1]),
        "length/wrong/mean": _mean(judged_lengths[correct == 0]),
        "groups/sampled": len(groups),
        "tokens/sampled": int(lengths.sum()),
        "verify/seconds": float(np.sum(verified)),
        **custom_metrics(groups),
    }


class UnjudgedError(RuntimeError):
    """No answer could be judged. The text has the reason of one verdict."""


def answers_of(groups: Sequence[ScoredGroup], *, max_tokens: int, judging: Judging) -> SampledAnswers:
    """Return the figures of groups that were sampled and verified.

    Raises:
        UnjudgedError: No answer has a verdict.
    """
    judged = [group for group in groups if group.counted.any()]
    if not judged:
        raise UnjudgedError(unjudged_text(first_reason(groups)))
    right = [group.correct[group.counted] for group in judged]
    entropies = [
        c.sampler_entropies for group in judged for c in group.group.completions if c.sampler_entropies is not None
    ]
    return SampledAnswers(
        groups=len(groups),
        max_tokens=max_tokens,
        # By reward, as training rejects, and over all groups: one without any verdict has no advantage either.
        mixed=sum(len(np.unique(group.rewards[group.counted])) > 1 for group in judged) / len(groups),
        correct=float(np.concatenate(right).mean()),
        truncated=float(np.mean([c.truncated for group in judged for c in group.group.completions])),
        answered=float(np.mean([one for g in judged for one in g.answered])),
        judging=judging,
        entropy=float(np.concatenate(entropies).mean()) if entropies else None,
    )


def first_reason(groups: Sequence[ScoredGroup]) -> str:
    """Return the reason of the first verdict that states one."""
    return next((verdict.reason for group in groups for verdict in group.verdicts if verdict.reason), "")


def mean_error(groups: Sequence[ScoredGroup], of: Callable[[ScoredGroup], NDArray[Any]]) -> float | None:
    """Return the standard error of the mean of ``of(group)`` (``[G]``), clustered by prompt.

    It is None with fewer than two prompts.
    """
    # A group without any verdict has no mean.
    judged = [g for g in groups if g.counted.any()]
    means = np.array([of(g)[g.counted].mean(dtype=np.float64) for g in judged])
    _, cluster = np.unique([g.group.request.problem.key for g in judged], return_inverse=True)
    residuals = np.bincount(cluster, weights=means - means.mean()) if judged else np.zeros(0)
    n = len(residuals)
    return math.sqrt(n / (n - 1) * float((residuals**2).sum())) / len(judged) if n > 1 else None


def custom_metrics(groups: Sequence[ScoredGroup]) -> Values:
    """Return the means over counted responses of the numbers that custom rewards and environments report.

    Each of several rewards has the mean score it pays, and the share of responses that it did not judge.
    """
    found: dict[str, list[float]] = {}
    for group in groups:
        for verdict, completion, counted in zip(group.verdicts, group.group.completions, group.counted, strict=True):
            if not counted:
                continue
            given = {f"reward/{name}": value for name, value in verdict.metrics.items()}
            if (episode := completion.episode) is not None:
                given |= {f"environment/{name}": value for name, value in episode.metrics.items()}
                given["environment/turns"] = len(episode.observed) + 1
                given["environment/observed_tokens"] = len(completion) - completion.num_sampled
                given["environment/observations_cut"] = episode.cut
            for name, (_, score) in verdict.parts.items():
                given[f"reward/{name}/not_judged/ratio"] = float(score is None)
                if score is not None:
                    given[f"reward/{name}/mean"] = reward_earned(score, truncated=completion.truncated)
            for name, value in given.items():
                found.setdefault(name, []).append(value)
    return {name: float(np.mean(values)) for name, values in sorted(found.items())}


def merge_updates(updates: Sequence[Mapping[str, float]]) -> Values:
    """Merge the step's updates: token-weighted means, extremes of extremes, sums of tokens."""
    if not updates:
        return {"learner/sgd_steps": 0, "tokens/trained": 0}
    columns = {key: np.array([u[key] for u in updates], dtype=np.float64) for key in updates[0]}
    # An update's means are means over its tokens.
    weights = columns.pop("tokens")
    merged: Values = {"learner/sgd_steps": len(updates), "tokens/trained": int(weights.sum())}
    for key, column in columns.items():
        if key.endswith("_max"):
            value = column.max()
        elif key.endswith("_min"):
            value = column.min()
        elif key == "learning_rate":
            # The last one: a mean over a warm-up is a rate that no update used.
            value = column[-1]
        else:
            value = np.average(column, weights=weights)
        merged[f"learner/{key}"] = float(value)
    return merged


def _mean(values: NDArray[Any]) -> float | None:
    return float(values.mean()) if len(values) else None
