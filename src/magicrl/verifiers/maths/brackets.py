r"""What stands in brackets: groups, set builders, systems, matrices, vectors, definitions by cases, permutations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Protocol

from magicrl.verifiers.maths.answers import (
    Answer,
    Cycles,
    Domain,
    Expr,
    Family,
    Group,
    Matrix,
    Named,
    Piecewise,
    Quantity,
    RealSet,
    Several,
    Within,
    number,
    put,
)
from magicrl.verifiers.maths.equality import same_value
from magicrl.verifiers.maths.formulas import parse
from magicrl.verifiers.maths.lexer import ELLIPSES, Token
from magicrl.verifiers.maths.literals import word_set
from magicrl.verifiers.maths.phrases import declaration, depths, number_domain, split
from magicrl.verifiers.maths.relations import whole_numbers
from magicrl.verifiers.maths.sequences import continued, expanded


def goes_on(piece: Sequence[Token]) -> bool:
    """Whether an item is only dots."""
    return len(piece) == 1 and piece[0].kind == "cmd" and piece[0].text in ELLIPSES


def dotted_list(pieces: Sequence[Sequence[Token]], at: int) -> Answer | None:
    """The list whose item ``at`` is dots; None when the items show no rule."""
    shown = [parse(piece) for piece in (*pieces[:at], *pieces[at + 1 :]) if piece]
    known = [item for item in shown if item is not None]
    if len(known) != len(shown):
        return None
    found = continued(known[:at], known[at:])
    if found is None:
        return None
    items = expanded(found)
    return found if items is None else Several(tuple(items))


_AXES = "ijk"


def vector(tokens: Sequence[Token]) -> Group | None:
    """A sum over at least the second or third unit vector, marked by bold type or an accent."""
    accented = parse(tokens)
    if accented is not None and (found := components(accented, ("hat", "vec", "bar"))) is not None:
        return found
    bold = any(token.kind == "sym" and token.roman and token.text in ("j", "k") for token in tokens)
    marked = [
        Token("sym", "unit:" + token.text) if bold and token.kind == "sym" and token.roman and token.text in _AXES
        else token
        for token in tokens
    ]  # fmt: skip
    tree = parse(marked)
    return None if tree is None else components(tree, ("unit",))


def components(tree: Expr, marks: Sequence[str]) -> Group | None:
    """The components of a formula that is linear in unit vectors; with the mark "" in plain ``i, j, k``."""
    names: dict[str, Expr] = {}
    for mark in marks:
        for axis in _AXES:
            name = f"{mark}:{axis}" if mark else axis
            leaf = Expr("const", name="i") if name == "i" else Expr("sym", name=name)
            if tree.holds(leaf.op, leaf.name):
                if axis in names:
                    return None
                names[axis] = leaf
    if not set(names) & {"j", "k"}:
        return None
    values = {axis: _at(tree, names, {axis: 1}) for axis in _AXES}
    doubled = _at(tree, names, {"i": 2, "j": 3, "k": 5})
    total = Expr("add", tuple(Expr("mul", (number(n), values[a])) for a, n in zip(_AXES, (2, 3, 5), strict=True)))
    if same_value(doubled, total) is not True or same_value(_at(tree, names, {}), number(0)) is not True:
        return None
    axes = _AXES if "k" in names else "ij"
    return Group("<", "<", tuple(Quantity(values[axis]) for axis in axes))


def _at(tree: Expr, names: dict[str, Expr], ones: dict[str, int]) -> Expr:
    for axis, leaf in names.items():
        tree = put(tree, leaf, number(ones.get(axis, 0)))
    return tree


MAX_ITEMS = 100
_MATRICES = ("matrix", "pmatrix", "bmatrix", "Bmatrix", "array", "smallmatrix")
_SYSTEMS = ("cases", "aligned", "gathered", "rcases", "dcases")
_CONDITION_WORDS = word_set("if for when where")
_ELSE = (["otherwise"], ["else"], ["if", "otherwise"])


class Reader(Protocol):
    """What the parts of a bracket are read with."""

    def answer(self, tokens: Sequence[Token], depth: int) -> Answer | None:
        """A whole answer."""
        ...

    def part(self, tokens: Sequence[Token], depth: int) -> Answer | None:
        """One item."""
        ...


def bracketed(tokens: Sequence[Token], levels: list[int], reader: Reader, depth: int) -> Answer | None:
    """A group, a set, a system, a matrix or an item in parentheses; None when no bracket holds it all."""
    first, inside = tokens[0], tokens[1:-1]
    if len(tokens) < 2 or first.kind not in ("open", "env") or any(level == 0 for level in levels[1:-1]):
        return None
    if first.kind == "env" and (first.text.split()[-1] in _SYSTEMS or _lined_up(inside)):
        return _piecewise(inside, reader, depth) or _system(inside, reader, depth)
    if first.kind == "env":
        return _matrix(first.text.split()[-1], inside, reader, depth)
    opening, closing = first.text, tokens[-1].text
    if not inside:
        return Group(opening, closing, ()) if opening == "{" else None
    if opening == "{" and (built := set_builder(inside, reader, depth)) is not None:
        return built
    inner_levels = depths(inside)
    if inner_levels is None or opening in ("floor", "ceil", "|"):
        return None
    pieces, separators = split(inside, inner_levels, "sep")
    if not separators and opening == closing == "(":
        return reader.part(inside, depth)
    if any(separator not in (",", ";") for separator in separators) or len(pieces) > MAX_ITEMS:
        return None
    dots = next((at for at, piece in enumerate(pieces) if goes_on(piece)), None)
    if dots is None:
        return _grouped(opening, closing, [reader.part(piece, depth) for piece in pieces])
    whole = dotted_list(pieces, dots)
    return _grouped(opening, closing, list(whole.items) if isinstance(whole, Several) else [whole])


def set_builder(inside: Sequence[Token], reader: Reader, depth: int) -> Answer | None:
    r"""``\{x | -2 < x < 3\}``: the condition says it all when it is about one name; ``\{2k : k \in Z\}``."""
    levels = depths(inside)
    if levels is None:
        return None
    bar = next(
        (at for at, (token, level) in enumerate(zip(inside, levels, strict=True))
         if at and level == 0 and token.kind in ("bar", "colon")),
        None,
    )  # fmt: skip
    bar = _after_domain(inside, levels) if bar is None else bar
    if bar is None:
        return None
    head, condition = inside[:bar], inside[bar + 1 :]
    declared = declaration(condition)
    if declared:
        member = reader.part(head, depth)
        if isinstance(member, Quantity) and member.expr.op == "sym" and member.expr.name in declared.names:
            return _domain(condition)
        return None if member is None else Family(member, declared.names, declared.domain)
    name = [token for token in head if token.kind == "sym"]
    found = reader.answer(condition, depth + 1)
    if not name or found is None:
        return None
    domain = _domain(head)
    if domain is None:
        return None
    return _within(domain, name[0].text, found)


def _after_domain(inside: Sequence[Token], levels: Sequence[int]) -> int | None:
    r"""The separator in ``\{x \in R; x > 2\}``: it follows a name and the set that it is taken from."""
    at = next((at for at, token in enumerate(inside) if token.kind == "sep" and levels[at] == 0), None)
    if at is None or len(inside) < 4 or inside[0].kind != "sym" or inside[1].text != "in":
        return None
    return at if number_domain(inside[2:at]) is not None else None


def _domain(head: Sequence[Token]) -> Answer | None:
    """The set that the members of a set builder are taken from; the reals when none is named."""
    relations = [at for at, token in enumerate(head) if token.kind == "rel"]
    if not relations:
        return number_domain([Token("cmd", "mathbb"), Token("sym", "R")])
    if head[relations[0]].text != "in":
        return None
    return number_domain(head[relations[0] + 1 :])


def _within(domain: Answer, name: str, found: Answer) -> Answer | None:
    plain: Answer | None = None
    if isinstance(found, RealSet) and found.subject == name:
        plain = RealSet(found.spans)
    inner = found.answer if isinstance(found, Family) else found
    if isinstance(inner, Named) and inner.name == name:
        plain = Family(inner.value, found.parameters, found.domain) if isinstance(found, Family) else inner.value
    if plain is None or (isinstance(domain, RealSet) and len(domain.spans) == 1 and domain.spans[0].low.op == "neg"):
        return plain
    if isinstance(domain, Domain) and isinstance(plain, RealSet):
        members = whole_numbers(plain, domain.name)
        if members is not None:
            return Group("{", "{", tuple(Quantity(number(member)) for member in members))
        return Within(domain.name, plain)
    return None


def _piecewise(inside: Sequence[Token], reader: Reader, depth: int) -> Answer | None:
    """A definition by cases: in every row a value, then its condition."""
    pieces: list[tuple[Answer, Answer | None]] = []
    for row in _rows(inside):
        cells = [list(cell) for cell in row if cell]
        if len(cells) != 2:
            return None
        value, condition = (_without_stop(cell) for cell in cells)
        words = [token.text.casefold() for token in condition]
        while condition and condition[0].kind == "word" and condition[0].text.casefold() in _CONDITION_WORDS:
            condition = condition[1:]
        read = reader.part(value, depth) if value else None
        if read is None:
            return None
        if words in _ELSE:
            pieces.append((read, None))
            continue
        asked = reader.answer(condition, depth + 1) if condition else None
        if asked is None or isinstance(asked, Quantity):
            return None
        pieces.append((read, asked))
    conditions = [condition for _, condition in pieces]
    return Piecewise(tuple(pieces)) if len(pieces) > 1 and None not in conditions[:-1] else None


def _without_stop(cell: list[Token]) -> list[Token]:
    """A cell without the comma or full stop that ends it."""
    ended = bool(cell) and (cell[-1].kind == "sep" or (cell[-1].kind, cell[-1].text) == ("cmd", "."))
    return cell[:-1] if ended else cell


def _rows(inside: Sequence[Token]) -> list[list[list[Token]]]:
    """The cells of a table, row by row; an empty last row is none."""
    levels = depths(inside)
    rows: list[list[list[Token]]] = [[[]]]
    for token, level in zip(inside, levels or [0] * len(inside), strict=True):
        if token.kind == "cell" and level == 0:
            if token.text == "row":
                rows.append([[]])
            else:
                rows[-1].append([])
        else:
            rows[-1][-1].append(token)
    if rows[-1] == [[]]:
        rows.pop()
    return rows


def _system(inside: Sequence[Token], reader: Reader, depth: int) -> Answer | None:
    """The rows of a system of equations, as a list."""
    joined: list[Token] = []
    for at, token in enumerate(inside):
        if token.kind == "cell" and token.text == "column":
            # where it only lines the rows up it stands beside a relation
            if not any(beside.kind == "rel" for beside in (*inside[max(0, at - 1) : at], *inside[at + 1 : at + 2])):
                return None
        elif token.kind == "cell":
            if joined and joined[-1].kind == "sep":
                joined.pop()  # a comma before the end of the row
            joined.append(Token("sep", ","))
        else:
            joined.append(token)
    return reader.answer(joined, depth + 1)


def _matrix(name: str, inside: Sequence[Token], reader: Reader, depth: int) -> Answer | None:
    if name not in _MATRICES or depths(inside) is None:
        return None
    rows = [tuple(cell for part in row if (cell := reader.part(part, depth)) is not None) for row in _rows(inside)]
    widths = {len(row) for row in rows} | {len(row) for row in _rows(inside)}
    return Matrix(tuple(rows)) if len(widths) == 1 else None


def _grouped(opening: str, closing: str, items: Sequence[Answer | None]) -> Answer | None:
    """A group; plus-minus signs in a tuple stand for several tuples."""
    known = [item for item in items if item is not None]
    if len(known) != len(items):
        return None
    if opening == closing == "{":
        flat = [part for item in known for part in (item.items if isinstance(item, Several) else (item,))]
        return Group("{", "{", tuple(flat))
    choices = [item.items if isinstance(item, Several) and item.signs else (item,) for item in known]
    if prod(map(len, choices)) > MAX_ITEMS:
        return None
    groups = tuple(Group(opening, closing, chosen) for chosen in product(*choices))
    return groups[0] if len(groups) == 1 else Several(groups, signs=True)


def _lined_up(inside: Sequence[Token]) -> bool:
    """Whether every row of a table is a relation: then it is a system and no matrix."""
    filled = [tokens for row in _rows(inside) if (tokens := [token for cell in row for token in cell])]
    return len(filled) > 1 and all(any(token.kind == "rel" for token in row) for row in filled)


def cycles(tokens: Sequence[Token]) -> Cycles | None:
    """``(1 2 3)(4 5)``: a permutation in cycles."""
    found: list[tuple[str, ...]] = []
    current: list[str] | None = None
    for token in tokens:
        if current is None:
            if (token.kind, token.text) != ("open", "("):
                return None
            current = []
        elif token.kind == "close" and token.text == "(":
            found.append(tuple(current))
            current = None
        elif token.kind == "num" and token.text.isdigit() and (token.spaced or not current):
            current.append(token.text)
        else:
            return None
    members = [member for cycle in found for member in cycle]
    if current is not None or len(set(members)) != len(members) or any(len(cycle) < 2 for cycle in found):
        return None
    turned = [cycle[at:] + cycle[:at] for cycle in found for at in [cycle.index(min(cycle, key=int))]]
    return Cycles(tuple(sorted(turned))) if turned else None


def transposed(tokens: Sequence[Token], levels: list[int], reader: Reader, depth: int) -> Answer | None:
    r"""``(1,2,3)^T`` as a column, and a matrix with rows and columns exchanged."""
    ends = [at for at, level in enumerate(levels) if level == 0 and (tokens[at].kind, tokens[at].text) == ("op", "^")]
    mark = [token.text for token in tokens[ends[0] + 1 :] if token.kind not in ("lbrace", "rbrace")] if ends else []
    if len(ends) != 1 or mark not in (["T"], ["top"], ["t"], ["mathsf", "T"], ["intercal"], ["prime"]):
        return None
    inner = reader.part(tokens[: ends[0]], depth)
    if isinstance(inner, Matrix):
        return Matrix(tuple(zip(*inner.rows, strict=True)))
    if isinstance(inner, Group) and {inner.opening, inner.closing} <= {"(", "[", "<"} and mark != ["prime"]:
        return Matrix(tuple((item,) for item in inner.items))
    return None


def scaled_matrix(tokens: Sequence[Token], levels: list[int], reader: Reader, depth: int) -> Answer | None:
    r"""``\frac12 \begin{pmatrix} .. \end{pmatrix}``: the factor goes into every entry."""
    begin = next((at for at, token in enumerate(tokens) if token.kind == "env" and levels[at] == 0), None)
    if not begin or tokens[-1].kind != "env":
        return None
    head = tokens[:begin]
    factor = number(-1) if [token.text for token in head] == ["-"] else parse(head)
    matrix = reader.part(tokens[begin:], depth)
    if factor is None or not isinstance(matrix, Matrix):
        return None
    rows: list[tuple[Answer, ...]] = []
    for row in matrix.rows:
        cells = [cell for cell in row if isinstance(cell, Quantity) and cell.unit is None]
        if len(cells) != len(row):
            return None
        rows.append(tuple(Quantity(Expr("mul", (factor, cell.expr))) for cell in cells))
    return Matrix(tuple(rows))
