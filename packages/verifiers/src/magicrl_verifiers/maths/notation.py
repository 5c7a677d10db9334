r"""Canonical notation: one spelling for what LaTeX and Unicode write in several ways.

Glyphs become LaTeX; fonts, colours, sizes, environments, Markdown and "the answer is" are removed. Nothing that carries
a value, a unit or an order is removed. Every pass is linear in the text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from functools import partial
from html import unescape

_SYMBOLS = {
    "−": "-", "–": "-", "‐": "-", "‑": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ",
    "•": r"\cdot ", "∗": "*", "÷": r"\div ", "⁄": "/", "∕": "/", "±": r"\pm ", "∓": r"\mp ", "π": r"\pi ",
    "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ",
    "≡": r"\equiv ", "∪": r"\cup ", "∩": r"\cap ", "∖": r"\setminus ", "∈": r"\in ", "∅": r"\emptyset ", "∣": "|",
    "∠": r"\angle ", "△": r"\triangle ", "⟨": r"\langle ", "⟩": r"\rangle ", "⌊": r"\lfloor ", "⌋": r"\rfloor ",
    "⌈": r"\lceil ", "⌉": r"\rceil ", "∨": r"\lor ", "∧": r"\land ", "√": r"\sqrt ", "∛": r"\sqrt[3]",
    "∜": r"\sqrt[4]", "°": r"^\circ ", "º": r"^\circ ", "˚": r"^\circ ", "℃": r"^\circ C", "℉": r"^\circ F", "′": "'",
    "″": "''", "‘": "'", "’": "'", "…": r"\ldots ", "\xc5": r"\AA ", "\u212b": r"\AA ", "∀": r"\forall ",
    "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}", "。": ".",
    "，": ",",
}  # fmt: skip
_PROSE = frozenset("−×⋅÷±π∞≤≥≠√")
_UNUSUAL = re.compile(r"[^\x20-\x7e]")
_ROOT = re.compile(r"([√∛∜])\s*(\d+(?:\.\d+)?|[A-Za-z])")
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
_LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉₊₋]+")
_VULGAR = re.compile("[¼½¾⅐-⅞]")


def plain_characters(text: str) -> str:
    """Replace unusual characters by ordinary ones: digits of any script, full-width forms, common symbols.

    Invisible and control characters are removed, all white space becomes a space.

    Example:
        >>> plain_characters("2√3 + x¹⁰")
        '2\\\\sqrt{3} + x^{10}'
    """
    # most answers need no search
    if text.isascii() and text.isprintable():
        return text
    return _UNUSUAL.sub(_plain_character, _on_the_line(text))


def plain_mathematics(text: str) -> str:
    """Replace the glyphs of formulas in running text by LaTeX; punctuation stays."""
    if text.isascii():
        return text
    return "".join(_SYMBOLS[char] if char in _PROSE else char for char in _on_the_line(text))


def _on_the_line(text: str) -> str:
    """Replace fractions, roots, raised and lowered characters by LaTeX."""
    text = _ROOT.sub(lambda match: f"{_SYMBOLS[match[1]].strip()}{{{match[2]}}}", _VULGAR.sub(_fraction, text))
    for mark, run in (("^", _RAISED), ("_", _LOWERED)):
        text = run.sub(lambda match, mark=mark: f"{mark}{{{_normal(match[0]).replace('−', '-')}}}", text)
    return text


_normal = partial(unicodedata.normalize, "NFKC")


def _fraction(match: re.Match[str]) -> str:
    top, _, bottom = _normal(match[0]).partition("⁄")
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
        plain = _normal(char)
        return plain if plain.isascii() else _plain_character(re.match(".", plain) or match)
    return "" if unicodedata.category(char) in ("Cc", "Cf") else _greek(char)


def _greek(char: str) -> str:
    r"""Return ``α`` as ``\alpha ``; any other character unchanged."""
    words = unicodedata.name(char, "").split()
    if len(words) == 4 and words[0] == "GREEK" and words[2] == "LETTER" and words[3] != "OMICRON":
        name = words[3].lower().replace("lamda", "lambda")
        return rf"\{name if words[1] == 'SMALL' else name.capitalize()} "
    return "\\mu " if char == "µ" else char


_MOST_CHARS = 6000
_MOST_OF_SET = 300
"""Longest union of intervals: the patterns for one search a long text many times."""
_INTERVAL = r"[\[\]][^\[\]()\\]*(?:\\[A-Za-z][^\[\]()\\]*)*[\[\]]"
_OUTWARD = re.compile(rf"(?P<head>[^\[\]()]*(?:=|\\in)\s*)?(?P<body>{_INTERVAL}(?:\s*\\cup\s*{_INTERVAL})*)")
_LETTER_UNION = re.compile(r"(?P<left>[(\[][^()\[\]]*,[^()\[\]]*[)\]])\s*U\s*(?=[(\[][^()\[\]]*,)")
_ENTITY = re.compile(r"&(?:[A-Za-z]{2,8}|#\d{2,5});")

FONTS = "text|textbf|textit|textrm|textnormal|texttt|mbox|mathrm|mathbf|mathit|mathsf|boldsymbol|bm|operatorname"
_ENCLOSING = re.compile(rf"\\(?:{FONTS}|textsf|emph|underline|hbox|ce)\s*(?P<rest>\{{.*\}})", re.DOTALL)
_BEFORE = re.compile(r"\\(?:therefore|Rightarrow|implies|Longrightarrow)(?![A-Za-z])\s*|=>\s*")
_ANNOUNCED = re.compile(
    r"\\text(?:bf|it|rm)?\s*\{\s*(?:so,? |thus,? |hence,? )?"
    r"(?:the )?(?:final )?answer(?: is)?\s*[:=]?\s*\}\s*[:=]?\s*(?=.)",
    re.IGNORECASE,
)
_AFTER = re.compile(r"\s*(?:\\(?:checkmark|blacksquare|qed|square|Box|hfill)(?![A-Za-z])|\\text\s*\{\s*\.\s*\})")
_QUOTES = ("**", "`", '"')


def _display(display: re.Match[str]) -> str:
    """Return the content of a display; several rows are a system, without the alignment marks."""
    inside = display["inside"]
    if r"\begin" in inside:
        return inside
    rows = [row.strip().rstrip(",;") for row in inside.replace("&", "").split(r"\\") if row.strip()]
    return r"\begin{gathered}" + r"\\".join(rows) + r"\end{gathered}" if len(rows) > 1 else "".join(rows)


_O = r"(?:o(?![A-Za-z])|\{\s*o\s*\}|\\(?:text|mathrm)\s*\{\s*o\s*\}|\{\s*\\(?:text|mathrm)\s*\{\s*o\s*\}\s*\})"
_LAYOUT: tuple[tuple[str, re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = tuple(
    (hint, re.compile(pattern, re.DOTALL), replacement)
    for hint, pattern, replacement in (
        # a fraction of raised and lowered digits
        ("/", r"(?:\{\})?\^\{?(?P<a>\d{1,9})\}?\s*/\s*_\{?(?P<b>\d{1,9})\}?(?!\d)", r"\\frac{\g<a>}{\g<b>}"),
        # fonts, colours and sizes, in old and new notation
        ("\\", r"\{\s*\\(rm|bf|it|tt|sf)(?![A-Za-z])\s*([^{}]*)\}", r"{\\math\g<1>{\g<2>}}"),
        ("\\", r"\\(rm|bf|it|tt|sf) *(?=\{)", r"\\math\g<1>"),
        ("\\", r"\\(?:textcolor|colorbox)\s*\{[^{}]*\}|\\color\s*\{[^{}]*\}", ""),
        ("\\math", r"\\(math(?:bf|rm|it|sf)) +([A-Za-z])(?![A-Za-z])", r"\\\g<1>{\g<2>}"),
        # two digits with a phantom between them are two numbers
        ("phantom", r"(?<=\d)\s*\\h?phantom\s*(?:\{[^{}]*\}|[-+\d])\s*(?=\d)", r"\\quad "),
        (
            "\\",
            r"\\(?:bf|rm|it|tt|sf|tiny|small|normalsize|large|Large|LARGE|huge|Huge|bfseries|limits|nolimits|mathstrut|"
            r"strut|nonumber|notag)(?![A-Za-z])\s*|\\[hv]?phantom\s*(?:\{[^{}]*\}|[-+\d])|"
            r"\\(?:tag\s*\*?|label)\s*\{[^{}]*\}",
            "",
        ),
        ("\\$", r"(?<![A-Za-z])U\.?S\.? ?(?=\\\$)", ""),
        # the brace before a system, and displays around everything
        ("\\left", r"\\left\s*\\\{\s*(\\begin\s*\{([a-z*]+)\}[^\n]*\\end\s*\{\2\})\s*\\right\s*\.", r"\g<1>"),
        (
            "\\begin",
            r"\A\s*\\begin\s*\{(equation|align|aligned|gather|gathered|multline|split|eqnarray|displaymath|math)(\*?)\}"
            r"(?P<inside>.*)\\end\s*\{\1\2\}\s*\Z",
            _display,
        ),
        # plain text: 7 x 10^4, log2(9), and a raised o for degrees
        ("10", r"(?<=\d) ?[xX] ?(?=10\s*\^)", r"\\times "),
        ("log", r"(?<![A-Za-z\\])log(2|10)\(", r"\\log_{\g<1>}("),
        ("", rf"(?<=\d)\s*(?:\^\s*{_O}|\\deg(?![A-Za-z]))", r"^\\circ "),
    )
)
"""Rows of a hint, whose search is quick; the pattern; and its replacement."""


def without_layout(text: str) -> str:
    r"""Remove fonts, sizes and colours, and turn plain-text notation into LaTeX."""
    if len(text) > _MOST_CHARS:
        return text
    text = text.replace(r"\&", " and ")
    for hint, pattern, replacement in _LAYOUT:
        if hint in text:
            text = pattern.sub(replacement, text)
    return text if len(text) > _MOST_OF_SET else _outward(_LETTER_UNION.sub(r"\g<left>\\cup ", text))


def _outward(text: str) -> str:
    """Turn ``]1,2]`` and ``[1,2[``, whose outward brackets exclude the bound, into ``(1,2]`` and ``[1,2)``."""
    whole = _OUTWARD.fullmatch(text.strip())
    if whole is None or "," not in text.replace(";", ","):
        return text
    parts = re.split(r"\s*\\cup\s*", whole["body"])
    if not any(part[0] == "]" or part[-1] == "[" for part in parts):
        return text
    turned = [("(" if part[0] == "]" else "[") + part[1:-1] + (")" if part[-1] == "[" else "]") for part in parts]
    return (whole["head"] or "") + r"\cup ".join(turned)


def _without_layer(text: str) -> str:
    r"""Remove one layer around a text: ``\mathbf{\frac{1}{2}}``, ``**7**``, ``\therefore 7``."""
    for quote in _QUOTES:
        inside = text[len(quote) : -len(quote)]
        if inside and text.startswith(quote) and text.endswith(quote) and quote[0] not in inside:
            return inside.strip()
    for pattern in (_BEFORE, _ANNOUNCED):
        start = pattern.match(text)
        if start is not None and start.end() < len(text):
            return text[start.end() :]
    ends = [match for match in _AFTER.finditer(text) if match.end() == len(text) and match.start()]
    if ends:
        return text[: ends[0].start()]
    around = _ENCLOSING.fullmatch(text)
    if around is not None and (inside := strip_outer_braces(around["rest"])) != around["rest"]:
        return inside
    return text


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
    "newline": r"\\", "sized": "", "frac": r"\frac", "binom": r"\binom", "style": "", "nothing": "", "space": " ",
    "comma": ",", "le": r"\le", "ge": r"\ge", "ne": r"\ne ", "empty": r"\emptyset",
}  # fmt: skip
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
_FONT = re.compile(rf"\\(?:{FONTS}) ?\{{(?P<inside>[^{{}}]*)\}}")
_IDLE_SPACE = re.compile(r"(?<!\d) +| +(?!\d)")
_QUOTIENT = re.compile(r"\\mathbb\{Z\}/\(?(?P<a>\w+)(?:\\mathbb\{Z\}\)?|(?![\w\\]))")
_BOLD_LETTER = re.compile(r"\\mathbf ?\{? ?[A-Z] ?\}?")
_BOARD = re.compile(
    r"\\(?:mathbf|Bbb|mathds) ?\{ ?(?P<a>[RZNQC]) ?\}|\\(?:mathbb|mathbf) (?P<b>[RZNQC])(?![A-Za-z])"
    r"|\\(?P<c>[RZNQC])(?![A-Za-z])"
)
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))


def canonical_notation(text: str) -> str:
    r"""Return the spelling in which answers are compared.

    Math delimiters, sizing, spacing commands, redundant outer braces, a final full stop and a ``\text{}`` around
    the whole are removed; spaces stay only where they can matter: in ``1 000``, which is not ``1000``, and in
    ``32, 349``, which is a list.

    Example:
        >>> canonical_notation(r"$\left( -\infty ,\, 5 \right]$.")
        '(-\\infty,5]'
    """
    text = _ENTITY.sub(lambda match: unescape(match[0]), text)  # x &le; 5
    # circled numbers side by side name several statements, as a list does
    text = plain_characters(_CIRCLED_PAIR.sub(",", text))
    if "begin" not in text:
        text = _DOUBLED.sub("", text)  # an escaped backslash; line breaks occur only in tables
    text = _TOKENS.sub(_token, without_layout(text))
    text = _SPACES.sub(" ", text).strip()
    if "\\" in text and not _BOLD_LETTER.fullmatch(text):
        text = _BOARD.sub(lambda m: rf"\mathbb{{{m['a'] or m['b'] or m['c']}}}", text)
        text = _QUOTIENT.sub(r"\\mathbb{Z}_\g<a>", text)
    if "mod" in text:
        text = (
            congruence(text)
            if r"\equiv" in text
            else _MODULO.sub(lambda m: m[0] if m[0].startswith(r"\bmod") else congruence(m[0]), text)
        )
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
    r"""Write every modulus as that of a congruence, also ``\bmod 7``, which between two numbers is a remainder."""
    return _MODULO.sub(lambda m: rf"\pmod{{{m['a'] or m['b'] or m['c']}}}", text)


def letters_of(text: str) -> str:
    r"""Remove fonts, and spaces that do not separate numbers: ``\text{H}_2\text{O}`` is ``H_2O``."""
    if "\\" in text:
        for _ in range(3):
            bare = _FONT.sub(r"\g<inside>", text)
            if bare == text:
                break
            text = bare
    return _IDLE_SPACE.sub("", _SINGLE.sub(r"\1\2", text))


def close_braces(text: str) -> str:
    """Close the braces that a text leaves open, as truncated reference answers do."""
    depth = 0
    for token in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        # more closing than opening: the text is not truncated
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
    return strip_outer_braces(_without_layer(text))


def strip_outer_braces(text: str) -> str:
    """Turn ``{{42}}`` into ``42``; ``{1}{2}`` stays. One pass for any depth."""
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
    # a brace whose partner is as far from the end is a layer around everything inside
    while partner.get(depth) == len(text) - 1 - depth and len(text) > 2 * depth + 1:
        depth += 1
    return text[depth : len(text) - depth].strip()
