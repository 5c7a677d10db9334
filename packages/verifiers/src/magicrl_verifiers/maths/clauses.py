r"""Meaning of the words around a number: it is given, denied, doubted, bounded, negated, or part of something.

The words are data, in `clauses.toml`, by their effect. A sentence is split into pieces: values, phrases of the tables,
and marks. Then the pieces of its clause decide about every value. `prose` reads the signs of formulas (``x > 5``).
"""

from __future__ import annotations

import re
import tomllib
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from itertools import product

MATH = re.compile(
    r"\$\$(?P<a>[^$]{1,400})\$\$|(?<!\\)\$(?P<b>(?:\\\$|[^$\n]){1,300})(?<!\\)\$(?!\d)|\\\((?P<c>.{1,300}?)\\\)|\\\[(?P<d>.{1,400}?)\\\]",
    re.DOTALL,
)
LATEX = re.compile(
    r"(?:-?(?<!\d)\d++|-)?\\(?:frac|dfrac|tfrac|sqrt)\s*(?:\[[^\]]{1,5}\])?\s*\{[^{}]{1,60}\}(?:\s*\{[^{}]{1,60}\})?"
)
DENIED, DOUBTED = "\ue000", "\ue001"
"""Characters that replace a value: a denied one leaves room for another answer, a doubted one does not."""

# Python does not count the vowel signs of Indian and Thai scripts as letters
_LETTERS = r"(?:[^\W\d_]|[\u0300-\u036f\u0900-\u0dff\u0e00-\u0e7f])"
_PIECE = re.compile(
    rf"(?P<formula>{MATH.pattern})|(?P<value>[(\[][^()\[\]A-Za-z]{{0,60}},[^()\[\]A-Za-z]{{0,60}}[)\]]|{LATEX.pattern}|"
    r"(?:\\?[$€£¥₹])?(?:\d+(?:[.,/:]\d+)*|\.\d+)(?P<nth>(?:st|nd|rd|th)(?![a-z]))?)|"
    rf"(?P<word>{_LETTERS}+(?:['’-]{_LETTERS}+)*)|(?P<mark>[,;:()\[\]=–—，、；：（）]| - |\\[A-Za-z]+)",
    re.DOTALL,
)
_NAME = re.compile(r"\$?([A-Za-z])(?:_\w)?\$?")
_FORMULA_WORDS = frozenset(("sqrt", "sin", "cos", "tan", "log", "ln", "exp", "pi"))
_LETTER = re.compile(rf"(?<![\\A-Za-z])(?!(?:{'|'.join(_FORMULA_WORDS)})(?![a-z]))[A-Za-z]")
_BREAKS = frozenset(",;:()[]–—，、；：（）") | {" - "}
_UNSPACED_FROM = "\u0e00"
"""First character of the scripts without spaces (Thai, Chinese, Japanese, Korean)."""
Roles = frozenset[str]
_NONE: Roles = frozenset()
_VALUE: Roles = frozenset(("value",))
_BREAK: Roles = frozenset(("break",))


def _listed(text: str) -> Iterator[str]:
    """Yield the phrases of a table: ``no [way|proof]`` is two of them."""
    for phrase in text.split(","):
        for words in product(*(part.split("|") for part in re.split(r"[\[\]]", phrase))):
            yield " ".join("".join(words).split())


_DATA = tomllib.loads(files("magicrl_verifiers.maths").joinpath("clauses.toml").read_text(encoding="utf-8"))
_AS_PATTERN = str.maketrans({"[": "(?:", "]": ")", "*": r"\w*"})
LATER = {
    name: rf"(?:{'|'.join(map(str.strip, text.split(',')))})\b".translate(_AS_PATTERN)
    for name, text in _DATA["later"].items()
}
"""Patterns of the words that begin a sentence behind an announced answer, by what they do to it."""


def _tables() -> tuple[dict[str, Roles], dict[str, str], dict[str, list[list[str]]], re.Pattern[str]]:
    """Return roles of phrases, signs of relations, longer phrases by first word, and a pattern of unspaced phrases."""
    roles: dict[str, set[str]] = defaultdict(set)
    relations: dict[str, str] = {}
    flat = {name: text for name, text in _DATA.items() if isinstance(text, str)}
    for name, text in (flat | _DATA["operation"] | _DATA["other"]).items():
        for phrase in _listed(text):
            roles[phrase].add(name)
    for sign, text in _DATA["relation"].items():
        for phrase in _listed(text):
            roles[phrase].add("relation")
            relations[phrase] = sign
    roles.pop("", None)
    longer: dict[str, list[list[str]]] = defaultdict(list)
    for phrase in sorted(roles, key=lambda phrase: -phrase.count(" ")):
        if " " in phrase:
            longer[phrase.split()[0]].append(phrase.split())
    unspaced = sorted((phrase for phrase in roles if phrase[0] >= _UNSPACED_FROM), key=len, reverse=True)
    found = {phrase: frozenset(names) for phrase, names in roles.items()}
    return found, relations, dict(longer), re.compile("|".join(map(re.escape, unspaced)))


_ROLES, _RELATIONS, _LONGER, _UNSPACED = _tables()


@dataclass(slots=True)
class _Piece:
    """A value, a phrase or a mark of a sentence, with its roles and its place."""

    text: str
    roles: Roles
    start: int
    end: int


def _pieces(sentence: str) -> list[_Piece]:
    found: list[_Piece] = []
    for match in _PIECE.finditer(sentence):
        kind, text, (start, end) = match.lastgroup, match[0].casefold(), match.span()
        if kind == "word":
            if text[-1] >= _UNSPACED_FROM:
                for part in _UNSPACED.finditer(text):
                    found.append(_Piece(part[0], _ROLES[part[0]], start + part.start(), start + part.end()))
                continue
            roles = _ROLES.get(text, _NONE)
            if "'" in text or "’" in text:
                text = text.replace("’", "'")
                roles = _ROLES.get(text) or (_ROLES["is"] if text.endswith("'s") else _NONE)
                roles = roles | {"deny"} if text.endswith("n't") else roles
        elif kind == "mark":
            roles = _BREAK if match[0] in _BREAKS else _ROLES.get(text, _NONE)
        elif kind == "formula":
            roles = _NONE if _NAME.fullmatch(match[0]) else _VALUE
        else:
            roles = _VALUE if match["nth"] is None else _VALUE | {"nth"}
        found.append(_Piece(text, roles, start, end))
        if kind == "formula" and text.rstrip("$)]\\ ")[-1:] in (",", ";", "."):
            found.append(_Piece(",", _BREAK, end, end))
    return _phrases(found)


def _phrases(pieces: list[_Piece]) -> list[_Piece]:
    """Join the words of each phrase to one piece."""
    found: list[_Piece] = []
    at = 0
    while at < len(pieces):
        piece = pieces[at]
        size = 1
        for words in _LONGER.get(piece.text, ()):
            if [one.text for one in pieces[at : at + len(words)]] == words:
                size = len(words)
                phrase = " ".join(words)
                piece = _Piece(phrase, _ROLES[phrase], piece.start, pieces[at + size - 1].end)
                break
        found.append(piece)
        at += size
    return found


_HARMLESS = frozenset(("value", "is", "be", "break", "filler", "modal", "right", "count", "nothing", "one", "would"))
"""Roles without an effect unless there is another one."""


def read_clauses(sentence: str) -> tuple[str, str | None]:
    """Replace signs in words by signs, and every value that the sentence does not give by a mark.

    Returns:
        The sentence, of the same length, and a bound on a name that it gives instead of a value: ``n >= 3``.

    Example:
        >>> read_clauses("It is minus 6, not 5")[0] == "It is      -6, not " + DENIED
        True
        >>> read_clauses("So n is at least 3.")[1]
        'n >= 3'
    """
    pieces = _pieces(sentence)
    roles = _NONE.union(*(piece.roles for piece in pieces))
    asked = sentence.rstrip().endswith(("?", "\uff1f"))
    if "value" not in roles or not (asked or "(" in sentence or "[" in sentence or roles - _HARMLESS):
        return sentence, None
    return _Reader(sentence, pieces, roles).read(asked)


_JOINING = frozenset(("and", "or", "to", ",", "und", "et", "y", "e"))
_OR = frozenset(("or", "oder", "ou", "o", "или"))
_FAR = frozenset(("condition", "refused", "hedge", "instead", "deny", "nobody"))
"""Roles of words that affect a value across other words."""


class _Reader:
    """Values of one sentence, with the mark of each."""

    def __init__(self, sentence: str, pieces: list[_Piece], roles: Roles) -> None:
        self._sentence = sentence
        self._pieces = pieces
        self._has = roles
        self._values = [at for at, piece in enumerate(pieces) if "value" in piece.roles]
        self._marks: dict[int, str] = {}
        self._operands: set[int] = set()
        self._signs: dict[int, int] = {}
        self._bound: str | None = None

    def read(self, asked: bool) -> tuple[str, str | None]:
        if asked or "doubt" in self._has:
            self._mark(self._values, DOUBTED)
        for at in self._given():
            if at not in self._marks and (mark := self._by_neighbours(at)):
                self._marks[at] = mark
        self._join()
        if "wrong" in self._has:
            self._take_back()
        blank = self._asides()
        if not self._has.isdisjoint(("reason", "label")):
            self._reasons()
        return self._masked(blank), self._bound

    def _mark(self, values: Iterable[int], mark: str) -> None:
        self._marks.update((at, mark) for at in values)

    def _given(self) -> list[int]:
        return [at for at in self._values if at not in self._marks]

    def _text(self, at: int) -> str:
        return self._sentence[self._pieces[at].start : self._pieces[at].end]

    def _is(self, at: int, *roles: str) -> bool:
        return 0 <= at < len(self._pieces) and not self._pieces[at].roles.isdisjoint(roles)

    def _reads(self, at: int, words: Container[str]) -> bool:
        return 0 <= at < len(self._pieces) and self._pieces[at].text in words

    def _skip(self, at: int, step: int, *roles: str) -> int:
        """Return the next place without these roles."""
        at += step
        while self._is(at, *roles) and not self._is(at, "value"):
            at += step
        return at

    def _roles(self, start: int, end: int) -> Roles:
        return _NONE.union(*(piece.roles for piece in self._pieces[start:end]))

    def _by_neighbours(self, at: int) -> str:
        """Return the mark of a value from its neighbours, else from its clause; empty if the value is given."""
        before, after, text = self._skip(at, -1, "filler"), at + 1, self._text(at)
        if self._reads(at - 1, ("in",)) and self._is(after, "compound") and any(one < at for one in self._given()):
            return DENIED  # 20 dollars in 5 hours
        # "see equation (5)", and "5 would be right if ..."
        numbered = self._is(at - 2, "label") and self._reads(at - 1, "(") and self._reads(after, ")")
        if self._is(at, "nth") or numbered:
            return DENIED
        if self._is(after, "would") and "condition" in self._roles(after, len(self._pieces)):
            return DOUBTED
        if self._is(before, "sign"):
            # "10 minus 5" and "minus -5" are not the value -5
            if (
                self._is(before - 1, "value", "sign")
                or self._sentence[self._pieces[at].start - 1] == "-"
                or "+" in text
            ):
                return DOUBTED
            self._signs[at] = before
            before = self._skip(before, -1, "filler")
        # "the sum of $2+3=5$" ends with its result
        result = "=" in text and before >= 0 and self._pieces[before].text.endswith(" of")
        if self._is(before, "relation") and not result:
            self._keep_bound(at, before)
            return DOUBTED
        # "half of $x$" may be part of a longer statement; "it is a factor of $x^2-1$" gives no value
        subject = self._is_term(at) and (at + 1 < len(self._pieces) or len(self._values) > 1)
        operand = self._is(before, "before") and not result and not subject
        if operand or (before - 1 in self._operands and self._reads(before, _JOINING)):
            self._operands.add(at)
            return DOUBTED
        if self._is(after, "after") or self._is_between(at, after):
            return DOUBTED
        pair = (
            (self._is(after, "one"), self._is(after + 1, "deny")),
            (self._is(after, "deny"), self._is(after + 1, "one")),
        )
        if (True, True) in pair or self._is(after, "deny_after") or self._is_called_wrong(at):
            return DENIED
        return "" if self._has.isdisjoint(_FAR) else self._by_clause(at, before)

    def _keep_bound(self, at: int, relation: int) -> None:
        """Store the bound of a clause on a name: ``n must be at least 3``."""
        name = self._skip(relation, -1, "is", "be", "modal")
        sign = _RELATIONS[self._pieces[relation].text]
        ends = at + 1 == len(self._pieces) or self._is(at + 1, "break")
        if sign == "?" or name < 0 or not ends or self._is(name - 1, "value", "relation", "deny"):
            return
        if match := _NAME.fullmatch(self._text(name)):
            self._bound = f"{match[1]} {sign} {self._text(at).strip('$')}"

    def _is_between(self, at: int, after: int) -> bool:
        """Return whether a value and the next one belong together: ``5 times 3``, ``3 to 5``, ``5 feet 3 inches``."""
        other = self._skip(after, 1, "filler")
        # "to" after a formula belongs to a map, "takes $a$ to $b$"
        if (
            not self._is(after, "between")
            or not self._is(other, "value")
            or (self._reads(after, ("to",)) and "$" in self._text(at))
        ):
            return False
        # 5 of the 12 boxes are five boxes, and 5 in 12 days are 5
        whole = self._reads(after, ("of",)) and other > after + 1
        whole = whole or (self._reads(after, ("in",)) and self._is(other + 1, "compound"))
        self._marks[other] = DENIED if whole else DOUBTED
        return not whole

    def _is_called_wrong(self, at: int) -> bool:
        """Return whether the sentence calls the value wrong: ``5 is too small``, ``5 does not work``."""
        end = min(self._skip_to(at, "break", "value"), at + 7)
        if self._has.isdisjoint(("wrong", "deny")) or not self._is(at + 1, "is", "be", "modal", "deny", "wrong"):
            return False
        follows = self._roles(at + 1, end)
        return "wrong" in follows or ("right" in follows and "deny" in self._roles(at + 1, min(end, at + 4)))

    def _skip_to(self, at: int, *roles: str) -> int:
        """Return the first place after ``at`` with one of these roles, or the end."""
        at += 1
        while at < len(self._pieces) and not self._is(at, *roles):
            at += 1
        return at

    def _by_clause(self, at: int, before: int) -> str:
        """Return the mark of a value from its clause: denials, hedges, conditions, opinions of others."""
        start = at
        while start and not self._is(start - 1, "break"):
            start -= 1
        roles = self._roles(start, at)
        # "Perhaps, 5": a hedge of one word reaches across its comma
        if self._is(start - 2, "hedge") and (start == 2 or self._is(start - 3, "break")):
            return DOUBTED
        if "condition" in roles:
            condition = max(one for one in range(start, at) if self._is(one, "condition"))
            # "the total if all are sold is 5" gives a value, "if all are 5" does not
            if sum(self._is(one, "is", "be") for one in range(condition, at)) < 2:
                return DENIED
        if ("refused" in roles and "count" not in roles) or (start < at and self._is(start, "nobody")):
            return DENIED
        if any(self._is_hedge(one) for one in range(start, at)):
            return DOUBTED
        if "would" in roles and "condition" in self._roles(at, len(self._pieces)):
            return DOUBTED
        if self._is(before, "instead"):
            return "" if "nothing" in self._roles(start, before) else DENIED
        verb = -1
        for one in range(at - 1, start - 1, -1):
            if self._is(one, "is", "be") and (verb < 0 or verb - one == 1):
                verb = one
            # a denial applies to the value, or to its verb: "not 5", "does not equal 5", "can not really be 5"
            elif self._is(one, "deny") and (verb - one < 2 or (verb - one == 2 and self._is(verb, "be"))):
                return DENIED
        end = self._skip_to(at, "break", "value")
        return DOUBTED if end > at + 1 and self._is(end - 1, "hedge") and not self._is(end, "value") else ""

    def _is_hedge(self, at: int) -> bool:
        """Return whether a word doubts the value; "on either side" and "may be used" do not."""
        text, after = self._pieces[at].text, self._skip(at, 1, "filler")
        if not self._is(at, "hedge") or (text != "either" and not text.endswith(" be")):
            return self._is(at, "hedge")
        return self._is(after, "value", "is", "hedge") or (after == at + 2 and text == "either")

    def _join(self) -> None:
        """Doubt alternatives and parts of an amount; deny corrected values: ``5, or perhaps 6``."""
        for at, other in zip(self._values, self._values[1:], strict=False):
            near = other - at == 2 or (other - at == 3 and self._reads(at + 2, ("and",)))
            if near and self._is(at + 1, "compound") and self._is(other + 1, "compound"):
                self._mark((at, other), DOUBTED)  # 5 feet 3 inches
            first = self._skip(other, -1, "filler", "hedge", "is", "be")
            hedged = "hedge" in self._roles(first + 1, other) and self._is(first, "break")
            apart = other - first > 1 or self._reads(first - 1, "([")
            if hedged or (apart and self._reads(first, _OR) and first > self._values[0]):
                self._mark((one for one in self._given() if one <= other), DOUBTED)
        if "correction" in self._has:
            last = max(at for at, piece in enumerate(self._pieces) if "correction" in piece.roles)
            if any(at > last for at in self._given()):
                self._mark((at for at in self._values if at < last), DENIED)

    def _take_back(self) -> None:
        """Deny the value before a clause that calls it wrong: ``5, which is wrong``."""
        for at, piece in enumerate(self._pieces):
            start = at
            while start and not self._is(start, "break", "value"):
                start -= 1
            before = [one for one in self._values if one < start]
            if "wrong" in piece.roles and self._is(start, "break") and before and "deny" not in self._roles(start, at):
                self._marks[before[-1]] = DENIED

    def _asides(self) -> list[tuple[int, int]]:
        """Return the places of brackets with words after a given value; deny the values in them."""
        found: list[tuple[int, int]] = []
        opened = -1
        for at, piece in enumerate(self._pieces):
            if piece.text in ("(", "["):
                opened = at
            elif piece.text in (")", "]") and opened >= 0:
                start = self._pieces[opened].start
                words = {one.text for one in self._pieces[opened + 1 : at] if one.text[1:2].isalpha()}
                aside = words - _FORMULA_WORDS and self._sentence[:start][-1:].isspace()
                note = piece.text == "]" and self._sentence[:start][-1:] == "."  # a number of a footnote
                if aside and self._is(opened + 1, "value") and "condition" in self._roles(opened, at):
                    self._mark((one for one in self._given() if one < at), DOUBTED)  # 7 (8 if 0 counts)
                elif (aside or note) and any(one < opened for one in self._given()):
                    self._mark((one for one in self._values if opened < one < at), DENIED)
                    found.append((start, piece.end))
                opened = -1
        return found

    def _reasons(self) -> None:
        """Deny numbers of references, and the values of reasons and circumstances if the sentence gives another one."""
        given = self._given()
        self._mark((at for at in given if self._is(at - 1, "label") and len(self._text(at).strip("$()")) < 3), DENIED)
        within = [at for at in given if self._is_in_reason(at)]
        if any(at not in within and ("=" in self._text(at) or not self._is_term(at)) for at in given):
            self._mark(within, DENIED)

    def _is_in_reason(self, at: int) -> bool:
        """Return whether a value is in a reason; after two verbs, "when it is doubled it is 5", it is not."""
        verbs = 0
        while at >= 0 and verbs < 2 and (not self._is(at, "break") or self._reads(at, ("and",))):
            if self._is(at, "reason") and (not self._reads(at, ("as",)) or self._is(at - 1, "break")):
                return True
            verbs += self._is(at, "is", "be")
            at -= 1
        return False

    def _is_term(self, at: int) -> bool:
        """Return whether a value has letters, so that it may be the subject of a sentence."""
        return _LETTER.search(self._text(at)) is not None

    def _masked(self, blank: list[tuple[int, int]]) -> str:
        text = self._sentence
        for at, sign in self._signs.items():
            value = self._pieces[at]
            opening = self._text(at)[: len(self._text(at)) - len(self._text(at).lstrip("\\$(["))]
            signed = f"{opening}-".rjust(value.start - self._pieces[sign].start + len(opening))
            text = text[: self._pieces[sign].start] + signed + text[value.start + len(opening) :]
        covers = [(self._pieces[at].start, self._pieces[at].end, mark) for at, mark in self._marks.items()]
        for start, end, mark in [*covers, *((start, end, " ") for start, end in blank)]:
            text = text[:start] + mark * (end - start) + text[end:]
        return text
