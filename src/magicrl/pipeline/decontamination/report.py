"""A report of hits that a person can go through: JSON Lines and Markdown, both texts whole."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from magicrl.pipeline.decontamination.settings import Hit


def write_report(hits: Iterable[Hit], folder: Path) -> Counter[tuple[str, str]]:
    """Write ``hits.jsonl`` (all) and ``hits.md`` (counts, then all), and count hits by test set and kind.

    Hits may be many: they are written as they come.
    """
    counts: Counter[tuple[str, str]] = Counter()
    folder.mkdir(parents=True, exist_ok=True)
    body = folder / "hits.body.tmp"
    with (folder / "hits.jsonl").open("w", encoding="utf-8") as lines, body.open("w", encoding="utf-8") as page:
        for hit in hits:
            counts[hit.reference_set, hit.kind] += 1
            lines.write(json.dumps(asdict(hit), ensure_ascii=False) + "\n")
            page.write(_section(hit))
    with (folder / "hits.md").open("w", encoding="utf-8") as page:
        page.write("# Test problems found in training texts\n\n| test set | kind | hits |\n|---|---|---|\n")
        for (name, kind), count in sorted(counts.items()):
            page.write(f"| {name} | {kind} | {count} |\n")
        with body.open(encoding="utf-8") as sections:
            for line in sections:
                page.write(line)
    body.unlink()
    return counts


def _section(hit: Hit) -> str:
    title = f"\n## {hit.document} repeats {hit.reference} of {hit.reference_set}: {hit.kind}, {hit.score:.2f}\n"
    return (
        f"{title}\nTraining text:\n\n{_quoted(hit.document_text)}\n\nTest problem:\n\n{_quoted(hit.reference_text)}\n"
    )


def _quoted(text: str) -> str:
    """As a block that shows the text as it is, whatever backticks it holds."""
    fence = "````"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text}\n{fence}"
