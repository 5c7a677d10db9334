"""The mutable state of the in-process engine: its rows in flight, and its checkpoint.

Active rows are a prefix of the cache, by descending length of their responses, so that each block of the cache is read
for a prefix of the rows. Rows move when others end. The output buffers of a sample (its *slot*) stay in their place.
Keys and values cannot be computed again, since the weights that made them are gone. A snapshot therefore holds them, so
that a run that was killed with responses in flight continues bit for bit.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from magicrl.models.kv_cache import CacheShape, SlotCache
from magicrl.models.recurrent import RecurrentState
from magicrl.records import (
    TOKEN_FILTERS,
    Completion,
    ExpertArray,
    FinishReason,
    RolloutRequest,
    VersionSpans,
    frozen_floats,
    frozen_tokens,
    joined_experts,
)
from magicrl.rollout.requests import GroupProgress, OpenGroups, pack_completions, unpack_completions
from magicrl.rollout.sampling import uniforms

_UNIFORMS_AHEAD = 64  # random numbers of a row that are computed at once

# one record per row: moving a row is one assignment, and each field is a column for the step's arrays
_ROW = np.dtype(
    [
        ("slot", np.int64),
        ("owner", np.int64),  # cache slot of its prompt
        ("prompt", np.int64),  # tokens of its prompt
        ("offset", np.int64),  # response tokens at the end of the prompt, from an episode's earlier turns
        ("count", np.int64),  # response tokens so far; all but the last are in the cache
        ("limit", np.int64),  # T
        ("last", np.int64),  # the token to feed next
        ("known", np.int64),  # tokens sampled before an interruption, in the buffers from the start
        ("temperature", np.float64),
        *((name, type(off)) for name, off in TOKEN_FILTERS.items()),
        ("seed", np.uint64),
        ("draw", np.uint64),
        ("sample", np.uint64),
    ]
)


# a restored row gets a slot of the new table
_KEPT_FIELDS = tuple(name for name in _ROW.names or () if name != "slot")


class RowTable:
    """The rows in flight, ``0 .. active-1``, and their outputs."""

    def __init__(self, rows: int, max_tokens: int) -> None:
        self.active = 0
        self._rows = np.zeros(rows, dtype=_ROW)
        self._groups: list[GroupProgress | None] = [None] * rows  # by slot
        self._free = list(range(rows - 1, -1, -1))
        self._tokens = np.zeros((rows, max_tokens), dtype=np.int32)
        self._logprobs = np.zeros((rows, max_tokens), dtype=np.float32)
        self._entropies = np.zeros((rows, max_tokens), dtype=np.float32)
        self._buffers = {"tokens": self._tokens, "logprobs": self._logprobs, "entropies": self._entropies}
        self._experts: ExpertArray | None = None  # ``[slots, tokens, routers, k]`` once some were recorded
        self._versions: list[list[tuple[int, int]]] = [[] for _ in range(rows)]  # (first token, version), by slot
        self._uniforms = np.zeros((rows, _UNIFORMS_AHEAD), dtype=np.float64)

    def column(self, name: str, rows: slice | None = None) -> NDArray[Any]:
        """Return one field of the active rows (or of ``rows``)."""
        return self._rows[name][rows if rows is not None else slice(0, self.active)]

    def start(self, group: GroupProgress, samples: int, version: int) -> None:
        """Give the next ``samples`` samples of ``group`` the next rows. Their prompt is already in the cache.

        The weights that computed the prompt sample the first token, those of ``version`` the further ones.
        """
        request = group.request
        for _ in range(samples):
            sample = group.to_start[group.started]
            slot = self._free.pop()
            self._groups[slot] = group
            row = self._rows[self.active : self.active + 1]
            row["slot"] = slot
            row["owner"] = group.place
            row["prompt"] = len(request.prompt_tokens)
            row["offset"] = request.offset
            row["count"] = 0
            row["limit"] = request.sampling.max_tokens
            row["known"] = 0
            for name in ("temperature", *TOKEN_FILTERS):
                row[name] = getattr(request.sampling, name)
            row["seed"] = request.sampling.seed
            row["draw"] = request.draw
            row["sample"] = sample
            self._versions[slot] = [(0, group.version), *([(1, version)] if version != group.version else [])]
            if sample in group.partial:
                partial = group.partial[sample]
                known = len(partial)
                self._tokens[slot, :known] = partial.tokens
                self._logprobs[slot, :known] = partial.sampler_logprobs
                entropies = partial.sampler_entropies
                self._entropies[slot, :known] = np.nan if entropies is None else entropies
                starts = np.cumsum([0, *(count for _, count in partial.version_spans)])[:-1].tolist()
                spans = zip(starts, (v for v, _ in partial.version_spans), strict=True)
                begun = spans if partial.version_spans else [(0, partial.policy_version)]
                self._versions[slot] = [*begun, (known, version)]
                row["known"] = known
            group.started += 1
            self.active += 1

    def updated(self, version: int) -> None:
        """Record that ``version`` samples the following tokens."""
        for slot, count, known in zip(*(self.column(n).tolist() for n in ("slot", "count", "known")), strict=True):
            # known tokens keep the version that sampled them
            self._versions[slot].append((max(count, known), version))

    def given(self, rows: slice, values: tuple[NDArray[Any], NDArray[Any], NDArray[Any]]) -> None:
        """Overwrite sampled tokens, log-probs and entropies of ``rows`` where the next token is known already."""
        table = self._rows[rows]
        index = np.flatnonzero(table["count"] < table["known"])
        if len(index):
            where = (table["slot"][index], table["count"][index])
            for value, buffer in zip(values, self._buffers.values(), strict=True):
                value[index] = buffer[where]

    def next_uniforms(self, rows: slice) -> NDArray[np.float64]:
        """Return the random number of each row's next token."""
        table = self._rows[rows]
        offset = table["count"] % _UNIFORMS_AHEAD
        due = table[offset == 0]
        if len(due):
            self._draw_uniforms(due)
        return self._uniforms[table["slot"], offset]

    def _draw_uniforms(self, due: NDArray[Any]) -> None:
        """Draw the random numbers of these rows for the 64 positions around their next token."""
        first = due["count"] // _UNIFORMS_AHEAD * _UNIFORMS_AHEAD
        seed, draw, sample = (due[name][:, None] for name in ("seed", "draw", "sample"))
        positions = (due["offset"] + first)[:, None] + np.arange(_UNIFORMS_AHEAD)
        self._uniforms[due["slot"]] = uniforms(seed, draw, sample, positions)

    def record(
        self, rows: slice, tokens: NDArray[Any], logprobs: NDArray[Any], entropies: NDArray[Any]
    ) -> NDArray[np.bool_]:
        """Append one token to each of ``rows`` and return True where a row reached its limit."""
        table = self._rows[rows]
        where = (table["slot"], table["count"])
        for buffer, values in zip(self._buffers.values(), (tokens, logprobs, entropies), strict=True):
            buffer[where] = values
        table["count"] += 1
        table["last"] = tokens
        return table["count"] >= table["limit"]

    def record_experts(self, experts: ExpertArray) -> None:
        """Record the experts ``[rows, routers, k]`` of each active row's last token, which the model has just read."""
        if self._experts is None:
            self._experts = np.zeros((*self._tokens.shape, *experts.shape[1:]), dtype=experts.dtype)
        self._experts[self.column("slot"), self.column("count") - 1] = experts

    def _experts_of(self, slot: int, row: int) -> ExpertArray | None:
        """Return the experts of prompt and response; known tokens keep those of the pass that sampled them."""
        group, read = self._groups[slot], int(self._rows["count"][row]) - 1
        if group is None or group.experts is None:
            return None
        own = [group.experts] if self._experts is None else [group.experts, self._experts[slot, :read]]
        begun = group.partial.get(int(self._rows["sample"][row]))
        return joined_experts(None if begun is None else begun.experts, np.concatenate(own))

    def output(
        self, row: int, reason: FinishReason, decode: Callable[[Sequence[int]], str]
    ) -> tuple[GroupProgress, int, Completion]:
        """Return the group, the sample index and the response so far of ``row``."""
        slot = int(self._rows["slot"][row])
        count = max(int(self._rows["count"][row]), int(self._rows["known"][row]))
        group, tokens, entropies = self._groups[slot], self._tokens[slot, :count], self._entropies[slot, :count]
        assert group is not None
        spans = _spans(self._versions[slot], count)
        # a response counts as old as its oldest part, including the keys and values of the prompt
        oldest = min([group.version, *(version for version, _ in spans)])
        completion = Completion(
            tokens=frozen_tokens(tokens),
            text=decode(tokens.tolist()),
            sampler_logprobs=frozen_floats(self._logprobs[slot, :count]),
            # unknown where another engine sampled a token
            sampler_entropies=None if np.isnan(entropies).any() else frozen_floats(entropies),
            finish_reason=reason,
            policy_version=oldest,
            seconds=time.perf_counter() - group.began,
            version_spans=spans if any(version != oldest for version, _ in spans) else (),
            experts=self._experts_of(slot, row),
        )
        return group, int(self._rows["sample"][row]), completion

    def moved_prompt(self, source: int, target: int) -> None:
        """Record that the prompt in cache slot ``source`` is in ``target`` from now on."""
        owners = self.column("owner")
        owners[owners == source] = target

    def state(self) -> dict[str, Any]:
        """Return the rows in flight as arrays and JSON values by name."""
        table = self._rows[: self.active]
        width = int(np.maximum(table["count"], table["known"]).max(initial=0))
        slots = table["slot"]
        # bit patterns in one dtype: 64-bit seeds and temperatures come back exactly
        fields = {name: table[name].view(np.int64) for name in _KEPT_FIELDS}
        groups = [self._groups[slot] for slot in slots.tolist()]
        return {
            **{f"field/{name}": np.ascontiguousarray(values) for name, values in fields.items()},
            **{name: buffer[slots, :width] for name, buffer in self._buffers.items()},
            **({} if self._experts is None else {"experts": self._experts[slots, :width]}),
            "orders": [group.order for group in groups if group is not None],
            "versions": [[list(start) for start in self._versions[slot]] for slot in slots.tolist()],
        }

    def restore(self, state: Mapping[str, Any], group_of: Callable[[int], GroupProgress]) -> None:
        """Restore a ``state`` in a table without rows."""
        assert self.active == 0, "rows are in flight"
        for order, versions in zip(state["orders"], state["versions"], strict=True):
            slot = self._free.pop()
            self._groups[slot] = group_of(order)
            self._versions[slot] = [(int(first), int(version)) for first, version in versions]
            self._rows["slot"][self.active] = slot
            self.active += 1
        table = self._rows[: self.active]
        for name, off in TOKEN_FILTERS.items():
            table[name] = off
        for name in _KEPT_FIELDS:
            if f"field/{name}" in state:  # the state of an earlier version has no offset and no filters
                table[name] = state[f"field/{name}"].view(table[name].dtype)
        slots, width = table["slot"], state["tokens"].shape[1]
        for name, buffer in self._buffers.items():
            buffer[slots, :width] = state[name]
        if "experts" in state:
            kept: ExpertArray = state["experts"]
            self._experts = experts = np.zeros((*self._tokens.shape, *kept.shape[2:]), dtype=kept.dtype)
            experts[slots, :width] = kept
        # these rows are inside a block of 64 positions, where `next_uniforms` draws nothing
        self._draw_uniforms(table)

    def remove(self, rows: Sequence[int]) -> list[tuple[int, int, int]]:
        """Drop ``rows`` and close the gaps.

        A gap is filled with the last row of the same count, the place of that row with the last row of the next count,
        and so on. Few rows move, and rows stay by descending ``count``.

        Returns:
            ``(source, target, tokens in the cache)`` of each row that moves, by its row before this call and after it.
        """
        before = list(range(self.active))
        for row in sorted(rows, reverse=True):  # from the back, so that no row that moves is one to be dropped
            slot = int(self._rows["slot"][row])
            self._groups[slot] = None
            self._free.append(slot)
            # searchsorted wants ascending values
            falling = -self.column("count")
            gap = row
            while gap < self.active - 1:
                source = int(np.searchsorted(falling, falling[gap + 1], side="right")) - 1
                self._rows[gap] = self._rows[source]
                before[gap] = before[source]
                gap = source
            self.active -= 1
        counts = self.column("count")
        return [(before[row], row, int(counts[row]) - 1) for row in range(self.active) if before[row] != row]


def _spans(starts: Sequence[tuple[int, int]], count: int) -> VersionSpans:
    """Turn ``(first token, version)`` pairs into runs. Of several pairs with one token the last version sampled it."""
    runs: list[tuple[int, int]] = []
    ends = [*(first for first, _ in starts[1:]), count]
    for (first, version), end in zip(starts, ends, strict=True):
        tokens = min(end, count) - first
        if tokens > 0 and runs and runs[-1][0] == version:
            runs[-1] = (version, runs[-1][1] + tokens)
        elif tokens > 0:
            runs.append((version, tokens))
    return tuple(runs)


@dataclass(kw_only=True, slots=True)
class Work:
    """The mutable state of an engine, without its weights."""

    groups: OpenGroups = field(default_factory=OpenGroups)  # groups with a sample that was not yielded
    queue: deque[GroupProgress] = field(default_factory=deque[GroupProgress])  # groups with samples to start
    kept: Tensor | None = None  # logits after the prompt of the queue's first group, if it has started in part
    prompts: list[GroupProgress] = field(default_factory=list[GroupProgress])  # groups by cache slot
    cache: SlotCache | None = None  # None before the first generation
    rows: RowTable = field(default_factory=lambda: RowTable(0, 0))  # the sequences in flight
    sampled: int = 0  # tokens so far


def pack_work(work: Work) -> dict[str, Any]:
    """Return the state as tensors and JSON values by name."""
    # another process has another clock, so ages are stored instead of times
    now, unyielded = time.perf_counter(), work.groups.unyielded()
    groups = [
        {
            "order": group.order,
            "draw": group.request.draw,
            "offset": group.request.offset,
            "first": group.request.indices[0],
            "to_start": group.to_start,
            "started": group.started,
            "version": group.version,
            "place": group.place,
            "age": now - group.began,
        }
        for group in unyielded
    ]
    held = [
        (group.order, index, completion)
        for group in unyielded
        for index, completion in (*group.partial.items(), *group.done.items())
    ]
    state: dict[str, Any] = {
        "orders": work.groups.issued,
        "groups": groups,
        "queue": [group.order for group in work.queue],
        "ended": [group.order for group, index in work.groups.ready if group.completed_by(index)],
        "prompts": [group.order for group in work.prompts],
        "sampled": work.sampled,
        "held": [[order, index] for order, index, _ in held],
        **pack_completions("completions", [completion for *_, completion in held]),
        "geometry": None,
    }
    if work.kept is not None:
        state["kept"] = work.kept
    experts = [group.experts for group in work.prompts if group.experts is not None]
    if experts:
        state["experts"] = torch.from_numpy(np.concatenate(experts))
    if work.cache is not None:
        cache = work.cache
        state["geometry"] = [cache.rows, cache.prompts.capacity, cache.responses.capacity]
        rows = work.rows.state()
        state |= {f"rows/{k}": torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in rows.items()}
        state |= {f"cache/{name}": torch.stack(layers) for name, layers in _filled(work, cache)}
    return state


def unpack_work(
    state: Mapping[str, Any],
    requests: Iterable[RolloutRequest],
    shape: CacheShape,
    device: torch.device,
    *,
    whole: bool,
    ahead: int = 0,
) -> Work:
    """Restore what `pack_work` packed, for the ``requests`` in flight; ``whole`` and ``ahead`` as in `SlotCache`."""
    # by offset too, since the turns of an episode are requests of one draw
    asked = {(request.draw, request.offset, request.indices[0]): request for request in requests}
    work, now, groups = Work(sampled=int(state["sampled"])), time.perf_counter(), dict[int, GroupProgress]()
    for row in state["groups"]:
        key = (int(row["draw"]), int(row.get("offset", 0)), int(row.get("first", 0)))
        group = GroupProgress(order=int(row["order"]), request=asked[key])
        group.to_start, group.started = [int(i) for i in row["to_start"]], int(row["started"])
        group.version, group.place, group.began = int(row["version"]), int(row["place"]), now - float(row["age"])
        groups[group.order] = group
    for (order, index), completion in zip(state["held"], unpack_completions("completions", state), strict=True):
        groups[order].know(int(index), completion)
    work.groups.open |= groups
    work.groups.issued = int(state["orders"])
    for order in state["ended"]:
        # complete, but not yielded before the checkpoint
        work.groups.emit(groups[order], next(reversed(groups[order].done)))
    work.queue.extend(groups[order] for order in state["queue"])
    work.prompts.extend(groups[order] for order in state["prompts"])
    if "kept" in state:
        work.kept = state["kept"].to(device)
    if "experts" in state:
        ends = np.cumsum([len(group.request.prompt_tokens) for group in work.prompts])[:-1]
        for group, experts in zip(work.prompts, np.split(state["experts"].numpy(), ends), strict=True):
            group.experts = experts
    if state["geometry"] is not None:
        rows, prompt, response = (int(n) for n in state["geometry"])
        work.cache = cache = SlotCache(shape, rows, prompt, response, device, whole=whole, ahead=ahead)
        work.rows = RowTable(rows, response)
        arrays = {k.removeprefix("rows/"): v for k, v in state.items() if k.startswith("rows/")}
        work.rows.restore({k: v.numpy() if isinstance(v, Tensor) else v for k, v in arrays.items()}, groups.__getitem__)
        for name, layers in _filled(work, cache):
            for layer, kept in zip(layers, state[f"cache/{name}"], strict=True):
                layer.copy_(kept)
    return work


def _filled(work: Work, cache: SlotCache) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield name and views in each layer of the parts of the cache that are in use."""
    prompts = max((len(group.request.prompt_tokens) for group in work.prompts), default=0)
    # the last token of a row is not in the cache
    responses = int(work.rows.column("count").max(initial=1)) - 1 + cache.ahead
    for name, store, places, tokens in (
        ("prompts", cache.prompts, len(work.prompts), prompts),
        ("responses", cache.responses, work.rows.active, responses),
    ):
        for block, used in store.spans(tokens):
            for kind, stored in (("keys", store.keys), ("values", store.values)):
                for group, layers in enumerate(store.layers):
                    # layers of one shape share a tensor
                    part = f"{name}/{kind}/{block}" + (f"/{group}" if group else "")
                    yield part, [stored[layer][block][:places, :, :used] for layer in layers]
        for kind in RecurrentState._fields if store.states else ():
            yield f"{name}/{kind}", [getattr(state, kind)[:places] for state in store.states.values()]
