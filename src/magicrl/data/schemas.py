"""From one record of a file to one problem: by a field mapping, or in the released schema (RECIPE section 7)."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from magicrl.config.schema import FieldMapping
from magicrl.data.readers import Row
from magicrl.records import Problem

_CODE_KEYS = ("inputs", "test_code", "assert_case")
_RELEASED_FIELDS = ("prompt", "reward_model")


class Quarantined(ValueError):
    """A well-formed record that this version cannot use: set aside with its reason, not an error of the file."""


def is_released(row: Row) -> bool:
    """Whether the record has the released schema's columns (a prompt that is a list, and a reward model)."""
    return isinstance(row.record.get("prompt"), list) and "reward_model" in row.record


def problem_by_fields(row: Row, mapping: FieldMapping, *, stem: str, verifier: str) -> Problem:
    """The problem of a record whose columns ``mapping`` names.

    A list of answers means that any one is accepted. A solution that ends in ``#### 42``, as GSM8K's do, gives 42.

    Raises:
        ValueError: a field is missing, empty or of the wrong type; names file, line and field.
    """
    prompt = _text(row, mapping.prompt, "fields.prompt")
    golds = (_tests(row, mapping.answer),) if verifier == "code" else _golds(row, mapping.answer)
    name = f"{stem}-{row.index}" if mapping.id is None else _identifier(row, mapping.id)
    level = None if mapping.level is None else _level(row, mapping.level)
    used = {mapping.prompt, mapping.answer, mapping.id, mapping.level}
    extra = {key: value for key, value in row.record.items() if key not in used}
    return Problem(id=name, prompt=prompt, golds=golds, verifier=verifier, source=stem, level=level, extra=extra)


def problem_released(row: Row, *, stem: str, verifier: str) -> Problem:
    """The problem of a record in the released schema.

    ``prompt`` is a list with one user message; ``reward_model.ground_truth`` is JSON text, a list of strings for
    several accepted golds; text that is no such list is itself the gold (the released evaluation files).

    Raises:
        ValueError: a field is missing, empty or of the wrong type; names file, line and field.
        Quarantined: a code problem without tests in a known form.
    """
    for name in _RELEASED_FIELDS:
        if name not in row.record:
            raise ValueError(_missing(row, name, name, row.record, 'set format = "fields" for other schemas'))
    ground_truth = _lookup(row, "reward_model.ground_truth", "the released schema")
    tests = _code_tests(row, ground_truth)
    golds = _released_golds(row, ground_truth) if tests is None else (tests,)
    source = row.record.get("data_source")
    extra = {key: value for key, value in row.record.items() if key not in _RELEASED_FIELDS}
    return Problem(
        id=f"{stem}-{row.index}",
        prompt=_user_message(row, row.record["prompt"]),
        golds=golds,
        verifier=verifier if tests is None else "code",
        source=source if isinstance(source, str) and source else stem,
        extra=extra,
    )


def _missing(row: Row, name: str, key: str, record: Mapping[str, Any], setting: str) -> str:
    near = difflib.get_close_matches(key.lower(), [str(k).lower() for k in record], n=1, cutoff=0.5)
    nearest = next((str(k) for k in record if near and str(k).lower() == near[0]), None)
    hint = f"; the nearest is {nearest!r}" if nearest else ""
    fields = ", ".join(map(str, record)) or "none"
    return f"{row.where}: no field {name!r}{hint}. It has: {fields}. Remedy: {setting}, or correct the row"


def _lookup(row: Row, name: str, setting: str) -> Any:
    """The value under a dotted name; a key that holds the dots itself wins."""
    if name in row.record:
        return row.record[name]
    value: Any = row.record
    for part in name.split("."):
        if not isinstance(value, Mapping):
            raise ValueError(
                f"{row.where}: field {name!r}: nothing named {part!r} inside {type(value).__name__}; set {setting}"
            )
        if part not in value:
            raise ValueError(_missing(row, name, part, value, f"set {setting}"))
        value = value[part]
    return value


def _text(row: Row, name: str, setting: str) -> str:
    value = _lookup(row, name, setting)
    if not isinstance(value, str):
        remedy = "; put it in quotes, or name another column in " + setting
        raise ValueError(
            f"{row.where}: field {name!r} must be text, got {type(value).__name__} ({str(value)[:40]!r}){remedy}"
        )
    if not value.strip():
        raise ValueError(f"{row.where}: field {name!r} is empty; remove the row or correct it")
    return _whole(row, name, value)


def _whole(row: Row, name: str, text: str) -> str:
    """``text``, unless it holds half a character: JSON can spell one (a lone surrogate), no tokenizer reads it."""
    half = re.search("[\ud800-\udfff]", text)
    if half:
        raise ValueError(f"{row.where}: field {name!r} holds half a character ({half.group()!r}); correct the text")
    return text


def _identifier(row: Row, name: str) -> str:
    value = _lookup(row, name, "fields.id")
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise ValueError(
            f"{row.where}: field {name!r} must be a non-empty text or integer id, got {value!r}; correct it, or leave "
            "fields.id out to number the rows"
        )
    return str(value)


def _level(row: Row, name: str) -> int:
    """An integer, or text that ends in one (``Level 5``)."""
    value = _lookup(row, name, "fields.level")
    found = re.fullmatch(r"(?:[A-Za-z ]*[ ])?(\d+)(?:\.0)?", str(value).strip())
    if isinstance(value, bool) or found is None:
        raise ValueError(
            f"{row.where}: field {name!r} must be an integer level or end in one, got {value!r}; correct it"
        )
    return int(found.group(1))


def _gold(row: Row, name: str, value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # JSON and CSV tools write 51 as 51.0
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        kind = type(value).__name__
        raise ValueError(
            f"{row.where}: field {name!r} must be text, a number or a list of them, got {kind} ({value!r:.40}); "
            "correct it, or name another column in fields.answer"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{row.where}: field {name!r} holds {value}, which is no answer; remove the row or correct it")
    text = str(value).strip()
    if not text:
        raise ValueError(f"{row.where}: field {name!r} holds an empty answer; remove the row or correct it")
    return _whole(row, name, text)


def _golds(row: Row, name: str) -> tuple[str, ...]:
    value = _lookup(row, name, "fields.answer")
    values: list[Any] = value if isinstance(value, list) else [value]
    if not values:
        raise ValueError(f"{row.where}: field {name!r} is an empty list; give at least one answer")
    return tuple(_gold(row, name, _after_hashes(v)) for v in values)


def _tests(row: Row, name: str) -> str:
    """The tests of a code problem (an object, or its JSON text) as JSON text."""
    value = _lookup(row, name, "fields.answer")
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise ValueError(f"{row.where}: field {name!r} is text but no JSON: {error}") from error
    if not isinstance(parsed, Mapping) or not any(parsed.get(key) for key in _CODE_KEYS):
        known = ", ".join(_CODE_KEYS)
        raise ValueError(
            f"{row.where}: field {name!r} must be an object of tests with one of {known}, got {value!r:.60}"
        )
    return json.dumps(parsed)


def _after_hashes(value: Any) -> Any:
    """The answer of a worked solution whose last line is ``#### answer``; anything else as it is."""
    if not isinstance(value, str):
        return value
    found = re.search(r"(?:^|\n)####[ \t]*([^\n]*?)\s*\Z", value)
    return found.group(1) if found else value


def _code_tests(row: Row, ground_truth: Any) -> str | None:
    """The tests of a code problem as JSON text, or None for a problem of another kind.

    Raises:
        Quarantined: a code problem without tests in a known form.
    """
    try:
        parsed = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    except json.JSONDecodeError:
        parsed = None
    if isinstance(parsed, Mapping) and any(parsed.get(key) for key in _CODE_KEYS):
        return json.dumps(parsed)
    if row.record.get("ability") != "code":
        return None
    if isinstance(parsed, list) and parsed and all(isinstance(text, str) for text in parsed):
        return json.dumps({"assert_case": parsed})
    raise Quarantined("a code problem without tests in a known form")


def _released_golds(row: Row, ground_truth: Any) -> tuple[str, ...]:
    name = "reward_model.ground_truth"
    try:
        parsed = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    except json.JSONDecodeError:
        parsed = None  # LaTeX, zero-padded numbers: the text itself is the gold
    if isinstance(parsed, list) and parsed and all(isinstance(gold, str) for gold in parsed):
        return tuple(_gold(row, name, gold) for gold in parsed)
    if isinstance(parsed, str):
        return (_gold(row, name, parsed),)
    if parsed == []:
        raise ValueError(f"{row.where}: field {name!r} is an empty list; remove the row or correct it")
    return (_gold(row, name, ground_truth),)  # a number, an interval such as [1, 2]: its own text


def _user_message(row: Row, prompt: Any) -> str:
    if not isinstance(prompt, list) or len(prompt) != 1 or not isinstance(prompt[0], Mapping):
        raise ValueError(
            f"{row.where}: field 'prompt' must be a list with one {{role, content}} message, got {prompt!r:.60}"
        )
    message: Mapping[str, Any] = prompt[0]
    if message.get("role") != "user":
        raise ValueError(f"{row.where}: field 'prompt': the message's role must be 'user', got {message.get('role')!r}")
    content = message.get("content")
    if not isinstance(content, str) or not content.strip():
        raise ValueError(f"{row.where}: field 'prompt': the message's content must be text, got {content!r}")
    return content
