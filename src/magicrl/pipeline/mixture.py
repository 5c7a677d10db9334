"""The training file: the released schema's columns and nothing else, streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from magicrl.files import whole_file, write_atomically
from magicrl.pipeline.entry import RELEASED_FIELDS
from magicrl.pipeline.parts import Part, read_part


def write_mixture(parts: Sequence[Part], folder: Path, *, split: bool) -> dict[str, int]:
    """Write ``train.parquet``, or one file an ability, and ``ids.jsonl``, which says which problem each row is.

    Returns:
        Rows by file name.

    Raises:
        ValueError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    models = sorted({name for table in _tables(parts, ["extra_info"]) for name in _models(table)})
    schema = _schema(models)
    rows: dict[str, int] = {}
    ids: list[str] = []
    try:
        # the writers end before the first file gets its name: a full disk leaves all of them as they were
        with ExitStack() as files, ExitStack() as stack:
            writers: dict[str, pq.ParquetWriter] = {}
            for table in _tables(parts, [*(field.name for field in RELEASED_FIELDS), "extra_info", "id"]):
                for name, some in _by_file(table, split=split):
                    if name not in writers:
                        file = files.enter_context(whole_file(folder / name))
                        writers[name] = stack.enter_context(pq.ParquetWriter(file, schema, compression="zstd"))
                        rows[name] = 0
                    writers[name].write_table(_released(some, models, schema))
                    for number, identity in enumerate(some.column("id").to_pylist(), start=rows[name]):
                        ids.append(json.dumps({"file": name, "row": number, "id": identity}))
                    rows[name] += some.num_rows
        write_atomically(folder / "ids.jsonl", "".join(f"{line}\n" for line in ids))
    except OSError as error:
        raise ValueError(
            f"{folder} cannot be written: {error.strerror or error}; free some space and run the same command again"
        ) from None
    for stale in folder.glob("train*.parquet"):
        if stale.name not in rows:
            stale.unlink()
    return rows


def _tables(parts: Sequence[Part], columns: Sequence[str]) -> Iterator[pa.Table]:
    for part in parts:
        table = read_part(part.path, columns)
        if table.num_rows:
            yield table


def _models(table: pa.Table) -> set[str]:
    keys: set[str] = set()
    for row in table.column("extra_info").to_pylist():
        keys |= {name for name, _ in row["model_difficulty"] or ()}
    return keys


def _by_file(table: pa.Table, *, split: bool) -> Iterator[tuple[str, pa.Table]]:
    if not split:
        yield "train.parquet", table
        return
    abilities = table.column("ability").to_pylist()
    for ability in sorted(set(abilities)):
        yield f"train_{ability}.parquet", table.filter(pa.array([one == ability for one in abilities]))


def _schema(models: Sequence[str]) -> pa.Schema:
    """The released schema; ``model_difficulty`` has a field a model, and is left out where none was measured."""
    extra: list[tuple[str, Any]] = [("index", pa.int64())]
    if models:
        extra.append(("model_difficulty", pa.struct([(name, pa.int64()) for name in models])))
    return pa.schema([*RELEASED_FIELDS, pa.field("extra_info", pa.struct(extra))])


def _released(table: pa.Table, models: Sequence[str], schema: pa.Schema) -> pa.Table:
    extra: list[dict[str, Any]] = []
    for row in table.column("extra_info").to_pylist():
        known = dict(row["model_difficulty"] or ())
        one: dict[str, Any] = {"index": row["index"]}
        if models:
            one["model_difficulty"] = {name: known.get(name) for name in models}
        extra.append(one)
    plain = table.select([field.name for field in RELEASED_FIELDS])
    return plain.append_column(schema.field("extra_info"), pa.array(extra, schema.field("extra_info").type)).cast(
        schema
    )
