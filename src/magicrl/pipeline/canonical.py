"""Canonical form of a text, independent of typesetting (LaTeX, Unicode, plain), case, whitespace and punctuation.

Number words (*eight*, *two dozen*) become digits, amounts lose the sign or word for dollars, and units are spelled out.
Operators and words are kept, so that texts with equal canonical forms differ only in typesetting. ``words.toml`` lists
which words decide what a problem asks and which do not.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Annotated

from pydantic import BeforeValidator

from magicrl.config.loader import shipped_table
from magicrl.config.section import Section
from magicrl.records import plain_typography
from magicrl_verifiers.maths.literals import CARDINALS


def listed(words: str) -> frozenset[str]:
    """Return the words of a list that is written as one text."""
    return frozenset(words.split())


WordSet = Annotated[frozenset[str], BeforeValidator(listed)]


class Words(Section):
    """Contents of ``words.toml``."""

    axes: tuple[tuple[str, ...], ...]
    strict_axes: tuple[tuple[str, ...], ...]
    neutral: WordSet
    counted: WordSet
    fillers: WordSet
    synonyms: str  # a group a line
    greek: WordSet
    address: WordSet
    remarks: WordSet
    remark_fillers: WordSet
    looks: WordSet
    common: WordSet
    symbols: dict[str, str]
    commands: dict[str, str]
    units: dict[str, str]
    nouns: dict[str, WordSet]
    phrases: dict[str, str]
    spellings: dict[str, str]
    ordinals: str


WORDS = shipped_table("pipeline/words.toml", Words)
STRICT = len(WORDS.axes)
"""Number of the first strict axis. Strict axes come after the others."""
POLES: dict[str, list[tuple[int, int]]] = {}
"""Axes and poles of each deciding word."""
for _axis, _poles in enumerate(WORDS.axes + WORDS.strict_axes):
    for _pole, _words in enumerate(_poles):
        for _word in _words.split():
            POLES.setdefault(_word, []).append((_axis, _pole))


def poles_of(word: str) -> Sequence[tuple[int, int]]:
    """Return the axes and poles of a deciding word or its plural; empty for other words."""
    return POLES.get(word) or POLES.get(word.removesuffix("s"), ())


NEUTRAL = WORDS.neutral
SYNONYMS: dict[str, str] = {}
for _group in WORDS.synonyms.strip().splitlines():
    for _word in _group.split():
        SYNONYMS.setdefault(_word, _group.split()[0])  # a word of two groups belongs to the first


def stem(word: str) -> str:
    """Return one form for the inflections and synonyms of a word.

    Example:
        >>> stem("purchased"), stem("apples") == stem("apple")
        ('buy', True)
    """
    if word in SYNONYMS:
        return SYNONYMS[word]
    # the longest endings first
    for ending in ("ing", "ies", "ed", "es", "s"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            word = word.removesuffix(ending)
            # planning: the consonant was doubled for the ending
            if len(word) > 3 and word[-1] == word[-2] not in "ls":
                word = word[:-1]
            break
    return word.rstrip("ey") if len(word) > 3 else word


@lru_cache(maxsize=1 << 16)
def meaning_of(token: str) -> str:
    """Return one form for words that decide the same thing, or that are inflections or synonyms of each other."""
    poles = poles_of(token)
    return f"~{poles}" if poles else stem(token)


_RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n", strict=True))
_LOWERED = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
_LOOKS, _SYMBOLS, _COMMANDS = WORDS.looks, WORDS.symbols, WORDS.commands
_COMMAND = re.compile(r"\\([A-Za-z]+)\*?|\\(.)", re.DOTALL)
_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{([^{}]*)\}|([0-9A-Za-z]))\s*(?:\{([^{}]*)\}|([0-9A-Za-z]))")
_ROOT = re.compile(r"\\sqrt\s*(?:\{([^{}]*)\}|([0-9A-Za-z]))")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{[A-Za-z*]+\}")
_EMPTY = re.compile(r"[\^_]\{\s*\}")
_GROUP = re.compile(r"\{([^{}\\]*)\}")
_SCRIPT = re.compile(r"(?<=[\^_])\{([^{}\\]*)\}")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:,|\{,\}|\\,|,\\!)\d{3})+(?![\d])")
_RAISED_RUN = re.compile(f"[{''.join(_RAISED)}]+")
_LOWERED_RUN = re.compile(f"[{''.join(_LOWERED)}]+")
_ATOM = re.compile(r"\(\s*([A-Za-z]?[0-9.]*[0-9]|[A-Za-z](?:_\s?\w+)?)\s*\)")
_ARGUMENT = re.compile(r"\b(sin|cos|tan|cot|sec|csc|ln|log)\s*\(\s*(\d*\s*[a-z])\s*\)(?!\s*\^)")
_SPECIAL = re.compile(r"[\\$^{}\x80-\U0010ffff]")
_FOREIGN = re.compile(r"[^\x00-\x7f]")
_TOKEN = re.compile(
    r"\d+(?:\.\d+)?|\.\d+|[^\W\d_]+|<=|>=|!=|(?<=[\d)])!|-(?![a-z]{2})|(?<!\w)-|[+*/^=<>|%@#~()\[\]_]|'(?:s|t|re|ll|ve)\b"
)
_REPEATING = re.compile(r"\\(?:overline|bar|dot)\s*(?=\{?\s*\d)")
_SINGLE = re.compile(r"(?:sqrt )?\w+")
_BOLD = re.compile(r"(?<![\w)])\*\*(?=\S)([^*\n]+)\*\*|(?<![\w*])\*([A-Za-z][A-Za-z' -]*[A-Za-z])\*(?![\w*])")
# a line feed or a tab that was escaped once too often; no LaTeX command begins with n or t and a capital
ESCAPED = re.compile(r"\\[nrt](?![a-z])")
_BULLET = re.compile(r"(?m)^\s*[-*•]\s+(?=[A-Za-z])")
_PARTS = {word: place for place, word in enumerate(WORDS.ordinals.split(), 1) if place > 2} | {
    "half": 2,
    "quarter": 4,
}
_PART = re.compile(
    rf"\b(?:(an?|one|1)[- ]({'|'.join(_PARTS)})\b(?= of\b)|(one|1)[- ](half)\b"
    rf"|(two|three|four|five|six|seven|eight|nine|\d+)[- ]({'|'.join(_PARTS)})s\b)"
)
_HALF = re.compile(r"(?<![\d/.])1/2(?= of\b)")
_METRIC = {"m": "meters", "g": "grams", "l": "liters", "s": "seconds", "h": "hours"}
_LETTER_UNIT = re.compile(r"(\d )([mglsh])(?=[.,;?!]?(?:\s+[a-z]|\s*$)|\s\d+ min)(?! [a-z]\b)")
_PYTHON_POWER = re.compile(r"(?<=[\w)])\*\*(?=[\w(-])")
_NON = re.compile(r"\bnon[- ](?=[a-z]{3})")
_HYPHEN = re.compile(r"\$-(?=[a-z]{2})")
_UNIT_POWER = re.compile(
    r"(\d) ?(mm|cm|km|m|in|ft|mi|yd|meters?|centimeters?|inch(?:es)?|feet|miles?|yards?) ?\^ ?([23])(?![\w^])"
)
_POWERS = {"2": "square", "3": "cubic"}
_TIME = re.compile(r"\b(\d{1,2}):00\b")
_HALF_DAY = re.compile(r"(?<=\d)(?: (?=[ap]\.? ?m\b)|(?=[ap]\.? ?m\b))([ap])\.? ?m\b\.?")
_COMMON_DIVISOR = re.compile(r"\b(?:(?:greatest|highest|largest) common (?:divisor|factor)|hcf|gcf)(?=\b)")
_COMMON_MULTIPLE = re.compile(r"\b(?:least|lowest|smallest) common multiple\b")
_PRICE = re.compile(r"(\$ ?\d+(?:\.\d+)?\$?|\d (?:dollars|cents))(?: an?(?= [a-z])|/(?=[a-z]{2}))")
_RATE = re.compile(r"\b([a-z]{3,}|km|mi|(?<=\d )[ml])/(hour|second|minute|day|week|month|year|hr|min|sec|s|h)\b")
_SHORT = {"'s": "is", "'re": "are", "'ll": "will", "'ve": "have", "'t": "not"}
_WITH_IS = listed("he she it what that there who where")
_STEMS = {"ca": "can", "can": "can", "won": "will"}
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9}
_ORDINALS = {str(place): word for place, word in enumerate(WORDS.ordinals.split(), 1)}
_JOINTS = _SCALES.keys() | {"and"}
_ENDINGS = listed("st nd rd th")
_DOLLARS = listed("dollar dollars usd")
_BEFORE_UNITS = listed("square cubic in many of per each")
_COUNTED = {("time", "1"): "once", ("times", "2"): "twice"}
_SPOKEN = frozenset(
    (*CARDINALS, *_SCALES, *_ENDINGS, *_DOLLARS, *WORDS.units, *WORDS.spellings, *_SHORT, "%", "time", "times", "cent")
)
"""Words that are numbers, that have another meaning next to a number, or that are abbreviations."""
_DEGREES = re.compile(r"\^\s*(?:\{\s*(?:\\circ|\\degree|°)\s*\}|(?:\\circ(?![a-z])|\\degree|°)\s*)")


def tokens_of(text: str) -> list[str]:
    """Return the words, numbers and operators of ``text`` in canonical form.

    Example:
        >>> tokens_of(r"Find $\\frac{1}{2}x^{2} \\le 10{,}000$.")
        ['find', '1', '/', '2', 'x', '^', '2', '<=', '10000']
        >>> tokens_of("Find 1/2 x² ≤ 10,000")
        ['find', '1', '/', '2', 'x', '^', '2', '<=', '10000']
    """
    text = plain_typography(text)
    # thousands first, before commas are dropped as punctuation
    if "," in text or "{,}" in text:
        text = _THOUSANDS.sub(lambda m: re.sub(r"\D", "", m[0]), text)
    if " a" in text or "/" in text:
        text = _PRICE.sub(r"\1 per ", text)
    if "\\" in text:
        text = ESCAPED.sub("\n", text)
    if "*" in text:
        text = _PYTHON_POWER.sub("^", _BOLD.sub(lambda m: f" {m[1] or m[2]} ", text))
    if "\n" in text:
        text = _BULLET.sub(" ", text)
    if "$-" in text:
        text = _HYPHEN.sub("$ ", text)
    if _SPECIAL.search(text):
        text = _plain(text)
    text = text.lower()
    if "non" in text:
        text = _NON.sub("non", text)
    if "m^" in text or "m ^" in text or "t^" in text or "n^" in text:
        text = _UNIT_POWER.sub(
            lambda m: f"{m[1]} {_POWERS[m[3]]} {'inches' if m[2] == 'in' else _METRIC.get(m[2], m[2])}", text
        )
    # five substring searches are faster than the regular expression
    if "half" in text or "third" in text or "quarter" in text or "th of" in text or "ths" in text:
        text = _PART.sub(_fraction, text)
    if "/" in text:
        text = _RATE.sub(lambda m: f"{_METRIC.get(m[1], m[1])} per {_METRIC.get(m[2], m[2])}", _HALF.sub("half", text))
    if ":00" in text or ".m" in text:
        text = _HALF_DAY.sub(r" \1m ", _TIME.sub(r"\1", text))
    if " common " in text:
        text = _COMMON_MULTIPLE.sub("lcm", _COMMON_DIVISOR.sub("gcd", text))
    text = _LETTER_UNIT.sub(lambda m: m[1] + _METRIC[m[2]], text)
    if "(" in text:
        text = _ARGUMENT.sub(r"\1 \2 ", _ATOM.sub(r" \1 ", text))
    tokens = _TOKEN.findall(text)
    if "." in text or "0" in text:
        tokens = [_number(token) if token[0] in "0." or "." in token else token for token in tokens]
    return tokens if _SPOKEN.isdisjoint(tokens) else _spelled_out(tokens)


def _fraction(match: re.Match[str]) -> str:
    """Return a fraction in words as digits, but a half as the word."""
    count, part = next((match[i], match[i + 1]) for i in (1, 3, 5) if match[i])
    if part == "half":
        return "half" if count in ("a", "one", "1") else match[0]
    value = int(count) if count.isdigit() else CARDINALS.get(count, 1)
    return f"{value}/{_PARTS[part]}"


def _spelled_out(tokens: Sequence[str]) -> list[str]:
    """Return tokens with number words as digits, ordinals as words, units spelled out, no *dollars* after numbers."""
    found: list[str] = []
    done = 0
    for place in [place for place, token in enumerate(tokens) if token in _SPOKEN]:
        if place < done:
            continue
        found += tokens[done:place]
        done = place + 1
        token, before = tokens[place], found[-1] if found else ""
        number = before[:1].isdigit()
        if token in _SCALES and number:
            found[-1] = _number(f"{Decimal(before) * _SCALES[token]:f}")
        elif token in WORDS.nouns and _is_noun(tokens, place):
            found.append(token)
        elif token in CARDINALS or token in _SCALES:
            value, done = _spoken(tokens, place)
            if token == "dozen" and before == "a":  # a dozen, half a dozen
                found.pop()
                if value == 12 and found[-1:] == ["half"]:
                    found.pop()
                    value = 6
            found.append(str(value))
        elif token in _SHORT:
            if token == "'t":
                found[-1:] = [_STEMS.get(before, before.removesuffix("n")), "not"]
            elif token != "'s" or before in _WITH_IS:  # otherwise a possessive
                found.append(_SHORT[token])
        elif token == "%" or (token == "cent" and before == "per"):
            found[len(found) - (token == "cent") :] = ["percent"]
        elif (token, before) in _COUNTED:
            found[-1] = _COUNTED[token, before]
        elif token in WORDS.spellings:
            found.append(WORDS.spellings[token])
        elif token in _ENDINGS and number and before in _ORDINALS:
            found[-1] = _ORDINALS[before]
        elif (number or before in _BEFORE_UNITS) and token in WORDS.units:
            found += WORDS.units[token].split(" ")
        elif not (
            token in _DOLLARS and (number or (token == "usd" and "".join(tokens[done : done + 1])[:1].isdigit()))
        ):
            found.append(token)
    return found + list(tokens[done:])


def _is_noun(tokens: Sequence[str], place: int) -> bool:
    """Return whether a number word is a noun or a pronoun: *a zero of f*, *each one*, but not *the zero vector*."""
    after = tokens[place + 1] if place + 1 < len(tokens) else ""
    return place > 0 and tokens[place - 1] in WORDS.nouns[tokens[place]] and (not after.isalpha() or after in NEUTRAL)


def _spoken(tokens: Sequence[str], place: int) -> tuple[int, int]:
    """Return the value of the number words that start at ``place``, and the index after them."""
    start, total, value = place, 0, 0
    while place < len(tokens):
        token = tokens[place]
        after = tokens[place + 1] if place + 1 < len(tokens) else ""
        tens = value % 100 >= 20 and not value % 10
        fits = place == start or tokens[place - 1] in _JOINTS or (tens and 0 < CARDINALS.get(token, 0) < 10)
        if token in CARDINALS and fits:
            value += CARDINALS[token]
        elif token in _SCALES:
            value = max(value, 1) * _SCALES[token]
            if value >= 1000:
                total, value = total + value, 0
        # the hyphen of twenty-five, and the word of two hundred and fifty
        elif not (token == "-" and tens and 0 < CARDINALS.get(after, 0) < 10) and not (
            token == "and" and tokens[place - 1] in _SCALES and after in CARDINALS
        ):
            break
        place += 1
    return total + value, place


def canonical_text(text: str) -> str:
    """Return the canonical tokens joined by spaces."""
    return " ".join(tokens_of(text))


def _plain(text: str) -> str:
    """Return LaTeX and Unicode notation as plain text."""
    if _FOREIGN.search(text):
        text = _RAISED_RUN.sub(lambda m: "^" + "".join(_RAISED[c] for c in m[0]), text)
        text = _LOWERED_RUN.sub(lambda m: "_" + "".join(_LOWERED[c] for c in m[0]), text)
        text = _FOREIGN.sub(_symbol, text)
    text = _DEGREES.sub(" degrees ", _EMPTY.sub("", text))
    if "\\" in text:
        text = _REPEATING.sub(" repeating ", _ENVIRONMENT.sub(" ", text))
        # from the inside out, because parts of a fraction may hold fractions
        text = _until_settled(_innermost, text)
        text = _COMMAND.sub(_command, text)
    # only a group of several atoms needs brackets: x^{2} is x^2, and x^{2n} is x^(2n)
    text = _until_settled(lambda t: _GROUP.sub(_bracketed, t), text)
    return text.replace("$", " ").replace("{", " ").replace("}", " ")


def _innermost(text: str) -> str:
    text = _SCRIPT.sub(lambda m: f"{_grouped(m[1])} ", text)
    text = _ROOT.sub(lambda m: f" sqrt {_grouped(m[1] or m[2] or '')} ", text)
    return _FRACTION.sub(lambda m: f" {_grouped(m[1] or m[2] or '')}/{_grouped(m[3] or m[4] or '')} ", text)


def _until_settled(change: Callable[[str], str], text: str) -> str:
    for _ in range(8):  # deeper nesting is left unchanged at its outermost levels
        changed = change(text)
        if changed == text:
            break
        text = changed
    return text


def _grouped(inside: str) -> str:
    inside = inside.strip()
    return inside if len(inside) <= 1 or _SINGLE.fullmatch(inside) else f"({inside})"


def _bracketed(match: re.Match[str]) -> str:
    """Return the contents of braces, in brackets after ^ and _ only. Other braces concern the typeface."""
    before = match.string[max(0, match.start() - 1) : match.start()]
    return _grouped(match[1]) if before in ("^", "_") else f" {match[1]} "


def _command(match: re.Match[str]) -> str:
    name = match[1]
    if name is None:
        return match[2] if match[2] in "%#" else " "
    if name in _LOOKS:
        return " "
    return _COMMANDS.get(name, f" {name} ")


def _symbol(match: re.Match[str]) -> str:
    char = match[0]
    if char in _SYMBOLS:
        return _SYMBOLS[char]
    name = unicodedata.name(char, "")
    if name.startswith("GREEK "):  # of "GREEK SMALL LETTER FINAL SIGMA" the last word
        return f" {name.split(' WITH ')[0].rsplit(' ', 1)[-1].lower().replace('lamda', 'lambda')} "
    decomposed = unicodedata.normalize("NFKD", char)
    return "".join(_SYMBOLS.get(c, c) for c in decomposed if not unicodedata.combining(c))


def _number(token: str) -> str:
    """Return a number without superfluous zeros: ``007.50`` as ``7.5``."""
    if not token[0].isdigit() and token[0] != ".":
        return token
    whole, _, part = token.partition(".")
    part = part.rstrip("0")
    return (whole.lstrip("0") or "0") + (f".{part}" if part else "")
