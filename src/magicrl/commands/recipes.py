"""``magicrl recipes``: the shipped recipes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from rich.console import Console

from magicrl.commands.tables import listing
from magicrl.config.paths import find_recipe, shipped_recipes, stated_memory
from magicrl.planning.memory import GIB, host_memory


def recipes(name: str | None = None, /) -> int:
    """List the shipped recipes; with a name, print that recipe, as a template for your own.

    Example: magicrl recipes smollm2 > mine.toml

    Parameters
    ----------
    name
        Name of a shipped recipe.
    """
    if name is not None:
        sys.stdout.write(find_recipe(Path(name)).read_text(encoding="utf-8"))
        return 0
    fitting: list[tuple[str, ...]] = []
    others: list[tuple[str, ...]] = []
    for shipped, path in shipped_recipes().items():
        text = path.read_text(encoding="utf-8")
        tree = tomllib.loads(text)
        command = "sft" if "phases" in tree else "train" if "stages" in tree else "data build"
        minutes = tree.get("run", tree).get("expected_minutes")
        time = "" if minutes is None else f"{minutes:g} min on 2 CPU cores"
        if minutes is None and "cluster" in tree:
            time = "by magicrl plan"
        # the first sentence of the comment at a recipe's head
        head = [line.lstrip("# ") for line in text.partition("\n\n")[0].splitlines() if line.startswith("#")]
        shows = re.split(r"[.;](?:\s|$)", " ".join(head), maxsplit=1)[0]
        memory = stated_memory(path)
        row = (f"{command} {shipped}", shows, time, memory)
        (fitting if fits_here(memory, cluster="cluster" in tree) else others).append(row)
    console = Console(emoji=False, highlight=False)
    for title, rows in (("On this machine", fitting), ("Other machines", others)):
        console.print(f"\n{title}", style="bold")
        console.print(listing(("command", "shows", "time", "memory"), rows, console.width))
    console.print("\nStart one with the word magicrl, e.g. magicrl train quickstart; magicrl recipes NAME prints one.")
    return 0


def fits_here(memory: str, *, cluster: bool) -> bool:
    """Return whether this machine has the memory that a recipe states.

    Args:
        memory: ``0.7 GiB, measured``, ``one GPU of 80 GB``, or empty if the recipe does not state it.
        cluster: whether the recipe needs a Ray cluster.
    """
    if cluster:
        return False
    if "GPU" in memory:
        return memory.startswith("one GPU") and gpu_memory() >= 0.95 * 80e9
    found = re.match(r"([\d.]+) GiB", memory)
    return found is None or float(found[1]) * GIB <= host_memory()


def gpu_memory() -> float:
    """Return the bytes of the first GPU; 0 without one. Asks the driver, since importing torch takes seconds."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    if shutil.which(command[0]) is None:
        return 0.0
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    sizes = [float(line) for line in done.stdout.split() if line.replace(".", "", 1).isdigit()]
    return sizes[0] * 2**20 if sizes else 0.0
