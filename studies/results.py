"""Results of studies: one row per run, keyed by what decided it, enough for every claim and figure.

A row holds the curves of ``definition.CURVES`` per step, running sums of the costs, evaluations before and after
training at every temperature, and where it ran. If a run recorded its test responses (``logging.samples``), the row has
their lengths, which give the accuracy at a shorter limit.

Committed results are Parquet files: one column per curve, and JSON text for nested values. Parquet files cannot be
appended to, so rows of a running study wait in JSON Lines until `pack` moves them. A results file with another ending
is JSON Lines throughout.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from studies.definition import COSTS, CURVES, Result

SCHEMA_VERSION = 1
WORKING = Path("runs/study")
"""Folder of rows that wait for packing."""
STARTS_FILE = Path(__file__).parent / "results" / "starts.parquet"
"""File of all screened checkpoints, accepted or not (``studies/screening.py``)."""


def rounded(value: float) -> float:
    """Round to four significant digits, which a 32-bit Parquet column keeps."""
    return float(f"{value:.4g}")


def working_file(path: Path) -> Path:
    """Return the file to which new rows of the results file ``path`` are appended."""
    return WORKING / f"{path.stem}.jsonl" if path.suffix == ".parquet" else path


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return all rows of a results file, unpacked ones last; none if there is no such file.

    Raises:
        ValueError: a line is not a result; the message has its number.
    """
    rows = _unpacked(path) if path.suffix == ".parquet" and path.exists() else []
    waiting = working_file(path)
    lines = waiting.read_text().splitlines() if waiting.exists() else []
    for number, line in enumerate(lines, start=1):
        place = f"{waiting}, line {number}"
        try:
            row = json.loads(line)
            version = row["schema_version"]
            row["key"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{place}: not a result of an experiment ({error}); remove it") from error
        if version != SCHEMA_VERSION:
            raise ValueError(f"{place}: schema_version {version}, this magicrl reads {SCHEMA_VERSION}")
        rows.append(row)
    return rows


def read_results(path: Path) -> dict[str, Result]:
    """Return the results in ``path`` by key; none if there is no such file.

    Raises:
        ValueError: as for `read_rows`.
    """
    return {row["key"]: row for row in read_rows(path)}


def append_result(path: Path, row: Mapping[str, Any]) -> None:
    """Append a row, completely or not at all."""
    file = working_file(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as stream:
        stream.write(json.dumps(row, allow_nan=False) + "\n")


def pack(path: Path) -> None:
    """Move the waiting rows of a Parquet file into it; other results files are not changed."""
    waiting = working_file(path)
    if waiting == path or not waiting.exists():
        return
    write_packed(path, list(read_results(path).values()))
    waiting.unlink()


def write_packed(path: Path, rows: list[Result]) -> None:
    """Write ``rows`` as a Parquet file."""
    facts = list(dict.fromkeys(name for row in rows for name in row if name != "curves"))
    columns: dict[str, Any] = {name: [_cell(row.get(name)) for row in rows] for name in facts}
    for name in (*CURVES, *COSTS):
        if any(name in row.get("curves", {}) for row in rows):
            columns[name] = pa.array([row["curves"].get(name) for row in rows], pa.list_(pa.float32()))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    # Dictionaries per curve, or the usual small pages, would make the file larger.
    size: Any = {"use_dictionary": facts, "data_page_size": 1 << 24}
    pq.write_table(pa.table(columns), part, compression="brotli", compression_level=11, **size)
    part.replace(path)


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict | list) else value


def _unpacked(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for found in pq.read_table(path).to_pylist():
        row: dict[str, Any] = {"curves": {}}
        for name, value in found.items():
            if name not in CURVES and name not in COSTS:
                row[name] = json.loads(value) if isinstance(value, str) and value[:1] in ("{", "[") else value
            elif value is not None:
                row["curves"][name] = [None if one is None else rounded(one) for one in value]
        rows.append(row)
    return rows
