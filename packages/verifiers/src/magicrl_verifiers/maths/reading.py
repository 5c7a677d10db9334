r"""Reader of answers: from tokens to a shape; None for a text of no known shape.

No token is skipped to make the rest readable. The last way to read a text is as a sentence with formulas in it
(``circle with center (1,2) and radius 3``), which is compared word for word.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache, reduce
from itertools import groupby, pairwise, product
from math import prod

from magicrl_verifiers.maths.answers import (
    ALL_REALS,
    Brackets,
    Domain,
    Expr,
    Family,
    Fixed,
    Matrix,
    Named,
    Piecewise,
    Quantity,
    Ratio,
    RealSet,
    Sentence,
    Several,
    Shape,
    Text,
    Within,
    complete,
    numeral,
    substitute,
    unitless,
)
from magicrl_verifiers.maths.equality import same_value
from magicrl_verifiers.maths.formulas import parse
from magicrl_verifiers.maths.literals import plain_word, word_set
from magicrl_verifiers.maths.notation import ELLIPSES, Token, lex
from magicrl_verifiers.maths.phrases import (
    NOTHING,
    Declared,
    based,
    clock_time,
    closed_phrase,
    date_of,
    declaration,
    depths,
    in_symbols,
    labelled_parts,
    number_domain,
    out_of,
    said,
    split_at,
    stated,
    without_clause,
    without_lead,
    words_of,
)
from magicrl_verifiers.maths.quantities import counted_in_words, free_signs, quantity, singular
from magicrl_verifiers.maths.relations import (
    congruent,
    join_items,
    name_of,
    point_label,
    related,
    united,
    whole_numbers,
)
from magicrl_verifiers.maths.sequences import continued, expanded


def _is_dots(piece: Sequence[Token]) -> bool:
    return len(piece) == 1 and piece[0].kind == "cmd" and piece[0].text in ELLIPSES


def dotted_list(pieces: Sequence[Sequence[Token]], at: int) -> Shape | None:
    """Return the list whose item ``at`` is dots; None when the items show no rule."""
    shown = complete(parse(piece) for piece in (*pieces[:at], *pieces[at + 1 :]) if piece)
    found = None if shown is None else continued(shown[:at], shown[at:])
    items = None if found is None else expanded(found)
    return found if items is None else Several(tuple(items))


_AXES = "ijk"


def unit_vectors(tokens: Sequence[Token]) -> Brackets | None:
    r"""Read ``3\\mathbf{i} - 4\\mathbf{j}``: it needs the second or third unit vector, bold or with an accent."""
    accented = parse(tokens)
    if accented is not None and (found := _components(accented, ("hat", "vec", "bar"))) is not None:
        return found
    if not any(token.kind == "sym" and token.roman and token.text in ("j", "k") for token in tokens):
        return None
    bold = [
        Token("sym", "unit:" + token.text) if token.kind == "sym" and token.roman and token.text in _AXES else token
        for token in tokens
    ]
    tree = parse(bold)
    return None if tree is None else _components(tree, ("unit",))


def _components(tree: Expr, marks: Sequence[str]) -> Brackets | None:
    """Return the components of a formula that is linear in unit vectors."""
    found = [(axis, f"{mark}:{axis}") for mark in marks for axis in _AXES if tree.holds("sym", f"{mark}:{axis}")]
    names = dict(found)
    if len(names) < len(found) or not set(names) & {"j", "k"}:
        return None

    def along(axis: str) -> Expr:
        return reduce(lambda part, one: substitute(part, names[one], numeral(int(one == axis))), names, tree)

    total = Expr("add", tuple(along(axis) * Expr("sym", name=name) for axis, name in names.items()))
    # no part of the formula may be left over
    if same_value(tree, total) is not True:
        return None
    # without k it is a vector of the plane
    return Brackets("<", "<", tuple(Quantity(along(axis)) for axis in (_AXES if "k" in names else "ij")))


MAX_ITEMS = 100
_MATRICES = ("matrix", "pmatrix", "bmatrix", "Bmatrix", "array", "smallmatrix")
_SYSTEMS = ("cases", "aligned", "gathered", "rcases", "dcases")
_CONDITION_WORDS = word_set("if for when where")
_ELSE = (["otherwise"], ["else"], ["if", "otherwise"])


def bracketed(tokens: Sequence[Token], levels: list[int], reader: _Reader, depth: int) -> Shape | None:
    """Read a group, a set, a system, a matrix or an item in parentheses; None if no bracket encloses all tokens."""
    first, inside = tokens[0], tokens[1:-1]
    if len(tokens) < 2 or first.kind not in ("open", "env") or any(level == 0 for level in levels[1:-1]):
        return None
    # rows of relations are a system, whatever the environment is called
    if first.kind == "env" and (first.text.split()[-1] in _SYSTEMS or _lined_up(inside)):
        return _piecewise(inside, reader, depth) or _system(inside, reader, depth)
    if first.kind == "env":
        if first.text.split()[-1] not in _MATRICES or depths(inside) is None:
            return None
        rows = [complete(reader.item(cell, depth + 1) for cell in row) for row in _rows(inside)]
        known = complete(rows)
        return Matrix(tuple(map(tuple, known))) if known and len(set(map(len, known))) == 1 else None
    opening, closing = first.text, tokens[-1].text
    if not inside:
        return Brackets(opening, closing, ()) if opening == "{" else None
    if opening == "{" and (built := set_builder(inside, reader, depth)) is not None:
        return built
    inner_levels = depths(inside)
    if inner_levels is None or opening in ("floor", "ceil", "|"):
        return None
    pieces, separators = split_at(inside, inner_levels, "sep")
    # one item in parentheses is the item
    if not separators and opening == closing == "(":
        return reader.item(inside, depth + 1)
    if any(separator not in (",", ";") for separator in separators) or len(pieces) > MAX_ITEMS:
        return None
    dots = next((at for at, piece in enumerate(pieces) if _is_dots(piece)), None)
    if dots is None:
        return _grouped(opening, closing, [reader.item(piece, depth + 1) for piece in pieces])
    whole = dotted_list(pieces, dots)
    return _grouped(opening, closing, list(whole.items) if isinstance(whole, Several) else [whole])


def set_builder(inside: Sequence[Token], reader: _Reader, depth: int) -> Shape | None:
    r"""Read ``\{x | -2 < x < 3\}``, whose condition is about one name, or ``\{2k : k \in Z\}``."""
    levels = depths(inside)
    if levels is None:
        return None
    bar = next(
        (
            at
            for at, token in enumerate(inside)
            if at and levels[at] == 0 and (token.kind in ("bar", "colon") or token.text == ";")
        ),
        None,
    )
    if bar is None:
        return None
    head, condition = inside[:bar], inside[bar + 1 :]
    declared = declaration(condition)
    # {2k : k in Z}: the condition only gives the domain of the letter
    if declared[0]:
        member = reader.item(head, depth + 1)
        if isinstance(member, Quantity) and member.expr.op == "sym" and member.expr.name in declared[0]:
            return _domain(condition)
        return None if member is None else Family(member, *declared)
    name = next((token.text for token in head if token.kind == "sym"), "")
    found, domain = reader.answer(condition, depth + 1), _domain(head)
    return None if not name or found is None or domain is None else _within(domain, name, found)


def _domain(head: Sequence[Token]) -> Shape | None:
    """Return the set that a set builder takes its members from; the reals if it names none."""
    at = next((at for at, token in enumerate(head) if token.kind == "rel"), None)
    if at is None:
        return ALL_REALS
    return number_domain(head[at + 1 :]) if head[at].text == "in" else None


def _within(domain: Shape, name: str, found: Shape) -> Shape | None:
    plain: Shape | None = None
    if isinstance(found, RealSet) and found.subject == name:
        plain = RealSet(found.spans)
    inner = found.answer if isinstance(found, Family) else found
    if isinstance(inner, Named) and inner.name == name:
        plain = Family(inner.value, found.parameters, found.domain) if isinstance(found, Family) else inner.value
    if plain is None or (isinstance(domain, RealSet) and len(domain.spans) == 1 and domain.spans[0].low.op == "neg"):
        return plain
    if isinstance(domain, Domain) and isinstance(plain, RealSet):
        # a small number of whole numbers is a list
        members = whole_numbers(plain, domain.name)
        if members is not None:
            return Brackets("{", "{", tuple(Quantity(numeral(member)) for member in members))
        return Within(domain.name, plain)
    return None


def _piecewise(inside: Sequence[Token], reader: _Reader, depth: int) -> Shape | None:
    """Read a definition by cases: a value, then its condition, in every row."""
    pieces: list[tuple[Shape, Shape | None]] = []
    for row in _rows(inside):
        cells = [cell for cell in row if cell]
        if len(cells) != 2:
            return None
        # a comma or full stop may end a cell
        value, condition = (cell[:-1] if cell[-1].kind == "sep" or cell[-1].text == "." else cell for cell in cells)
        words = [token.text.casefold() for token in condition]
        while condition and condition[0].kind == "word" and condition[0].text.casefold() in _CONDITION_WORDS:
            condition = condition[1:]
        read = reader.item(value, depth + 1) if value else None
        if read is None:
            return None
        if words in _ELSE:
            pieces.append((read, None))
            continue
        where = reader.answer(condition, depth + 1) if condition else None
        if where is None or isinstance(where, Quantity):
            return None
        pieces.append((read, where))
    conditions = [condition for _, condition in pieces]
    # only the last case may be "otherwise"
    return Piecewise(tuple(pieces)) if len(pieces) > 1 and None not in conditions[:-1] else None


def _rows(inside: Sequence[Token]) -> list[list[Sequence[Token]]]:
    """Return the cells of a table, row by row, without an empty last row."""
    cells, ends = split_at(inside, depths(inside) or [0] * len(inside), "cell")
    rows: list[list[Sequence[Token]]] = [[]]
    for cell, end in zip(cells, [*ends, ""], strict=True):
        rows[-1].append(cell)
        if end == "row":
            rows.append([])
    return rows if any(rows[-1]) and rows[-1] != [[]] else rows[:-1]


def _system(inside: Sequence[Token], reader: _Reader, depth: int) -> Shape | None:
    """Read the rows of a system of equations as a list."""
    joined: list[Token] = []
    for row in _rows(inside):
        # a column that only aligns the rows has a relation next to its mark
        if any("rel" not in [token.kind for token in (*left[-1:], *right[:1])] for left, right in pairwise(row)):
            return None
        line = [token for cell in row for token in cell]
        joined += [*(line[:-1] if line and line[-1].kind == "sep" else line), Token("sep", ",")]
    return reader.answer(joined[:-1], depth + 1)


def _grouped(opening: str, closing: str, items: Sequence[Shape | None]) -> Shape | None:
    """Build a group; a tuple with plus-minus signs becomes several tuples."""
    known = complete(items)
    if known is None:
        return None
    if opening == closing == "{":
        flat = [part for item in known for part in (item.items if isinstance(item, Several) else (item,))]
        return Brackets("{", "{", tuple(flat))
    choices = [item.items if isinstance(item, Several) and item.signs else (item,) for item in known]
    # every sign doubles the tuples
    if prod(map(len, choices)) > MAX_ITEMS:
        return None
    groups = tuple(Brackets(opening, closing, chosen) for chosen in product(*choices))
    return groups[0] if len(groups) == 1 else Several(groups, signs=True)


def _lined_up(inside: Sequence[Token]) -> bool:
    """Return whether every row of a table is a relation: then it is a system and no matrix."""
    filled = [tokens for row in _rows(inside) if (tokens := [token for cell in row for token in cell])]
    return len(filled) > 1 and all(any(token.kind == "rel" for token in row) for row in filled)


_CYCLES = re.compile(r"(?:\( \d+(?: \d+)+ \( ?)+")  # a closing bracket is spelled as its partner


def cycles(tokens: Sequence[Token]) -> Fixed | None:
    """Read a permutation in cycles: ``(1 2 3)(4 5)``."""
    text = said(tokens)
    found = [tuple(cycle.split()) for cycle in re.findall(r"\( ([\d ]+) \(", text)] if _CYCLES.fullmatch(text) else []
    members = [member for cycle in found for member in cycle]
    if not found or len(set(members)) != len(members):
        return None
    # a cycle may begin anywhere, and cycles commute: the smallest member comes first, and cycles are sorted
    turned = [cycle[at:] + cycle[:at] for cycle in found for at in [cycle.index(min(cycle, key=int))]]
    return Fixed(tuple(sorted(turned)))


def transposed(tokens: Sequence[Token], levels: list[int], reader: _Reader, depth: int) -> Shape | None:
    r"""Read ``(1,2,3)^T`` as a column, and a transposed matrix."""
    ends = [at for at, level in enumerate(levels) if level == 0 and (tokens[at].kind, tokens[at].text) == ("op", "^")]
    mark = [token.text for token in tokens[ends[0] + 1 :] if token.kind not in ("lbrace", "rbrace")] if ends else []
    if len(ends) != 1 or mark not in (["T"], ["top"], ["t"], ["mathsf", "T"], ["intercal"], ["prime"]):
        return None
    inner = reader.item(tokens[: ends[0]], depth + 1)
    if isinstance(inner, Matrix):
        return Matrix(tuple(zip(*inner.rows, strict=True)))
    if isinstance(inner, Brackets) and {inner.opening, inner.closing} <= {"(", "[", "<"} and mark != ["prime"]:
        return Matrix(tuple((item,) for item in inner.items))
    return None


def scaled_matrix(tokens: Sequence[Token], levels: list[int], reader: _Reader, depth: int) -> Shape | None:
    r"""Multiply every entry by the factor in ``\frac12 \begin{pmatrix} .. \end{pmatrix}``."""
    begin = next((at for at, token in enumerate(tokens) if token.kind == "env" and levels[at] == 0), None)
    if not begin or tokens[-1].kind != "env":
        return None
    head = tokens[:begin]
    factor = numeral(-1) if [token.text for token in head] == ["-"] else parse(head)
    matrix = reader.item(tokens[begin:], depth + 1)
    if factor is None or not isinstance(matrix, Matrix):
        return None
    rows = complete(complete(map(unitless, row)) for row in matrix.rows)
    return Matrix(tuple(tuple(Quantity(factor * cell) for cell in row) for row in rows)) if rows else None


_UNSAID = word_set("a an the all any every of that is are it its this which at interval point")
_SPELLINGS = {"centre": "center", "centred": "centered", "colour": "color", "metre": "meter", "litre": "liter"}
_MOST_PARTS = 40


_MAX_DEPTH = 12
_ABOUT = frozenset(("both", "either", "approximately", "about", "around", "approx", "roughly", "exactly", "~", "="))
_EXCEPT = (["except"], ["except", "for"], ["excluding"], ["but"], ["other", "than"], ["without"])


@lru_cache(maxsize=4096)
def read(text: str, trusted: bool) -> Shape | None:
    """Return the shape of an answer in canonical notation; ``trusted`` is for reference answers."""
    tokens = in_symbols(lex(text) or ())
    found = _shape_of(tokens, trusted)
    if found is None and any(token.kind == "word" for token in tokens):

        def kind(placed: tuple[Token, int]) -> str:
            token, level = placed
            # a lone letter between words is an article or a name, and reads as a formula too
            word = token.kind == "word" and (token.roman or len(token.text) > 1)
            return token.kind if not level and (word or token.kind == "sep") else "formula"

        parts: list[str | Shape] = []
        for what, run in groupby(zip(tokens, depths(tokens) or (), strict=False), key=kind):
            piece = [token for token, _ in run]
            if what == "word":
                low = [token.text.casefold().strip(".,") for token in piece]
                parts += [word for one in low if (word := singular(_SPELLINGS.get(one, one))) not in _UNSAID]
            elif what == "sep":
                parts += [token.text for token in piece if token.text not in ",;"]
            elif (formula := _shape_of(piece, trusted)) is not None:
                parts.append(formula)
            else:
                return None
        words = sum(isinstance(part, str) for part in parts)
        return Sentence(tuple(parts)) if 0 < words < len(parts) <= _MOST_PARTS else None
    return found


def _shape_of(tokens: Sequence[Token], trusted: bool) -> Shape | None:
    tokens = list(tokens)
    if not any(token.kind == "env" for token in tokens):  # lines outside a table are a list
        tokens = [Token("sep", ",") if (token.kind, token.text) == ("cell", "row") else token for token in tokens]
    return _Reader(trusted).answer(tokens, 0)


class _Reader:
    def __init__(self, trusted: bool) -> None:
        self._trusted = trusted

    def answer(self, tokens: Sequence[Token], depth: int) -> Shape | None:
        """Read a whole answer: items with separators between them, perhaps a clause at the end."""
        levels = depths(tokens)
        if levels is None or depth > _MAX_DEPTH or not tokens:
            return None
        if tokens[0].text.casefold() in _ABOUT and len(tokens) > 1:
            tokens, levels = tokens[1:], levels[1:]
        whole = date_of(tokens) or self._labelled(tokens, levels, depth)
        if whole is None and any((token.kind, token.text) == ("cmd", "pmod") for token in tokens):
            whole = congruent(tokens, levels, lambda part: self.item(part, depth + 1))
        if whole is not None:
            return whole
        tokens = out_of(without_lead(tokens))
        levels = depths(tokens) or levels
        without = self._except(tokens, depth)
        if without is not None:
            return without
        tokens, levels, declared = without_clause(tokens, levels)
        if not tokens:
            return None
        # {x | x > 1} in braces that TeX does not show
        bare = tokens[0].kind == "sym" and len(tokens) > 3 and tokens[1].kind == "bar"
        if bare and (built := set_builder(tokens, self, depth)) is not None:
            return built
        pieces, separators = split_at(tokens, levels, "sep")
        if len(pieces) > MAX_ITEMS:
            return None
        if not separators:
            found = self.item(tokens, depth)
        elif "," in separators and (";" in separators or _named_blocks(pieces, separators)):
            found = self._blocks(tokens, levels, depth)
        else:
            found, within = self._list(pieces, separators, depth)
            declared = (declared[0] | within[0], declared[1] or within[1])
        return Family(found, *declared) if found is not None and declared[0] else found

    def _labelled(self, tokens: Sequence[Token], levels: list[int], depth: int) -> Shape | None:
        """Read answers to the parts of a question: ``(a) 5 (b) 7``."""
        values = complete(self.answer(part, depth + 1) for part in labelled_parts(tokens, levels))
        return Several(tuple(Named(f"part{at}", (), value) for at, value in enumerate(values))) if values else None

    def _blocks(self, tokens: Sequence[Token], levels: list[int], depth: int) -> Shape | None:
        """Read ``p = 5, q = 2; p = 7, q = 2``: semicolons separate what commas join."""
        ends = [at for at, one in enumerate(tokens) if one.kind == "sep" and one.text in (";", "or") and not levels[at]]
        blocks = [tokens[start + 1 : end] for start, end in pairwise([-1, *ends, len(tokens)])]
        items = complete(self.answer(block, depth + 1) for block in blocks if block)
        return Several(tuple(items)) if items is not None and len(items) > 1 else None

    def _list(self, pieces: list[Sequence[Token]], separators: list[str], depth: int) -> tuple[Shape | None, Declared]:
        names, domain = NOTHING
        # a separator at the end is ignored
        if not pieces[-1] and separators[-1] in ",;":
            pieces, separators = pieces[:-1], separators[:-1]
        items: list[Shape] = []
        kept: list[str] = []
        for position, piece in enumerate(pieces):
            if not piece:
                # ", and": two separators are one
                if separators[position - 1 : position] == [","] and separators[position : position + 1] == ["and"]:
                    continue
                return None, NOTHING
            if _is_dots(piece):
                return (dotted_list(pieces, position) if not names else None), NOTHING
            declared = declaration(piece)
            # "..., k in Z" after an item declares a letter; as the first item it is an answer
            if declared[0] and items:
                names, domain = names | declared[0], domain or declared[1]
                continue
            item = self.item(piece, depth + 1)
            if item is None:
                return None, NOTHING
            items.append(item)
            kept.append(separators[position] if position < len(separators) else "")
        items = _given_names(items)
        return (join_items(items, kept[:-1], trusted=self._trusted) if items else None), (names, domain)

    def item(self, tokens: Sequence[Token], depth: int) -> Shape | None:
        """Read one item: a relation, a set, a group, a ratio, words, or a quantity."""
        levels = depths(tokens)
        if levels is None or depth > _MAX_DEPTH or not tokens:
            return None
        # strict forms first: fixed phrases, then relations, sets, brackets, and last words or a formula
        phrase = closed_phrase(tokens) or number_domain(tokens) or self._phrase(tokens, levels, depth)
        if phrase is not None:
            return phrase
        parts, operations = split_at(tokens, levels, "cup")
        if operations and all(any(token.kind == "rel" for token in part) for part in parts):
            return united([self.item(part, depth + 1) for part in parts], operations)  # x < 1 or x > 2, with a cup
        parts, relations = split_at(tokens, levels, "rel")
        if relations:
            return related(parts, relations, lambda piece: self.item(piece, depth + 1))
        tokens = _taken_away(tokens, levels)
        parts, operations = split_at(tokens, levels, "cup")
        if operations:
            return united([self.item(part, depth + 1) for part in parts], operations)
        if any(token.kind == "colon" and level == 0 for token, level in zip(tokens, levels, strict=True)):
            return self._with_colon(tokens, levels, depth)
        return self._enclosed(tokens, levels, depth) or self._words_or_formula(tokens)

    def _phrase(self, tokens: Sequence[Token], levels: list[int], depth: int) -> Shape | None:
        """Read a statement in words that gives a value or a set."""
        if tokens[0].kind != "word":
            return None
        if (statement := stated(tokens, levels)) is not None:
            value = self.item(statement[1], depth + 1)
            return None if value is None else Named(" ".join(words_of(statement[0])), (), value)
        words = [token.text.casefold() for token in tokens]
        if words[0] in ("all", "any", "every") and any(token.kind == "rel" for token in tokens):
            at = next(at for at, token in enumerate(tokens) if token.kind == "sym" or at == len(tokens) - 1)
            bound = self.item(tokens[at + 3 * (words[at + 1 : at + 3] == ["such", "that"]) :], depth + 1)
            if set(words[1:at]) <= {"real", "reals", "number", "numbers", "values", "value", "of"}:
                return bound  # all real x > 2, all x such that x > 2
            domain = number_domain(tokens[:at])
            if isinstance(domain, Domain) and isinstance(bound, RealSet):
                return Within(domain.name, bound)  # all integers n > 2
        return None

    def _except(self, tokens: Sequence[Token], depth: int) -> Shape | None:
        """Read ``all real numbers except 1 and 2``."""
        words = [token.text.casefold() for token in tokens]
        for mark in _EXCEPT if tokens and tokens[0].kind in ("word", "cmd") else ():
            at = next((at for at in range(1, len(words) - 1) if words[at : at + len(mark)] == mark), None)
            whole = number_domain(tokens[:at]) if at is not None else None
            subject = tokens[at - 1].text if at and tokens[at - 1].kind == "sym" else ""
            if at == 2 and subject and words[0] in ("all", "any", "every"):
                whole = ALL_REALS  # all n except 2
            if at is not None and whole is not None:
                points = self.answer(tokens[at + len(mark) :], depth + 1)
                listed = complete(map(unitless, points.items if isinstance(points, Several) else (points,)))
                taken = Brackets("{", "{", tuple(map(Quantity, listed or ())))
                left = united([whole, taken], ["setminus"])
                if listed is not None:
                    return RealSet(left.spans, subject) if isinstance(left, RealSet) else left
        return None

    def _enclosed(self, tokens: Sequence[Token], levels: list[int], depth: int) -> Shape | None:
        """Read brackets, with what belongs to them: the name of a point, a transposition, a factor."""
        found = cycles(tokens) or bracketed(tokens, levels, self, depth)
        if found is not None:
            return found
        label = point_label(tokens, levels)
        if label:
            point = self.item(tokens[label[1] :], depth + 1)
            return None if point is None else Named(label[0], (), point)
        found = transposed(tokens, levels, self, depth) or scaled_matrix(tokens, levels, self, depth)
        return found or unit_vectors(tokens)

    def _words_or_formula(self, tokens: Sequence[Token]) -> Shape | None:
        if (clock := clock_time(tokens)) is not None:
            return clock
        # letters without a backslash may be a word or a product: known words come first
        if all(token.kind == "word" or (token.kind == "op" and token.text == "-") for token in tokens):
            tree = parse(tokens) if not plain_word(words_of(tokens)) else None
            named = None if tree is None else free_signs(tree, None)
            return named or counted_in_words(tokens, trusted=self._trusted) or Text(words_of(tokens))
        if len(tokens) > 1 and tokens[0].text in ("a", "A") and all(token.kind == "word" for token in tokens[1:]):
            return Text(words_of(tokens))  # "a circle" is no product
        if tokens[0].kind == "word" and (tokens[0].roman or len(tokens[0].text) > 2):
            rest = {token.kind for token in tokens} - {"word"}
            if rest in ({"sym"}, {"num"}):
                return Text(words_of(tokens))  # student B, page 20
        return based(tokens) or quantity(tokens, trusted=self._trusted)

    def _with_colon(self, tokens: Sequence[Token], levels: list[int], depth: int) -> Shape | None:
        """Read a clock time, a ratio, or a label and its value."""
        clock = clock_time(tokens)
        if clock is not None:
            return clock
        parts, _ = split_at(tokens, levels, "colon")
        formulas = complete(map(parse, parts))
        if formulas is not None:
            return Ratio(tuple(formulas))
        if len(parts) == 2 and len(parts[0]) == 1 and [token.text for token in parts[1][1:2]] == ["mapsto"]:
            name, value = name_of(parts[0]), self.item(parts[1][2:], depth + 1)  # f: x \mapsto x^2
            return None if name is None or value is None else Named(name[0], (parts[1][0].text,), value, name[2])
        if len(parts) == 2 and parts[0] and all(token.kind == "word" for token in parts[0]):
            value = self.item(parts[1], depth + 1)
            return None if value is None else Named(" ".join(words_of(parts[0])), (), value)
        return None


def _given_names(items: list[Shape]) -> list[Shape]:
    """Read the ratios ``a: 3, b: 5`` of different letters to numbers as letters and their values."""
    pairs = [item.parts for item in items if isinstance(item, Ratio) and len(item.parts) == 2]
    names = {name.name for name, value in pairs if name.op == "sym" and not value.symbols}
    if len(items) < 2 or len(names) != len(items):
        return items
    return [Named(name.name, (), Quantity(value), name) for name, value in pairs]


def _taken_away(tokens: Sequence[Token], levels: list[int]) -> Sequence[Token]:
    r"""Turn a minus sign before a set into a set difference: ``\mathbb{R} - \{0\}``."""
    taken = [
        at
        for at in range(1, len(tokens) - 1)
        if levels[at] == 0 and (tokens[at].kind, tokens[at].text) == ("op", "-") and tokens[at + 1].text == "{"
        and tokens[at + 1].kind == "open"
    ]  # fmt: skip
    return [Token("cup", "setminus") if at in taken else token for at, token in enumerate(tokens)] if taken else tokens


def _named_blocks(pieces: Sequence[Sequence[Token]], separators: Sequence[str]) -> bool:
    """Return whether ``or`` separates solutions with several names each: ``x = 2, y = 1 or x = 1, y = 2``."""
    named = all(any(token.kind == "rel" and token.text == "=" for token in piece) for piece in pieces)
    return named and "or" in separators and separators.count(",") > separators.count("or")
