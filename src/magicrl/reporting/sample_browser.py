"""Responses to read: the same problems in several columns (before and after, or several models), with their verdicts.

A page holds a bounded part of them, chosen so that every kind of outcome is there, and says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["lost", "won", "wrong", "truncated", "not_judged", "right"]
KINDS: tuple[Kind, ...] = ("lost", "won", "wrong", "truncated", "not_judged", "right")

MOST_PROBLEMS = 60
"""Problems of one set on a page."""
MOST_CHARACTERS = 600_000
"""Of all responses of one set on a page."""
HEAD, TAIL = 1_500, 2_500
"""Characters at the two ends of a long response that are shown: the answer stands at its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One response with its verdict; ``decided_by`` is the verifier's step."""

    text: str
    outcome: str
    status: str = ""
    decided_by: str = ""
    reason: str = ""
    extracted: str | None = None
    tokens: int | None = None
    truncated: bool = False
    entropy: float | None = None

    @property
    def right(self) -> bool:
        return self.outcome == "correct" and not self.truncated

    @property
    def mark(self) -> str:
        """Its outcome in one word; a truncated response is truncated whatever stands in it."""
        return "truncated" if self.truncated else self.outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerRow:
    """Responses side by side, one a column; None where a column has none."""

    label: str
    answers: tuple[Answer | None, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Browsed:
    """One problem.

    Attributes:
        id, prompt, gold: of the problem.
        marks: by column the outcome of every sample, shown or not.
        rows: the responses that are shown.
        kinds: what there is to find in it.
    """

    id: str
    prompt: str
    gold: str
    marks: tuple[tuple[str, ...], ...]
    rows: tuple[AnswerRow, ...]
    kinds: frozenset[Kind]

    @property
    def size(self) -> int:
        """Characters on the page."""
        texts = (clipped(answer.text) for row in self.rows for answer in row.answers if answer is not None)
        return len(self.prompt) + sum(len(text) for text in texts)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleBrowser:
    """The problems of one set that a page shows.

    Attributes:
        name: of the set.
        columns: what each column is.
        items: the problems, in the order of the set.
        total: problems that there were to choose from.
        counts: problems of each kind, of all there were.
        kind_words: what the filter calls each kind that is there.
        note: how the outcome of a column is told from several samples; empty where each has one.
    """

    name: str
    columns: tuple[str, ...]
    items: tuple[Browsed, ...]
    total: int
    counts: Mapping[Kind, int]
    kind_words: Mapping[Kind, str]
    note: str = ""


def browser(name: str, columns: Sequence[str], problems: Sequence[Browsed], *, note: str = "") -> SampleBrowser:
    """The browser of one set, with at most ``MOST_PROBLEMS`` problems and ``MOST_CHARACTERS`` characters."""
    items = chosen(problems)
    counts: dict[Kind, int] = {kind: sum(kind in problem.kinds for problem in problems) for kind in KINDS}
    words = kind_words(columns)
    return SampleBrowser(
        name=name,
        columns=tuple(columns),
        items=tuple(items),
        total=len(problems),
        counts=counts,
        kind_words={kind: words[kind] for kind in KINDS if counts[kind] and kind in words},
        note=note,
    )


def kind_words(columns: Sequence[str]) -> dict[Kind, str]:
    """What the filter calls each kind; what changed needs two columns."""
    words: dict[Kind, str] = {
        "wrong": "wrong",
        "truncated": "truncated",
        "not_judged": "not judged",
        "right": "right",
    }
    if len(columns) < 2:
        return words
    first, others = (columns[0], columns[1]) if len(columns) == 2 else ("the first", "another")
    changed: dict[Kind, str] = {
        "lost": f"right {first}, wrong {others}" if first == "before" else f"{first}: right, {others}: wrong",
        "won": f"wrong {first}, right {others}" if first == "before" else f"{first}: wrong, {others}: right",
    }
    return changed | words


def kinds_of(columns: Sequence[Sequence[Answer]]) -> frozenset[Kind]:
    """What a problem's responses are, from those of each column.

    A column is right where at least half of its judged responses are. ``lost``: the first column is right and another
    is not; ``won``: the other way round.
    """
    found: set[Kind] = set()
    every = [answer for column in columns for answer in column]
    if any(answer.outcome == "wrong" and not answer.truncated for answer in every):
        found.add("wrong")
    if any(answer.truncated for answer in every):
        found.add("truncated")
    if any(answer.outcome not in ("correct", "wrong") for answer in every):
        found.add("not_judged")
    if any(answer.right for answer in every):
        found.add("right")
    verdicts = [_right(column) for column in columns]
    first, others = (verdicts[0], verdicts[1:]) if verdicts else (None, [])
    if first is True and any(other is False for other in others):
        found.add("lost")
    if first is False and any(other is True for other in others):
        found.add("won")
    return frozenset(found)


def _right(answers: Sequence[Answer]) -> bool | None:
    judged = [answer.right for answer in answers if answer.outcome in ("correct", "wrong")]
    return 2 * sum(judged) >= len(judged) if judged else None


def chosen(problems: Sequence[Browsed]) -> list[Browsed]:
    """Of each kind in turn the first problem that is not yet there, until the page is full; in the given order."""
    waiting: dict[Kind, list[int]] = {
        kind: [i for i, problem in enumerate(problems) if kind in problem.kinds] for kind in KINDS
    }
    taken: set[int] = set()
    room = MOST_CHARACTERS
    while any(waiting.values()) and len(taken) < MOST_PROBLEMS:
        for kind in KINDS:
            queue = waiting[kind]
            while queue and queue[0] in taken:
                queue.pop(0)
            if not queue or len(taken) >= MOST_PROBLEMS:
                continue
            i = queue.pop(0)
            if problems[i].size <= room or not taken:
                taken.add(i)
                room -= problems[i].size
    return [problems[i] for i in sorted(taken)]


def clipped(text: str) -> str:
    """A response as the page shows it: whole, or its two ends with what is left out between them."""
    if len(text) <= HEAD + TAIL:
        return text
    return f"{text[:HEAD]}\n[… {len(text) - HEAD - TAIL} characters left out …]\n{text[-TAIL:]}"
