"""Book-keeping of the sequences in flight: which sample sits in which row, and what it has produced.

Active rows are a prefix of the cache, by descending length of their responses, so that each block of the cache is read
for a prefix of the rows. Rows move when others end; a sample's output buffers, its *slot*, do not.
Everything here is numpy, vectorised over rows, and knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from magicrl.records import Completion, RolloutRequest
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
        ("temperature", np.float64),
        ("seed", np.uint64),
        ("draw", np.uint64),
        ("sample", np.uint64),
    ]
)


@dataclass(kw_only=True, slots=True)
class GroupProgress:
    """A submitted request and its completions so far.

    Attributes:
        order: issue order, unique within the engine.
        request: what was asked.
        started: samples that have a row or have had one.
        done: finished completions by sample index.
        began: clock at the start of its prompt.
        version: policy version at that time.
        place: cache slot of its prompt; -1 before it has started.
    """

    order: int
    request: RolloutRequest
    started: int = 0
    done: dict[int, Completion] = field(default_factory=dict[int, Completion])
    began: float = 0.0
    version: int = -1
    place: int = -1

    @property
    def waiting(self) -> int:
        """Samples that have not started."""
        return len(self.request.indices) - self.started

    @property
    def complete(self) -> bool:
        return len(self.done) == len(self.request.indices)


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
        self._uniforms = np.zeros((rows, _UNIFORMS_AHEAD), dtype=np.float64)

    def column(self, name: str, rows: slice | None = None) -> NDArray[Any]:
        """One field of the active rows (or of ``rows``)."""
        return self._rows[name][rows if rows is not None else slice(0, self.active)]

    def start(self, group: GroupProgress, samples: int) -> None:
        """Give the next ``samples`` samples of ``group`` the next rows. Their prompt is in the cache already."""
        request = group.request
        for _ in range(samples):
            slot = self._free.pop()
            self._groups[slot] = group
            row = self._rows[self.active : self.active + 1]
            row["slot"] = slot
            row["owner"] = group.place
            row["prompt"] = len(request.prompt_tokens)
            row["count"] = 0
            row["limit"] = request.sampling.max_tokens
            row["temperature"] = request.sampling.temperature
            row["seed"] = request.sampling.seed
            row["draw"] = request.draw
            row["sample"] = request.indices[group.started]
            group.started += 1
            self.active += 1

    def next_uniforms(self, rows: slice) -> NDArray[np.float64]:
        """The random number of each row's next token."""
        table = self._rows[rows]
        offset = table["count"] % _UNIFORMS_AHEAD
        due = table[offset == 0]
        if len(due):
            positions = due["count"][:, None] + np.arange(_UNIFORMS_AHEAD)
            seed, draw, sample = (due[name][:, None] for name in ("seed", "draw", "sample"))
            self._uniforms[due["slot"]] = uniforms(seed, draw, sample, positions)
        return self._uniforms[table["slot"], offset]

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

    def output(self, row: int) -> tuple[GroupProgress, int, NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Group, sample index, tokens, log-probs and entropies of ``row`` (views of the buffers)."""
        slot, count = int(self._rows["slot"][row]), int(self._rows["count"][row])
        group = self._groups[slot]
        assert group is not None
        parts = (self._tokens[slot, :count], self._logprobs[slot, :count], self._entropies[slot, :count])
        return group, int(self._rows["sample"][row]), *parts

    def moved_prompt(self, source: int, target: int) -> None:
        """The prompt in cache slot ``source`` lies in ``target`` from now on."""
        owners = self.column("owner")
        owners[owners == source] = target

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
