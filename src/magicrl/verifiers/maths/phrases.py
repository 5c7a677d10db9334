r"""Phrases with one meaning: sets of numbers in words, "no solution", dates, statements like "the maximum is 5"."""

from __future__ import annotations

import re
from collections.abc import Sequence

from magicrl.verifiers.maths.answers import Answer, Domain, Family, Quantity, RealSet, Span, Text
from magicrl.verifiers.maths.expression import Expr, number, symbol
from magicrl.verifiers.maths.lexer import Token
from magicrl.verifiers.maths.words import word_set

_MINUS_INFINITY = Expr("neg", (symbol("inf"),))
_HALVES = {
    "^+": (1, False), "_+": (1, False), "_>0": (1, False), "^+_0": (1, True), "_0^+": (1, True), "_>=0": (1, True),
    "^-": (-1, False), "_-": (-1, False), "_<0": (-1, False), "_<=0": (-1, True), "^*": (0, False),
    "_+^*": (1, False), "^*_+": (1, False),
    "nonzero": (0, False),
    "positive": (1, False), "negative": (-1, False), "nonnegative": (1, True), "nonpositive": (-1, True),
}  # fmt: skip
"""Parts of the reals or the integers: their sign, and whether nought is in them."""
_LETTERS = {"R": "R", "Z": "Z", "N": "N", "Q": "Q", "C": "C"}
_KINDS = {
    "real": "R", "reals": "R", "integer": "Z", "integers": "Z", "natural": "N", "naturals": "N", "rational": "Q",
    "rationals": "Q", "irrational": "irrational", "complex": "C", "whole": "N0", "prime": "prime", "primes": "prime",
}  # fmt: skip
_QUANTIFIERS = word_set("all any every each the set of a an arbitrary entire line")
_PLURALS = word_set("numbers number reals integers integer naturals rationals primes values value line")
_OF_MULTIPLES = word_set("integers integer numbers that are which is")
_EMPTY = re.compile(
    r"(?:(?:there (?:is|are|exists?|exist) |(?:the |this )?(?:equation |system |problem |inequality )?(?:has |have ))?"
    r"(?:no|zero) (?:real |such |valid |possible )*"
    r"(?:solutions?|roots?|answers?|values?|numbers?|functions?|intersections?)"
    r"(?: (?:exists?|possible))?(?: of [a-z])?|(?:the )?empty set|(?:the )?null set|none exists?)"
)
_NO_SUCH = re.compile(r"(?:there (?:is|are|exists?) )?no such [a-z]+(?: [a-z])?(?: exists?)?")
_MISSING = re.compile(
    r"(?:(?:the )?[a-z]+ )?(?:does not|do not|doesn't|doesnt|don't) exist|dne|nonexistent|non-existent|"
    r"(?:(?:it|the [a-z]+) is )?(?:undefined|not defined)"
)
_LIMIT = r"(?:(?:the|this) )?(?:(?:series|integral|sequence|limit|sum|it) )?"
_STATES = (
    (re.compile(rf"{_LIMIT}(?:diverges|is divergent|divergent)"), "diverges"),
    (re.compile(rf"{_LIMIT}(?:converges|is convergent|convergent)"), "converges"),
    (re.compile(r"(?:the |this )?(?:(?:statement|claim|assertion|proposition) is |it is )?(true|false)"), r"\1"),
)
_ENDLESS = re.compile(
    r"(?:there (?:are|exist) |(?:it |the (?:equation|system) )?has )?"
    r"(?:infinitely many|an infinite number(?: of)?|infinite)"
    r"(?: (?:solutions?|values?|answers?|points|numbers|pairs|triples|roots))?"
)
_MONTHS = (
    "january", "february", "march", "april", "may", "june", "july", "august", "september", "october", "november",
    "december",
)  # fmt: skip
_DAY_WORDS = word_set("of the st nd rd th on")


def number_domain(tokens: Sequence[Token]) -> Answer | None:
    r"""``\mathbb{R}``, ``all real numbers``, ``positive integers``, ``\mathbb{Z}_{>0}``, ``even integers``."""
    texts = [token.text for token in tokens if token.kind not in ("lbrace", "rbrace")]
    if len(texts) >= 2 and texts[0] in ("mathbb", "mathbf") and texts[1] in _LETTERS:
        return _part(_LETTERS[texts[1]], "".join(texts[2:]))
    if texts == ["emptyset"]:
        return RealSet(())
    roman = len(tokens) == 1 and tokens[0].roman and tokens[0].kind in ("sym", "word")
    if roman and texts[0] in ("R", "Z", "Q", "N"):
        return _part(_LETTERS[texts[0]], "")
    if (step := _multiples(tokens)) is not None:
        return _stepped(step, 0)
    if tokens[0].kind == "word" and all(token.kind in ("word", "sym", "op") for token in tokens):
        return _in_words([token.text.casefold() for token in tokens])
    return None


def _part(kind: str, half: str) -> Answer | None:
    if not half:
        return RealSet((Span(_MINUS_INFINITY, False, symbol("inf"), False),)) if kind == "R" else Domain(kind)
    if half not in _HALVES:
        return None
    sign, nought = _HALVES[half]
    if kind == "N" and half in ("^+", "_+", "^*"):
        return Domain("Z+")
    if kind == "R" and sign:
        zero = number(0)
        span = (zero, nought, symbol("inf"), False) if sign > 0 else (_MINUS_INFINITY, False, zero, nought)
        return RealSet((Span(*span),))
    if kind == "R":
        zero = number(0)
        return RealSet((Span(_MINUS_INFINITY, False, zero, False), Span(zero, False, symbol("inf"), False)))
    return Domain(kind + {1: "+", -1: "-", 0: "*"}[sign] + ("0" if nought else ""))


def _in_words(low: list[str]) -> Answer | None:
    words = "".join(low).split() if len(low) == 1 else low
    words = " ".join(words).replace("non - ", "non").replace("non-", "non").split()
    if len(words) > 1 and len(words[-1]) == 1:
        words = words[:-1]  # all integers n
        words = words[:-1] if words[-1] == "of" else words
    quantified = bool(_QUANTIFIERS & set(words) or _PLURALS & set(words))
    rest = [word for word in words if word not in _QUANTIFIERS and word not in ("numbers", "number", "values", "value")]
    if not quantified or not rest or (rest == words and words[-1] in ("integer", "number")):
        return None
    kinds = [_KINDS[word] for word in rest if word in _KINDS]
    others = [word for word in rest if word not in _KINDS]
    if kinds in (["Z"], []) and others in (["even"], ["odd"]) and ("numbers" in words or kinds == ["Z"]):
        return _stepped(2, int(others[0] == "odd"))
    if len(kinds) != 1 or len(others) > 1:
        return None
    return _part(kinds[0], others[0] if others else "")


def _multiples(tokens: Sequence[Token]) -> int | None:
    """``all n divisible by 3``, ``multiples of 3``."""
    low = [token.text.casefold() for token in tokens]
    if len(low) < 3 or tokens[-1].kind != "num" or not low[-1].isdigit() or len(low[-1]) > 9:
        return None
    before = [word for token, word in zip(tokens[:-3], low, strict=False) if token.kind != "sym"]
    if low[-3:-1] not in (["divisible", "by"], ["multiples", "of"], ["multiple", "of"]):
        return None
    return (
        int(low[-1]) if set(before) <= _QUANTIFIERS | word_set("integers integer numbers that are which is") else None
    )


def _stepped(step: int, start: int) -> Family:
    """The whole numbers that leave a remainder."""
    steps = Expr("mul", (number(step), Expr("sym", name="#k")))
    return Family(Quantity(Expr("add", (steps, number(start)))), frozenset(("#k",)), "Z")


def closed_phrase(tokens: Sequence[Token]) -> Answer | None:
    """A phrase of a fixed meaning, written in one of several ways."""
    if tokens[0].kind not in ("word", "sym") or len(tokens) > 12:
        return None
    if any(token.kind not in ("word", "sym") for token in tokens):
        return None
    said = " ".join(token.text.casefold().strip(".,") for token in tokens).strip()
    if _EMPTY.fullmatch(said):
        return RealSet(())
    if _ENDLESS.fullmatch(said):
        return Text(("infinitely", "many"))
    if _NO_SUCH.fullmatch(said) or _MISSING.fullmatch(said):
        return Text(("does", "not", "exist"))
    for pattern, meaning in _STATES:
        match = pattern.fullmatch(said)
        if match is not None:
            return Text((match.expand(meaning),))
    return None


def date_of(tokens: Sequence[Token]) -> Text | None:
    """A day of a month, perhaps of a year: the month, then the numbers; None when it is none."""
    words = [token.text.casefold().strip(".,") for token in tokens if token.kind == "word"]
    months = [month for word in words if len(word) > 2 for month in _MONTHS if _month(word, month)]
    days = [token.text.lstrip("0") for token in tokens if token.kind == "num"]
    kinds = {token.kind for token in tokens} - {"word", "num", "lbrace", "rbrace"}
    if len(months) != 1 or not 1 <= len(days) <= 2 or not all(day.isdigit() for day in days):
        return None
    if any(token.text not in ("^", ",", ".") for token in tokens if token.kind in kinds):
        return None
    others = [word for word in words if word not in _DAY_WORDS and not _month(word, months[0])]
    days = sorted(days, key=int)
    return None if others or int(days[0]) > 31 else Text((months[0], *days))


def is_month(word: str) -> bool:
    """Whether a word is a month's name, or short for one."""
    return any(_month(word.casefold(), month) for month in _MONTHS)


def _month(word: str, month: str) -> bool:
    return word == month or (len(word) in (3, 4) and month.startswith(word))


_STATING = word_set("is are equals has gets")
_DOUBTING = word_set(
    "not no isn't if unless or either neither maybe perhaps probably wrong false incorrect cannot except but what "
    "which than times because since that whether"
)


def stated(tokens: Sequence[Token], levels: Sequence[int]) -> tuple[Sequence[Token], Sequence[Token]] | None:
    """What "the maximum value is 5" names and what it says of it; None when it is no such statement."""
    at = next(
        (
            at
            for at, (token, level) in enumerate(zip(tokens, levels, strict=True))
            if level == 0 and token.kind == "word" and token.text.casefold() in _STATING
        ),
        None,
    )
    if not at or at + 1 >= len(tokens) or tokens[0].kind != "word":
        return None
    name, value = tokens[:at], tokens[at + 1 :]
    if any(token.kind == "sep" or token.text.casefold() in _DOUBTING for token in tokens):
        return None
    if any(token.kind not in ("word", "sym", "lbrace", "rbrace", "op", "num") for token in name):
        return None
    return None if all(token.kind == "word" for token in value) else (name, value)


_COMPARED = (
    (("greater", "than", "or", "equal", "to"), ">="), (("less", "than", "or", "equal", "to"), "<="),
    (("strictly", "greater", "than"), ">"), (("strictly", "less", "than"), "<"), (("at", "least"), ">="),
    (("at", "most"), "<="), (("greater", "than"), ">"), (("less", "than"), "<"), (("congruent", "to"), "=="),
)  # fmt: skip
_REAL_NUMBERS = (["all", "real", "numbers"], ["real", "numbers"], ["all", "reals"])


def in_symbols(tokens: Sequence[Token]) -> list[Token]:
    """Words for relations and signs as symbols: ``x is at least 2``, ``negative infinity``."""
    found: list[Token] = []
    at = 0
    while at < len(tokens):
        low = tuple(token.text.casefold() for token in tokens[at : at + 5])
        words, relation = next((pair for pair in _COMPARED if low[: len(pair[0])] == pair[0]), ((), ""))
        if relation and found:
            if found[-1].text.casefold() in ("is", "are"):
                found.pop()
            if [token.text.casefold() for token in found] in _REAL_NUMBERS:
                found = [Token("sym", "x")]
            found.append(Token("rel", relation, True))
            at += len(words)
        elif low[:1] in (("negative",), ("minus",)) and at + 1 < len(tokens) and _signed(tokens[at + 1]):
            found.append(Token("op", "-", True))
            at += 1
        elif low[0] == "infinity" and found and found[-1].text == "-":
            found.append(Token("sym", "inf", True))
            at += 1
        else:
            found.append(tokens[at])
            at += 1
    return found


def _signed(token: Token) -> bool:
    return token.kind == "num" or token.text.casefold() in ("inf", "infinity")


def described(tokens: Sequence[Token]) -> Sequence[Token]:
    """``the line x = 3``, ``the point (3, -4)``: without the words that only say what kind of thing it is."""
    at = 0
    if len(tokens) > 2 and [token.text.casefold() for token in tokens[:2]] in (["for", "all"], ["for", "every"]):
        return tokens[1:]  # for all real x
    while at < len(tokens) and tokens[at].kind == "word" and tokens[at].text.casefold() in ("the", "a", "an"):
        at += 1
    if at + 1 >= len(tokens) or tokens[at].kind != "word" or tokens[at].text.casefold() not in _THINGS:
        return tokens
    at += 1
    while at < len(tokens) and tokens[at].kind == "word" and tokens[at].text.casefold() in ("with", "equation", "at"):
        at += 1
    rest = tokens[at:]
    single = len(rest) == 1 and rest[0].kind == "num"  # line 3
    return rest if rest and not single and rest[0].kind not in ("word", "colon", "rel", "unit") else tokens


_THINGS = word_set(
    "line lines plane point points circle curve parabola ellipse hyperbola interval intervals vector matrix pair pairs "
    "function functions polynomial expression tuple triple root roots solution solutions"
)


def counted(tokens: Sequence[Token]) -> Sequence[Token]:
    """What "there are 5 solutions" counts, without the words before it."""
    low = [token.text.casefold() for token in tokens]
    if len(tokens) > 1 and low[0] in ("the", "a", "an") and tokens[1].kind == "num":
        return tokens[1:]  # the 12th, a 30% chance
    if (
        len(tokens) > 2
        and low[:2] in (["there", "is"], ["there", "are"], ["there", "exist"])
        and tokens[2].kind == "num"
    ):
        return tokens[2:]
    return tokens
