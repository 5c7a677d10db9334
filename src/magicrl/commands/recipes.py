"""``magicrl recipes``: the shipped recipes."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

from rich.console import Console

from magicrl.commands.tables import listing
from magicrl.config.paths import find_recipe, shipped_recipes, stated_memory


def recipes(name: str | None = None, /) -> int:
    """List the shipped recipes; with a name, print that one, to be copied and changed.

    Example: magicrl recipes smollm2 > mine.toml

    Parameters
    ----------
    name
        Of a shipped recipe.
    """
    if name is not None:
        sys.stdout.write(find_recipe(Path(name)).read_text(encoding="utf-8"))
        return 0
    rows: list[tuple[str, ...]] = []
    for shipped, path in shipped_recipes().items():
        text = path.read_text(encoding="utf-8")
        tree = tomllib.loads(text)
        command = "sft" if "phases" in tree else "train" if "stages" in tree else "data build"
        minutes = tree.get("run", tree).get("expected_minutes")
        time = "" if minutes is None else f"{minutes:g} min"
        if minutes is None and "cluster" in tree:
            time = "magicrl plan"
        # the first sentence of the comment at a recipe's head
        head = [line.lstrip("# ") for line in text.partition("\n\n")[0].splitlines() if line.startswith("#")]
        shows = re.split(r"[.;](?:\s|$)", " ".join(head), maxsplit=1)[0]
        rows.append((f"{command} {shipped}", shows, time, stated_memory(path)))
    console = Console(emoji=False, highlight=False)
    console.print(listing(("command", "shows", "time on 2 CPU cores", "memory"), rows, console.width))
    console.print("each after the word magicrl, e.g. magicrl train quickstart; magicrl recipes NAME prints one")
    return 0
