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
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from magicrl.files import whole_file

_KEY = b"magicrl_key"


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A file of kept rows.

    Attributes:
        name: ``SOURCE.NNNNN``; a step keeps the names of the parts it reads.
        path: where it is.
        key: what it was made from.
    """

    name: str
    path: Path
    key: str


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


def read_part(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of a part file.

    Raises:
        ValueError: the file is damaged; names it and the remedy.
    """
    try:
        names = None if columns is None else list(columns)
        return pq.read_table(path, columns=names, memory_map=False, page_checksum_verification=True)
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{path} is damaged ({error}); delete it and run again: only it is made anew") from None


def write_part(path: Path, table: pa.Table, key: str) -> None:
    """Write ``table`` so that ``path`` holds all of it or what it held before.

    Raises:
        ValueError: it cannot be written, e.g. the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    marked = table.replace_schema_metadata({_KEY: key.encode()})
    try:
        with whole_file(path) as file:
            # checksums: a part that a failing disk changed is an error, never other rows
            pq.write_table(marked, file, compression="zstd", row_group_size=4096, write_page_checksum=True)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written: {error.strerror or error}; free some space (or allow it) and run the same "
            "command again, what is finished is kept"
        ) from None


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def told_when_full(folder: Path) -> Generator[None]:
    """Within it a disk without room is an error with its remedy, whoever was writing.

    Raises:
        ValueError: nothing more can be written.
    """
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
    """The files of one step: ``kept/``, ``dropped/``, ``work/`` and ``step.json``.

    Args:
        path: made when the first part is written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kept = path / "kept"
        self.dropped = path / "dropped"
        self.work = path / "work"
        self.summary = path / "step.json"

    def has(self, name: str, key: str) -> bool:
        """Whether the part is there, made from this key. The kept file is written last."""
        return part_key(self.kept / f"{name}.parquet") == key

    def part(self, name: str, key: str) -> Part:
        return Part(name=name, path=self.kept / f"{name}.parquet", key=key)

    def write(self, name: str, key: str, kept: pa.Table, dropped: pa.Table) -> None:
        """Write both files of a part, the dropped rows first."""
        write_part(self.dropped / f"{name}.parquet", dropped, key)
        write_part(self.kept / f"{name}.parquet", kept, key)

    def clear_except(self, names: Sequence[str]) -> None:
        """Delete parts that no longer belong to the step, and what a kill left half written."""
        wanted = {f"{name}.parquet" for name in names}
        for folder in (self.kept, self.dropped):
            for path in sorted(folder.glob("*")) if folder.is_dir() else []:
                if path.name not in wanted:
                    path.unlink()

    def dropped_tables(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """The dropped rows, a part at a time."""
        for path in sorted(self.dropped.glob("*.parquet")):
            yield read_part(path, columns)

    def kept_tables(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """The kept rows, a part at a time."""
        for path in sorted(self.kept.glob("*.parquet")):
            yield read_part(path, columns)
