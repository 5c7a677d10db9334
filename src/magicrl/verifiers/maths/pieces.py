"""Parts of an answer: splitting at separators, clauses, number sets, bases, clock times, where a unit begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from magicrl.verifiers.maths.answers import Based, Clock, Ratio
from magicrl.verifiers.maths.expression import number
from magicrl.verifiers.maths.lexer import ELLIPSES, Token
from magicrl.verifiers.maths.numerals import counts_one, word_number
from magicrl.verifiers.maths.units import UNITS
from magicrl.verifiers.maths.words import word_set

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
_SHORT_UNITS = word_set(
    "cm mm km kg ft lb lbs oz min sec hr hrs mph mol per day mL ml yd gal deg pct mi mg kW kJ kN Hz kPa nm dm in sq cu "
    "cc kgs eV keV MeV GeV atm cal kph kmh kHz MHz GHz MPa GPa"
)


_POSITIVE = ("^*", "^+", "_+", "_>0")
_COUNTING = {
    "0,1": "N0", "0,1,2": "N0", "0,1,2,3": "N0", "1,2": "N", "1,2,3": "N", "1,2,3,4": "N",
    "0,pm1": "Z", "0,pm1,pm2": "Z", "0,pm1,pm2,pm3": "Z",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Declared:
    """Free parameters that a clause declares, and their domain (Z, N, R) where it says one."""

    names: frozenset[str] = frozenset()
    domain: str = ""

    def __bool__(self) -> bool:
        return bool(self.names)


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


def without_clause(tokens: Sequence[Token], levels: list[int]) -> tuple[Sequence[Token], list[int], Declared]:
    """Cut off ``for some integer t`` and the like; what it declares."""
    if tokens[-1].text == "(" and tokens[-1].kind == "close" and levels[-1] == 0:
        opened = max(at for at, level in enumerate(levels[:-1]) if level == 0)
        found = declaration(tokens[opened + 1 : -1])
        if opened and found:
            return tokens[:opened], levels[:opened], found  # ... (k in Z)
    for position, token in enumerate(tokens):
        if position and levels[position] == 0 and token.kind == "word" and token.text.casefold() in _CLAUSE_STARTS:
            found = _clause(tokens[position:])
            if found:
                end = position - 1 if tokens[position - 1].kind == "sep" else position
                return tokens[:end], levels[:end], found
    return tokens, levels, Declared()


def _clause(clause: Sequence[Token]) -> Declared:
    words = [t.text.casefold() for t in clause if t.kind == "word"]
    names = {t.text for t in clause if t.kind == "sym" and t.text not in ("R", "Z", "N")}
    others = [t for t in clause if t.kind not in ("word", "sym", "sep", "lbrace", "rbrace")]
    plain = all((t.kind == "rel" and t.text == "in") or (t.kind == "cmd" and t.text == "mathbb") for t in others)
    bounds = [t.kind for t in others] == ["rel", "num"] and others[0].text in ("<", "<=", ">", ">=")
    if bounds and len(names) == 1 and set(words) <= _CLAUSE_WORDS:
        return Declared(frozenset(names))  # for all n >= 1
    if not (plain and names and set(words) <= _CLAUSE_WORDS):
        return Declared()
    sets = [t.text for t in clause if t.kind == "sym" and t.text in _SETS]
    said = {_DOMAIN_WORDS[word] for word in words if word in _DOMAIN_WORDS} | set(sets)
    half = {"positive", "negative", "nonnegative", "non-negative", "natural"} & set(words)
    domain = "N" if said == {"Z"} and half else said.pop() if len(said) == 1 else ""
    return Declared(frozenset(names), domain)


def declaration(tokens: Sequence[Token]) -> Declared:
    r"""What ``k \in \mathbb{Z}`` declares; ``n = 0, \pm 1`` and the like declare nothing."""
    texts = [token.text for token in tokens if token.kind not in ("lbrace", "rbrace")]
    if len(texts) == 4 and texts[1] == "in" and texts[2] in ("mathbb", "mathbf") and texts[3] in _SETS:
        return Declared(frozenset(texts[:1]), texts[3])
    if len(texts) == 3 and texts[1] == "in" and texts[2] in ("Z", "N", "R"):
        return Declared(frozenset(texts[:1]), texts[2])
    if len(texts) > 4 and texts[1:3] == ["in", "mathbb"] and "".join(texts[4:]) in _POSITIVE:
        return Declared(frozenset(texts[:1]), {"Z": "N", "N": "N", "R": "R+", "Q": "Q+"}.get(texts[3], ""))
    if texts[-1:] and texts[-1] in ELLIPSES and texts[1:2] == ["="] and tokens[0].kind == "sym":
        domain = _COUNTING.get("".join(texts[2:-1]).rstrip(","))
        return Declared(frozenset(texts[:1]), domain) if domain else Declared()
    low = [text.casefold() for text in texts]
    if len(texts) in (3, 4) and low[1] == "is" and low[-1] == "integer" and tokens[0].kind == "sym":
        return Declared(frozenset(texts[:1]), "Z")
    return Declared()


def words_of(tokens: Sequence[Token]) -> tuple[str, ...]:
    """The words, case folded, without articles; an article that counts (``a third``) is a one."""
    words = [token.text.casefold().strip(".,") for token in tokens]
    for at, following in enumerate(words[1:]):
        if words[at] in ("a", "an") and counts_one(following):
            words[at] = "one"
    return tuple(word for word in words if word and word not in _ARTICLES) or tuple(words)


def based(tokens: Sequence[Token]) -> Based | None:
    r"""``101_2``, ``1A3_{16}``, ``101_{\text{two}}``; letters count as digits in a base above ten."""
    texts = [token.text for token in tokens if token.kind not in ("lbrace", "rbrace")]
    low = [text.casefold() for text in texts]
    if "base" in low[1:]:  # 101 (base 2)
        at = low.index("base")
        digits = texts[:at]
        while digits and digits[-1] in ("(", "in", "_"):
            digits.pop()
        texts = [*digits, "_", *(text for text in texts[at + 1 :] if text not in ("(", "-"))]
    if texts[-1:] == ["("] and texts[-4:-2] == ["_", "("]:
        texts = [*texts[:-3], texts[-2]]  # 101_{(2)}
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


def midday(tokens: Sequence[Token]) -> Clock | None:
    """``noon`` and ``midnight``."""
    said = tokens[0].text.casefold() if len(tokens) == 1 and tokens[0].kind == "word" else ""
    return Clock(12 * 3600, {"noon": "pm", "midnight": "am"}[said], None) if said in ("noon", "midnight") else None


_HALVES = {
    "inthemorning": "am", "intheafternoon": "pm", "intheevening": "pm", "atnight": "pm", "noon": "pm", "midnight": "am",
    "hours": "", "hrs": "", "oclock": "", "o'clock": "",
}  # fmt: skip


def half_of(tokens: Sequence[Token]) -> str:
    """``am``, ``pm`` or what else the tokens say."""
    said = "".join(token.text for token in tokens).casefold().replace(".", "").replace(" ", "")
    return _HALVES.get(said, said)


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
        if token.kind == "sym" and token.text in ("Omega", "mu") and _greek_unit(tokens, position):
            return position
        letters = any(before.kind == "sym" and before.text != "pi" for before in tokens[:position])
        if token.kind == "sym" and token.roman and token.text in UNITS and not letters:
            return position
    return None


def _greek_unit(tokens: Sequence[Token], position: int) -> bool:
    r"""``10\Omega`` and ``5\,\mu\mathrm{m}``, after a mere number."""
    if any(before.kind in ("sym", "word") and before.text != "pi" for before in tokens[:position]):
        return False
    rest = tokens[position + 1 :]
    if tokens[position].text == "Omega":
        return not rest
    return bool(rest) and (rest[0].roman or rest[0].kind == "word") and "mu" + rest[0].text in UNITS


def out_of(tokens: Sequence[Token]) -> Sequence[Token]:
    """``3 out of 10`` and ``3 in 10`` as a fraction."""
    if [token.kind for token in tokens] == ["num", "word", "num"] and tokens[1].text.casefold() == "in":
        return [tokens[0], Token("op", "/"), tokens[2]]
    for at in range(1, len(tokens) - 2):
        words = [token.text.casefold() for token in tokens[at : at + 2]]
        if words == ["out", "of"] and tokens[at - 1].kind == tokens[at + 2].kind == "num":
            return [*tokens[:at], Token("op", "/"), *tokens[at + 2 :]]
    return tokens


def conditions_apart(tokens: Sequence[Token]) -> Sequence[Token]:
    r"""``2^n where n \ge 0`` as ``2^n, n \ge 0``."""
    found: list[Token] = []
    for at, token in enumerate(tokens):
        ahead = tokens[at + 1 : at + 3]
        bounded = [one.kind for one in ahead] == ["sym", "rel"] and ahead[1].text in ("<", "<=", ">", ">=", "!=")
        if found and bounded and token.kind == "word" and token.text.casefold() in ("where", "with"):
            found += [] if found[-1].kind == "sep" else [Token("sep", ",")]
        else:
            found.append(token)
    return found


def ordinal(tokens: Sequence[Token]) -> bool:
    texts = [token.text for token in tokens if token.kind not in ("lbrace", "rbrace")]
    return texts[:1] in (["st"], ["nd"], ["rd"], ["th"])


def degree_inside(tokens: Sequence[Token], levels: list[int], position: int) -> bool:
    """Whether more of a formula follows: then the degree sign is a factor, not the unit of the whole."""
    rest = tokens[position + 1 :]
    if position > 2 and (tokens[position - 2].kind, tokens[position - 2].text) == ("cmd", "angle"):
        return True  # a size at an angle
    degrees = [t for t in tokens[:position] if t.kind == "unit"]
    functions = [t for t, level in zip(tokens[:position], levels, strict=False) if t.kind == "fn" and level == 0]
    return bool(degrees or functions) or any(token.kind in ("op", "num", "fn") for token in rest)


_LABELS = ("abcdefgh", "12345678", ("i", "ii", "iii", "iv", "v", "vi"))


def labelled_parts(tokens: Sequence[Token], levels: Sequence[int]) -> list[tuple[str, Sequence[Token]]]:
    """The parts of ``(a) 5, (b) 7`` with their numbers; empty where there are no such labels in order."""
    marks = [
        at
        for at in range(len(tokens) - 2)
        if levels[at] == 0 and tokens[at].text == tokens[at + 2].text == "("
        and (tokens[at].kind, tokens[at + 2].kind) == ("open", "close")
        and tokens[at + 1].kind in ("sym", "word", "num") and (not at or tokens[at - 1].kind != "op")
    ]  # fmt: skip
    labels = [tokens[at + 1].text for at in marks]
    if len(marks) < 2 or marks[0] or not any(labels == list(order[: len(labels)]) for order in _LABELS):
        return []
    found: list[tuple[str, Sequence[Token]]] = []
    for start, end in zip(marks, [*marks[1:], len(tokens)], strict=True):
        part = tokens[start + 3 : end]
        while part and part[-1].kind == "sep":
            part = part[:-1]
        found.append((str(len(found)), part))
    apart = all(
        part and (label not in "12345678" or part[0].kind != "op")
        for label, (_, part) in zip(labels, found, strict=True)
    )
    return found if apart else []


def without_fraction(tokens: Sequence[Token], levels: list[int]) -> tuple[Sequence[Token], list[int]]:
    r"""A fraction of units after a number, ``9.8 \frac{\text{m}}{\text{s}^2}``, on one line."""
    for at, (token, level) in enumerate(zip(tokens, levels, strict=True)):
        if not at or level or (token.kind, token.text) != ("cmd", "frac") or tokens[-1].kind != "rbrace":
            continue
        inside = [place for place in range(at + 1, len(tokens)) if levels[place] == 0]
        if [tokens[place].kind for place in inside] != ["lbrace", "rbrace"] * 2:
            return tokens, levels
        top, bottom = tokens[at + 2 : inside[1]], tokens[inside[2] + 1 : -1]
        marks = ("op", "lbrace", "rbrace", "num")
        words = [one for one in (*top, *bottom) if one.kind not in marks]
        if words and all(one.kind in ("word", "sym") and one.roman for one in words):
            line = [*tokens[:at], *top, Token("op", "/"), *bottom]
            return line, depths(line) or [0] * len(line)
        return tokens, levels
    return tokens, levels
