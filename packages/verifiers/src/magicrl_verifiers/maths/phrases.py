"""Words around an answer: separators, clauses, number sets and conditions in words, fixed phrases, dates."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from magicrl_verifiers.maths.answers import (
    ALL_REALS,
    MINUS_INFINITY,
    PLUS_INFINITY,
    Bounds,
    Clock,
    Domain,
    Expr,
    Family,
    Fixed,
    Quantity,
    Ratio,
    RealSet,
    Shape,
    Text,
    numeral,
)
from magicrl_verifiers.maths.literals import counts_one, word_number, word_set
from magicrl_verifiers.maths.notation import ELLIPSES, Token

_ARTICLES = frozenset(("a", "an", "the"))
_CLAUSE_STARTS = frozenset(("for", "where", "with", "when", "here"))
_CLAUSE_WORDS = word_set(
    "for where with when here some any all each every integer integers natural real reals positive negative "
    "nonnegative non-negative number numbers constant constants "
    "arbitrary is an a are be whole values value of parameter"
)
_SETS = frozenset("RZNQC")
_DOMAIN_WORDS = {
    "integer": "Z", "integers": "Z", "whole": "Z", "natural": "N", "real": "R", "reals": "R", "constant": "R",
    "constants": "R",
}  # fmt: skip
_COUNTING = {
    "0,1": "N0", "0,1,2": "N0", "0,1,2,3": "N0", "1,2": "N", "1,2,3": "N", "1,2,3,4": "N",
    "0,pm1": "Z", "0,pm1,pm2": "Z", "0,pm1,pm2,pm3": "Z",
}  # fmt: skip


Declared = tuple[frozenset[str], str]
"""Free parameters that a clause declares, and their domain (Z, N, R) if it gives one."""
NOTHING: Declared = (frozenset(), "")


def depths(tokens: Sequence[Token]) -> list[int] | None:
    """Return the bracket depth before each token, for a closing one that of its partner; None for unmatched brackets.

    A parenthesis and a square bracket may close each other: ``(0,1]``.
    """
    stack: list[str] = []
    found: list[int] = []
    for token in tokens:
        kind = token.kind
        opens = kind in ("open", "lbrace") or (kind == "env" and token.text.startswith("begin"))
        closes = kind in ("close", "rbrace") or (kind == "env" and token.text.startswith("end"))
        mark = token.text.split()[-1] if kind == "env" else "lbrace" if kind in ("lbrace", "rbrace") else token.text
        if closes:
            if not stack:
                return None
            partner = stack.pop()
            # half-open intervals close with the other bracket
            if partner != mark and not {partner, mark} <= {"(", "["}:
                return None
        found.append(len(stack))
        if opens:
            stack.append(mark)
    return None if stack else found


def split_at(tokens: Sequence[Token], levels: list[int], kind: str) -> tuple[list[Sequence[Token]], list[str]]:
    """Split at the tokens of a kind outside all brackets; return the parts and the texts of those tokens."""
    parts: list[Sequence[Token]] = []
    found: list[str] = []
    start = 0
    for position, (token, level) in enumerate(zip(tokens, levels, strict=True)):
        if token.kind == kind and level == 0:
            parts.append(tokens[start:position])
            found.append(token.text)
            start = position + 1
    parts.append(tokens[start:])
    return parts, found


def without_clause(tokens: Sequence[Token], levels: list[int]) -> tuple[Sequence[Token], list[int], Declared]:
    """Remove a clause such as ``for some integer t`` from the end; return the rest and the declared parameters."""
    if tokens[-1].text == "(" and tokens[-1].kind == "close" and levels[-1] == 0:
        opened = max(at for at, level in enumerate(levels[:-1]) if level == 0)
        found = declaration(tokens[opened + 1 : -1])
        if opened and found[0]:
            return tokens[:opened], levels[:opened], found  # ... (k in Z)
    for position, token in enumerate(tokens):
        if position and levels[position] == 0 and token.kind == "word" and token.text.casefold() in _CLAUSE_STARTS:
            found = _clause(tokens[position:])
            if found[0]:
                end = position - 1 if tokens[position - 1].kind == "sep" else position
                return tokens[:end], levels[:end], found
    return tokens, levels, NOTHING


def _clause(clause: Sequence[Token]) -> Declared:
    words = [t.text.casefold() for t in clause if t.kind == "word"]
    names = {t.text for t in clause if t.kind == "sym" and t.text not in ("R", "Z", "N")}
    others = [t for t in clause if t.kind not in ("word", "sym", "sep", "lbrace", "rbrace")]
    plain = all((t.kind == "rel" and t.text == "in") or (t.kind == "cmd" and t.text == "mathbb") for t in others)
    bounds = [t.kind for t in others] == ["rel", "num"] and others[0].text in ("<", "<=", ">", ">=")
    if bounds and len(names) == 1 and set(words) <= _CLAUSE_WORDS:
        return frozenset(names), ""  # for all n >= 1
    if not (plain and set(words) <= _CLAUSE_WORDS):
        return NOTHING
    sets = [t.text for t in clause if t.kind == "sym" and t.text in _SETS]
    said = {_DOMAIN_WORDS[word] for word in words if word in _DOMAIN_WORDS} | set(sets)
    return frozenset(names), said.pop() if len(said) == 1 else ""


def said(tokens: Sequence[Token]) -> str:
    """Join the texts of the tokens with spaces, without braces, for the patterns of phrases."""
    return " ".join(token.text for token in tokens if token.kind not in ("lbrace", "rbrace"))


_MEMBER = re.compile(r"(\S+) in (?:math(?:bb|bf) (?P<board>[RZNQC])(?P<part> [\^_] (?:[*+]|> 0))?|(?P<plain>[RZN]))")
_COUNTED = re.compile(rf"(\S+) = (?P<values>.*) (?:{'|'.join(ELLIPSES)})")
_INTEGER = re.compile(r"(\S+) is (?:\S+ )?integer", re.IGNORECASE)
_POSITIVE = {"Z": "N", "N": "N", "R": "R+", "Q": "Q+", "C": ""}


def declaration(tokens: Sequence[Token]) -> Declared:
    r"""Return the letter and domain of ``k \in \mathbb{Z}``; ``n = 0, \pm 1`` and the like declare nothing."""
    text = said(tokens)
    if match := _MEMBER.fullmatch(text):
        kind = match["board"] or match["plain"]
        return frozenset((match[1],)), _POSITIVE[kind] if match["part"] else kind
    if tokens and tokens[0].kind == "sym":
        if match := _COUNTED.fullmatch(text):
            domain = _COUNTING.get(match["values"].replace(" ", "").rstrip(","))
            return (frozenset((match[1],)), domain) if domain else NOTHING
        if match := _INTEGER.fullmatch(text):
            return frozenset((match[1],)), "Z"
    return NOTHING


def words_of(tokens: Sequence[Token]) -> tuple[str, ...]:
    """Return the words in small letters without articles; an article that counts (``a third``) is "one"."""
    words = [token.text.casefold().strip(".,") for token in tokens]
    for at, following in enumerate(words[1:]):
        if words[at] in ("a", "an") and counts_one(following):
            words[at] = "one"
    # an article as the whole answer stays
    return tuple(word for word in words if word and word not in _ARTICLES) or tuple(words)


_BASED = re.compile(
    r"(?P<sign>- )?(?P<open>\( )?(?P<digits>[0-9A-Za-z. ]+?)(?(open) \() "
    r"(?:_(?: \()?|(?:in )?(?:_ )?(?:\( )?base(?: -)?) (?P<base>\d{1,2}|[A-Za-z]+)(?: \()?"
)
_MOST_DIGITS = 200


def based(tokens: Sequence[Token]) -> Fixed | Quantity | None:
    r"""Read ``101_2``, ``1A3_{16}``, ``101_{\text{two}}``, ``101 (base 2)``; letters are digits in a base above ten.

    With base ten it is the number itself: ``17_{10}`` is 17.
    """
    match = _BASED.fullmatch(said(tokens))  # a closing bracket is spelled as its partner
    if match is None or tokens[0].kind in ("sym", "fn"):
        return None
    named = match["base"] if match["base"].isdigit() else word_number((match["base"].casefold(),))
    base, digits = int(named or 0), match["digits"].replace(" ", "").upper()
    plain = digits.replace(".", "", 1)
    if not 2 <= base <= 36 or len(plain) > _MOST_DIGITS or any(one == "." or int(one, 36) >= base for one in plain):
        return None
    if base == 10:
        return Quantity(numeral(-Fraction(digits) if match["sign"] else Fraction(digits)))
    return Fixed((("-" if match["sign"] else "") + (digits.lstrip("0") or "0"), base))


_CLOCK = re.compile(r"(\d{1,4})(?: : ([0-5]\d))?(?: : ([0-5]\d))?(?P<half> [^:]*)?")
_HALVES_OF_DAY = {
    "": "", "am": "am", "pm": "pm", "inthemorning": "am", "intheafternoon": "pm", "intheevening": "pm", "atnight": "pm",
    "noon": "pm", "midnight": "am", "hours": "", "hrs": "", "oclock": "", "o'clock": "",
}  # fmt: skip


def clock_time(tokens: Sequence[Token]) -> Clock | None:
    """Read ``h:mm``, ``h:mm:ss``, ``5 pm`` or ``noon``."""
    text = said(tokens).casefold()
    match = _CLOCK.fullmatch(f"12 {text}" if text in ("noon", "midnight") else text)
    half = _HALVES_OF_DAY.get(re.sub(r"[ .]", "", match["half"] or "")) if match else None
    if match is None or half is None or not (match[2] or half):
        return None
    half = half or ("24" if text.startswith("0") or "h" in text else "")  # 03:00, 3:00 hours
    values = [value for value in match.groups()[:3] if value]
    seconds = sum(int(value) * unit for value, unit in zip(values, (3600, 60, 1), strict=False))
    # 3:05 is a time; 3:5 may be a ratio as well
    padded = any(value.startswith("0") for value in values)
    ratio = None if half or padded or len(values) < 2 else Ratio(tuple(numeral(int(value)) for value in values))
    return Clock(seconds, half, ratio)


def out_of(tokens: Sequence[Token]) -> Sequence[Token]:
    """Turn ``3 out of 10`` and ``3 in 10`` into a fraction."""
    if [token.kind for token in tokens] == ["num", "word", "num"] and tokens[1].text.casefold() == "in":
        return [tokens[0], Token("op", "/"), tokens[2]]
    for at in range(1, len(tokens) - 2):
        words = [token.text.casefold() for token in tokens[at : at + 2]]
        if words == ["out", "of"] and tokens[at - 1].kind == tokens[at + 2].kind == "num":
            return [*tokens[:at], Token("op", "/"), *tokens[at + 2 :]]
    return tokens


_LABELS = ("abcdefgh", "12345678", ("i", "ii", "iii", "iv", "v", "vi"))


def labelled_parts(tokens: Sequence[Token], levels: Sequence[int]) -> list[Sequence[Token]]:
    """Return the parts of ``(a) 5, (b) 7`` in the order of their labels; an empty list if there are no labels."""
    marks: list[int] = []
    for at, (before, label, after) in enumerate(zip(tokens, tokens[1:], tokens[2:], strict=False)):
        bracketed = (before.kind, before.text, after.kind, after.text) == ("open", "(", "close", "(")
        plain = levels[at] == 0 and label.kind in ("sym", "word", "num")
        if bracketed and plain and (not at or tokens[at - 1].kind != "op"):
            marks.append(at)
    labels = [tokens[at + 1].text for at in marks]
    # at least two labels, from the first token on, without a gap: (a) and (c) leave (b) open
    order = next((order for order in _LABELS if sorted(labels) == sorted(order[: len(labels)])), None)
    if len(marks) < 2 or marks[0] or order is None:
        return []
    found: list[Sequence[Token]] = []
    for label, start, end in zip(labels, marks, [*marks[1:], len(tokens)], strict=True):
        part = tokens[start + 3 : end]
        while part and part[-1].kind == "sep":
            part = part[:-1]
        # (1) + 2 is a formula, not the answer to part 1
        if not part or (label in "12345678" and part[0].kind == "op"):
            return []
        found.append(part)
    # by label, not by place: "(b) 7, (a) 5" answers (a) with 5
    return [part for _, part in sorted(zip(labels, found, strict=True), key=lambda pair: order.index(pair[0]))]


_HALVES = {
    "^+": (1, False), "_+": (1, False), "_>0": (1, False), "^+_0": (1, True), "_0^+": (1, True), "_>=0": (1, True),
    "^-": (-1, False), "_-": (-1, False), "_<0": (-1, False), "_<=0": (-1, True), "^*": (0, False),
    "_+^*": (1, False), "^*_+": (1, False),
    "nonzero": (0, False),
    "positive": (1, False), "negative": (-1, False), "nonnegative": (1, True), "nonpositive": (-1, True),
}  # fmt: skip
"""Parts of the reals or the integers: their sign, and whether they contain zero."""
_KINDS = {
    "real": "R", "reals": "R", "integer": "Z", "integers": "Z", "natural": "N", "naturals": "N", "rational": "Q",
    "rationals": "Q", "irrational": "irrational", "complex": "C", "whole": "N0", "prime": "prime", "primes": "prime",
}  # fmt: skip
_QUANTIFIERS = word_set("all any every each the set of a an arbitrary entire line")
_PLURALS = word_set("numbers number reals integers integer naturals rationals primes values value line")
_LIMIT = r"(?:(?:the|this) )?(?:(?:series|integral|sequence|limit|sum|it) )?"
_STATES = tuple(
    (re.compile(pattern), meaning)
    for pattern, meaning in (
        (
            r"(?:there (?:is|are|exists?) |"
            r"(?:the |this )?(?:equation |system |problem |inequality )?(?:has |have ))?"
            r"(?:no|zero) (?:real |such |valid |possible )*"
            r"(?:solutions?|roots?|answers?|values?|numbers?|functions?|intersections?)"
            r"(?: (?:exists?|possible))?(?: of [a-z])?|(?:the )?(?:empty|null) set|none exists?",
            "",
        ),
        (r"(?:there (?:is|are|exists?) )?no such [a-z]+(?: [a-z])?(?: exists?)?", "does not exist"),
        (
            r"(?:(?:the )?[a-z]+ )?(?:does not|do not|doesn't|doesnt|don't) exist|dne|nonexistent|non-existent|"
            r"(?:(?:it|the [a-z]+) is )?(?:undefined|not defined)",
            "does not exist",
        ),
        (
            r"(?:there (?:are|exist) |(?:it |the (?:equation|system) )?has )?"
            r"(?:infinitely many|an infinite number(?: of)?|infinite)"
            r"(?: (?:solutions?|values?|answers?|points|numbers|pairs|triples|roots))?",
            "infinitely many",
        ),
        (rf"{_LIMIT}(?:diverges|is divergent|divergent)", "diverges"),
        (rf"{_LIMIT}(?:converges|is convergent|convergent)", "converges"),
        (r"(?:the |this )?(?:(?:statement|claim|assertion|proposition) is |it is )?(true|false)", r"\1"),
    )
)
"""Phrases and their meaning; an empty meaning is the empty set."""
_MONTHS = (
    "january", "february", "march", "april", "may", "june", "july", "august", "september", "october", "november",
    "december",
)  # fmt: skip
_DAY_WORDS = word_set("of the st nd rd th on")
_LONGEST_PHRASE = 12


def number_domain(tokens: Sequence[Token]) -> Shape | None:
    r"""Read ``\mathbb{R}``, ``all real numbers``, ``positive integers``, ``\mathbb{Z}_{>0}`` or ``even integers``."""
    texts = [token.text for token in tokens if token.kind not in ("lbrace", "rbrace")]
    if len(texts) >= 2 and texts[0] in ("mathbb", "mathbf") and texts[1] in _SETS:
        return _part(texts[1], "".join(texts[2:]))
    if texts == ["emptyset"]:
        return RealSet(())
    if (step := _multiples(tokens)) is not None:
        return _stepped(step, 0)
    if tokens[0].kind == "word" and all(token.kind in ("word", "sym", "op") for token in tokens):
        return _in_words([token.text.casefold() for token in tokens])
    return None


def _part(kind: str, half: str) -> Shape | None:
    if not half:
        return ALL_REALS if kind == "R" else Domain(kind)
    if half not in _HALVES:
        return None
    sign, with_zero = _HALVES[half]
    if kind == "R":
        zero = numeral(0)
        below, above = (
            Bounds(MINUS_INFINITY, False, zero, with_zero),
            Bounds(zero, with_zero, PLUS_INFINITY, False),
        )
        return RealSet({1: (above,), -1: (below,), 0: (below, above)}[sign])
    return Domain(kind + {1: "+", -1: "-", 0: "*"}[sign] + ("0" if with_zero else ""))


def _in_words(low: list[str]) -> Shape | None:
    words = "".join(low).split() if len(low) == 1 else low
    words = " ".join(words).replace("non - ", "non").replace("non-", "non").split()
    if len(words) > 1 and len(words[-1]) == 1:
        words = words[:-1]  # all integers n
        words = words[:-1] if words[-1] == "of" else words
    quantified = bool(_QUANTIFIERS & set(words) or _PLURALS & set(words))
    rest = [word for word in words if word not in _QUANTIFIERS and word not in ("numbers", "number", "values", "value")]
    # `integer` is a word, `integers` is the set
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
    """Return the 3 of ``all n divisible by 3`` or ``multiples of 3``."""
    low = [token.text.casefold() for token in tokens]
    if low[-3:-1] not in (["divisible", "by"], ["multiples", "of"], ["multiple", "of"]):
        return None
    before = {word for token, word in zip(tokens[:-3], low, strict=False) if token.kind != "sym"}
    said = before <= _QUANTIFIERS | word_set("integers integer numbers that are which is")
    return int(low[-1]) if said and low[-1].isdecimal() and len(low[-1]) < 10 else None


def _stepped(step: int, start: int) -> Family:
    """Return the whole numbers ``start``, ``start + step``, ... in both directions."""
    steps = numeral(step) * Expr("sym", name="#k")
    return Family(Quantity(steps + numeral(start)), frozenset(("#k",)), "Z")


def closed_phrase(tokens: Sequence[Token]) -> Shape | None:
    """Read a phrase of the table above."""
    if len(tokens) > _LONGEST_PHRASE or any(token.kind not in ("word", "sym") for token in tokens):
        return None
    text = " ".join(token.text.casefold().strip(".,") for token in tokens).strip()
    for pattern, meaning in _STATES:
        if match := pattern.fullmatch(text):
            return Text(tuple(match.expand(meaning).split())) if meaning else RealSet(())
    return None


def date_of(tokens: Sequence[Token]) -> Text | None:
    """Read a date as the month, then the day and perhaps the year; None if it is no date."""
    words = [token.text.casefold().strip(".,") for token in tokens if token.kind == "word"]
    months = [month for word in words if len(word) > 2 for month in _MONTHS if _month(word, month)]
    days = [token.text.lstrip("0") for token in tokens if token.kind == "num"]
    if len(months) != 1 or not 1 <= len(days) <= 2 or not all(day.isdigit() for day in days):
        return None
    if any(token.kind not in ("word", "num", "lbrace", "rbrace") and token.text not in "^,." for token in tokens):
        return None
    others = [word for word in words if word not in _DAY_WORDS and not _month(word, months[0])]
    # the day before the year, whatever their order was
    days = sorted(days, key=int)
    return None if others or int(days[0]) > 31 else Text((months[0], *days))


def _month(word: str, month: str) -> bool:
    return word == month or (len(word) in (3, 4) and month.startswith(word))


_STATING = word_set("is are equals has gets")
_DOUBTING = word_set(
    "not no isn't if unless or either neither maybe perhaps probably wrong false incorrect cannot except but what "
    "which than times because since that whether"
)


def stated(tokens: Sequence[Token], levels: Sequence[int]) -> tuple[Sequence[Token], Sequence[Token]] | None:
    """Split "the maximum value is 5" into name and value; None if it is no such statement."""
    low = [token.text.casefold() if token.kind == "word" else "" for token in tokens]
    at = next((at for at, level in enumerate(levels) if level == 0 and low[at] in _STATING), 0)
    name, value = tokens[:at], tokens[at + 1 :]
    if not name or not value or tokens[0].kind != "word" or all(token.kind == "word" for token in value):
        return None
    # "the maximum is 5 or 6" and "is not 5" give no value
    if any(token.kind == "sep" or token.text.casefold() in _DOUBTING for token in tokens):
        return None
    plain = all(token.kind in ("word", "sym", "lbrace", "rbrace", "op", "num") for token in name)
    return (name, value) if plain else None


_COMPARED = (
    (("greater", "than", "or", "equal", "to"), ">="), (("less", "than", "or", "equal", "to"), "<="),
    (("strictly", "greater", "than"), ">"), (("strictly", "less", "than"), "<"), (("at", "least"), ">="),
    (("at", "most"), "<="), (("greater", "than"), ">"), (("less", "than"), "<"), (("congruent", "to"), "=="),
)  # fmt: skip
_REAL_NUMBERS = (["all", "real", "numbers"], ["real", "numbers"], ["all", "reals"])


def in_symbols(tokens: Sequence[Token]) -> list[Token]:
    """Replace words for relations and signs by symbols: ``x is at least 2``, ``negative infinity``."""
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
        elif low[:1] in (("negative",), ("minus",)) and (
            [token.kind for token in tokens[at + 1 : at + 2]] == ["num"] or low[1:2] in (("inf",), ("infinity",))
        ):
            found.append(Token("op", "-", True))
            at += 1
        else:
            found.append(tokens[at])
            at += 1
    return found


_THINGS = (
    "lines?|plane|points?|circle|curve|parabola|ellipse|hyperbola|intervals?|vector|matrix|pairs?|functions?|polynomial|"
    "expression|tuple|triple|roots?|solutions?"
)
_LEAD = re.compile(
    r"for (?=(?:all|every) )|(?:there (?:is|are)|the|an|a(?!.* _ )) (?=\d)|"  # A5 in base 11
    rf"(?:(?:the|an?) )*(?P<thing>{_THINGS}) (?:(?:with|equation|at) )*(?!\d+$)"
)


def without_lead(tokens: Sequence[Token]) -> Sequence[Token]:
    """Remove the words that only name the kind of thing: ``the line x = 3``, ``there are 5 solutions``."""
    lead = _LEAD.match(said(tokens).casefold())
    rest = tokens[lead[0].count(" ") :] if lead else tokens
    loose = lead is not None and lead["thing"] and rest[0].kind in ("word", "colon", "rel", "unit")
    return tokens if loose else rest
