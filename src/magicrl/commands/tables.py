"""Tables that stay readable in a narrow terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text


def listing(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, *, least: int = 100) -> RenderableType:
    """Rows of words: a table from ``least`` columns of the terminal on, below an entry a row with its other cells under
    the first one."""
    if width >= least:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for place, column in enumerate(columns):
            table.add_column(column, overflow="fold", no_wrap=place == 0)
        for row in rows:
            table.add_row(*map(Text, row))
        return table
    lines: list[RenderableType] = []
    for first, *others in rows:
        told = [Padding(Text(cell), (0, 0, 0, 2)) for cell in others if cell]
        lines += [Text(first, "bold"), *told]
    return Group(*lines)


def figures(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, *, least: int) -> Table:
    """Rows of figures: a line a row where ``least`` columns of the terminal are there, else a column a row."""
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
