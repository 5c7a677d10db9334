"""Measured entropy of a step's rollout buffer, in nats per token, with its standard error (section 4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from magicrl.records import Completion

EntropyEstimator: TypeAlias = Literal["exact", "sampled"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EntropyEstimate:
    """Token-weighted mean entropy.

    Attributes:
        mean: nats per token.
        standard_error: of the mean, tokens clustered by response; infinite with one response.
        tokens: response tokens it was taken over.
    """

    mean: float
    standard_error: float
    tokens: int


def clustered_mean(totals_N: NDArray[np.float64], lengths_N: NDArray[np.int64]) -> EntropyEstimate:
    """Mean over tokens from each response's total, with an error that lets tokens of a response correlate.

    The mean is a ratio of two sums over responses, sum S / sum L; its error comes from the residuals
    S_i - mean * L_i (linearised ratio estimator).

    Args:
        totals_N: sum of the per-token values of each response.
        lengths_N: tokens of each response.

    Raises:
        ValueError: no tokens.
    """
    tokens = int(lengths_N.sum())
    if tokens == 0:
        raise ValueError("entropy needs at least one response token")
    mean = float(totals_N.sum()) / tokens
    count = len(totals_N)
    residuals = totals_N - mean * lengths_N
    spread = math.sqrt(float((residuals**2).sum()) * count / (count - 1)) if count > 1 else math.inf
    return EntropyEstimate(mean=mean, standard_error=spread / tokens, tokens=tokens)


def measure_entropy(completions: Sequence[Completion], estimator: EntropyEstimator) -> EntropyEstimate | None:
    """e_k over all response tokens of the buffer; give it every completion of the step, before rejection.

    ``exact`` averages the full distribution's entropies that the engine recorded; None when it recorded
    none. ``sampled`` averages -log-prob of the sampled tokens: unbiased at top_p = 1 as long as nothing was
    selected by what was sampled.
    """
    arrays = _values(completions, estimator)
    return None if arrays is None else mean_entropy(arrays)


def mean_entropy(entropies: Sequence[NDArray[np.floating[Any]]]) -> EntropyEstimate:
    """Token-weighted mean of ``[T]`` entropies, an array a response: those that a learner measured, for one."""
    totals = np.array([float(a.sum(dtype=np.float64)) for a in entropies])
    return clustered_mean(totals, np.array([len(a) for a in entropies], dtype=np.int64))


def estimator_gap(completions: Sequence[Completion]) -> EntropyEstimate | None:
    """Exact minus sampled, token by token on the same responses: mean 0 if both measure the same thing.

    Pairing removes what the two share, so this finds a wrong estimator that their separate errors would hide.
    None when the engine records no entropies.
    """
    exact, sampled = _values(completions, "exact"), _values(completions, "sampled")
    if exact is None or sampled is None:
        return None
    gaps = np.array([float(e.sum() - s.sum()) for e, s in zip(exact, sampled, strict=True)])
    return clustered_mean(gaps, np.array([len(e) for e in exact], dtype=np.int64))


def estimators_agree(gap: EntropyEstimate, *, z: float = 4.0, tolerance: float = 1e-6) -> bool:
    """Whether a gap is within ``z`` of its standard errors (``tolerance`` nats are forgiven to rounding)."""
    return abs(gap.mean) <= z * gap.standard_error + tolerance


def _values(completions: Sequence[Completion], estimator: EntropyEstimator) -> list[NDArray[np.float64]] | None:
    if estimator == "sampled":
        return [-c.sampler_logprobs.astype(np.float64) for c in completions]
    if estimator != "exact":
        raise ValueError(f"entropy estimator must be exact or sampled, got {estimator!r}")
    arrays: list[NDArray[np.float64]] = []
    for completion in completions:
        if completion.sampler_entropies is None:
            return None
        arrays.append(completion.sampler_entropies.astype(np.float64))
    return arrays
