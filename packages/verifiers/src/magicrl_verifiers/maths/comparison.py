"""Comparison of two answers. True and False are final; None leaves the pair to Math-Verify."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import combinations, pairwise
from string import ascii_letters
from typing import Any

from magicrl_verifiers.maths.answers import (
    ALL_REALS,
    Brackets,
    Clock,
    Domain,
    Dotted,
    Equation,
    Expr,
    Family,
    Fixed,
    Matrix,
    Named,
    Order,
    Piecewise,
    Quantity,
    Ratio,
    RealSet,
    Sentence,
    Several,
    Shape,
    Text,
    Unit,
    Within,
    all_of,
    any_of,
    as_value,
    complete,
    function,
    names_of,
    numeral,
    rename,
    substitute,
    symbol,
    unitless,
    without_degrees,
)
from magicrl_verifiers.maths.equality import constant_ratio, linear, number_value, quadratic, rational_value, same_value
from magicrl_verifiers.maths.literals import DENIALS, endless, rounds, same_words, word_number
from magicrl_verifiers.maths.quantities import UNITS, in_base_units, singular
from magicrl_verifiers.maths.relations import (
    MINUS_INFINITY,
    PLUS_INFINITY,
    alternatives,
    as_spans,
    same_set,
    subject_set,
    unbounded,
)
from magicrl_verifiers.maths.sequences import counting, same_family

_HALF_TURN = symbol("pi") / numeral(180)
_FLOAT_ERROR = 2**-52


def same_quantity(reference: Quantity, answer: Quantity) -> bool | None:
    left, right = (None if one.unit is None or one.unit.kind == "none" else one.unit for one in (reference, answer))
    if left is not None and right is not None:
        return _both_units(reference.expr, left, answer.expr, right)
    unit = left or right
    if unit is None:
        verdict = same_number(reference.expr, answer.expr)
        return True if verdict is False and degrees_left_out(reference.expr, answer.expr) else verdict
    given, bare = (reference.expr, answer.expr) if left else (answer.expr, reference.expr)
    if unit.kind == "percent":
        hundredth = given / numeral(100)
        share = None if left else number_value(bare)
        if share is not None and abs(share) < 1:
            return same_number(bare, hundredth)  # 0.25 is no 0.25%
        # 28 for 28%, and 0.28 for it: the question says "what percentage"
        return any_of([same_number(one, bare) for one in (given, hundredth)])
    if unit.kind == "degree":
        # without a degree sign a number is degrees like the other; with a pi it is radians
        verdict = False if given.holds("const", "pi") else same_number(given, without_degrees(bare))
        radians = given.holds("const", "pi") or (verdict is not True and bare.holds("const", "pi"))
        return same_number(given * _HALF_TURN, bare) if radians else verdict
    if unit.kind == "unit":  # 10 \mathrm{m}/\mathrm{s} against 10m/s
        based = in_base_units(bare, None)
        if based is not None and not given.symbols:
            return same_value(in_base_units(given, unit) or given, based)
        if unit.noun and bare.symbols.issuperset(unit.noun):
            letters = [symbol(letter) for letter in unit.noun]  # "2 pi hr" is no hours
            return same_value(Expr("mul", (given, *letters)), bare)
    return same_number(reference.expr, answer.expr)


def _both_units(reference: Expr, left: Unit, answer: Expr, right: Unit) -> bool | None:
    if left.kind == right.kind == "unit":
        if any((left.dimension, right.dimension) == ((("L", n),), (("any", n),)) for n in (1, 2, 3)):
            return same_number(reference, answer)  # "square units" means the same as no unit
        if left.dimension != right.dimension:
            # the word "pounds" is money, too
            pounds = UNITS["pound"] in (left, right) and UNITS["£"].dimension in (left.dimension, right.dimension)
            return same_number(reference, answer) if pounds else False
        # a product with a factor would lose the decimals of a literal, which decide about rounding
        if left.factor == right.factor:
            return same_number(reference, answer)
        return same_value(numeral(left.factor) * reference, numeral(right.factor) * answer)
    if left.kind != right.kind:
        if {left.kind, right.kind} != {"degree", "unit"} or () not in (left.dimension, right.dimension):
            return False
        # the radian is a unit without a dimension
        degrees, radians = (reference, answer) if left.kind == "degree" else (answer, reference)
        return same_value(degrees * _HALF_TURN, radians)
    # the counted things must agree; a percentage may leave out what it is a part of
    if left.noun != right.noun and (left.kind == "noun" or (left.kind == "percent" and left.noun and right.noun)):
        return False
    return same_number(reference, answer)


def degrees_left_out(reference: Expr, answer: Expr) -> bool:
    """Return whether ``180 - a`` means ``180^\\circ - a``: only one side has degree signs, the other has no pi."""
    for one, other in ((reference, answer), (answer, reference)):
        bare = without_degrees(one)
        if bare != one and bare.symbols and not other.holds("const", "pi"):
            return same_value(bare, other) is True
    return False


def same_number(reference: Expr, answer: Expr) -> bool | None:
    """Compare two formulas; a decimal may be the value of the other one to six or more significant digits."""
    verdict = same_value(reference, answer)
    if verdict is False and (_approximates(answer, reference) or _approximates(reference, answer)):
        return True
    return verdict


def _approximates(decimal: Expr, exact: Expr) -> bool:
    """Return whether a decimal is an irrational number, rounded or truncated to six or more significant digits."""
    negative = decimal.op == "neg"
    literal = decimal.args[0] if negative else decimal
    # `literals.approximates_fraction` compares with fractions
    if literal.op != "num" or not literal.decimals or rational_value(exact) is not None:
        return False
    value = number_value(exact)
    if value is None:
        return False
    said = -literal.value if negative else literal.value
    # all digits of a double are enough
    double = literal.value * 10**literal.decimals >= 10**14 and abs(said - value) <= abs(value) * Fraction(_FLOAT_ERROR)
    return double or rounds(said, literal.decimals, value)


def same_ratio(reference: Shape, answer: Shape) -> bool | None:
    if isinstance(reference, Clock) and isinstance(answer, Clock) and _same_time(reference, answer):
        return True
    left, right = (one.ratio if isinstance(one, Clock) else one for one in (reference, answer))
    if isinstance(left, Ratio) and isinstance(right, Ratio):
        if len(left.parts) != len(right.parts):
            return False
        # the cross products of zeros are equal for every ratio: without this, 0:0 would match any reference
        nothing = [all(same_value(part, numeral(0)) is True for part in one.parts) for one in (left, right)]
        if any(nothing):
            return all(nothing)
        # by cross products, without dividing by a part that may be zero
        pairs = combinations(zip(left.parts, right.parts, strict=True), 2)
        return all_of([same_value(a * d, c * b) for (a, b), (c, d) in pairs])
    ratio, other = (left, right) if isinstance(left, Ratio) else (right, left)
    value = unitless(other)
    if isinstance(ratio, Ratio) and len(ratio.parts) == 2 and value is not None:
        return same_value(Expr("div", ratio.parts), value)
    return False


def _same_time(reference: Clock, answer: Clock) -> bool:
    # 3:00 leaves open which half of the day it is, 15:00 does not
    either = not reference.half and reference.seconds < 13 * 3600
    return _moment(reference) == _moment(answer) or (either and reference.seconds == answer.seconds)


def _moment(clock: Clock) -> int:
    """Return the seconds after midnight; 12 am is midnight, 12 pm is noon."""
    half_day = 12 * 3600
    in_half = clock.half in ("am", "pm")
    return clock.seconds % half_day + half_day * (clock.half == "pm") if in_half else clock.seconds


def one_value(items: Sequence[Shape]) -> bool:
    """Return whether values joined by "or" are all equal, as in ``\\frac{3}{10} or 30\\%``: that is no hedging."""
    values = complete(as_value(item) if isinstance(item, Quantity) else None for item in items)
    return values is not None and all(same_value(one, other) is True for one, other in pairwise(values))


def numbered_names(plain: Sequence[Shape], items: Sequence[Shape]) -> bool:
    """Return whether ``items`` are ``x_1 = .., x_2 = ..``, and the other list ``x = .. or x = ..``."""
    names = {item.name for item in plain if isinstance(item, Named)}
    numbered = {item.name for item in items if isinstance(item, Named)}
    stems = {re.sub(r"_\d+$", "", name) for name in numbered}
    return len(names) == 1 and names == stems and len(numbered) == len(items)


def ordered_names(items: Sequence[Shape]) -> bool:
    """Return whether names give an order: ``a = 1, b = 2`` has one; ``x_1 = 1, x_2 = 2`` has none."""
    stems = {item.name.split("_")[0] for item in items if isinstance(item, Named)}
    return len(stems) == len(items)


def by_name(items: Sequence[Shape]) -> Sequence[Shape]:
    """Return coordinates in the order of neighbouring letters or of numbers; none if a name has two values.

    Example: ``y = 2, x = 3`` is the point (3, 2), and ``x = 3, x = 2`` is no point.
    """
    named = [item for item in items if isinstance(item, Named)]
    names = {item.name for item in named}
    neighbours = "".join(sorted(names)) in ascii_letters or len({name.split("_")[0] for name in names}) == 1
    if not len(names) == len(named) == len(items) or not neighbours:
        return items if len(names) == len(named) else ()
    placed = {(len(item.name), item.name): item for item in named}
    return [placed[key] for key in sorted(placed)]


def assigned(answer: Shape) -> dict[str, Shape] | None:
    """Return the values of ``x = 1, y = 2`` or ``(x, y) = (1, 2)`` by name; None for one name, or alternatives."""
    if isinstance(answer, Named) and isinstance(answer.value, Brackets) and answer.name.startswith("("):
        names, values = answer.name.strip("()").split(","), answer.value.items
    elif _is_set(answer) or (isinstance(answer, Several) and not answer.either):
        assert isinstance(answer, Several | Brackets)
        names = [item.name for item in answer.items if isinstance(item, Named) and not item.arguments]
        values = values_of(answer.items)
    else:
        return None
    return dict(zip(names, values, strict=True)) if 1 < len(set(names)) == len(names) == len(values) else None


def _is_set(answer: Shape) -> bool:
    return isinstance(answer, Brackets) and answer.opening == "{"


def values_of(items: Sequence[Shape]) -> tuple[Shape, ...]:
    return tuple(item.value if isinstance(item, Named) else item for item in items)


def same_order(reference: Order, answer: Order) -> bool | None:
    """Compare two chains part by part, or two inequalities up to a constant factor of the right sign."""
    if reference.relations != answer.relations:
        return False
    verdicts = [same_value(one, other) for one, other in zip(reference.parts, answer.parts, strict=True)]
    if verdicts.count(True) == len(verdicts) or len(reference.parts) != 2:
        return all_of(verdicts)
    ratio = constant_ratio(reference.parts[0] - reference.parts[1], answer.parts[0] - answer.parts[1])
    # a negative factor reverses an inequality, but not an "is not equal"
    return None if ratio is None else ratio != 0 if reference.relations == ("!=",) else ratio > 0


def solves(reference: Equation, answer: Expr) -> bool:
    """Return whether a formula is the value of the only name that it lacks, in an equation linear in that name.

    Example: the answer ``3/sin(t)`` to ``r sin(t) = 3``. With two names missing the answer is incomplete.
    """
    names = reference.left.symbols | reference.right.symbols
    missing = names - answer.symbols
    if len(missing) != 1 or not answer.symbols <= names:
        return False
    (name,) = missing
    whole = reference.left - reference.right
    if same_value(substitute(whole, name, answer), numeral(0)) is not True:
        return False
    if (found := linear(whole, name)) is None:
        return False
    # a linear equation has one solution, but where its slope is zero any value may solve it: xy = 2x^2 at x = 0
    constant, step = found
    denominator = answer.args[1] if answer.op == "div" else numeral(1)
    return bool(constant_ratio(step, denominator) or constant_ratio(constant, numeral(1)))


def solutions(equation: Equation) -> Named | None:
    """Return the two solutions of a quadratic equation in one name."""
    found = quadratic(equation.left - equation.right)
    if found is None:
        return None
    name, _, low, high, discriminant = found
    return Named(name, (), Several((Quantity(low), Quantity(high))), symbol(name)) if discriminant else None


def _formula(answer: Shape) -> Expr | None:
    """Return a definition by cases as one formula; None if a value is no formula, or a condition no set of reals."""
    if not isinstance(answer, Piecewise):
        return unitless(answer)
    args: list[Expr] = []
    for value, condition in answer.pieces:
        formula, where = unitless(value), None if condition is None else subject_set(condition)
        if formula is None or (where is None) != (condition is None):
            return None
        if where is None:
            args += [formula, Expr("bounds")]
        for span in where.spans if where is not None else ():
            subject = Expr("sym", name=where.subject if where is not None else "")
            low = () if span.low == MINUS_INFINITY else (_bound(subject, span.low, span.low_closed),)
            high = () if span.high == PLUS_INFINITY else (_bound(span.high, subject, span.high_closed),)
            args += [formula, Expr("bounds", (*low, *high))]
    return Expr("cases", tuple(args)) if args else None


def _bound(above: Expr, below: Expr, closed: bool) -> Expr:
    return Expr("bound", (above - below,), "closed" if closed else "open")


_CLOSED = (Fixed, Domain, Within, Piecewise, Dotted, Sentence)
"""Shapes that equal only their own kind, or a name with such a value."""


def same(reference: Shape, answer: Shape) -> bool | None:
    """Return whether an answer means the same as the reference answer."""
    if reference == answer:
        return True
    if isinstance(reference, Family) or isinstance(answer, Family):
        return same_family(reference, answer, same)
    closed = isinstance(reference, _CLOSED) or isinstance(answer, _CLOSED)
    # by name first, then by position: x = 1, y = 2 may be written (y, x) = (2, 1)
    given, said = assigned(reference), assigned(answer)
    if not closed and given is not None and said is not None and given.keys() == said.keys():
        return all_of([same(value, said[name]) for name, value in given.items()])
    if isinstance(reference, Named) and isinstance(answer, Named):
        return _both_named(reference, answer)
    if not closed and (isinstance(reference, Equation | Order) or isinstance(answer, Equation | Order)):
        return _relations(reference, answer)
    if isinstance(reference, Named) or isinstance(answer, Named):
        return _one_named(reference, answer)
    if closed:
        return _closed(reference, answer)
    for kinds, compare in _BY_KIND:
        if isinstance(reference, kinds) or isinstance(answer, kinds):
            return compare(reference, answer)
    return (
        same_quantity(reference, answer) if isinstance(reference, Quantity) and isinstance(answer, Quantity) else None
    )


def _closed(reference: Shape, answer: Shape) -> bool | None:
    """Compare sets that are no intervals, definitions by cases, fixed notation, and lists that continue by a rule."""
    # the blackboard letter may be written as a plain one
    if isinstance(reference, Domain) and isinstance(answer, Quantity):
        return answer == Quantity(symbol(reference.name)) if len(reference.name) == 1 else False
    if isinstance(reference, Domain) and isinstance(answer, Domain):
        # N is the positive integers here (docs/reference/maths-verifier.md, policies)
        return {reference.name, answer.name} <= {"N", "Z+"} or {reference.name, answer.name} <= {"N0", "Z+0"}
    for one, other in ((reference, answer), (answer, reference)):
        if isinstance(one, Domain) and (listed := counting(other)):
            return one.name in listed
        if isinstance(one, Within) and isinstance(other, RealSet) and one.domain == "Z":
            counts = other.subject in ("n", "m", "k")  # letters of whole numbers, so n > 2 is complete
            return counts and same(one.condition, other) is True
    if isinstance(reference, Piecewise) or isinstance(answer, Piecewise):
        # conditions that are not about the size of a letter are not compared
        left, right = _formula(reference), _formula(answer)
        return same_value(left, right) if left is not None and right is not None else False
    return False


def _words(reference: Shape, answer: Shape) -> bool | None:
    if isinstance(reference, Text) and isinstance(answer, Text):
        return same_words(reference.words, answer.words)
    text, other = (reference, answer) if isinstance(reference, Text) else (answer, reference)
    if not isinstance(text, Text) or not isinstance(other, Quantity):
        return None
    words, formula = text.words, other.expr
    if len(words) == 2 and len(words[1]) == 1 and other.unit is None and words[0] not in DENIALS:
        return formula.op == "sym" and formula.name.casefold() == words[1]  # student B
    if endless(words):
        return formula == symbol("inf") and other.unit is None
    value = word_number(words)
    if value is None:
        return False
    said = Quantity(numeral(value))
    return same_quantity(said, other) if text is reference else same_quantity(other, said)


def _one_named(reference: Shape, answer: Shape) -> bool | None:
    """Compare a named value with a value without a name."""
    if isinstance(reference, Named):
        count = as_count(reference) if isinstance(answer, Quantity) else None
        if count is not None:
            return same(count, answer) if count.expr.symbols else False  # C(5, 2) as a reference answer is a point
        if isinstance(reference.value, Quantity) and isinstance(answer, Several) and not answer.signs:
            return False  # c_1 = 0 is not "c_1 = 0 or c_2 = 0"
        return same(reference.value, answer)
    assert isinstance(answer, Named)
    if answer.name in names_of(answer.value):
        return False  # x = x^2 + 1 is an equation
    count = as_count(answer) if isinstance(reference, Quantity) else None
    if (
        count is None
        and isinstance(reference, Several)
        and len({one.name for one in reference.items if isinstance(one, Named)}) > 1
    ):
        return isinstance(answer.value, Several | Brackets | Matrix) and same(reference, answer.value)
    return same(reference, count or answer.value)


def _both_named(reference: Named, answer: Named) -> bool | None:
    if (
        reference.name == answer.name
        and reference.arguments != answer.arguments
        and len(reference.arguments) == len(answer.arguments)
    ):
        if names_of(answer.value) & (set(reference.arguments) - set(answer.arguments)):
            return False  # f(t) = x^2 is a constant
        return same(
            reference.value, rename(answer.value, dict(zip(answer.arguments, reference.arguments, strict=True)))
        )
    one, other = _member(reference), _member(answer)
    if one is not None and other is not None and one[0] == other[0] and one[1] != other[1]:
        return same(reference.value, rename(answer.value, {other[1]: one[1]}))  # a_n = 2n is a_k = 2k
    functions = bool(reference.arguments), bool(answer.arguments)
    alike = reference.name == answer.name and (reference.arguments == answer.arguments or not all(functions))
    alike = alike or (one is not None and one == other) or _squeezed(reference.name) == _squeezed(answer.name)
    if alike or (functions[0] != functions[1] and {"y", "y'"} & {reference.name, answer.name}):
        return same(reference.value, answer.value)  # y = 2x and f(x) = 2x
    # two names that are formulas may still be one relation: x = y/2 is y = 2x
    return False if reference.symbol is None and answer.symbol is None else _relations(reference, answer)


def as_count(named: Named) -> Quantity | None:
    """Turn the named point ``C(n, k)`` into the number of choices, and ``P(n, k)`` into that of arrangements."""
    group = named.value
    if named.name not in ("C", "P") or not isinstance(group, Brackets) or len(group.items) != 2 or group.opening != "(":
        return None
    parts = complete(map(unitless, group.items))
    if parts is None:
        return None
    chosen = function("binomial", *parts)
    return Quantity(chosen if named.name == "C" else chosen * function("factorial", parts[1]))


def _member(named: Named) -> tuple[str, str] | None:
    """Return the sequence and the letter of ``a_n`` or ``a(n)``."""
    stem, _, letter = named.name.partition("_")
    if len(named.arguments) == 1 and not letter:
        return named.name, named.arguments[0]
    return (stem, letter) if len(letter) == 1 and letter.isalpha() and not named.arguments else None


_LOOSE = re.compile(r"^(?:angle:)?(?:vec:)?(?:bar:)?(?:hat:)?|[\s_{}()\\]")


def _squeezed(name: str) -> str:
    """Return a name without accents, the sign of an angle, and braces, which authors leave out."""
    bare = _LOOSE.sub("", name)
    # two points name a segment, three an angle, in either direction; a vector has one direction
    points = len(bare) in (2, 3) and bare.isalpha() and bare.isupper() and not name.startswith("vec:")
    return min(bare, bare[::-1]) if points else bare  # AB is BA, angle ABC is CBA


def _relations(reference: Shape, answer: Shape) -> bool | None:
    left, right = _equation(reference), _equation(answer)
    if left is not None and right is not None:
        ratio = constant_ratio(left.left - left.right, right.left - right.right)
        if ratio:
            return True  # x = y/2 is 2x - y = 0
        for one, equation in ((reference, right), (answer, left)):
            if isinstance(one, Named) and isinstance(one.value, Quantity) and one.symbol is not None:
                names = equation.left.symbols | equation.right.symbols
                if names - one.value.expr.symbols == one.symbol.symbols and solves(equation, one.value.expr):
                    return True
        return None if ratio is None else False
    if isinstance(reference, Order) and isinstance(answer, Order):
        return same_order(reference, answer)
    if isinstance(answer, Equation) and not isinstance(reference, Equation | Order | Named):
        # the answer x + y = 5 gives 5 if the reference is a value
        named = isinstance(reference, Several) and any(isinstance(item, Named) for item in reference.items)
        valued = answer.left.symbols and not answer.right.symbols and not named
        return same(reference, Quantity(answer.right)) if valued else False
    if isinstance(reference, Equation) and (value := unitless(answer)) is not None:
        return solves(reference, value)
    if isinstance(reference, Equation) and (roots := solutions(reference)) is not None:
        return same(roots, answer)  # x^2 = 9 as a reference means both its solutions
    return None if isinstance(reference, Order) or isinstance(answer, Order) else False


def _equation(answer: Shape) -> Equation | None:
    if isinstance(answer, Named) and answer.symbol is not None and (value := unitless(answer.value)) is not None:
        return Equation(answer.symbol, value)
    return answer if isinstance(answer, Equation) else None


def _sets(reference: Shape, answer: Shape) -> bool | None:
    left, right = as_spans(reference), as_spans(answer)
    # a reference answer may list intervals without "or"; in an answer that would be hedging
    if left is None and isinstance(reference, Several) and (reference.either or any(map(unbounded, reference.items))):
        left = alternatives(reference.items)
    if right is None and isinstance(answer, Several) and answer.either:
        right = alternatives(answer.items)
    if isinstance(answer, Quantity) and reference == ALL_REALS:
        return answer == Quantity(symbol("R"))
    for one, other in ((reference, answer), (answer, reference)):
        if one == RealSet(()) and isinstance(other, Text):
            return other.words in (("none",), ("does", "not", "exist"))
        if one == RealSet(()) and other == Quantity(symbol("phi")):
            return True  # a phi in place of the sign of the empty set
    if left is None or right is None:
        if isinstance(reference, Several) or isinstance(answer, Several):
            return _several(reference, answer)
        return False if isinstance(reference, Quantity | Text) or isinstance(answer, Quantity | Text) else None
    # an interval has no subject, so it may equal a condition on any name
    if left.subject and right.subject and _squeezed(left.subject) != _squeezed(right.subject):
        return False
    return same_set(left, right)


def _several(reference: Shape, answer: Shape) -> bool | None:
    """Compare lists without order, unless names or brackets give one."""
    if isinstance(reference, Several) and isinstance(answer, Several):
        return _both_several(reference, answer)
    several, group = (reference, answer) if isinstance(reference, Several) else (answer, reference)
    assert isinstance(several, Several)
    # "or" in an answer may only join spellings of one value
    if several is answer and several.either and one_value(several.items):
        return all_of([same(reference, item) for item in several.items])
    if isinstance(group, Quantity) and all(isinstance(item, Named) for item in several.items):
        shared = set(values_of(several.items))  # p = q = 2
        return same(group, shared.pop()) if len(shared) == 1 else False
    if isinstance(reference, Text) and (said := [item.words for item in several.items if isinstance(item, Text)]):
        # "yes, it is": a comma between words
        return len(said) == len(several.items) and same_words(
            reference.words, tuple(word for part in said for word in part)
        )
    if isinstance(group, Brackets) and group.opening == group.closing:
        if group.opening == "{":
            if several is reference and ordered_names(several.items):
                return False  # {1, 2} leaves open which of x and y is 1
            # names count where both sides give them
            listed = several.items if any(isinstance(item, Named) for item in group.items) else values_of(several.items)
            mine, theirs = (listed, group.items) if several is reference else (group.items, listed)
            return matched(mine, theirs, same=same_member)
        # a pair in [ ] is an interval; only longer groups are lists
        if group.opening in "(<" or len(group.items) != 2:
            items = by_name(several.items)
            return in_order(items, group.items) if items and not (several.signs or several.either) else False
    return False if isinstance(group, Quantity | Text | Ratio | Clock | Brackets | Matrix) else None


def _both_several(reference: Several, answer: Several) -> bool | None:
    left, right = reference.items, answer.items
    # names give the values an order: a = 1, b = 2 means 1, 2
    if ordered_names(left) and not any(isinstance(item, Named) for item in right):
        return in_order(left, right)
    named = all(isinstance(item, Named) for item in (*left, *right))
    if named and reference.either != answer.either and ordered_names(left):
        return False  # "x = 1 and y = 2" is not "x = 1 or y = 2"
    if not named or numbered_names(left, right) or numbered_names(right, left):
        left, right = values_of(left), values_of(right)
    units = [item.unit for item in reference.items if isinstance(item, Quantity) and item.unit is not None]
    nouns = [singular(unit.words[-1]) for unit in units if unit.words]
    # without repeated nouns the order of a list has no meaning
    if len(set(nouns)) == len(nouns):
        return matched(left, right)
    return in_order(left, right)


def in_order(reference: Sequence[Shape], answer: Sequence[Shape]) -> bool | None:
    """Compare item by item."""
    if len(reference) != len(answer):
        return False
    return all_of([same(left, right) for left, right in zip(reference, answer, strict=True)])


def same_member(reference: Shape, answer: Shape) -> bool | None:
    """Compare members of sets: as an answer ``{3}`` is ``3``, but not as a member of a set."""
    sets = [one == RealSet(()) or _is_set(one) for one in (reference, answer)]
    return same(reference, answer) if sets[0] == sets[1] else False


def matched(
    reference: Sequence[Shape], answer: Sequence[Shape], *, same: Callable[[Shape, Shape], bool | None] = same
) -> bool | None:
    """Pair items off in any order; equal items count with their multiplicity."""
    if len(reference) != len(answer):
        return False
    left = list(answer)
    found: list[bool | None] = []
    for item in reference:
        verdict: bool | None = False
        for at, candidate in enumerate(left):
            one = same(item, candidate)
            if one is True:
                left.pop(at)
                verdict = True
                break
            # one undecided item leaves the whole list undecided
            verdict = None if one is None else verdict
        if verdict is False:
            return False
        found.append(verdict)
    return all_of(found)


def _groups(reference: Shape, answer: Shape) -> bool | None:
    if isinstance(reference, Matrix) and isinstance(answer, Matrix):
        if len(reference.rows) != len(answer.rows) or len(reference.rows[0]) != len(answer.rows[0]):
            return False
        return all_of([in_order(left, right) for left, right in zip(reference.rows, answer.rows, strict=True)])
    both = (reference, answer) if isinstance(reference, Brackets) and isinstance(answer, Brackets) else None
    if both and (both[0].opening, both[0].closing) == (both[1].opening, both[1].closing):
        if both[0].opening == "{":
            return matched(both[0].items, both[1].items, same=same_member)
        return in_order(both[0].items, both[1].items)
    # {5} is 5
    if (inner := _only_member(reference)) is not None:
        return same(inner, answer)
    if (inner := _only_member(answer)) is not None:
        return same(reference, inner)
    if both:
        return _brackets_aside(*both)
    for one, other in ((reference, answer), (answer, reference)):
        if not isinstance(one, Brackets) or len(one.items) != 1 or not one.opening == one.closing == "[":
            continue
        whole, value = unitless(one.items[0]), unitless(other)
        if whole is not None and value is not None:
            return value.holds("fn", "floor") and same_value(function("floor", whole), value) is True  # Gauss's [n/2]
    matrix, other = (reference, answer) if isinstance(reference, Matrix) else (answer, reference)
    if isinstance(matrix, Matrix) and isinstance(other, Brackets):
        listed = [
            item.items for item in other.items if isinstance(item, Brackets) and item.opening == other.opening == "["
        ]
        if len(listed) == len(other.items) and len(set(map(len, listed))) == 1:
            return _groups(matrix, Matrix(tuple(listed)))
        square = other.opening == other.closing == "[" and len(other.items) > 2
        if not square and not {other.opening, other.closing} <= {"(", "<"}:
            return None
        vector = matrix.rows[0] if len(matrix.rows) == 1 else tuple(row[0] for row in matrix.rows)
        return in_order(vector, other.items) if 1 in (len(matrix.rows), len(matrix.rows[0])) else False
    return False if isinstance(reference, Quantity | Text) or isinstance(answer, Quantity | Text) else None


def _only_member(answer: Shape) -> Shape | None:
    return answer.items[0] if isinstance(answer, Brackets) and _is_set(answer) and len(answer.items) == 1 else None


def _brackets_aside(reference: Brackets, answer: Brackets) -> bool | None:
    """Compare groups in different brackets: only angle brackets and parentheses mean the same, a vector."""
    marks = {reference.opening, reference.closing, answer.opening, answer.closing}
    # three or more numbers are no interval, whatever the brackets are
    vectors = marks == {"(", "<"} or (marks <= {"(", "<", "["} and len(reference.items) > 2)
    paired = reference.opening == reference.closing and answer.opening == answer.closing
    return in_order(reference.items, answer.items) if vectors and paired else False


_BY_KIND: tuple[tuple[Any, Callable[[Shape, Shape], bool | None]], ...] = (
    (RealSet, _sets),
    (Several, _several),
    (Brackets | Matrix, _groups),
    (Ratio | Clock, same_ratio),
    (Text, _words),
)
"""Comparison of two answers by the kind of one of them; the first row that fits is used."""
