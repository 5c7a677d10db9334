"""What the in-process engine has in hand: queue, groups, rows and cache, and all of it in a checkpoint.

Keys and values cannot be computed again, since the weights that made them are gone; so a snapshot holds them, as far
as they are filled. Then a run that was killed with responses in flight goes on with the very same numbers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from magicrl.models.slot_cache import BlockStore, CacheShape, SlotCache
from magicrl.records import FinishReason, RolloutRequest
from magicrl.rollout.keeping import pack_completions, unpack_completions
from magicrl.rollout.rows import GroupProgress, RowTable


@dataclass(kw_only=True, slots=True)
class Work:
    """The mutable state of an engine beside its weights.

    Attributes:
        queue: groups with samples that have not started.
        open: every group that has not been yielded, by issue order.
        ended: issue orders of those that are complete, in the order in which they ended.
        kept: logits after the prompt of the queue's first group, if it has started in part.
        prompts: groups by cache slot.
        cache: None before the first generation.
        rows: the sequences in flight.
        sampled: tokens so far.
    """

    queue: deque[GroupProgress] = field(default_factory=deque[GroupProgress])
    open: dict[int, GroupProgress] = field(default_factory=dict[int, GroupProgress])
    ended: deque[int] = field(default_factory=deque[int])
    kept: Tensor | None = None
    prompts: list[GroupProgress] = field(default_factory=list[GroupProgress])
    cache: SlotCache | None = None
    rows: RowTable = field(default_factory=lambda: RowTable(0, 0))
    sampled: int = 0


def pack_work(work: Work) -> dict[str, Any]:
    """Tensors and JSON values by name."""
    now = time.perf_counter()
    groups = [
        {
            "order": group.order,
            "draw": group.request.draw,
            "to_start": group.to_start,
            "started": group.started,
            "version": group.version,
            "place": group.place,
            "age": now - group.began,
        }
        for group in work.open.values()
    ]
    held = [
        (group.order, index, completion)
        for group in work.open.values()
        for index, completion in (*group.partial.items(), *group.done.items())
    ]
    state: dict[str, Any] = {
        "groups": groups,
        "queue": [group.order for group in work.queue],
        "ended": list(work.ended),
        "prompts": [group.order for group in work.prompts],
        "sampled": work.sampled,
        "held": [[order, index] for order, index, _ in held],
        **pack_completions("completions", [completion for *_, completion in held]),
        "geometry": None,
    }
    if work.kept is not None:
        state["kept"] = work.kept
    if work.cache is not None:
        cache = work.cache
        state["geometry"] = [cache.rows, cache.prompts.capacity, cache.responses.capacity]
        rows = work.rows.state()
        state |= {f"rows/{k}": torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in rows.items()}
        for name, (store, places, tokens) in _filled(work, cache).items():
            for block, used in store.spans(tokens):
                for kind, layers in (("keys", store.keys), ("values", store.values)):
                    kept = [layer[block][:places, :, :used] for layer in layers]
                    state[f"cache/{name}/{kind}/{block}"] = torch.stack(kept)
    return state


def unpack_work(
    state: Mapping[str, Any],
    requests: Mapping[int, RolloutRequest],
    shape: CacheShape,
    device: torch.device,
    *,
    whole: bool,
) -> Work:
    """Inverse of ``pack_work``.

    Args:
        state: what it gave.
        requests: by draw; those in flight must be there.
        shape: of the engine's cache.
        device: where the cache is to lie.
        whole: as of `SlotCache`; blocks are the same either way.
    """
    work, now = Work(sampled=int(state["sampled"])), time.perf_counter()
    for row in state["groups"]:
        group = GroupProgress(order=int(row["order"]), request=requests[int(row["draw"])])
        group.to_start, group.started = [int(i) for i in row["to_start"]], int(row["started"])
        group.version, group.place, group.began = int(row["version"]), int(row["place"]), now - float(row["age"])
        work.open[group.order] = group
    for (order, index), completion in zip(state["held"], unpack_completions("completions", state), strict=True):
        group = work.open[order]
        whole = completion.finish_reason is not FinishReason.ABORTED
        (group.done if whole else group.partial)[int(index)] = completion
    work.queue.extend(work.open[order] for order in state["queue"])
    work.ended.extend(state["ended"])
    work.prompts.extend(work.open[order] for order in state["prompts"])
    if "kept" in state:
        work.kept = state["kept"].to(device)
    if state["geometry"] is not None:
        rows, prompt, response = (int(n) for n in state["geometry"])
        work.cache = cache = SlotCache(shape, rows, prompt, response, device, whole=whole)
        work.rows = RowTable(rows, response)
        arrays = {k.removeprefix("rows/"): v for k, v in state.items() if k.startswith("rows/")}
        work.rows.restore(
            {k: v.numpy() if isinstance(v, Tensor) else v for k, v in arrays.items()}, work.open.__getitem__
        )
        for name, (store, places, tokens) in _filled(work, cache).items():
            for block, used in store.spans(tokens):
                for kind, layers in (("keys", store.keys), ("values", store.values)):
                    for layer, kept in zip(layers, state[f"cache/{name}/{kind}/{block}"], strict=True):
                        layer[block][:places, :, :used] = kept.to(device)
    return work


def _filled(work: Work, cache: SlotCache) -> dict[str, tuple[BlockStore, int, int]]:
    """Each store with the places in use and the most tokens that one of them holds."""
    prompts = max((len(group.request.prompt_tokens) for group in work.prompts), default=0)
    responses = int(work.rows.column("count").max(initial=1)) - 1
    return {
        "prompts": (cache.prompts, len(work.prompts), prompts),
        "responses": (cache.responses, work.rows.active, responses),
    }
