r"""Wrong answers that look right: a gold with one thing changed. Used by `benchmarks/maths_verifier.py`.

Each change is made where it changes what the answer says: one digit, sign, exponent, unit, base, bracket,
multiplicity or order. What still says the same (a sign before 0, two equal items exchanged) is not made, as far as
the text shows it; the benchmark lists every accepted one, so that the rest can be looked at.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator

from magicrl.verifiers.maths.notation import canonical

Change = Callable[[str, random.Random], str | None]

_COMMAND = re.compile(r"\\(?:text|mathrm|mbox|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+")
_UNIT = re.compile(r"\\(?:text|mbox|mathrm|textnormal)\s*\{\s*([A-Za-z][A-Za-z /.^0-9]*)\}")
_OTHER_UNITS = {
    "cm": "mm", "m": "cm", "km": "m", "feet": "yards", "inches": "feet", "miles": "feet", "hours": "minutes",
    "minutes": "hours", "days": "weeks", "seconds": "minutes", "dollars": "cents", "cents": "dollars", "mph": "km/h",
    "degrees": "radians", "square units": "square feet", "square inches": "inches", "years": "months",
}  # fmt: skip


def near_misses(golds: list[str], seed: int, most_per_gold: int = 3) -> Iterator[tuple[str, str, str]]:
    """(class, gold, wrong answer), in an order that the seed fixes; at most so many a gold, of different classes."""
    numbers = random.Random(seed)
    for gold in golds:
        names = list(CHANGES)
        numbers.shuffle(names)
        made = 0
        for name in names:
            if made == most_per_gold:
                break
            wrong = CHANGES[name](gold, numbers)
            if wrong is not None and canonical(wrong) != canonical(gold):
                made += 1
                yield name, gold, wrong


def _spots(pattern: str, text: str) -> list[re.Match[str]]:
    """Matches outside commands and upright text."""
    hidden = [match.span() for match in _COMMAND.finditer(text)]
    return [
        match for match in re.finditer(pattern, text) if not any(start <= match.start() < end for start, end in hidden)
    ]


def _put(text: str, match: re.Match[str], by: str) -> str:
    return text[: match.start()] + by + text[match.end() :]


def digit(gold: str, numbers: random.Random) -> str | None:
    """One digit becomes another."""
    spots = _spots(r"\d", gold)
    if not spots:
        return None
    spot = numbers.choice(spots)
    return _put(gold, spot, numbers.choice([d for d in "123456789" if d != spot[0]]))


def sign(gold: str, numbers: random.Random) -> str | None:
    """One plus becomes a minus or the other way; a number gets a minus."""
    spots = _spots(r"(?<![\^{(,=])[+-](?=[\d\\A-Za-z(])", gold)
    if spots:
        spot = numbers.choice(spots)
        return _put(gold, spot, "-" if spot[0] == "+" else "+")
    if re.fullmatch(r"\d*[1-9]\d*(\.\d+)?|\\frac\{\d+\}\{\d+\}|\d*\\sqrt\{\d+\}", gold):
        return "-" + gold
    return None


def exponent(gold: str, numbers: random.Random) -> str | None:
    """One exponent becomes larger by one."""
    spots = list(re.finditer(r"\^(?:\{(\d+)\}|(\d))", gold))
    if not spots:
        return None
    spot = numbers.choice(spots)
    return _put(gold, spot, "^{" + str(int(spot[1] or spot[2]) + 1) + "}")


def unit(gold: str, numbers: random.Random) -> str | None:
    r"""One unit becomes another of the same or of another kind; degrees become per cent."""
    match = _UNIT.search(gold)
    if match is not None and match[1].strip() in _OTHER_UNITS and re.search(r"[1-9]", gold):
        return _put(gold, match, r"\text{ " + _OTHER_UNITS[match[1].strip()] + "}")
    if r"^\circ" in gold:
        return gold.replace(r"^\circ", r"\%")
    if r"\%" in gold:
        return gold.replace(r"\%", r"^\circ")
    return gold.replace(r"\$", "€") if r"\$" in gold else None


def base(gold: str, numbers: random.Random) -> str | None:
    """The base of a number becomes another one."""
    match = re.fullmatch(r"(-?[0-9A-F]+)_\{?(\d+)\}?", gold)
    return f"{match[1]}_{{{int(match[2]) + 1}}}" if match else None


def bracket(gold: str, numbers: random.Random) -> str | None:
    """An open end becomes a closed one or the other way, in intervals and tuples."""
    if not re.search(r"^[(\[].*,.*[)\]]$", gold.replace(r"\left", "").replace(r"\right", "")):
        return None
    spots = [m for m in re.finditer(r"[(\[]", gold) if "\\infty" not in gold[m.end() : m.end() + 8]]
    spots = [m for m in spots if m.start() == 0 or gold[: m.start()].endswith((r"\left", r"\cup ", r"\cup"))]
    if not spots:
        return None
    spot = numbers.choice(spots)
    return _put(gold, spot, "[" if spot[0] == "(" else "(")


def _items(gold: str) -> list[str] | None:
    """The items of a bare list, a tuple or a set."""
    inner = re.sub(r"^(?:\\left)?(?:\(|\\\{)|(?:\\right)?(?:\)|\\\})$", "", gold.strip())
    if any(mark in inner for mark in "()[]{}") or "," not in inner:
        return None
    items = [item.strip() for item in inner.split(",")]
    whole = all(re.fullmatch(r"-?\d+(?:/\d+)?|-?[a-z]", item) for item in items)
    grouped = re.fullmatch(r"-?\d{1,3}(?:,\d{3})+", inner) is not None
    return items if whole and not grouped else None


def multiplicity(gold: str, numbers: random.Random) -> str | None:
    """One item of a list is said twice, or left out."""
    items = _items(gold)
    if items is None:
        return None
    inner = gold[gold.index(items[0]) : gold.rindex(items[-1]) + len(items[-1])]
    at = numbers.randrange(len(items))
    changed = [*items[: at + 1], *items[at:]] if numbers.random() < 0.5 else items[:at] + items[at + 1 :]
    return gold.replace(inner, ", ".join(changed))


def order(gold: str, numbers: random.Random) -> str | None:
    """Two different coordinates of a tuple, or parts of a ratio, change places."""
    ratio = re.fullmatch(r"(\d+):(\d+)", gold)
    if ratio is not None:
        return f"{ratio[2]}:{ratio[1]}" if ratio[1] != ratio[2] else None
    items = _items(gold) if gold.replace(r"\left", "").startswith("(") else None
    if items is None or len(set(items)) < 2:
        return None
    one = numbers.randrange(len(items) - 1)
    if items[one] == items[one + 1]:
        return None
    inner = gold[gold.index(items[0]) : gold.rindex(items[-1]) + len(items[-1])]
    swapped = [*items[:one], items[one + 1], items[one], *items[one + 2 :]]
    return gold.replace(inner, ", ".join(swapped))


CHANGES: dict[str, Change] = {
    "digit": digit,
    "sign": sign,
    "exponent": exponent,
    "unit": unit,
    "base": base,
    "bracket": bracket,
    "multiplicity": multiplicity,
    "order": order,
}
