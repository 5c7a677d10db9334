"""Known sources by name (``kinds.toml``), and what a record's columns hold."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Any, Literal

from magicrl.config.schema import Section
from magicrl.evaluation.records import Form


class EntryForm(Form):
    """Which columns of a record hold what, those included that only the pipeline reads.

    Attributes:
        solutions: columns of worked solutions or reference programs, each a text or a list of texts.
        notes: columns that are carried along.
        convert: the function of `conversions` that rewrites the record first.
    """

    solutions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    convert: str | None = None

    def fits(self, record: dict[str, Any]) -> bool:
        """Whether the record has the columns; of one that will be rewritten only ``needs`` is asked."""
        if self.convert is not None:
            return all(name in record for name in self.needs)
        return super().fits(record)


class Before(Section):
    """Only records whose first present column holds a smaller number (AIME before 2024)."""

    columns: tuple[str, ...]
    value: int


class Kind(Section):
    """One row of ``kinds.toml``."""

    title: str
    hub: str
    subset: str | None = None
    split: str = "train"
    licence: str
    ability: Literal["math", "code"] = "math"
    forms: tuple[str, ...]
    before: Before | None = None
    checked: str


class Kinds(Section):
    """All of ``kinds.toml``."""

    forms: dict[str, EntryForm]
    kinds: dict[str, Kind]

    def in_order(self, first: tuple[str, ...]) -> Iterator[EntryForm]:
        """The named forms, then every other."""
        for name in first:
            yield self.forms[name]
        for name, form in self.forms.items():
            if name not in first:
                yield form


@cache
def known_kinds() -> Kinds:
    """The sources that come with magicrl."""
    text = resources.files("magicrl.pipeline.sources").joinpath("kinds.toml").read_text(encoding="utf-8")
    return Kinds.model_validate(tomllib.loads(text))
