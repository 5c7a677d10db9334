r"""Units that are units: names with a dimension and a factor, and the phrases they form.

A single letter is a unit only where it is set upright (``\mathrm{m}``): ``3t`` and ``x+3h`` are products. What
follows a number in words and is no known unit (``17 apples``) is a noun: nothing is converted, and two nouns must
agree in their last word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType

from magicrl.verifiers.maths.expression import Expr, number, substitute
from magicrl.verifiers.maths.lexer import Token
from magicrl.verifiers.maths.words import word_set

Dimension = tuple[tuple[str, int], ...]
"""Base dimensions with their exponents, sorted by name."""


@dataclass(frozen=True, slots=True)
class Unit:
    """What stands after (or before) a number.

    Attributes:
        kind: ``unit`` (of "units" alone the dimension is named ``any``), ``percent``, ``degree``, ``noun`` or
            ``none`` (an ordinal's ending).
        dimension: of a unit.
        factor: size in base units; exact.
        noun: the last word of a noun, singular; of a unit of up to three letters those letters.
        words: all words of a noun, as written.
    """

    kind: str
    dimension: Dimension = ()
    factor: Fraction = Fraction(1)
    noun: str = ""
    words: tuple[str, ...] = ()


PERCENT = Unit("percent", factor=Fraction(1, 100))
DEGREE = Unit("degree")

_PREFIXES = {
    "k": 3, "c": -2, "m": -3, "d": -1, "M": 6, "G": 9, "T": 12, "h": 2, "mu": -6, "n": -9, "p": -12, "f": -15
}  # fmt: skip
_PREFIX_WORDS = {
    "kilo": 3, "centi": -2, "milli": -3, "deci": -1, "deca": 1, "hecto": 2, "mega": 6, "giga": 9, "tera": 12,
    "micro": -6, "nano": -9, "pico": -12, "femto": -15,
}  # fmt: skip


def _table() -> dict[str, tuple[dict[str, int], Fraction]]:
    """Every unit's name: its dimension and its factor."""
    one = Fraction(1)
    table: dict[str, tuple[dict[str, int], Fraction]] = {}

    def add(names: str, dimension: dict[str, int], factor: Fraction | int | str) -> None:
        for name in names.split():
            table[name] = (dimension, Fraction(factor))

    def metric(letters: str, names: str, dimension: dict[str, int], factor: Fraction | int | str) -> None:
        add(f"{letters} {names}", dimension, factor)
        for prefix, power in _PREFIXES.items():
            for letter in letters.split():
                table.setdefault(prefix + letter, (dimension, Fraction(factor) * Fraction(10) ** power))
        for prefix, power in _PREFIX_WORDS.items():
            for name in names.split():
                table[prefix + name] = (dimension, Fraction(factor) * Fraction(10) ** power)

    length, mass, time = {"L": 1}, {"M": 1}, {"T": 1}
    add("min minute minutes mins", time, 60)
    add("hr hrs hour hours", time, 3600)
    add("day days", time, 86400)
    add("week weeks wk wks", time, 7 * 86400)
    add("year years yr yrs", {"Y": 1}, 1)  # months and years have no fixed number of days
    add("month months", {"Y": 1}, Fraction(1, 12))
    metric("m", "meter meters metre metres", length, 1)
    metric("g", "gram grams gm gms", mass, Fraction(1, 1000))
    add("kilo kilos kgs", mass, 1)
    add("angstrom angstroms AA", length, Fraction(1, 10**10))
    metric("s", "second seconds sec secs", time, 1)
    add("h", time, 3600)
    add("inch inches in", length, "0.0254")
    add("foot feet ft", length, "0.3048")
    add("yard yards yd yds", length, "0.9144")
    add("mile miles mi", length, "1609.344")
    add("pound pounds lb lbs", mass, "0.45359237")
    add("ounce ounces oz", mass, "0.028349523125")
    add("ton tons tonne tonnes", {"ton": 1}, 1)  # several tons exist
    metric("L l", "liter liters litre litres", {"L": 3}, Fraction(1, 1000))
    add("gallon gallons gal quart quarts pint pints cup cups", {"gallon": 1}, 1)
    table.update({"quart": ({"gallon": 1}, Fraction(1, 4)), "quarts": ({"gallon": 1}, Fraction(1, 4))})
    table.update({"pint": ({"gallon": 1}, Fraction(1, 8)), "pints": ({"gallon": 1}, Fraction(1, 8))})
    table.update({"cup": ({"cup": 1}, one), "cups": ({"cup": 1}, one)})
    add("acre acres", {"acre": 1}, 1)
    add("hectare hectares ha", {"L": 2}, 10000)
    add("mph", {"L": 1, "T": -1}, Fraction("1609.344") / 3600)
    add("kmh kph kmph", {"L": 1, "T": -1}, Fraction(1000, 3600))
    metric("N", "newton newtons", {"M": 1, "L": 1, "T": -2}, 1)
    metric("J", "joule joules", {"M": 1, "L": 2, "T": -2}, 1)
    metric("W", "watt watts", {"M": 1, "L": 2, "T": -3}, 1)
    metric("Pa", "pascal pascals", {"M": 1, "L": -1, "T": -2}, 1)
    metric("Hz", "hertz", {"T": -1}, 1)
    metric("A", "ampere amperes amp amps", {"I": 1}, 1)
    metric("C", "coulomb coulombs", {"I": 1, "T": 1}, 1)
    metric("V", "volt volts", {"M": 1, "L": 2, "T": -3, "I": -1}, 1)
    metric("F", "farad farads", {"M": -1, "L": -2, "T": 4, "I": 2}, 1)
    metric("eV", "electronvolt electronvolts", {"eV": 1}, 1)
    metric("Omega", "ohm ohms", {"M": 1, "L": 2, "T": -3, "I": -2}, 1)
    add("Nm", {"M": 1, "L": 2, "T": -2}, 1)
    for prefix, watts in (("", 1), ("k", 10**3), ("M", 10**6)):
        add(f"{prefix}Wh", {"M": 1, "L": 2, "T": -2}, 3600 * watts)
    add("K kelvin kelvins", {"K": 1}, 1)
    metric("mol", "mole moles", {"mol": 1}, 1)
    add("M molar", {"mol": 1, "L": -3}, 1000)
    add("mM", {"mol": 1, "L": -3}, 1)
    add("cc ccs", {"L": 3}, Fraction(1, 10**6))
    add("atm atms", {"atm": 1}, 1)
    add("cal cals calorie calories", {"cal": 1}, 1)
    add("kcal kcals", {"cal": 1}, 1000)
    add("$ dollar dollars usd bucks", {"dollar": 1}, 1)
    add("¢ cent cents", {"dollar": 1}, Fraction(1, 100))
    add("€ euro euros eur", {"euro": 1}, 1)
    add("£ gbp", {"pound": 1}, 1)
    add("¥ yuan yen rmb", {"yuan": 1}, 1)
    add("₹ rupee rupees rs", {"rupee": 1}, 1)
    add("rad rads radian radians", {}, 1)
    for prefix in ("k", "h"):
        table.pop(prefix + "h", None)
    table.pop("cup's", None)
    return table


UNITS = MappingProxyType(_table())
_PERCENT = frozenset(("percent", "percentage", "pct", "%"))
_DEGREES = frozenset(("degree", "degrees", "deg"))
_ORDINALS = frozenset(("st", "nd", "rd", "th"))
_ANY = frozenset(("unit", "units"))
_POWERS = frozenset(("square", "sq", "cubic", "cu", "^", "2", "3"))
_DOUBTS = word_set(
    "not no isn't if else unless or and is are was be than more less least most about but maybe perhaps probably "
    "either wrong false incorrect except nor neither instead correct true answer option times"
)
"""Words that change what a number says; with one of them it is no plain quantity."""
_AFTER_NOUNS = word_set("old long tall high wide deep away apart left remaining total altogether each")
_SQUARE = {"square": 2, "squared": 2, "sq": 2, "cubic": 3, "cubed": 3, "cu": 3}
_MAX_WORDS = 6
_IN_PHRASES = frozenset(("word", "sym", "op", "num", "unit", "lbrace", "rbrace", "open", "close"))


def unit_phrase(tokens: Sequence[Token], *, trusted: bool) -> Unit | None:
    """What the tokens after a number say, or None when they are no unit and no noun.

    Args:
        trusted: the text is a gold's: any words count as a noun.
    """
    if any(token.kind not in _IN_PHRASES for token in tokens):
        return None
    words = [token.text.strip(".,") for token in tokens if token.kind not in ("lbrace", "rbrace", "close")]
    words = [word for word in words if word and word != "'"]
    if "(" in words and not _last_quotient(tokens):
        return None
    words = [word for word in words if word != "("]
    if not words:
        return None
    while len(words) > 1 and words[-1].casefold() in _AFTER_NOUNS:
        words.pop()  # 12 years old
    low = [word.casefold() for word in words]
    if low[0] in _ORDINALS and len(low) > 1:
        return unit_phrase([t for t in tokens if t.kind == "word"][1:], trusted=trusted)
    if low[0] in _ORDINALS:
        return Unit("none")
    if any(word in _ANY for word in low) and all(word in _ANY | _POWERS for word in low):
        power = 2 if "2" in low or low[0] in ("square", "sq") else 3 if "3" in low or low[0] in ("cubic", "cu") else 1
        return Unit("unit", (("any", power),))
    if low[0] in _PERCENT or low == ["per", "cent"]:
        return PERCENT if len(low) == 1 or low[0] == "per" else None
    if low[0] in _DEGREES and low[1:] in (["celsius"], ["fahrenheit"], ["c"], ["f"]):
        return Unit("noun", noun="degree" + low[1][0].upper())
    if low[0] in _DEGREES:
        return DEGREE if len(low) == 1 else _noun(tokens, words, trusted)
    return _known(words) or _noun(tokens, words, trusted)


def _last_quotient(tokens: Sequence[Token]) -> bool:
    """``J/(mol K)``: one pair of brackets, at the end, right after the stroke, so that they part nothing else."""
    marks = [at for at, token in enumerate(tokens) if token.kind in ("open", "close")]
    return (
        len(marks) == 2
        and marks[1] == len(tokens) - 1
        and tokens[marks[0]].text == "("
        and (tokens[marks[0] - 1].kind, tokens[marks[0] - 1].text) == ("op", "/")
        and not any(token.text in ("/", "per") for token in tokens[marks[0] :])
    )


def _known(words: list[str]) -> Unit | None:
    """A product and quotient of known units: ``cm^2``, ``square feet``, ``km/h``, ``miles per hour``."""
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
        if word.casefold() in _SQUARE and not word.casefold().endswith("ed"):
            power = _SQUARE[word.casefold()]
            continue
        entry = UNITS.get(word) or (UNITS.get(word.casefold()) if len(word) > 2 else None)
        if entry is None:
            return None
        after, at = _exponent(words, at)
        exponent = sign * power * after
        for name, count in entry[0].items():
            dimension[name] = dimension.get(name, 0) + count * exponent
        factor *= entry[1] ** exponent
        if len(words) == 1 and len(word) <= 3:
            letter = word
        power, found = 1, True
    return Unit("unit", tuple(sorted(item for item in dimension.items() if item[1])), factor, letter) if found else None


def _whole_names(words: list[str]) -> list[str]:
    """Prefixes joined to their units (``k`` and ``Omega``, ``mu`` and ``m``), and ``newton-meters`` as two words."""
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
    """The exponent written after a unit, and where to go on."""
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
    if not trusted and (len(low) > _MAX_WORDS or any(word in _DOUBTS for word in low)):
        return None
    if not all(word.replace("-", "").replace("'", "").isalpha() for word in low):
        return None
    return Unit("noun", noun=singular(low[-1]), words=tuple(low))


def in_base_units(tree: Expr, unit: Unit | None) -> Expr | None:
    """A formula times its unit, with base dimensions as symbols; letters that are units count as such without one.

    None where a letter of the formula is no unit of one letter.
    """
    if unit is not None:
        return Expr("mul", (tree, number(unit.factor), *_dimensions(unit.dimension)))
    if len(tree.symbols) == 2 and "mu" in tree.symbols:
        tree = substitute(tree, "mu", number(Fraction(1, 10**6)))
    if not tree.symbols or any((len(name) > 1 and name != "Omega") or name not in UNITS for name in tree.symbols):
        return None
    for name in sorted(tree.symbols):
        dimension, factor = UNITS[name]
        base = Expr("mul", (number(factor), *_dimensions(tuple(dimension.items()))))
        tree = substitute(tree, name, base)
    return tree


def _dimensions(dimension: Dimension) -> list[Expr]:
    return [Expr("pow", (Expr("sym", name=f"[{name}]"), number(power))) for name, power in dimension]


def singular(word: str) -> str:
    """The word without the ending of its plural."""
    if len(word) > 3 and word.endswith("ies"):
        return word[:-3] + "y"
    if len(word) > 3 and word.endswith("s") and not word.endswith("ss"):
        return word[:-1]
    return word
