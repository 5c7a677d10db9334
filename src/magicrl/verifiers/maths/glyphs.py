"""Glyphs: what Unicode and plain text write in one character or word, as LaTeX writes it."""

from __future__ import annotations

import re
import unicodedata

_SYMBOLS = {
    "−": "-",
    "–": "-",
    "‐": "-",
    "‑": "-",
    "×": r"\times ",
    "·": r"\cdot ",
    "⋅": r"\cdot ",
    "∙": r"\cdot ",
    "•": r"\cdot ",
    "∗": "*",
    "÷": r"\div ",
    "⁄": "/",
    "∕": "/",
    "±": r"\pm ",
    "∓": r"\mp ",
    "π": r"\pi ",
    "∞": r"\infty ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "⩽": r"\le ",
    "⩾": r"\ge ",
    "≠": r"\ne ",
    "≈": r"\approx ",
    "≡": r"\equiv ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∖": r"\setminus ",
    "∈": r"\in ",
    "∅": r"\emptyset ",
    "∣": "|",
    "∠": r"\angle ",
    "△": r"\triangle ",
    "⟨": r"\langle ",
    "⟩": r"\rangle ",
    "⌊": r"\lfloor ",
    "⌋": r"\rfloor ",
    "⌈": r"\lceil ",
    "⌉": r"\rceil ",
    "∨": r"\lor ",
    "∧": r"\land ",
    "√": r"\sqrt ",
    "∛": r"\sqrt[3]",
    "∜": r"\sqrt[4]",
    "°": r"^\circ ",
    "º": r"^\circ ",
    "˚": r"^\circ ",
    "℃": r"^\circ C",
    "℉": r"^\circ F",
    "′": "'",
    "″": "''",
    "‘": "'",
    "’": "'",
    "…": r"\ldots ",
    "\u00c5": r"\AA ",
    "\u212b": r"\AA ",
    "∀": r"\forall ",
    "ℝ": r"\mathbb{R}",
    "ℤ": r"\mathbb{Z}",
    "ℕ": r"\mathbb{N}",
    "ℚ": r"\mathbb{Q}",
    "ℂ": r"\mathbb{C}",
    "。": ".",
    "，": ",",
}
_PROSE = frozenset("−×⋅÷±π∞≤≥≠√")
_UNUSUAL = re.compile(r"[^\x20-\x7e]")
_ROOT = re.compile(r"([√∛∜])\s*(\d+(?:\.\d+)?|[A-Za-z])")
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
_LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉₊₋]+")
_VULGAR = re.compile("[¼½¾⅐-⅞]")


def plain_characters(text: str) -> str:
    """Ordinary characters for unusual ones: any script's digits, full-width forms, common symbols.

    Invisible and control characters vanish, all white space becomes a space.

    Example:
        >>> plain_characters("2√3 + x¹⁰")
        '2\\\\sqrt{3} + x^{10}'
    """
    if text.isascii() and text.isprintable():
        return text
    text = _ROOT.sub(lambda match: f"{_SYMBOLS[match[1]].strip()}{{{match[2]}}}", text)
    text = _RAISED.sub(lambda match: f"^{{{_level(match[0])}}}", text)
    text = _LOWERED.sub(lambda match: f"_{{{_level(match[0])}}}", text)
    text = _VULGAR.sub(_fraction, text)
    return _UNUSUAL.sub(_plain_character, text)


def plain_mathematics(text: str) -> str:
    """Running text with the glyphs of formulas as LaTeX; its punctuation stays."""
    if text.isascii():
        return text
    text = _VULGAR.sub(_fraction, text)
    text = _ROOT.sub(lambda match: f"{_SYMBOLS[match[1]].strip()}{{{match[2]}}}", text)
    text = _RAISED.sub(lambda match: f"^{{{_level(match[0])}}}", text)
    return "".join(_SYMBOLS[char] if char in _PROSE else char for char in text)


def _level(run: str) -> str:
    """Raised or lowered characters on the line."""
    return unicodedata.normalize("NFKC", run).replace("−", "-")


def _fraction(match: re.Match[str]) -> str:
    top, _, bottom = unicodedata.normalize("NFKC", match[0]).partition("⁄")
    return rf"\frac{{{top}}}{{{bottom}}}"


def _plain_character(match: re.Match[str]) -> str:
    char = match[0]
    if char in _SYMBOLS:
        return _SYMBOLS[char]
    if char.isspace():
        return " "
    if char.isdecimal():
        return str(unicodedata.decimal(char))
    if 0x2460 <= ord(char) <= 0x2473:  # circled numbers
        return str(ord(char) - 0x245F)
    if 0xFF01 <= ord(char) <= 0xFF5E:
        return chr(ord(char) - 0xFEE0)
    if 0x1D400 <= ord(char) <= 0x1D7FF:  # letters and digits in the type of formulas
        plain = unicodedata.normalize("NFKC", char)
        return plain if plain.isascii() else _plain_character(re.match(".", plain) or match)
    return "" if unicodedata.category(char) in ("Cc", "Cf") else _greek(char)


def _greek(char: str) -> str:
    r"""``α`` as ``\alpha ``; any other character as it is."""
    words = unicodedata.name(char, "").split()
    if len(words) == 4 and words[0] == "GREEK" and words[2] == "LETTER" and words[3] != "OMICRON":
        name = words[3].lower().replace("lamda", "lambda")
        return rf"\{name if words[1] == 'SMALL' else name.capitalize()} "
    return "\\mu " if char == "µ" else char
