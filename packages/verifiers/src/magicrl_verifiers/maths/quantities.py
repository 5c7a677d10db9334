r"""Quantities: a formula and its unit, read from tokens.

A single letter is a unit only in an upright font (``\mathrm{m}``): ``3t`` and ``x+3h`` are products. Words after a
number that are no known unit (``17 apples``) are a noun: it is not converted, and two nouns must have the same last
word. The units are data, in `units.toml`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from importlib.resources import files
from itertools import pairwise
from types import MappingProxyType

from magicrl_verifiers.maths.answers import (
    DEGREE,
    PERCENT,
    Dimension,
    Expr,
    Quantity,
    Several,
    Shape,
    Unit,
    complete,
    numeral,
    signs,
    substitute,
)
from magicrl_verifiers.maths.formulas import parse
from magicrl_verifiers.maths.literals import (
    MORE_SCALES,
    SCALES,
    amount,
    leading_number,
    part_of_one,
    word_number,
    word_set,
)
from magicrl_verifiers.maths.notation import UNSPACED, Token
from magicrl_verifiers.maths.phrases import depths, said

_DATA = tomllib.loads(files("magicrl_verifiers.maths").joinpath("units.toml").read_text(encoding="utf-8"))


def _load() -> dict[str, Unit]:
    """Return every unit by its name."""
    table: dict[str, Unit] = {}
    for row in _DATA["unit"]:
        powers = (re.fullmatch(r"([A-Za-z]+)(-?\d*)", part) for part in row["dimension"].split())
        # sorted, so that equal dimensions are equal tuples
        dimension = tuple(sorted((part[1], int(part[2] or 1)) for part in powers if part is not None))
        size, letters, names = Fraction(row["size"]), row.get("letters", "").split(), row["names"].split()
        table |= dict.fromkeys((*letters, *names), Unit("unit", dimension, size))
        if row.get("metric"):
            for prefix, power in _DATA["prefixes"]["letters"].items():
                for letter in letters:
                    # a unit of that very name wins over a prefix and a letter
                    table.setdefault(prefix + letter, Unit("unit", dimension, size * Fraction(10) ** power))
            for prefix, power in _DATA["prefixes"]["names"].items():
                unit = Unit("unit", dimension, size * Fraction(10) ** power)
                table |= dict.fromkeys((prefix + name for name in names), unit)
    return table


UNITS = MappingProxyType(_load())
_COUNTED = re.compile(
    f"(?:{'|'.join(sorted(_DATA['counters']['names'].split(), key=len, reverse=True))})"
    f"[^{_DATA['counters']['changed_by']}]*"
)
"""Chinese, Japanese or Korean word for what is counted, with nothing behind it that changes the number."""
_PERCENT = frozenset(("percent", "percentage", "pct", "%"))
_DEGREES = frozenset(("degree", "degrees", "deg", "度", "도"))
_ORDINALS = frozenset(("st", "nd", "rd", "th"))
_ANY = frozenset(("unit", "units"))
_DOUBTS = word_set(
    "not no isn't if else unless or and is are was be than more less least most about but maybe perhaps probably "
    "either wrong false incorrect except nor neither instead correct true answer option times"
)
"""Words that deny, doubt or change a number: with one of them it is no quantity."""
_OPERATIONS = word_set(
    # powers, roots, inverses, parts
    "squared cubed squares cubes root roots factorial factorials reciprocal reciprocals inverse inverted mod modulo "
    "exponent power powers log logs logarithm conjugate absolute choose raised divided multiplied subtracted added "
    "doubled tripled trebled quadrupled halved double triple quadruple twice thrice half quarter negative negatives "
    # several at once
    "dozen dozens score scores gross pair pairs couple couples trio trios brace fold myriad lakh crore bn tn mn "
    # another notation, a bound
    "base binary hex octal bar repeating recurring point dot to short shy exclusive max maximum min minimum"
)
"""Words that change the number right before them: ``5 squared``, ``5 dozen``."""
_BOUNDS = word_set(
    "plus minus below above under over up down upwards downwards upward downward fewer greater bigger smaller higher "
    "lower larger beyond exceeding nearly almost approximately approx roughly around"
)
"""Words anywhere after a number that change its sign or make it a bound: ``5 degrees below zero``."""
_AFTER_NOUNS = word_set("old long tall high wide deep away apart left remaining total altogether each")
_SQUARE = {"square": 2, "squared": 2, "sq": 2, "cubic": 3, "cubed": 3, "cu": 3, "2": 2, "3": 3}
_MAX_WORDS = 6
_IN_PHRASES = frozenset(("word", "sym", "op", "num", "unit", "lbrace", "rbrace", "open", "close"))


def unit_phrase(tokens: Sequence[Token], *, trusted: bool) -> Unit | None:
    """Read the tokens after a number; None when they are no unit and no noun.

    Args:
        trusted: Whether the tokens are part of a reference answer, where any words are a noun.
    """
    words = [token.text.strip(".,") for token in tokens if token.kind not in ("lbrace", "rbrace")]
    words = [word for word in words if word and word != "'"]
    if not words or any(token.kind not in _IN_PHRASES for token in tokens):
        return None
    if "(" in words:  # J/(mol K); a closing bracket is spelled as its partner
        if words[-1] != "(" or words.count("(") != 2 or words[words.index("(") - 1] != "/" or words.count("/") > 1:
            return None
        words = [word for word in words if word != "("]
    while len(words) > 1 and words[-1].casefold() in _AFTER_NOUNS:
        words.pop()  # 12 years old
    low = [word.casefold() for word in words]
    if low[0] in _ORDINALS:
        return unit_phrase(tokens[1:], trusted=trusted) if len(low) > 1 else Unit("none")
    if any(word in _ANY for word in low) and all(word in _ANY or word in _SQUARE or word == "^" for word in low):
        power = next((_SQUARE[word] for word in low if word in _SQUARE), 1)
        return Unit("unit", (("any", power),))
    if low[0] in _PERCENT or low == ["per", "cent"]:
        return PERCENT if len(low) == 1 or low[0] == "per" else None
    if low[0] in _DEGREES:
        scale = low[1][:1] if low[1:] in (["celsius"], ["fahrenheit"], ["c"], ["f"]) else ""
        degrees = Unit("noun", noun="degree" + scale.upper()) if scale else DEGREE
        return degrees if scale or len(low) == 1 else _noun(tokens, words, trusted)
    noun = _noun(tokens, words, trusted)
    counted = words[: low.index("of")] if noun is not None and "of" in low and low[-1] != "arc" else words
    return _known(words) or _known(counted) or noun  # gallons of water


def _known(words: list[str]) -> Unit | None:
    """Read a product and quotient of known units: ``cm^2``, ``square feet``, ``km/h``, ``miles per hour``."""
    words = _whole_names(words)
    dimension: dict[str, int] = {}
    factor, sign, power, at, found = Fraction(1), 1, 1, 0, False
    letter = ""
    while at < len(words):
        word = words[at]
        at += 1
        if word in ("/", "per", "an") or (word == "a" and found):
            sign = -1 if word in ("/", "per") or found else sign
            continue
        if word in ("*", "of") or (word == "-" and found and at < len(words) and words[at] in UNITS):
            continue
        # "square" and "cubic" come before the unit, "squared" and "cubed" after it
        if word.isalpha() and word.casefold() in _SQUARE and not word.casefold().endswith("ed"):
            power = _SQUARE[word.casefold()]
            continue
        # short units depend on case (mW, MW); longer names do not
        entry = UNITS.get(word) or (UNITS.get(word.casefold()) if len(word) > 2 else None)
        if entry is None:
            return None
        after, at = _exponent(words, at)
        exponent = sign * power * after
        for name, count in entry.dimension:
            dimension[name] = dimension.get(name, 0) + count * exponent
        factor *= entry.factor**exponent
        if len(words) == 1 and len(word) <= 3:
            letter = word
        power, found = 1, True
    return Unit("unit", tuple(sorted(item for item in dimension.items() if item[1])), factor, letter) if found else None


def _whole_names(words: list[str]) -> list[str]:
    """Join prefixes to their units (``k`` and ``Omega``, ``mu`` and ``m``), and split ``newton-meters``."""
    found: list[str] = []
    for word in words:
        parts = word.split("-")
        if len(parts) > 1 and all(part in UNITS or part.casefold() in UNITS for part in parts):
            found += parts
        elif found and found[-1] == "electron" and word.casefold() in ("volt", "volts"):
            found[-1] = "electronvolt"
        elif found and found[-1] in ("mu", "k", "M", "m", "G") and (word == "Omega" or found[-1] == "mu"):
            found[-1] += word
        else:
            found.append(word)
    return found


def _exponent(words: list[str], at: int) -> tuple[int, int]:
    """Return the exponent after a unit, and the place of the next word."""
    if words[at : at + 1] == ["^"]:
        rest = words[at + 1 : at + 3]
        if rest[:1] == ["-"] and len(rest) == 2 and rest[1].isdigit():
            return -int(rest[1][:2]), at + 3
        if rest and rest[0].isdigit():
            return int(rest[0][:2]), at + 2
    if at < len(words) and words[at].casefold() in ("squared", "cubed"):
        return _SQUARE[words[at].casefold()], at + 1
    return 1, at


def _noun(tokens: Sequence[Token], words: list[str], trusted: bool) -> Unit | None:
    if any(token.kind != "word" for token in tokens):
        return None
    low = [word.casefold() for word in words]
    # the words of a response may deny, hedge or give a second number; those of a reference answer do not
    if not trusted and (
        len(low) > _MAX_WORDS
        or (len(low) == len(low[0]) == 1 and low[0].isascii())  # 5k
        or any(re.search(UNSPACED, word) and not _COUNTED.fullmatch(word) for word in low)
        or low[0] in _OPERATIONS
        or any(word in _DOUBTS or word in _BOUNDS or amount((word,)) not in (None, 1) for word in low)
        or any(word in MORE_SCALES for word in low)
        or part_of_one(low[0], alone=len(low) == 1)
    ):
        return None
    if not all(word.replace("-", "").replace("'", "").isalpha() for word in low):
        return None
    return Unit("noun", noun=singular(low[-1]), words=tuple(low))


def in_base_units(tree: Expr, unit: Unit | None) -> Expr | None:
    """Multiply a formula by its unit, with base dimensions as symbols; without a unit its letters are the units.

    None if a letter of the formula is no unit.
    """
    if unit is not None:
        return Expr("mul", (tree, numeral(unit.factor), *_dimensions(unit.dimension)))
    if len(tree.symbols) == 2 and "mu" in tree.symbols:
        tree = substitute(tree, "mu", numeral(Fraction(1, 10**6)))
    if not tree.symbols or any((len(name) > 1 and name != "Omega") or name not in UNITS for name in tree.symbols):
        return None
    for name in sorted(tree.symbols):
        tree = substitute(tree, name, Expr("mul", (numeral(UNITS[name].factor), *_dimensions(UNITS[name].dimension))))
    return tree


def _dimensions(dimension: Dimension) -> list[Expr]:
    return [Expr("pow", (Expr("sym", name=f"[{name}]"), numeral(power))) for name, power in dimension]


def singular(word: str) -> str:
    """Return the word without the ending of its plural."""
    if len(word) > 3 and word.endswith("ies"):
        return word[:-3] + "y"
    if len(word) > 3 and word.endswith("s") and not word.endswith("ss"):
        return word[:-1]
    return word


def quantity(tokens: Sequence[Token], *, trusted: bool) -> Shape | None:
    """Read a formula and its unit, if it has one; plus-minus signs make several quantities."""
    if [token.text.casefold() for token in tokens[-2:]] == ["below", "zero"] and len(tokens) > 2:
        found = quantity(tokens[:-2], trusted=trusted)
        return replace(found, expr=-found.expr) if isinstance(found, Quantity) else None
    tokens = _annotated(_without_fraction(tokens))
    head = next((at for at, token in enumerate(tokens[:2]) if token.kind == "unit" and token.text in UNITS), None)
    unit = None if head is None else UNITS[tokens[head].text]
    if head is not None:
        tokens = [*tokens[:head], *tokens[head + 1 :]]
    levels = depths(tokens) or [0] * len(tokens)
    whole = _compound(tokens, levels, trusted) or _scaled(tokens, levels, trusted)
    if whole is not None:
        return whole
    # the place where the words after the number begin
    at = next((at for at in range(1, len(tokens)) if levels[at] == 0 and _begins_unit(tokens, levels, at)), None)
    if at is not None:
        at = _first_letter(tokens, at)
        tree = parse(tokens[:at])
        tail = _unit(tokens[at:], trusted)
        if tree is not None and tail is not None:
            return free_signs(tree, tail if unit is None or tail.kind == "unit" else unit)
    tree = parse(tokens)
    return None if tree is None else free_signs(tree, unit)


def _first_letter(tokens: Sequence[Token], at: int) -> int:
    """Return where a unit begins whose first parts are single letters: ``8.31 J mol^{-1}``, ``4 m/sec``.

    The letters must be units and follow the number directly, so that ``2x cm`` keeps its x.
    """
    start = at
    while start > 1 and (
        (tokens[start - 1].kind == "sym" and tokens[start - 1].text in UNITS)
        or (tokens[start - 1].kind == "op" and tokens[start - 1].text in "*/")
    ):
        start -= 1
    return start if tokens[start - 1].kind in ("num", "rbrace") and tokens[start].kind == "sym" else at


def _annotated(tokens: Sequence[Token]) -> Sequence[Token]:
    """Read ``5 (cm)`` as without brackets, and ``64 (sixty-four)`` as the number."""
    opening = next((at for at, token in enumerate(tokens) if (token.kind, token.text) == ("open", "(")), 0)
    inside = tokens[opening + 1 : -1]
    if not opening or (tokens[-1].kind, tokens[-1].text) != ("close", "("):
        return tokens
    named = word_number([token.text.casefold() for token in inside if token.kind == "word"])
    if named is not None and parse(tokens[:opening]) == numeral(named):
        return tokens[:opening]
    # another number in words would be a second answer
    if named is not None or any(token.kind != "word" for token in inside):
        return tokens
    # 1/(xy), ln(ab) and e^(kt) have a product in their brackets
    letters = all(not token.roman and len(token.text) <= 3 and token.text not in UNITS for token in inside)
    if letters or tokens[opening - 1].kind in ("op", "fn"):
        return tokens
    return [*tokens[:opening], *inside]


def counted_in_words(tokens: Sequence[Token], *, trusted: bool) -> Quantity | None:
    """Read a number in words and a unit: ``two and a half hours``."""
    words = [token.text for token in tokens]
    if any(token.kind != "word" for token in tokens) or len(words) < 2:
        return None
    found = leading_number(words)
    if found is None or found[1] == len(words) or words[found[1]].casefold() in ("of", "to", "and", "or", "out", "in"):
        return None
    unit = unit_phrase(tokens[found[1] :], trusted=trusted)
    if any(word_number((word.casefold(),)) is not None for word in words[found[1] :]):
        return None  # two numbers
    return None if unit is None else Quantity(numeral(found[0]), unit)


_AMOUNT = r"(\d+(?:\.\d+)?)"
_FEET = re.compile(rf"{_AMOUNT} ' {_AMOUNT} (?:' '|\")")
_TIMES = re.compile(
    rf"(?:{_AMOUNT} (?:h|hrs?|hours?)(?: |$))?(?:{_AMOUNT} (?:m|mins?|minutes?)(?: |$))?"
    rf"(?:{_AMOUNT} (?:s|secs?|seconds?))?"
)
_LENGTH, _TIME = Unit("unit", (("L", 1),)), Unit("unit", (("T", 1),))


def _compound(tokens: Sequence[Token], levels: list[int], trusted: bool) -> Shape | None:
    """Read ``1 hour 30 minutes``: a sum of quantities of one kind, the larger unit first."""
    text = said(tokens)
    if feet := _FEET.fullmatch(text):
        return Quantity(numeral((12 * Fraction(feet[1]) + Fraction(feet[2])) * UNITS["inch"].factor), _LENGTH)
    if (times := _TIMES.fullmatch(text)) and len([value for value in times.groups() if value]) > 1:
        parts = zip(times.groups(), (3600, 60, 1), strict=True)
        return Quantity(numeral(sum(size * Fraction(value) for value, size in parts if value)), _TIME)
    ends = [at for at, (one, other) in enumerate(pairwise(tokens), 1) if (one.kind, other.kind) == ("word", "num")]
    starts = [0, *(at for at in ends if levels[at] == 0)]
    if len(starts) < 2:
        return None
    pieces = [tokens[start:end] for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True)]
    parts = complete(quantity(piece, trusted=trusted) for piece in pieces)
    return None if parts is None else added(parts)


def _scaled(tokens: Sequence[Token], levels: list[int], trusted: bool) -> Shape | None:
    """Read ``2.5 million`` and ``3 dozen eggs``, where a word is part of the number."""
    for at, (token, level) in enumerate(zip(tokens, levels, strict=True)):
        word = token.text.casefold() if token.kind == "word" and level == 0 else ""
        scale = SCALES.get(word) or MORE_SCALES.get(word)
        if at and scale is not None:
            tree = parse(tokens[:at])
            unit = _unit(tokens[at + 1 :], trusted) if tokens[at + 1 :] else None
            if tree is None or (tokens[at + 1 :] and unit is None):
                return None
            return free_signs(tree * numeral(scale), unit)
    return None


def _unit(tokens: Sequence[Token], trusted: bool) -> Unit | None:
    if tokens[0].kind == "unit":
        rest = [token.text for token in tokens[1:]]
        if tokens[0].text == "percent" and not rest:
            return PERCENT
        if tokens[0].text == "percent" and all(token.kind == "word" for token in tokens[1:]):
            of = unit_phrase(tokens[1:], trusted=trusted)  # 25% increase
            return replace(PERCENT, noun=of.noun) if of is not None and of.kind == "noun" else None
        if tokens[0].text == "degree" and (not rest or rest in (["C"], ["F"])):
            return DEGREE if not rest else Unit("noun", noun="degree" + rest[0])
        if tokens[0].text in UNITS and not rest:
            return UNITS[tokens[0].text]
        return None
    if tokens[0].text == "^":
        tokens = [token for token in tokens[1:] if token.kind not in ("lbrace", "rbrace")]
    return unit_phrase(tokens, trusted=trusted)


def free_signs(tree: Expr, unit: Unit | None) -> Shape | None:
    """Return the quantity, or the quantities for all choices of its plus-minus signs."""
    trees = signs(tree)
    if trees is None:
        return None
    items = tuple(Quantity(one, unit) for one in trees)
    return items[0] if len(items) == 1 else Several(items, signs=True)


_ARC = ([((("T", 1),), 60)], [((("T", 1),), 60), ((("T", 1),), 1)])


def added(items: Sequence[Shape]) -> Shape | None:
    """Add ``12 minutes and 30 seconds`` to one quantity: units of one kind, each smaller than the one before."""
    found = [(item.expr, item.unit) for item in items if isinstance(item, Quantity) and item.unit is not None]
    if len(found) != len(items) or len(found) < 2:
        return None
    units = [unit for _, unit in found]
    size = Fraction(1)
    if units[0] == DEGREE and [(one.dimension, one.factor) for one in units[1:]] in _ARC:
        units = [Unit("unit", (), Fraction(3600)), *units[1:]]  # minutes and seconds of arc
        size = Fraction(1, 3600)
    elif any(one.kind != "unit" or one.dimension != units[0].dimension for one in units):
        return None
    # the larger unit first: "30 seconds and 12 minutes" are two answers
    if any(small.factor >= large.factor for large, small in pairwise(units)):
        return None
    parts = tuple(numeral(size * unit.factor) * tree for (tree, _), unit in zip(found, units, strict=True))
    return Quantity(Expr("add", parts), Unit("unit", units[0].dimension) if size == 1 else DEGREE)


_SHORT_UNITS = word_set(
    "cm mm km kg ft lb lbs oz min sec hr hrs mph mol per day mL ml yd gal deg pct mi mg kW kJ kN Hz kPa nm dm in sq cu "
    "cc kgs eV keV MeV GeV atm cal kph kmh kHz MHz GHz MPa GPa"
)


def _begins_unit(tokens: Sequence[Token], levels: list[int], at: int) -> bool:
    token = tokens[at]
    if token.kind == "unit":
        return token.text != "degree" or not _degree_inside(tokens, levels, at)
    if token.kind == "word":
        return token.roman or len(token.text) > 3 or token.text in _SHORT_UNITS or token.text in _ORDINALS
    if token.kind == "op":  # 12^{th}
        after = [one.text for one in tokens[at + 1 :] if one.kind not in ("lbrace", "rbrace")]
        return token.text == "^" and after[:1] in (["st"], ["nd"], ["rd"], ["th"])
    letters = [before for before in tokens[:at] if before.kind == "sym" and before.text != "pi"]
    if token.kind != "sym" or letters:
        return False
    rest = tokens[at + 1 :]
    if token.text == "Omega" and not rest:  # 10\Omega
        return True
    if token.text == "mu" and rest and rest[0].roman and "mu" + rest[0].text in UNITS:  # 5\,\mu\mathrm{m}
        return True
    return token.roman and token.text in UNITS


def _degree_inside(tokens: Sequence[Token], levels: list[int], position: int) -> bool:
    """Return whether the degree sign is a factor within a formula, not the unit of all of it."""
    rest = tokens[position + 1 :]
    degrees = [t for t in tokens[:position] if t.kind == "unit"]
    functions = [t for t, level in zip(tokens[:position], levels, strict=False) if t.kind == "fn" and level == 0]
    return bool(degrees or functions) or any(token.kind in ("op", "num", "fn") for token in rest)


def _without_fraction(tokens: Sequence[Token]) -> Sequence[Token]:
    r"""Write a fraction of units after a number, ``9.8 \frac{\text{m}}{\text{s}^2}``, with a slash."""
    at = next((at for at, token in enumerate(tokens) if (token.kind, token.text) == ("cmd", "frac")), 0)
    levels = depths(tokens[at + 1 :]) if at else None
    braces = [at + 1 + place for place, level in enumerate(levels or ()) if level == 0]
    if [tokens[place].kind for place in braces] != ["lbrace", "rbrace"] * 2:
        return tokens
    top, bottom = tokens[at + 2 : braces[1]], tokens[braces[2] + 1 : -1]
    words = [one for one in (*top, *bottom) if one.kind not in ("op", "lbrace", "rbrace", "num")]
    if words and all(one.kind in ("word", "sym") and one.roman for one in words):
        return [*tokens[:at], *top, Token("op", "/"), *bottom]
    return tokens
