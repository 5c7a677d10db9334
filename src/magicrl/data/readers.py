"""Local files and hub data sets as plain records, each with the words that say where it stands.

Nothing here knows what a problem is; errors name the file, the line or row, and what to do.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One record of a source.

    Attributes:
        index: running number of the record within its source, from 0.
        where: its place in words, e.g. ``train.jsonl, line 3``.
        record: its fields.
    """

    index: int
    where: str
    record: dict[str, Any]


def read_file(path: Path) -> Iterator[Row]:
    """The records of a ``.jsonl``, ``.json`` (a list of objects), ``.csv`` or ``.parquet`` file, in order.

    Raises:
        ValueError: missing, empty, of an unknown kind, or broken (naming the line or row).
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"{path}: unknown kind of file {path.suffix!r}; supported: {', '.join(_READERS)}")
    if not path.exists():
        raise ValueError(f"{path}: no such file{_nearby(path)}")
    if not path.is_file():
        raise ValueError(f"{path}: not a file; name one data file")
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: the file is empty")
    try:
        yield from reader(path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text at byte {error.start}; convert the file to UTF-8") from error


def _nearby(path: Path) -> str:
    """What stands in the nearest folder that exists, as the tail of an error."""
    folder = path.parent
    if not folder.is_dir():
        return f"; the folder {folder} does not exist (relative paths start at the recipe's folder)"
    names = sorted(p.name for p in folder.iterdir() if p.suffix.lower() in _READERS)
    if not names:
        return f"; {folder} holds no data files"
    return f"; in {folder} there are: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"


def _as_row(record: Any, index: int, where: str) -> Row:
    if not isinstance(record, dict):
        kind = type(record).__name__
        raise ValueError(f"{where}: expected an object with named fields, got {kind} ({str(record)[:40]!r})")
    return Row(index=index, where=where, record=record)


def _read_jsonl(path: Path) -> Iterator[Row]:
    index = 0
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{where}: broken JSON at column {error.colno} ({error.msg}); every line must hold one whole object"
                ) from error
            yield _as_row(record, index, where)
            index += 1


def _read_json(path: Path) -> Iterator[Row]:
    try:
        records = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}, line {error.lineno}: broken JSON at column {error.colno} ({error.msg}); "
            "for one object a line name the file .jsonl"
        ) from error
    if not isinstance(records, list):
        raise ValueError(f"{path}: expected a list of objects, got {type(records).__name__}")
    for index, record in enumerate(records):
        yield _as_row(record, index, f"{path}, row {index + 1}")


def _read_csv(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as text:
        table = csv.DictReader(text, strict=True)
        try:
            for index, record in enumerate(table):
                where = f"{path}, line {table.line_num}"
                if None in record or None in record.values():
                    named = len(table.fieldnames or ())
                    raise ValueError(f"{where}: the line has more or fewer cells than the {named} named in the first")
                yield _as_row(record, index, where)
        except csv.Error as error:
            raise ValueError(f"{path}: broken CSV after line {table.line_num} ({error})") from error


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa  # heavy, and only this kind of file needs it
    import pyarrow.parquet as pq

    index = 0
    try:
        with pq.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=1024):
                for record in batch.to_pylist():
                    yield _as_row(record, index, f"{path}, row {index + 1}")
                    index += 1
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path}: not a readable parquet file ({error})") from error


_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def read_hub(name: str, *, split: str, subset: str | None = None, revision: str | None = None) -> Iterator[Row]:
    """The records of one split of a hub data set, or of a local folder that ``datasets`` can load.

    Raises:
        ValueError: the library cannot load it; its own words and the remedy.
    """
    import datasets.exceptions  # slow to import, and only hub sources need it

    try:
        table = datasets.load_dataset(name, subset, split=split, revision=revision)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:  # offline, unknown name, split or subset
        raise ValueError(
            f"hub data set {name!r} (split {split!r}): {str(error).strip() or type(error).__name__}. Check name, split "
            "and options.subset; without network download it once elsewhere and give the file as `path`"
        ) from error
    for index, record in enumerate(table):
        yield _as_row(record, index, f"{name} [{split}], row {index + 1}")
