"""Whether two answers say the same. True and False are final; None leaves the pair to Math-Verify."""

from __future__ import annotations

from collections.abc import Sequence

from magicrl.verifiers.maths.answers import (
    Answer,
    Based,
    Clock,
    Cycles,
    Domain,
    Dotted,
    Equation,
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
    Span,
    Text,
    Within,
)
from magicrl.verifiers.maths.cases import same_cases
from magicrl.verifiers.maths.dotted import counting, same_dotted
from magicrl.verifiers.maths.equations import same_equation, same_order, solves
from magicrl.verifiers.maths.expression import Expr, function, number, rename, symbol
from magicrl.verifiers.maths.families import names_of, same_family
from magicrl.verifiers.maths.lists import (
    assigned,
    by_letter,
    floored,
    numbered_names,
    one_value,
    ordered_names,
    paired,
    rows,
    told_apart,
    values_of,
)
from magicrl.verifiers.maths.magnitudes import all_of, numbered, same_quantity, same_ratio
from magicrl.verifiers.maths.numerals import word_number
from magicrl.verifiers.maths.realsets import same_set
from magicrl.verifiers.maths.sentences import same_sentence
from magicrl.verifiers.maths.spans import alternatives, as_spans, unbounded
from magicrl.verifiers.maths.vectors import components
from magicrl.verifiers.maths.words import DENIALS, endless, same_words

_ALL_REALS = RealSet((Span(Expr("neg", (symbol("inf"),)), False, symbol("inf"), False),))
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
        return same(count, answer) if count.expr.symbols else False
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
    for one, other in ((gold, answer), (answer, gold)):
        if isinstance(one, Domain) and (listed := counting(other)):
            return one.name in listed
    if isinstance(gold, Domain) and isinstance(answer, Domain):
        return {gold.name, answer.name} <= {"N", "Z+"} or {gold.name, answer.name} <= {"N0", "Z+0"}
    for one, other in ((gold, answer), (answer, gold)):
        if isinstance(one, Within) and isinstance(other, RealSet) and one.domain == "Z":
            counts = other.subject in ("n", "m", "k")  # letters of whole numbers: n > 2 says all
            return counts and same(one.condition, other) is True
    if isinstance(gold, Within) and isinstance(answer, Within):
        return same(gold.condition, answer.condition) if gold.domain == answer.domain else False
    if isinstance(gold, Piecewise) or isinstance(answer, Piecewise):
        return same_cases(gold, answer, same)
    if isinstance(gold, Dotted) and isinstance(answer, Dotted):
        return same_dotted(gold, answer)
    if isinstance(gold, Sentence) and isinstance(answer, Sentence):
        return same_sentence(gold, answer, same)
    for one, other in ((gold, answer), (answer, gold)):
        if isinstance(one, Dotted) and isinstance(other, Group) and other.opening == "{" and len(other.items) == 1:
            return same(one, other.items[0])
    return False


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
            if numbered(one, other):
                return True
            value = word_number(one.words)
            if value is None:
                return False
            said = Quantity(number(value))
            return same_quantity(said, other) if one is gold else same_quantity(other, said)
    return None


def _both_named(gold: Named, answer: Named) -> bool | None:
    if gold.name == answer.name and not (gold.arguments and answer.arguments):
        return same(gold.value, answer.value)
    if gold.name == answer.name and len(gold.arguments) == len(answer.arguments):
        if gold.arguments == answer.arguments:
            return same(gold.value, answer.value)
        if names_of(answer.value) & (set(gold.arguments) - set(answer.arguments)):
            return False  # f(t) = x^2 is a constant
        return same(gold.value, _renamed(answer.value, dict(zip(answer.arguments, gold.arguments, strict=True))))
    one, other = _member(gold), _member(answer)
    if one is not None and other is not None and one[0] == other[0] and one[1] != other[1]:
        return same(gold.value, _renamed(answer.value, {other[1]: one[1]}))  # a_n = 2n is a_k = 2k
    if one is not None and one == other:
        return same(gold.value, answer.value)
    if bool(gold.arguments) != bool(answer.arguments) and {"y", "y'"} & {gold.name, answer.name}:
        return same(gold.value, answer.value)  # y = 2x and f(x) = 2x
    if gold.symbol is None and answer.symbol is None:
        words = _squeezed(gold.name) == _squeezed(answer.name)
        return same(gold.value, answer.value) if words else False
    if _squeezed(gold.name) == _squeezed(answer.name):
        return same(gold.value, answer.value)
    return _relations(gold, answer)


def as_count(named: Named) -> Quantity | None:
    """``C(n, k)``, read as a point with a name, as the number of choices; ``P(n, k)`` as that of arrangements."""
    group = named.value
    if named.name not in ("C", "P") or not isinstance(group, Group) or len(group.items) != 2 or group.opening != "(":
        return None
    parts = [item.expr for item in group.items if isinstance(item, Quantity) and item.unit is None]
    if len(parts) != 2:
        return None
    chosen = function("binomial", *parts)
    return Quantity(chosen if named.name == "C" else Expr("mul", (chosen, function("factorial", parts[1]))))


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
    verdict = same_equation(left, right)
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
    if isinstance(answer, Quantity) and gold == _ALL_REALS:
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
        if isinstance(one, Quantity) and (vector := components(one.expr, ("",))) is not None and one.unit is None:
            return same(vector, other) if one is gold else same(other, vector)  # 3i - 4j in italics
        if isinstance(one, Matrix) and isinstance(other, Group) and rows(other) is not None:
            return _groups(one, Matrix(rows(other) or ()))
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
