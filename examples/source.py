"""A custom data source: a function that yields records, here the lines of a text file.

In a recipe, in the folder of this file:

    [[data.train]]
    source = "source.py:read"
    options = { path = "flashcards.txt" }

A record is a dict with the column names of a file (docs/start/own-data.md). The function may also yield
`magicrl.records.Problem`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def read(path: str, separator: str = "=>") -> Iterator[dict[str, str]]:
    """Yield a record per line ``question => answer``."""
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        question, found, answer = line.partition(separator)
        if found:
            yield {"question": question.strip(), "answer": answer.strip()}
