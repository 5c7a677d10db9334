"""How far work has come that counts its items: a line every few seconds, with the time left."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console

from magicrl.reporting.wording import TimeLeft

FIRST, NEXT = 2.0, 5.0
"""Seconds before the first line, and between lines."""


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
        """So many of ``total`` units of this work are done."""
        left = self._left.words(name, done, total)  # also where no line is due: it learns when the work began
        if self._clock() >= self._due and done < total:
            self._due = self._clock() + NEXT
            self._console.print(f"  {name}: {done} of {total} {unit}{left}", markup=False, highlight=False)

    def lines(self, name: str) -> Callable[[int, int], None]:
        """The same for a file's lines that are judged."""
        return lambda done, total: self(name, done, total, "lines")
