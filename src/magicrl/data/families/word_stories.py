"""The stories of the word problems: sentence templates read from ``word_stories.toml``.

A story is the unit of the held-out templates: each belongs to one split, and no sentence of a held-out
story stands in a training story.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any, cast

from magicrl.data.families.base import Split

# name, and the four pronoun slots it fills: He, he, him, his
_SHE = {"He": "She", "he": "she", "him": "her", "his": "her", "His": "Her"}
_HE = {"He": "He", "he": "he", "him": "him", "his": "his", "His": "His"}
PEOPLE: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(
        ("Ana", "Mia", "Lena", "Nora", "Priya", "Ruth", "Sofia", "Tara", "Zoe", "Emma", "Kim", "Laila"), _SHE
    ),
    **dict.fromkeys(("Ben", "Omar", "Paul", "Ravi", "Sam", "Tom", "Leo", "Ivan", "Hugo", "Carl", "Jack", "Emil"), _HE),
}

_SENTENCES = (
    *("open", "add", "sub", "open_groups", "add_groups", "sub_groups", "share", "more", "fewer"),
    *("ask", "tell", "ask_share", "tell_share", "ask_friend", "tell_friend", "ask_both", "tell_both"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Story:
    """One template.

    Attributes:
        key: its name.
        split: the split that may use it when templates are held out.
        who: the hero when it is not a person, e.g. ``the library``.
        items: plural nouns the story may be about.
        sentences: what may happen, by kind (see the head of the data file); each kind has phrasings.
    """

    key: str
    split: Split
    who: str | None
    items: tuple[str, ...]
    sentences: Mapping[str, tuple[str, ...]]


def _story(row: Mapping[str, Any]) -> Story:
    unknown = set(row) - set(_SENTENCES) - {"key", "split", "who", "items"}
    assert not unknown, f"story {row.get('key')!r} has unknown entries {sorted(unknown)}"
    assert len(row["ask"]) == len(row["tell"]), f"story {row['key']!r}: each question needs its answer sentence"
    sentences: dict[str, tuple[str, ...]] = {}
    for kind in _SENTENCES:
        if kind in row:
            value = row[kind]
            sentences[kind] = (value,) if isinstance(value, str) else tuple(value)
    return Story(
        key=row["key"],
        split=cast("Split", row["split"]),
        who=row.get("who"),
        items=tuple(row["items"]),
        sentences=sentences,
    )


@lru_cache(maxsize=1)
def load_stories() -> tuple[Story, ...]:
    """Every story that ships, in file order."""
    text = resources.files("magicrl.data.families").joinpath("word_stories.toml").read_text(encoding="utf-8")
    return tuple(_story(row) for row in tomllib.loads(text)["story"])
