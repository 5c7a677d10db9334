"""Helpers for generated pages: marked sections, tables and numbers filled from JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from magicrl.files import write_atomically

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def put_section(page: Path, name: str, lines: Sequence[str]) -> None:
    """Write ``lines`` between the markers of ``name``; a missing page or section is created."""
    first, last = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    whole = page.read_text() if page.exists() else ""
    if first not in whole:
        whole = f"{whole}\n{first}\n{last}\n"
    before, rest = whole.split(first, 1)
    assert last in rest, f"{page} has {first} and no {last}"
    text = "\n".join([first, "", *lines, "", last])
    write_atomically(page, f"{before}{text}{rest.split(last, 1)[1]}")


def table(columns: str, rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table with the head ``columns``, such as ``"rows | tokens"``."""
    lines = [f"| {columns} |", "|---" * (columns.count("|") + 1) + "|"]
    return [*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)]


MARKED = re.compile(r"(?P<text>[^\s|(]+)<!--=(?P<path>[\w.:/-]+)-->")


def shown(value: Any, like: str) -> str:
    """Format ``value`` as the page shows it: with the decimals and the % sign of ``like``; a text stays a text."""
    if isinstance(value, str):
        return value.replace(" ", "\u00a0")
    decimals = len(like.rstrip("%").partition(".")[2])
    return f"{value * 100:.{decimals}f}%" if like.endswith("%") else f"{value:.{decimals}f}"


def value_in(found: Any, path: str) -> Any:
    """Return the value at a path such as ``key.key.0``.

    Raises:
        KeyError: nothing is at this path.
    """
    for key in path.split("."):
        found = found[int(key)] if isinstance(found, list) else found[key]
    return found


def fill(page: Path, value_at: Callable[[str], Any]) -> None:
    """Replace each number before a marker, an HTML comment ``<!--=path-->``, by the current value at that path."""

    def replaced(match: re.Match[str]) -> str:
        return f"{shown(value_at(match['path']), match['text'])}<!--={match['path']}-->"

    write_atomically(page, MARKED.sub(replaced, page.read_text()))
