"""From one record of a source to one entry, or to the reason why it cannot be one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from magicrl.data.readers import Row
from magicrl.data.schemas import is_released
from magicrl.evaluation.benchmarks import Template, catalogue
from magicrl.evaluation.records import Read, read_record
from magicrl.pipeline.entry import Ability, Entry, entry_of, is_entry
from magicrl.pipeline.sources.conversions import converted
from magicrl.pipeline.sources.kinds import EntryForm
from magicrl.pipeline.sources.settings import PipelineSource


class NotWanted(ValueError):
    """A well-formed record that the source's settings leave out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordReader:
    """Reads the records of one source.

    Attributes:
        source: its settings.
        most_characters: a longer field sets its record aside.
        forms: filled while it reads.
    """

    source: PipelineSource
    most_characters: int
    forms: dict[tuple[str, ...], EntryForm] = field(default_factory=dict[tuple[str, ...], EntryForm])
    """The form of records with these columns, once found: it depends on nothing else."""

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
        if is_released(row):
            return self._released(row)
        row, form = self._in_its_form(_with_dotted(row, self.source))
        read = read_record(row, [form], stem=self.source.label)
        entry = self._entry(row, read)
        notes = {name: row.record[name] for name in form.notes if row.record.get(name) not in (None, "", [])}
        solutions = tuple(text for text in _solutions(row.record, form.solutions) if text.strip() not in entry.golds)
        return replace(entry, solutions=solutions, notes=notes)

    def _entry(self, row: Row, read: Read) -> Entry:
        label = self.source.label
        problem = read.problem
        ability: Ability = "code" if problem.verifier == "code" else "math"
        if self.source.ability is not None and self.source.ability != ability:
            raise ValueError(
                f"{row.where}: is a {ability} problem, and the source is said to hold {self.source.ability}"
            )
        own = self.source.template
        template = Template(text=own, unless=None) if own is not None else catalogue().templates[read.template]
        name = problem.id.removeprefix(f"{label}/")
        return Entry(
            id=f"{label}/{name}",
            source=label,
            data_source=label,
            ability=ability,
            problem=problem.prompt,
            prompt=template.around(problem.prompt),
            golds=(released_tests(problem.golds[0]),) if ability == "code" else problem.golds,
            index=row.index,
            level=problem.level,
            where=row.where,
        )

    def _released(self, row: Row) -> Entry:
        read = read_record(row, [], stem=self.source.label)
        entry = self._entry(row, read)
        own = row.record.get("data_source")
        extra = row.record.get("extra_info")
        known = cast("Mapping[str, Any]", extra) if isinstance(extra, Mapping) else {}
        rates = known.get("model_difficulty")
        pairs = cast("Mapping[str, Any]", rates).items() if isinstance(rates, Mapping) else rates or ()
        return replace(
            entry,
            data_source=own if isinstance(own, str) and own else entry.data_source,
            difficulty={str(name): int(count) for name, count in pairs if count is not None},
        )

    def _in_its_form(self, row: Row) -> tuple[Row, EntryForm]:
        columns = tuple(row.record)
        form = self.forms.get(columns) or next((one for one in self.source.forms() if one.fits(row.record)), None)
        if form is None:
            known = ", ".join(map(str, row.record)) or "none"
            raise ValueError(
                f"{row.where}: no known form; it has the columns {known}. Name them with columns = {{ problem = ..., "
                "answer = ... }"
            )
        self.forms[columns] = form
        if form.convert is None:
            return row, form
        try:
            done = replace(row, record=converted(row.record, form.convert))
            return done, form.model_copy(update={"convert": None, "needs": ()})
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{row.where}: {error}") from None

    def _check_size(self, row: Row) -> None:
        for name, value in row.record.items():
            size = len(value) if isinstance(value, str | bytes) else 0
            if size > self.most_characters:
                raise ValueError(
                    f"{row.where}: field {name!r} has {size} characters, more than max_field_characters = "
                    f"{self.most_characters}"
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


_RELEASED_NAMES = {"code": "test_code", "prelude": "import_prefix", "inputs_kw": "inputs"}


def released_tests(tests: str) -> str:
    """Tests under the names that the released schema has for them, which training's reader knows.

    Example:
        >>> released_tests('{"type": "assert", "code": "assert f(1) == 2"}')
        '{"test_code": "assert f(1) == 2"}'
    """
    parsed: Any = json.loads(tests)
    if not isinstance(parsed, dict):
        return tests
    known = cast("dict[str, Any]", parsed)
    renamed = {name: value for name, value in known.items() if name not in _RELEASED_NAMES and name != "type"}
    for name, own in _RELEASED_NAMES.items():
        if known.get(name) is not None:
            renamed.setdefault(own, known[name])
    return json.dumps(renamed, ensure_ascii=False)


def _with_dotted(row: Row, source: PipelineSource) -> Row:
    """The record with the nested values that ``columns`` names by dots as columns of their own."""
    if source.columns is None:
        return row
    own = source.columns
    first = (own.problem,) if isinstance(own.problem, str) else own.problem
    named = [*first, own.answer, own.id, own.level, *own.solutions, *own.notes]
    added: dict[str, Any] = {}
    for name in named:
        if name is None or "." not in name or name in row.record:
            continue
        value: Any = row.record
        for part in name.split("."):
            value = cast("Mapping[str, Any]", value).get(part) if isinstance(value, Mapping) else None
        if value is not None:
            added[name] = value
    return replace(row, record={**row.record, **added}) if added else row


def _solutions(record: Mapping[str, Any], columns: Sequence[str]) -> tuple[str, ...]:
    """Every text in the solution columns, each once, in order."""
    found: list[str] = []
    for column in columns:
        value = record.get(column)
        texts: list[Any] = cast("list[Any]", value) if isinstance(value, list) else [value]
        found += [text for text in texts if isinstance(text, str) and text.strip() and text not in found]
    return tuple(found)


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
