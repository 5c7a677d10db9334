"""Task family ``word_problems``: arithmetic stories in plain English, one to three steps, with worked solutions.

A problem is a story (``word_stories.toml``) told in a shape of events (a start, gains, losses, groups, a
division, a comparison) with drawn numbers. Levels are numbers of steps. Two things are held out: with
``held_out = "template"`` validation and test tell stories that training never sees (a story belongs to one split, and
no sentence of it stands in another split's), and always their instances (the computation with its numbers) are
disjoint from training's.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any, Literal, cast

import numpy as np
from pydantic import Field

from magicrl.data.families import OptionValue, Split, read_options
from magicrl.data.word_chains import Chain, ChainStyle, apply, evaluate, write_chain
from magicrl.records import Problem

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
    text = resources.files("magicrl.data").joinpath("word_stories.toml").read_text(encoding="utf-8")
    return tuple(_story(row) for row in tomllib.loads(text)["story"])


NAME = "word_problems"
INSTRUCTION = "End with the answer in \\boxed{}."
_SPLITS: tuple[Split, ...] = ("train", "validation", "test")
_MOVES = ("add", "sub")
_GROUP_MOVES = ("add_groups", "sub_groups")
_COMPARE = ("more", "fewer")

SHAPES: Mapping[int, tuple[tuple[str, ...], ...]] = {
    1: (
        *(("open", move) for move in _MOVES),
        ("open_groups",),
        ("open", "share"),
        *(("open", compare) for compare in _COMPARE),
    ),
    2: (
        *(("open", a, b) for a in _MOVES for b in _MOVES),
        *(("open_groups", move) for move in _MOVES),
        *(("open", move, "share") for move in _MOVES),
        *(("open", group) for group in _GROUP_MOVES),
        *(("open", compare, "both") for compare in _COMPARE),
    ),
    3: (
        *(("open_groups", a, b) for a in _MOVES for b in _MOVES),
        *(("open", a, b, "share") for a in _MOVES for b in _MOVES),
        *(("open", group, move) for group in _GROUP_MOVES for move in _MOVES),
        *(("open_groups", move, "share") for move in _MOVES),
        *(("open_groups", compare, "both") for compare in _COMPARE),
    ),
}
"""Orders of events by level; ``both`` asks for the hero's and the friend's together."""


class WordOptions(ChainStyle):
    """Options of the family: its numbers, what is held out, and the style of the demonstrations."""

    max_number: int = Field(default=40, ge=10)
    """Largest number that a story starts with, gains or loses."""
    max_factor: int = Field(default=5, ge=3)
    """Largest number of groups, and of parts in a division."""
    max_unit: int = Field(default=12, ge=4)
    """Largest size of one group."""
    held_out: Literal["template", "instance"] = "template"
    """``template``: validation and test have stories of their own; ``instance``: every split tells all stories.
    Instances are disjoint in both."""


@dataclass(slots=True)
class _Telling:
    """A story while it is told: what has been said, the steps so far, and what the hero has now."""

    sentences: list[str]
    steps: list[str]
    operand: str = ""
    value: int = 0
    ending: str = ""

    def step(self, left: str | int, operator: str, right: str | int) -> str:
        self.steps.append(f"{left} {operator} {right}")
        return f"s{len(self.steps) - 1}"


class WordProblems:
    """English arithmetic word problems (see the module's docstring)."""

    def __init__(self, options: WordOptions | None = None) -> None:
        self.options = options or WordOptions()

    @property
    def name(self) -> str:
        return NAME

    @property
    def verifier(self) -> str:
        return "maths"

    @property
    def vocabulary(self) -> tuple[str, ...] | None:
        return None

    def stories(self, split: Split) -> tuple[Story, ...]:
        """The stories this split may tell."""
        if self.options.held_out == "instance":
            return load_stories()
        return tuple(story for story in load_stories() if story.split == split)

    def stream(self, *, seed: int, split: Split, levels: Sequence[int] | None = None) -> Iterator[Problem]:
        """Endless problems, the levels equally often (default: all).

        Raises:
            ValueError: a level that does not exist.
        """
        wanted = tuple(levels) if levels is not None else tuple(SHAPES)
        if not wanted or not set(wanted) <= set(SHAPES):
            raise ValueError(f"{NAME} has the levels {', '.join(map(str, SHAPES))}; got {list(wanted)}")
        return self._stream(seed, split, wanted)

    def demonstration(self, problem: Problem, rng: np.random.Generator) -> str:
        """A worked (or hasty, or mistaken) solution in English that ends with a box."""
        return self.chain(problem, rng).text

    def chain(self, problem: Problem, rng: np.random.Generator) -> Chain:
        """Like ``demonstration``, with what was drawn: the strategy, slips and repairs."""
        extra = problem.extra
        return write_chain(extra["steps"], items=extra["items"], tell=extra["tell"], style=self.options, rng=rng)

    def _stream(self, seed: int, split: Split, levels: tuple[int, ...]) -> Iterator[Problem]:
        rng = np.random.default_rng([seed, _SPLITS.index(split), 0x57])
        stories = self.stories(split)
        seen: set[str] = set()
        while True:
            level = levels[int(rng.integers(len(levels)))]
            # a draw that yields nothing is redrawn at its level, so that the levels keep their shares
            problem = None
            while problem is None or problem.id in seen:
                problem = self._problem(stories[int(rng.integers(len(stories)))], level, split, rng)
            seen.add(problem.id)
            yield problem

    def _problem(self, story: Story, level: int, split: Split, rng: np.random.Generator) -> Problem | None:
        """One problem of this story, or None when the draw allows no sensible one or belongs to another split."""
        shapes = [shape for shape in SHAPES[level] if _tellable(story, shape)]
        if not shapes:
            return None
        telling = self._tell(story, shapes[int(rng.integers(len(shapes)))], rng)
        solution = evaluate(telling.steps) if telling is not None else None
        if telling is None or solution is None or instance_split(telling.steps) != split:
            return None
        assert len(solution) == level
        questions = story.sentences["ask" + telling.ending]
        which = int(rng.integers(len(questions)))
        slots = _cast(story, rng)
        text = " ".join([*telling.sentences, questions[which]]).format(**slots)
        prompt = f"{text} {INSTRUCTION}"
        return Problem(
            id=f"word-{hashlib.sha256(prompt.encode()).hexdigest()[:16]}",
            prompt=prompt,
            golds=(str(solution[-1].value),),
            verifier=self.verifier,
            source=NAME,
            level=level,
            template=story.key,
            extra={
                "story": story.key,
                "steps": tuple(telling.steps),
                "items": slots["items"],
                "tell": story.sentences["tell" + telling.ending][which].format(**slots, answer="{answer}"),
            },
        )

    def _tell(self, story: Story, shape: Sequence[str], rng: np.random.Generator) -> _Telling | None:
        """Draw numbers and phrasings; None when the draw allows no sensible story."""
        telling = _Telling([], [])
        said: set[str] = set()
        for event in shape:
            if event == "both":
                telling.step(telling.operand, "+", f"s{len(telling.steps) - 1}")
                telling.ending = "_both"
                continue
            numbers = self._numbers(event, telling.value, rng)
            phrasings = [p for p in story.sentences[event] if p not in said]
            if numbers is None or not phrasings:
                return None
            k, n = numbers
            phrase = phrasings[int(rng.integers(len(phrasings)))]
            said.add(phrase)
            telling.sentences.append(phrase.replace("{k}", str(k)).replace("{n}", str(n)))
            _advance(telling, event, k, n)
        return telling

    def _numbers(self, event: str, value: int, rng: np.random.Generator) -> tuple[int, int] | None:
        """``(k, n)`` for an event when the hero has ``value``; None when none fit."""
        o = self.options
        k = int(rng.integers(2, o.max_factor + 1))
        if event == "open":
            return k, int(rng.integers(max(6, o.max_number // 4), o.max_number + 1))
        if event in ("open_groups", "add_groups"):
            return k, int(rng.integers(2, o.max_unit + 1))
        if event == "share":
            return (k, 0) if value % k == 0 and value // k >= 2 else None
        room = value - 2  # something is left after a loss
        if event == "sub_groups":
            return (k, int(rng.integers(2, min(o.max_unit, room // k) + 1))) if room // k >= 2 else None
        most = o.max_number // 2 if event in _COMPARE else o.max_number
        if event in ("sub", "fewer"):
            most = min(most, room)
        return (k, int(rng.integers(2, most + 1))) if most >= 2 else None


def instance_split(steps: Sequence[str]) -> Split:
    """The split that owns this computation: a tenth each for validation and test, by hash."""
    bucket = hashlib.sha256("; ".join(steps).encode()).digest()[0] % 10
    return _SPLITS[1] if bucket == 0 else _SPLITS[2] if bucket == 1 else _SPLITS[0]


def _tellable(story: Story, shape: Sequence[str]) -> bool:
    """Whether the story has every sentence of the shape."""
    needed = [event for event in shape if event != "both"]
    return all(event in story.sentences for event in needed)


def _advance(telling: _Telling, event: str, k: int, n: int) -> None:
    """Take up an event: its steps, what the hero has after it, and which question it ends in."""
    telling.ending = ""
    have, value = telling.operand, telling.value
    if event == "open":
        telling.operand, telling.value = str(n), n
    elif event == "open_groups":
        telling.operand, telling.value = telling.step(k, "*", n), k * n
    elif event in _COMPARE:
        telling.step(have, "+" if event == "more" else "-", n)
        telling.ending = "_friend"
    elif event == "share":
        telling.operand, telling.value = telling.step(have, "/", k), value // k
        telling.ending = "_share"
    else:
        operator = "+" if event.startswith("add") else "-"
        amount, operand = (k * n, telling.step(k, "*", n)) if event in _GROUP_MOVES else (n, str(n))
        telling.operand, telling.value = telling.step(have, operator, operand), apply(operator, value, amount)


def _cast(story: Story, rng: np.random.Generator) -> dict[str, str]:
    """Who plays, and with what: the slots of the story's sentences."""
    names = list(PEOPLE)
    first, second = (names[int(i)] for i in rng.choice(len(names), size=2, replace=False))
    hero = story.who or first
    return {
        **PEOPLE[first],
        "who": hero,
        "Who": hero[0].upper() + hero[1:],
        "friend": second,
        "Friend": second,
        "items": story.items[int(rng.integers(len(story.items)))],
    }


def make_word_problems(**options: OptionValue) -> WordProblems:
    """The family with these fields of ``WordOptions``."""
    return WordProblems(read_options(NAME, WordOptions, options))
