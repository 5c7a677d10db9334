"""Conversion of records to problems, with the columns that ``schemas.toml`` or the user names."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from decimal import Decimal
from typing import Any, cast

from magicrl.config.data_schema import FieldMapping
from magicrl.config.loader import shipped_table
from magicrl.config.section import Section
from magicrl.data.code_records import CodeTask, code_task
from magicrl.data.data_files import Row
from magicrl.data.multiple_choice import note_number, options_of, right_option, with_options
from magicrl.records import Message, Problem, prompt_key
from magicrl.registry import is_builtin
from magicrl_verifiers.code.suite import SuiteError, parse_suite
from magicrl_verifiers.extraction import marked_answer
from magicrl_verifiers.several import reward_names

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "tool": "tool",
}
"""Roles of the OpenAI format and of ShareGPT (``from``)."""


Turns = tuple[tuple[Message, ...], str, str | None]
"""A conversation: the turns before the last user turn, that turn, and the assistant turn after it or None."""


def read_turns(value: Any) -> Turns | None:
    """Return the turns of a list of messages, ``{role, content}`` or ShareGPT's ``{from, value}``, or of its JSON text.

    The result is None for plain text and other values.

    Raises:
        ValueError: A message has no known role or no text, no user turn is at the end, or it is Python's text of them.

    Example:
        >>> read_turns([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 3?"}])[1]
        '2 + 3?'
    """
    if isinstance(value, str):
        # parse only text that starts like a list of messages
        start = value.lstrip()[:200]
        if re.match(r"\[\s*\{\s*'(role|from|content|value)'\s*:", start):
            raise ValueError(
                "is Python's text of a list of messages, as pandas writes it into CSV; write JSONL or parquet instead"
            )
        if not start.startswith("[") or ('"role"' not in start and '"from"' not in start):
            return None
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if not isinstance(value, list):
        return None
    messages = [_message(entry, number) for number, entry in enumerate(cast("list[Any]", value), start=1)]
    # a last assistant turn is the answer; the prompt ends before it
    answer = messages.pop().content if len(messages) > 1 and messages[-1].role == "assistant" else None
    if not messages or messages[-1].role != "user":
        got = f"the role {messages[-1].role!r}" if messages else "no message"
        raise ValueError(f"must end in a user's message (or that and the assistant's answer), got {got}")
    if any(message.role == "system" for message in messages[1:]):
        raise ValueError("has a system message after its first message")
    return tuple(messages[:-1]), messages[-1].content, answer


def _message(entry: Any, number: int) -> Message:
    if not isinstance(entry, Mapping):
        raise ValueError(f"must be text or a list of {{role, content}} messages, got {str(entry)[:40]!r} in it")
    fields = cast("Mapping[str, Any]", entry)
    said = fields.get("role", fields.get("from"))
    role = _ROLES.get(str(said).lower())
    if role is None:
        raise ValueError(f"message {number}: the role {said!r} is unknown; known: {', '.join(_ROLES)}")
    content: Any = fields.get("content", fields.get("value"))
    if isinstance(content, list):  # the parts of a multimodal message
        parts: list[Any] = content
        # text parts only, because an image would be lost
        if all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
            content = "".join(part["text"] for part in parts)
    if not isinstance(content, str) or not content.strip():
        raise ValueError(f"message {number}: the content must be text, got {str(content)[:40]!r}")
    return Message(role, content)


_SHORT_TURN = 200
"""Longest last assistant turn, in characters and one line, that is the answer itself."""
OFFER = "--set data.train.0.fields.{field}={column}"
"""Setting with which a user of ``magicrl train`` names a column."""
_MISSING = ("nan", "NaN", "NAN", "<NA>", "#N/A", "N/A", "n/a", "null", "NULL", "None")
"""Texts that pandas, spreadsheets and ``str(None)`` leave for a missing value. "none" and "NA" may be answers."""
_TEST_KEYS = ("inputs", "inputs_kw", "test_code", "code", "assert_case", "checker")


class Quarantined(ValueError):
    """Raised for a well-formed record that cannot be used. The message has the reason without the place."""


class Template(Section):
    """Text around a prompt, not used if the conversation already contains ``unless``."""

    text: str
    unless: str | None = None

    def around(self, problem: Problem) -> Problem:
        """Return the problem with the template around its last turn."""
        if self.unless is not None and any(self.unless in message.content for message in problem.messages):
            return problem
        return replace(problem, prompt=self.text.replace("{prompt}", problem.prompt))


class Schema(Section):
    """Meaning of the columns of a dataset.

    Attributes:
        prompt: Columns of the statement, joined as sentences. Empty: a column that [columns] knows.
        answer: Column of the reference answer. None for code, and for conversations whose last turn is the answer.
        worked: True if the answer is a worked solution, which must mark its answer by a box or a last ``####``.
        id: Column of the id.
        level: Column of the difficulty level.
        date: Column of the publication date of the problem.
        needs: Additional columns that must exist.
        solutions: Columns of worked solutions or reference programs, each a text or a list of texts.
        notes: Columns that the pipeline keeps as notes.
        code: Format of the tests.
        released: True if reference answers and tests are JSON text, as in the released data.
    """

    prompt: tuple[str, ...] = ()
    answer: str | None = None
    worked: bool = False
    id: str | None = None
    level: str | None = None
    date: str | None = None
    needs: tuple[str, ...] = ()
    solutions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    code: str | None = None
    released: bool = False


class Columns(Section):
    """Known column names, compared without case."""

    prompt: tuple[str, ...]
    answer: tuple[str, ...]
    worked: tuple[str, ...]
    id: tuple[str, ...]
    level: tuple[str, ...]
    solutions: tuple[str, ...]
    notes: tuple[str, ...]


class Catalogue(Section):
    """Contents of ``schemas.toml``."""

    columns: Columns
    schemas: dict[str, Schema]
    templates: dict[str, Template]


def catalogue() -> Catalogue:
    """Return the schemas that magicrl knows."""
    return shipped_table("data/schemas.toml", Catalogue)


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """A problem and the other contents of its record.

    Attributes:
        problem: The problem, without a template. Its id contains the row number unless ``fields.id`` names a column.
        schema: A row of ``schemas.toml``, else the columns, such as ``question, answer``.
        columns: Columns of the prompt, and the column of the answer.
        template: Name of the template for the prompt.
        own_id: Id in a column that [columns] or the schema knows, or None.
        date: Publication date of the problem, or None.
        solutions: Distinct worked solutions or programs.
        notes: Notes of the source.
        unused: Columns that are not part of prompt, answer, id or level.
    """

    problem: Problem
    schema: str
    columns: tuple[tuple[str, ...], str | None]
    template: str = "maths"
    own_id: str | None = None
    date: date | None = None
    solutions: tuple[str, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    unused: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordReader:
    """Reader for the records of a source.

    Attributes:
        stem: Source of the problems, and first part of their ids.
        fields: Columns that the user named. They take precedence over known names.
        verifier: Verifier of problems without tests. With ``code`` the answer column holds tests.
        offer: Setting with which a user names a column, such as ``--set data.train.0.fields.{field}={column}``.
        reference: True if a record must have an answer. An environment may not need one.
        statements: Read a record whose answer or tests cannot be used without them, to compare its statement.
        extra: Keep the other columns in ``Problem.extra``.
        solutions: Additional columns of solutions.
        notes: Additional columns of notes.
        numbers: First rows whose answers can be read in two ways, for `check_numbers` after the last record.
    """

    stem: str
    fields: FieldMapping = field(default_factory=FieldMapping)
    verifier: str = "maths"
    offer: str = OFFER
    reference: bool = True
    statements: bool = False
    extra: bool = True
    solutions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    numbers: dict[str, str] = field(default_factory=dict[str, str])
    _found: dict[tuple[str, ...], tuple[str, Schema]] = field(default_factory=dict[tuple[str, ...], tuple[str, Schema]])

    @property
    def needs_reference(self) -> bool:
        """True if the verifier needs reference answers. A custom reward may not."""
        return is_builtin("reward", self.verifier)

    def read(self, row: Row) -> Read:
        """Return the problem of a record.

        Raises:
            Quarantined: The record is well-formed, but has no answer or no usable tests.
            ValueError: The columns of the problem and its answer are unknown (names the setting), or a field has the
                wrong type (names file, line and field).
        """
        # columns without a value do not count: parquet gives every row all of them
        present = tuple(name for name, value in row.record.items() if value is not None)
        # computed once for all rows with these columns
        if present not in self._found:
            self._found[present] = self._schema(row, present)
        name, schema = self._found[present]
        reader = _RowReader(row=row, reader=self, name=name, schema=schema, options=options_of(row.record))
        try:
            return reader.read()
        except Quarantined:
            if not self.statements:
                raise
            return reader.without_answer()

    def named(self, what: str, column: str = "COLUMN") -> str:
        """Return the setting that makes ``column`` the column of ``what``."""
        return self.offer.format(field=what, column=json.dumps(column) if re.search(r"[\s\"']", column) else column)

    def _schema(self, row: Row, present: tuple[str, ...]) -> tuple[str, Schema]:
        """Return the first schema that fits, else one made from known column names."""
        own = self.fields
        known = catalogue()
        # a column that the user named wins over every known schema
        if own.prompt is None and own.answer is None:
            for name, schema in known.schemas.items():
                if all(column in present for column in (*schema.prompt, *schema.needs)) and (
                    schema.answer is None or schema.answer.partition(".")[0] in present
                ):
                    prompt = schema.prompt or (self._column(row, present, "prompt", known.columns.prompt),)
                    return name, self._completed(schema.model_copy(update={"prompt": prompt}), present)
        prompt = (own.prompt,) if isinstance(own.prompt, str) else own.prompt
        if prompt is None:
            prompt = (self._column(row, present, "prompt", known.columns.prompt),)
        if reward_names(self.verifier)[0] == "code" and own.answer is not None:
            schema = Schema(prompt=prompt, answer=own.answer, code="given")
            return f"{', '.join(prompt)}, {own.answer}", self._completed(schema, present)
        worked = False
        answer = own.answer
        if answer is None and _one_of(present, known.columns.answer, prompt):
            answer = self._column(row, present, "answer", known.columns.answer, prompt)
        elif answer is None and _one_of(present, known.columns.worked, prompt):
            answer = self._column(row, present, "answer", known.columns.worked, prompt)
            worked = True
        elif answer is None and self.needs_reference and self.reference and not _ends_in_answer(row, prompt):
            answer = self._column(row, tuple(row.record), "answer", known.columns.answer, prompt)
        schema = Schema(prompt=prompt, answer=answer, worked=worked or answer is None)
        return f"{', '.join(prompt)}, {answer or 'last turn'}", self._completed(schema, present)

    def _completed(self, schema: Schema, present: tuple[str, ...]) -> Schema:
        """Return the schema with the columns of id, level, solutions and notes."""
        known = catalogue().columns
        used = (*schema.prompt, schema.answer)
        return schema.model_copy(
            update={
                "id": self.fields.id or schema.id or next(iter(_one_of(present, known.id, used)), None),
                "level": self.fields.level or schema.level or next(iter(_one_of(present, known.level, used)), None),
                "solutions": self.solutions or (*schema.solutions, *_one_of(present, known.solutions, used)),
                "notes": self.notes or (*schema.notes, *_one_of(present, known.notes, used)),
            }
        )

    def _column(
        self, row: Row, present: Sequence[str], what: str, names: Sequence[str], used: Sequence[str | None] = ()
    ) -> str:
        """Return the only column that may hold ``what``. An empty column counts only if no other has a value.

        Raises:
            ValueError: There is no such column, or there are several.
        """
        found = _one_of(present, names, used) or _one_of(tuple(row.record), names, used)
        if len(found) == 1:
            return found[0]
        columns = ", ".join(f"{name} ({_excerpt(value)})" for name, value in row.record.items()) or "none"
        meant = "problem" if what == "prompt" else "answer"
        if found:
            raise ValueError(
                f"{row.where}: several columns may hold the {meant}: {', '.join(found)}. It has: {columns}. "
                f"Remedy: {self.named(what, found[0])}, or another of them"
            )
        guess = self._guess(row, what, used)
        if what == "answer" and guess is None:
            raise ValueError(
                f"{row.where}: no column of the answer is known. It has: {columns}. Remedy: name it, "
                f"{self.named('answer')}, with the name of the column for COLUMN; else add a column 'answer', or use a "
                "reward function, which needs none"
            )
        remedy = self.named(what, guess or "COLUMN")
        known = catalogue().columns
        if what == "prompt" and self.fields.answer is None and not _one_of(row.record, (*known.answer, *known.worked)):
            remedy += " " + self.named("answer", self._guess(row, "answer", (guess,)) or "COLUMN")
        raise ValueError(
            f"{row.where}: no column of the {meant} is known. It has: {columns}. Remedy, if this is what they hold: "
            f"{remedy}{', with the name of the column for COLUMN' if 'COLUMN' in remedy else ''}; else name others, or "
            "correct the row"
        )

    def _guess(self, row: Row, what: str, used: Sequence[str | None]) -> str | None:
        """Return the column whose name is nearest to a known one, else the longest text for the prompt, and the only
        further column for the answer. None where it could be any of several: a wrong guess would be copied.
        """
        known = catalogue().columns
        names = known.prompt if what == "prompt" else (*known.answer, *known.worked)
        left = [name for name in map(str, row.record) if name not in used and name.lower() not in known.id]
        near = [name for name in left if difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.6)]
        if near:
            return near[0]
        sizes = {name: len(str(row.record[name])) for name in left if isinstance(row.record[name], str | int | float)}
        if what == "prompt" and sizes:
            return max(sizes, key=sizes.__getitem__)
        return next(iter(sizes)) if len(sizes) == 1 else None


def _excerpt(value: Any) -> str:
    text = " ".join(str(value).split())
    return repr(text if len(text) <= 24 else f"{text[:23]}…")


def _one_of(present: Iterable[str], names: Sequence[str], used: Sequence[str | None] = ()) -> list[str]:
    """Return the columns with these names, compared without case, in the order of ``names``."""
    lower: dict[str, list[str]] = {}
    for column in present:
        lower.setdefault(str(column).lower(), []).append(column)
    return [column for name in names for column in lower.get(name, []) if column not in used]


def _ends_in_answer(row: Row, prompt: Sequence[str]) -> bool:
    """Return whether the prompt is a conversation that ends with an assistant turn."""
    if len(prompt) != 1 or prompt[0] not in row.record:
        return False
    try:
        turns = read_turns(row.record[prompt[0]])
    except ValueError:
        return True  # the reader of the row names the fault, which is not that of the columns
    return turns is not None and turns[2] is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class _RowReader:
    """Converter of one record to a problem. Its errors name the place of the record and the remedy."""

    row: Row
    reader: RecordReader
    name: str
    schema: Schema
    options: tuple[tuple[str, ...], list[str], list[str]]
    """Columns, labels and texts of the options of a multiple-choice question, from `options_of`."""

    def read(self) -> Read:
        schema = self.schema
        if schema.code is not None:
            return self._code(self._statement(), self.row.record, schema.code, schema.answer)
        context, prompt, answer = self._conversation() or ((), self._statement(), None)
        if schema.released:
            tests = _released_tests(self.row, self._value("reward_model.ground_truth", "answer"))
            if tests is not None:
                given = {"tests": tests}
                return replace(self._code(prompt, given, "given", None, context), template="bare")
        return self._answered(context, prompt, answer)

    def without_answer(self) -> Read:
        context, prompt, _ = self._conversation() or ((), self._statement(), None)
        return self._read(self._problem(context, prompt, (), "maths"), "bare")

    def _answered(self, context: tuple[Message, ...], prompt: str, answer: str | None) -> Read:
        schema = self.schema
        raw = answer if schema.answer is None else self._value(schema.answer, "answer")
        where = schema.answer or schema.prompt[0]
        columns, labels, options = self.options
        if columns and not options and self.reader.needs_reference:
            kind = type(self.row.record[columns[0]]).__name__
            raise Quarantined(
                f"field {columns[0]!r} has no options that can be read, got {kind}; "
                'give a list of 2 to 26 texts, ["Rome", "Paris"], or rename the column'
            )
        if options:
            prompt = with_options(prompt, labels, options)
            right = right_option(raw, labels, options)
            note_number(self.reader.numbers, self.row.where, raw, labels, options, right)
            if right is None and self.reader.needs_reference and raw not in (None, ""):
                raise Quarantined(f"the answer {raw!r:.60} is none of the options {', '.join(labels)}")
            raw = raw if right is None else list(right)
        if schema.released:
            raw = _parsed_references(raw)
        strict = self.reader.needs_reference and (self.reader.reference or raw not in (None, "", []))
        if raw == [] and (strict or schema.released):
            raise Quarantined(f"no answer: field {where!r} is an empty list")
        given: list[Any] = cast("list[Any]", raw) if isinstance(raw, list) else [raw]
        references = tuple(self._reference(where, each) for each in given) if strict else _texts_of(given)
        texts = [text for text in [answer, *self._texts(schema.solutions)] if text]
        # a text that marks its answer is a solution, too
        texts += [
            t for t in given if isinstance(t, str) and t.strip() not in references and marked_answer(t) not in (None, t)
        ]
        problem = self._problem(context, prompt, references, self.reader.verifier)
        own = [text for text in dict.fromkeys(texts) if text.strip() not in references]
        # A reward function needs no answer in the response, so that any response is a solution.
        if schema.worked and not self.reader.needs_reference:
            own = [text for text in given if isinstance(text, str) and text.strip()]
        return self._read(problem, "maths" if strict else "bare", tuple(own))

    def _code(
        self,
        statement: str,
        record: Mapping[str, Any],
        kind: str,
        tests: str | None,
        context: tuple[Message, ...] = (),
    ) -> Read:
        """Return a problem with tests, or raise Quarantined if they cannot be run."""
        if tests is not None:
            value = self._value(tests, "answer")
            record = {**record, "tests": value}
        try:
            if kind == "given":
                _check_tests_given(record["tests"])
            task: CodeTask = code_task(record, kind, statement)
            parse_suite(task.tests)
        except (SuiteError, ValueError) as error:
            raise Quarantined(str(error)) from None
        if not task.prompt.strip():
            raise Quarantined("the prompt is empty; remove the row or correct it")
        problem = self._problem(context, task.prompt, (json.dumps(task.tests, ensure_ascii=False),), "code")
        found = tuple(dict.fromkeys([*task.solutions, *self._texts(self.schema.solutions)]))
        return self._read(problem, task.style, found)

    def _problem(
        self, context: tuple[Message, ...], prompt: str, references: tuple[str, ...], verifier: str
    ) -> Problem:
        schema, record, fields = self.schema, self.row.record, self.reader.fields
        for text in (prompt, *(message.content for message in context)):
            self._whole(", ".join((*schema.prompt, *self.options[0])), text)
        used = {*schema.prompt, schema.answer, fields.id, fields.level} - {None}
        used |= {"reward_model"} if schema.released else set()
        used |= {*self.options[0]} if self.options[2] else set()
        if not self.reader.needs_reference:
            used -= {schema.answer}  # a custom reward may read the answer under its column's name, as in TRL
        source = record.get("data_source") if schema.released else None
        # rows of the pipeline also hold the bare statement, which is the same problem without a template
        bare = record.get("problem") if schema.released and not context else None
        return Problem(
            id=f"{self.reader.stem}-{self.row.index}" if fields.id is None else self._identifier(fields.id),
            prompt=prompt,
            context=context,
            references=references,
            verifier=verifier,
            source=source if isinstance(source, str) and source else self.reader.stem,
            level=self._level(),
            key=prompt_key(bare) if isinstance(bare, str) and bare in prompt else "",
            extra={key: value for key, value in record.items() if key not in used} if self.reader.extra else {},
        )

    def _read(self, problem: Problem, template: str, solutions: tuple[str, ...] = ()) -> Read:
        record, schema = self.row.record, self.schema
        for text in solutions:
            self._whole(", ".join(schema.solutions or schema.prompt), text)
        own = None if schema.id is None else record.get(schema.id)
        said = {name: record[name] for name in schema.notes if record.get(name) not in (None, "", [])}
        used = {*schema.prompt, *schema.needs, *schema.solutions, *self.options[0]}
        used |= {schema.answer, str(schema.answer).partition(".")[0], schema.id, schema.level} - {None}
        return Read(
            problem=problem,
            schema=self.name,
            columns=(schema.prompt, schema.answer),
            template=template,
            own_id=str(own) if isinstance(own, str | int) and own != "" else None,
            date=self._day(),
            solutions=solutions,
            notes=said,
            unused=tuple(name for name in record if name not in used),
        )

    def _error(self, name: str, problem: str, remedy: str) -> ValueError:
        return ValueError(f"{self.row.where}: field {name!r} {problem}; {remedy}")

    def _value(self, name: str, what: str) -> Any:
        """Return the value of a dotted name. A key that contains the dots takes precedence."""
        record = self.row.record
        if name in record:
            return record[name]
        value: Any = record
        for part in name.split("."):
            if not isinstance(value, Mapping):
                kind = type(value).__name__
                remedy = self.reader.named(what)
                raise self._error(name, f"has nothing named {part!r} inside {kind}", f"name another: {remedy}")
            if part not in value:
                near = difflib.get_close_matches(part.lower(), [str(k).lower() for k in value], n=1, cutoff=0.5)
                nearest = next((str(k) for k in value if near and str(k).lower() == near[0]), None)
                hint = f"; the nearest is {nearest!r}" if nearest else ""
                raise ValueError(
                    f"{self.row.where}: no field {name!r}{hint}. It has: {', '.join(map(str, value)) or 'none'}. "
                    f"Remedy: {self.reader.named(what, nearest or 'COLUMN')}, or correct the row"
                )
            value = cast("Mapping[str, Any]", value)[part]
        return value

    def _conversation(self) -> Turns | None:
        if len(self.schema.prompt) != 1:
            return None
        name = self.schema.prompt[0]
        value = self._value(name, "prompt")
        try:
            return read_turns(value)
        except ValueError as error:
            raise self._error(name, str(error), "correct the row") from None

    def _statement(self) -> str:
        """Return the text of the prompt, with several columns joined as sentences."""
        texts: list[str] = []
        for name in self.schema.prompt:
            value = self._value(name, "prompt")
            if not isinstance(value, str):
                remedy = f"put it in quotes, or name another column: {self.reader.named('prompt')}"
                raise self._error(name, f"must be text, got {type(value).__name__} ({str(value)[:40]!r})", remedy)
            if not value.strip():
                raise self._error(name, "is empty", "remove the row or correct it")
            texts.append(value)
        if len(texts) == 1:
            return texts[0]
        ended = [text if text.endswith((".", "?", "!", ":", ",")) else text + "." for text in map(str.strip, texts)]
        return " ".join([*ended[:-1], texts[-1].strip()])

    def _whole(self, name: str, text: str) -> str:
        """Return ``text``, or raise if it has a lone surrogate, which JSON allows but no tokenizer reads."""
        half = re.search("[\ud800-\udfff]", text)
        if half:
            raise self._error(name, f"holds half a character ({half.group()!r})", "correct the text")
        return text

    def _identifier(self, name: str) -> str:
        value = self._value(name, "id")
        if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
            remedy = "correct it, or leave fields.id out to number the rows"
            raise self._error(name, f"must be a non-empty text or integer id, got {value!r}", remedy)
        return self._whole(name, str(value))

    def _level(self) -> int | None:
        """Return an integer, or that at the end of a text (``Level 5``). Others raise if the user named the column."""
        if self.schema.level is None:
            return None
        named = self.reader.fields.level is not None
        value = self._value(self.schema.level, "level") if named else self.row.record.get(self.schema.level)
        found = re.fullmatch(r"(?:[A-Za-z ]*[ ])?(\d+)(?:\.0)?", str(value).strip())
        # True is an int in Python, but no level
        if found is not None and not isinstance(value, bool):
            return int(found.group(1))
        if named:
            raise self._error(self.schema.level, f"must be an integer level or end in one, got {value!r}", "correct it")
        return None

    def _reference(self, name: str, value: Any) -> str:
        """Return an accepted answer: the marked answer of a solution, else the text itself."""
        if value is None or value in _MISSING or (isinstance(value, float) and not math.isfinite(value)):
            raise Quarantined(f"no answer: field {name!r} holds {value}")
        if isinstance(value, float | Decimal) and value == int(value):
            value = int(value)  # JSON, CSV and Parquet tools write 51 as 51.0
        if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
            kind = type(value).__name__
            remedy = f"correct it, or name another column: {self.reader.named('answer')}"
            raise self._error(name, f"must be text, a number or a list of them, got {kind} ({value!r:.40})", remedy)
        text = str(value).strip()
        if re.fullmatch(r"(?s)\[\s*(['\"]).*\1\s*\]", text):
            self.reader.numbers.setdefault("list", self.row.where)
        marked = marked_answer(text)
        # a whole worked solution as the reference answer would match no answer; a last turn of one line is an answer
        short = self.schema.answer is None and "\n" not in text and len(text) <= _SHORT_TURN
        if marked is None and self.schema.worked and text and not short:
            raise Quarantined(
                f"no answer: the text of field {name!r} has neither a box nor a last line with ####; "
                + (
                    f"if the whole text is the answer: {self.reader.named('answer', name)}"
                    if self.schema.answer is not None
                    else "put the answer into a column of its own, or use a custom reward"
                )
            )
        reference = (text if marked is None else marked).strip()
        if len(reference) > 1 and reference.count("$") == 2 and reference[0] == reference[-1] == "$":
            reference = reference[1:-1].strip()  # a formula's dollar signs are no part of it
        if not reference:
            raise Quarantined(f"no answer: field {name!r} is empty")
        return self._whole(name, reference)

    def _texts(self, columns: Sequence[str]) -> list[str]:
        """Return the distinct texts in these columns, in order."""
        found: list[str] = []
        for column in columns:
            value = self.row.record.get(column)
            texts: list[Any] = cast("list[Any]", value) if isinstance(value, list) else [value]
            found += [text for text in texts if isinstance(text, str) and text.strip() and text not in found]
        return found

    def _day(self) -> date | None:
        name = self.schema.date
        value = None if name is None else self.row.record.get(name)
        if name is None or value in (None, "", "None"):
            return None
        try:
            return date.fromisoformat(str(value)[:10])
        except ValueError:
            raise self._error(name, f"must be a day such as 2024-08-01, got {value!r}", "correct it") from None


def _texts_of(values: Sequence[Any]) -> tuple[str, ...]:
    """Return the reference answers for a custom reward: the values as text, without empty ones."""
    kept = [one for one in values if one is not None and one != ""]
    return tuple(one if isinstance(one, str) else json.dumps(one, ensure_ascii=False, default=str) for one in kept)


def _json(value: Any) -> Any:
    """Return the value of a JSON text, None for other text, and any other value unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):  # LaTeX, zero-padded numbers: the text itself is the reference answer
        return None


def _parsed_references(value: Any) -> Any:
    """Return the reference answers of the released schema: a JSON list of texts, one JSON text, or the value itself."""
    parsed = _json(value)
    if parsed == [] or isinstance(parsed, str):
        return parsed
    several = isinstance(parsed, list) and all(isinstance(reference, str) for reference in cast("list[Any]", parsed))
    return parsed if several else value


def _released_tests(row: Row, value: Any) -> Any:
    """Return the tests of a code problem of the released schema, None for other problems.

    Raises:
        Quarantined: A code problem has no tests in a known format.
    """
    parsed = _json(value)
    if isinstance(parsed, Mapping) and any(parsed.get(key) for key in _TEST_KEYS):
        return cast("Mapping[str, Any]", parsed)
    if row.record.get("ability") != "code":
        return None
    if isinstance(parsed, list) and parsed and all(isinstance(text, str) for text in cast("list[Any]", parsed)):
        return {"assert_case": parsed}
    raise Quarantined("a code problem without tests in a known form")


def _check_tests_given(value: Any) -> None:
    try:
        tests = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"field 'tests' is text but no JSON: {error}") from None
    if not isinstance(tests, Mapping) or not any(tests.get(key) for key in (*_TEST_KEYS, "type")):
        known = ", ".join(_TEST_KEYS)
        raise ValueError(f"field 'tests' must be an object of tests with one of {known}, got {value!r:.60}")
