"""Relations: names and their values, equations, congruences, inequalities as sets of numbers, and these sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial, reduce
from itertools import combinations, pairwise
from math import ceil, floor

from magicrl_verifiers.maths.answers import (
    ALL_REALS,
    MINUS_INFINITY,
    PLUS_INFINITY,
    Bounds,
    Brackets,
    Equation,
    Expr,
    Family,
    Matrix,
    Named,
    Order,
    Quantity,
    RealSet,
    Several,
    Shape,
    all_of,
    as_value,
    complete,
    numeral,
    signs,
    unitless,
)
from magicrl_verifiers.maths.equality import linear, number_value, quadratic, same_value
from magicrl_verifiers.maths.formulas import parse
from magicrl_verifiers.maths.literals import word_set
from magicrl_verifiers.maths.notation import Token
from magicrl_verifiers.maths.phrases import depths, split_at
from magicrl_verifiers.maths.quantities import added

Read = Callable[[Sequence[Token]], "Shape | None"]
_MOST_SPANS = 100


def as_spans(answer: Shape | None) -> RealSet | None:
    """Return an interval or a finite set as a set of numbers."""
    if isinstance(answer, RealSet):
        return answer
    if not isinstance(answer, Brackets) or (bounds := complete(map(unitless, answer.items))) is None:
        return None
    if answer.opening == "{":
        return _points(bounds)
    if len(bounds) == 2 and {answer.opening, answer.closing} <= {"(", "["}:
        return RealSet((Bounds(bounds[0], answer.opening == "[", bounds[1], answer.closing == "["),))
    return None


def _points(points: Sequence[Expr]) -> RealSet:
    return RealSet(tuple(Bounds(point, True, point, True) for point in points))


def united(items: Sequence[Shape | None], operations: Sequence[str]) -> Shape | None:
    r"""Compute ``A \cup B``, ``A \cap B`` or ``A \setminus B`` of sets of numbers or of named sets."""
    if (named := _of_names(items, operations)) is not None:
        return named
    sets = complete(map(as_spans, items))
    if sets is None:
        return None
    spans = [found.spans for found in sets]
    if set(operations) == {"cup"}:
        return RealSet(tuple(span for group in spans for span in group))
    # bounds with letters cannot be put in order
    if any(bound.symbols for group in spans for span in group for bound in (span.low, span.high)):
        return None
    if set(operations) == {"cap"}:
        common = _common(sets)
        return RealSet(tuple(common)) if common else None
    return _without(spans[0], spans[1]) if list(operations) == ["setminus"] else None


def _of_names(items: Sequence[Shape | None], operations: Sequence[str]) -> Quantity | None:
    r"""Return ``A \cap B`` of sets of which only the names are known."""
    formulas, kinds = complete(map(unitless, items)), set(operations)
    if formulas is None or len(kinds) != 1 or (kinds == {"setminus"} and len(items) > 2):
        return None
    named = all((one.op == "sym" and one.name.isupper()) or one.op == "set" for one in formulas)
    return Quantity(Expr("set", tuple(formulas), kinds.pop())) if named else None


def _intersection(spans: Sequence[Bounds], others: Sequence[Bounds], *, points: bool = False) -> list[Bounds]:
    pairs = [_both(one, other, points=points) for one in spans for other in others]
    return [span for span in pairs if span is not None]


def _without(spans: Sequence[Bounds], taken: Sequence[Bounds]) -> RealSet | None:
    """Return the difference of two lists of spans; the bounds must have values."""
    left = list(spans)
    for hole in taken:
        if _position(hole.low) > _position(hole.high) or len(left) > _MOST_SPANS:
            return None
        # the rest is below or above the hole; an open end of the hole belongs to the rest
        below = Bounds(MINUS_INFINITY, False, hole.low, not hole.low_closed)
        above = Bounds(hole.high, not hole.high_closed, PLUS_INFINITY, False)
        left = _intersection(left, (below, above), points=True)
    return RealSet(tuple(left))


def _place(bound: Expr) -> Fraction | float | None:
    """Return the value of a bound; None if it has none."""
    if bound in (PLUS_INFINITY, MINUS_INFINITY):
        return float("inf") if bound == PLUS_INFINITY else float("-inf")
    return number_value(bound)


def _position(bound: Expr) -> Fraction | float:
    value = _place(bound)
    return 0 if value is None else value


def subject_set(item: Shape) -> RealSet | None:
    """Return a condition on one name as a set: an inequality, ``a = 1`` or ``a \\in R``."""
    if isinstance(item, Named) and isinstance(item.value, RealSet):
        return RealSet(item.value.spans, item.name)
    if isinstance(item, Named) and item.symbol and (point := unitless(item.value)) is not None:
        return RealSet(_points([point]).spans, item.name)
    return item if isinstance(item, RealSet) else None


def unbounded(item: Shape) -> bool:
    """Return whether a pair in brackets has an infinite bound: then it is an interval and no point."""
    found = as_spans(item) if isinstance(item, Brackets) else None
    return found is not None and any(span.low == MINUS_INFINITY or span.high == PLUS_INFINITY for span in found.spans)


def unequal(item: Shape, points: Sequence[Shape]) -> RealSet | None:
    r"""Read ``x \\ne 1, 2``, which excludes the points after the first, too."""
    if not isinstance(item, RealSet) or len(item.spans) != 2 or item.spans[0].high != item.spans[1].low:
        return None
    others = complete(map(unitless, points))
    if not others or (item.spans[0].low, item.spans[1].high) != (MINUS_INFINITY, PLUS_INFINITY):
        return None
    if any(point.symbols for point in others):
        return None
    found = _without(ALL_REALS.spans, _points([item.spans[0].high, *others]).spans)
    return None if found is None else RealSet(found.spans, item.subject)


def alternatives(items: Sequence[Shape]) -> RealSet | None:
    """Return the union of intervals joined by "or"; None if they overlap."""
    sets = complete(as_spans(item) if isinstance(item, Brackets) else None for item in items)
    return None if sets is None or _overlap(sets) else _union(sets, "")


def joined_sets(sets: Sequence[RealSet], separators: Sequence[str], *, trusted: bool = False) -> Shape:
    """Join conditions: ``or`` makes a union, ``and`` an intersection, a comma either.

    An ``and`` that no number meets is no answer. In a reference (``trusted``) it means a union.
    """
    subjects = {one.subject for one in sets}
    if len(subjects) != 1:
        return Several(tuple(sets))
    subject = subjects.pop()
    if not subject:  # intervals in a list are several answers, or a union that was written with "or"
        return Several(tuple(sets)) if "or" not in separators or _overlap(sets) else _union(sets, "")
    # "and" binds closer than "or"; a comma is read like the words around it
    comma = "or" if "or" in separators and "and" not in separators else "and"
    blocks: list[list[RealSet]] = [[sets[0]]]
    for one, separator in zip(sets[1:], separators, strict=True):
        if (separator if separator in ("and", "or") else comma) == "and":
            blocks[-1].append(one)
        else:
            blocks.append([one])
    parts = [RealSet(tuple(_common(block)), subject) for block in blocks]
    if all(part.spans for part in parts):
        # overlapping conditions are two guesses
        return Several(tuple(parts)) if _overlap(parts) else _union(parts, subject)
    # x < -1, x > 3: no number meets both, so this is a union
    return _union(sets, subject) if len(blocks) == 1 and (trusted or "and" not in separators) else Several(())


def _common(sets: Sequence[RealSet]) -> list[Bounds]:
    """Return the spans of the intersection."""
    return list(reduce(partial(_intersection, points=True), [one.spans for one in sets]))


def _overlap(sets: Sequence[RealSet]) -> bool:
    return any(_intersection(one.spans, two.spans) for one, two in combinations(sets, 2))


def _union(sets: Sequence[RealSet], subject: str) -> RealSet:
    return RealSet(tuple(span for one in sets for span in one.spans), subject)


def _both(one: Bounds, other: Bounds, *, points: bool) -> Bounds | None:
    """Return the intersection of two spans; None if it is empty, or (without ``points``) one point."""
    lows = ((span.low, span.low_closed) for span in (one, other))
    highs = ((span.high, span.high_closed) for span in (one, other))
    # of two bounds at one place the open one is narrower
    low, low_closed = max(lows, key=lambda bound: (_position(bound[0]), not bound[1]))
    high, high_closed = min(highs, key=lambda bound: (_position(bound[0]), bound[1]))
    single = points and low_closed and high_closed and _position(low) == _position(high)
    return Bounds(low, low_closed, high, high_closed) if single or _position(low) < _position(high) else None


def same_set(reference: RealSet, answer: RealSet) -> bool | None:
    """Return whether two unions of spans are the same set; None if their bounds cannot be ordered."""
    # (1,2] u (2,3) is (1,3)
    left, right = merged_spans(reference.spans), merged_spans(answer.spans)
    if left is None or right is None:
        # without an order only spans in the same order can be compared
        if len(reference.spans) != len(answer.spans):
            return None
        left, right = list(reference.spans), list(answer.spans)
    if [(one.low_closed, one.high_closed) for one in left] != [(one.low_closed, one.high_closed) for one in right]:
        return False
    pairs = [
        bounds for one, two in zip(left, right, strict=True) for bounds in ((one.low, two.low), (one.high, two.high))
    ]
    return all_of([same_value(one, other) for one, other in pairs])


def merged_spans(spans: Sequence[Bounds]) -> list[Bounds] | None:
    """Sort spans and join those that touch; None if bounds cannot be compared or are reversed."""
    result: list[Bounds] = []
    places = complete(
        (low, _place(span.high), span) if (low := _place(span.low)) is not None else None for span in spans
    )
    end: Fraction | float = 0
    for low, high, span in sorted(places or (), key=lambda entry: (entry[0], not entry[2].low_closed)):
        if high is None or low > high or (low == high and not (span.low_closed and span.high_closed)):
            return None  # (5, 2) is no interval
        if result and (low < end or (low == end and (span.low_closed or result[-1].high_closed))):
            last = result[-1]
            if high > end or (high == end and span.high_closed):
                result[-1] = Bounds(last.low, last.low_closed, span.high, span.high_closed)
                end = high
        else:
            result.append(span)
            end = high
    return None if places is None else result


_MOST_MEMBERS = 60
_FROM = {"Z": float("-inf"), "N": 1, "Z+": 1, "Z+0": 0, "N0": 0}


def whole_numbers(numbers: RealSet, domain: str) -> list[int] | None:
    """Return the whole numbers of a bounded set, in order; None if they are too many or a bound has no value."""
    ends = complete(_place(bound) for span in numbers.spans for bound in (span.low, span.high))
    if not ends or domain not in _FROM:
        return None
    low, high = max(min(ends), _FROM[domain]), max(ends)
    # "not <=": an infinite bound gives inf or nan
    if not high - low <= 10 * _MOST_MEMBERS:
        return None
    members = [
        member
        for member in range(ceil(low), floor(high) + 1)
        if any(_both(span, _points([numeral(member)]).spans[0], points=True) for span in numbers.spans)
    ]
    return members if len(members) <= _MOST_MEMBERS else None


Name = tuple[str, tuple[str, ...], Expr | None]
"""Spelling, arguments of a function, and the name as a formula if it is one."""
_NAMING = word_set("abs sin cos tan cot sec csc")
_APPLIED = word_set("f g h P E D S V")
_MEASURED = frozenset("EPDV")
_MEASURES = word_set("Var Cov Pr Corr")


def name_of(tokens: Sequence[Token]) -> Name | None:
    """Read a name; None if the tokens are no name."""
    if not tokens:
        return None
    spelled = " ".join(token.text.casefold() for token in tokens)
    wordy = tokens[0].kind == "word" and (tokens[0].roman or len(tokens[0].text) > 3)
    if wordy and all(token.kind in ("word", "sym") for token in tokens):
        return spelled, (), None
    if [token.text for token in tokens[:2]] == ["m", "angle"]:
        tokens = tokens[1:]  # the measure of an angle
    colons = [at for at, token in enumerate(tokens) if token.kind == "colon"]
    if colons:
        sides = complete((name_of(tokens[: colons[0]]), name_of(tokens[colons[0] + 1 :])))
        return None if sides is None else (":".join(name for name, _, _ in sides), (), None)
    if (measure := _measure(tokens)) is not None:
        return measure, (), None
    tree = parse(tokens)
    if tree is None:
        return _function_name(tokens) or _tuple_name(tokens)
    if tree.op == "sym":
        return tree.name, (), tree
    # dy/dx is another name of y'
    if _derivative(tree):
        return tree.args[0].args[1].name + "'", (), None
    if tree.op == "apply" and not tree.symbols:
        return _spelled(tokens), (), None  # f(0)
    points = tree.args[0] if (tree.op, tree.name) == ("fn", "abs") else tree  # |AB|
    if points.op == "mul" and all(part.op == "sym" and part.name[0].isupper() for part in points.args):
        return "".join(part.name for part in points.args), (), None  # a segment, an angle, a triangle
    if tree.op == "fn" and tree.name in _NAMING and tree.symbols:
        return spelled, (), None  # |z|, cos A
    return _function_name(tokens) or _tuple_name(tokens)


def _measure(tokens: Sequence[Token]) -> str | None:
    r"""Read ``\operatorname{Var}(X)``, or ``\mathbb{E}[X]`` with the name ``E(X)``: an upright name, then brackets."""
    opening = _one_bracket(tokens)
    head = [token.text for token in tokens[:opening] if token.kind not in ("lbrace", "rbrace")]
    upright = head in (["mathbb", "E"], ["mathbb", "P"], ["E"]) or (len(head) == 1 and head[0] in _MEASURES)
    return head[-1] + "(" + _spelled(tokens[opening + 1 : -1]) + "(" if opening and upright else None


def _one_bracket(tokens: Sequence[Token], kind: str = "") -> int:
    """Return where the bracket opens that the last token closes: in ``f(x)``, not in ``f(x) + g(y)``; else 0."""
    at = next((at for at, one in enumerate(tokens) if one.kind == "open" and kind in ("", one.text)), 0)
    levels = depths(tokens)
    return at if tokens[-1].kind == "close" and levels is not None and 0 not in levels[at + 1 : -1] else 0


def _spelled(tokens: Sequence[Token]) -> str:
    return "".join(token.text for token in tokens)


def _derivative(tree: Expr) -> bool:
    sides = [[part.name for part in side.args] for side in tree.args if side.op == "mul"]
    return tree.op == "div" and len(sides) == 2 and all(len(side) == 2 and side[0] == "d" and side[1] for side in sides)


def _function_name(tokens: Sequence[Token]) -> Name | None:
    opening = _one_bracket(tokens, "(")
    head, inner = parse(tokens[:opening]), tokens[opening + 1 : -1]
    names = [token.text for token in inner[::2]]
    if head is not None and head.op == "pow" and head.args[0].op == "sym" and head.args[0].name in _APPLIED:
        return _spelled(tokens[:opening]), tuple(names), None  # the inverse of f
    if head is None or head.op != "sym" or not inner:
        return None
    plain = all(token.kind == "sym" for token in inner[::2]) and all(token.text == "," for token in inner[1::2])
    if plain and head.name in _MEASURED and all(name.isupper() for name in names):
        return head.name + "(" + _spelled(inner) + "(", (), None  # of a random variable
    if plain:
        return head.name, tuple(names), None
    # P(X > 1): what is in the brackets is part of the name
    return (_spelled(tokens), (), None) if head.name in _APPLIED else None


def _tuple_name(tokens: Sequence[Token]) -> Name | None:
    r"""Read ``(x, y)``, or ``\begin{pmatrix} x \\ y \end{pmatrix}``, a column of letters, with the same name."""
    inner = tokens[1:-1]
    if tokens[0].kind == "env" and tokens[-1].kind == "env" and len(inner) > 2:
        column = all((token.kind, token.text) == ("cell", "row") for token in inner[1::2])
        names = [token.text for token in inner[::2] if token.kind == "sym"] if column else []
        return ("(" + ",".join(names) + ")", (), None) if len(names) == len(inner[::2]) else None
    if len(inner) < 3 or (tokens[0].kind, tokens[0].text) != ("open", "(") or tokens[-1].text != "(":
        return None
    parts, _ = split_at(inner, [0] * len(inner), "sep")
    names = [tree.name for tree in map(parse, parts) if tree is not None and tree.op == "sym"]
    return ("(" + ",".join(names) + ")", (), None) if len(names) == len(parts) else None


def point_label(tokens: Sequence[Token], levels: Sequence[int]) -> tuple[str, int] | None:
    """Return the name of ``A(1,2)`` or ``P_1(0,3)`` and where its bracket begins; None if it is no named point."""
    opening = next((at for at, token in enumerate(tokens) if (token.kind, token.text) == ("open", "(")), None)
    if not opening or tokens[0].kind != "sym" or not tokens[0].text.isupper() or len(tokens[0].text) != 1:
        return None
    if 0 in levels[opening + 1 : -1] or (tokens[-1].kind, tokens[-1].text) != ("close", "("):
        return None
    if not any(token.kind == "sep" and level == 1 for token, level in zip(tokens, levels, strict=True)):
        return None
    head = parse(tokens[:opening])
    return (head.name, opening) if head is not None and head.op == "sym" else None


_FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


def related(parts: list[Sequence[Token]], relations: list[str], read: Read) -> Shape | None:
    """Read a chain of relations."""
    if not all(parts):
        return None
    kinds = set(relations)
    if kinds == {"in"} and len(parts) == 2:
        value, name = read(parts[1]), name_of(parts[0])
        return None if value is None or name is None else _named(name, value)
    if kinds <= {"=", "~", "=="}:
        return _equality(parts, relations, read)
    if kinds <= {"<", "<=", ">", ">="} or relations == ["!="]:
        trees = complete(map(parse, parts))
        return None if trees is None else inequality(trees, relations)
    return None


def _equality(parts: list[Sequence[Token]], relations: list[str], read: Read) -> Shape | None:
    name = name_of(parts[0])
    if "~" in relations:
        about = relations.index("~")
        # the exact value comes before the sign, unless that is only a name
        exact = parts[: about + 1]
        if name is None and len(exact) == 1 and len(parts) == 2 and not _near(read(parts[0]), read(parts[1])):
            return Several(())  # 2 ~ 7 is no answer
        if len(exact) > 1 or name is None:
            return _equality(exact, relations[:about], read) if len(exact) > 1 else read(exact[0])
        value = read(parts[-1]) if len(parts) == 2 else None
        return None if value is None else _named(name, value)
    values = [read(part) for part in parts[1:]]
    names = [name_of(part) for part in parts[:-1]]
    if len(names) > 1 and all(names) and values[-1] is not None and set(relations) == {"="}:
        # a = b = c = 0
        return Several(tuple(_named(one, values[-1]) for one in names if one is not None))
    if name is not None:
        last = values[-1]
        # x = 5 = 6 gives x no value: otherwise it would be two guesses
        if last is None or not _agree(values):
            return None
        if isinstance(last, Matrix) and name[0].startswith("(") and {len(row) for row in last.rows} == {1}:
            last = Brackets("(", "(", tuple(row[0] for row in last.rows))  # a column of letters
        # x = 1 \pm 2 is two values of x
        if isinstance(last, Several) and last.signs:
            return Several(tuple(_named(name, one) for one in last.items), signs=True)
        return _named(name, last)
    first = read(parts[0])
    last_name = name_of(parts[-1])
    if last_name is not None and first is not None and _agree([first, *values[:-1]]):
        return _named(last_name, first)
    last = values[-1]
    of_sets = isinstance(first, Quantity) and first.expr.op == "set"
    if (first is None or of_sets) and last is not None and _agree(values) and _unread_formula(parts[0]):
        return Named(" ".join(token.text for token in parts[0]), (), last)
    if first is None or any(value is None for value in values):
        return None
    every = [first, *values]
    if isinstance(first, Quantity) and first.expr.symbols and len(values) > 1 and _agree(values):
        every = [first, values[-1]]  # a + b = 3 + 4 = 7
    computed = [value for value in every if isinstance(value, Quantity) and not value.expr.symbols]
    if len(computed) == len(every):
        # 2 + 3 = 5 computes a value and gives it to no name; 5 = 6 is no answer, and equal to none
        return Named("=", (), computed[-1]) if _agree(every) else Several(())
    sides = complete(map(unitless, every))
    return Equation(sides[0], sides[1]) if sides is not None and len(sides) == 2 else None


def _unread_formula(tokens: Sequence[Token]) -> bool:
    """Return whether the tokens are a formula outside the grammar, such as a determinant, and no words."""
    kinds = {token.kind for token in tokens}
    words = any(token.kind == "word" and (token.roman or len(token.text) > 3) for token in tokens)
    return bool(kinds & {"cmd", "env", "fn", "cup"}) and not words and "unit" not in kinds


def _agree(values: Sequence[Shape | None]) -> bool:
    """Return whether all values of a chain are equal: ``5 = 6`` gives no answer."""
    formulas = complete(as_value(value) if isinstance(value, Quantity) else None for value in values)
    if len(values) < 2 or formulas is None:
        return len(values) < 2
    return all(same_value(one, other) is True for one, other in pairwise(formulas))


def _named(name: Name, value: Shape) -> Named:
    return Named(name[0], name[1], value, name[2])


def _near(exact: Shape | None, about: Shape | None) -> bool:
    """Return whether an approximation is right to a unit of its last digit; formulas without a value pass."""
    if exact is None or about is None:
        return True
    if not (isinstance(exact, Quantity) and isinstance(about, Quantity)):
        return False
    values = complete(number_value(one.expr) for one in (exact, about))
    decimals = about.expr.args[0].decimals if about.expr.op == "neg" else about.expr.decimals
    return values is None or abs(values[0] - values[1]) < Fraction(1, 10**decimals)


def restates(about: Shape | None, exact: Shape | None) -> bool:
    """Return whether a decimal of two places or more gives a number to a unit of its last digit."""
    if not (isinstance(exact, Quantity) and isinstance(about, Quantity)) or number_value(exact.expr) is None:
        return False
    literal = about.expr.args[0] if about.expr.op == "neg" else about.expr
    return literal.op == "num" and literal.decimals > 1 and _near(exact, about)


def inequality(parts: Sequence[Expr], relations: Sequence[str]) -> Shape | None:
    """Read an inequality: a set of numbers if it bounds one name by formulas without it, else an order."""
    if list(relations) == ["!="]:
        return _unequal(parts) or Order(tuple(parts), ("!=",))
    if any(relation in (">", ">=") for relation in relations):
        # a < b > c does not compare a with c
        if any(relation in ("<", "<=") for relation in relations):
            return None
        parts, relations = parts[::-1], [_FLIPPED[relation] for relation in reversed(relations)]
    closed = [relation == "<=" for relation in relations]
    subject = [at for at, part in enumerate(parts) if _is_subject(part, parts)]
    # between two names the bounded one is not known; between a name and a number it is the name
    bounded = [at for at in subject if not parts[1 - at].symbols] if len(parts) == 2 else []
    if bounded[:1] == [0]:
        return RealSet((Bounds(MINUS_INFINITY, False, parts[1], closed[0]),), _spelling(parts[0]))
    if bounded:
        return RealSet((Bounds(parts[0], closed[0], PLUS_INFINITY, False),), _spelling(parts[1]))
    if len(parts) == 2 and (solved := _solved(parts[0], parts[1], closed[0])) is not None:
        return solved
    if len(parts) == 2 and (solved := _solved_square(parts[0], parts[1], closed[0])) is not None:
        return solved
    if len(parts) == 2 and (around := _absolute(parts, closed[0])) is not None:
        return around
    if len(parts) == 3 and _is_subject(parts[1], parts):
        return RealSet((Bounds(parts[0], closed[0], parts[2], closed[1]),), _spelling(parts[1]))
    if len(parts) == 3 and not parts[0].symbols | parts[2].symbols:
        # -5 < x - 2 < 5
        halves = complete(_solved(low, high, end) for low, high, end in zip(parts, parts[1:], closed, strict=False))
        return Order(tuple(parts), tuple(relations)) if halves is None else joined_sets(halves, ["and"])
    return Order(tuple(parts), tuple(relations))


def _solved(left: Expr, right: Expr, closed: bool) -> RealSet | None:
    """Solve a linear inequality in one name: ``-x < -1`` is ``x > 1``."""
    names = left.symbols | right.symbols
    name = next(iter(names), "")
    found = linear(left - right, name) if len(names) == 1 else None
    rise = None if found is None else number_value(found[1])
    if found is None or not rise:
        return None
    bound = -(found[0] / found[1])
    # dividing by a negative step reverses the inequality
    low, high = (MINUS_INFINITY, bound) if rise > 0 else (bound, PLUS_INFINITY)
    return RealSet((Bounds(low, closed and rise < 0, high, closed and rise > 0),), name)


def _solved_square(left: Expr, right: Expr, closed: bool) -> RealSet | None:
    """Solve a quadratic inequality in one name: ``x^2 < 4`` is ``-2 < x < 2``."""
    found = quadratic(left - right)
    if found is None:
        return None
    name, leading, low, high, discriminant = found
    if discriminant == 0 and (leading < 0) == closed:
        return None  # all numbers or none
    if discriminant == 0:
        # (x-1)^2 <= 0 and -(x-1)^2 < 0
        return RealSet(_points([low]).spans, name) if closed else _unequal([Expr("sym", name=name), low])
    if leading > 0:
        return RealSet((Bounds(low, closed, high, closed),), name)
    below, above = Bounds(MINUS_INFINITY, False, low, closed), Bounds(high, closed, PLUS_INFINITY, False)
    return RealSet((below, above), name)


def _absolute(parts: Sequence[Expr], closed: bool) -> Shape | None:
    """Solve ``|x - 1| < 2`` or ``|x| > 2``, with a linear formula in one name and a positive number."""
    for at, part in enumerate(parts):
        bound = parts[1 - at]
        size = number_value(bound)
        if not (part.op == "fn" and part.name == "abs" and size is not None and size > 0):
            continue
        inner, minus = part.args[0], -bound
        # |x| < c needs both halves, c < |x| one of them
        sides = ((inner, bound), (minus, inner)) if at == 0 else ((bound, inner), (inner, minus))
        halves = complete(_solved(low, high, closed) for low, high in sides)
        return None if halves is None else joined_sets(halves, ["or" if at else "and"])
    return None


def _is_subject(part: Expr, parts: Sequence[Expr]) -> bool:
    """Return whether a part is a name, or a function of names, that the other parts do not contain."""
    named = part.op == "sym" or (part.op == "apply" and all(arg.op == "sym" for arg in part.args))
    return named and not any(part.symbols & other.symbols for other in parts if other is not part)


def _spelling(part: Expr) -> str:
    return part.name if part.op == "sym" else f"{part.name}({part.args[0].name})"


def _unequal(parts: Sequence[Expr]) -> RealSet | None:
    for one, other in ((parts[0], parts[1]), (parts[1], parts[0])):
        if one.op == "sym" and not other.symbols and (points := signs(other)) is not None:
            found = _without(ALL_REALS.spans, _points(points).spans)
            return None if found is None else RealSet(found.spans, one.name)
    return None


def join_items(items: Sequence[Shape], separators: Sequence[str], *, trusted: bool) -> Shape | None:
    """Join the items of a list: a union of sets of numbers, several answers, or one name with several values."""
    if len(items) > 1 and (apart := unequal(items[0], items[1:])) is not None:
        return apart
    if any(isinstance(item, RealSet) for item in items) and len(items) > 1:
        sets = complete(map(subject_set, items))
        return Several(tuple(items)) if sets is None else joined_sets(sets, separators, trusted=trusted)
    flat: list[Shape] = []
    for item in items:
        chain_of_names = isinstance(item, Several) and item.items and all(isinstance(one, Named) for one in item.items)
        flat.extend(item.items if isinstance(item, Several) and (item.signs or chain_of_names) else (item,))
    if (whole := added(items)) is not None and set(separators) <= {"and", ","}:
        return whole
    if set(separators) <= {"and", ","} and (chain := chained(items)) is not None:
        return chain
    first = items[0]
    others = flat[1:] if not (isinstance(first, Several) and first.signs) else flat
    if isinstance(first, Named) and len(items) > 1 and not any(isinstance(item, Named) for item in others):
        return Named(first.name, first.arguments, Several((first.value, *others)), first.symbol)
    return Several(tuple(flat), either="or" in separators) if len(flat) > 1 else flat[0]


def chained(items: Sequence[Shape]) -> Shape | None:
    """Join ``a < b`` and ``b < c`` to one chain."""
    orders = [item for item in items if isinstance(item, Order) and "!=" not in item.relations]
    if not 1 < len(orders) == len(items) or any(one.parts[-1] != two.parts[0] for one, two in pairwise(orders)):
        return None
    parts = orders[0].parts + tuple(part for order in orders[1:] for part in order.parts[1:])
    return inequality(parts, [relation for order in orders for relation in order.relations])


def congruent(tokens: Sequence[Token], levels: list[int], read: Read) -> Shape | None:
    """Read congruences with one modulus, about one name at most."""
    pieces, _ = split_at(tokens, levels, "sep")
    residues: list[Expr] = []
    names: set[str] = set()
    moduli: set[Expr] = set()
    for piece in filter(None, pieces):
        at = next((at for at, token in enumerate(piece) if token.kind == "cmd" and token.text == "pmod"), len(piece))
        modulus = parse(piece[at + 1 :])
        if at < len(piece) and modulus is None:
            return None
        moduli |= {modulus} if modulus is not None else set()
        sides, relations = split_at(piece[:at], [0] * at, "rel")
        if relations:
            name = name_of(sides[0])
            if len(relations) > 1 or relations[0] not in ("==", "=") or name is None or name[2] is None:
                return None
            names.add(name[0])
        value = read(sides[-1])
        found = complete(map(unitless, value.items if isinstance(value, Several) and value.signs else (value,)))
        if found is None:
            return None
        residues += found
    if len(names) > 1 or not residues or len(moduli) != 1:
        return None
    # a letter that no answer can spell
    steps = moduli.pop() * Expr("sym", name="#k")
    items = tuple(Quantity(residue + steps) for residue in residues)
    family = Family(items[0] if len(items) == 1 else Several(items), frozenset(("#k",)), "Z")
    return Named(names.pop(), (), family) if names else family
