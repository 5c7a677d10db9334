r"""One spelling for each answer: what LaTeX and Unicode let one write in several ways without changing meaning.

Only notation is touched, never mathematics: nothing is dropped that carries a value, a unit or an order.
Every pass is linear in the text.
"""

from __future__ import annotations

import re

from magicrl.verifiers.maths.glyphs import plain_characters
from magicrl.verifiers.maths.wrappers import unwrapped, without_entities, without_layout

_TOKENS = re.compile(
    r"(?P<newline>\\\\\*?(?:\s*\[-?[\d.]{1,6} ?(?:pt|em|ex|mm|cm|in)\])?)"
    r"|(?P<angle>\\(?:left\s*<|right\s*>))"
    r"|(?P<sized>\\(?:left|right)\s*\.|\\(?:left|right|middle|[bB]igg?[lr]?)(?![A-Za-z]))"
    r"|(?P<frac>\\(?:[dtcsx]|nice)frac(?![A-Za-z]))"
    r"|(?P<binom>\\[dt]binom(?![A-Za-z]))"
    r"|(?P<style>\\(?:display|text)style(?![A-Za-z]))"
    r"|(?P<nothing>\\! *)"
    r"|(?P<space>\\[,;:> ]|~|\\q?quad(?![A-Za-z]))"
    r"|(?P<comma>\{,\}|\\text\{,\})"
    r"|(?P<le>\\(?:leqslant|leqq|leq)(?![A-Za-z]))"
    r"|(?P<ge>\\(?:geqslant|geqq|geq)(?![A-Za-z]))"
    r"|(?P<ne>\\not\s*=)"
    r"|(?P<empty>\\varnothing(?![A-Za-z]))"
    r"|\\var(?P<letter>phi|epsilon|theta|rho)(?![A-Za-z])"
    r"|\{(?P<mark>[:=]|(?<=\d\{)\.(?=\}\d))\}"
    r"|\\."
)
_REPLACEMENT = {
    "newline": r"\\",
    "sized": "",
    "frac": r"\frac",
    "binom": r"\binom",
    "style": "",
    "nothing": "",
    "space": " ",
    "comma": ",",
    "le": r"\le",
    "ge": r"\ge",
    "ne": r"\ne ",
    "empty": r"\emptyset",
}
_CIRCLED_PAIR = re.compile(r"(?<=[\u2460-\u2473])\s*(?=[\u2460-\u2473])")
_DOUBLED = re.compile(r"\\(?=\\[A-Za-z])")
_SPACES = re.compile(r"\s+")
_LOOSE = re.compile(r"((?<=\d), (?=\d{3}(?!\d)))| ?([^\w\s.\\]) ?| (?=\\)|(?<=\d) (?=[A-DF-Za-df-z](?![A-Za-z]))")
_TWO_NUMBERS = re.compile(r"-?\d+, \d+")
_SINGLE = re.compile(r"([\^_])\{(\d(?=\}(?!\d))|[A-Za-z](?=\}(?![A-Za-z]))|\\[A-Za-z]+(?=\}(?![A-Za-z])))\}")
_MODULO = re.compile(
    r"\(\s*(?:\\b?mod(?![a-z])|\\(?:text|mathrm)\s*\{\s*mod\s*\}|mod\b)\s*(?P<a>[^()]{1,20}?)\s*\)"
    r"|(?:\\(?:b?mod|pmod)(?![a-z])|\\(?:text|mathrm)\s*\{\s*mod\s*\}|(?<![A-Za-z\\])mod(?:ulo)?(?![A-Za-z]))"
    r"\s*(?:\{(?P<b>[^{}]{1,20})\}|(?P<c>\d+|[a-z](?![A-Za-z])))"
)
_CALLED = re.compile(r"(?<![A-Za-z\\])([A-Za-z])\{(\([^{}]*\))\}")
_FONT = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|texttt|mbox|mathrm|mathbf|mathit|mathsf|boldsymbol|bm|operatorname)"
    r" ?\{(?P<inside>[^{}]*)\}"
)
_IDLE_SPACE = re.compile(r"(?<!\d) +| +(?!\d)")
_LOWERING = re.compile(r"[_{}]")
_SUBSTANCE = re.compile(r"(?=.*[a-z\d])(?:\(?[A-Z][a-z]?\d{0,2}\)?\d{0,2}){2,12}(?:\^?\d?[+-])?")
_QUOTIENT = re.compile(r"\\mathbb\{Z\}/\(?(?P<a>\w+)(?:\\mathbb\{Z\}\)?|(?![\w\\]))")
_BOLD_LETTER = re.compile(r"\\mathbf ?\{? ?[A-Z] ?\}?")
_BOARD = re.compile(
    r"\\(?:mathbf|Bbb|mathds) ?\{ ?(?P<a>[RZNQC]) ?\}|\\(?:mathbb|mathbf) (?P<b>[RZNQC])(?![A-Za-z])"
    r"|\\(?P<c>[RZNQC])(?![A-Za-z])"
)
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))


def canonical(text: str) -> str:
    r"""The spelling that answers are compared in.

    Math delimiters, sizing, spacing commands, redundant outer braces, a final full stop and a ``\text{}`` around
    the whole go; spaces stay only where they can matter: in ``1 000``, which is not ``1000``, and in ``32, 349``,
    which is a list.

    Example:
        >>> canonical(r"$\left( -\infty ,\, 5 \right]$.")
        '(-\\infty,5]'
    """
    text = plain_characters(_CIRCLED_PAIR.sub(",", without_entities(text)))
    if "begin" not in text:
        text = _DOUBLED.sub("", text)  # escaped twice on its way here; a line break stands in tables only
    text = _TOKENS.sub(_token, without_layout(text))
    text = _SPACES.sub(" ", text).strip()
    if "\\" in text and not _BOLD_LETTER.fullmatch(text):
        text = _BOARD.sub(lambda m: rf"\mathbb{{{m['a'] or m['b'] or m['c']}}}", text)
        text = _QUOTIENT.sub(r"\\mathbb{Z}_\g<a>", text)
    if "mod" in text:
        text = congruence(text) if r"\equiv" in text else _MODULO.sub(_modulo, text)
    for _ in range(10):  # wrappers may nest; ten layers are more than anyone writes
        bare = _unwrap(text)
        if bare == text:
            break
        text = bare
    if _TWO_NUMBERS.fullmatch(text):
        return text  # without the space it could be a decimal comma
    text = _LOOSE.sub(lambda m: m[1] or m[2] or "", text)
    return _SINGLE.sub(r"\1\2", _CALLED.sub(r"\1\2", text) if "{(" in text else text)


def congruence(text: str) -> str:
    r"""``text`` with every modulus as one of a congruence: ``\bmod 7``, between two numbers a remainder, too."""
    return _MODULO.sub(lambda m: rf"\pmod{{{m['a'] or m['b'] or m['c']}}}", text)


def _modulo(match: re.Match[str]) -> str:
    return match[0] if match[0].startswith(r"\bmod") else congruence(match[0])


def letters_of(text: str) -> str:
    r"""The spelling without fonts, and without spaces that do not part numbers.

    Example:
        >>> letters_of(r"\text{H}_2\text{O}")
        'H_2O'
    """
    if "\\" in text:
        for _ in range(3):
            bare = _FONT.sub(r"\g<inside>", text)
            if bare == text:
                break
            text = bare
    return _IDLE_SPACE.sub("", _SINGLE.sub(r"\1\2", text))


def same_substance(one: str, other: str) -> bool:
    """Whether two texts are one chemical formula, with its numbers lowered or not."""
    left, right = (_LOWERING.sub("", letters_of(text)) for text in (one, other))
    return left == right and _SUBSTANCE.fullmatch(left) is not None


def close_braces(text: str) -> str:
    r"""``text`` with the braces closed that it leaves open, as golds do that were cut too early.

    Example:
        >>> close_braces(r"\frac{1}{2^{15}")
        '\\frac{1}{2^{15}}'
    """
    depth = 0
    for token in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if depth < 0:
            return text
    return text + "}" * depth


def _token(match: re.Match[str]) -> str:
    if match.lastgroup == "letter":  # two shapes of one letter
        return "\\" + match["letter"]
    if match.lastgroup == "angle":
        return r"\langle " if match[0][-1] == "<" else r"\rangle "
    if match.lastgroup == "mark":
        return match["mark"]
    return match[0] if match.lastgroup is None else _REPLACEMENT[match.lastgroup]


def _unwrap(text: str) -> str:
    text = text.strip()
    while text.endswith("\\") and "begin" not in text:
        text = text[:-1].rstrip()  # a line break, or half of a space
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip()
    for opening, closing in _DELIMITERS:
        inside = text[len(opening) : -len(closing)]
        if len(text) > len(opening) + len(closing) and text.startswith(opening) and text.endswith(closing):
            if opening in inside or closing in inside:
                break  # "$a$ and $b$" is not one formula
            return inside.strip()
    return strip_outer_braces(unwrapped(text, strip_outer_braces))


def strip_outer_braces(text: str) -> str:
    """``{{42}}`` is ``42``; ``{1}{2}`` stays. One pass, however deep the nest."""
    if not text.startswith("{"):
        return text
    partner: dict[int, int] = {}
    stack: list[int] = []
    for token in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        if token[0] == "{":
            stack.append(token.start())
        elif token[0] == "}":
            if not stack:
                return text
            partner[stack.pop()] = token.start()
    depth = 0
    while partner.get(depth) == len(text) - 1 - depth and len(text) > 2 * depth + 1:
        depth += 1
    return text[depth : len(text) - depth].strip()
