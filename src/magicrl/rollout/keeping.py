"""Completions as a few tensors and a JSON list: how a checkpoint holds what was generated and not yet trained on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from magicrl.records import Completion, FinishReason, RolloutRequest, frozen_floats, frozen_tokens


def pack_completions(prefix: str, completions: Sequence[Completion]) -> dict[str, Any]:
    """``prefix/tokens``, ``prefix/logprobs`` and ``prefix/entropies`` end to end, ``prefix/rows`` with the rest."""

    def joined(arrays: Sequence[Any], dtype: Any) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype))

    def entropies(c: Completion) -> Any:
        return np.full(len(c), np.nan) if c.sampler_entropies is None else c.sampler_entropies

    rows = [
        {
            "tokens": len(c),
            "text": c.text,
            "entropies": c.sampler_entropies is not None,
            "finish_reason": c.finish_reason.value,
            "policy_version": c.policy_version,
            "seconds": c.seconds,
            "version_spans": [list(span) for span in c.version_spans],
        }
        for c in completions
    ]
    return {
        f"{prefix}/tokens": joined([c.tokens for c in completions], np.int32),
        f"{prefix}/logprobs": joined([c.sampler_logprobs for c in completions], np.float32),
        f"{prefix}/entropies": joined([entropies(c) for c in completions], np.float32),
        f"{prefix}/rows": rows,
    }


def unpack_completions(prefix: str, state: Mapping[str, Any]) -> list[Completion]:
    """Inverse of ``pack_completions``."""
    rows = state[f"{prefix}/rows"]
    if not rows:
        return []  # np.split would make one empty array of none
    cuts = np.cumsum([row["tokens"] for row in rows])[:-1]
    arrays = [np.split(state[f"{prefix}/{name}"].numpy(), cuts) for name in ("tokens", "logprobs", "entropies")]
    return [
        Completion(
            tokens=frozen_tokens(tokens),
            text=row["text"],
            sampler_logprobs=frozen_floats(logprobs),
            sampler_entropies=frozen_floats(entropies) if row["entropies"] else None,
            finish_reason=FinishReason(row["finish_reason"]),
            policy_version=int(row["policy_version"]),
            seconds=float(row["seconds"]),
            version_spans=tuple((int(version), int(count)) for version, count in row["version_spans"]),
        )
        for row, tokens, logprobs, entropies in zip(rows, *arrays, strict=True)
    ]


def pack_begun(requests: Iterable[RolloutRequest]) -> dict[str, Any]:
    """What there is of unfinished requests (``begun``), by draw and sample index; empty where there is nothing."""
    held = [(request.draw, index, completion) for request in requests for index, completion in request.begun]
    if not held:
        return {}
    places = [[draw, index] for draw, index, _ in held]
    return {"places": places, **pack_completions("begun", [completion for *_, completion in held])}


def with_begun(snapshot: Mapping[str, Any], requests: Iterable[RolloutRequest]) -> list[RolloutRequest]:
    """Inverse of ``pack_begun``: ``requests`` with what the snapshot holds of them, by draw.

    Of another engine's snapshot (a run may go on with or without ``[cluster]``) it takes nothing.
    """
    begun: dict[int, list[tuple[int, Completion]]] = {}
    if "places" in snapshot:
        for (draw, index), completion in zip(snapshot["places"], unpack_completions("begun", snapshot), strict=True):
            begun.setdefault(int(draw), []).append((int(index), completion))
    return [replace(request, begun=tuple(begun.get(request.draw, ()))) for request in requests]
