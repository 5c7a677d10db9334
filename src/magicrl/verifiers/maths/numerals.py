"""Numbers in words: ``twenty-one``, ``two hundred and five``, ``two-thirds``, ``one and a half``, ``half a dozen``."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

_COUNTED = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty"
)
_ORDERED = (
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth "
    "fifteenth sixteenth seventeenth eighteenth nineteenth twentieth"
)
_CARDINALS = {word: value for value, word in enumerate(_COUNTED.split())} | {
    word: 10 * value
    for value, word in enumerate(("thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"), start=3)
}
_ORDINALS = {word: value for value, word in enumerate(_ORDERED.split(), start=1)}
_PARTS = (
    {word: value for word, value in _ORDINALS.items() if value > 2}
    | {word + "s": value for word, value in _ORDINALS.items() if value > 2}
    | {"half": 2, "halves": 2, "quarter": 4, "quarters": 4, "hundredth": 100, "hundredths": 100}
    | {"thousandth": 1000, "thousandths": 1000}
)
"""Words that name a part of one."""
SCALES = {
    "dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12
}  # fmt: skip
"""Words after a number that multiply it."""
_MOST_WORDS = 14


def counts_one(following: str) -> bool:
    """Whether an article before this word counts: ``a hundred``, ``a third``."""
    return following in SCALES or following in _PARTS


def word_number(words: Sequence[str]) -> Fraction | None:
    """The number that words say; of a single word also an ordinal (``third``) and ``none``."""
    parts = [part for word in words for part in word.split("-") if part]
    if parts[:1] in (["negative"], ["minus"]):
        value = word_number(parts[1:])
        return None if value is None else -value
    if not 1 <= len(parts) <= _MOST_WORDS:
        return None
    if len(parts) == 1:
        if parts[0] in _ORDINALS:
            return Fraction(_ORDINALS[parts[0]])
        if parts[0] in ("none", "hundred", "half"):
            return {"none": Fraction(0), "hundred": Fraction(100), "half": Fraction(1, 2)}[parts[0]]
    return amount(parts)


def amount(parts: Sequence[str]) -> Fraction | None:
    """The number that cardinals and fractions say, no ordinals; ``parts`` are words without hyphens."""
    parts = ["one" if part in ("a", "an") else part for part in parts]
    if parts[:2] == ["half", "one"] and parts[2:] == ["dozen"]:
        return Fraction(6)
    if len(parts) > 2 and parts[-1] in SCALES and parts[-2] in _PARTS:
        several = amount(parts[:-1])  # two and a half million
        return None if several is None else several * SCALES[parts[-1]]
    if parts and parts[-1] in _PARTS:
        return _fraction(parts)
    value = _cardinal([part for part in parts if part != "and"])
    return None if value is None else Fraction(value)


def _fraction(parts: list[str]) -> Fraction | None:
    """``two thirds``, ``one and a half``."""
    start = max((at for at, part in enumerate(parts) if part == "and"), default=-1)
    top = _cardinal(parts[start + 1 : -1]) if parts[start + 1 : -1] else 1 if parts[-1] == "half" else None
    if top is None or start == 0:
        return None
    value = Fraction(top, _PARTS[parts[-1]])
    if start < 0:
        return value
    whole = _cardinal([part for part in parts[:start] if part != "and"])
    return whole + value if whole is not None and 0 < value < 1 else None


def _cardinal(parts: list[str]) -> int | None:
    if not parts or any(part not in _CARDINALS and part not in SCALES for part in parts):
        return None
    total, group, before = 0, 0, 0
    for part in parts:
        scale = SCALES.get(part, 1)
        if scale == 1:
            value = _CARDINALS[part]
            if before and not (before >= 20 and value < 10 and before < 100) and before < 100:
                return None  # two numbers, not one
            group, before = group + value, value
        elif group == 0:
            return None
        elif part == "dozen":
            group, before = group * 12, 12
        elif scale == 100:
            group, before = group * 100, 100
        else:
            total, group, before = total + group * scale, 0, 1000
    return total + group


def leading_number(words: Sequence[str]) -> tuple[Fraction, int] | None:
    """The longest number that a phrase begins with (cardinals and fractions), and how many words it takes."""
    for end in range(min(len(words), _MOST_WORDS), 0, -1):
        parts = [part for word in words[:end] for part in word.casefold().split("-") if part]
        if (
            words[end - 1].casefold() in ("and", "a", "an")
            or not parts
            or (parts[0] in ("and", "a", "an") and end == 1)
        ):
            continue
        value = amount(parts)
        if value is not None:
            return value, end
    return None
