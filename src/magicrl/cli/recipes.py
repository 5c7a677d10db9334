"""``magicrl recipes``: what comes with the package, and the text of one."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from magicrl.config.paths import find_recipe, shipped_recipes

_MEMORY = "# Memory: "
"""Begins the line of a recipe's head that states what it was measured to take, or was made for."""


def list_recipes() -> int:
    """A line for each: the command, what it shows, and what the recipe states of its time and memory."""
    table = Table(box=None, pad_edge=False)
    for name in ("command", "shows", "time on 2 CPU cores", "memory"):
        table.add_column(name, overflow="fold", no_wrap=name == "command")
    for name, path in shipped_recipes().items():
        text = path.read_text(encoding="utf-8")
        tree = tomllib.loads(text)
        minutes = tree.get("run", tree).get("expected_minutes")
        time = (
            "magicrl plan" if minutes is None and "cluster" in tree else "" if minutes is None else f"{minutes:g} min"
        )
        memory = next((line.removeprefix(_MEMORY) for line in text.splitlines() if line.startswith(_MEMORY)), "")
        table.add_row(f"{_command(tree)} {name}", _shows(text), time, memory)
    console = Console(highlight=False)
    console.print(table)
    console.print("each after the word magicrl, e.g. magicrl train quickstart; magicrl recipes NAME prints one")
    return 0


def print_recipe(name: str) -> int:
    """The recipe's own text, comments and all. Returns the exit status."""
    sys.stdout.write(find_recipe(Path(name)).read_text(encoding="utf-8"))
    return 0


def _command(tree: dict[str, Any]) -> str:
    return "sft" if "phases" in tree else "train" if "stages" in tree else "data build"


def _shows(text: str) -> str:
    """The first sentence of the comment at its head."""
    head = (line for line in text.partition("\n\n")[0].splitlines() if line.startswith("#"))
    return re.split(r"[.;](?:\s|$)", " ".join(line.lstrip("# ") for line in head), maxsplit=1)[0]
