"""Book-keeping of the sequences in flight: which sample sits in which row, and what it has produced.

Active rows are a prefix of the cache, by descending length of their responses, so that each block of the cache is read
for a prefix of the rows. Rows move when others end; a sample's output buffers, its *slot*, do not.
Everything here is numpy, vectorised over rows, and knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from magicrl.records import Completion, FinishReason, RolloutRequest, VersionSpans
from magicrl.rollout.randomness import uniforms

_UNIFORMS_AHEAD = 64  # random numbers of a row that are computed at once

_ROW = np.dtype(
    [
        ("slot", np.int64),
        ("owner", np.int64),  # cache slot of its prompt
        ("prompt", np.int64),  # tokens of its prompt
        ("count", np.int64),  # response tokens so far; all but the last are in the cache
        ("limit", np.int64),  # T
        ("last", np.int64),  # the token to feed next
        ("known", np.int64),  # tokens that are given: sampled before an interruption, in the buffers from the start
        ("temperature", np.float64),
        ("seed", np.uint64),
        ("draw", np.uint64),
        ("sample", np.uint64),
    ]
)


_KEPT_FIELDS = tuple(name for name in _ROW.names or () if name != "slot")


@dataclass(kw_only=True, slots=True)
class GroupProgress:
    """A submitted request and its completions so far.

    Attributes:
        order: issue order, unique within the engine.
        request: what was asked.
        to_start: sample indices that need a row, ascending.
        started: how many of them have a row or have had one.
        done: finished completions by sample index.
        partial: what there is already of samples that are to be gone on with, by sample index.
        began: clock at the start of its prompt.
        version: policy version at that time.
        place: cache slot of its prompt; -1 before it has started.
    """

    order: int
    request: RolloutRequest
    to_start: list[int] = field(init=False)
    started: int = 0
    done: dict[int, Completion] = field(default_factory=dict[int, Completion])
    partial: dict[int, Completion] = field(default_factory=dict[int, Completion])
    began: float = 0.0
    version: int = -1
    place: int = -1

    def __post_init__(self) -> None:
        for index, completion in self.request.begun:
            whole = completion.finish_reason is not FinishReason.ABORTED
            (self.done if whole else self.partial)[index] = completion
        self.to_start = [index for index in self.request.indices if index not in self.done]

    @property
    def waiting(self) -> int:
        """Samples that have not started."""
        return len(self.to_start) - self.started

    @property
    def complete(self) -> bool:
        return len(self.done) == len(self.request.indices)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowOutput:
    """A row's response so far: ``[T]`` views of the buffers.

    Attributes:
        group: whose it is.
        sample: its sample index.
        tokens: sampled or given.
        logprobs: of the weights that sampled each.
        entropies: likewise.
        spans: which version sampled which tokens.
    """

    group: GroupProgress
    sample: int
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    entropies: NDArray[np.float32]
    spans: VersionSpans


class RowTable:
    """The rows in flight, ``0 .. active-1``, and the outputs of each."""

    def __init__(self, rows: int, max_tokens: int) -> None:
        self.active = 0
        self._rows = np.zeros(rows, dtype=_ROW)
        self._groups: list[GroupProgress | None] = [None] * rows  # by slot
        self._free = list(range(rows - 1, -1, -1))
        self._tokens = np.zeros((rows, max_tokens), dtype=np.int32)
        self._logprobs = np.zeros((rows, max_tokens), dtype=np.float32)
        self._entropies = np.zeros((rows, max_tokens), dtype=np.float32)
        self._versions: list[list[tuple[int, int]]] = [[] for _ in range(rows)]  # (first token, version), by slot
        self._uniforms = np.zeros((rows, _UNIFORMS_AHEAD), dtype=np.float64)

    def column(self, name: str, rows: slice | None = None) -> NDArray[Any]:
        """One field of the active rows (or of ``rows``)."""
        return self._rows[name][rows if rows is not None else slice(0, self.active)]

    def start(self, group: GroupProgress, samples: int, version: int) -> None:
        """Give the next ``samples`` samples of ``group`` the next rows. Their prompt is in the cache already.

        Their first token comes from the weights that computed the prompt, further ones from ``version``.
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
            row["count"] = 0
            row["limit"] = request.sampling.max_tokens
            row["known"] = 0
            row["temperature"] = request.sampling.temperature
            row["seed"] = request.sampling.seed
            row["draw"] = request.draw
            row["sample"] = sample
            self._versions[slot] = [(0, group.version), *([(1, version)] if version != group.version else [])]
            if sample in group.partial:
                row["known"] = self._give(slot, group.partial[sample], version)
            group.started += 1
            self.active += 1

    def _give(self, slot: int, partial: Completion, version: int) -> int:
        """Put what there is of a response into the buffers of ``slot``; its number of tokens."""
        known = len(partial)
        self._tokens[slot, :known] = partial.tokens
        self._logprobs[slot, :known] = partial.sampler_logprobs
        self._entropies[slot, :known] = np.nan if partial.sampler_entropies is None else partial.sampler_entropies
        starts = np.cumsum([0, *(count for _, count in partial.version_spans)])[:-1].tolist()
        spans = zip(starts, (v for v, _ in partial.version_spans), strict=True)
        self._versions[slot] = [*(spans if partial.version_spans else [(0, partial.policy_version)]), (known, version)]
        return known

    def updated(self, version: int) -> None:
        """The tokens that follow are sampled by ``version``."""
        for slot, count, known in zip(*(self.column(n).tolist() for n in ("slot", "count", "known")), strict=True):
            self._versions[slot].append((max(count, known), version))

    def given(self, rows: slice, values: tuple[NDArray[Any], NDArray[Any], NDArray[Any]]) -> None:
        """Where a row's next token is known, put it with its log-prob and entropy in the place of what was sampled."""
        table = self._rows[rows]
        index = np.flatnonzero(table["count"] < table["known"])
        if len(index):
            where = (table["slot"][index], table["count"][index])
            for value, buffer in zip(values, (self._tokens, self._logprobs, self._entropies), strict=True):
                value[index] = buffer[where]

    def next_uniforms(self, rows: slice) -> NDArray[np.float64]:
        """The random number of each row's next token."""
        table = self._rows[rows]
        offset = table["count"] % _UNIFORMS_AHEAD
        due = table[offset == 0]
        if len(due):
            self._draw_uniforms(due)
        return self._uniforms[table["slot"], offset]

    def _draw_uniforms(self, due: NDArray[Any]) -> None:
        """The random numbers of these rows for the stretch of positions that their next token lies in."""
        first = due["count"] // _UNIFORMS_AHEAD * _UNIFORMS_AHEAD
        seed, draw, sample = (due[name][:, None] for name in ("seed", "draw", "sample"))
        self._uniforms[due["slot"]] = uniforms(seed, draw, sample, first[:, None] + np.arange(_UNIFORMS_AHEAD))

    def record(
        self, rows: slice, tokens: NDArray[Any], logprobs: NDArray[Any], entropies: NDArray[Any]
    ) -> NDArray[np.bool_]:
        """Append one token to each of ``rows``; True where that reached the row's limit."""
        table = self._rows[rows]
        where = (table["slot"], table["count"])
        self._tokens[where] = tokens
        self._logprobs[where] = logprobs
        self._entropies[where] = entropies
        table["count"] += 1
        table["last"] = tokens
        return table["count"] >= table["limit"]

    def output(self, row: int) -> RowOutput:
        """What ``row`` has produced, or was given, so far."""
        slot = int(self._rows["slot"][row])
        count = max(int(self._rows["count"][row]), int(self._rows["known"][row]))
        group = self._groups[slot]
        assert group is not None
        return RowOutput(
            group=group,
            sample=int(self._rows["sample"][row]),
            tokens=self._tokens[slot, :count],
            logprobs=self._logprobs[slot, :count],
            entropies=self._entropies[slot, :count],
            spans=_spans(self._versions[slot], count),
        )

    def moved_prompt(self, source: int, target: int) -> None:
        """The prompt in cache slot ``source`` lies in ``target`` from now on."""
        owners = self.column("owner")
        owners[owners == source] = target

    def state(self) -> dict[str, Any]:
        """The rows in flight as arrays and JSON values by name."""
        table = self._rows[: self.active]
        width = int(np.maximum(table["count"], table["known"]).max(initial=0))
        slots = table["slot"]
        fields = {name: table[name].view(np.int64) for name in _KEPT_FIELDS}
        buffers = {"tokens": self._tokens, "logprobs": self._logprobs, "entropies": self._entropies}
        groups = [self._groups[slot] for slot in slots.tolist()]
        return {
            **{f"field/{name}": np.ascontiguousarray(values) for name, values in fields.items()},
            **{name: buffer[slots, :width] for name, buffer in buffers.items()},
            "orders": [group.order for group in groups if group is not None],
            "versions": [[list(start) for start in self._versions[slot]] for slot in slots.tolist()],
        }

    def restore(self, state: Mapping[str, Any], group_of: Callable[[int], GroupProgress]) -> None:
        """Inverse of ``state``, in a table without rows."""
        assert self.active == 0, "rows are in flight"
        for order, versions in zip(state["orders"], state["versions"], strict=True):
            slot = self._free.pop()
            self._groups[slot] = group_of(order)
            self._versions[slot] = [(int(first), int(version)) for first, version in versions]
            self._rows["slot"][self.active] = slot
            self.active += 1
        table = self._rows[: self.active]
        for name in _KEPT_FIELDS:
            table[name] = state[f"field/{name}"].view(table[name].dtype)
        slots, width = table["slot"], state["tokens"].shape[1]
        buffers = {"tokens": self._tokens, "logprobs": self._logprobs, "entropies": self._entropies}
        for name, buffer in buffers.items():
            buffer[slots, :width] = state[name]
        self._draw_uniforms(table)

    def remove(self, rows: Sequence[int]) -> list[tuple[int, int, int]]:
        """Drop ``rows`` and close the gaps; rows stay by descending ``count``.

        A gap is filled with the last row of the same count, whose place with the last of the next count, and so on:
        few rows move, however many there are.

        Returns:
            ``(source, target, tokens in the cache)`` of every row that moves, to be done in this order.
        """
        moves: list[tuple[int, int, int]] = []
        for row in sorted(rows, reverse=True):  # from the back, so that no row that moves is one to be dropped
            slot = int(self._rows["slot"][row])
            self._groups[slot] = None
            self._free.append(slot)
            falling = -self.column("count")
            gap = row
            while gap < self.active - 1:
                source = int(np.searchsorted(falling, falling[gap + 1], side="right")) - 1
                self._rows[gap] = self._rows[source]
                moves.append((source, gap, int(self._rows["count"][source]) - 1))
                gap = source
            self.active -= 1
        return moves


def _spans(starts: Sequence[tuple[int, int]], count: int) -> VersionSpans:
    """``(first token, version)`` pairs as runs; of several that start at one token the last one sampled it."""
    runs: list[tuple[int, int]] = []
    ends = [*(first for first, _ in starts[1:]), count]
    for (first, version), end in zip(starts, ends, strict=True):
        tokens = min(end, count) - first
        if tokens > 0 and runs and runs[-1][0] == version:
            runs[-1] = (version, runs[-1][1] + tokens)
        elif tokens > 0:
            runs.append((version, tokens))
    return tuple(runs)
