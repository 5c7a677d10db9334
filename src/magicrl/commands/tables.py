"""Tables that stay readable in a narrow terminal, and lines of progress that stay few in a file."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

SILENCE_SECONDS = 10.0
"""Least seconds between two lines of progress with the same words, where the output is no terminal."""


def progress_lines(console: Console) -> Callable[[str], None]:
    """Return a function that prints lines of progress, in which only numbers may differ (``step 12``).

    A terminal shows every line. A file or a pipe gets the first line of each kind at once, and further ones at most
    every ten seconds.
    """
    printed: dict[str, float] = {}

    def show(text: str) -> None:
        kind, now = re.sub(r"\d+", "", text), time.monotonic()
        if console.is_terminal or now - printed.get(kind, -SILENCE_SECONDS) >= SILENCE_SECONDS:
            printed[kind] = now
            console.print(text, style="dim", markup=False, soft_wrap=True)

    return show


def listing(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, *, least: int = 100) -> RenderableType:
    """Return a table if the terminal has at least ``least`` columns, else an entry per row with its cells below the
    first one. From the third on, a cell has its column's name.
    """
    if width >= least:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for place, column in enumerate(columns):
            table.add_column(column, overflow="fold", no_wrap=place == 0)
        for row in rows:
            table.add_row(*map(Text, row))
        return table
    lines: list[RenderableType] = []
    for first, second, *others in rows:
        named = [f"{name}: {cell}" for name, cell in zip(columns[2:], others, strict=True) if cell]
        lines += [Text(first, "bold"), *(Padding(Text(line), (0, 0, 0, 2)) for line in filter(None, (second, *named)))]
    return Group(*lines)


def figures(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, *, least: int) -> Table:
    """Return a table of numbers: a line per row in a terminal of at least ``least`` columns, else a column per row."""
    table = Table(box=None, pad_edge=False, collapse_padding=True, show_header=width >= least)
    if width >= least:
        for column in columns:
            table.add_column(column, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        return table
    table.add_column()
    for _ in rows:
        table.add_column(justify="right", overflow="fold")
    for column, *cells in zip(columns, *rows, strict=True):
        table.add_row(column, *cells)
    return table
