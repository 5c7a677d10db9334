"""Records of local files, folders and hub datasets, each with its place for messages.

This module knows nothing about problems. Errors name the file, the line or row, and the remedy.
"""

from __future__ import annotations

import codecs
import csv
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from magicrl.config.errors import RecipeError
from magicrl.config.paths import DATA_FILES
from magicrl_verifiers.records import RepeatedKey, unique_keys


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A record of a source."""

    index: int  # running number of the record within its source, from 0
    where: str  # place of the record, such as ``train.jsonl, line 3``
    record: dict[str, Any]  # its fields


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRow:
    """An unreadable record in a readable file."""

    index: int  # running number of the record within its source, from 0
    where: str  # place of the record
    reason: str  # error with the place and the remedy
    text: str  # text of the record, as far as it can be shown


def read_rows(path: Path) -> Iterator[Row | BadRow]:
    """Yield the records of a ``.jsonl``, ``.json`` (a list of objects), ``.csv`` or ``.parquet`` file, in order.

    An unreadable record is a `BadRow`, and the following records are still read.

    Raises:
        RecipeError: The path does not exist, is not a file, or has an unknown suffix (key ``path``).
        ValueError: The file as a whole cannot be read.
    """
    if re.match(r"[a-z][a-z0-9+.-]*:/", str(path)):
        raise RecipeError(f"{path}: is a URL; download it first and give the file", key="path")
    if not path.exists():
        raise RecipeError(f"{path}: no such file{_nearby(path)}", key="path")
    if not path.is_file():
        raise RecipeError(f"{path}: is neither a file nor a link to one; name one data file", key="path")
    if path.suffix.lower() not in _READERS:
        kinds = ", ".join(_READERS)
        raise RecipeError(f"{path}: unknown kind of file {path.suffix!r}; supported: {kinds}", key="path")
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: the file is empty; give a file with one problem a line or row")
    try:
        yield from _READERS[path.suffix.lower()](path)
    except UnicodeDecodeError:
        raise ValueError(f"{path}, line {_undecodable_line(path)}: not UTF-8 text; convert the file to UTF-8") from None
    except PermissionError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}; allow it with chmod") from None


def read_place(
    path: Path | None,
    hub: str | None,
    *,
    splits: Sequence[str],
    subset: str | None = None,
    revision: str | None = None,
) -> Iterator[Row | BadRow]:
    """Yield the records of a file, of one split of a folder, or of one split of a hub dataset.

    Args:
        path: A file or folder, or None.
        hub: Name of a hub dataset, read if there is no path.
        splits: Splits in order of preference. The first that a folder or dataset has is read.
        subset: Subset of a folder or hub dataset.
        revision: Revision of a hub dataset.

    Raises:
        RecipeError: The file, folder, split or hub dataset does not exist.
        ValueError: The content as a whole cannot be read.
    """
    if path is None:
        assert hub is not None, "the caller checks that one is given"
        if not Path(hub).is_dir():
            yield from read_hub(hub, splits=splits, subset=subset, revision=revision)
            return
        path = Path(hub)
    if path.is_dir():
        yield from _read_folder(path, splits, subset)
    else:
        yield from read_rows(path)


def _read_folder(folder: Path, splits: Sequence[str], subset: str | None) -> Iterator[Row | BadRow]:
    """Yield one split of a folder: of files named as ``datasets`` requires, or of what ``save_to_disk`` wrote.

    The files are read here, line by line, so that an error names its line and rows may have different columns.
    """
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        if subset is not None:
            raise RecipeError(f"{folder}: save_to_disk writes no subsets; remove options.subset", key="options")
        yield from _read_saved(folder, splits)
        return
    files = _files_of(folder, subset)
    split = _chosen(splits, list(files), str(folder))
    packed = next((path for path in files[split] if path.suffix.lower() in _COMPRESSED), None)
    if packed is not None:
        raise RecipeError(f"{packed}: is compressed, and would be left out; decompress it", key="path")
    index = 0
    for path in files[split]:
        for row in read_rows(path):
            yield replace(row, index=index)
            index += 1


def _read_saved(folder: Path, splits: Sequence[str]) -> Iterator[Row]:
    import datasets  # slow to import, and only such sources need it

    try:
        table: Any = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder}: not a whole folder of save_to_disk ({error}); save it again") from error
    if isinstance(table, datasets.DatasetDict):
        split = _chosen(splits, [str(name) for name in table], str(folder))
        table, folder = table[split], folder / split
    elif splits[0] != "train" and len(splits) == 1 and splits[0] != str(table.split):
        raise RecipeError(f"{folder}: holds one data set without splits, got {splits[0]!r}; remove split", key="split")
    for index, record in enumerate(table):
        yield Row(index=index, where=f"{folder}, row {index + 1}", record=dict(record))


def _files_of(folder: Path, subset: str | None) -> dict[str, list[Path]]:
    """Return the data files of each split, found by the rules of ``datasets`` (names, README, folders)."""
    import datasets
    import datasets.exceptions

    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        raise RecipeError(f"{folder}: is a model's folder; name a data file, or a folder of them", key="path")
    found = [path for path in sorted(folder.rglob("*")) if path.suffix.lower() in _READERS]
    if not found:
        kinds = ", ".join(_READERS)
        raise RecipeError(f"{folder}: the folder holds no data file ({kinds}); name one", key="path")
    try:
        known: Any = datasets.load_dataset_builder(str(folder), subset).config.data_files
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        said = str(error).strip().splitlines()[0]
        raise RecipeError(f"{folder}: {said}; name one data file in it, or options.subset", key="path") from error
    files = {str(split): [Path(name) for name in names] for split, names in dict(known or {}).items()}
    kinds = {*_READERS, *_COMPRESSED}
    return {split: [path for path in paths if path.suffix.lower() in kinds] for split, paths in files.items()}


def splits_of(folder: Path) -> list[str]:
    """Return the splits of a folder of data files, or of one that ``save_to_disk`` wrote; [] for one without splits."""
    saved = folder / "dataset_dict.json"
    if saved.is_file():
        return list(json.loads(saved.read_text(encoding="utf-8"))["splits"])
    return [] if (folder / "state.json").is_file() else list(_files_of(folder, None))


def _chosen(splits: Sequence[str], present: Sequence[str], name: str) -> str:
    for split in splits:
        if split in present:
            return split
    have = ", ".join(present) or "none"
    remedy = "Set split to one of them, or name a file instead"
    raise RecipeError(f"{name}: no split {splits[0]!r}; it has: {have}. {remedy}", key="split")


def _undecodable_line(path: Path) -> int:
    """Return the number of the first line that is not UTF-8. The decoder's position only counts from its last block."""
    content = path.read_bytes()
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        return content.count(b"\n", 0, error.start) + 1
    raise AssertionError("the file changed while it was read")


def _nearby(path: Path) -> str:
    """Return the end of an error message: the data files in the folder of a missing file."""
    folder = path.parent
    if not folder.is_dir():
        return f"; the folder {folder} does not exist"
    names = sorted(p.name for p in folder.iterdir() if p.suffix.lower() in _READERS)
    if not names:
        return f"; {folder} holds no data files"
    return f"; in {folder} there are: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"


def _as_row(record: Any, index: int, where: str) -> Row | BadRow:
    if not isinstance(record, dict):
        kind = type(record).__name__
        shown = str(record)
        reason = f"{where}: expected an object with named fields, got {kind} ({shown[:40]!r})"
        if kind == "list":  # a whole file of JSON with the name of JSON Lines
            reason += "; a file that is one list of objects ends in .json"
        return BadRow(index=index, where=where, reason=reason, text=shown)
    return Row(index=index, where=where, record=record)


def _parse(text: str, where: str, remedy: str, *, many_lines: bool = False) -> Any:
    """Return the JSON value of a line, or of a file of many lines."""
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except RepeatedKey as error:
        raise ValueError(f"{where}: {error}") from None
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
        raise ValueError(f"{path}: expected a list of objects, got {type(records).__name__}; keep only the list")
    for index, record in enumerate(records):
        yield _as_row(record, index, f"{path}, row {index + 1}")


def _read_csv(path: Path) -> Iterator[Row | BadRow]:
    csv.field_size_limit(sys.maxsize)  # tests of a program can have more characters than the limit of 131,072
    with path.open(encoding="utf-8-sig", newline="") as text:
        # spreadsheets of some languages separate cells by semicolons, and a name may contain a comma
        head = re.sub('"[^"]*"', "", text.readline())
        text.seek(0)
        separator = max(",;\t", key=head.count)
        table = csv.DictReader(text, strict=True, delimiter=separator)
        try:
            _check_names(path, table.fieldnames or ())
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


def _check_names(path: Path, columns: Sequence[str]) -> None:
    # spreadsheets write empty columns without names
    twice = next((name for name in columns if name and columns.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{path}: two columns are called {twice!r}; rename one of them")


def _read_parquet(path: Path) -> Iterator[Row | BadRow]:
    import pyarrow as pa  # heavy, and only this kind of file needs it
    import pyarrow.parquet as pq

    index = 0
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as table:
            _check_names(path, table.schema_arrow.names)
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
    """Yield the rows of a record batch, and in place of a row whose text is not UTF-8 the error."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for number in range(batch.num_rows):
            try:
                yield batch.slice(number, 1).to_pylist()[0]
            except UnicodeDecodeError as error:
                yield error


_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip")

_READERS: dict[str, Callable[[Path], Iterator[Row | BadRow]]] = dict(
    zip(DATA_FILES, (_read_jsonl, _read_json, _read_csv, _read_parquet), strict=True)
)


def read_hub(
    name: str, *, splits: Sequence[str], subset: str | None = None, revision: str | None = None
) -> Iterator[Row]:
    """Yield the records of one split of a hub dataset.

    Raises:
        ValueError: The library cannot load it. The message has its error and the remedy.
    """
    import datasets
    import datasets.exceptions  # slow to import, and only hub sources need it

    split = splits[0]
    try:
        if len(splits) > 1:
            split = _chosen(splits, datasets.get_dataset_split_names(name, subset, revision=revision), name)
        table = datasets.load_dataset(name, subset, split=split, revision=revision)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:  # offline, unknown name, split or subset
        if isinstance(error, RecipeError):
            raise
        raise ValueError(
            f"hub data set {name!r} (split {split!r}): {str(error).strip() or type(error).__name__}. Check name, split "
            "and options.subset; without network download it once elsewhere and give the file as `path`"
        ) from error
    for index, record in enumerate(table):
        yield Row(index=index, where=f"{name} [{split}], row {index + 1}", record=dict(record))
