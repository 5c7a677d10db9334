"""Guard that recognises similar texts which are different problems, by numbers, operators, words and people.

Two mathematical texts may share all but one word and be different problems. A pair is one problem if its texts have the
same numbers, operators and words, apart from words that decide nothing, synonyms, typing errors and names, and if only
whole clauses changed places.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from hashlib import blake2b

from magicrl.pipeline.canonical import NEUTRAL, POLES, STRICT, SYNONYMS, WORDS, listed, meaning_of, poles_of, tokens_of

_OPERATORS = listed("+ ^ < > <= >= != sqrt ! |")
_BOUNDS = {("at", "most"): "atmost", ("at", "least"): "atleast"}
_MINIMAL = 2
"""Two texts that differ in at most this many words differ on purpose, unless the words are synonyms."""
_PLACES = 3
"""Fewest places in which a paraphrase differs from the original."""
_LONG = 6
"""Length of the shortest word that is checked for typing errors."""
_SMALL = NEUTRAL - WORDS.counted
# inside a sentence, or in front of what a person does
_NAME = re.compile(
    r"(?<=[a-z,;] )[A-Z][a-z]+\b"
    r"|\b[A-Z][a-z]+(?=['’]s\b| (?:and [A-Z]|[a-z]+(?:s|ed)\b|had|was|can|will|went|bought|sold|got|made"
    r"|took|gave|spent|ate|ran|found|saw|wrote|read|paid|said|did|does|would|also|now|then"
    r"|came|began|built|brought|caught|chose|cut|drank|drew|drove|fed|fell|felt|flew|grew|held|hid|hit|kept|knew|left"
    r"|lent|lost|met|must|put|rode|sang|sat|sent|slept|spoke|stood|swam|taught|threw|told|won|wore))"
)
_LOWER = re.compile(r"\b[a-z]+\b")
_PHRASES = re.compile(rf"(?<!\S)(?:{'|'.join(map(re.escape, sorted(WORDS.phrases, key=len, reverse=True)))})(?!\S)")
_KNOWN = NEUTRAL | POLES.keys() | SYNONYMS.keys()


def numbers_of(tokens: Sequence[str]) -> list[str]:
    """Return the numbers among canonical tokens.

    Example:
        >>> numbers_of(tokens_of("Ann has twenty-five apples and 3 pears"))
        ['25', '3']
    """
    return [token for token in tokens if token[0].isdigit()]


def number_key(tokens: Sequence[str]) -> int:
    """Return a 64-bit hash of the multiset of numbers. Texts with different keys are different problems."""
    return int.from_bytes(blake2b(" ".join(sorted(numbers_of(tokens))).encode(), digest_size=8).digest(), "little")


def are_different(a: str, b: str, *, wording: bool = True) -> bool:
    """Return whether two similar raw texts are different problems.

    Args:
        a: A text.
        b: Another text.
        wording: Compare words, their order and people. Decontamination sets False, because a missed copy costs more
            than a lost problem there; then only opposed words of ``words.toml`` count.
    """
    tokens_a, tokens_b = tokens_of(a), tokens_of(b)
    # cheap comparisons first; most pairs end here
    if sorted(numbers_of(tokens_a)) != sorted(numbers_of(tokens_b)) or _signs(tokens_a) != _signs(tokens_b):
        return True
    count_a, count_b = Counter(tokens_a), Counter(tokens_b)
    if count_a != count_b:
        # typing errors in long words, and split words, are replaced by the words of the other text
        only_other, only_own = count_a - count_b, count_b - count_a
        meant = {
            word: other
            for word in only_own
            for other in only_other
            if min(len(word), len(other)) >= _LONG and _is_slip(word, other) and not _KNOWN.issuperset((word, other))
        }
        tokens_b = [meant.get(token, token) for token in tokens_b] if meant else tokens_b
        # one word written as two, or two as one: ear buds, earbuds, ear-buds
        tokens_b = _joined(tokens_b, _compounds(only_own, only_other))
        count_b = Counter(tokens_b)
        tokens_a = _joined(tokens_a, _compounds(count_a - count_b, count_b - count_a))
        count_a = Counter(tokens_a)
    if any(count_a[operator] != count_b[operator] for operator in _OPERATORS):
        return True
    only_a, only_b = count_a - count_b, count_b - count_a
    brackets_only = bool(only_a or only_b) and (only_a.keys() | only_b.keys()) <= {"(", ")"}
    # the same terms in other brackets are another formula; brackets around words are punctuation
    if brackets_only and _term_brackets(tokens_a) != _term_brackets(tokens_b):
        return True
    letters_a, letters_b = _letters(only_a), _letters(only_b)
    if (letters_a and letters_b) or letters_a + letters_b > _MINIMAL:
        return True  # another variable, or another formula
    if any(_letters(only) and only["("] for only in (only_a, only_b)):
        return True  # f(f(4)) is not f(4)
    if _shouted(a, only_a) and _shouted(b, only_b):
        return True  # words and points in capitals name objects of the problem
    if not wording:
        return _opposed(tokens_a, tokens_b)
    if _subtractions(tokens_a) != _subtractions(tokens_b):
        return True
    names = _names(a) | _names(b)
    tokens_a, tokens_b = (
        _PHRASES.sub(lambda m: WORDS.phrases[m[0]], " ".join(tokens)).split(" ") for tokens in (tokens_a, tokens_b)
    )
    return _say_different_things(_items(tokens_a, names), _items(tokens_b, names))


def _letters(tokens: Counter[str]) -> int:
    return sum(n for token, n in tokens.items() if len(token) == 1 and token.isalpha())


def _shouted(text: str, tokens: Counter[str]) -> bool:
    """Return whether one of the words is in capitals."""
    return any(_is_word(token) and token.upper() in text for token in tokens)


def _names(text: str) -> set[str]:
    """Return the words that are names of people or places, as tokens."""
    found = {name for name in map(str.lower, _NAME.findall(text)) if name not in _KNOWN and not poles_of(name)}
    return found - set(_LOWER.findall(text)) if found else found


def _compounds(only_own: Counter[str], only_other: Counter[str]) -> dict[tuple[str, str], str]:
    """Return the words of the other text that are two words of this one, by their parts."""
    words = [word for word in only_own if _is_word(word)]
    return {(a, b): a + b for a in words for b in words if a + b in only_other} if len(words) > 1 else {}


def _joined(tokens: Sequence[str], parts: Mapping[tuple[str, str], str]) -> Sequence[str]:
    """Return the tokens with each pair of neighbours that is one word of the other text as that word."""
    if not parts:
        return tokens
    found: list[str] = []
    for token in tokens:
        before = found[-2:] if found[-1:] == ["-"] else found[-1:]
        word = parts.get((before[0], token)) if before else None
        if word:
            del found[-len(before) :]
        found.append(word or token)
    return found


def _term_brackets(tokens: Sequence[str]) -> int:
    """Return how many brackets hold more than words."""
    inside = re.findall(r"\( ([^()]*) \)", " ".join(tokens))
    words = sum(all(_is_word(token) for token in text.split(" ")) for text in inside)
    return tokens.count("(") - words


def _subtractions(tokens: Sequence[str]) -> Counter[tuple[str, str]]:
    """Return the pairs of a number or a variable and what is subtracted from it."""
    return Counter(
        (before, after)
        for before, token, after in zip(tokens, tokens[1:], tokens[2:], strict=False)
        if token == "-" and not (_is_word(before) or _is_word(after)) and before[-1].isalnum() and after[0].isalnum()
    )


def _is_slip(a: str, b: str) -> bool:
    """Return whether a letter inside the word is missing, or two are exchanged."""
    if abs(len(a) - len(b)) > 1 or a[0] != b[0] or a[-1] != b[-1]:
        return False
    same = next(place for place, (x, y) in enumerate(zip(a + " ", b + "-", strict=False)) if x != y)
    if len(a) == len(b):
        return a[same : same + 2] == b[same : same + 2][::-1] and a[same + 2 :] == b[same + 2 :]
    longer, shorter = (a, b) if len(a) > len(b) else (b, a)
    return longer[same + 1 :] == shorter[same:]


def _items(tokens: Sequence[str], names: set[str]) -> list[str]:
    """Return the numbers, names and content words of a text, each in one form, in order."""
    return [
        f"@{token}" if token in names else meaning_of(token)
        for token, after in zip(tokens, [*tokens[1:], ""], strict=True)
        if token[0].isdigit() or (_is_word(token) and token not in _SMALL and (token, after) != ("exactly", "how"))
    ]


def _say_different_things(a: list[str], b: list[str]) -> bool:
    """Return whether two texts, as items, differ in more than names, fillers and moved clauses."""
    only_a, only_b = Counter(a) - Counter(b), Counter(b) - Counter(a)
    if any(item[0] == "@" for item in only_a):
        # people with other names are matched by their first occurrence
        people = dict.fromkeys(item for item in a if item in only_a and item[0] == "@")
        others = dict.fromkeys(item for item in b if item in only_b and item[0] == "@")
        if {*people} & {*b} or {*others} & {*a} or len(people) != len(others):
            return True
        renamed = dict(zip(others, people, strict=True))
        b = [renamed.get(item, item) for item in b]
        only_a, only_b = Counter(a) - Counter(b), Counter(b) - Counter(a)
    if len({item for item in (*a, *b) if item[0] == "@"}) == 1:  # a pronoun may replace the only name
        only_a, only_b = (Counter({item: n for item, n in only.items() if item[0] != "@"}) for only in (only_a, only_b))
    if not only_a.keys() | only_b.keys() <= _FILLERS and not _is_reworded(a, b, only_a, only_b):
        return True
    # what one text may leave out may also be elsewhere in it: *how many pens in total*, *how many total pens*
    shared = dict(Counter(a).items() & Counter(b).items()).keys() - _FILLERS
    return _exchanged([item for item in a if item in shared], [item for item in b if item in shared])


def _is_reworded(a: list[str], b: list[str], only_a: Counter[str], only_b: Counter[str]) -> bool:
    """Return whether so many words differ, in so many places, that one text is a paraphrase of the other."""
    deciding = any(item[0] in "@~" for item in (*only_a, *only_b))
    few = min(only_a.total(), only_b.total()) <= _MINIMAL or only_a.total() + only_b.total() > (len(a) + len(b)) / 2
    if deciding or few:
        return False
    # autojunk would ignore frequent words of long texts
    steps = SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
    return sum(step[0] != "equal" for step in steps) >= _PLACES


def _exchanged(a: list[str], b: list[str]) -> bool:
    """Return whether single items, rather than whole clauses, changed places in two texts with the same items."""
    if a == b:
        return False
    steps = [step for step in SequenceMatcher(None, a, b, autojunk=False).get_opcodes() if step[0] != "equal"]
    moved = sorted(a[first:last] for _, first, last, _, _ in steps if first < last)
    if moved != sorted(b[first:last] for _, _, _, first, last in steps if first < last):
        return True
    # a question may be in front or at the end, and a single word may move (*in May*); two exchanged words differ
    single = [items[0] for items in moved if len(items) == 1]
    if len(moved) == 1 and single and single[0] in ({a[0]} & {b[-1]} | {a[-1]} & {b[0]}):
        return False
    return len(single) > 1 or not "".join([*single, "x"]).isalpha() or any(_passes(a, b, item) for item in single)


def _passes(a: list[str], b: list[str], item: str) -> bool:
    """Return whether a word changed places with one neighbour, and the text names both again: *half as many A as B*."""
    steps = SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
    places = [place for place, step in enumerate(steps) if item in (*a[step[1] : step[2]], *b[step[3] : step[4]])]
    passed = [a[i] for step in steps[places[0] : places[-1]] if step[0] == "equal" for i in range(step[1], step[2])]
    return len(passed) == 1 and min(a.count(item), a.count(passed[0])) > 1


def _signs(tokens: Sequence[str]) -> int:
    """Return the number of minus signs: those next to a number, a bracket or a letter, unlike hyphens in words."""
    around = zip(["", *tokens], tokens, [*tokens[1:], ""], strict=False)
    return sum(token == "-" and not (_is_word(before) or _is_word(after)) for before, token, after in around)


def _is_word(token: str) -> bool:
    return len(token) > 1 and token.isalpha()


def _opposed(a: Sequence[str], b: Sequence[str]) -> bool:
    """Return whether the texts have different poles of an axis, or only one of them mentions a strict axis."""
    poles_a, poles_b = _poles(a), _poles(b)
    for axis in {*poles_a, *poles_b}:
        mine, other = poles_a[axis], poles_b[axis]
        if (axis >= STRICT or (mine and other)) and mine.keys() != other.keys():
            return True
        if axis >= STRICT and len(mine) > 1 and mine != other:  # one odd and two even against two odd and one even
            return True
    return False


def _poles(tokens: Sequence[str]) -> defaultdict[int, Counter[int]]:
    found: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for before, token, after in zip(["", *tokens], tokens, [*tokens[1:], ""], strict=False):
        if (token, after) == ("exactly", "how"):
            continue  # *exactly how many* means *how many*
        for axis, pole in poles_of(_BOUNDS.get((before, token), token)):
            found[axis][pole] += 1
    return found


_FILLERS = {meaning_of(word) for word in WORDS.fillers}
