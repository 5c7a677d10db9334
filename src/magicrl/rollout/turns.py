"""A response that an environment took part in, piece by piece (turn, observation, turn): pure functions of records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from magicrl.records import (
    Completion,
    Episode,
    FinishReason,
    TokenArray,
    VersionSpans,
    frozen_floats,
    frozen_tokens,
    joined_experts,
)
from magicrl.rollout.requests import joined_spans


def with_turn(so_far: Completion | None, turn: Completion) -> Completion:
    """The response with one more turn of the model, which ended it for now."""
    if so_far is None:
        return replace(turn, episode=Episode(observed=(), answer=turn.text))
    assert so_far.episode is not None, "what comes before a turn ends in an observation"
    both, oldest = (so_far, turn), min(so_far.policy_version, turn.policy_version)
    known = all(c.sampler_entropies is not None for c in both)
    spans = joined_spans(_spans(so_far), _spans(turn))
    return replace(
        turn,
        tokens=frozen_tokens(np.concatenate([c.tokens for c in both])),
        sampler_logprobs=frozen_floats(_logprobs(both)),
        sampler_entropies=frozen_floats(np.concatenate([c.sampler_entropies for c in both])) if known else None,  # type: ignore[arg-type]
        policy_version=oldest,
        seconds=so_far.seconds + turn.seconds,
        version_spans=spans if any(version != oldest for version, _ in spans) else (),
        # the turn's prompt is all that came before it, computed again
        experts=joined_experts(so_far.experts, turn.experts),
        episode=replace(so_far.episode, answer=turn.text),
    )


def with_observation(response: Completion, tokens: TokenArray, *, cut: bool) -> Completion:
    """The response with what an environment answered; it counts as of the weights that sampled the turn before it."""
    episode, count = response.episode, len(tokens)
    assert episode is not None, "only an episode has observations"
    zeros = np.zeros(count, dtype=np.float32)
    spans, told = response.version_spans, len(response.sampler_logprobs) == len(response)
    return replace(
        response,
        tokens=frozen_tokens(np.concatenate([response.tokens, tokens])),
        sampler_logprobs=frozen_floats(np.concatenate([response.sampler_logprobs, zeros if told else zeros[:0]])),
        sampler_entropies=None
        if response.sampler_entropies is None
        else frozen_floats(np.concatenate([response.sampler_entropies, zeros])),
        finish_reason=FinishReason.ABORTED,
        version_spans=joined_spans(spans, ((spans[-1][0], count),)) if spans else (),
        episode=replace(
            episode, observed=(*episode.observed, (len(response), count)), answer="", cut=episode.cut + cut
        ),
    )


def parted(begun: Completion) -> tuple[Completion | None, Completion | None]:
    """An interrupted response up to the end of its last observation, and the beginning of the turn after it."""
    if begun.episode is None or not begun.episode.observed:
        return None, (replace(begun, episode=None) if len(begun) else None)
    end = sum(begun.episode.observed[-1])
    return _cut(begun, 0, end), (replace(_cut(begun, end, len(begun)), episode=None) if end < len(begun) else None)


def turns_of(so_far: Completion) -> list[tuple[TokenArray, TokenArray]]:
    """Tokens of each turn and of the observation that answered it."""
    assert so_far.episode is not None, "only an episode has turns"
    found: list[tuple[TokenArray, TokenArray]] = []
    start = 0
    for first, count in so_far.episode.observed:
        found.append((so_far.tokens[start:first], so_far.tokens[first : first + count]))
        start = first + count
    return found


def _spans(completion: Completion) -> VersionSpans:
    return completion.version_spans or ((completion.policy_version, len(completion)),)


def _logprobs(parts: Sequence[Completion]) -> NDArray[Any]:
    """End to end; none where an engine does not know those of one of the parts."""
    known = all(len(c.sampler_logprobs) == len(c) for c in parts)
    return np.concatenate([c.sampler_logprobs for c in parts]) if known else np.zeros(0, dtype=np.float32)


def _cut(completion: Completion, first: int, end: int) -> Completion:
    versions = completion.token_versions[first:end]
    starts = np.flatnonzero(np.diff(versions, prepend=versions[:1] - 1))
    spans = tuple((int(versions[a]), int(b - a)) for a, b in zip(starts, [*starts[1:], len(versions)], strict=True))
    entropies = completion.sampler_entropies
    return replace(
        completion,
        tokens=frozen_tokens(completion.tokens[first:end]),
        sampler_logprobs=frozen_floats(completion.sampler_logprobs[first:end]),
        sampler_entropies=None if entropies is None else frozen_floats(entropies[first:end]),
        version_spans=spans if completion.version_spans else (),
    )
