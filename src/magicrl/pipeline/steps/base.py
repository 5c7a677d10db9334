"""What a step is to the frame that runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from magicrl.pipeline.entry import Entry
from magicrl.pipeline.parts import Part, StepFolder


@dataclass(frozen=True, slots=True)
class Drop:
    """A row that does not go on: a reason that can be counted, and the particulars."""

    reason: str
    detail: str = ""


Decision = Drop | Entry | None
"""Of one row: dropped, kept with changes, or kept as it is."""
Decide = Callable[[pa.Table], Sequence[Decision]]
"""Decisions on the rows of a part (a table of ``SCHEMA``), in order."""


class Watcher(Protocol):
    """Who is told how a pipeline goes. It only listens."""

    def step(self, name: str, parts: int, missing: int) -> None:
        """A step begins; ``missing`` of its parts must be made."""
        ...

    def progress(self, name: str, done: int, total: int, unit: str) -> None:
        """So much of a step is done."""
        ...

    def note(self, text: str) -> None:
        """Something a person should know."""
        ...


class Silent:
    """A watcher that says nothing."""

    def step(self, name: str, parts: int, missing: int) -> None:
        return None

    def progress(self, name: str, done: int, total: int, unit: str) -> None:
        return None

    def note(self, text: str) -> None:
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """What a step may use.

    Attributes:
        output: the run folder.
        workers: processes.
        max_field_characters: of a record's field.
        watcher: told how it goes.
    """

    output: Path
    workers: int
    max_field_characters: int
    watcher: Watcher


class Step(Protocol):
    """A step: decides row by row, after a look at all rows where it is ``whole``.

    Attributes:
        use: its kind.
        version: of its code; a change that changes results raises it, and then its parts are made anew.
        whole: its decisions depend on all parts together.
        parallel: parts may be decided in several processes, each with a ``Decide`` of its own.
    """

    use: str
    version: int
    whole: bool
    parallel: bool

    def identity(self, context: Context) -> Any:
        """All settings and files that its decisions depend on, for the key of its parts."""
        ...

    def prepare(self, parts: Sequence[Part], folder: StepFolder, key: str, context: Context) -> None:
        """Look at all rows and leave what was found in ``folder.work``; goes on where a kill stopped it.

        ``key`` says what it is made from: work with another key does not count.
        """
        ...

    def open(self, folder: StepFolder, context: Context) -> AbstractContextManager[Decide]:
        """What decides on parts, after ``prepare``."""
        ...

    def finish(self, parts: Sequence[Part], folder: StepFolder, context: Context) -> None:
        """Write what the step tells beside its rows (reports, tables), from its finished parts."""
        ...
