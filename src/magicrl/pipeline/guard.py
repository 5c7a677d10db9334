"""What keeps similar texts apart that are different problems: numbers, operators and words that decide the question.

In mathematics two texts may share all but one word and be two problems. Names of people, phrasing, the order of clauses
and a last remark on how to answer do not keep them apart.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from difflib import SequenceMatcher
from hashlib import blake2b

from magicrl.pipeline.canonical import NEUTRAL, POLES, STRICT, listed, stem, tokens_of

_UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_UNIT = {word: value for value, word in enumerate(_UNITS.split(" "))}
_TEN = {word: 10 * tens for tens, word in enumerate(_TENS.split(" "), 2)}
_WORDS = {word: value for word, value in _UNIT.items() if word != "one"} | _TEN  # "one" is mostly a pronoun
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 1000, "million": 1_000_000}
_LABELS = listed("problem example exercise question ex no q")
_OPERATORS = listed("+ ^ < > <= >= != sqrt !")
_BOUNDS = {("at", "most"): "atmost", ("at", "least"): "atleast"}
_TITLE = re.compile(r"\b[A-Z][a-z]+\b")
_MINIMAL = 2
"""Two texts that differ in no more content words than this differ on purpose, unless the words mean the same."""
_PEOPLE = listed("he she his her him they their")
_SENTENCE = re.compile(r"(?<=[.?!])\s+(?=[A-Z(\[])")
_REMARK = 8  # words
_CONTEXT = 3


def numbers_of(tokens: Sequence[str]) -> list[tuple[int, str]]:
    """Place and value of each number of canonical tokens, number words included; labels as *Example 27* are not.

    Example:
        >>> numbers_of("example 27 ann has twenty - five apples and 3 pears".split())
        [(4, '25'), (9, '3')]
    """
    found: list[tuple[int, str]] = []
    skip = _label_length(tokens)
    place = skip
    while place < len(tokens):
        token = tokens[place]
        if token[0].isdigit():
            found.append((place, token))
        elif token in _WORDS:
            value, length = _word_number(tokens, place)
            found.append((place, str(value)))
            place += length - 1
        elif token in _SCALES and found and found[-1][0] == place - 1 and found[-1][1].isdigit():
            found[-1] = (found[-1][0], str(int(found[-1][1]) * _SCALES[token]))
        place += 1
    return found


def number_key(tokens: Sequence[str]) -> int:
    """A 64-bit hash of the multiset of numbers: texts of different keys are different problems."""
    values = sorted(value for _, value in numbers_of(tokens))
    return int.from_bytes(blake2b(" ".join(values).encode(), digest_size=8).digest(), "little")


def are_different(a: str, b: str, *, wording: bool = True) -> bool:
    """Whether two similar texts (raw) are nevertheless two problems.

    Args:
        wording: whether an unknown word in place of another, in one place, keeps them apart. Where a missed copy costs
            more than a problem, as in decontamination, it should not.
    """
    tokens_a, tokens_b = tokens_of(a), tokens_of(b)
    numbers_a, numbers_b = numbers_of(tokens_a), numbers_of(tokens_b)
    values_a, values_b = [v for _, v in numbers_a], [v for _, v in numbers_b]
    # cheap comparisons first; most pairs end here
    if sorted(values_a) != sorted(values_b) or _signs(tokens_a) != _signs(tokens_b):
        return True
    count_a, count_b = Counter(tokens_a), Counter(tokens_b)
    if any(count_a[operator] != count_b[operator] for operator in _OPERATORS):
        return True
    only_a, only_b = count_a - count_b, count_b - count_a
    if (only_a or only_b) and (only_a.keys() | only_b.keys()) <= {"(", ")"}:
        return True  # the same terms in other brackets
    letters_a, letters_b = _letters(only_a), _letters(only_b)
    if (letters_a and letters_b) or letters_a + letters_b > _MINIMAL:
        return True  # another variable, or another formula
    if _shouted(a, only_a) and _shouted(b, only_b):
        return True  # words and points in capitals are objects of the problem
    if _opposed(tokens_a, tokens_b) or (wording and _reworded_in_one_place(a, tokens_a, b, tokens_b)):
        return True
    if values_a != values_b and _exchanged(tokens_a, numbers_a, tokens_b, numbers_b):
        return True
    places_a, places_b = _strict_poles(tokens_a), _strict_poles(tokens_b)
    poles_a, poles_b = [pole for _, pole in places_a], [pole for _, pole in places_b]
    moved = poles_a != poles_b and sorted(poles_a) == sorted(poles_b)
    return moved and _exchanged(tokens_a, places_a, tokens_b, places_b)


def _letters(tokens: Counter[str]) -> int:
    return sum(n for token, n in tokens.items() if len(token) == 1 and token.isalpha() and token != "s")


def _shouted(text: str, tokens: Counter[str]) -> bool:
    """Whether one of the words stands in capitals."""
    return any(_is_word(token) and token.upper() in text for token in tokens)


def _reworded_in_one_place(a: str, tokens_a: Sequence[str], b: str, tokens_b: Sequence[str]) -> bool:
    """Whether they differ in so little, or so much in one place, that it is the problem that differs."""
    names = {name.lower() for name in (*_TITLE.findall(a), *_TITLE.findall(b))}
    a, b = _without_remark(a), _without_remark(b)
    content_a, content_b = _content(tokens_of(a), names), _content(tokens_of(b), names)
    only_a, only_b = Counter(content_a) - Counter(content_b), Counter(content_b) - Counter(content_a)
    more, fewer = sorted((only_a.total(), only_b.total()), reverse=True)
    if not more:
        return False
    if not fewer:
        return more > _MINIMAL  # a condition more
    if _PEOPLE & {*tokens_a} & {*tokens_b}:  # in a story other words tell the same, but for those of its question
        return _asked(a, names) >= only_a.keys() and _asked(b, names) >= only_b.keys()
    if more <= _MINIMAL:
        return True
    # autojunk off: it leaves frequent words out of long texts
    steps = SequenceMatcher(None, content_a, content_b, autojunk=False).get_opcodes()
    return sum(step[0] != "equal" for step in steps) == 1


def _asked(text: str, names: set[str]) -> set[str]:
    """Stems of the last sentence."""
    return {*_content(tokens_of(_SENTENCE.split(text.strip())[-1]), names)}


def _without_remark(text: str) -> str:
    """The text without a last sentence that only says how to answer: short, and nothing mathematical in it."""
    sentences = _SENTENCE.split(text.strip())
    last = sentences[-1]
    if len(sentences) < 2 or last.endswith("?") or len(last.split()) > _REMARK or re.search(r"[\d$\\]", last):
        return text
    return " ".join(sentences[:-1])


def _content(tokens: Sequence[str], names: set[str]) -> list[str]:
    """Stems of the words that say something, without numbers, names and those of the axes."""
    return [
        stem(token)
        for token in tokens
        if _is_word(token) and not (token in NEUTRAL or token in names or _poles_of(token))
    ]


def _label_length(tokens: Sequence[str]) -> int:
    """Tokens of a label in front (*Problem 12*, *27* before a word)."""
    start = 0
    while start < 3 and start + 1 < len(tokens) and tokens[start] in _LABELS:
        start += 1
    return start + 1 if start and tokens[start][0].isdigit() else 0


def _word_number(tokens: Sequence[str], place: int) -> tuple[int, int]:
    """Value and length in tokens of the number word at ``place``."""
    value, length = _WORDS[tokens[place]], 1
    if tokens[place] in _TEN:
        dash = 1 if place + 1 < len(tokens) and tokens[place + 1] == "-" else 0
        unit = tokens[place + 1 + dash] if place + 1 + dash < len(tokens) else ""
        if 1 <= _UNIT.get(unit, 0) <= 9:
            value, length = value + _UNIT[unit], 2 + dash
    return value, length


def _signs(tokens: Sequence[str]) -> int:
    """Minus signs: those beside a number, a bracket or a single letter; a hyphen joins longer words."""
    around = zip(["", *tokens], tokens, [*tokens[1:], ""], strict=False)
    return sum(token == "-" and not (_is_word(before) or _is_word(after)) for before, token, after in around)


def _is_word(token: str) -> bool:
    return len(token) > 1 and token.isalpha()


def _opposed(a: Sequence[str], b: Sequence[str]) -> bool:
    """Whether they mention different poles of an axis, or one a strict axis that the other does not mention."""
    poles_a, poles_b = _poles(a), _poles(b)
    for axis in {*poles_a, *poles_b}:
        mine, other = poles_a[axis], poles_b[axis]
        if (axis >= STRICT or (mine and other)) and mine.keys() != other.keys():
            return True
        if axis >= STRICT and len(mine) > 1 and mine != other:  # one odd and two even against two odd and one even
            return True
    return False


def _poles_of(word: str) -> Sequence[tuple[int, int]]:
    return POLES.get(word) or POLES.get(word.removesuffix("s"), ())


def _strict_poles(tokens: Sequence[str]) -> list[tuple[int, str]]:
    """Place and pole of each word of a strict axis."""
    return [
        (place, f"{axis}/{pole}")
        for place, token in enumerate(tokens)
        for axis, pole in _poles_of(token)
        if axis >= STRICT
    ]


def _poles(tokens: Sequence[str]) -> defaultdict[int, Counter[int]]:
    found: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for before, token, after in zip(["", *tokens], tokens, [*tokens[1:], ""], strict=False):
        if (token, after) == ("exactly", "how"):
            continue  # exactly how many asks for no more than how many
        for axis, pole in _poles_of(_BOUNDS.get((before, token), token)):
            found[axis][pole] += 1
    return found


def _exchanged(
    a: Sequence[str], numbers_a: list[tuple[int, str]], b: Sequence[str], numbers_b: list[tuple[int, str]]
) -> bool:
    """Whether equal numbers stand in other company, rather than move about with their clause.

    Each number's neighbouring words are compared with those of an equal number and with those at the same rank: when
    the ranks agree better, values were exchanged and not clauses.
    """
    around_a = [_around(a, place) for place, _ in numbers_a]
    around_b = [_around(b, place) for place, _ in numbers_b]
    by_rank = sum(_shared(x, y) for x, y in zip(around_a, around_b, strict=True))
    free: defaultdict[str, list[frozenset[str]]] = defaultdict(list)
    for (_, value), words in zip(numbers_b, around_b, strict=True):
        free[value].append(words)
    by_value = 0.0
    for (_, value), words in zip(numbers_a, around_a, strict=True):
        best = max(free[value], key=lambda other: _shared(words, other))
        free[value].remove(best)
        by_value += _shared(words, best)
    # a draw counts as exchanged: a copy that stays costs less than a problem that is lost
    return by_rank >= by_value


def _around(tokens: Sequence[str], place: int) -> frozenset[str]:
    near = [*tokens[max(0, place - _CONTEXT) : place], *tokens[place + 1 : place + 1 + _CONTEXT]]
    return frozenset(token for token in near if not token[0].isdigit() and token not in NEUTRAL)


def _shared(a: frozenset[str], b: frozenset[str]) -> float:
    union = len(a | b)
    return len(a & b) / union if union else 0.0
