"""A data source of your own: a function that gives records, here the lines of a file in a form of its own.

In a recipe, in the folder of this file:

    [[data.train]]
    source = "source.py:read"
    options = { path = "flashcards.txt" }

A record is a dict whose columns are known by their names, as in a file (docs/start/own-data.md). A
`magicrl.records.Problem` in
its place is taken as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def read(path: str, separator: str = "=>") -> Iterator[dict[str, str]]:
    """``question => answer``, one a line."""
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        question, found, answer = line.partition(separator)
        if found:
            yield {"question": question.strip(), "answer": answer.strip()}
