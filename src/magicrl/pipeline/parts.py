"""Part files: a step's kept and dropped rows, up to 5,000 per file. A file is complete or does not exist.

The metadata of a part holds a key of its inputs: settings, code version, and the key of the part it was made from. A
file with the expected key is not computed again. This is how a killed step resumes and how a rerun after a change only
computes what changed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from magicrl.files import NO_ROOM, whole_file

_KEY = b"magicrl_key"


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A file of kept rows."""

    name: str  # SOURCE.NNNNN, equal in all steps
    path: Path
    key: str  # hash of its inputs


def hash_of(*values: Any) -> str:
    """Return a hash (32 hex digits) of JSON values."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def part_key(path: Path) -> str | None:
    """Return the key of a part file, None if it is absent or damaged."""
    try:
        metadata = pq.read_schema(path).metadata or {}
    except (OSError, pa.ArrowException):
        return None
    value = metadata.get(_KEY)
    return None if value is None else value.decode()


def read_part(path: Path, columns: list[str] | None = None) -> pa.Table:
    """Return the rows of a part file.

    Raises:
        ValueError: The file is damaged.
    """
    try:
        return pq.read_table(path, columns=columns, memory_map=False, page_checksum_verification=True)
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{path} is damaged ({error}); delete it and run again: only this part is repeated") from None


def write_part(path: Path, table: pa.Table, key: str) -> None:
    """Write ``table`` to ``path`` atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    marked = table.replace_schema_metadata({_KEY: key.encode()})
    with whole_file(path) as file:
        # checksums, so that a part damaged by a failing disk is an error instead of wrong rows
        pq.write_table(marked, file, compression="zstd", row_group_size=4096, write_page_checksum=True)


@contextmanager
def told_when_full(folder: Path) -> Generator[None]:
    """Turn an error of a full disk inside this context into a RuntimeError that says what to do."""
    try:
        yield
    except OSError as error:
        short = error.errno is None and "requested and" in str(error)  # numpy's message for a short write
        if error.errno not in NO_ROOM and not short:
            raise
        why = os.strerror(errno.ENOSPC) if short else error.strerror
        raise RuntimeError(
            f"{folder}: cannot be written: {why}; free some space (or allow it) and run the same command again, "
            "what is finished is kept"
        ) from None


class StepFolder:
    """Folder of a step: ``kept/``, ``dropped/``, ``work/`` and ``step.json``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kept = path / "kept"
        self.dropped = path / "dropped"
        self.work = path / "work"
        self.summary = path / "step.json"

    def part(self, name: str, key: str) -> Part:
        return Part(name=name, path=self.kept / f"{name}.parquet", key=key)

    def has(self, part: Part) -> bool:
        """Return whether the part exists with its key. The kept file is written last."""
        return part_key(part.path) == part.key

    def write(self, part: Part, kept: pa.Table, dropped: pa.Table) -> None:
        """Write both files of a part, the dropped rows first."""
        write_part(self.dropped / part.path.name, dropped, part.key)
        write_part(part.path, kept, part.key)

    def clear_except(self, names: Sequence[str]) -> None:
        """Delete parts that no longer belong to the step, and incomplete files."""
        wanted = {f"{name}.parquet" for name in names}
        for path in (*self.kept.glob("*"), *self.dropped.glob("*")):
            if path.name not in wanted:
                path.unlink()

    def tables(self, which: Literal["kept", "dropped"], columns: list[str] | None = None) -> Iterator[pa.Table]:
        """Yield the kept or the dropped rows, one table per part."""
        for path in sorted((self.path / which).glob("*.parquet")):
            yield read_part(path, columns)
