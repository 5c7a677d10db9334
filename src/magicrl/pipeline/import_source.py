"""Import of a source into parts. Every record becomes a kept row or a dropped one with the reason."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow.compute import field

from magicrl.config.errors import RecipeError
from magicrl.data.data_files import read_hub, read_place
from magicrl.data.multiple_choice import check_numbers
from magicrl.data.schemas import Template, catalogue
from magicrl.data.sources import BadRow, Place, Quarantined, Read, RecordReader, Row
from magicrl.files import checksum, write_atomically
from magicrl.pipeline.entry import DROPPED_SCHEMA, Ability, Entry, entry_of, is_entry, table_of
from magicrl.pipeline.parts import Part, StepFolder, hash_of, part_key, read_part, told_when_full
from magicrl.pipeline.pipeline_schema import PipelineFields, PipelineSource
from magicrl.records import Problem
from magicrl_verifiers.references import file_fingerprint
from magicrl_verifiers.secrets import without_secrets


class NotWanted(ValueError):
    """Raised for a well-formed record that the settings of the source leave out."""


def brought_place(source: PipelineSource) -> Place | None:
    """Return the place of the records of a custom function, None for other sources.

    Raises:
        RecipeError: The function cannot be found, or does not accept the options.
    """
    if source.source is None:
        return None
    try:
        return Place.called("source", source.source, source.options)
    except ValueError as error:
        raise RecipeError(str(error), key="source") from error


class EntryReader:
    """Reader for the records of a source that applies the filters of its settings.

    With ``statements``, records without an answer or tests that can be used are read, too, and long fields truncated.
    """

    def __init__(self, source: PipelineSource, most_characters: int, *, statements: bool = False) -> None:
        self.source = source
        self._most = most_characters
        self.statements = statements
        self._reader = RecordReader(
            stem=source.label,
            fields=source.fields,
            verifier="code" if source.ability == "code" else "maths",
            offer="--set fields.{field}={column}",
            reference=not statements,
            statements=statements,
            solutions=source.fields.solutions,
            notes=source.fields.notes,
        )

    def entry(self, row: Row, given: Problem | None = None) -> Entry:
        """Return the entry of a record, or of a problem that a custom source returned in place of one.

        Raises:
            NotWanted: The settings leave the record out.
            ValueError: The record is not a usable problem.
        """
        for name, value in row.record.items():
            size = len(value) if isinstance(value, str | bytes) else 0
            if size > self._most and self.statements:
                row = replace(row, record={**row.record, name: value[: self._most]})
            elif size > self._most:
                raise ValueError(
                    f"{row.where}: field {name!r} has {size} characters, more than max_field_characters = {self._most}"
                )
        self._check_wanted(row.record)
        if is_entry(row.record):
            return self._of_another_run(entry_of(row.record), row.where)
        try:
            read = self._reader.read(row) if given is None else self._given(row, given)
        except Quarantined as error:
            raise ValueError(f"{row.where}: {error}") from None
        source, problem = self.source, read.problem
        ability: Ability = "code" if problem.verifier == "code" and problem.references else "math"
        if problem.references:
            self._check_ability(ability, row.where)
        template = catalogue().templates[read.template] if source.template is None else Template(text=source.template)
        # failures of 16 by model, if the record has this column of the released schema
        info: Any = problem.extra.get("extra_info")
        rates: Any = info.get("model_difficulty") if isinstance(info, Mapping) else None
        pairs: Any = rates.items() if isinstance(rates, Mapping) else rates or ()
        named = source.fields.id is not None or read.own_id is None
        # the record's id if it has one, so that a row added to the file changes no other id
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
            difficulty={str(name): int(count) for name, count in pairs if count is not None},
            notes=read.notes,
        )

    @property
    def numbers(self) -> dict[str, str]:
        """First rows whose answers can be read in two ways, for `check_numbers` after the last record."""
        return self._reader.numbers

    def _of_another_run(self, entry: Entry, where: str) -> Entry:
        """Return a row of another run's output, unchanged except for a template of this source."""
        source = self.source
        self._check_ability(entry.ability, where)
        if source.fields != PipelineFields():
            raise ValueError(f"{where}: a row of another run has its columns already; leave out the source's fields")
        if source.template is None:
            return entry
        return replace(entry, prompt=source.template.replace("{prompt}", entry.problem))

    def _check_ability(self, ability: Ability, where: str) -> None:
        expected = self.source.ability
        if expected is not None and expected != ability:
            raise ValueError(f"{where}: is a {ability} problem, and the source is said to hold {expected}")

    def _given(self, row: Row, problem: Problem) -> Read:
        usable = problem.verifier in ("maths", "code") and problem.references
        if not usable and not self.statements:
            raise ValueError(
                f"{row.where}: verifier {problem.verifier!r} with {len(problem.references)} references; the steps "
                "of a pipeline read problems of maths and code, with reference answers"
            )
        # raises for half a surrogate pair, which a part cannot hold
        "".join((problem.prompt, *problem.references, *(turn.content for turn in problem.context))).encode()
        return Read(problem=problem, schema="problem", columns=((), None), template="bare")

    def _check_wanted(self, record: Mapping[str, Any]) -> None:
        for column, values in self.source.only.items():
            if column not in record:
                raise ValueError(f"no column {column!r}, which `only` names; it has: {', '.join(map(str, record))}")
            if str(record[column]) not in values:
                raise NotWanted(f"{column} is {str(record[column])[:80]!r}")
        before = self.source.row.before if self.source.row is not None else None
        if before is None:
            return
        column = next((name for name in before.columns if name in record), None)
        if column is None:
            raise ValueError(
                f"no column {' or '.join(before.columns)}: of kind {self.source.kind!r} only records before "
                f"{before.value} are read; add the column, or choose another kind"
            )
        if int(str(record[column])) >= before.value:
            raise NotWanted(f"{column} {record[column]} is not before {before.value}")


def check_fields(entry: Entry) -> None:
    r"""Raise ValueError for what a part cannot hold: an integer beyond 64 bits, or half a surrogate pair.

    JSON allows ``"\ud800"``, but UTF-8 does not. Statement and reference answers were checked when they were read.
    """
    for name, number in {"level": entry.level or 0, **entry.difficulty}.items():
        if abs(number) >= 2**63:
            raise ValueError(f"{entry.where}: {name} is {number}, which does not fit into 64 bits; correct it")
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
    """Return the text of a record for the dropped rows, truncated if it is very long."""
    if isinstance(record, str):
        return record if len(record) <= most else f"{record[:most]}... ({len(record)} characters)"
    each = {name: shown(value, most) if isinstance(value, str) else value for name, value in record.items()}
    return shown(json.dumps(each, ensure_ascii=True, default=str), most)


IMPORT_VERSION = 7
PART_ROWS = 5000
PART_CHARACTERS = 64 << 20
"""Largest size of a part, which bounds the memory of a step."""
UNREADABLE = "unreadable record"
NOT_ASKED_FOR = "not asked for"


def import_source(
    source: PipelineSource, folder: Path, most_characters: int, *, statements: bool = False
) -> list[Part]:
    """Return the parts of a source, importing those that are not in ``folder``.

    Args:
        source: Settings of the source.
        folder: Folder of the parts.
        most_characters: Longest field of a record.
        statements: Also read records without a usable answer, whose statements are only compared.

    Raises:
        RecipeError: The file or hub dataset does not exist.
        ValueError: A file cannot be read, or the folder cannot be written.
    """
    step = StepFolder(folder)
    files = source_files(source)
    settings = source.model_dump(mode="json", exclude={"path", "source"})  # names and content matter, not the location
    brought = None if source.source is None else (Path(source.source).name, file_fingerprint(source.source))
    # a missing file is reported when it is read
    whole = [sorted(path.rglob("*")) if path.is_dir() else [path] for path in files]
    sums = [checksum(file for file in some if file.is_file()) for some in whole]
    key = hash_of(IMPORT_VERSION, settings, brought, sums, most_characters, *(["statements"] if statements else []))
    record = step.path / "source.json"
    if record.is_file():
        state = json.loads(record.read_text(encoding="utf-8"))
        parts = [step.part(name, own) for name, own in state["parts"]]
        if state["key"] == key and all(map(step.has, parts)):
            return parts
    with told_when_full(step.path):
        parts = _import(EntryReader(source, most_characters, statements=statements), files, step, key)
        step.clear_except([part.name for part in parts])
        state = {"key": key, "parts": [[part.name, part.key] for part in parts]}
        write_atomically(record, json.dumps(state, indent=1))
    return parts


def _import(reader: EntryReader, files: list[Path], step: StepFolder, key: str) -> list[Part]:
    """Read the records into parts, continuing after those that a killed import left, and return all parts."""
    source = reader.source
    parts, seen, read = _taken_up(step, source.label, key)
    numbers = step.path / "numbers.json"  # those of the parts that a killed import left
    if numbers.is_file():
        reader.numbers.update(json.loads(numbers.read_text(encoding="utf-8")).get(key, {}))
    kept: list[Entry] = []
    dropped: list[dict[str, Any]] = []
    characters = 0

    def write() -> None:
        part = step.part(f"{source.label}.{len(parts):05d}", hash_of(key, len(parts)))
        if reader.numbers:
            step.path.mkdir(parents=True, exist_ok=True)
            write_atomically(numbers, json.dumps({key: reader.numbers}))
        # a killed import may have left the very part that is made again
        if not step.has(part):
            (step.path / "source.json").unlink(missing_ok=True)  # it says that the import has finished
            step.write(part, table_of(kept), pa.Table.from_pylist(dropped, schema=DROPPED_SCHEMA))
        parts.append(part)
        kept.clear()
        dropped.clear()

    # every record is a kept or dropped row, so their number says where a killed import continues
    for row, given in islice(_rows(source, files), read, source.limit):
        try:
            if isinstance(row, BadRow):
                raise ValueError(row.reason)
            entry = reader.entry(row, given)
            check_fields(entry)
            if entry.id in seen:
                # ids of a source may be doubled; the pipeline drops rows by id
                entry = replace(entry, id=f"{entry.id}#{row.index}")
            seen.add(entry.id)
            kept.append(entry)
            characters += len(entry.prompt) + sum(map(len, (*entry.references, *entry.solutions)))
        except ValueError as error:
            dropped.append(_dropped(source.label, row, error))
            characters += len(dropped[-1]["detail"])
        if len(kept) + len(dropped) >= PART_ROWS or characters >= PART_CHARACTERS:
            write()
            characters = 0
    try:
        if not reader.statements:
            check_numbers(reader.numbers)
    except ValueError:
        step.clear_except([])  # a later import must not continue with parts that were read wrong
        numbers.unlink(missing_ok=True)
        raise
    if kept or dropped or not parts:
        write()
    numbers.unlink(missing_ok=True)
    return parts


def _dropped(label: str, row: Row | BadRow, error: ValueError) -> dict[str, Any]:
    """Return the dropped row of a record: the reason, and its text unless the settings leave it out."""
    unwanted = isinstance(error, NotWanted)
    text = "" if unwanted else shown(row.text if isinstance(row, BadRow) else row.record)
    return {
        "id": f"{label}/{label}-{row.index}",
        "source": label,
        "where": row.where,
        "step": "import",
        "reason": NOT_ASKED_FOR if unwanted else UNREADABLE,
        "detail": f"{error}\n{text}".strip().encode("utf-8", "backslashreplace").decode(),
    }


def _taken_up(step: StepFolder, label: str, key: str) -> tuple[list[Part], set[str], int]:
    """Return the parts of a killed import, their ids, and the number of records that were read for them."""
    parts: list[Part] = []
    seen: set[str] = set()
    read = 0
    while True:
        part = step.part(f"{label}.{len(parts):05d}", hash_of(key, len(parts)))
        dropped = step.dropped / part.path.name
        # without both files the part is read again: the number of rows says where to continue
        if not step.has(part) or part_key(dropped) != part.key:
            return parts, seen, read
        ids: list[str] = read_part(part.path, ["id"]).column("id").to_pylist()
        seen.update(ids)
        read += len(ids) + read_part(dropped, ["id"]).num_rows
        parts.append(part)


def source_files(source: PipelineSource) -> list[Path]:
    """Return the files and folders of a source in order. A pattern without matches is an error."""
    found: list[Path] = []
    for text in source.paths:
        path = Path(text).expanduser()
        # a file may be called "train [v2].jsonl"
        pattern = any(sign in text for sign in "*?[") and not path.exists()
        matches = [Path(name) for name in sorted(glob.glob(str(path)))] if pattern else [path]
        if not matches:
            raise RecipeError(f"{path}: no file of that pattern", key="path")
        found += matches
    for name in ("split", "subset"):
        value, file = getattr(source, name), next((path for path in found if path.is_file()), None)
        if value is not None and file is not None:
            raise RecipeError(f"{file}: a file has no {name}, got {value!r}; remove it", key=name)
    return found


def unreadable_records(folder: StepFolder) -> list[str]:
    """Return why records of an imported source could not be read, a line each."""
    tables = folder.tables("dropped", ["reason", "detail"])
    texts = [text for one in tables for text in one.filter(field("reason") == UNREADABLE)["detail"].to_pylist()]
    return [text.partition("\n")[0] for text in texts]


def shown_place(source: PipelineSource) -> str:
    """Return name and place of a source for messages."""
    places = [without_secrets(path) for path in source.paths] or [source.source or source.hub or source.kind]
    return f"{source.label!r} ({', '.join(places)})"


def _rows(source: PipelineSource, files: list[Path]) -> Iterator[tuple[Row | BadRow, Problem | None]]:
    """Yield the records of a source, and the problem itself if a custom function returned one."""
    place = brought_place(source)
    if place is not None:
        for index, item in enumerate(place.rows()):
            if isinstance(item, Problem):
                record = {"id": item.id, "prompt": item.prompt, "references": item.references}
                yield Row(index=index, where=f"{place.name}, {item.id}", record=record), item
            else:
                yield item, None
        return
    kind = source.row if source.hub is None else None  # subset and split of the kind belong to its own data set
    split = source.split or (kind.split if kind is not None else "train")
    if not files:
        name, subset = (source.hub, None) if kind is None else (kind.hub, kind.subset)
        assert name is not None, "the schema checks it"
        rows = read_hub(name, splits=(split,), subset=source.subset or subset, revision=source.revision)
        yield from ((row, None) for row in rows)
        return
    # ``datasets`` calls files without the name of a split train
    splits = (split,) if source.split else (split, "train")
    index = 0
    for path in files:
        name, shown_name = str(path), without_secrets(str(path))
        for row in read_place(path, None, splits=splits, subset=source.subset):
            where = row.where if shown_name == name else row.where.replace(name, shown_name)
            # numbered across all files, because ids are made from it
            yield replace(row, index=index, where=where), None
            index += 1
