"""From one record of a benchmark to one problem, by the first form whose columns it has."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any, Literal

from magicrl.config.schema import FieldMapping, Section
from magicrl.data.readers import Row
from magicrl.data.schemas import is_released, problem_by_fields, problem_released
from magicrl.evaluation.code_records import CodeTask, code_task
from magicrl.records import Problem
from magicrl.verifiers.code.suite import SuiteError, parse_suite
from magicrl.verifiers.extraction import last_box

_PROMPT = "\0prompt"
_ANSWER = "\0answer"


class Form(Section):
    """Which columns of a record hold what.

    Attributes:
        prompt: columns of the statement, joined as sentences.
        answer: column of the gold answer, None for code.
        boxed: the gold is what the answer's last box holds.
        id: column of an id; the row's number where there is none.
        level: column of a difficulty level.
        date: column of the day the problem appeared, if it has one.
        needs: further columns that must be there.
        code: how the tests are read.
    """

    prompt: tuple[str, ...]
    answer: str | None = None
    boxed: bool = False
    id: str | None = None
    level: str | None = None
    date: str | None = None
    needs: tuple[str, ...] = ()
    code: Literal["given", "humaneval", "mbpp", "mbpp_plus", "livecodebench"] | None = None

    def fits(self, record: dict[str, Any]) -> bool:
        needed = [
            *self.prompt,
            *self.needs,
            *([self.answer] if self.answer else []),
            *([self.level] if self.level else []),
        ]
        return all(name in record for name in needed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """A problem as its record gives it: no text around the prompt yet, which ``template`` names."""

    problem: Problem
    template: str
    date: date | None = None


def read_record(row: Row, forms: Sequence[Form], *, stem: str) -> Read:
    """The problem of a record.

    Raises:
        ValueError: no form fits, or a field is missing, empty or of the wrong type; names file, line and field.
    """
    if is_released(row):
        return _released(row, stem)
    form = next((form for form in forms if form.fits(row.record)), None)
    if form is None:
        raise ValueError(
            f"{row.where}: no known form; it has the columns {', '.join(map(str, row.record)) or 'none'}. "
            "Name them with --field prompt=COLUMN --field answer=COLUMN"
        )
    day = _day(row, form.date)
    if form.code is not None:
        name = str(row.record[form.id]) if form.id and row.record.get(form.id) is not None else f"{stem}-{row.index}"
        try:
            task = code_task(row.record, form.code, "\n\n".join(str(row.record[column]) for column in form.prompt))
        except ValueError as error:
            raise ValueError(f"{row.where}: {error}") from None
        return Read(problem=_code_problem(row, task, name=name, stem=stem), template=task.style, date=day)
    return Read(problem=_by_fields(row, form, stem), template="maths", date=day)


def _by_fields(row: Row, form: Form, stem: str) -> Problem:
    assert form.answer is not None, "a form without code has an answer"
    answer = row.record[form.answer]
    if form.boxed:
        answer = last_box(str(answer))
        if answer is None:
            raise ValueError(f"{row.where}: field {form.answer!r}: the solution boxes no answer; correct the row")
    answer = _fitting(answer)
    statement = _sentences([row.record[column] for column in form.prompt])
    known = dict(row.record) | {_PROMPT: statement, _ANSWER: answer}
    mapping = FieldMapping(prompt=_PROMPT, answer=_ANSWER, id=_id_column(row, form), level=form.level)
    try:
        problem = problem_by_fields(replace(row, record=known), mapping, stem=stem, verifier="maths")
    except ValueError as error:
        raise ValueError(
            str(error).replace(repr(_PROMPT), repr(form.prompt[0])).replace(repr(_ANSWER), repr(form.answer))
        ) from None
    return replace(problem, extra={})


def _id_column(row: Row, form: Form) -> str | None:
    """The form's, else a column ``id`` or ``unique_id`` that is there."""
    for name in (form.id, "id", "unique_id"):
        if name is not None and isinstance(row.record.get(name), str | int):
            return name
    return None


def _fitting(answer: Any) -> Any:
    """A gold in dollar signs (a formula) without them, since they are no part of it."""
    if isinstance(answer, list):
        return [_fitting(item) for item in answer]
    if isinstance(answer, str) and answer.count("$") == 2 and answer.startswith("$") and answer.endswith("$"):
        return answer[1:-1]
    return answer


def _sentences(parts: Sequence[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    texts = [str(part).strip() for part in parts]
    return (
        " ".join(text if text.endswith((".", "?", "!", ":", ",")) else text + "." for text in texts[:-1])
        + " "
        + texts[-1]
    )


def _day(row: Row, column: str | None) -> date | None:
    value = None if column is None else row.record.get(column)
    if value in (None, "", "None"):
        return None
    try:
        return date.fromisoformat(str(value)[:10])
    except ValueError:
        raise ValueError(f"{row.where}: field {column!r} must be a day such as 2024-08-01, got {value!r}") from None


def _released(row: Row, stem: str) -> Read:
    """A prompt with tests says everything itself; one with an answer may lack the instruction to box it."""
    problem = replace(problem_released(row, stem=stem, verifier="maths"), extra={})
    if problem.verifier == "code":
        _check_tests(row, json.loads(problem.golds[0]))
    return Read(problem=problem, template="bare" if problem.verifier == "code" else "maths")


def _check_tests(row: Row, tests: Any) -> None:
    try:
        parse_suite(tests)
    except SuiteError as error:
        raise ValueError(f"{row.where}: {error}") from None


def _code_problem(row: Row, task: CodeTask, *, name: str, stem: str) -> Problem:
    _check_tests(row, task.tests)
    if not task.prompt.strip():
        raise ValueError(f"{row.where}: the prompt is empty; remove the row or correct it")
    return Problem(id=name, prompt=task.prompt, golds=(json.dumps(task.tests),), verifier="code", source=stem)
