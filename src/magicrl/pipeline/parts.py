"""Part files: a step's kept and dropped rows, some thousand a file, each file whole or not there.

A part carries in its metadata the key it was made from (settings, code version, the key of the part it was read from).
A file with the expected key need not be made again: that is both how a killed step resumes and how a rerun after a
change does only what changed.
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from magicrl.files import whole_file

_KEY = b"magicrl_key"


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A file of kept rows."""

    name: str  # SOURCE.NNNNN; a step keeps the names of the parts it reads
    path: Path
    key: str  # what it was made from


def hash_of(*values: Any) -> str:
    """32 hex digits of anything JSON can say."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def part_key(path: Path) -> str | None:
    """The key of a part file; None where it is absent or damaged."""
    try:
        metadata = pq.read_schema(path).metadata or {}
    except (OSError, pa.ArrowException):
        return None
    value = metadata.get(_KEY)
    return None if value is None else value.decode()


def read_part(path: Path, columns: list[str] | None = None) -> pa.Table:
    """The rows of a part file; a damaged one is a ValueError with its remedy."""
    try:
        return pq.read_table(path, columns=columns, memory_map=False, page_checksum_verification=True)
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{path} is damaged ({error}); delete it and run again: only it is made anew") from None


def write_part(path: Path, table: pa.Table, key: str) -> None:
    """Write ``table`` so that ``path`` holds all of it or what it held before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    marked = table.replace_schema_metadata({_KEY: key.encode()})
    with whole_file(path) as file:
        # checksums: a part that a failing disk changed is an error, never other rows
        pq.write_table(marked, file, compression="zstd", row_group_size=4096, write_page_checksum=True)


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def told_when_full(folder: Path) -> Generator[None]:
    """Within it a disk without room is a ValueError with its remedy, whoever was writing."""
    try:
        yield
    except OSError as error:
        short = error.errno is None and "requested and" in str(error)  # numpy's words for a write cut short
        if error.errno not in _FULL and not short:
            raise
        raise ValueError(
            f"{folder}: cannot be written: {error.strerror or error}; free some space (or allow it) and run the same "
            "command again, what is finished is kept"
        ) from None


class StepFolder:
    """The files of one step: ``kept/``, ``dropped/``, ``work/`` and ``step.json``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kept = path / "kept"
        self.dropped = path / "dropped"
        self.work = path / "work"
        self.summary = path / "step.json"

    def part(self, name: str, key: str) -> Part:
        return Part(name=name, path=self.kept / f"{name}.parquet", key=key)

    def has(self, part: Part) -> bool:
        """Whether the part is there, made from its key. The kept file is written last."""
        return part_key(part.path) == part.key

    def write(self, part: Part, kept: pa.Table, dropped: pa.Table) -> None:
        """Write both files of a part, the dropped rows first."""
        write_part(self.dropped / part.path.name, dropped, part.key)
        write_part(part.path, kept, part.key)

    def clear_except(self, names: Sequence[str]) -> None:
        """Delete parts that no longer belong to the step, and what a kill left half written."""
        wanted = {f"{name}.parquet" for name in names}
        for path in (*self.kept.glob("*"), *self.dropped.glob("*")):
            if path.name not in wanted:
                path.unlink()

    def tables(self, which: Literal["kept", "dropped"], columns: list[str] | None = None) -> Iterator[pa.Table]:
        """The kept or the dropped rows, a part at a time."""
        for path in sorted((self.path / which).glob("*.parquet")):
            yield read_part(path, columns)
