"""Answers in words, and the letters of multiple-choice questions."""

from __future__ import annotations

import re
from fractions import Fraction


def word_set(text: str) -> frozenset[str]:
    """The words of ``text``: a long set that reads as a line."""
    return frozenset(text.split())


_COUNTED = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty"
)
_NUMBERS = (
    {word: Fraction(value) for value, word in enumerate(_COUNTED.split())}
    | {
        word: Fraction(value)
        for value, word in enumerate(
            ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"), start=1
        )
    }
    | {
        "half": Fraction(1, 2),
        "none": Fraction(0),
        "thirty": Fraction(30),
        "hundred": Fraction(100),
    }
)
_CARDINALS = {word: value for value, word in enumerate(_COUNTED.split())} | {
    word: 10 * value
    for value, word in enumerate(("thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"), start=3)
}
SCALES = {
    "dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12
}  # fmt: skip
"""Words after a number that multiply it."""
_OPPOSITE = {"yes": "no", "no": "yes", "true": "false", "false": "true"}
_ENDLESS = frozenset(("infinite", "infinitely many", "infinitely", "infinity"))
_FILLERS = word_set("a an the and all it is its on at wins win has have winning strategy condition")

_LETTER = re.compile(
    r"(?:\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{\s*)*"
    r"(?:(?:option|choice|answer|case)\s*(?:is)?\s*:?\s*)?"
    r"[(\[]?\s*(?:\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{\s*)*(?P<letter>[A-J])\s*\}*\s*"
    r"(?:(?P<mark>[)\]][.:]?|[.:])\s*\}*\s*(?P<rest>.*))?\}*",
    re.IGNORECASE | re.DOTALL,
)
_OTHER_LETTER = re.compile(r"(?<![A-Za-z\\])[(\[]?[A-J][)\].:](?![A-Za-z])|(?<![A-Za-z\\])[B-J](?![A-Za-z])")


def same_words(gold: tuple[str, ...], answer: tuple[str, ...]) -> bool:
    """The same words, articles and other words without content aside."""
    left, right = _content(gold), _content(answer)
    if len(left) == 1 and left[0] in _OPPOSITE and right[:1] == left:
        return _OPPOSITE[left[0]] not in right  # "Yes, it is possible"
    return bool(left) and (left == right or _ENDLESS.issuperset((" ".join(left), " ".join(right))))


def endless(words: tuple[str, ...]) -> bool:
    """Whether the words say that something has no end."""
    return " ".join(_content(words)) in _ENDLESS


def _content(words: tuple[str, ...]) -> list[str]:
    plain = [re.sub(r"[^\w]|-?angled$", "", word.casefold()) for word in words]
    return [word for word in plain if word and word not in _FILLERS]


def word_number(words: tuple[str, ...]) -> Fraction | None:
    """The number that words say: ``twenty-one``, ``two hundred and five``."""
    if len(words) == 1 and words[0] in _NUMBERS:
        return _NUMBERS[words[0]]
    parts = [part for word in words for part in word.split("-") if part and part != "and"]
    if not 1 <= len(parts) <= 12 or any(part not in _CARDINALS and part not in SCALES for part in parts):
        return None
    total, group, before = 0, 0, 0
    for part in parts:
        scale = SCALES.get(part, 1)
        if scale == 1:
            value = _CARDINALS[part]
            if before and not (before >= 20 and value < 10 and before < 100) and before < 100:
                return None  # two numbers, not one
            group, before = group + value, value
        elif part == "dozen" or group == 0:
            return None
        elif scale == 100:
            group, before = group * 100, 100
        else:
            total, group, before = total + group * scale, 0, 1000
    return Fraction(total + group)


def plain_word(words: tuple[str, ...]) -> bool:
    """Whether one short word is a word and no product of letters."""
    return word_number(words) is not None or (len(words) == 1 and words[0] in _OPPOSITE)


def choice_letters(text: str) -> frozenset[str] | None:
    """The letters of a question with several right choices: ``AC``, ``A, C``, ``(A) and (C)``."""
    bare = re.sub(r"\\(?:text|mathrm|mathbf)|\band\b|[\s{}(),;.]", "", text)
    return frozenset(bare) if re.fullmatch(r"[A-J]{2,8}", bare) and len(set(bare)) == len(bare) else None


def choice_letter(text: str) -> str | None:
    """The letter of a multiple-choice answer, when it is all that is answered: ``(B)``, ``B.``, ``B) 15``.

    Upper case is asked for; what follows the letter must name no other one.
    """
    match = _LETTER.fullmatch(text.strip().strip("*").strip())
    if match is None:
        return None
    letter, rest = match["letter"], (match["rest"] or "").strip()
    if not letter.isupper() or _OTHER_LETTER.search(rest) or re.search(r"\bor\b", rest, re.IGNORECASE):
        return None
    return letter
