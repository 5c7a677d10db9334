"""Items of lists: their names, their order, what tells them apart. No comparison of answers happens here."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from magicrl.verifiers.maths.answers import Answer, Group, Named, Quantity, Several
from magicrl.verifiers.maths.equality import same_value
from magicrl.verifiers.maths.expression import function
from magicrl.verifiers.maths.magnitudes import as_value
from magicrl.verifiers.maths.units import singular


def by_letter(items: Sequence[Answer]) -> Sequence[Answer]:
    """``y = 2, x = 1`` in the order of a pair: x, then y."""
    names = [item.name for item in items if isinstance(item, Named)]
    lettered = len(names) == len(items) == len(set(names)) and all(len(name) == 1 for name in names)
    return [item for _, item in sorted(zip(names, items, strict=True), key=lambda pair: pair[0])] if lettered else items


def one_value(items: Sequence[Answer]) -> bool:
    """Whether values joined by "or" are all one, as in ``\\frac{3}{10} or 30\\%``: that is no hedging."""
    values = [as_value(item) if isinstance(item, Quantity) else None for item in items]
    return all(
        one is not None and other is not None and same_value(one, other) is True for one, other in pairwise(values)
    )


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
    item = group.items[0]
    return Quantity(function("floor", item.expr)) if isinstance(item, Quantity) and item.unit is None else None


def rows(group: Group) -> tuple[tuple[Answer, ...], ...] | None:
    """The rows of a matrix written as a list of lists."""
    found = tuple(
        item.items for item in group.items if isinstance(item, Group) and item.opening == group.opening == "["
    )
    return found if found and len(found) == len(group.items) and len({len(row) for row in found}) == 1 else None
