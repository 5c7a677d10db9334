"""Settings given in addition to a recipe: ``--set KEY=VALUE`` on the command line, or values from Python."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from magicrl.config.errors import RecipeError

Recipe = Path | Mapping[str, Any]
"""File of a recipe (or the name of a shipped one), or the same settings as a dict."""


class Override(NamedTuple):
    """One setting: its dotted key (or a short form), its value, and how it was given, for error messages."""

    key: str
    value: Any
    words: str


Overrides = Sequence[str | Override]
"""Settings as ``KEY=VALUE`` from a command line, or as `Override` from Python."""


def override_of(given: str | Override) -> Override:
    """Parse one override.

    Raises:
        RecipeError: A text without ``KEY=``.
    """
    if isinstance(given, Override):
        return given
    key, separator, raw = given.partition("=")
    if not separator or not key.strip():
        raise RecipeError(f"--set {given}: expected KEY=VALUE, for example --set optimizer.learning_rate=1e-5")
    return Override(key.strip(), _parsed(raw.strip()), f"--set {given}")


def _parsed(raw: str) -> Any:
    """A TOML value where it is one, else the text itself, so that paths need no quotes."""
    try:
        return tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return raw


def plain(value: Any) -> Any:
    """Copy a tree of settings as TOML would hold it: dicts, lists, and texts for paths."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in cast("list[Any]", value)]
    return str(value) if isinstance(value, Path) else value
