"""Sections of docs/performance.md and others: each written by a script of its own, between two markers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from magicrl.training.recorder import write_atomically

_TOP = """# How cost grows

Rates and memory against length, batch, group size and model size. Each section is written by the script it names, from
a JSON in `docs/figures`; nothing here is typed by hand.
"""


def put_section(page: Path, name: str, text: str) -> None:
    """Write ``text`` between the markers of ``name``; a page or a section that is not there yet is begun."""
    first, last = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    whole = page.read_text() if page.exists() else _TOP
    if first not in whole:
        whole = f"{whole.rstrip()}\n\n{first}\n{last}\n"
    before, rest = whole.split(first, 1)
    assert last in rest, f"{page} has {first} and no {last}"
    write_atomically(page, f"{before}{first}\n\n{text}\n\n{last}{rest.split(last, 1)[1]}")


def table(columns: str, rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a table; ``columns`` are its head, ``"rows | tokens"``."""
    lines = [f"| {columns} |", "|---" * (columns.count("|") + 1) + "|"]
    return [*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)]
