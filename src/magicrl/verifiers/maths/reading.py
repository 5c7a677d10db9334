r"""From tokens to the shape of an answer; None where the text is of no shape known here.

Every token must find its place: nothing is skipped to make the rest readable.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product

from magicrl.verifiers.maths import expression
from magicrl.verifiers.maths.answers import (
    Answer,
    Family,
    Group,
    Matrix,
    Named,
    Quantity,
    Ratio,
    RealSet,
    Several,
    Text,
)
from magicrl.verifiers.maths.expression import Expr
from magicrl.verifiers.maths.formulas import parse
from magicrl.verifiers.maths.lexer import Token, tokens_of
from magicrl.verifiers.maths.pieces import (
    based,
    clock_time,
    declared_integer,
    depths,
    number_set,
    split,
    unit_start,
    without_clause,
    words_of,
)
from magicrl.verifiers.maths.relations import added, joined, related
from magicrl.verifiers.maths.spans import united
from magicrl.verifiers.maths.units import DEGREE, PERCENT, UNITS, Unit, unit_phrase
from magicrl.verifiers.maths.words import SCALES, plain_word

_MAX_DEPTH = 12
_MAX_ITEMS = 100
_ABOUT = frozenset(("both", "approximately", "about", "around", "approx", "roughly", "~", "="))
_MATRICES = ("matrix", "pmatrix", "bmatrix", "Bmatrix", "array", "smallmatrix")


@lru_cache(maxsize=4096)
def read(text: str, trusted: bool) -> Answer | None:
    """The shape of an answer in canonical notation; ``trusted`` is for golds."""
    tokens = tokens_of(text)
    if not tokens:
        return None
    return _Reader(trusted).answer(tokens, 0)


class _Reader:
    def __init__(self, trusted: bool) -> None:
        self._trusted = trusted

    def answer(self, tokens: Sequence[Token], depth: int) -> Answer | None:
        """A whole answer: items with separators between, perhaps a clause at the end."""
        levels = depths(tokens)
        if levels is None or depth > _MAX_DEPTH or not tokens:
            return None
        if tokens[0].text.casefold() in _ABOUT and len(tokens) > 1:
            tokens, levels = tokens[1:], levels[1:]
        tokens, levels, parameters = without_clause(tokens, levels)
        if not tokens:
            return None
        if tokens[0].kind == "sym" and len(tokens) > 3 and tokens[1].kind == "bar":
            built = self._set_builder(tokens, depth)  # {x | x > 1} with braces that show nothing
            if built is not None:
                return built
        pieces, separators = split(tokens, levels, "sep")
        if len(pieces) > _MAX_ITEMS:
            return None
        if not separators:
            found = self.item(tokens, levels, depth)
        elif "," in separators and (";" in separators or _named_blocks(pieces, separators)):
            found = self._blocks(tokens, levels, depth)
        else:
            found = self._list(pieces, separators, parameters, depth)
        if found is not None and parameters:
            return Family(found, frozenset(parameters))
        return found

    def _blocks(self, tokens: Sequence[Token], levels: list[int], depth: int) -> Answer | None:
        """``p = 5, q = 2; p = 7, q = 2``: semicolons part what commas join."""
        blocks: list[list[Token]] = [[]]
        for token, level in zip(tokens, levels, strict=True):
            if token.kind == "sep" and token.text in (";", "or") and level == 0:
                blocks.append([])
            else:
                blocks[-1].append(token)
        items = [self.answer(block, depth + 1) for block in blocks if block]
        known = [item for item in items if item is not None]
        return Several(tuple(known)) if len(known) == len(items) > 1 else None

    def _list(
        self, pieces: list[Sequence[Token]], separators: list[str], parameters: set[str], depth: int
    ) -> Answer | None:
        if not pieces[-1] and separators[-1] in ",;":
            pieces, separators = pieces[:-1], separators[:-1]
        items: list[Answer] = []
        kept: list[str] = []
        for position, piece in enumerate(pieces):
            if not piece:
                # ", and": two separators are one
                if separators[position - 1 : position] == [","] and separators[position : position + 1] == ["and"]:
                    continue
                if separators[position - 1 : position] == [","] and separators[position : position + 1] == ["or"]:
                    continue
                return None
            domain = declared_integer(piece)
            if domain and items:
                parameters.add(domain)
                continue
            levels = depths(piece)
            item = self.item(piece, levels, depth + 1) if levels is not None else None
            if item is None:
                return None
            items.append(item)
            kept.append(separators[position] if position < len(separators) else "")
        return joined(items, kept[:-1]) if items else None

    def item(self, tokens: Sequence[Token], levels: list[int], depth: int) -> Answer | None:
        """One item: a relation, a set, a group, a ratio, words, or a quantity."""
        if depth > _MAX_DEPTH:
            return None
        parts, relations = split(tokens, levels, "rel")
        if relations:
            return related(parts, relations, lambda piece: self._again(piece, depth), self._trusted)
        tokens = _taken_away(tokens, levels)
        parts, operations = split(tokens, levels, "cup")
        if operations:
            return united([self._again(part, depth) for part in parts], operations)
        if any(token.kind == "colon" and level == 0 for token, level in zip(tokens, levels, strict=True)):
            return self._with_colon(tokens, levels, depth)
        group = self._bracketed(tokens, levels, depth)
        if group is not None:
            return group
        real = number_set(tokens)
        if real is not None:
            return real
        if all(token.kind == "word" or (token.kind == "op" and token.text == "-") for token in tokens):
            named = self._expression(tokens) if not plain_word(words_of(tokens)) else None
            return named or Text(words_of(tokens))
        if len(tokens) > 1 and tokens[0].text in ("a", "A") and all(token.kind == "word" for token in tokens[1:]):
            return Text(words_of(tokens))  # a circle: no product
        if _starts_in_words(tokens) and all(token.kind in ("word", "sym") for token in tokens):
            return Text(words_of(tokens))  # student B
        if _starts_in_words(tokens) and all(token.kind in ("word", "num") for token in tokens):
            return Text(words_of(tokens))  # June 20
        return based(tokens) or clock_time(tokens) or self.quantity(tokens, levels)

    def _again(self, tokens: Sequence[Token], depth: int) -> Answer | None:
        levels = depths(tokens)
        return self.item(tokens, levels, depth + 1) if levels is not None and tokens else None

    def _bracketed(self, tokens: Sequence[Token], levels: list[int], depth: int) -> Answer | None:
        first, last = tokens[0], tokens[-1]
        if len(tokens) < 2 or first.kind not in ("open", "lbrace", "env") or any(level == 0 for level in levels[1:-1]):
            return None
        inside = tokens[1:-1]
        if first.kind == "env" and (first.text.split()[-1] in ("cases", "aligned", "gathered") or _lined_up(inside)):
            return self._system(inside, depth)
        if first.kind == "env":
            return self._matrix(first.text.split()[-1], inside, depth)
        opening = "{" if first.kind == "lbrace" else first.text
        closing = "{" if last.kind == "rbrace" else last.text
        if not inside:
            return Group(opening, closing, ()) if opening == "{" else None
        if opening == "{" and (built := self._set_builder(inside, depth)) is not None:
            return built
        inner_levels = depths(inside)
        if inner_levels is None or opening in ("floor", "ceil", "|"):
            return None
        pieces, separators = split(inside, inner_levels, "sep")
        if not separators and (opening == closing == "(" or first.kind == "lbrace"):
            return self.item(inside, inner_levels, depth + 1)
        if any(separator not in (",", ";") for separator in separators) or len(pieces) > _MAX_ITEMS:
            return None
        items = [self._again(piece, depth) for piece in pieces]
        return _grouped(opening, closing, items)

    def _set_builder(self, inside: Sequence[Token], depth: int) -> Answer | None:
        r"""``\{x | -2 < x < 3\}``: the condition says it all when it is about one name."""
        levels = depths(inside)
        if levels is None:
            return None
        for position, (token, level) in enumerate(zip(inside, levels, strict=True)):
            if level == 0 and token.kind in ("bar", "colon") and position:
                found = self.answer(inside[position + 1 :], depth + 1)
                head = [t for t in inside[:position] if t.kind == "sym"]
                if isinstance(found, RealSet) and head and found.subject == head[0].text:
                    return RealSet(found.spans)
                inner = found.answer if isinstance(found, Family) else found
                if isinstance(inner, Named) and head and inner.name == head[0].text:
                    value = inner.value
                    return Family(value, found.parameters) if isinstance(found, Family) else value
                return None
        return None

    def _system(self, inside: Sequence[Token], depth: int) -> Answer | None:
        """The rows of a system of equations, as a list; a definition by cases is none."""
        inside = [token for at, token in enumerate(inside) if not _alignment(inside, at)]
        if inside and inside[-1].kind == "cell" and inside[-1].text == "row":
            inside = inside[:-1]
        if any(token.kind == "cell" and token.text == "column" for token in inside):
            return None
        commas = [Token("sep", ",") if token.kind == "cell" else token for token in inside]
        return self.answer(commas, depth + 1)

    def _matrix(self, name: str, inside: Sequence[Token], depth: int) -> Answer | None:
        levels = depths(inside)
        if name not in _MATRICES or levels is None:
            return None
        rows: list[list[list[Token]]] = [[[]]]
        for token, level in zip(inside, levels, strict=True):
            if token.kind == "cell" and level == 0:
                if token.text == "row":
                    rows.append([[]])
                else:
                    rows[-1].append([])
            else:
                rows[-1][-1].append(token)
        if rows[-1] == [[]]:
            rows.pop()
        read_rows: list[tuple[Answer, ...]] = []
        for row in rows:
            cells = [self._again(cell, depth) for cell in row]
            if any(cell is None for cell in cells):
                return None
            read_rows.append(tuple(cell for cell in cells if cell is not None))
        return Matrix(tuple(read_rows)) if len({len(row) for row in read_rows}) == 1 else None

    def _with_colon(self, tokens: Sequence[Token], levels: list[int], depth: int) -> Answer | None:
        """A clock time, a ratio, or a label and its value."""
        clock = clock_time(tokens)
        if clock is not None:
            return clock
        parts, _ = split(tokens, levels, "colon")
        exprs = [parse(part) for part in parts]
        formulas = [expr for expr in exprs if expr is not None]
        if len(formulas) == len(exprs):
            return Ratio(tuple(formulas))
        if len(parts) == 2 and parts[0] and all(token.kind == "word" for token in parts[0]):
            value = self._again(parts[1], depth)
            return None if value is None else Named(" ".join(words_of(parts[0])), (), value)
        return None

    def _expression(self, tokens: Sequence[Token]) -> Answer | None:
        tree = parse(tokens)
        return None if tree is None else _free_signs(tree, None)

    def quantity(self, tokens: Sequence[Token], levels: list[int]) -> Answer | None:
        """A formula and its unit."""
        unit: Unit | None = None
        head = [position for position, token in enumerate(tokens[:2]) if token.kind == "unit" and token.text in UNITS]
        if head:
            entry = UNITS[tokens[head[0]].text]
            unit = Unit("unit", tuple(sorted(entry[0].items())), entry[1])
            levels = [level for position, level in enumerate(levels) if position != head[0]]
            tokens = [token for position, token in enumerate(tokens) if position != head[0]]
        compound = self._compound(tokens, levels)
        if compound is not None:
            return compound
        scaled = self._scaled(tokens, levels)
        if scaled is not None:
            return scaled
        at = unit_start(tokens, levels)
        if at is not None:
            tree = parse(tokens[:at])
            tail = self._unit(tokens[at:])
            if tree is not None and tail is not None:
                return _free_signs(tree, tail if unit is None or tail.kind == "unit" else unit)
        tree = parse(tokens)
        return None if tree is None else _free_signs(tree, unit)

    def _compound(self, tokens: Sequence[Token], levels: list[int]) -> Answer | None:
        """``1 hour 30 minutes``: a sum of quantities of one kind, the larger unit first."""
        starts = [0]
        for position in range(1, len(tokens)):
            if tokens[position].kind == "num" and tokens[position - 1].kind == "word" and levels[position] == 0:
                starts.append(position)
        if len(starts) < 2:
            return None
        pieces = [tokens[start:end] for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True)]
        parts = [self.quantity(piece, depths(piece) or [0] * len(piece)) for piece in pieces]
        return added([part for part in parts if part is not None]) if None not in parts else None

    def _scaled(self, tokens: Sequence[Token], levels: list[int]) -> Answer | None:
        """``2.5 million``, ``3 dozen eggs``: the word is part of the number."""
        for at, (token, level) in enumerate(zip(tokens, levels, strict=True)):
            scale = SCALES.get(token.text.casefold()) if token.kind == "word" and level == 0 else None
            if at and scale is not None:
                tree = parse(tokens[:at])
                unit = self._unit(tokens[at + 1 :]) if tokens[at + 1 :] else None
                if tree is None or (tokens[at + 1 :] and unit is None):
                    return None
                return _free_signs(Expr("mul", (tree, expression.number(scale))), unit)
        return None

    def _unit(self, tokens: Sequence[Token]) -> Unit | None:
        if tokens[0].kind == "unit":
            rest = [token.text for token in tokens[1:]]
            if tokens[0].text == "percent" and not rest:
                return PERCENT
            if tokens[0].text == "degree" and (not rest or rest in (["C"], ["F"])):
                return DEGREE if not rest else Unit("noun", noun="degree" + rest[0])
            if tokens[0].text in UNITS and not rest:
                entry = UNITS[tokens[0].text]
                return Unit("unit", tuple(sorted(entry[0].items())), entry[1])
            return None
        if tokens[0].text == "^":
            tokens = [token for token in tokens[1:] if token.kind not in ("lbrace", "rbrace")]
        return unit_phrase(tokens, trusted=self._trusted)


def _free_signs(tree: Expr, unit: Unit | None) -> Answer | None:
    trees = expression.signs(tree)
    if trees is None:
        return None
    items = tuple(Quantity(one, unit) for one in trees)
    return items[0] if len(items) == 1 else Several(items, signs=True)


def _grouped(opening: str, closing: str, items: Sequence[Answer | None]) -> Answer | None:
    """A group; plus-minus signs in a tuple stand for several tuples."""
    read_items = [item for item in items if item is not None]
    if len(read_items) != len(items):
        return None
    if opening == closing == "{":
        flat = [part for item in read_items for part in (item.items if isinstance(item, Several) else (item,))]
        return Group("{", "{", tuple(flat))
    choices = [item.items if isinstance(item, Several) and item.signs else (item,) for item in read_items]
    count = 1
    for choice in choices:
        count *= len(choice)
    if count > _MAX_ITEMS:
        return None
    groups = tuple(Group(opening, closing, chosen) for chosen in product(*choices))
    return groups[0] if len(groups) == 1 else Several(groups, signs=True)


def _taken_away(tokens: Sequence[Token], levels: list[int]) -> Sequence[Token]:
    r"""A minus sign before a set takes its members away: ``\mathbb{R} - \{0\}``."""
    taken = [
        at
        for at in range(1, len(tokens) - 1)
        if levels[at] == 0 and (tokens[at].kind, tokens[at].text) == ("op", "-") and tokens[at + 1].text == "{"
        and tokens[at + 1].kind == "open"
    ]  # fmt: skip
    return [Token("cup", "setminus") if at in taken else token for at, token in enumerate(tokens)] if taken else tokens


def _lined_up(inside: Sequence[Token]) -> bool:
    """Whether every row of a table is a relation: then it is a system and no matrix."""
    rows: list[list[str]] = [[]]
    for token in inside:
        if token.text == "row" and token.kind == "cell":
            rows.append([])
        else:
            rows[-1].append(token.kind)
    return len([row for row in rows if row]) > 1 and all("rel" in row for row in rows if row)


def _named_blocks(pieces: Sequence[Sequence[Token]], separators: Sequence[str]) -> bool:
    """``x = 2, y = 1 or x = 1, y = 2``: every piece gives a value to a name, ``or`` parts the solutions."""
    named = all(any(token.kind == "rel" and token.text == "=" for token in piece) for piece in pieces)
    return named and "or" in separators and separators.count(",") > separators.count("or")


def _alignment(tokens: Sequence[Token], at: int) -> bool:
    """Whether a column's mark stands beside a relation, where it only lines the rows up."""
    beside = [*tokens[max(0, at - 1) : at], *tokens[at + 1 : at + 2]]
    return tokens[at].kind == "cell" and tokens[at].text == "column" and any(one.kind == "rel" for one in beside)


def _starts_in_words(tokens: Sequence[Token]) -> bool:
    return tokens[0].kind == "word" and (tokens[0].roman or len(tokens[0].text) > 2)
