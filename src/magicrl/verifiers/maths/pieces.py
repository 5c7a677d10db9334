"""Parts of an answer: splitting at separators, clauses, number sets, bases, clock times, where a unit begins."""

from __future__ import annotations

from collections.abc import Sequence

from magicrl.verifiers.maths.answers import Based, Clock, Ratio, RealSet, Span
from magicrl.verifiers.maths.expression import Expr, number, symbol
from magicrl.verifiers.maths.lexer import Token
from magicrl.verifiers.maths.units import UNITS
from magicrl.verifiers.maths.words import word_number, word_set

_ARTICLES = frozenset(("a", "an", "the"))
_CLAUSE_STARTS = frozenset(("for", "where", "with", "when", "here"))
_CLAUSE_WORDS = word_set(
    "for where with when here some any all each every integer integers natural real reals positive negative "
    "nonnegative non-negative number numbers constant constants "
    "arbitrary is an a are be whole values value of parameter"
)
_BEING = frozenset(("there", "are", "is", "exist", "exists", "the", "."))
_NONE = frozenset(("empty set", "no solution", "no solutions", "no real solutions", "no real solution"))
_HALVES = {
    "^+": (1, False), "_+": (1, False), "_>0": (1, False), "^+_0": (1, True), "_0^+": (1, True), "_>=0": (1, True),
    "^-": (-1, False), "_-": (-1, False), "_<0": (-1, False), "_<=0": (-1, True),
    "positive": (1, False), "negative": (-1, False), "nonnegative": (1, True), "non-negative": (1, True),
}  # fmt: skip
"""Half-lines from nought: their sign, and whether nought is in them."""
_SETS = {"R": "real", "Z": "integer", "N": "integer"}
_SHORT_UNITS = word_set("cm mm km kg ft lb lbs oz min sec hr hrs mph mol per day mL ml yd gal deg pct")


def depths(tokens: Sequence[Token]) -> list[int] | None:
    """The bracket depth before each token (of a closing one: of its partner), or None if brackets do not match.

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
            if partner != mark and not {partner, mark} <= {"(", "["}:
                return None
        found.append(len(stack))
        if opens:
            stack.append(mark)
    return None if stack else found


def split(tokens: Sequence[Token], levels: list[int], kind: str) -> tuple[list[Sequence[Token]], list[str]]:
    """The parts between the tokens of a kind outside all brackets, and those tokens' texts."""
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


def without_clause(tokens: Sequence[Token], levels: list[int]) -> tuple[Sequence[Token], list[int], set[str]]:
    """Cut off ``for some integer t`` and the like; the names that it declares."""
    if tokens[-1].text == "(" and tokens[-1].kind == "close" and levels[-1] == 0:
        opened = max(at for at, level in enumerate(levels[:-1]) if level == 0)
        name = declared_integer(tokens[opened + 1 : -1])
        if opened and name:
            return tokens[:opened], levels[:opened], {name}  # ... (k in Z)
    for position, token in enumerate(tokens):
        if position and levels[position] == 0 and token.kind == "word" and token.text.casefold() in _CLAUSE_STARTS:
            clause = tokens[position:]
            words = [t.text.casefold() for t in clause if t.kind == "word"]
            names = {t.text for t in clause if t.kind == "sym" and t.text not in _SETS}
            others = [t for t in clause if t.kind not in ("word", "sym", "sep", "lbrace", "rbrace")]
            plain = all(
                (t.kind == "rel" and t.text == "in") or (t.kind == "cmd" and t.text == "mathbb") for t in others
            )
            if plain and names and set(words) <= _CLAUSE_WORDS:
                end = position - 1 if tokens[position - 1].kind == "sep" else position
                return tokens[:end], levels[:end], names
    return tokens, levels, set()


def declared_integer(tokens: Sequence[Token]) -> str | None:
    r"""The name in ``k \in \mathbb{Z}``."""
    texts = [token.text for token in tokens if token.kind not in ("lbrace", "rbrace")]
    if len(texts) == 4 and texts[1:3] == ["in", "mathbb"] and texts[3] in _SETS:
        return texts[0]
    return texts[0] if len(texts) == 3 and texts[1] == "in" and texts[2] in ("Z", "N") else None


def number_set(tokens: Sequence[Token]) -> RealSet | None:
    r"""``\mathbb{R}``, and ``all real numbers``."""
    texts = [token.text for token in tokens if token.kind not in ("lbrace", "rbrace")]
    low = [text.casefold() for text in texts]
    if texts in (["mathbb", "R"], ["mathbf", "R"]) or low in (["all", "real", "numbers"], ["all", "reals"]):
        return RealSet((Span(Expr("neg", (symbol("inf"),)), False, symbol("inf"), False),))
    if texts == ["emptyset"] or " ".join(word for word in low if word not in _BEING) in _NONE:
        return RealSet(())
    if texts[:2] in (["mathbb", "R"], ["mathbf", "R"]):
        half = "".join(texts[2:])
    else:
        half = " ".join(word for word in low if word not in ("all", "the", "numbers", "number", "reals", "real"))
        half = half if {"real", "reals"} & set(low) else ""
    if half not in _HALVES:
        return None
    nought = number(0)
    sign, closed = _HALVES[half]
    if sign > 0:
        return RealSet((Span(nought, closed, symbol("inf"), False),))
    return RealSet((Span(Expr("neg", (symbol("inf"),)), False, nought, closed),))


def words_of(tokens: Sequence[Token]) -> tuple[str, ...]:
    words = [token.text.casefold().strip(".,") for token in tokens]
    return tuple(word for word in words if word and word not in _ARTICLES) or tuple(words)


def based(tokens: Sequence[Token]) -> Based | None:
    r"""``101_2``, ``1A3_{16}``, ``101_{\text{two}}``; letters count as digits in a base above ten."""
    texts = [token.text for token in tokens if token.kind not in ("lbrace", "rbrace")]
    if len(texts) < 3 or texts[-2] != "_":
        return None
    if texts[0] == texts[-3] == "(" or (texts[0] == "-" and texts[1] == texts[-3] == "("):
        texts = [text for text in texts if text != "("]  # (101)_2
    named = word_number((texts[-1].casefold(),))
    said = str(named) if named is not None else texts[-1]
    if not said.isdigit() or len(said) > 2:
        return None
    written, base = "".join(texts[:-2]).upper(), int(said)
    sign, digits = ("-", written[1:]) if written.startswith("-") else ("", written)
    plain = digits.replace(".", "", 1)
    if not 2 <= base <= 36 or len(digits) > 200 or tokens[0].kind == "sym" or not plain.isalnum():
        return None
    if any(int(digit, 36) >= base for digit in plain):
        return None
    return Based(sign + (digits.lstrip("0") or "0"), base)


def clock_time(tokens: Sequence[Token]) -> Clock | None:
    """``h:mm`` or ``h:mm:ss``, perhaps with am or pm."""
    numbers = [token for token in tokens if token.kind == "num"]
    colons = [token for token in tokens if token.kind == "colon"]
    rest = tokens[len(numbers) + len(colons) :]
    kinds = [token.kind for token in tokens[: len(numbers) + len(colons)]]
    if kinds == ["num"] and half_of(rest) in ("am", "pm") and numbers[0].text.isdigit():
        return Clock(int(numbers[0].text[:4]) * 3600, half_of(rest), None)
    if kinds not in (["num", "colon", "num"], ["num", "colon", "num", "colon", "num"]):
        return None
    half = half_of(rest)
    if half not in ("", "am", "pm"):
        return None
    values = [token.text for token in numbers]
    if not all(value.isdigit() and len(value) <= 4 for value in values):
        return None
    if any(len(value) != 2 or int(value) > 59 for value in values[1:]):
        return None
    seconds = sum(int(value) * unit for value, unit in zip(values, (3600, 60, 1), strict=False))
    padded = any(value.startswith("0") for value in values)
    ratio = None if half or padded else Ratio(tuple(number(int(value)) for value in values))
    return Clock(seconds, half, ratio)


def half_of(tokens: Sequence[Token]) -> str:
    """``am``, ``pm`` or what else the tokens say."""
    return "".join(token.text for token in tokens).casefold().replace(".", "").replace(" ", "")


def unit_start(tokens: Sequence[Token], levels: list[int]) -> int | None:
    """Where the words after the number begin."""
    for position, (token, level) in enumerate(zip(tokens, levels, strict=True)):
        if position == 0 or level:
            continue
        if token.kind == "unit" and (token.text != "degree" or not degree_inside(tokens, levels, position)):
            return position
        if token.kind == "word" and (token.roman or len(token.text) > 3 or token.text in _SHORT_UNITS):
            return position
        if token.kind == "word" and token.text in ("st", "nd", "rd", "th"):
            return position
        if token.kind == "op" and token.text == "^" and ordinal(tokens[position + 1 :]):
            return position
        letters = any(before.kind == "sym" and before.text != "pi" for before in tokens[:position])
        if token.kind == "sym" and token.roman and token.text in UNITS and not letters:
            return position
    return None


def ordinal(tokens: Sequence[Token]) -> bool:
    texts = [token.text for token in tokens if token.kind not in ("lbrace", "rbrace")]
    return texts[:1] in (["st"], ["nd"], ["rd"], ["th"])


def degree_inside(tokens: Sequence[Token], levels: list[int], position: int) -> bool:
    """Whether more of a formula follows: then the degree sign is a factor, not the unit of the whole."""
    rest = tokens[position + 1 :]
    degrees = [t for t in tokens[:position] if t.kind == "unit"]
    functions = [t for t, level in zip(tokens[:position], levels, strict=False) if t.kind == "fn" and level == 0]
    return bool(degrees or functions) or any(token.kind in ("op", "num", "fn") for token in rest)
