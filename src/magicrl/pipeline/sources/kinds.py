"""Known sources by name (``kinds.toml``)."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from typing import Literal

from magicrl.config.schema import Section


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
    before: Before | None = None
    checked: str


class Kinds(Section):
    """All of ``kinds.toml``."""

    kinds: dict[str, Kind]


@cache
def known_kinds() -> Kinds:
    """The sources that come with magicrl."""
    text = resources.files("magicrl.pipeline.sources").joinpath("kinds.toml").read_text(encoding="utf-8")
    return Kinds.model_validate(tomllib.loads(text))
