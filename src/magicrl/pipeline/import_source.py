"""Reading a source into parts: every record becomes a kept row, or a dropped one with its reason."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pyarrow as pa

from magicrl.config.errors import RecipeError
from magicrl.data.data_files import read_hub, read_place
from magicrl.data.schemas import Template, catalogue
from magicrl.data.sources import BadRow, Place, Quarantined, Read, RecordReader, Row
from magicrl.files import checksum, write_atomically
from magicrl.pipeline.entry import DROPPED_SCHEMA, Ability, Entry, entry_of, is_entry, table_of
from magicrl.pipeline.parts import Part, StepFolder, hash_of, part_key, read_part, told_when_full
from magicrl.pipeline.pipeline_schema import PipelineSource
from magicrl.records import Problem
from magicrl_verifiers.references import file_fingerprint
from magicrl_verifiers.secrets import without_secrets


class NotWanted(ValueError):
    """A well-formed record that the source's settings leave out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenProblem(Row):
    """A problem that a function of the user's gave in a record's place."""

    problem: Problem


def brought_place(source: PipelineSource) -> Place | None:
    """Where a function of the user's gives the records; None for other sources.

    Raises:
        RecipeError: it cannot be found, or does not take the options.
    """
    if source.source is None:
        return None
    try:
        return Place.called("source", source.source, source.options)
    except ValueError as error:
        raise RecipeError(str(error), key="source") from error


class EntryReader:
    """Reads the records of one source: `data.sources`, and what its settings leave out."""

    def __init__(self, source: PipelineSource, most_characters: int) -> None:
        self.source = source
        self._most = most_characters
        self._reader = RecordReader(
            stem=source.label,
            fields=source.fields,
            verifier="code" if source.ability == "code" else "maths",
            offer="--set fields.{field}={column}",
            solutions=source.fields.solutions,
            notes=source.fields.notes,
        )

    def entry(self, row: Row) -> Entry:
        """The entry of a record.

        Raises:
            NotWanted: the settings leave it out.
            ValueError: it cannot be one; says why.
        """
        for name, value in row.record.items():
            size = len(value) if isinstance(value, str | bytes) else 0
            if size > self._most:
                raise ValueError(
                    f"{row.where}: field {name!r} has {size} characters, more than max_field_characters = {self._most}"
                )
        # rows of another run's output are taken as they are
        if is_entry(row.record):
            return entry_of(row.record)
        self._check_wanted(row.record)
        read = self._read(row)
        source, problem = self.source, read.problem
        ability: Ability = "code" if problem.verifier == "code" else "math"
        if source.ability is not None and source.ability != ability:
            raise ValueError(f"{row.where}: is a {ability} problem, and the source is said to hold {source.ability}")
        template = catalogue().templates[read.template] if source.template is None else Template(text=source.template)
        named = source.fields.id is not None or read.own_id is None
        # the record's own id where it has one, so that a row added to the file moves no other's
        name = (problem.id if named else str(read.own_id)).removeprefix(f"{source.label}/")
        return Entry(
            id=f"{source.label}/{name}",
            source=source.label,
            data_source=problem.source,
            ability=ability,
            problem=problem.prompt,
            prompt=template.around(problem).prompt,
            context=problem.context,
            references=problem.references,
            solutions=read.solutions,
            index=row.index,
            level=problem.level,
            where=row.where,
            difficulty=_recorded_difficulty(problem.extra),
            notes=read.notes,
        )

    def _read(self, row: Row) -> Read:
        if not isinstance(row, GivenProblem):
            try:
                return self._reader.read(row)
            except Quarantined as error:
                raise ValueError(f"{row.where}: {error}") from None
        problem = row.problem
        if problem.verifier not in ("maths", "code") or not problem.references:
            raise ValueError(
                f"{row.where}: verifier {problem.verifier!r} with {len(problem.references)} references; the steps "
                "of a pipeline read problems of maths and code, with reference answers"
            )
        "".join((problem.prompt, *problem.references, *(turn.content for turn in problem.context))).encode()
        return Read(where=row.where, problem=problem, schema="problem", columns=((), None), template="bare")

    def _check_wanted(self, record: Mapping[str, Any]) -> None:
        for column, values in self.source.only.items():
            if column not in record:
                raise ValueError(f"no column {column!r}, which `only` names; it has: {', '.join(map(str, record))}")
            if str(record[column]) not in values:
                raise NotWanted(f"{column} is {str(record[column])[:80]!r}")
        before = self.source.row.before if self.source.row is not None else None
        column = next((name for name in before.columns if name in record), None) if before is not None else None
        if before is not None and column is not None and int(str(record[column])) >= before.value:
            raise NotWanted(f"{column} {record[column]} is not before {before.value}")


def _recorded_difficulty(extra: Mapping[str, Any]) -> dict[str, int]:
    """Failures of 16 by model, where the record has the released schema's column of them."""
    info = extra.get("extra_info")
    rates: Any = cast("Mapping[str, Any]", info).get("model_difficulty") if isinstance(info, Mapping) else None
    pairs = cast("Mapping[str, Any]", rates).items() if isinstance(rates, Mapping) else rates or ()
    return {str(name): int(count) for name, count in pairs if count is not None}


def check_text(entry: Entry) -> None:
    r"""Refuse text that no file can hold: JSON can say half of a surrogate pair (``"\ud800"``), UTF-8 cannot.

    Statement and reference answers were looked at when they were read.
    """
    notes = json.dumps(dict(entry.notes), ensure_ascii=False, default=str) if entry.notes else ""
    fields = {"id": (entry.id,), "data_source": (entry.data_source,), "solution": entry.solutions, "notes": (notes,)}
    for name, texts in fields.items():
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"{entry.where}: the {name} holds half a character ({text[error.start]!r}); correct the text"
                ) from None


def shown(record: Mapping[str, Any] | str, most: int = 4000) -> str:
    """A record's text for the quarantine, cut where it is very long."""
    if isinstance(record, str):
        return record if len(record) <= most else f"{record[:most]}... ({len(record)} characters)"
    each = {name: shown(value, most) if isinstance(value, str) else value for name, value in record.items()}
    return shown(json.dumps(each, ensure_ascii=True, default=str), most)


IMPORT_VERSION = 4
PART_ROWS = 5000
PART_CHARACTERS = 64 << 20
"""A part ends at so many rows or characters, so that a step holds little in memory whatever the rows."""
UNREADABLE = "unreadable record"
NOT_ASKED_FOR = "not asked for"


@dataclass(kw_only=True, slots=True)
class _Buffer:
    """Rows of the part that is being read."""

    kept: list[Entry] = field(default_factory=list[Entry])
    dropped: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    characters: int = 0

    @property
    def full(self) -> bool:
        return len(self.kept) + len(self.dropped) >= PART_ROWS or self.characters >= PART_CHARACTERS


def import_source(source: PipelineSource, folder: Path, most_characters: int) -> list[Part]:
    """The parts of a source, read where they are not in ``folder`` already.

    Raises:
        RecipeError: no such file, or the hub has no such set.
        ValueError: a file as a whole is unreadable, or nothing can be written.
    """
    step = StepFolder(folder)
    files = source_files(source)
    settings = source.model_dump(mode="json", exclude={"path", "source"})  # names and content decide, not their place
    brought = None if source.source is None else (Path(source.source).name, file_fingerprint(source.source))
    key = hash_of(IMPORT_VERSION, settings, brought, [_checksum(path) for path in files], most_characters)
    done = _finished(step, key)
    if done is not None:
        return done
    parts, seen, read = _taken_up(step, source.label, key)
    buffer = _Buffer()
    reader = EntryReader(source, most_characters)
    with told_when_full(step.path):
        # every record is a row, kept or dropped, so that their number says where a killed import goes on
        for row in islice(_rows(source, files), read, source.limit):
            _read_one(row, reader, buffer, seen)
            if buffer.full:
                parts.append(_write(step, source.label, len(parts), key, buffer))
                buffer = _Buffer()
        if buffer.kept or buffer.dropped or not parts:
            parts.append(_write(step, source.label, len(parts), key, buffer))
        step.clear_except([part.name for part in parts])
        state = {"key": key, "parts": [[part.name, part.key] for part in parts]}
        write_atomically(step.path / "source.json", json.dumps(state, indent=1))
    return parts


def _read_one(row: Row | BadRow, reader: EntryReader, buffer: _Buffer, seen: set[str]) -> None:
    try:
        if isinstance(row, BadRow):
            raise ValueError(row.reason)
        entry = reader.entry(row)
        check_text(entry)
        if entry.id in seen:
            # ids of a source may be doubled; the pipeline drops rows by id
            entry = replace(entry, id=f"{entry.id}#{row.index}")
        seen.add(entry.id)
        buffer.kept.append(entry)
        buffer.characters += len(entry.prompt) + sum(map(len, (*entry.references, *entry.solutions)))
    except ValueError as error:
        unwanted = isinstance(error, NotWanted)
        text = "" if unwanted else shown(row.text if isinstance(row, BadRow) else row.record)
        label = reader.source.label
        buffer.dropped.append(
            {
                "id": f"{label}/{label}-{row.index}",
                "source": label,
                "where": row.where,
                "step": "import",
                "reason": NOT_ASKED_FOR if unwanted else UNREADABLE,
                "detail": f"{error}\n{text}".strip().encode("utf-8", "backslashreplace").decode(),
            }
        )
        buffer.characters += len(text)


def _write(step: StepFolder, label: str, number: int, key: str, buffer: _Buffer) -> Part:
    part = step.part(f"{label}.{number:05d}", hash_of(key, number))
    # a killed import may have left the very part that is made again
    if not step.has(part):
        step.write(part, table_of(buffer.kept), pa.Table.from_pylist(buffer.dropped, schema=DROPPED_SCHEMA))
    return part


def _taken_up(step: StepFolder, label: str, key: str) -> tuple[list[Part], set[str], int]:
    """The parts that a killed import left, the ids in them, and how many records they are made of."""
    parts: list[Part] = []
    seen: set[str] = set()
    read = 0
    while True:
        part = step.part(f"{label}.{len(parts):05d}", hash_of(key, len(parts)))
        dropped = step.dropped / part.path.name
        # both files, or the part is read again: the number of its rows says where to go on
        if not step.has(part) or part_key(dropped) != part.key:
            return parts, seen, read
        ids: list[str] = read_part(part.path, ["id"]).column("id").to_pylist()
        seen.update(ids)
        read += len(ids) + read_part(dropped, ["id"]).num_rows
        parts.append(part)


def _finished(step: StepFolder, key: str) -> list[Part] | None:
    path = step.path / "source.json"
    if not path.is_file():
        return None
    state = json.loads(path.read_text(encoding="utf-8"))
    parts = [step.part(name, own) for name, own in state["parts"]]
    return parts if state["key"] == key and all(map(step.has, parts)) else None


def source_files(source: PipelineSource) -> list[Path]:
    """The source's files in order; a folder stands for itself, a pattern that fits nothing is an error."""
    found: list[Path] = []
    for text in source.paths:
        path = Path(text).expanduser()
        pattern = any(sign in text for sign in "*?[")
        matches = [Path(name) for name in sorted(glob.glob(str(path)))] if pattern else [path]
        if not matches:
            raise RecipeError(f"{path}: no file of that pattern", key="path")
        found += matches
    return found


def _rows(source: PipelineSource, files: list[Path]) -> Iterator[Row | BadRow]:
    place = brought_place(source)
    if place is not None:
        for index, item in enumerate(place.rows()):
            if isinstance(item, Problem):
                record = {"id": item.id, "prompt": item.prompt, "references": item.references}
                yield GivenProblem(index=index, where=f"{place.name}, {item.id}", record=record, problem=item)
            else:
                yield item
        return
    if not files:
        row = source.row
        name = source.hub or (row.hub if row is not None else None)
        assert name is not None, "the schema checks it"
        known = None if source.hub is not None else row  # of a hub name of one's own the kind knows no subset
        subset, split = (known.subset, known.split) if known is not None else (None, "train")
        splits = (source.split or split,)
        yield from read_hub(name, splits=splits, subset=source.subset or subset, revision=source.revision)
        return
    index = 0
    for path in files:
        name, shown_name = str(path), without_secrets(str(path))
        for row in read_place(path, None, splits=(source.split or "train",), subset=source.subset):
            where = row.where if shown_name == name else row.where.replace(name, shown_name)
            # numbered through all files, since ids are made of it
            yield replace(row, index=index, where=where)
            index += 1


def _checksum(path: Path) -> str:
    """Of a file, or of all files of a folder; of no file where there is none (reading says so)."""
    return checksum(file for file in (sorted(path.rglob("*")) if path.is_dir() else [path]) if file.is_file())
