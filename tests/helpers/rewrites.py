r"""Correct answers in another spelling: a reference answer rewritten with the same meaning.

This is the counterpart of the near misses, which are wrong answers. Every rewriting here is correct whatever the
reference answer is about, by the meaning of the notation and not by what the verifier happens to accept. A rewriting
that does not fit a reference answer is not made.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Iterator
from fractions import Fraction

from near_misses import Change, drawn, told

INTEGER, FRACTION = r"-?\d{1,15}", r"(-?)\\d?frac\{(\d+)\}\{(\d+)\}"
NAMED = r"(?:[a-z]|[fgh]\([a-z]\))\s*=\s*([^=<>,;\\]+)"
UNIT = r"(-?[\d.]+)\s*\\(?:text|mbox|mathrm)\{{\s*({})\.?\}}"
_INTEGER, _FRACTION = re.compile(INTEGER), re.compile(FRACTION)
_DECIMAL = re.compile(r"-?\d+\.\d+")
_ANY_FRACTION = re.compile(r"\\[dt]?frac(?=\{)")
_SMALL = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_END = r"(?:-?\d+(?:/\d+)?|-?\\frac\{\d+\}\{\d+\}|-?\\infty|\+?\\infty)"
_INTERVAL = re.compile(rf"(?:\\left)?([(\[])({_END}),\s*({_END})(?:\\right)?([)\]])")
_GLYPHS = {
    r"\pi": "π", r"\infty": "∞", r"\le": "≤", r"\leq": "≤", r"\ge": "≥", r"\geq": "≥", r"\times": "×", r"\cdot": "·",
    r"\pm": "±", r"\cup": "∪", r"^\circ": "°", r"^{\circ}": "°", r"\theta": "θ", r"\alpha": "α", r"\in": "∈",
}  # fmt: skip


def rewrites(references: list[str], seed: int, most_per_reference: int = 3) -> Iterator[tuple[str, str, str]]:
    """Return (class, reference, correct response), in an order that the seed fixes, limited per reference."""
    for name, reference, again in drawn(REWRITES, references, seed, most_per_reference, operator.ne):
        yield name, reference, again if name in UNBOXED else f"\\boxed{{{again}}}"


def fraction_command(reference: str, numbers: random.Random) -> str | None:
    return _ANY_FRACTION.sub(lambda _: numbers.choice(("\\dfrac", "\\tfrac", "\\cfrac")), reference)


slash = told((FRACTION, ("@1@2/@3",)))


def unreduced(reference: str, numbers: random.Random) -> str | None:
    match = _FRACTION.fullmatch(reference)
    by = numbers.randint(2, 9)
    return rf"{match[1]}\frac{{{int(match[2]) * by}}}{{{int(match[3]) * by}}}" if match else None


sign_inside = told((r"-\\d?frac\{(\d+)\}\{(\d+)\}", (r"\frac{-@1}{@2}",)))


def mixed(reference: str, numbers: random.Random) -> str | None:
    match = _FRACTION.fullmatch(reference)
    if match is None or int(match[3]) < 2:
        return None
    whole, rest = divmod(int(match[2]), int(match[3]))
    return rf"{match[1]}{whole}\frac{{{rest}}}{{{match[3]}}}" if whole and rest else None


def decimal(reference: str, numbers: random.Random) -> str | None:
    """Write a finite fraction as a decimal, an integer with a zero, or a decimal as a fraction."""
    match = _FRACTION.fullmatch(reference)
    if match is not None and int(match[3]):
        value = Fraction(int(match[2]), int(match[3]))
        if value.denominator in (2, 4, 5, 8, 10, 16, 20, 25, 40, 50, 100) and value < 10**6:
            return match[1] + f"{float(value):.6f}".rstrip("0").rstrip(".")
    if _DECIMAL.fullmatch(reference):
        value = Fraction(reference)
        return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
    return reference + ".0" if _INTEGER.fullmatch(reference) else None


def thousands(reference: str, numbers: random.Random) -> str | None:
    if not re.fullmatch(r"-?\d{4,15}", reference):
        return None
    return f"{int(reference):,}".replace(",", numbers.choice((",", "{,}", r",\!", r"\,", " ", r"\ ")))


def scientific(reference: str, numbers: random.Random) -> str | None:
    if not re.fullmatch(r"-?[1-9]\d{3,12}", reference):
        return None
    digits = reference.lstrip("-")
    head = (digits[0] + "." + digits[1:]).rstrip("0").rstrip(".")
    sign, power = "-" if reference.startswith("-") else "", len(digits) - 1
    return (
        sign
        + head
        + numbers.choice(
            (
                rf"\times10^{{{power}}}",
                rf" \cdot 10^{{{power}}}",
                f"e{power}",
                f"E+{power}",
                f"*10^{power}",
                f" × 10^{power}",
            )
        )
    )


def in_words(reference: str, numbers: random.Random) -> str | None:
    return rf"\text{{{_SMALL[int(reference)]}}}" if re.fullmatch(r"\d|1[0-2]", reference) else None


# a bare value gets a name, a named one loses it
named = told((NAMED, ("@1",)), (f"{INTEGER}|{FRACTION}", tuple(f"{letter} = @0" for letter in "xynk")))


def layout(reference: str, numbers: random.Random) -> str | None:
    r"""Add ``\left``, thin spaces, dollars, a full stop, boldface or braces."""
    if reference.startswith("\\text") or "$" in reference or reference.endswith("."):
        return None
    ways = [
        f"${reference}$",
        f"{reference}.",
        rf"\displaystyle {reference}",
        f"{{{reference}}}",
        rf"\,{reference}\,",
        rf"\mathbf{{{reference}}}",
    ]
    ways.append(re.sub(r"(?<=[\d\w}])([+<>=])(?=[\d\w\\])", r"\\, \1\\ ", reference))
    if "\\left" not in reference and reference.count("(") == reference.count(")") == 1 and "[" not in reference:
        ways.append(reference.replace("(", r"\left( ").replace(")", r" \right)"))
    if r"\left(" in reference and r"\right)" in reference and "." not in reference:
        ways.append(reference.replace(r"\left", "").replace(r"\right", ""))
    return numbers.choice(ways)


def glyphs(reference: str, numbers: random.Random) -> str | None:
    for command, glyph in _GLYPHS.items():
        if re.search(re.escape(command) + r"(?![A-Za-z])", reference):
            return re.sub(re.escape(command) + r"(?![A-Za-z])\s?", glyph, reference)
    return None


def root(reference: str, numbers: random.Random) -> str | None:
    """Write a square root as a power, or in another spelling."""
    way = numbers.choice((r"(\1)^{1/2}", r"(\1)^{\\frac{1}{2}}", r"\\sqrt[2]{\1}"))
    return re.sub(r"\\sqrt\{(\d+)\}", way, reference) if re.search(r"\\sqrt\{\d+\}(?!\^)", reference) else None


def turned_sum(reference: str, numbers: random.Random) -> str | None:
    """Exchange two terms of a sum."""
    match = re.fullmatch(r"(-?[\w\\{}^]+) ?([+-]) ?([\w\\{}^]+)", reference)
    if match is None or any(mark in reference for mark in ("\\pm", "\\cup", "\\text", "\\mathbf", "\\circ")):
        return None
    if any(part.count("{") != part.count("}") for part in (match[1], match[3])):
        return None
    first = match[1] if match[1].startswith("-") else f"+{match[1]}"
    return ("-" if match[2] == "-" else "") + match[3] + first


def inequality(reference: str, numbers: random.Random) -> str | None:
    """Write an interval as an inequality, only with square brackets or an infinite end, since pairs look the same."""
    match = _INTERVAL.fullmatch(reference)
    if match is None:
        return None
    opening, low, high, closing = match.groups()
    if "\\infty" in low and "\\infty" in high:
        return r"\mathbb{R}"
    lower, upper = ("<" if opening == "(" else r"\le"), ("<" if closing == ")" else r"\leq")
    if "\\infty" in low:
        return f"x {upper} {high}"
    if "\\infty" in high:
        return f"{low} {lower} x"
    if opening == "(" and closing == ")":
        return None
    return f"{low} {lower} x {upper} {high}"


def interval(reference: str, numbers: random.Random) -> str | None:
    """Write an inequality as an interval or as a set."""
    match = re.fullmatch(r"([a-z])\s*(<|>|\\le|\\leq|\\ge|\\geq)\s*(-?\d+)", reference)
    if match is None:
        return None
    closed = match[2].startswith("\\")
    if numbers.random() < 0.3:
        return rf"\{{{match[1]} \mid {reference}\}}"
    if match[2] in (">", "\\ge", "\\geq"):
        return f"{'[' if closed else '('}{match[3]}, \\infty)"
    return f"(-\\infty, {match[3]}{']' if closed else ')'}"


def listed(reference: str, numbers: random.Random) -> str | None:
    """Write a bare list of numbers in another order, as a set, or with "and"."""
    items = [item.strip() for item in reference.split(",")]
    if not 2 <= len(items) <= 6 or not all(re.fullmatch(r"-?\d{1,3}|-?\\frac\{\d+\}\{\d+\}", item) for item in items):
        return None
    if re.fullmatch(r"-?\d{1,3}(?:,\d{3})+", reference):
        return None
    numbers.shuffle(items)
    ways = [", ".join(items), r"\{" + ", ".join(items) + r"\}", ", ".join(items[:-1]) + r" \text{ and } " + items[-1]]
    return numbers.choice(
        [*ways, r" \text{ or } ".join(items), "; ".join(items), ", ".join(f"x={item}" for item in items)]
    )


angle = told(
    (
        r"(\d+)\s*(?:\^\\circ|\^\{\\circ\})",
        (r"@1\text{ degrees}", "@1", "@1°", r"\frac{@1\pi}{180}", r"\angle ABC = @0"),
    )
)
# a unit in another notation, or left to the question
unit = told(
    (UNIT.format("[a-z]+"), ("@1", "@1 @2", r"@1\ \mathrm{@2}", r"@1~\text{@2}")),
    (UNIT.format("[a-z]+ [a-z]+"), ("@1", "@1 @2", r"@1~\text{@2}")),
)


def percent(reference: str, numbers: random.Random) -> str | None:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\\%", reference)
    if match is None:
        return None
    value = Fraction(match[1]) / 100
    return numbers.choice(
        (rf"{match[1]} \text{{ percent}}", match[1] + "%", rf"\frac{{{value.numerator}}}{{{value.denominator}}}")
    )


money = told((r"\\\$\s?(\d[\d,]*(?:\.\d+)?)", ("@1", r"@1 \text{ dollars}", "$@1$")))


def matrix(reference: str, numbers: random.Random) -> str | None:
    if reference.count(r"\begin{pmatrix}") != 1 or not reference.startswith(r"\begin"):
        return None
    column = re.fullmatch(r"\\begin\{pmatrix\}\s*([^&\\]+(?:\\\\[^&\\]+)+?)\s*\\end\{pmatrix\}", reference)
    if column is not None and numbers.random() < 0.5:
        cells = [cell.strip() for cell in column[1].split("\\\\") if cell.strip()]
        return "(" + ", ".join(cells) + ")" + numbers.choice(("", "^T"))
    return reference.replace("pmatrix", "bmatrix")


def text(reference: str, numbers: random.Random) -> str | None:
    """Write words in another font or case, or with an article."""
    match = re.fullmatch(r"\\text(?:bf)?\{([A-Za-z]{4,}(?: [a-z]+)?)\}", reference)
    if match is None:
        return None
    ways = [rf"\textbf{{{match[1]}}}", match[1], rf"\text{{the {match[1]}}}", rf"\text{{{match[1].upper()}}}"]
    return numbers.choice([*ways, rf"\text{{{match[1]}.}}"])


based = told(
    (r"(\d+)_\{?(\d{1,2})\}?", ("@1_{@2}", "(@1)_{@2}", r"@1\text{ (base @2)}", "@1_{(@2)}")),
)
ratio = told((r"(\d+)\s*:\s*(\d)", (r"@1 \text{ to } @2", r"\frac{@1}{@2}", "@1 : @2")))
choice = told(
    (
        r"\(?\\text(?:bf)?\{\(?([A-F])\)?\}\)?",
        ("@1", "(@1)", r"\textbf{(@1)}", r"\text{Option @1}", "@1."),
    )
)
# a product with an explicit sign, or in the other order
product = told((r"(-?\d+)([a-z]|\\pi|\\sqrt\{\d+\}|i)", (r"@1\cdot @2", r"@1 \times @2", "@1*@2", r"@2 \cdot (@1)")))


def chain(reference: str, numbers: random.Random) -> str | None:
    """Put a value at the end of a true chain, into a system's braces, or add a rounding after it."""
    if not re.fullmatch(r"\d{1,4}", reference):
        return None
    part = numbers.randint(1, int(reference) + 1)
    return f"{part} + {int(reference) - part} = {reference}" if int(reference) >= part else None


stated = told(
    (
        r"-?\d{1,6}|\\frac\{\d+\}\{\d+\}",
        tuple(rf"\text{{{lead} }} @0" for lead in ("The answer is", "the final answer is", "The value is", "Answer:")),
    )
)


def prose(reference: str, numbers: random.Random) -> str | None:
    """Write a response without a box: the answer is in its last sentence."""
    if not re.fullmatch(r"-?\d+(?:\.\d+)?|\\frac\{\d+\}\{\d+\}|-?\d+\\sqrt\{\d+\}|\d+\\pi", reference):
        return None
    ways = (
        "We count 7 cases and 3 more. So the answer is ${}$.",
        "First $a = 4$, then $b = 9$. Therefore, the final answer is: $${}$$",
        "There are 12 in all.\n\n**Final Answer:** \\({}\\)",
        "Adding up 2 and 3, we obtain\n\\[ {} \\]",
        "Since 5 < 8, the result is ${}$. I hope it is correct.",
        "Step 1: 4 + 5 = 9.\nStep 2: double it.\n\nThe answer is {}.",
        "La réponse est ${}$.",
        "Die Antwort lautet ${}$.",
        "La respuesta es ${}$.",
        "所以答案是 ${}$。",
    )
    way = numbers.choice(ways)
    return (
        None
        if "$" not in way and "\\(" not in way and "\\[" not in way and "\\" in reference
        else way.format(reference)
    )


UNBOXED = frozenset(("prose",))
REWRITES: dict[str, Change] = {
    "fraction_command": fraction_command, "slash": slash, "unreduced": unreduced, "sign_inside": sign_inside,
    "mixed": mixed, "decimal": decimal, "thousands": thousands, "scientific": scientific, "in_words": in_words,
    "named": named, "layout": layout, "glyphs": glyphs, "root": root, "turned_sum": turned_sum,
    "inequality": inequality, "interval": interval, "listed": listed, "angle": angle, "unit": unit,
    "percent": percent, "money": money, "matrix": matrix, "text": text, "based": based, "ratio": ratio,
    "choice": choice, "product": product, "chain": chain, "stated": stated, "prose": prose,
}  # fmt: skip
