"""Copies of problems as in training sets: verbatim, retypeset, reworded, with other numbers and names, in chat text.

Three sets of rules have only their kinds in common. DEVELOPMENT and SECOND were read while thresholds were chosen;
EVALUATION was written afterwards, for the committed figures. All are by one author and mechanical. They are easier than
human rewrites, and cruder, because a word's meaning in its sentence is ignored.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

KINDS = (
    "verbatim",
    "reformatted",
    "reworded_light",
    "reworded_medium",
    "reworded_strong",
    "renumbered",
    "renamed",
    "wrapped",
)
Table = dict[str, str]


@dataclass(frozen=True)
class Rules:
    """A set of rules. Words are replaced as whole words, with their capitalisation."""

    synonyms: Table
    phrases: tuple[tuple[str, str], ...]
    names: tuple[str, ...]
    tails: tuple[str, ...]
    letters: str
    wraps: tuple[tuple[str, str], ...]
    restructure: Callable[[str, random.Random], str]


def plant(kind: str, text: str, rules: Rules, rng: random.Random) -> str | None:
    """Return a copy of ``text``, or None if the rules of this kind change nothing."""
    copy = _MAKERS[kind](text, rules, rng)
    return None if copy is None or (kind != "verbatim" and " ".join(copy.split()) == " ".join(text.split())) else copy


def _verbatim(text: str, rules: Rules, rng: random.Random) -> str:
    return rng.choice([text, text + "\n", "  " + text.replace(". ", ".  "), text.replace("\n", " ")])


_UNICODE = (
    (r"\\left|\\right|\\displaystyle|\\,|\\;|\\!", ""), (r"\\d?frac\{(\w+)\}\{(\w+)\}", r"\1/\2"),
    (r"\\sqrt\{(\w+)\}", r"√\1"), (r"\\leq?(?![a-z])", "≤"), (r"\\geq?(?![a-z])", "≥"), (r"\\neq?(?![a-z])", "≠"),
    (r"\\times", "×"), (r"\\cdot(?!s)", "·"), (r"\\pi", "π"), (r"\\theta", "θ"), (r"\\alpha", "α"), (r"\\infty", "∞"),
    (r"\^\{?\\circ\}?", "°"), (r"\\angle\s*", "∠"), (r"\\triangle\s*", "△"), (r"\\[lc]?dots", "…"), (r"\\%", "%"),
    (r"\^\{?2\}?(?![0-9])", "²"), (r"\^\{?3\}?(?![0-9])", "³"), (r"\^\{(\w)\}", r"^\1"), (r"_\{(\w)\}", r"_\1"),
    (r"\\(?:text|mathrm|textbf|mathbf)\{([^{}]*)\}", r"\1"), (r"\\\(|\\\)|\\\[|\\\]|\$\$?", ""),
)  # fmt: skip


def _reformatted(text: str, rules: Rules, rng: random.Random) -> str | None:
    if "[asy]" in text:
        return None  # a drawing is a program, which is not typeset in another way
    if "\\" in text or text.count("$") >= 2:
        style = rng.choice(["unicode", "brackets", "spaced"])
        if style == "unicode":
            for pattern, form in _UNICODE:
                text = re.sub(pattern, form, text)
            return text
        if style == "brackets":
            return re.sub(r"(?<!\$)\$([^$]+)\$(?!\$)", r"\\(\1\\)", text).replace(r"\frac", r"\dfrac")
        return re.sub(r"(?<=[\w)}])\s*([+=<>])\s*(?=[\w({\\])", r" \1 ", text).replace("$", "$ ").replace("  ", " ")
    if rng.random() < 0.5:
        return re.sub(r"(?<![\d.,$])(\d+(?:\.\d+)?)(?![\d,]|\.\d)", r"$\1$", text)
    return re.sub(r"(?<![\d.,])(\d{1,3})(\d{3})(?![\d,.])", r"\1,\2", text).replace("'", "’").replace(". ", ".\n")


def _replaced(text: str, table: Table, share: float, rng: random.Random, most: int | None = None) -> str:
    changed = 0

    def other(match: re.Match[str]) -> str:
        nonlocal changed
        word = table.get(match[0].lower())
        if word is None or rng.random() >= share or (most is not None and changed >= most):
            return match[0]
        changed += 1
        return word.capitalize() if match[0][0].isupper() else word

    return re.sub(r"(?<![\\A-Za-z])[A-Za-z]+(?![A-Za-z])", other, text)


def _phrased(text: str, rules: Rules) -> str:
    for pattern, form in rules.phrases:
        text, count = re.subn(pattern, form, text, count=1)
        if count:
            break
    return text


_CALENDAR = re.compile(
    "(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day|January|February|March|April|May|June|July|August|.*ber"
)


def _other_people(text: str, rules: Rules, rng: random.Random) -> str:
    """Replace names of people: capitalised words within a sentence that a story's first words show to be names."""
    found = dict.fromkeys(re.findall(r"(?<=[a-z,] )([A-Z][a-z]{2,})\b(?=(?:'s)? [a-z])", text))
    found = dict.fromkeys(name for name in found if not _CALENDAR.fullmatch(name))
    for name, other in zip(found, rng.sample(rules.names, min(len(found), len(rules.names))), strict=False):
        text = re.sub(rf"\b{name}\b", other, text)
    return text


def _light(text: str, rules: Rules, rng: random.Random) -> str:
    return _phrased(_replaced(text, rules.synonyms, 1.0, rng, most=2), rules)


def _medium(text: str, rules: Rules, rng: random.Random) -> str:
    text = _other_people(_replaced(text, rules.synonyms, 0.6, rng), rules, rng)
    return f"{_phrased(text, rules)} {rng.choice(rules.tails)}"


def _strong(text: str, rules: Rules, rng: random.Random) -> str | None:
    text = _phrased(_other_people(_replaced(text, rules.synonyms, 1.0, rng), rules, rng), rules)
    moved = rules.restructure(text, rng)
    return None if moved == text else moved


def _renumbered(text: str, rules: Rules, rng: random.Random) -> str | None:
    if "[asy]" in text:
        return None
    values: dict[str, str] = {}

    def other(match: re.Match[str]) -> str:
        if match[0] not in values:
            number = int(match[0])
            values[match[0]] = str(number + rng.choice([1, 2, 3, 5, 7]) if number < 20 else number + rng.randint(3, 40))
        return values[match[0]]

    changed = re.sub(r"(?<![\d.,_^A-Za-z{])\d{1,6}(?![\d,.]\d)", other, text)
    return changed if values else None


_MATHS = re.compile(
    r"\\begin\{(?:align|equation)\*?\}.+?\\end\{(?:align|equation)\*?\}|\$\$.+?\$\$|\$.+?\$|\\\(.+?\\\)|\\\[.+?\\\]",
    re.DOTALL,
)
_LETTER = re.compile(
    r"\\(?:(?:text|math)[a-z]+|text|mbox|emph|operatorname|end)\s*\{[^}]*\}|\\begin\s*\{[^}]*\}(?:\{[^}]*\})?|\\[A-Za-z]+|[A-Za-z]"
)


def _renamed(text: str, rules: Rules, rng: random.Random) -> str | None:
    """Replace every variable of the formulas, or in a story every person, by another one."""
    if "[asy]" in text:
        return None
    priced = "\\" not in text and re.search(r"\$(?!\d)", text) is None
    found = dict.fromkeys(
        letter
        for part in ([] if priced else _MATHS.findall(text))
        for letter in _LETTER.findall(part)
        if len(letter) == 1
    )
    found = dict.fromkeys(letter for letter in found if letter not in "eidπ")
    small, large = [one for one in found if one.islower()], [one for one in found if one.isupper()]
    if not found:
        return _other_people(text, rules, rng)
    other = dict(zip(small, rules.letters, strict=False)) | dict(zip(large, rules.letters.upper(), strict=False))
    if len(other) < len(found) or any(one == new for one, new in other.items()):
        return None
    return _MATHS.sub(lambda part: _LETTER.sub(lambda m: other.get(m[0], m[0]), part[0]), text)


def _wrapped(text: str, rules: Rules, rng: random.Random) -> str:
    before, after = rng.choice(rules.wraps)
    return f"{before}{text.strip()}{after}"


_MAKERS: dict[str, Callable[[str, Rules, random.Random], str | None]] = {
    "verbatim": _verbatim,
    "reformatted": _reformatted,
    "reworded_light": _light,
    "reworded_medium": _medium,
    "reworded_strong": _strong,
    "renumbered": _renumbered,
    "renamed": _renamed,
    "wrapped": _wrapped,
}


def _sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.?!])\s+(?=[A-Z$\\])", text.strip())


def _question_first(text: str, rng: random.Random) -> str:
    """Move the question before the facts."""
    parts = _sentences(text)
    return text if len(parts) < 2 else " ".join([parts[-1], "Here is what we know:", *parts[:-1]])


def _clauses_swapped(text: str, rng: random.Random) -> str:
    """Rewrite ``If A, B`` as ``B, where A``; join two short sentences; move the first fact after the second."""
    parts = _sentences(text)
    for place, part in enumerate(parts):
        match = re.fullmatch(
            r"(?:If|When|Given that|Suppose(?: that)?) (.+?), ((?:what|how|find|then|compute).*)([.?])", part
        )
        if match:
            parts[place] = f"{match[2][0].upper()}{match[2][1:]}, where {match[1]}{match[3]}"
            return " ".join(parts)
    if len(parts) >= 3:
        return " ".join([parts[1], parts[0], *parts[2:]])
    if len(parts) == 2 and parts[0].endswith("."):
        return f"{parts[1][:-1]}, knowing the following{parts[1][-1]} {parts[0]}"
    return text


def _told_backwards(text: str, rng: random.Random) -> str:
    """Reverse the facts, joined by other words, and keep the question in its place."""
    parts = _sentences(text)
    if len(parts) < 3:
        return f"The following is asked. {text}" if len(parts) == 2 else text
    facts = parts[-2::-1]
    return " ".join([facts[0], *(f"It is also true that {one[0].lower()}{one[1:]}" for one in facts[1:]), parts[-1]])


_RESTRUCTURED = {one.__name__[1:]: one for one in (_question_first, _clauses_swapped, _told_backwards)}


def _rules(name: str) -> Rules:
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))[name]
    return Rules(
        synonyms=table["synonyms"],
        phrases=tuple(map(tuple, table["phrases"])),
        names=tuple(table["names"]),
        tails=tuple(table["tails"]),
        letters=table["letters"],
        wraps=tuple(map(tuple, table["wraps"])),
        restructure=_RESTRUCTURED[table["restructure"]],
    )


DEVELOPMENT, SECOND, EVALUATION = map(_rules, ("development", "second", "evaluation"))


def planted(texts: Sequence[tuple[str, str]], rules: Rules, *, each: int, seed: int) -> list[tuple[str, str, str]]:
    """Return up to ``each`` plants per kind, those of one kind from different problems.

    Args:
        texts: Id and statement of each problem.

    Returns:
        Kind, id of the original and text of each plant.
    """
    rng = random.Random(seed)
    made: list[tuple[str, str, str]] = []
    for kind in KINDS:
        count = 0
        for name, text in rng.sample(texts, len(texts)):
            copy = plant(kind, text, rules, rng)
            if copy is not None:
                made.append((kind, name, copy))
                count += 1
            if count == each:
                break
    return made
