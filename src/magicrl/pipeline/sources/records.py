"""From one record of a source to one entry, or to the reason why it cannot be one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from magicrl.data.readers import Quarantined, Read, RecordReader, Row
from magicrl.data.schemas import Template, catalogue
from magicrl.pipeline.entry import Ability, Entry, entry_of, is_entry
from magicrl.pipeline.sources.settings import PipelineSource


class NotWanted(ValueError):
    """A well-formed record that the source's settings leave out."""


class EntryReader:
    """Reads the records of one source of a pipeline: `data.readers`, and what the source's settings leave out."""

    def __init__(self, source: PipelineSource, most_characters: int) -> None:
        """
        Args:
            source: its settings.
            most_characters: a longer field sets its record aside.
        """
        self.source = source
        self._most = most_characters
        own = source.fields
        self._reader = RecordReader(
            stem=source.label,
            fields=own,
            verifier="code" if source.ability == "code" else "maths",
            offer="--set fields.{field}={column}",
            solutions=own.solutions,
            notes=own.notes,
        )

    def entry(self, row: Row) -> Entry:
        """The entry of a record.

        Raises:
            NotWanted: the settings leave it out.
            ValueError: it cannot be one; says why.
        """
        self._check_size(row)
        if is_entry(row.record):
            return entry_of(row.record)
        self._check_wanted(row.record)
        try:
            read = self._reader.read(row)
        except Quarantined as error:
            raise ValueError(f"{row.where}: {error}") from None
        return self._entry(row, read)

    def _entry(self, row: Row, read: Read) -> Entry:
        label = self.source.label
        problem = read.problem
        ability: Ability = "code" if problem.verifier == "code" else "math"
        if self.source.ability is not None and self.source.ability != ability:
            raise ValueError(
                f"{row.where}: is a {ability} problem, and the source is said to hold {self.source.ability}"
            )
        own = self.source.template
        template = Template(text=own) if own is not None else catalogue().templates[read.template]
        named = self.source.fields.id is not None or read.own_id is None
        name = (problem.id if named else str(read.own_id)).removeprefix(f"{label}/")
        return Entry(
            id=f"{label}/{name}",
            source=label,
            data_source=problem.source,
            ability=ability,
            problem=problem.prompt,
            prompt=template.around(problem).prompt,
            context=problem.context,
            golds=problem.golds,
            solutions=read.solutions,
            index=row.index,
            level=problem.level,
            where=row.where,
            difficulty=_recorded_difficulty(problem.extra),
            notes=read.notes,
        )

    def _check_size(self, row: Row) -> None:
        for name, value in row.record.items():
            size = len(value) if isinstance(value, str | bytes) else 0
            if size > self._most:
                raise ValueError(
                    f"{row.where}: field {name!r} has {size} characters, more than max_field_characters = {self._most}"
                )

    def _check_wanted(self, record: Mapping[str, Any]) -> None:
        for column, values in self.source.only.items():
            if column not in record:
                raise ValueError(f"no column {column!r}, which `only` names; it has: {', '.join(map(str, record))}")
            if str(record[column]) not in values:
                raise NotWanted(f"{column} is {str(record[column])[:80]!r}")
        before = None if self.source.row is None else self.source.row.before
        for column in before.columns if before is not None else ():
            assert before is not None
            if column in record:
                year = int(str(record[column]))
                if year >= before.value:
                    raise NotWanted(f"{column} {year} is not before {before.value}")
                return


def _recorded_difficulty(extra: Mapping[str, Any]) -> dict[str, int]:
    """Failures of 16 by model, where the record has the released schema's column of them."""
    info = extra.get("extra_info")
    rates: Any = cast("Mapping[str, Any]", info).get("model_difficulty") if isinstance(info, Mapping) else None
    pairs = cast("Mapping[str, Any]", rates).items() if isinstance(rates, Mapping) else rates or ()
    return {str(name): int(count) for name, count in pairs if count is not None}


def check_text(entry: Entry) -> None:
    r"""Refuse text that no file can hold: JSON can say half of a surrogate pair (``"\ud800"``), UTF-8 cannot.

    Statement and golds were looked at when they were read.

    Raises:
        ValueError: names the field.
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
