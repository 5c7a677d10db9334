r"""Relations: names and their values, equations, inequalities as sets of numbers, unions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise

from magicrl.verifiers.maths import expression
from magicrl.verifiers.maths.answers import (
    Answer,
    Equation,
    Group,
    Matrix,
    Named,
    Order,
    Quantity,
    RealSet,
    Several,
    Span,
)
from magicrl.verifiers.maths.equality import number_value, same_value
from magicrl.verifiers.maths.expression import Expr
from magicrl.verifiers.maths.formulas import parse
from magicrl.verifiers.maths.lexer import Token
from magicrl.verifiers.maths.magnitudes import as_value
from magicrl.verifiers.maths.names import name_of
from magicrl.verifiers.maths.quantities import added
from magicrl.verifiers.maths.spans import MINUS_INFINITY, PLUS_INFINITY, joined_sets, subject_set, unequal

_FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


def related(
    parts: list[Sequence[Token]],
    relations: list[str],
    read: Callable[[Sequence[Token]], Answer | None],
    trusted: bool,
) -> Answer | None:
    """What a chain of relations says."""
    if not all(parts):
        return None
    kinds = set(relations)
    if kinds == {"in"} and len(parts) == 2:
        value = read(parts[1])
        name = name_of(parts[0])
        if value is None or name is None:
            return None
        return Named(name[0], name[1], value, name[2])
    if kinds <= {"=", "~", "=="}:
        relations = ["=" if relation == "==" else relation for relation in relations]
        return _equality(parts, relations, read)
    if kinds <= {"<", "<=", ">", ">="} or relations == ["!="]:
        formulas = [parse(part) for part in parts]
        trees = [tree for tree in formulas if tree is not None]
        return inequality(trees, relations) if len(trees) == len(parts) else None
    return None


def _equality(
    parts: list[Sequence[Token]], relations: list[str], read: Callable[[Sequence[Token]], Answer | None]
) -> Answer | None:
    name = name_of(parts[0])
    if "~" in relations:
        about = relations.index("~")
        # before the sign stands the exact value, unless it is a mere name
        exact = parts[: about + 1]
        if name is None and len(exact) == 1 and len(parts) == 2 and not _near(read(parts[0]), read(parts[1])):
            return Several(())  # 2 ~ 7 is no answer
        if len(exact) > 1 or name is None:
            return _equality(exact, relations[:about], read) if len(exact) > 1 else read(exact[0])
        value = read(parts[-1]) if len(parts) == 2 else None
        return None if value is None else Named(name[0], name[1], value, name[2])
    values = [read(part) for part in parts[1:]]
    names = [name_of(part) for part in parts[:-1]]
    if len(names) > 1 and all(names) and values[-1] is not None and set(relations) == {"="}:
        # a = b = c = 0
        return Several(tuple(Named(one[0], one[1], values[-1], one[2]) for one in names if one is not None))
    if name is not None:
        last = values[-1]
        if last is None or not _agree(values):
            return _contradiction(values)
        if isinstance(last, Matrix) and name[0].startswith("(") and {len(row) for row in last.rows} == {1}:
            last = Group("(", "(", tuple(row[0] for row in last.rows))  # a column of letters
        if isinstance(last, Several) and last.signs:
            return Several(tuple(Named(name[0], name[1], one, name[2]) for one in last.items), signs=True)
        return Named(name[0], name[1], last, name[2])
    first = read(parts[0])
    last_name = name_of(parts[-1])
    if last_name is not None and first is not None and _agree([first, *values[:-1]]):
        return Named(last_name[0], last_name[1], first, last_name[2])
    last = values[-1]
    of_sets = isinstance(first, Quantity) and first.expr.op == "set"
    if (first is None or of_sets) and last is not None and _agree(values) and _unread_formula(parts[0]):
        return Named(" ".join(token.text for token in parts[0]), (), last)
    if first is None or any(value is None for value in values):
        return None
    every = [first, *values]
    if isinstance(first, Quantity) and first.expr.symbols and len(values) > 1 and _agree(values):
        every = [first, values[-1]]  # a + b = 3 + 4 = 7
        last = values[-1]
    if all(isinstance(value, Quantity) and not value.expr.symbols for value in every):
        return every[-1] if _agree(every) else Several(())  # 5 = 6 is no answer, and equal to none
    if len(every) == 2 and isinstance(first, Several) and first.signs and isinstance(last, Quantity):
        equations = [Equation(one.expr, last.expr) for one in first.items if isinstance(one, Quantity)]
        return Several(tuple(equations), signs=True)  # 3x +- 4y = 0
    sides = [value.expr for value in every if isinstance(value, Quantity) and value.unit is None]
    return Equation(sides[0], sides[1]) if len(sides) == len(every) == 2 else None


def _contradiction(values: Sequence[Answer | None]) -> Answer | None:
    """``x = 5 = 6`` gives no value; what is not numbers is only not understood."""
    numbers = all(isinstance(value, Quantity) and not value.expr.symbols for value in values)
    return Several(()) if numbers else None


def _unread_formula(tokens: Sequence[Token]) -> bool:
    """A determinant or a sum whose value follows: a formula, if not one of this grammar, and no words."""
    kinds = {token.kind for token in tokens}
    words = any(token.kind == "word" and (token.roman or len(token.text) > 3) for token in tokens)
    return bool(kinds & {"cmd", "env", "fn", "cup"}) and not words and "unit" not in kinds


def _agree(values: Sequence[Answer | None]) -> bool:
    """Whether a chain of equal formulas is one: ``5 = 6`` gives no answer."""
    if len(values) < 2:
        return True
    formulas = [as_value(value) for value in values if isinstance(value, Quantity)]
    if len(formulas) != len(values):
        return False
    return all(
        first is not None and other is not None and same_value(first, other) is True
        for first, other in pairwise(formulas)
    )


def _near(exact: Answer | None, about: Answer | None) -> bool:
    """Whether an approximation is one, to a unit of its last digit; formulas without a value are not doubted."""
    if exact is None or about is None:
        return True
    if not (isinstance(exact, Quantity) and isinstance(about, Quantity)):
        return False
    values = [number_value(one.expr) for one in (exact, about)]
    numbers = [value for value in values if value is not None]
    if len(numbers) != 2:
        return True
    decimals = about.expr.args[0].decimals if about.expr.op == "neg" else about.expr.decimals
    return abs(numbers[0] - numbers[1]) < Fraction(1, 10**decimals)


def inequality(parts: Sequence[Expr], relations: Sequence[str]) -> Answer | None:
    """A set of numbers when it bounds one name by formulas without it, else an order or nothing."""
    if list(relations) == ["!="]:
        return _unequal(parts) or Order(tuple(parts), ("!=",))
    if any(relation in (">", ">=") for relation in relations):
        if any(relation in ("<", "<=") for relation in relations):
            return None
        parts, relations = parts[::-1], [_FLIPPED[relation] for relation in reversed(relations)]
    closed = [relation == "<=" for relation in relations]
    subject = [at for at, part in enumerate(parts) if _is_subject(part, parts)]
    if len(parts) == 2 and len(subject) >= 1:
        at = _one_subject(subject, parts)
        if at == 0:
            return RealSet((Span(MINUS_INFINITY, False, parts[1], closed[0]),), _spelling(parts[0]))
        if at == 1:
            return RealSet((Span(parts[0], closed[0], PLUS_INFINITY, False),), _spelling(parts[1]))
    if len(parts) == 2 and (solved := _solved(parts[0], parts[1], closed[0])) is not None:
        return solved
    if len(parts) == 2 and (around := _absolute(parts, closed[0])) is not None:
        return around
    if len(parts) == 3 and _is_subject(parts[1], parts):
        return RealSet((Span(parts[0], closed[0], parts[2], closed[1]),), _spelling(parts[1]))
    if len(parts) == 3:
        halves = [_solved(parts[0], parts[1], closed[0]), _solved(parts[1], parts[2], closed[1])]
        known = [half for half in halves if half is not None]
        if len(known) == 2:
            return joined_sets(known, ["and"])
    return Order(tuple(parts), tuple(relations))


def _solved(left: Expr, right: Expr, closed: bool) -> RealSet | None:
    """A linear inequality in one name: ``-x < -1`` is ``x > 1``."""
    names = left.symbols | right.symbols
    if len(names) != 1:
        return None
    (name,) = names
    whole = Expr("add", (left, Expr("neg", (right,))))
    values = [expression.substitute(whole, name, expression.number(at)) for at in (-2, 0, 1, 3)]
    steps = [Expr("add", (after, Expr("neg", (before,)))) for before, after in pairwise(values)]
    slope, twice = steps[1], Expr("mul", (expression.number(2), steps[1]))
    rise = number_value(slope)
    if not all(same_value(step, twice) is True for step in (steps[0], steps[2])):
        return None
    if not rise:
        return None
    bound = Expr("neg", (Expr("div", (values[1], slope)),))
    if rise > 0:
        return RealSet((Span(MINUS_INFINITY, False, bound, closed),), name)
    return RealSet((Span(bound, closed, PLUS_INFINITY, False),), name)


def _absolute(parts: Sequence[Expr], closed: bool) -> Answer | None:
    """``|x - 1| < 2`` and ``|x| > 2``, of a linear formula in one name and a positive number."""
    for at, part in enumerate(parts):
        bound = parts[1 - at]
        size = number_value(bound)
        if not (part.op == "fn" and part.name == "abs" and size is not None and size > 0):
            continue
        inner, minus = part.args[0], Expr("neg", (bound,))
        if at == 0:  # |x| < c
            halves, word = [_solved(inner, bound, closed), _solved(minus, inner, closed)], "and"
        else:  # c < |x|
            halves, word = [_solved(bound, inner, closed), _solved(inner, minus, closed)], "or"
        known = [half for half in halves if half is not None]
        return joined_sets(known, [word]) if len(known) == 2 else None
    return None


def _one_subject(subject: list[int], parts: Sequence[Expr]) -> int | None:
    """Of two names the one that is bounded: not to be told; of a name and a number the name."""
    numbers = [at for at in subject if not parts[1 - at].symbols]
    return numbers[0] if numbers else None


def _is_subject(part: Expr, parts: Sequence[Expr]) -> bool:
    """A name, or a function of names, that the other parts do not hold."""
    named = part.op == "sym" or (part.op == "apply" and all(arg.op == "sym" for arg in part.args))
    return named and not any(part.symbols & other.symbols for other in parts if other is not part)


def _spelling(part: Expr) -> str:
    return part.name if part.op == "sym" else f"{part.name}({part.args[0].name})"


def _unequal(parts: Sequence[Expr]) -> RealSet | None:
    for one, other in ((parts[0], parts[1]), (parts[1], parts[0])):
        if one.op == "sym" and not other.symbols:
            return RealSet(
                (Span(MINUS_INFINITY, False, other, False), Span(other, False, PLUS_INFINITY, False)), one.name
            )
    return None


def joined(items: Sequence[Answer], separators: Sequence[str]) -> Answer | None:
    """A list of items: a union of sets of numbers, several answers, or one name with several values."""
    if len(items) > 1 and (apart := unequal(items[0], items[1:])) is not None:
        return apart
    if any(isinstance(item, RealSet) for item in items) and len(items) > 1:
        sets = [subject_set(item) for item in items]
        known = [one for one in sets if one is not None]
        if len(known) == len(items):
            return joined_sets(known, separators)
        return Several(tuple(items))
    flat: list[Answer] = []
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
        head = first.value.items if isinstance(first.value, Several) else (first.value,)
        return Named(first.name, first.arguments, Several((*head, *others)), first.symbol)
    named_flat: list[Answer] = []
    for item in flat:
        if isinstance(item, Named) and isinstance(item.value, Several) and item.value.signs:
            named_flat.extend(Named(item.name, item.arguments, one, item.symbol) for one in item.value.items)
        else:
            named_flat.append(item)
    return Several(tuple(named_flat), either="or" in separators) if len(named_flat) > 1 else named_flat[0]


def chained(items: Sequence[Answer]) -> Answer | None:
    """``a < b`` and ``b < c`` as one chain."""
    orders = [item for item in items if isinstance(item, Order) and "!=" not in item.relations]
    if len(orders) != len(items) or len(orders) < 2:
        return None
    if any(one.parts[-1] != other.parts[0] for one, other in pairwise(orders)):
        return None
    parts = orders[0].parts + tuple(part for order in orders[1:] for part in order.parts[1:])
    return inequality(parts, [relation for order in orders for relation in order.relations])
