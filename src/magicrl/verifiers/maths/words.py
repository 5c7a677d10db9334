"""Answers in words, and the letters of multiple-choice questions."""

from __future__ import annotations

import re

from magicrl.verifiers.maths.numerals import word_number


def word_set(text: str) -> frozenset[str]:
    """The words of ``text``: a long set that reads as a line."""
    return frozenset(text.split())


DENIALS = word_set("not no never neither nor except without isn't")
"""Words that turn what they stand before into its contrary."""
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


_POLAR = re.compile(
    r"(?:\\text(?:bf|it|rm)?\{)? *(yes|no|true|false)\b *(?:[,.;:!]|\}[,.;:]|$)(.*)", re.IGNORECASE | re.DOTALL
)


def polar(gold: str, answer: str) -> bool | None:
    """``Yes, because ...`` for a gold that is yes or no; None where it is neither, or where both are said."""
    match = _POLAR.fullmatch(answer) if gold.casefold() in _OPPOSITE else None
    if match is None or match[1].casefold() != gold.casefold():
        return None
    other = _OPPOSITE[gold.casefold()]
    unsure = re.search(rf"\b(?:{other}|or|maybe|perhaps|unless|but)\b", match[2], re.IGNORECASE)
    return None if unsure and (other != "no" or re.search(r"\b(?:no[,.;]|no$|or|maybe|but)", match[2])) else True


def endless(words: tuple[str, ...]) -> bool:
    """Whether the words say that something has no end."""
    return " ".join(_content(words)) in _ENDLESS


def _content(words: tuple[str, ...]) -> list[str]:
    plain = [re.sub(r"[^\w]|-?angled$", "", word.casefold()) for word in words]
    return [word for word in plain if word and word not in _FILLERS]


def plain_word(words: tuple[str, ...]) -> bool:
    """Whether one short word is a word and no product of letters."""
    return word_number(words) is not None or (len(words) == 1 and words[0] in _OPPOSITE)


def choice_letters(text: str) -> frozenset[str] | None:
    """The letters of a question with several right choices: ``AC``, ``A, C``, ``(A) and (C)``."""
    bare = re.sub(r"\\(?:text|mathrm|mathbf)|\band\b|[\s{}(),;.]", "", text)
    return frozenset(bare) if re.fullmatch(r"[A-J]{2,8}", bare) and len(set(bare)) == len(bare) else None


def choice_text(text: str) -> str:
    """What stands after the letter of a multiple-choice answer."""
    match = _LETTER.fullmatch(text.strip().strip("*").strip())
    return "" if match is None else (match["rest"] or "").strip()


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
