"""Recorded rollouts that hold a text, of the whole run: a page shows a few, ``rollouts/*.parquet`` holds all."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import pyarrow as pa
import pyarrow.parquet as pq

from magicrl.reporting.read_folders import RunFolderError

_COLUMNS = ("step", "draw", "sample", "problem_id", "text", "outcome", "status", "reward", "finish_reason", "extracted")
AROUND = 60
"""Characters shown on each side of what was found."""


class Found(NamedTuple):
    """A recorded response, and where in its text the pattern first stands; (0, 0) where none was asked for."""

    row: dict[str, Any]
    span: tuple[int, int]

    @property
    def excerpt(self) -> tuple[str, str, str]:
        """What stands before the find, the find, and what stands behind it; dots where more follows."""
        text, (first, last) = str(self.row["text"]), self.span
        begin, end = max(0, first - AROUND), last + AROUND
        before = ("…" if begin else "") + text[begin:first]
        return before, text[first:last], text[last:end] + ("…" if end < len(text) else "")


def search_rollouts(
    run: Path,
    pattern: str = "",
    *,
    steps: Collection[int] = (),
    outcomes: Collection[str] = (),
    problem: str | None = None,
) -> Iterator[Found]:
    """Responses that match, in the order of steps, draws and samples.

    Args:
        run: the run folder.
        pattern: a regular expression, found anywhere in the response, lines included.
        steps: only of these; empty: all.
        outcomes: only ``correct``, ``wrong``, ``not_judged`` or ``truncated``; empty: all.
        problem: only of the problem with this id.

    Raises:
        ValueError: the pattern is no regular expression.
        RunFolderError: no recorded rollouts, or a broken file.
    """
    try:
        wanted = re.compile(pattern, re.MULTILINE)
    except re.error as error:
        raise ValueError(
            f"--grep {pattern}: not a regular expression: {error}; a backslash before . * + ( [ "
        ) from None
    files = sorted((run / "rollouts").glob("step-*.parquet"))
    if not files:
        raise RunFolderError(
            f"{run / 'rollouts'}: no recorded rollouts; logging.rollouts_every of the recipe keeps them"
        )
    for path in files:
        if steps and int(path.stem.rpartition("-")[2]) not in steps:
            continue
        try:
            rows = cast("list[dict[str, Any]]", pq.read_table(path, columns=list(_COLUMNS)).to_pylist())
        except (pa.ArrowException, OSError) as error:
            raise RunFolderError(f"{path}: no recording of rollouts: {error}; remove the file") from None
        for row in rows:
            kinds = {row["outcome"] or "not_judged", "truncated" if row["finish_reason"] == "length" else ""}
            if (outcomes and not kinds & set(outcomes)) or (problem is not None and row["problem_id"] != problem):
                continue
            match = wanted.search(str(row["text"]))
            if match is not None:
                yield Found(row, match.span())
