"""Literals without a grammar: plain numbers in digits and in words, choice letters, yes and no, words.

Numbers are exact `fractions.Fraction`, because 0.1 and 0.10000001 differ. Sizes are bounded, so that no exponent
takes long to compute.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


def word_set(text: str) -> frozenset[str]:
    """Return the words of ``text``: a set that is written in one line."""
    return frozenset(text.split())


DENIALS = word_set("not no never neither nor except without isn't")
"""Words that negate the next word."""
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


_UNSURE = re.compile(
    r"\b(?:or|but|maybe|perhaps|possibly|probably|presumably|likely|unless|provided|idea|clue|guess)\b|^\s*(?:if|when|only|and)\b",
    re.IGNORECASE,
)


def same_words(reference: tuple[str, ...], answer: tuple[str, ...]) -> bool:
    """Compare words without articles and other words without content."""
    left, right = _content(reference), _content(answer)
    if len(left) == 1 and left[0] in _OPPOSITE and right[:1] == left:
        # "Yes, it is possible", but not "yes, perhaps"
        return _OPPOSITE[left[0]] not in right and not _UNSURE.search(" ".join(right[1:]))
    return bool(left) and (left == right or _ENDLESS.issuperset((" ".join(left), " ".join(right))))


_POLAR = re.compile(
    r"(?:\\text(?:bf|it|rm)?\{)?[ *]*(yes|no|true|false)\b[ *]*(?:[,.;:!]|\}[,.;:]|$)(.*)", re.IGNORECASE | re.DOTALL
)


def polar(reference: str, answer: str) -> bool | None:
    """Accept ``Yes, because ...`` for a reference that is yes or no; None if it is neither, or the answer has both."""
    match = _POLAR.fullmatch(answer) if reference.casefold() in _OPPOSITE else None
    if match is None or match[1].casefold() != reference.casefold():
        return None
    # "no" may also begin a reason: "Yes, since no divisor is left"
    other = r"no(?=[,.;}]|$)" if _OPPOSITE[reference.casefold()] == "no" else _OPPOSITE[reference.casefold()]
    return None if _UNSURE.search(match[2]) or re.search(rf"\b{other}\b", match[2], re.IGNORECASE) else True


def endless(words: tuple[str, ...]) -> bool:
    """Return whether the words mean an infinite number."""
    return " ".join(_content(words)) in _ENDLESS


def _content(words: tuple[str, ...]) -> list[str]:
    plain = [re.sub(r"[^\w]|-?angled$", "", word.casefold()) for word in words]
    return [word for word in plain if word and word not in _FILLERS]


def plain_word(words: tuple[str, ...]) -> bool:
    """Return whether a short word is a word and no product of letters."""
    return word_number(words) is not None or (len(words) == 1 and words[0] in _OPPOSITE)


def choice_letters(text: str) -> frozenset[str] | None:
    """Return the letters of several right choices: ``AC``, ``A, C``, ``(A) and (C)``."""
    bare = re.sub(r"\\(?:text|mathrm|mathbf)|\band\b|[\s{}(),;.]", "", text)
    return frozenset(bare) if re.fullmatch(r"[A-J]{2,8}", bare) and len(set(bare)) == len(bare) else None


def choice_letter(text: str) -> str | None:
    """Return the letter of a multiple-choice answer: ``(B)``, ``B.``, ``B) 15``.

    The letter must be a capital, and the text after it must name no other one.
    """
    return choice(text)[0]


def choice(text: str) -> tuple[str | None, str]:
    """Return the letter of a multiple-choice answer, and the text after it."""
    match = _LETTER.fullmatch(text.strip().strip("*").strip())
    if match is None or not match["letter"].isupper():
        return None, ""
    rest = match["rest"] or ""
    other = _OTHER_LETTER.search(rest) or re.search(r"\bor\b", rest, re.IGNORECASE)
    return None if other else match["letter"], rest.strip()


_COUNTED = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty"
)
_ORDERED = (
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth "
    "fifteenth sixteenth seventeenth eighteenth nineteenth twentieth"
)
CARDINALS = {word: value for value, word in enumerate(_COUNTED.split())} | {
    word: 10 * value
    for value, word in enumerate(("thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"), start=3)
}
"""Numbers up to twenty, and tens, by their word."""
_ORDINALS = {word: value for value, word in enumerate(_ORDERED.split(), start=1)}
SCALES = {
    "dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12
}  # fmt: skip
"""Words after a number that multiply it."""
_MORE_SCALES = {
    12: "dozens dutzend douzaine douzaines docena docenas dozzina dozzine dúzia dúzias дюжина дюжины дюжин dozijn",
    100: "hundreds hundert centaine centaines cientos centinaia сотня сотни сотен honderd 百",
    1000: "thousands tausend tsd mille millier milliers mil mila тысяча тысячи тысяч тыс duizend tysiąc tysiące "
    "tysięcy tusen 千",
    10**4: "万 萬",
    10**6: "millions millionen mio millón millones milione milioni milhão milhões миллион миллиона миллионов млн "
    "miljoen milion miliony milionów miljoner 百万 百萬",
    10**7: "千万 千萬",
    10**8: "亿 億",
    10**9: "billions milliarde milliarden mrd milliard milliards miliardo miliardi bilhão bilhões миллиард миллиарда "
    "миллиардов млрд miljard miliard miliardy miliardów",
    10**12: "trillions billionen billones 万亿 萬億",
}
MORE_SCALES = {word: value for value, words in _MORE_SCALES.items() for word in words.split()}
"""The same in the plural and in other languages."""
SCALE_PREFIX = r"百(?!分)|千(?![克米瓦卡赫帕焦字])|[万萬亿億]"
"""Chinese and Japanese scales, which have no space before the noun, but no kilogram or percentage."""
_PART = (
    {"half": 2, "quarter": 4}
    | {word: value for word, value in _ORDINALS.items() if value > 2}
    | {word[:-1] + "ieth": value for word, value in CARDINALS.items() if word.endswith("ty")}
    | {word + "th": value for word, value in SCALES.items() if word != "dozen"}
)
_PARTS = _PART | {word + "s": value for word, value in _PART.items()} | {"halves": 2}
"""Words that name a part of one."""
_MOST_WORDS = 14


def part_of_one(word: str, *, alone: bool) -> bool:
    """Return whether a word after a number makes it a fraction: ``6 sixteenths``, but not ``6 sixth graders``."""
    last = word.rpartition("-")[2]
    return last in _PARTS and (alone or last.endswith("s"))


def counts_one(following: str) -> bool:
    """Return whether an article before this word is a number: ``a hundred``, ``a third``."""
    return following in SCALES or following in _PARTS


def word_number(words: Sequence[str]) -> Fraction | None:
    """Return the number that words spell; a single word may also be an ordinal (``third``) or ``none``."""
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
    """Return the number that cardinals and fractions spell; ``parts`` are words without hyphens."""
    parts = ["one" if part in ("a", "an") else part for part in parts]
    if parts[:2] == ["half", "one"] and parts[2:] == ["dozen"]:
        return Fraction(6)
    if len(parts) > 2 and parts[-1] in SCALES and parts[-2] in _PARTS:
        several = amount(parts[:-1])  # two and a half million
        return None if several is None else several * SCALES[parts[-1]]
    if parts and parts[-1] in _PARTS:
        return _parts_of_one(parts)
    value = _cardinal([part for part in parts if part != "and"])
    return None if value is None else Fraction(value)


def _parts_of_one(parts: list[str]) -> Fraction | None:
    """Return the number of ``two thirds`` or ``one and a half``."""
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
    if not parts or any(part not in CARDINALS and part not in SCALES for part in parts):
        return None
    total, group, before = 0, 0, 0
    for part in parts:
        scale = SCALES.get(part, 1)
        if scale == 1:
            value = CARDINALS[part]
            if before and not (before >= 20 and value < 10 and before < 100) and before < 100:
                return None  # two numbers, not one
            group, before = group + value, value
        elif group == 0:
            return None
        elif scale == 100:
            group, before = group * 100, 100
        else:
            total, group, before = total + group * scale, 0, 1000
    return total + group


def leading_number(words: Sequence[str]) -> tuple[Fraction, int] | None:
    """Return the longest number at the start of a phrase (cardinals and fractions), and its number of words."""
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


MAX_CHARS = 1000
MAX_EXPONENT = 1000

_UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)(?:\.\d*)?|\.\d+"
_DECIMAL = re.compile(rf"([+-]?)({_UNSIGNED})(?:(?:\\times ?10\^|[eE])\{{?([+-]?\d+)\}}?)?", re.ASCII)
_FRACTION = re.compile(
    r"([+-]?)(?:(\d+) ?)?"
    r"(?:\\frac(?:\{([+-]?\d+)\}\{([+-]?\d+)\}|(\d)(\d))|(?<!\d)(\d+)/(\d+))",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class PlainNumber:
    """Number literal.

    Attributes:
        value: Exact value.
        grouped: Whether its separators could also be those of a list.
        decimals: Digits after the decimal point as written.
    """

    value: Fraction
    grouped: bool
    decimals: int = 0


def plain_number(text: str) -> PlainNumber | None:
    """Return the number that ``text`` (in canonical notation) spells; None if it is no number."""
    if len(text) > MAX_CHARS:
        return None
    if match := _DECIMAL.fullmatch(text):
        return _decimal(*match.groups())
    if match := _FRACTION.fullmatch(text):
        return _fraction(*match.groups())
    return None


def _decimal(sign: str, digits: str, exponent: str | None) -> PlainNumber | None:
    # the length first: int() of a million digits is slow
    if exponent and (len(exponent) >= 8 or abs(int(exponent)) > MAX_EXPONENT):
        return None
    bare = digits.replace(",", "").replace(" ", "")
    decimals = len(bare.partition(".")[2]) if exponent is None else 0
    return PlainNumber(Fraction(f"{sign}{bare}e{exponent or 0}"), bare != digits, decimals)


def _fraction(sign: str, whole: str | None, *parts: str | None) -> PlainNumber | None:
    given = [part for part in parts if part is not None]
    numerator, denominator = int(given[0]), int(given[1])
    if denominator == 0:
        return None
    value = Fraction(numerator, denominator)
    if whole is not None:
        if not 0 < value < 1 or "-" in "".join(given):
            return None  # a product or a typing error, no mixed number
        value += int(whole)
    return PlainNumber(-value if sign == "-" else value, False)


def approximates_fraction(literal: PlainNumber, exact: Fraction) -> bool:
    """Return whether a decimal is a non-terminating fraction, rounded or truncated to six or more significant digits.

    Example: 0.0833333 is 1/12; 0.5000001 is not 1/2, which has an exact decimal.
    """
    rest = exact.denominator
    # a decimal terminates if the denominator has no other prime than 2 and 5
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest != 1 and rounds(literal.value, literal.decimals, exact)


def rounds(decimal: Fraction, decimals: int, exact: Fraction) -> bool:
    """Return whether a decimal is a value, rounded or truncated to six or more significant digits."""
    unit = Fraction(1, 10**decimals)
    # fewer than six significant digits
    if not decimals or abs(decimal) < 100_000 * unit:
        return False
    distance = abs(decimal - exact)
    # rounded: at most half a unit of the last digit; truncated: less than a unit, towards zero
    return 2 * distance <= unit or (distance < unit and abs(decimal) < abs(exact))
