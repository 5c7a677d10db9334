"""Multiple choice: a record's options become part of its prompt, and its answer a letter and a text."""

from __future__ import annotations

import logging
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any, cast

_log = logging.getLogger(__name__)

NAMES = ("choices", "options")
"""Columns that hold the options, whatever their case."""
_LABELS = ("label", "labels", "key", "letter")
_TEXTS = ("text", "texts", "value", "content")
_NONE = ("", "[]", "{}", "none", "null", "nan", "n/a")
_NUMBER = re.compile(r"(\d+)(?:\.0)?")  # parquet and pandas write 2 as 2.0
_MOST = len(string.ascii_uppercase)


def options_of(record: Mapping[str, Any]) -> tuple[tuple[str, ...], list[str], list[str]]:
    """Return the columns with the options of a record, the options' labels and their texts; nothing if it has none.
    Options that cannot be read give their column without labels and texts.

    Read are a list of texts or numbers, a list of ``{label, text}``, a dict of labels to texts, ARC's
    ``{"label": [...], "text": [...]}``, and one column per option, ``A``, ``B``, ...

    Example:
        >>> options_of({"question": "2 + 2?", "choices": [3, 4], "answer": 1})
        (('choices',), ['A', 'B'], ['3', '4'])
    """
    unread: tuple[str, ...] = ()
    for name, value in record.items():
        if name.lower() in NAMES and not _is_blank(value):
            labels, texts = _parts(value)
            if len(texts) > 1:
                return (name,), labels, texts
            unread = (name,)
    letters = [letter for letter in string.ascii_uppercase[:10] if record.get(letter) not in (None, "")]
    if len(letters) > 1 and letters == list(string.ascii_uppercase[: len(letters)]):
        return tuple(letters), letters, [str(record[letter]).strip() for letter in letters]
    return unread, [], []


def _is_blank(value: Any) -> bool:
    """Return whether nothing in a column can be an option: numbers (a count), texts for "none", empty containers."""
    if isinstance(value, Mapping):
        value = list(cast("Mapping[str, Any]", value).values())
    if isinstance(value, list):
        return all(entry is None or entry == "" or entry == [] for entry in cast("list[Any]", value))
    return value is None or isinstance(value, int | float) or str(value).strip().lower() in _NONE


def _parts(value: Any) -> tuple[list[str], list[str]]:
    if isinstance(value, Mapping):
        table = cast("Mapping[str, Any]", value)
        texts = next((table[key] for key in _TEXTS if isinstance(table.get(key), list)), None)
        if texts is not None:
            labels = next((table[key] for key in _LABELS if isinstance(table.get(key), list)), None)
            return _labelled(labels, texts)
        # parquet gives every row the keys of all rows, with None
        given = {label: text for label, text in table.items() if text is not None}
        return _labelled(list(given), list(given.values()))
    if not isinstance(value, list) or not value:
        return [], []
    entries = cast("list[Any]", value)
    if all(isinstance(entry, Mapping) for entry in entries):
        texts = [next((entry[key] for key in _TEXTS if key in entry), None) for entry in entries]
        labels = [next((entry[key] for key in _LABELS if key in entry), None) for entry in entries]
        return _labelled(labels, texts)
    return _labelled(None, entries)


def _labelled(labels: Any, texts: Sequence[Any]) -> tuple[list[str], list[str]]:
    """Return labels and texts; letters if there are no labels, and nothing if one of the texts is none."""
    if not 1 < len(texts) <= _MOST or not all(isinstance(t, str | int | float) and str(t).strip() for t in texts):
        return [], []
    if not isinstance(labels, list) or len(cast("list[Any]", labels)) != len(texts) or None in labels:
        labels = list(string.ascii_uppercase[: len(texts)])
    # a text that repeats its label, "A) 3", would show it twice
    names = [str(label).strip() for label in cast("list[Any]", labels)]
    bare = [re.sub(rf"^\(?{re.escape(name)}[).:]\s+", "", str(t).strip()) for name, t in zip(names, texts, strict=True)]
    return names, bare


def with_options(prompt: str, labels: Sequence[str], texts: Sequence[str]) -> str:
    """Return the prompt followed by the options, one per line; the prompt itself if it holds them all.

    Example:
        >>> print(with_options("2 + 2?", ["A", "B"], ["3", "4"]))
        2 + 2?
        A) 3
        B) 4
    """
    tail = prompt[-sum(len(text) + 12 for text in texts) :]
    if all(
        re.search(rf"(?m)^\W*{re.escape(label)}\W+{re.escape(text)}", tail)
        for label, text in zip(labels, texts, strict=True)
    ):
        return prompt
    return "\n".join([prompt, *(f"{label}) {text}" for label, text in zip(labels, texts, strict=True))])


def right_option(answer: Any, labels: Sequence[str], texts: Sequence[str]) -> tuple[str, ...] | None:
    """Return the accepted answers, the label and the text of the right option; None if the answer is no option.
    A text that is a label is left out, since it would accept another option.

    A number is a label where the labels are numbers, else the place of the option, from 0, unless it is the text of
    one.

    Example:
        >>> right_option(1, ["A", "B"], ["cat", "dog"])
        ('B', 'dog')
    """
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        return None
    said = str(answer).strip()
    number = _NUMBER.fullmatch(said)
    plain = number[1] if number else re.sub(r"^\(?(\w+)[).:]?$", r"\1", said)
    place: int | None = None
    if plain in labels:
        place = labels.index(plain)
    elif isinstance(answer, str) and texts.count(said) == 1:
        place = texts.index(said)
    elif isinstance(answer, str) and plain.upper() in labels:
        place = labels.index(plain.upper())
    elif number and int(number[1]) < len(texts) and not all(map(str.isdigit, labels)):
        place = int(number[1])
    else:
        lower = [text.casefold() for text in texts]
        place = lower.index(said.casefold()) if lower.count(said.casefold()) == 1 else None
    if place is None:
        return None
    label, text = labels[place], texts[place]
    return (label,) if text.casefold() in map(str.casefold, labels) else (label, text)


def note_number(
    found: dict[str, str],
    where: str,
    answer: Any,
    labels: Sequence[str],
    texts: Sequence[str],
    right: tuple[str, ...] | None,
) -> None:
    """Remember in ``found`` the first rows whose answer is a number that could be read in two ways.

    Keys are ``zero`` (the answer is 0), ``last`` (it is the number of options, and no option), ``text`` (it is the text
    of an option at another place) and ``place`` (it is the place of an option with another text).
    """
    said = str(answer).strip()
    number = _NUMBER.fullmatch(said)
    if not number or labels[0].isdigit():
        return
    if int(number[1]) == 0:
        found.setdefault("zero", where)
    elif int(number[1]) == len(labels) and right is None:
        found.setdefault("last", where)
    if right is not None and (labels.index(right[0]) == int(number[1])) != (right[-1] == said):
        found.setdefault("text" if right[-1] == said else "place", where)


def check_numbers(found: Mapping[str, str]) -> None:
    """Raise ``ValueError`` if the numbers among the answers of a file cannot all be read in one way. Warn of an answer
    that is the text of a list.

    Either they count the options from 1, so that each would be read as the next option, or some are texts of options
    and others their places.

    Args:
        found: Result of `note_number` for all rows, because one row cannot show it; ``list``: an answer like that.
    """
    if "list" in found:
        text = "%s: the answer is the text of a list, and counts as one answer; if each entry is one, write a list"
        _log.warning(text, found["list"])
    if "last" in found and "zero" not in found:
        raise ValueError(
            f"{found['last']}: the answer is the number of options, and no row has the answer 0, so the answers seem "
            "to count the options from 1; give letters (A, B, ...) or numbers from 0"
        )
    if "text" in found and "place" in found:
        raise ValueError(
            f"{found['text']}: the answer is the text of an option, but in {found['place']} it can only be the place "
            "of one; give letters (A, B, ...) in every row"
        )
