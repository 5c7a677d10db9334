"""Whether two answers say the same. True and False are final; None leaves the pair to Math-Verify."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

from magicrl.verifiers.maths.answers import (
    ALL_REALS,
    Answer,
    Based,
    Clock,
    Cycles,
    Domain,
    Dotted,
    Equation,
    Expr,
    Family,
    Group,
    Matrix,
    Named,
    Order,
    Piecewise,
    Quantity,
    Ratio,
    RealSet,
    Sentence,
    Several,
    Text,
    Unit,
    Within,
    all_of,
    as_value,
    complete,
    function,
    number,
    plain,
    rename,
    substitute,
    symbol,
    without_degrees,
)
from magicrl.verifiers.maths.equality import approximates, constant_ratio, number_value, same_value
from magicrl.verifiers.maths.literals import DENIALS, endless, same_words, word_number
from magicrl.verifiers.maths.quantities import in_base_units, singular
from magicrl.verifiers.maths.relations import (
    MINUS_INFINITY,
    PLUS_INFINITY,
    alternatives,
    as_spans,
    same_set,
    subject_set,
    unbounded,
)
from magicrl.verifiers.maths.sequences import counting, names_of, same_dotted, same_family

_HALF_TURN = symbol("pi") / number(180)


def same_quantity(gold: Quantity, answer: Quantity) -> bool | None:
    left, right = (one.unit if one.unit is not None and one.unit.kind != "none" else None for one in (gold, answer))
    if left is None and right is None:
        verdict = same_number(gold.expr, answer.expr)
        return True if verdict is False and degrees_left_out(gold.expr, answer.expr) else verdict
    if left is not None and right is not None:
        return _both_units(gold.expr, left, answer.expr, right)
    unit = left or right
    assert unit is not None
    if unit.kind == "percent":
        with_sign, without = (gold, answer) if left else (answer, gold)
        hundredth = with_sign.expr / number(100)
        share = number_value(gold.expr) if with_sign is answer else None
        if share is not None and abs(share) < 1:
            return same_number(gold.expr, hundredth)  # 0.25 is no 0.25%
        verdicts = [same_number(one, without.expr) for one in (with_sign.expr, hundredth)]
        return True if True in verdicts else None if None in verdicts else False
    if unit.kind == "degree":
        with_sign, without = (gold, answer) if left else (answer, gold)
        if with_sign.expr.holds("const", "pi"):
            return same_number(with_sign.expr * _HALF_TURN, without.expr)
        plain = same_number(with_sign.expr, without_degrees(without.expr))
        if plain is not True and without.expr.holds("const", "pi"):
            return same_number(with_sign.expr * _HALF_TURN, without.expr)
        return plain
    if unit.kind == "unit":  # 10 \\mathrm{m}/\\mathrm{s} against 10m/s
        with_unit, without = (gold, answer) if left else (answer, gold)
        based = in_base_units(without.expr, None)
        if based is not None and not with_unit.expr.symbols:
            return same_value(in_base_units(with_unit.expr, unit) or with_unit.expr, based)
        if unit.noun and without.expr.symbols.issuperset(unit.noun):
            letters = [symbol(letter) for letter in unit.noun]  # "2 pi hr" is no hours
            return same_value(Expr("mul", (with_unit.expr, *letters)), without.expr)
    return same_number(gold.expr, answer.expr)


def _both_units(gold: Expr, left: Unit, answer: Expr, right: Unit) -> bool | None:
    if left.kind == right.kind == "unit":
        if any((left.dimension, right.dimension) == ((("L", n),), (("any", n),)) for n in (1, 2, 3)):
            return same_number(gold, answer)  # "square units" says no more than no unit
        if left.dimension != right.dimension:
            return False
        if left.factor == right.factor:
            return same_number(gold, answer)
        return same_value(number(left.factor) * gold, number(right.factor) * answer)
    if left.kind != right.kind:
        angle = {left.kind, right.kind} == {"degree", "unit"} and () in (left.dimension, right.dimension)
        if not angle:
            return False
        as_radians = [tree * _HALF_TURN if unit.kind == "degree" else tree
                      for tree, unit in ((gold, left), (answer, right))]  # fmt: skip
        return same_value(as_radians[0], as_radians[1])
    if left.noun != right.noun and (left.kind == "noun" or (left.kind == "percent" and left.noun and right.noun)):
        return False
    return same_number(gold, answer)


def degrees_left_out(gold: Expr, answer: Expr) -> bool:
    """``180 - a`` for an angle ``180^\\circ - a``: one side alone has degree signs, and the other no pi."""
    for one, other in ((gold, answer), (answer, gold)):
        bare = without_degrees(one)
        if bare != one and bare.symbols and not other.holds("const", "pi"):
            return same_value(bare, other) is True
    return False


def same_number(gold: Expr, answer: Expr) -> bool | None:
    """Equal formulas, or a decimal that is the other's value to six or more significant digits."""
    verdict = same_value(gold, answer)
    if verdict is False and (approximates(answer, gold) or approximates(gold, answer)):
        return True
    return verdict


def same_ratio(gold: Answer, answer: Answer) -> bool | None:
    if isinstance(gold, Clock) and isinstance(answer, Clock):
        if _times(gold) & _times(answer):
            return True
        if gold.ratio is None or answer.ratio is None:
            return False
        gold, answer = gold.ratio, answer.ratio
    left = gold.ratio if isinstance(gold, Clock) else gold
    right = answer.ratio if isinstance(answer, Clock) else answer
    if left is None or right is None:
        return False
    if isinstance(left, Ratio) and isinstance(right, Ratio):
        if len(left.parts) != len(right.parts):
            return False
        pairs = combinations(zip(left.parts, right.parts, strict=True), 2)
        return all_of([same_value(a * d, c * b) for (a, b), (c, d) in pairs])
    ratio, other = (left, right) if isinstance(left, Ratio) else (right, left)
    if isinstance(ratio, Ratio) and len(ratio.parts) == 2 and isinstance(other, Quantity) and other.unit is None:
        return same_value(Expr("div", ratio.parts), other.expr)
    return False


def _times(clock: Clock) -> set[int]:
    """Seconds after midnight; noon and midnight as people write them."""
    hours = clock.seconds // 3600
    if clock.half == "":
        return {clock.seconds}
    if not 1 <= hours <= 12:
        return set()
    return {clock.seconds % (12 * 3600) + (12 * 3600 if clock.half == "pm" else 0)}


def by_letter(items: Sequence[Answer]) -> Sequence[Answer]:
    """``y = 2, x = 1`` in the order of a pair: x, then y."""
    names = [item.name for item in items if isinstance(item, Named)]
    lettered = len(names) == len(items) == len(set(names)) and all(len(name) == 1 for name in names)
    return [item for _, item in sorted(zip(names, items, strict=True), key=lambda pair: pair[0])] if lettered else items


def one_value(items: Sequence[Answer]) -> bool:
    """Whether values joined by "or" are all one, as in ``\\frac{3}{10} or 30\\%``: that is no hedging."""
    values = complete(as_value(item) if isinstance(item, Quantity) else None for item in items)
    return values is not None and all(same_value(one, other) is True for one, other in pairwise(values))


def numbered_names(plain: Sequence[Answer], items: Sequence[Answer]) -> bool:
    """Whether ``items`` are ``x_1 = .., x_2 = ..``, where the other list says ``x = .. or x = ..``."""
    names = {item.name for item in plain if isinstance(item, Named)}
    numbered = [item.name for item in items if isinstance(item, Named)]
    if len(names) != 1 or len(set(numbered)) != len(numbered):
        return False
    (name,) = names
    return all(one.startswith(f"{name}_") and one.partition("_")[2].isdigit() for one in numbered)


def told_apart(items: Sequence[Answer]) -> bool:
    """Whether two things counted differ only in what describes them: ``3 red and 2 green apples``."""
    nouns = [item.unit.noun for item in items if isinstance(item, Quantity) and item.unit and item.unit.kind == "noun"]
    return len(set(nouns)) < len(nouns)


def paired(gold: Sequence[Answer], answer: Sequence[Answer]) -> Sequence[Answer] | None:
    """The answer's counts in the gold's order: by their description where both have it, the others as they stand."""
    if len(gold) != len(answer):
        return None
    left = list(answer)
    given = [_description(item) for item in answer]
    found: list[Answer | None] = []
    for said in map(_description, gold):
        partner = answer[given.index(said)] if said and said in given else None
        if partner is not None and partner in left:
            left.remove(partner)
        found.append(partner)
    rest = iter(left)
    return [next(rest) if one is None else one for one in found] if found.count(None) == len(left) else None


def _description(item: Answer) -> tuple[str, ...]:
    noun = item.unit if isinstance(item, Quantity) and item.unit is not None and item.unit.kind == "noun" else None
    return () if noun is None else tuple(map(singular, noun.words))


def ordered_names(items: Sequence[Answer]) -> bool:
    """``a = 1, b = 2`` has an order; ``x_1 = 1, x_2 = 2`` has none."""
    names = [item.name for item in items if isinstance(item, Named)]
    stems = {name.split("_")[0] for name in names}
    return len(names) == len(items) and len(stems) == len(names)


def assigned(answer: Answer) -> dict[str, Answer] | None:
    """The values of ``x = 1, y = 2`` or of ``(x, y) = (1, 2)`` by their names; None for one name, or a choice."""
    if isinstance(answer, Named) and isinstance(answer.value, Group) and answer.name.startswith("("):
        names, values = answer.name.strip("()").split(","), answer.value.items
    elif (isinstance(answer, Several) and not answer.either) or (isinstance(answer, Group) and answer.opening == "{"):
        names = [item.name for item in answer.items if isinstance(item, Named) and not item.arguments]
        values = values_of(answer.items)
    else:
        return None
    return dict(zip(names, values, strict=True)) if 1 < len(set(names)) == len(names) == len(values) else None


def values_of(items: Sequence[Answer]) -> tuple[Answer, ...]:
    return tuple(item.value if isinstance(item, Named) else item for item in items)


def floored(group: Group) -> Quantity | None:
    """``[n/2]`` in square brackets, which some write for the floor."""
    if group.opening != "[" or group.closing != "[" or len(group.items) != 1:
        return None
    inner = plain(group.items[0])
    return None if inner is None else Quantity(function("floor", inner))


def rows(group: Group) -> tuple[tuple[Answer, ...], ...] | None:
    """The rows of a matrix written as a list of lists."""
    listed = (
        item.items if isinstance(item, Group) and item.opening == group.opening == "[" else None for item in group.items
    )
    found = complete(listed)
    return tuple(found) if found is not None and len(set(map(len, found))) == 1 else None


def same_order(gold: Order, answer: Order) -> bool | None:
    """The same chain part by part, or one inequality times a constant of the right sign."""
    if gold.relations == answer.relations and len(gold.parts) == len(answer.parts):
        verdicts = [same_value(one, other) for one, other in zip(gold.parts, answer.parts, strict=True)]
        if all(verdict is True for verdict in verdicts):
            return True
    if len(gold.parts) != 2 or len(answer.parts) != 2:
        return False if len(gold.parts) != len(answer.parts) or gold.relations == answer.relations else None
    if gold.relations != answer.relations:
        return False
    ratio = constant_ratio(gold.parts[0] - gold.parts[1], answer.parts[0] - answer.parts[1])
    if ratio is None:
        return None
    return ratio != 0 if gold.relations == ("!=",) else ratio > 0


def solves(gold: Equation, answer: Expr) -> bool | None:
    """Whether a formula is the one name of the equation that it does not hold, and the equation has it once.

    Example: to ``r sin(t) = 3`` the answer ``3/sin(t)``. With two names missing the answer says too little.
    """
    names = gold.left.symbols | gold.right.symbols
    missing = names - answer.symbols
    if len(missing) != 1 or not answer.symbols <= names:
        return False
    (name,) = missing
    whole = gold.left - gold.right
    put_in = substitute(whole, name, answer)
    if same_value(put_in, number(0)) is not True:
        return False
    # linear in the name: equal steps make equal differences, so that there is no second solution
    steps = [substitute(whole, name, number(value)) for value in (-2, 1, 4)]
    linear = same_value(steps[1] - steps[0], steps[2] - steps[1])
    return linear is True


def _formula(answer: Answer) -> Expr | None:
    """A definition by cases as one formula; None where a value is none, or a condition is no set of real numbers."""
    if isinstance(answer, Quantity):
        return answer.expr if answer.unit is None else None
    args: list[Expr] = []
    for value, condition in answer.pieces if isinstance(answer, Piecewise) else ():
        where = None if condition is None else subject_set(condition)
        if not isinstance(value, Quantity) or value.unit is not None or (where is None) != (condition is None):
            return None
        if where is None:
            args += [value.expr, Expr("bounds")]
        for span in where.spans if where is not None else ():
            subject = Expr("sym", name=where.subject if where is not None else "")
            low = () if span.low == MINUS_INFINITY else (_bound(subject, span.low, span.low_closed),)
            high = () if span.high == PLUS_INFINITY else (_bound(span.high, subject, span.high_closed),)
            args += [value.expr, Expr("bounds", (*low, *high))]
    return Expr("cases", tuple(args)) if args else None


def _bound(above: Expr, below: Expr, closed: bool) -> Expr:
    return Expr("bound", (above - below,), "closed" if closed else "open")


_CLOSED = (Cycles, Domain, Within, Piecewise, Dotted, Sentence)
"""Shapes that equal nothing but their own kind (and a name's value)."""


def same(gold: Answer, answer: Answer) -> bool | None:
    """Whether the answer says what the gold says."""
    if gold == answer:
        return True
    if isinstance(gold, _CLOSED) or isinstance(answer, _CLOSED):
        return _closed(gold, answer)
    if isinstance(gold, Family) or isinstance(answer, Family):
        return same_family(gold, answer, same)
    given, said = assigned(gold), assigned(answer)
    if given is not None and said is not None and given.keys() == said.keys():
        return all_of([same(value, said[name]) for name, value in given.items()])
    if isinstance(gold, Named) and isinstance(answer, Named):
        return _both_named(gold, answer)
    if isinstance(gold, Equation | Order) or isinstance(answer, Equation | Order):
        return _relations(gold, answer)
    if isinstance(answer, Named) and isinstance(gold, Quantity) and (count := as_count(answer)) is not None:
        return same(gold, count)
    if isinstance(gold, Named) and isinstance(answer, Quantity) and (count := as_count(gold)) is not None:
        return same(count, answer) if count.expr.symbols else False  # C(5, 2) as a gold is a point
    if isinstance(gold, Named):
        if isinstance(gold.value, Quantity) and isinstance(answer, Several) and not answer.signs:
            return False  # c_1 = 0 is not "c_1 = 0 or c_2 = 0"
        return same(gold.value, answer)
    if isinstance(answer, Named):
        if isinstance(gold, Several) and len({item.name for item in gold.items if isinstance(item, Named)}) > 1:
            return isinstance(answer.value, Several | Group | Matrix) and same(gold, answer.value)
        return same(gold, answer.value)
    if isinstance(gold, RealSet) or isinstance(answer, RealSet):
        return _sets(gold, answer)
    if isinstance(gold, Several) or isinstance(answer, Several):
        return _several(gold, answer)
    if isinstance(gold, Group) or isinstance(answer, Group) or isinstance(gold, Matrix) or isinstance(answer, Matrix):
        return _groups(gold, answer)
    return _single(gold, answer)


def _closed(gold: Answer, answer: Answer) -> bool | None:
    """Sets that are no intervals, definitions by cases, permutations, lists that go on."""
    if isinstance(gold, Family) or isinstance(answer, Family):
        return same_family(gold, answer, same)
    if isinstance(gold, Named) and not isinstance(answer, Named):
        return same(gold.value, answer)
    if isinstance(answer, Named) and not isinstance(gold, Named):
        return same(gold, answer.value)
    if isinstance(gold, Domain) and isinstance(answer, Quantity):
        return answer == Quantity(symbol(gold.name)) if len(gold.name) == 1 else False
    if isinstance(gold, Domain) and isinstance(answer, Domain):
        return {gold.name, answer.name} <= {"N", "Z+"} or {gold.name, answer.name} <= {"N0", "Z+0"}
    for one, other in ((gold, answer), (answer, gold)):
        if isinstance(one, Domain) and (listed := counting(other)):
            return one.name in listed
        if isinstance(one, Within) and isinstance(other, RealSet) and one.domain == "Z":
            counts = other.subject in ("n", "m", "k")  # letters of whole numbers: n > 2 says all
            return counts and same(one.condition, other) is True
    if isinstance(gold, Piecewise) or isinstance(answer, Piecewise):
        # the same function; one whose conditions are not about a letter's size is not compared
        left, right = _formula(gold), _formula(answer)
        return same_value(left, right) if left is not None and right is not None else False
    if isinstance(gold, Dotted) and isinstance(answer, Dotted):
        return same_dotted(gold, answer)
    if isinstance(gold, Sentence) and isinstance(answer, Sentence):
        return _same_sentence(gold, answer)
    return False


def _same_sentence(gold: Sentence, answer: Sentence) -> bool:
    """Word for word, formula for formula."""
    if len(gold.parts) != len(answer.parts):
        return False
    return all(
        left == right if isinstance(left, str) or isinstance(right, str) else same(left, right) is True
        for left, right in zip(gold.parts, answer.parts, strict=True)
    )


def _single(gold: Answer, answer: Answer) -> bool | None:
    """Two answers that have no parts."""
    if isinstance(gold, Quantity) and isinstance(answer, Quantity):
        return same_quantity(gold, answer)
    if isinstance(gold, Based) or isinstance(answer, Based):
        return False  # another base or none; the same digits in the same base were found equal before
    if isinstance(gold, Ratio | Clock) or isinstance(answer, Ratio | Clock):
        return same_ratio(gold, answer)
    if isinstance(gold, Text) and isinstance(answer, Text):
        return same_words(gold.words, answer.words)
    for one, other in ((gold, answer), (answer, gold)):
        if isinstance(one, Text) and isinstance(other, Quantity):
            if len(one.words) == 2 and len(one.words[1]) == 1 and other.unit is None and one.words[0] not in DENIALS:
                return other.expr.op == "sym" and other.expr.name.casefold() == one.words[1]
            if endless(one.words):
                return other.expr == symbol("inf") and other.unit is None
            value = word_number(one.words)
            if value is None:
                return False
            said = Quantity(number(value))
            return same_quantity(said, other) if one is gold else same_quantity(other, said)
    return None


def _both_named(gold: Named, answer: Named) -> bool | None:
    if gold.name == answer.name and gold.arguments != answer.arguments and len(gold.arguments) == len(answer.arguments):
        if names_of(answer.value) & (set(gold.arguments) - set(answer.arguments)):
            return False  # f(t) = x^2 is a constant
        return same(gold.value, _renamed(answer.value, dict(zip(answer.arguments, gold.arguments, strict=True))))
    one, other = _member(gold), _member(answer)
    if one is not None and other is not None and one[0] == other[0] and one[1] != other[1]:
        return same(gold.value, _renamed(answer.value, {other[1]: one[1]}))  # a_n = 2n is a_k = 2k
    functions = bool(gold.arguments), bool(answer.arguments)
    alike = gold.name == answer.name and (gold.arguments == answer.arguments or not all(functions))
    alike = alike or (one is not None and one == other) or _squeezed(gold.name) == _squeezed(answer.name)
    if alike or (functions[0] != functions[1] and {"y", "y'"} & {gold.name, answer.name}):
        return same(gold.value, answer.value)  # y = 2x and f(x) = 2x
    return False if gold.symbol is None and answer.symbol is None else _relations(gold, answer)


def as_count(named: Named) -> Quantity | None:
    """``C(n, k)``, read as a point with a name, as the number of choices; ``P(n, k)`` as that of arrangements."""
    group = named.value
    if named.name not in ("C", "P") or not isinstance(group, Group) or len(group.items) != 2 or group.opening != "(":
        return None
    parts = complete(map(plain, group.items))
    if parts is None:
        return None
    chosen = function("binomial", *parts)
    return Quantity(chosen if named.name == "C" else chosen * function("factorial", parts[1]))


def _member(named: Named) -> tuple[str, str] | None:
    """The sequence and the letter of ``a_n`` or ``a(n)``."""
    stem, _, letter = named.name.partition("_")
    if len(named.arguments) == 1 and not letter:
        return named.name, named.arguments[0]
    return (stem, letter) if len(letter) == 1 and letter.isalpha() and not named.arguments else None


def _squeezed(name: str) -> str:
    """A name without what spelling leaves free: accents, the sign of an angle, braces."""
    vector = name.startswith("vec:")
    name = name.removeprefix("angle:").removeprefix("vec:").removeprefix("bar:").removeprefix("hat:")
    plain = "".join(char for char in name if not char.isspace() and char not in "_{}\\")
    points = len(plain) in (2, 3) and plain.isalpha() and plain.isupper() and not vector
    return min(plain, plain[::-1]) if points else plain  # AB is BA, angle ABC is CBA


def _renamed(answer: Answer, names: dict[str, str]) -> Answer:
    if isinstance(answer, Quantity):
        return Quantity(rename(answer.expr, names), answer.unit)
    return answer


def _relations(gold: Answer, answer: Answer) -> bool | None:
    left, right = _equation(gold), _equation(answer)
    if left is not None and right is not None:
        return _same_relation(gold, left, answer, right)
    if isinstance(gold, Order) and isinstance(answer, Order):
        return same_order(gold, answer)
    if isinstance(answer, Equation) and not isinstance(gold, Equation | Order | Named):
        # x + y = 5 gives 5 where a value is asked
        if isinstance(gold, Several) and any(isinstance(item, Named) for item in gold.items):
            return False
        given = Quantity(answer.right) if answer.left.symbols and not answer.right.symbols else None
        return False if given is None else same(gold, given)
    if isinstance(gold, Equation) and isinstance(answer, Quantity) and answer.unit is None:
        return solves(gold, answer.expr)
    if isinstance(gold, Order) or isinstance(answer, Order):
        return None
    return False


def _same_relation(gold: Answer, left: Equation, answer: Answer, right: Equation) -> bool | None:
    """The same equation up to a factor, or one that gives a name the value that the other has for it."""
    ratio = constant_ratio(left.left - left.right, right.left - right.right)
    verdict = None if ratio is None else ratio != 0  # x = y/2 is 2x - y = 0
    if verdict is not True:
        for one, equation in ((gold, right), (answer, left)):
            if isinstance(one, Named) and isinstance(one.value, Quantity) and one.symbol is not None:
                names = equation.left.symbols | equation.right.symbols
                if names - one.value.expr.symbols == one.symbol.symbols and solves(equation, one.value.expr):
                    return True
    return verdict


def _equation(answer: Answer) -> Equation | None:
    if isinstance(answer, Equation):
        return answer
    if not isinstance(answer, Named) or answer.symbol is None or not isinstance(answer.value, Quantity):
        return None
    return Equation(answer.symbol, answer.value.expr) if answer.value.unit is None else None


def _sets(gold: Answer, answer: Answer) -> bool | None:
    left, right = as_spans(gold), as_spans(answer)
    if left is None and isinstance(gold, Several) and (gold.either or any(map(unbounded, gold.items))):
        left = alternatives(gold.items)
    if right is None and isinstance(answer, Several) and answer.either:
        right = alternatives(answer.items)
    if isinstance(answer, Quantity) and gold == ALL_REALS:
        return answer == Quantity(symbol("R"))
    for one, other in ((gold, answer), (answer, gold)):
        if isinstance(one, RealSet) and not one.spans and isinstance(other, Text):
            return other.words in (("none",), ("does", "not", "exist"))
        if isinstance(one, RealSet) and not one.spans and other == Quantity(symbol("phi")):
            return True  # a phi for the empty set's sign
    if left is None or right is None:
        if isinstance(gold, Several) or isinstance(answer, Several):
            return _several(gold, answer)
        return False if isinstance(gold, Quantity | Text) or isinstance(answer, Quantity | Text) else None
    if left.subject and right.subject and _squeezed(left.subject) != _squeezed(right.subject):
        return False
    return same_set(left, right)


def _several(gold: Answer, answer: Answer) -> bool | None:
    """Lists without order, unless names or brackets give one."""
    if isinstance(gold, Several) and isinstance(answer, Several):
        if ordered_names(gold.items) and not any(isinstance(item, Named) for item in answer.items):
            return in_order(gold.items, answer.items)
        left, right = values_of(gold.items), values_of(answer.items)
        named = all(isinstance(item, Named) for item in (*gold.items, *answer.items))
        if named and gold.either != answer.either and ordered_names(gold.items):
            return False  # x = 1 and y = 2 says more than x = 1 or y = 2
        if named and not (numbered_names(gold.items, answer.items) or numbered_names(answer.items, gold.items)):
            left, right = gold.items, answer.items
        if told_apart(gold.items):
            order = paired(left, right)
            return False if order is None else in_order(left, order)
        return matched(left, right)
    several, group = (gold, answer) if isinstance(gold, Several) else (answer, gold)
    assert isinstance(several, Several)
    if several is answer and several.either and one_value(several.items):
        return all_of([same(gold, item) for item in several.items])
    if isinstance(group, Quantity) and all(isinstance(item, Named) for item in several.items):
        shared = set(values_of(several.items))  # p = q = 2
        return same(group, shared.pop()) if len(shared) == 1 else False
    if isinstance(gold, Text) and (said := [item.words for item in several.items if isinstance(item, Text)]):
        # "yes, it is": the comma stood between words
        return len(said) == len(several.items) and same_words(gold.words, tuple(word for part in said for word in part))
    if isinstance(group, Group) and group.opening == group.closing:
        if group.opening == "{":
            return matched(values_of(several.items), group.items)
        if group.opening in "(<" or len(group.items) != 2:
            listed = by_letter(several.items)
            return in_order(listed, group.items) if not (several.signs or several.either) else False
    if isinstance(group, Matrix):
        return False
    return False if isinstance(group, Quantity | Text | Ratio | Clock | Based | Group) else None


def in_order(gold: Sequence[Answer], answer: Sequence[Answer]) -> bool | None:
    """Item by item."""
    if len(gold) != len(answer):
        return False
    return all_of([same(left, right) for left, right in zip(gold, answer, strict=True)])


def matched(gold: Sequence[Answer], answer: Sequence[Answer]) -> bool | None:
    """One for one, in any order; equal items count as often as they stand there."""
    if len(gold) != len(answer):
        return False
    left = list(answer)
    unknown = False
    for item in gold:
        verdicts: list[bool | None] = []
        for candidate in left:
            verdicts.append(same(item, candidate))
            if verdicts[-1] is True:
                break
        if verdicts and verdicts[-1] is True:
            left.pop(len(verdicts) - 1)
        elif None in verdicts:
            unknown = True
        else:
            return False
    return None if unknown else True


def _groups(gold: Answer, answer: Answer) -> bool | None:
    if isinstance(gold, Matrix) and isinstance(answer, Matrix):
        if len(gold.rows) != len(answer.rows) or len(gold.rows[0]) != len(answer.rows[0]):
            return False
        pairs = zip(gold.rows, answer.rows, strict=True)
        return all_of([in_order(left, right) for left, right in pairs])
    if isinstance(gold, Group) and isinstance(answer, Group):
        for one, other in ((gold, answer), (answer, gold)):
            if one.opening == "{" and len(one.items) == 1 and other.opening != "{":
                return same(one.items[0], other) if one is gold else same(other, one.items[0])
        if (gold.opening, gold.closing) != (answer.opening, answer.closing):
            return _brackets_aside(gold, answer)
        return matched(gold.items, answer.items) if gold.opening == "{" else in_order(gold.items, answer.items)
    for one, other in ((gold, answer), (answer, gold)):
        if isinstance(one, Matrix) and isinstance(other, Group) and (listed_rows := rows(other)) is not None:
            return _groups(one, Matrix(listed_rows))
        listed = isinstance(other, Group) and other.opening == other.closing == "[" and len(other.items) > 2
        if (
            isinstance(one, Matrix)
            and isinstance(other, Group)
            and ((other.opening in "(<" and other.closing in "(<") or listed)
        ):
            vector = one.rows[0] if len(one.rows) == 1 else tuple(row[0] for row in one.rows)
            return in_order(vector, other.items) if 1 in (len(one.rows), len(one.rows[0])) else False
        if isinstance(one, Group) and one.opening == "{" and len(one.items) == 1:
            return same(one.items[0], other) if one is gold else same(other, one.items[0])
        if isinstance(one, Group) and (floor := floored(one)) is not None and isinstance(other, Quantity):
            return other.expr.holds("fn", "floor") and same(floor, other) is True
    return False if isinstance(gold, Quantity | Text) or isinstance(answer, Quantity | Text) else None


def _brackets_aside(gold: Group, answer: Group) -> bool | None:
    """Angle brackets and parentheses both make vectors; any other difference of brackets is one of meaning."""
    marks = {gold.opening, gold.closing, answer.opening, answer.closing}
    # of three numbers and more no brackets make an interval
    vectors = marks == {"(", "<"} or (marks <= {"(", "<", "["} and len(gold.items) > 2)
    paired = gold.opening == gold.closing and answer.opening == answer.closing
    return in_order(gold.items, answer.items) if vectors and paired else False
