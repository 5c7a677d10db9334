"""Put the figures of docs/figures/bench-*.json into docs/benchmarks.md: every number before a marker.

    python benchmarks/benchmark_page.py

A marker is an HTML comment ``<!--=rollout:cases.NAME.key-->`` right after a number: ``bench-rollout.json``, the path
within it. The number keeps its count of decimals. ``make bench`` runs this at its end; a test compares.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from common import FIGURES, ROOT

from magicrl.training.recorder import write_atomically

PAGE = ROOT / "docs" / "benchmarks.md"
MARKED = re.compile(r"(?P<text>[^\s|(]+)<!--=(?P<file>[\w-]+):(?P<path>[^>]+)-->")


def value_at(file: str, path: str) -> Any:
    """What a marker points at.

    Raises:
        KeyError: no such entry.
    """
    found = json.loads((FIGURES / f"bench-{file}.json").read_text())
    for key in path.split("."):
        found = found[int(key)] if isinstance(found, list) else found[key]
    return found


def shown(value: Any, like: str) -> str:
    """``value`` as the page shows it: a number with the decimals (and the % sign) of ``like``, else its text."""
    if isinstance(value, str):
        return value.replace(" ", "\u00a0")
    decimals = len(like.rstrip("%").partition(".")[2])
    return f"{value * 100:.{decimals}f}%" if like.endswith("%") else f"{value:.{decimals}f}"


def filled(text: str) -> str:
    """The page with every marked number as its JSON has it."""

    def replace(match: re.Match[str]) -> str:
        value = value_at(match["file"], match["path"])
        return f"{shown(value, match['text'])}<!--={match['file']}:{match['path']}-->"

    return MARKED.sub(replace, text)


def main() -> None:
    page: Path = PAGE
    write_atomically(page, filled(page.read_text()))


if __name__ == "__main__":
    main()
