"""A step's decoding played again from the lengths of its responses: who has a row when, and how long all of it takes.

`Player` is the in-process engine's schedule without a model (a test holds the two together): free rows are given to
waiting groups in the order of submission, a group's samples one after the other, new prompts once an eighth of the rows
is free; every turn decodes one token for each row in use.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from magicrl.rollout.in_process import REFILL_SHARE

Lengths = NDArray[np.int64]
Cost = Callable[[int], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """One group of a step."""

    problem: str  # its id
    lengths: Lengths  # ``[M]`` response tokens
    # ``[M]``; empty where responses are made up
    rewards: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    truncated: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))  # ``[M]``; likewise


class Player:
    """Rows that are filled and emptied.

    Args:
        rows: sequences that decode at once.
        cost: seconds of a pass of so many rows.
    """

    def __init__(self, rows: int, cost: Cost) -> None:
        self.passes, self.seconds = 0, 0.0
        self._rows, self._cost = rows, cost
        self._active: list[tuple[int, int]] = []  # (pass after which it ends, group)
        self._queue: deque[tuple[int, deque[int]]] = deque()
        self._begun = False  # the queue's first group has samples with rows
        self._left: dict[int, int] = {}

    def submit(self, key: int, lengths: Lengths) -> None:
        """Queue a group."""
        self._left[key] = len(lengths)
        self._queue.append((key, deque(int(n) for n in lengths)))

    @property
    def busy(self) -> bool:
        return bool(self._left)

    def turn(self) -> list[int]:
        """Fill rows and decode until the next response ends; the groups that are complete by then."""
        at_once = self._admit()
        ended = list(at_once)
        if self._active:
            passes = 1 if at_once else self._active[0][0] - self.passes
            self.seconds += passes * self._cost(len(self._active))
            self.passes += passes
            while self._active and self._active[0][0] == self.passes:
                ended.append(heapq.heappop(self._active)[1])
        complete: list[int] = []
        for key in ended:
            self._left[key] -= 1
            if not self._left[key]:
                del self._left[key]
                complete.append(key)
        return sorted(complete)

    def _admit(self) -> list[int]:
        """The groups of the responses that ended with their first token, which comes with the prompt."""
        free, at_once = self._rows - len(self._active), list[int]()
        if self._begun:
            free -= self._start(free, at_once)
        few = max(1, self._rows // REFILL_SHARE)
        if not self._begun and (free >= few or free == self._rows):
            while self._queue and free:
                free -= self._start(free, at_once)
        return at_once

    def _start(self, free: int, at_once: list[int]) -> int:
        """Start samples of the queue's first group in at most ``free`` rows; how many."""
        key, waiting = self._queue[0]
        count = min(free, len(waiting))
        for _ in range(count):
            length = waiting.popleft()
            if length == 1:
                at_once.append(key)
            else:
                heapq.heappush(self._active, (self.passes + length - 1, key))
        self._begun = bool(waiting)
        if not waiting:
            self._queue.popleft()
        return count


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """What a step took."""

    passes: int  # of the model, one token a row each
    seconds: float  # of these passes
    # groups in the order in which they were complete, with the passes and seconds by then
    complete: tuple[tuple[int, int, float], ...] = ()


def refilled(groups: Sequence[Group], order: Sequence[int], rows: int, cost: Cost) -> Played:
    """A step whose groups start in ``order``, each row given to the next sample as soon as it is free."""
    player = Player(rows, cost)
    for place in order:
        player.submit(place, groups[place].lengths)
    complete: list[tuple[int, int, float]] = []
    while player.busy:
        complete += [(place, player.passes, player.seconds) for place in player.turn()]
    return Played(passes=player.passes, seconds=player.seconds, complete=tuple(complete))


def lock_step(groups: Sequence[Group], rows: int, cost: Cost) -> Played:
    """A step in batches of ``rows``, each of which runs, all rows in every pass, until its last response ends."""
    lengths = np.concatenate([group.lengths for group in groups])
    batches = [lengths[start : start + rows] for start in range(0, len(lengths), rows)]
    passes = [int(batch.max()) - 1 for batch in batches]
    seconds = sum(n * cost(len(batch)) for n, batch in zip(passes, batches, strict=True))
    return Played(passes=sum(passes), seconds=seconds)


def ahead(steps: Sequence[Sequence[Group]], rows: int, cost: Cost) -> list[Played]:
    """Steps in asynchronous mode at staleness 1: each step's groups are submitted one step ahead, in issue order.

    What a step took is the time from the end of the step before to the end of its own last group.
    """
    player = Player(rows, cost)
    key, owner, left = 0, dict[int, int](), [len(groups) for groups in steps]
    found: list[Played] = []
    passes, seconds = 0, 0.0
    for number in range(len(steps)):
        for later in (number, number + 1) if number == 0 else (number + 1,):
            for group in steps[later] if later < len(steps) else ():
                player.submit(key, group.lengths)
                owner[key] = later
                key += 1
        while left[number]:
            for done in player.turn():
                left[owner[done]] -= 1
        found.append(Played(passes=player.passes - passes, seconds=player.seconds - seconds))
        passes, seconds = player.passes, player.seconds
    return found
