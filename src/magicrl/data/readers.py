"""Local files and hub data sets as plain records, each with the words that say where it stands.

Nothing here knows what a problem is; errors name the file, the line or row, and what to do.
"""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magicrl.config.errors import RecipeError


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


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRow:
    """A record that cannot be read, in a file whose others can.

    Attributes:
        index: running number of the record within its source, from 0.
        where: its place in words.
        reason: what is wrong and what to do, the place included.
        text: the record as it stands, as far as that can be shown.
    """

    index: int
    where: str
    reason: str
    text: str


def read_file(path: Path) -> Iterator[Row]:
    """The records of a ``.jsonl``, ``.json`` (a list of objects), ``.csv`` or ``.parquet`` file, in order.

    Raises:
        RecipeError: there is no such file, it is none, or of an unknown kind (key ``path``).
        ValueError: empty, unreadable or broken (naming the line or row).
    """
    for row in read_rows(path):
        if isinstance(row, BadRow):
            raise ValueError(row.reason)
        yield row


def read_rows(path: Path) -> Iterator[Row | BadRow]:
    """As ``read_file``, but a broken record is handed out as such and those after it are read.

    Raises:
        RecipeError: as ``read_file``.
        ValueError: the file as a whole cannot be read.
    """
    _check_path(path)
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: the file is empty; give a file with one problem a line or row")
    try:
        yield from _READERS[path.suffix.lower()](path)
    except UnicodeDecodeError:
        raise ValueError(f"{path}, line {_undecodable_line(path)}: not UTF-8 text; convert the file to UTF-8") from None
    except PermissionError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}; allow it with chmod") from None


def _check_path(path: Path) -> None:
    if re.match(r"[a-z][a-z0-9+.-]*:/", str(path)):
        raise RecipeError(f"{path}: is a URL; download it first and give the file", key="path")
    if path.is_dir():
        raise RecipeError(f"{path}: is a folder; name one data file in it", key="path")
    if path.suffix.lower() not in _READERS:
        kinds = ", ".join(_READERS)
        raise RecipeError(f"{path}: unknown kind of file {path.suffix!r}; supported: {kinds}", key="path")
    if not path.exists():
        raise RecipeError(f"{path}: no such file{_nearby(path)}", key="path")
    if not path.is_file():
        raise RecipeError(f"{path}: is neither a file nor a link to one; name one data file", key="path")


def _undecodable_line(path: Path) -> int:
    """Found anew in the bytes: a decoder's own position counts from its last block."""
    content = path.read_bytes()
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        return content.count(b"\n", 0, error.start) + 1
    raise AssertionError("the file changed while it was read")


def _nearby(path: Path) -> str:
    """What stands in the nearest folder that exists, as the tail of an error."""
    folder = path.parent
    if not folder.is_dir():
        return f"; the folder {folder} does not exist (relative paths start at the recipe's folder)"
    names = sorted(p.name for p in folder.iterdir() if p.suffix.lower() in _READERS)
    if not names:
        return f"; {folder} holds no data files"
    return f"; in {folder} there are: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"


def _as_row(record: Any, index: int, where: str) -> Row | BadRow:
    if not isinstance(record, dict):
        kind = type(record).__name__
        shown = str(record)
        reason = f"{where}: expected an object with named fields, got {kind} ({shown[:40]!r})"
        return BadRow(index=index, where=where, reason=reason, text=shown)
    return Row(index=index, where=where, record=record)


def _parse(text: str, where: str, remedy: str, *, many_lines: bool = False) -> Any:
    """JSON of a line, or of a file of many lines."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"{where}, line {error.lineno}" if many_lines else where
        raise ValueError(f"{place}: broken JSON at column {error.colno} ({error.msg}); {remedy}") from None
    except RecursionError:
        raise ValueError(f"{where}: broken JSON (brackets nested without end); {remedy}") from None
    except ValueError:  # Python refuses integers of more than 4300 digits
        raise ValueError(f"{where}: a number has more than 4300 digits; write it as text, in quotes") from None


def _read_jsonl(path: Path) -> Iterator[Row | BadRow]:
    index = 0
    with path.open("rb") as lines:  # decoded line by line: one that is no UTF-8 does not hide those after it
        for number, raw in enumerate(lines, start=1):
            line = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                yield _as_row(_parse(line.decode(), where, "every line must hold one whole object"), index, where)
            except UnicodeDecodeError:
                reason = f"{where}: not UTF-8 text; convert the file to UTF-8"
                yield BadRow(index=index, where=where, reason=reason, text=line.decode(errors="replace"))
            except ValueError as error:
                yield BadRow(index=index, where=where, reason=str(error), text=line.decode())
            index += 1


def _read_json(path: Path) -> Iterator[Row | BadRow]:
    text = path.read_text(encoding="utf-8-sig")
    records = _parse(text, str(path), "for one object a line name the file .jsonl", many_lines=True)
    if not isinstance(records, list):
        raise ValueError(f"{path}: expected a list of objects, got {type(records).__name__}")
    for index, record in enumerate(records):
        yield _as_row(record, index, f"{path}, row {index + 1}")


def _read_csv(path: Path) -> Iterator[Row | BadRow]:
    with path.open(encoding="utf-8-sig", newline="") as text:
        table = csv.DictReader(text, strict=True)
        try:
            for index, record in enumerate(table):
                where = f"{path}, line {table.line_num}"
                if None in record or None in record.values():
                    named = len(table.fieldnames or ())
                    reason = f"{where}: the line has more or fewer cells than the {named} named in the first"
                    yield BadRow(index=index, where=where, reason=reason, text=str(record))
                else:
                    yield _as_row(record, index, where)
        except csv.Error as error:
            raise ValueError(f"{path}: broken CSV after line {table.line_num} ({error})") from error


def _read_parquet(path: Path) -> Iterator[Row | BadRow]:
    import pyarrow as pa  # heavy, and only this kind of file needs it
    import pyarrow.parquet as pq

    index = 0
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as table:
            for batch in table.iter_batches(batch_size=1024):
                for record in _records(batch):
                    where = f"{path}, row {index + 1}"
                    if isinstance(record, UnicodeDecodeError):
                        reason = f"{where}: not UTF-8 text; write the file anew in UTF-8"
                        shown = bytes(record.object).decode("utf-8", "replace")
                        yield BadRow(index=index, where=where, reason=reason, text=shown)
                    else:
                        yield _as_row(record, index, where)
                    index += 1
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a readable parquet file ({error}); is it whole? Copy it again") from error


def _records(batch: Any) -> Iterator[Any]:
    """The rows of a record batch; of one whose text is no UTF-8 the error."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for number in range(batch.num_rows):
            try:
                yield batch.slice(number, 1).to_pylist()[0]
            except UnicodeDecodeError as error:
                yield error


_READERS: dict[str, Callable[[Path], Iterator[Row | BadRow]]] = {
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
        yield Row(index=index, where=f"{name} [{split}], row {index + 1}", record=dict(record))
