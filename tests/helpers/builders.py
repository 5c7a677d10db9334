"""Builders of records, record files and tiny models, so that a test states only the values that it is about."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from magicrl.algorithms.advantages import score_group
from magicrl.evaluation.samples import SampleRow
from magicrl.records import (
    Completion,
    FinishReason,
    Problem,
    RolloutGroup,
    RolloutRequest,
    SamplingParams,
    ScoredGroup,
    TrainSample,
    Verdict,
    frozen_floats,
    frozen_tokens,
)

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""Configuration of a tiny transformer, with transformers' names."""

Tokens = Sequence[int] | NDArray[Any]


def problem(id: str = "p", prompt: str = "", reference: str = "1", **further: Any) -> Problem:
    """Return a problem for the exact verifier."""
    return Problem(id=id, prompt=prompt, references=(reference,), **{"verifier": "exact", "source": "test", **further})


def request(
    draw: int,
    prompt: Tokens,
    *,
    size: int = 4,
    temperature: float = 1.0,
    limit: int = 8,
    seed: int = 0,
    asked: Problem | None = None,
    **further: Any,
) -> RolloutRequest:
    """Return a group of ``size`` responses of at most ``limit`` tokens to ``prompt``'s tokens."""
    return RolloutRequest(
        draw=draw,
        problem=asked or problem(f"p{draw}"),
        prompt_tokens=frozen_tokens(prompt),
        group_size=size,
        sampling=SamplingParams(temperature=temperature, max_tokens=limit, seed=seed),
        **further,
    )


def completion(tokens: Tokens, **further: Any) -> Completion:
    """Return a response that ended, sampled by version 0 of the weights with log-probs of -1."""
    known = frozen_tokens(tokens)
    given: dict[str, Any] = {
        "text": "",
        "sampler_logprobs": frozen_floats(np.full(len(known), -1.0)),
        "sampler_entropies": None,
        "finish_reason": FinishReason.STOP,
        "policy_version": 0,
    }
    return Completion(tokens=known, **given | further)


def scored_group(
    *verdicts: Verdict, truncated: int = 0, draw: int = 0, lengths: Sequence[int] | None = None
) -> ScoredGroup:
    """Return a group with one response per verdict, of one token or ``lengths``. The last ``truncated`` of them are
    truncated.
    """
    ends = [FinishReason.STOP] * (len(verdicts) - truncated) + [FinishReason.LENGTH] * truncated
    tokens = [[2] * length for length in lengths or [1] * len(verdicts)]
    completions = tuple(completion(own, finish_reason=end) for own, end in zip(tokens, ends, strict=True))
    return score_group(RolloutGroup(request=request(draw, [1], size=len(ends)), completions=completions), verdicts)


def train_sample(prompt: Tokens, tokens: Tokens, **further: Any) -> TrainSample:
    """Return the first response of the first group, without an advantage, sampled with log-probs of 0."""
    known = frozen_tokens(tokens)
    given: dict[str, Any] = {
        "advantage": 0.0,
        "group_index": 0,
        "sample_index": 0,
        "sampler_logprobs": frozen_floats(np.zeros(len(known))),
        "policy_version": 0,
    }
    return TrainSample(prompt_tokens=frozen_tokens(prompt), tokens=known, **given | further)


def sample_row(problem: str = "p", sample: int = 0, **further: Any) -> SampleRow:
    """Return a wrong answer of 30 tokens that ended by itself."""
    text = dict.fromkeys(("status", "decided_by", "reason", "text"), "")
    given: dict[str, Any] = {"outcome": "wrong", "finish_reason": "stop", "tokens": 30, "seconds": 0.0}
    unknown: dict[str, Any] = dict.fromkeys(("extracted", "entropy", "logprob"))
    return SampleRow(problem=problem, sample=sample, **text | given | unknown | further)


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    """Write JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
