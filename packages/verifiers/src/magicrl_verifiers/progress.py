"""Progress of work that counts its items: a line every few seconds, with the time left."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from rich.console import Console

FIRST, NEXT = 2.0, 5.0
"""Seconds before the first line, and between lines."""


def duration(seconds: float | None) -> str:
    """Return 3725 as ``1 h 2 min``, 75 as ``1 min 15 s``, 2.4 as ``2.4 s``."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def plural(count: int, noun: str) -> str:
    """Return ``1 step`` or ``1,200 steps``."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


class TimeLeft:
    """Time left of counted work at its pace so far, in words.

    Args:
        clock: seconds; a test puts its own here.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began: dict[str, tuple[float, int]] = {}  # when each was first reported, and how much was done then
        self._last: dict[str, int] = {}

    def words(self, name: str, done: int, total: int) -> str:
        """Return ``, left 12 s``; empty at the first call for this work, when it begins again, and at its end."""
        if name not in self._began or done < self._last[name]:
            self._began[name] = (self._clock(), done)
        self._last[name] = done
        since, first = self._began[name]
        if not first < done < total:
            return ""
        return f", left {duration((self._clock() - since) / (done - first) * (total - done))}"


class ProgressLines:
    """Lines on ``console``.

    Args:
        clock: seconds; a test puts its own here.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._left = TimeLeft(clock)
        self._due = clock() + FIRST

    def __call__(self, name: str, done: int, total: int, unit: str) -> None:
        """Report that ``done`` of ``total`` units of this work are done."""
        left = self._left.words(name, done, total)  # also where no line is due: it learns when the work began
        if self._clock() >= self._due and done < total:
            self._due = self._clock() + NEXT
            self._console.print(f"  {name}: {done} of {total} {unit}{left}", markup=False, highlight=False)

    def lines(self, name: str) -> Callable[[int, int], None]:
        """Return a callback with the number of judged lines of a file and of all its lines."""
        return lambda done, total: self(name, done, total, "lines")
