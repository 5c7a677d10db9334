"""``magicrl recipes``: what comes with the package, and the text of one."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from magicrl.config.shipped import find_recipe, shipped_recipes


def list_recipes() -> int:
    """A line for each, by what runs it. Returns the exit status."""
    table = Table(box=None, pad_edge=False)
    table.add_column("recipe", no_wrap=True)
    table.add_column("shows", overflow="fold")
    for name, path in shipped_recipes().items():
        table.add_row(name, _headline(path))
    Console(highlight=False).print(table)
    return 0


def print_recipe(name: str) -> int:
    """The recipe's own text, comments and all. Returns the exit status."""
    sys.stdout.write(find_recipe(Path(name)).read_text(encoding="utf-8"))
    return 0


def _headline(path: Path) -> str:
    """The first sentence of the comment at its head."""
    lines = path.read_text(encoding="utf-8").splitlines()
    head = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
    text = " ".join(line.lstrip("# ") for line in lines[:head])
    return text.partition(". ")[0].partition(": ")[0].rstrip(".") if text else ""
