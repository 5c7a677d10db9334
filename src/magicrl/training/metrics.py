"""The metrics of a training step: what every figure of the report is drawn from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from magicrl.records import Completion, ScoredGroup, Verdict
from magicrl.training.protocols import UpdateMetrics
from magicrl.verifiers.base import NO_ANSWER

Values = dict[str, float | int | str | None]


def rollout_metrics(groups: Sequence[ScoredGroup]) -> Values:
    """Accuracy, truncation and lengths over the step's whole buffer, before rejection.

    ``train/accuracy_nontruncated`` is r_nontrunc of J = E[p_nontrunc * r_nontrunc]; None where all were cut.
    The standard error is clustered by group.
    """
    rewards = np.concatenate([g.rewards[g.counted] for g in groups])
    truncated = np.concatenate([g.truncated[g.counted] for g in groups])
    lengths = np.array([len(c) for g in groups for c in g.group.completions])
    per_group = np.array([g.rewards[g.counted].mean() for g in groups if g.counted.any()])
    finished = rewards[~truncated]
    error = per_group.std(ddof=1) / math.sqrt(len(per_group)) if len(per_group) > 1 else None
    verified = [v.seconds for g in groups for v in g.verdicts]
    return {
        "train/accuracy/mean": _mean(rewards),
        "train/accuracy/standard_error": None if error is None else float(error),
        "train/accuracy_nontruncated/mean": _mean(finished),
        "train/reward/mean": _mean(rewards),
        "train/answered/ratio": answered_share([g.group.completions for g in groups], [g.verdicts for g in groups]),
        "train/truncation/ratio": float(np.mean([c.truncated for g in groups for c in g.group.completions])),
        "length/mean": float(lengths.mean()),
        "length/min": int(lengths.min()),
        "length/max": int(lengths.max()),
        "length/q50": float(np.quantile(lengths, 0.5)),
        "length/q90": float(np.quantile(lengths, 0.9)),
        "length/q99": float(np.quantile(lengths, 0.99)),
        "groups/sampled": len(groups),
        "groups/not_judged": int(sum((~g.counted).sum() for g in groups)),
        "tokens/sampled": int(lengths.sum()),
        "verify/seconds": float(np.sum(verified)),
    }


def answered_share(completions: Iterable[Sequence[Completion]], verdicts: Iterable[Sequence[Verdict]]) -> float:
    """Share of responses that ended by themselves and held an answer that the verifier read; a sequence a group."""
    pairs = [pair for c, v in zip(completions, verdicts, strict=True) for pair in zip(c, v, strict=True)]
    return float(np.mean([not completion.truncated and v.status not in NO_ANSWER for completion, v in pairs]))


def merge_updates(updates: Sequence[UpdateMetrics]) -> Values:
    """The step's SGD updates as one: token-weighted means, extremes of extremes, sums of tokens."""
    if not updates:
        return {"learner/sgd_steps": 0, "tokens/trained": 0}
    rows = [u.values for u in updates]
    weights = np.array([row["tokens"] for row in rows], dtype=np.float64)
    merged: Values = {"learner/sgd_steps": len(rows), "tokens/trained": int(weights.sum())}
    for key in rows[0]:
        column = np.array([row[key] for row in rows], dtype=np.float64)
        if key == "tokens":
            continue
        if key.endswith("_max"):
            value = float(column.max())
        elif key.endswith("_min"):
            value = float(column.min())
        elif key == "learning_rate":
            value = float(column[-1])
        else:
            value = float(np.average(column, weights=weights))
        merged[f"learner/{key}"] = value
    return merged


def finite(values: Mapping[str, float | int | str | None]) -> Values:
    """The same values with None for what is not a finite number, since JSON has no NaN."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values.items()
    }


def _mean(values: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> float | None:
    return float(values.mean()) if len(values) else None
