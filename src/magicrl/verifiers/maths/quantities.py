"""A formula and its unit, read from tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from magicrl.verifiers.maths import expression
from magicrl.verifiers.maths.answers import Answer, Quantity, Several
from magicrl.verifiers.maths.expression import Expr, number
from magicrl.verifiers.maths.formulas import parse
from magicrl.verifiers.maths.lexer import Token
from magicrl.verifiers.maths.numerals import SCALES, leading_number, word_number
from magicrl.verifiers.maths.pieces import depths, unit_start, without_fraction
from magicrl.verifiers.maths.units import DEGREE, PERCENT, UNITS, Unit, unit_phrase


def quantity(tokens: Sequence[Token], levels: list[int], *, trusted: bool) -> Answer | None:
    """A formula and its unit, if any; plus-minus signs make several."""
    unit: Unit | None = None
    tokens, levels = without_fraction(tokens, levels)
    tokens, levels = _annotated(tokens, levels)
    head = [position for position, token in enumerate(tokens[:2]) if token.kind == "unit" and token.text in UNITS]
    if head:
        entry = UNITS[tokens[head[0]].text]
        unit = Unit("unit", tuple(sorted(entry[0].items())), entry[1])
        levels = [level for position, level in enumerate(levels) if position != head[0]]
        tokens = [token for position, token in enumerate(tokens) if position != head[0]]
    compound = _compound(tokens, levels, trusted)
    if compound is not None:
        return compound
    scaled = _scaled(tokens, levels, trusted)
    if scaled is not None:
        return scaled
    at = unit_start(tokens, levels)
    if at is not None:
        at = _first_letter(tokens, at)
        tree = parse(tokens[:at])
        tail = _unit(tokens[at:], trusted)
        if tree is not None and tail is not None:
            return free_signs(tree, tail if unit is None or tail.kind == "unit" else unit)
    tree = parse(tokens)
    return None if tree is None else free_signs(tree, unit)


def _first_letter(tokens: Sequence[Token], at: int) -> int:
    """Where a unit begins whose first parts are single letters: ``8.31 J mol^{-1}``, ``4 m/sec``.

    Only right behind a number and only letters of units, so that ``2x cm`` keeps its x.
    """
    start = at
    while start > 1 and (
        (tokens[start - 1].kind == "sym" and tokens[start - 1].text in UNITS)
        or (tokens[start - 1].kind == "op" and tokens[start - 1].text in "*/")
    ):
        start -= 1
    return start if tokens[start - 1].kind in ("num", "rbrace") and tokens[start].kind == "sym" else at


def _annotated(tokens: Sequence[Token], levels: list[int]) -> tuple[Sequence[Token], list[int]]:
    """``5 (cm)``: a unit or a noun in brackets as if there were none."""
    opening = max((at for at, level in enumerate(levels[:-1]) if level == 0), default=0)
    inside = tokens[opening + 1 : -1]
    if not opening or (tokens[opening].kind, tokens[-1].kind, tokens[-1].text) != ("open", "close", "("):
        return tokens, levels
    said = word_number([token.text.casefold() for token in inside if token.kind == "word"])
    number_before = opening == 1 and tokens[0].kind == "num" and parse(tokens[:1])
    if said is not None and number_before and number_before.value == said:
        return tokens[:opening], levels[:opening]  # 64 (sixty-four)
    if not inside or any(token.kind != "word" for token in inside):
        return tokens, levels
    return [*tokens[:opening], *inside], [*levels[:opening], *(0 for _ in inside)]


def counted_in_words(tokens: Sequence[Token], *, trusted: bool) -> Quantity | None:
    """``two and a half hours``: a number in words, then a unit."""
    words = [token.text for token in tokens]
    if any(token.kind != "word" for token in tokens) or len(words) < 2:
        return None
    found = leading_number(words)
    if found is None or found[1] == len(words) or words[found[1]].casefold() in ("of", "to", "and", "or", "out", "in"):
        return None
    unit = unit_phrase(tokens[found[1] :], trusted=trusted)
    if any(word_number((word.casefold(),)) is not None for word in words[found[1] :]):
        return None  # two numbers
    return None if unit is None else Quantity(number(found[0]), unit)


def _compound(tokens: Sequence[Token], levels: list[int], trusted: bool) -> Answer | None:
    """``1 hour 30 minutes``: a sum of quantities of one kind, the larger unit first."""
    abbreviated = _abbreviated(tokens)
    if abbreviated is not None:
        return abbreviated
    starts = [0]
    for position in range(1, len(tokens)):
        if tokens[position].kind == "num" and tokens[position - 1].kind == "word" and levels[position] == 0:
            starts.append(position)
    if len(starts) < 2:
        return None
    pieces = [tokens[start:end] for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True)]
    parts = [quantity(piece, depths(piece) or [0] * len(piece), trusted=trusted) for piece in pieces]
    return added([part for part in parts if part is not None]) if None not in parts else None


_SHORT_COMPOUNDS = (
    (("h", "hr", "hrs", "hour", "hours"), 3600), (("m", "min", "mins", "minute", "minutes"), 60),
    (("s", "sec", "secs", "second", "seconds"), 1),
)  # fmt: skip


def _abbreviated(tokens: Sequence[Token]) -> Quantity | None:
    """``2 h 30 min``, ``2h30m``, and feet and inches as ``5'6"``: a letter or mark after each of several numbers."""
    kinds = [token.kind for token in tokens]
    if len(tokens) not in (4, 5, 6) or kinds[0] != "num" or kinds[2] != "num":
        return None
    marks = [token.text for token in tokens]
    if marks[1] == "'" and (marks[3:] in (["'", "'"], ['"'])):
        inches = Expr("add", (Expr("mul", (number(12), _single(marks[0]))), _single(marks[2])))
        return Quantity(Expr("mul", (inches, number(UNITS["inch"][1]))), Unit("unit", (("L", 1),)))
    if len(tokens) not in (4, 6) or any(
        kinds[at] != "num" or kinds[at + 1] == "num" for at in range(0, len(tokens), 2)
    ):
        return None
    found = [next((size for names, size in _SHORT_COMPOUNDS if mark in names), 0) for mark in marks[1::2]]
    if 0 in found or any(small >= large for large, small in pairwise(found)) or found[0] == 1:
        return None
    parts = [Expr("mul", (number(size), tree)) for size, tree in zip(found, map(_single, marks[::2]), strict=True)]
    return Quantity(Expr("add", tuple(parts)), Unit("unit", (("T", 1),)))


def _single(digits: str) -> Expr:
    return parse([Token("num", digits)]) or number(0)


def _scaled(tokens: Sequence[Token], levels: list[int], trusted: bool) -> Answer | None:
    """``2.5 million``, ``3 dozen eggs``: the word is part of the number."""
    for at, (token, level) in enumerate(zip(tokens, levels, strict=True)):
        scale = SCALES.get(token.text.casefold()) if token.kind == "word" and level == 0 else None
        if at and scale is not None:
            tree = parse(tokens[:at])
            unit = _unit(tokens[at + 1 :], trusted) if tokens[at + 1 :] else None
            if tree is None or (tokens[at + 1 :] and unit is None):
                return None
            return free_signs(Expr("mul", (tree, number(scale))), unit)
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
            entry = UNITS[tokens[0].text]
            return Unit("unit", tuple(sorted(entry[0].items())), entry[1])
        return None
    if tokens[0].text == "^":
        tokens = [token for token in tokens[1:] if token.kind not in ("lbrace", "rbrace")]
    return unit_phrase(tokens, trusted=trusted)


def free_signs(tree: Expr, unit: Unit | None) -> Answer | None:
    """The quantity, or the quantities that its plus-minus signs stand for."""
    trees = expression.signs(tree)
    if trees is None:
        return None
    items = tuple(Quantity(one, unit) for one in trees)
    return items[0] if len(items) == 1 else Several(items, signs=True)


def added(items: Sequence[Answer]) -> Answer | None:
    """``12 minutes and 30 seconds`` as one quantity: units of one kind, each smaller than the one before."""
    quantities = [item for item in items if isinstance(item, Quantity)]
    arc = _arc(quantities) if len(quantities) == len(items) else None
    if arc is not None:
        return arc
    units = [item.unit for item in quantities if item.unit is not None and item.unit.kind == "unit"]
    if len(units) != len(items) or len(units) < 2 or len({unit.dimension for unit in units}) != 1:
        return None
    if any(small.factor >= large.factor for large, small in pairwise(units)):
        return None
    parts = [Expr("mul", (number(unit.factor), item.expr)) for unit, item in zip(units, quantities, strict=True)]
    return Quantity(Expr("add", tuple(parts)), Unit("unit", units[0].dimension))


def _arc(items: Sequence[Quantity]) -> Quantity | None:
    """Degrees, minutes and seconds of arc."""
    if len(items) < 2 or items[0].unit != DEGREE:
        return None
    factors = [item.unit.factor for item in items[1:] if item.unit is not None and item.unit.dimension == (("T", 1),)]
    if len(factors) != len(items) - 1 or factors not in ([60], [60, 1]):
        return None
    parts = [Expr("mul", (number(factor / 3600), item.expr)) for factor, item in zip(factors, items[1:], strict=True)]
    return Quantity(Expr("add", (items[0].expr, *parts)), DEGREE)
