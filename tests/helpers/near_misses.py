r"""Wrong answers that look right: a reference answer with one thing changed.

Each change is made where it changes the meaning: one digit, sign, exponent, unit, base, bracket, multiplicity or order.
A change that keeps the meaning (a sign before 0, two equal items exchanged) is left out, as far as the text shows it.
The benchmark lists every accepted one, so that a person can check the rest.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping

from magicrl_verifiers.maths.notation import canonical_notation

Change = Callable[[str, random.Random], str | None]

_COMMAND = re.compile(r"\\(?:text|mathrm|mbox|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+")
_UNIT = re.compile(r"\\(?:text|mbox|mathrm|textnormal)\s*\{\s*([A-Za-z][A-Za-z /.^0-9]*)\}")
_OTHER_UNITS = {
    "cm": "mm", "m": "cm", "km": "m", "feet": "yards", "inches": "feet", "miles": "feet", "hours": "minutes",
    "minutes": "hours", "days": "weeks", "seconds": "minutes", "dollars": "cents", "cents": "dollars", "mph": "km/h",
    "degrees": "radians", "square units": "square feet", "square inches": "inches", "years": "months",
}  # fmt: skip


def near_misses(references: list[str], seed: int, most_per_reference: int = 3) -> Iterator[tuple[str, str, str]]:
    """Return (class, reference, wrong answer), in an order that the seed fixes, limited per reference."""
    return drawn(
        CHANGES,
        references,
        seed,
        most_per_reference,
        lambda reference, wrong: canonical_notation(wrong) != canonical_notation(reference),
    )


def drawn(
    changes: Mapping[str, Change],
    references: list[str],
    seed: int,
    most_per_reference: int,
    differs: Callable[[str, str], bool],
) -> Iterator[tuple[str, str, str]]:
    """Yield (class, reference, changed reference): changes of the meaning, each class at most once per reference."""
    numbers = random.Random(seed)
    for reference in references:
        names = list(changes)
        numbers.shuffle(names)
        made = 0
        for name in names:
            if made == most_per_reference:
                break
            changed = changes[name](reference, numbers)
            if changed is not None and differs(reference, changed):
                made += 1
                yield name, reference, changed


def told(*forms: tuple[str, tuple[str, ...]]) -> Change:
    """Change a reference of a form into one of its texts, where ``@1`` is the first group."""

    def change(reference: str, numbers: random.Random) -> str | None:
        for pattern, texts in forms:
            match = re.fullmatch(pattern, reference)
            if match is not None:
                text = numbers.choice(texts) if len(texts) > 1 else texts[0]
                return re.sub(r"@(\d)", lambda spot, found=match: found[int(spot[1])], text)
        return None

    return change


def _spots(pattern: str, text: str) -> list[re.Match[str]]:
    """Return matches outside commands and upright text."""
    hidden = [match.span() for match in _COMMAND.finditer(text)]
    return [
        match for match in re.finditer(pattern, text) if not any(start <= match.start() < end for start, end in hidden)
    ]


def _put(text: str, match: re.Match[str], by: str) -> str:
    return text[: match.start()] + by + text[match.end() :]


def digit(reference: str, numbers: random.Random) -> str | None:
    """Replace one digit by another."""
    spots = _spots(r"\d", reference)
    if not spots:
        return None
    spot = numbers.choice(spots)
    return _put(reference, spot, numbers.choice([d for d in "123456789" if d != spot[0]]))


def sign(reference: str, numbers: random.Random) -> str | None:
    """Replace one plus by a minus or the reverse, or put a minus before a number."""
    spots = _spots(r"(?<![\^{(,=])[+-](?=[\d\\A-Za-z(])", reference)
    if spots:
        spot = numbers.choice(spots)
        return _put(reference, spot, "-" if spot[0] == "+" else "+")
    if re.fullmatch(r"\d*[1-9]\d*(\.\d+)?|\\frac\{\d+\}\{\d+\}|\d*\\sqrt\{\d+\}", reference):
        return "-" + reference
    return None


def exponent(reference: str, numbers: random.Random) -> str | None:
    """Increase one exponent by one."""
    spots = list(re.finditer(r"\^(?:\{(\d+)\}|(\d))", reference))
    if not spots:
        return None
    spot = numbers.choice(spots)
    return _put(reference, spot, "^{" + str(int(spot[1] or spot[2]) + 1) + "}")


def unit(reference: str, numbers: random.Random) -> str | None:
    r"""Replace one unit by another of the same or of another kind; degrees become per cent."""
    match = _UNIT.search(reference)
    if match is not None and match[1].strip() in _OTHER_UNITS and re.search(r"[1-9]", reference):
        return _put(reference, match, r"\text{ " + _OTHER_UNITS[match[1].strip()] + "}")
    if r"^\circ" in reference:
        return reference.replace(r"^\circ", r"\%")
    if r"\%" in reference:
        return reference.replace(r"\%", r"^\circ")
    return reference.replace(r"\$", "€") if r"\$" in reference else None


def base(reference: str, numbers: random.Random) -> str | None:
    """Replace the base of a number."""
    match = re.fullmatch(r"(-?[0-9A-F]+)_\{?(\d+)\}?", reference)
    return f"{match[1]}_{{{int(match[2]) + 1}}}" if match else None


def bracket(reference: str, numbers: random.Random) -> str | None:
    """Replace an open end by a closed one or the reverse, in intervals and tuples."""
    if not re.search(r"^[(\[].*,.*[)\]]$", reference.replace(r"\left", "").replace(r"\right", "")):
        return None
    spots = [m for m in re.finditer(r"[(\[]", reference) if "\\infty" not in reference[m.end() : m.end() + 8]]
    spots = [m for m in spots if m.start() == 0 or reference[: m.start()].endswith((r"\left", r"\cup ", r"\cup"))]
    if not spots:
        return None
    spot = numbers.choice(spots)
    return _put(reference, spot, "[" if spot[0] == "(" else "(")


def _items(reference: str) -> list[str] | None:
    """Return the items of a bare list, a tuple or a set."""
    inner = re.sub(r"^(?:\\left)?(?:\(|\\\{)|(?:\\right)?(?:\)|\\\})$", "", reference.strip())
    if any(mark in inner for mark in "()[]{}") or "," not in inner:
        return None
    items = [item.strip() for item in inner.split(",")]
    whole = all(re.fullmatch(r"-?\d+(?:/\d+)?|-?[a-z]", item) for item in items)
    grouped = re.fullmatch(r"-?\d{1,3}(?:,\d{3})+", inner) is not None
    return items if whole and not grouped else None


def multiplicity(reference: str, numbers: random.Random) -> str | None:
    """Repeat one item of a list, or leave it out."""
    items = _items(reference)
    if items is None:
        return None
    inner = reference[reference.index(items[0]) : reference.rindex(items[-1]) + len(items[-1])]
    at = numbers.randrange(len(items))
    changed = [*items[: at + 1], *items[at:]] if numbers.random() < 0.5 else items[:at] + items[at + 1 :]
    return reference.replace(inner, ", ".join(changed))


def order(reference: str, numbers: random.Random) -> str | None:
    """Exchange two different coordinates of a tuple, or the parts of a ratio."""
    ratio = re.fullmatch(r"(\d+):(\d+)", reference)
    if ratio is not None:
        return f"{ratio[2]}:{ratio[1]}" if ratio[1] != ratio[2] else None
    items = _items(reference) if reference.replace(r"\left", "").startswith("(") else None
    if items is None or len(set(items)) < 2:
        return None
    one = numbers.randrange(len(items) - 1)
    if items[one] == items[one + 1]:
        return None
    inner = reference[reference.index(items[0]) : reference.rindex(items[-1]) + len(items[-1])]
    swapped = [*items[:one], items[one + 1], items[one], *items[one + 2 :]]
    return reference.replace(inner, ", ".join(swapped))


_NUMBER = re.compile(r"-?\d{1,9}")
_PLAIN = re.compile(r"-?\d{1,9}|-?\\frac\{\d+\}\{\d+\}|-?\d*\\sqrt\{\d+\}|\d+\\pi")
_MATRIX = re.compile(r"\\begin\{pmatrix\}(?P<inside>[^{}]*(?:\{[^{}]*\}[^{}]*)*)\\end\{pmatrix\}")
_COUNTED = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


def other_word(reference: str, numbers: random.Random) -> str | None:
    """Replace a number by another one, in words."""
    if not re.fullmatch(r"\d|1[0-2]", reference):
        return None
    return rf"\text{{{numbers.choice([word for at, word in enumerate(_COUNTED) if at != int(reference)])}}}"


def power_of_ten(reference: str, numbers: random.Random) -> str | None:
    """Change the power of ten, or give a share of a hundred."""
    if not re.fullmatch(r"[1-9]\d{0,8}", reference):
        return None
    ways = [
        rf"{reference[0]}.{reference[1:] or 0}\times10^{{{len(reference)}}}",
        f"{reference}e1",
        rf"{reference}\times10^{{-2}}",
    ]
    return numbers.choice([*ways, reference + "0", reference + "00", f"0.{reference}"])


# a fraction upside down, as a wrong mixed number, or as a reversed ratio
inverse = told(
    (r"\\frac\{(?!(\d+)\}\{\1\}$)(?!0\})(\d+)\}\{(?!0\})(\d+)\}", (r"\frac{@3}{@2}", r"1\frac{@2}{@3}", "@3:@2"))
)
# degrees as wrong radians, as minutes, or only the number, as radians
angle = told(
    (
        r"(?!0\D)(\d+)\s*\^(?:\\circ|\{\\circ\})",
        (r"\frac{@1\pi}{360}", r"@1\text{ radians}", r"@1^\circ 30'", "@1'"),
    )
)


def cells(reference: str, numbers: random.Random) -> str | None:
    """Change a matrix or vector: exchange two entries, drop one, or change a sign."""
    match = _MATRIX.fullmatch(reference.strip())
    if match is None:
        return None
    rows = [[cell.strip() for cell in row.split("&")] for row in match["inside"].split("\\\\") if row.strip()]
    flat = [cell for row in rows for cell in row]
    pairs = [
        (a, b) for a in range(len(flat)) for b in range(a) if canonical_notation(flat[a]) != canonical_notation(flat[b])
    ]
    if not pairs:
        return None
    one, other = numbers.choice(pairs)
    flat[one], flat[other] = flat[other], flat[one]
    if len(rows[0]) == 1 and numbers.random() < 0.5:
        return "(" + ", ".join(flat) + ")"
    width = len(rows[0])
    lines = [" & ".join(flat[at : at + width]) for at in range(0, len(flat), width)]
    return r"\begin{pmatrix}" + r" \\ ".join(lines) + r"\end{pmatrix}"


def end_of_interval(reference: str, numbers: random.Random) -> str | None:
    """Write an interval as an inequality with one end open instead of closed, or the reverse."""
    match = re.fullmatch(r"(?:\\left)?([(\[])(-?\d+),\s*(-?\d+|\\infty)(?:\\right)?([)\]])", reference)
    if match is None or (match[1], match[4]) == ("(", ")"):
        return None
    low, high = ("\\le" if match[1] == "[" else "<"), ("\\le" if match[4] == "]" else "<")
    if match[3] == "\\infty" or numbers.random() < 0.5:
        low = "<" if low != "<" else "\\le"
    else:
        high = "<" if high != "<" else "\\le"
    return (
        rf"x {'>' if low == '<' else '>='} {match[2]}"
        if "infty" in match[3]
        else f"{match[2]} {low} x {high} {match[3]}"
    )


def hedge(reference: str, numbers: random.Random) -> str | None:
    """Put the correct answer among others, or into a text that contains it."""
    if not _PLAIN.fullmatch(reference) or reference == "0":
        return None
    other = str(numbers.randint(1001, 1999))
    ways = [
        rf"{reference} \text{{ or }} {other}", f"{reference}, {other}", rf"\pm {reference}",
            rf"\{{{reference}, {other}\}}",
        f"{reference} = {other}", f"[{reference}, {reference}+1]", rf"x \ge {reference}",
        rf"{other} \text{{ or }} {reference}",
        f"({reference}, {other})", rf"\text{{not }} {reference}",
        rf"\text{{either }} {reference} \text{{ or }} {other}",
        rf"{reference} \text{{ and }} {other}", rf"{reference} \approx {other}", rf"{reference} + 2k",
        rf"{reference} + k\pi, k\in\mathbb{{Z}}", rf"{reference} \pmod{{{other}}}", r"\mathbb{Z}", r"\mathbb{R}",
        rf"{reference}, \ldots, {other}", rf"\text{{between }} {reference} \text{{ and }} {other}",
    ]  # fmt: skip
    return numbers.choice(ways)


def free_letter(reference: str, numbers: random.Random) -> str | None:
    """Add a letter with an arbitrary value to the correct answer."""
    if not _PLAIN.fullmatch(reference) or reference in ("0", "1", "-1"):
        return None
    letter = numbers.choice("xynkat")
    ways = (
        f"{reference}{letter}",
        f"{reference} + {letter}",
        f"{reference}^{letter}",
        rf"\frac{{{reference}}}{{{letter}}}",
        letter,
    )
    return numbers.choice(ways)


def other_letter(reference: str, numbers: random.Random) -> str | None:
    """Choose another option, or two of them."""
    match = re.fullmatch(r"\(?\\text(?:bf)?\{\(?([A-E])\)?\}\)?", reference)
    if match is None:
        return None
    other = numbers.choice([letter for letter in "ABCDE" if letter != match[1]])
    return numbers.choice((other, f"({other})", f"{match[1]} or {other}", f"{match[1]}, {other}", f"not {match[1]}"))


def terms(reference: str, numbers: random.Random) -> str | None:
    """Leave out or repeat one term of a sum."""
    whole = re.fullmatch(r"-?[\da-z^*]+(?:[+-][\da-z^*]+)+", reference.replace(" ", ""))
    parts = re.findall(r"[+-]?[^+-]+", reference) if whole else []
    if len(parts) < 2 or "e" in reference:
        return None
    at = numbers.randrange(len(parts))
    if numbers.random() < 0.5:
        kept = parts[:at] + parts[at + 1 :]
    else:
        kept = [*parts, parts[at] if at else "+" + parts[0].lstrip("+")]
    return "".join(kept).strip().lstrip("+").replace("+-", "-")


CHANGES: dict[str, Change] = {
    "digit": digit,
    "sign": sign,
    "exponent": exponent,
    "unit": unit,
    "base": base,
    "bracket": bracket,
    "multiplicity": multiplicity,
    "order": order,
    "other_word": other_word,
    "power_of_ten": power_of_ten,
    "inverse": inverse,
    "angle": angle,
    "cells": cells,
    "end_of_interval": end_of_interval,
    "hedge": hedge,
    "free_letter": free_letter,
    "other_letter": other_letter,
    "terms": terms,
}
