r"""What goes on as it began: ``1, 3, \ldots, 2n-1`` and ``a_1 + a_2 + \cdots + a_n``.

The items shown must be one formula at the places 0, 1, ... in which only whole numbers, or subscripts, grow by a
constant step; the last item fixes how far it goes. What is not of this kind is not read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from magicrl.verifiers.maths.answers import Answer, Dotted, Group, Named, Quantity, RealSet
from magicrl.verifiers.maths.equality import rational_value, same_value
from magicrl.verifiers.maths.expression import Expr, difference, number, put, substitute, symbol

PLACE = "#j"
_MOST_ITEMS = 99
_INDEX = re.compile(r"(?P<stem>[A-Za-z]+)_(?P<index>\d{1,4}|[a-z](?:[+-]\d{1,3})?)")
_LETTER_INDEX = re.compile(r"(?P<letter>[a-z])(?P<shift>[+-]\d{1,3})?")


def continued(first: Sequence[Expr], last: Sequence[Expr]) -> Dotted | None:
    """The rule behind the items before the dots and those after them; None when they show none.

    ``last`` is empty for a list without an end; of one item before the dots the step is one.
    """
    before = [indexed(item) for item in first]
    after = [indexed(item) for item in last]
    if not before or (len(before) < 2 and len(after) != 1) or (len(before) < 2 and not before[0].symbols):
        return None
    # with one item before the dots, the last item says what changes
    item = _rule(before[0], before[1]) if len(before) > 1 else _rule_to(before[0], after[0])
    if item is None or any(same_value(_at(item, number(at)), shown) is not True for at, shown in enumerate(before)):
        return None
    if not after:
        return Dotted(item, None)
    end = _place(item, after[-1])
    if end is None or same_value(_at(item, end), after[-1]) is not True:
        return None
    for back, shown in enumerate(reversed(after)):
        if same_value(_at(item, difference(end, number(back))), shown) is not True:
            return None
    return Dotted(item, end)


def expanded(dotted: Dotted) -> list[Answer] | None:
    """All items of a list of numbers with an end; None where there are letters, no end, or too many."""
    end = None if dotted.last is None else rational_value(dotted.last)
    if end is None or end.denominator != 1 or not 0 <= end <= _MOST_ITEMS:
        return None
    return [Quantity(_at(dotted.item, number(place))) for place in range(int(end) + 1)]


def series(kind: str, before: Sequence[Expr], last: Expr, place: str) -> Expr | None:
    """``before`` and what the dots and ``last`` add to it, as a sum or product; the first items may stand apart."""
    for start in range(len(before)):
        found = continued(before[start:], [last])
        if found is not None and found.last is not None:
            body = put(found.item, Expr("sym", name=PLACE), Expr("sym", name=place))
            whole = Expr("series", (number(0), found.last, body), f"{kind} {place}")
            parts = (*(indexed(item) for item in before[:start]), whole)
            return whole if start == 0 else Expr("add" if kind == "sum" else "mul", parts)
    return None


def indexed(tree: Expr) -> Expr:
    """The formula with subscripted names as functions of their subscripts."""
    match = _INDEX.fullmatch(tree.name) if tree.op == "sym" else None
    if match is not None:
        return Expr("apply", (_index(match["index"]),), match["stem"] + "_")
    return Expr(tree.op, tuple(indexed(part) for part in tree.args), tree.name, tree.value, tree.decimals)


def _index(text: str) -> Expr:
    if text.isdigit():
        return number(int(text))
    match = _LETTER_INDEX.fullmatch(text)
    assert match is not None, text
    letter = Expr("sym", name=match["letter"])
    return Expr("add", (letter, number(int(match["shift"])))) if match["shift"] else letter


def _at(item: Expr, place: Expr) -> Expr:
    return substitute(item, PLACE, place)


def _rule(first: Expr, second: Expr) -> Expr | None:
    """The formula that is ``first`` at place 0 and ``second`` at place 1."""
    if first == second:
        return first
    if _whole(first) and _whole(second):
        return _linear(first, difference(second, first))
    if first.op == second.op and first.name == second.name and len(first.args) == len(second.args) and first.args:
        parts = [_rule(one, other) for one, other in zip(first.args, second.args, strict=True)]
        known = [part for part in parts if part is not None]
        return Expr(first.op, tuple(known), first.name) if len(known) == len(parts) else None
    return None


def _rule_to(first: Expr, last: Expr) -> Expr | None:
    """The formula that is ``first`` at place 0 and comes to ``last`` in steps of one."""
    if first == last:
        return first
    if _index_like(first) and _index_like(last):
        return _linear(first, number(1))
    if first.op == last.op and first.name == last.name and len(first.args) == len(last.args) and first.args:
        parts = [_rule_to(one, other) for one, other in zip(first.args, last.args, strict=True)]
        known = [part for part in parts if part is not None]
        return Expr(first.op, tuple(known), first.name) if len(known) == len(parts) else None
    return None


def _linear(first: Expr, step: Expr) -> Expr:
    return Expr("add", (first, Expr("mul", (step, Expr("sym", name=PLACE)))))


def _whole(tree: Expr) -> bool:
    """A number or an index such as ``k-1``: what may grow from item to item."""
    if tree.op == "num":
        return True
    return tree.op in ("sym", "add", "neg") and all(_whole(part) for part in tree.args)


def _index_like(tree: Expr) -> bool:
    return _whole(tree)


def _place(item: Expr, last: Expr) -> Expr | None:
    """The place of the last item, found where the rule has a number that grows."""
    if item.op == "add" and len(item.args) == 2 and item.args[1].op == "mul" and item.args[1].args[-1].name == PLACE:
        start, step = item.args[0], item.args[1].args[0]
        return Expr("div", (difference(last, start), step))
    if PLACE not in item.symbols or len(item.args) != len(last.args) or (item.op, item.name) != (last.op, last.name):
        return None
    for part, shown in zip(item.args, last.args, strict=True):
        if PLACE in part.symbols:
            return _place(part, shown)
    return None


def counting(answer: Answer) -> tuple[str, ...]:
    r"""The names of the whole numbers that ``1, 2, 3, \\ldots`` or ``n \\ge 1`` are; none for anything else."""
    if isinstance(answer, Named) or (isinstance(answer, Group) and answer.opening == "{" and len(answer.items) == 1):
        answer = answer.value if isinstance(answer, Named) else answer.items[0]
    if isinstance(answer, Dotted) and answer.last is None:
        for first, names in _COUNTED.items():
            if same_value(answer.item, _linear(number(first), number(1))) is True:
                return names
    if isinstance(answer, RealSet) and answer.subject in ("n", "m", "k") and len(answer.spans) == 1:
        (span,) = answer.spans
        low = rational_value(span.low) if span.low_closed and span.high == symbol("inf") else None
        return () if low is None or low.denominator != 1 else _COUNTED.get(int(low), ())
    return ()


_COUNTED = {0: ("N0", "Z+0"), 1: ("N", "Z+")}


def same_dotted(gold: Dotted, answer: Dotted) -> bool | None:
    """Whether two lists go on by the same rule and end at the same place."""
    rule = same_value(gold.item, answer.item)
    if gold.last is None or answer.last is None:
        return rule if gold.last is answer.last else False
    end = same_value(gold.last, answer.last)
    return False if rule is False or end is False else True if rule is True and end is True else None
