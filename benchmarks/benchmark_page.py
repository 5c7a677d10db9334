"""Put the figures of docs/figures/bench-*.json into docs/benchmarks.md: every number before a marker.

    python benchmarks/benchmark_page.py

The marker ``<!--=rollout:cases.NAME.key-->`` means ``bench-rollout.json`` and the path within it. ``make bench`` runs
this at its end; a test compares.
"""

from __future__ import annotations

import json
from typing import Any

from common import FIGURES, ROOT, fill, value_in

PAGE = ROOT / "docs" / "benchmarks.md"


def value_at(marker: str) -> Any:
    """What a marker points at; ``KeyError`` where nothing is."""
    file, _, path = marker.partition(":")
    return value_in(json.loads((FIGURES / f"bench-{file}.json").read_text()), path)


if __name__ == "__main__":
    fill(PAGE, value_at)
