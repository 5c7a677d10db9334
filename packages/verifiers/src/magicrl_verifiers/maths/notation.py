r"""Text of an answer: canonical notation, which is one spelling for what LaTeX and Unicode write, and its tokens.

Glyphs become LaTeX; fonts, colours, sizes, environments, Markdown and "the answer is" are removed. Nothing that carries
a value, a unit or an order is removed. Every pass is linear in the text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from html import unescape
from typing import Literal

from magicrl_verifiers.maths.literals import amount, word_set

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
_IN_PROSE = re.compile("−|[×⋅÷±π∞≤≥≠√⌊⌋⌈⌉] ?")
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
    return _IN_PROSE.sub(lambda match: _SYMBOLS[match[0][0]], _on_the_line(text))


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
_SAID = (
    r"(?:所以|因此|因而|故|则|したがって|よって|따라서)?\s*+[，,、]?\s*+"
    r"(?:(?:最终|最后|最終)?(?:答案?|结果|結果|答え|正解|정답|답)\s*+(?:是|为|為|は|은|는|选|選)?\s*+[:：]?|"
    r"(?:一|总)?共有?|等于|合计|合計|全部で|모두|총|[应故]?[选選])\s*+"
)
_ANNOUNCED_UNSPACED = re.compile(rf"(?:{_SAID}|\\text\s*+\{{\s*+{_SAID}\}}\s*+)(?=[-\d$({{A-J]|\\(?!text))")
"""Words that announce an answer in Chinese, Japanese or Korean, right before a formula, a number or a letter."""
_AFTER = re.compile(
    r"\s*(?:\\(?:checkmark|blacksquare|qed|square|Box|hfill)(?![A-Za-z])|\\text\s*\{\s*\.\s*\}|"
    r"\\text\s*\{\s*(?:\((?:rounded|correct|accurate|to the nearest)\b[^{}()]{0,40}\)|approximately|approx\.?)\s*\}|"
    r"です|である|입니다|이다|[。．])"
)
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
    for pattern in (_BEFORE, _ANNOUNCED, _ANNOUNCED_UNSPACED):
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
_LOOSE = re.compile(
    r"((?<=\d), (?=(?:\d{1,3},)?\d{3}(?!\d)))| ?([^\w\s.\\]) ?| (?=\\)|(?<=\d) (?=[A-DF-Za-df-z](?![A-Za-z]))"
)
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
_QUOTIENT = re.compile(r"\\mathbb\{Z\} ?/ ?\(?(?P<a>\w+)(?:\\mathbb\{Z\}\)?|(?![\w\\]))")
_BOLD_LETTER = re.compile(r"\\mathbf ?\{? ?[A-Z] ?\}?")
_BOARD = re.compile(
    r"\\(?:mathbf|Bbb|mathds) ?\{ ?(?P<a>[RZNQC]) ?\}|\\(?:mathbb|mathbf) (?P<b>[RZNQC])(?![A-Za-z])"
    r"|\\(?P<c>[RZNQC])(?![A-Za-z])"
)
_PRICE = re.compile(r"\A(\s*-?\s*)\$(?=\s?[\d.])")
"""Dollar sign of ``$10``, which with no other one is a currency."""
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
    if text.count("$") == 1:
        text = _PRICE.sub(r"\1\\$", text)
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
    return _IDLE_SPACE.sub("", _SINGLE.sub(r"\1\2", text)).replace(r"^\top", "^T")


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


# --- tokens ---
#
# Words inside ``\text{}`` and plain words become one kind of token, so that ``3 cm``, ``3\text{ cm}`` and
# ``3\,\mathrm{cm}`` are read the same way. One linear pass, no recursion.

Kind = Literal[
    "num", "sym", "word", "fn", "op", "open", "close", "lbrace", "rbrace", "rel", "sep", "cup", "colon", "unit", "env",
    "cell", "bar", "cmd",
]  # fmt: skip

MAX_TOKENS = 1500
ELLIPSES = word_set("ldots cdots dots vdots ddots dotsb dotsc")

FUNCTIONS = word_set(
    "sin cos tan cot sec csc arcsin arccos arctan arccot arcsec arccsc sinh cosh tanh coth sech csch "
    "arsinh arcosh artanh ln log lg exp sqrt cis abs floor ceil"
)
_ALIASES = {
    "tg": "tan", "ctg": "cot", "cotg": "cot", "cosec": "csc", "sh": "sinh", "ch": "cosh", "th": "tanh",
    "arctg": "arctan", "arcctg": "arccot", "arccosec": "arccsc", "asin": "arcsin", "acos": "arccos", "atan": "arctan",
    "arcsinh": "arsinh", "arccosh": "arcosh", "arctanh": "artanh", "asinh": "arsinh", "acosh": "arcosh",
    "atanh": "artanh",
}  # fmt: skip
"""Other names of functions; the short hyperbolic ones only as commands (``th`` ends an ordinal)."""
_WRITTEN_ALIASES = frozenset(_ALIASES) - {"sh", "ch", "th"}
_COMMANDS_IN_WORDS = frozenset(("gcd", "lcm", "cbrt"))
_GREEK = word_set(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho varrho sigma tau "
    "upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega hbar ell pi infty imath jmath "
    "odot oplus prime star aleph"
)
_SPELLED = {"infty": "inf", "imath": "i", "jmath": "j"}
_GREEK_WORDS = word_set("alpha beta gamma delta epsilon theta lambda sigma omega phi psi rho tau")
_TABLES: tuple[tuple[Kind, str], ...] = (
    ("rel", "= = < < > > <= <= =< <= >= >= != != lt < gt > le <= ge >= ne != neq != in in equiv =="),
    ("rel", "approx ~ simeq ~"),
    ("op", "cdot * times * ast * bullet * div / pm pm mp mp + + - - * * / / ^ ^ _ _ ! ! ' '"),
    ("cup", "cup cup cap cap setminus setminus bigcup cup backslash setminus"),
    ("open", r"( ( [ [ \{ { lbrace { lbrack [ lfloor floor lceil ceil langle < lvert |"),
    ("close", r") ( ] [ \} { rbrace { rbrack [ rfloor floor rceil ceil rangle < rvert |"),
    ("sep", ", , ; ; lor or vee or land and wedge and"),
    ("bar", r"| | \| \| mid | vert |"),
    ("lbrace", "{ {"), ("rbrace", "} }"), ("cell", "& column"), ("colon", ": : colon :"),
    ("word", "forall for AA angstrom"),
    ("fn", " ".join(f"{name} {name}" for name in FUNCTIONS - {"sqrt"})),
    ("fn", " ".join(f"{name} {alias}" for name, alias in _ALIASES.items())),
    ("sym", " ".join(f"{name} {_SPELLED.get(name, name)}" for name in _GREEK)),
)  # fmt: skip
_GRAMMAR: dict[str, tuple[Kind, str]] = {
    name: (kind, text)
    for kind, table in _TABLES
    for name, text in zip(table.split()[::2], table.split()[1::2], strict=True)
}
"""Kind of token and canonical spelling of each command (without backslash), bracket and mark."""
_MONEY = {
    "euro": "€", "EUR": "€", "cent": "¢", "cents": "¢", "pounds": "£", "GBP": "£", "yen": "¥", "JPY": "¥", "RMB": "¥",
    "CNY": "¥", "USD": "$", "INR": "₹", "Rs": "₹",
}  # fmt: skip
UNSPACED = r"[\u3041-\u30ff\u4e00-\u9fff\uac00-\ud7a3]"
"""A character of Chinese, Japanese or Korean, where a counted noun follows its number without a space: ``7个``."""
_EITHER, _BOTH = "或者?|または|또는", "以及|[和与與、]"
_PATTERN = re.compile(
    rf"(?P<space>[ \t\n]+|\$|\\(?:\(|\)|hspace\{{[^{{}}]*\}}))"
    r"|(?P<money>\\(?:euro|cents?|pounds|yen)(?![A-Za-z])|(?<![A-Za-z])(?:USD|EUR|GBP|INR|RMB|CNY|JPY|Rs)(?![A-Za-z])\.?)"
    r"|(?P<short>(?<![A-Za-z])(?:sq|cu|ft|in|hrs?|lbs?|oz|mins?|secs?|yds?|gal|approx)\.(?![\d.]))"
    r"|(?P<degree>\^ ?(?:\\circ(?![A-Za-z])|\{ ?\\circ ?\})|\\(?:degrees?|textdegree)(?![A-Za-z]))"
    rf"|\\(?P<texttype>{FONTS})\*? ?\{{(?P<text>[^{{}}]*(?:\{{[^{{}}]*\}}[^{{}}]*){{0,8}})\}}"
    r"|\\begin ?\{(?P<begin>[a-z*]+)\}(?:\{[clr| ]*\})?"
    r"|\\end ?\{(?P<end>[a-z*]+)\}"
    r"|(?P<row>\\\\)"
    r"|\\(?P<command>[A-Za-z]+)"
    r"|(?P<dots>\.\.\.)"
    r"|(?P<number>\d+(?:\.\d+)?(?!\d)|\.\d+)"
    r"|(?P<letters>[A-Za-z]+)"
    rf"|(?P<either>{_EITHER})|(?P<both>{_BOTH})|(?P<unspaced>(?:(?!{_EITHER}|{_BOTH}){UNSPACED})+)"
    r"|(?P<relation><=|>=|(?<![\d)}])!=|=<|[=<>])"  # 5!=120 is a factorial
    r"|(?P<bracket>\\[{}]|[()\[\]])"
    r"|(?P<power>\*\*)"
    r"|(?P<percent>\\?%)"
    r"|(?P<currency>\\\$|[€£¥₹¢])"
    r"|(?P<any>\\.|.)",
    re.DOTALL,
)
_PARTS = re.compile(r"\s*(?:,\s*)?\b(and|or)\b\s*|\s*([,;])\s*")


@dataclass(frozen=True, slots=True)
class Token:
    """Token with its canonical spelling; ``spaced``: after white space; ``roman``: in an upright font, as units are."""

    kind: Kind
    text: str
    spaced: bool = False
    roman: bool = False


def lex(text: str) -> list[Token] | None:
    """Return the tokens of ``text``; None when it is too long."""
    # a long text is refused before it is split
    if len(text) > 4 * MAX_TOKENS:
        return None
    found: list[Token] = []
    spaced = False
    for match in _PATTERN.finditer(text):
        kind = match.lastgroup
        assert kind is not None
        if kind == "space":
            spaced = True
            continue
        _append(found, kind, match, spaced)
        spaced = False
        if len(found) > MAX_TOKENS:
            return None
    # the "and" inside a number, as in ``one and a half``, is a word and no separator
    for at, token in enumerate(found):
        if (token.kind, token.text) != ("sep", "and") or not at or found[at - 1].kind != "word":
            continue
        start = at - 1
        while start and found[start - 1].kind == "word" and at - start < 6:
            start -= 1
        after = found[at + 1 : at + 4]
        for end in range(1, len(after) + 1):
            words = [one.text.casefold() for one in (*found[start:at], token, *after[:end])]
            if all(one.kind == "word" or one.text == "a" for one in after[:end]) and amount(words) is not None:
                for place in range(at, at + end + 1):
                    found[place] = Token("word", found[place].text, True, roman=True)
                break
    return found


_SIMPLE: dict[str, tuple[Kind, str]] = {
    "degree": ("unit", "degree"), "percent": ("unit", "percent"), "row": ("cell", "row"), "dots": ("cmd", "ldots"),
    "power": ("op", "^"), "either": ("sep", "or"), "both": ("sep", "and"),
}  # fmt: skip


def _append(found: list[Token], group: str, match: re.Match[str], spaced: bool) -> None:
    value = text = match[group]
    kind: Kind = "cmd"
    roman = False
    if group == "text":
        _words(found, value, match["texttype"], spaced)
        return
    if group == "letters":
        kind, text, roman = _letters(found, value)
    elif group in _SIMPLE:
        kind, text = _SIMPLE[group]
    elif group == "short":
        kind, text, roman = "word", value[:-1], True
    elif group == "unspaced":
        kind, roman = "word", True
    elif group in ("money", "currency"):
        kind, text = "unit", _MONEY.get(value.strip("\\."), value.lstrip("\\"))
    elif group == "number":
        kind, text = "num", value
    elif group in ("begin", "end"):
        kind, text = "env", f"{group} {value}"
    elif value in _GRAMMAR:
        kind, text = _GRAMMAR[value]
        roman = kind == "word"
    found.append(Token(kind, text, spaced, roman))


def _letters(found: Sequence[Token], run: str) -> tuple[Kind, str, bool]:
    """Return kind and text of a run of letters outside all commands, and whether it is surely a word."""
    low = run.casefold()
    before = found[-1].text.casefold() if found else ""
    if len(run) == 1:
        return "sym", run, False
    if low in ("and", "or"):
        return ("word" if before in ("hundred", "thousand") else "sep"), low, False  # two hundred and five
    if run == "sec" and before == "/" and len(found) > 1 and found[-2].kind in ("sym", "word"):
        return "word", run, True  # m/sec
    if run == "sqrt" or run in _COMMANDS_IN_WORDS:
        return "cmd", run, False
    if run in FUNCTIONS or run in _WRITTEN_ALIASES:
        return "fn", _ALIASES.get(run, run), False
    if low == "pi" or run in _GREEK_WORDS:
        return "sym", "pi" if low == "pi" else run, False
    if _NAME.fullmatch(run):
        return "word", run, True  # Bob
    if low == "to":
        return "colon", ":", False
    return ("sym", "inf", False) if low in ("infinity", "inf", "oo") else ("word", run, False)


def _words(found: list[Token], content: str, command: str, spaced: bool) -> None:
    """Append the words of a text command; ``and``, ``or`` and commas in it are separators."""
    inner = content.strip()
    math = command in ("mathrm", "mathbf", "mathit", "mathsf", "boldsymbol", "bm", "operatorname")
    upright = inner in FUNCTIONS - {"sec", "sqrt"} if not math else inner in FUNCTIONS - {"sqrt"}
    # \mathrm{sin} is the function; \text{sec} is a second
    if upright or (math and inner in _WRITTEN_ALIASES):
        found.append(Token("fn", _ALIASES.get(inner, inner), spaced, roman=True))
        return
    if math and (inner in _COMMANDS_IN_WORDS or (len(inner) == 1 and inner.isalpha())):
        found.append(Token("sym" if len(inner) == 1 else "cmd", inner, spaced, roman=True))
        return
    # "+ const" after an antiderivative is a C
    if inner.casefold().rstrip(".") in ("const", "constant") and found and found[-1].text == "+":
        found.append(Token("sym", "C", spaced))
        return
    start = 0
    for match in _PARTS.finditer(inner):
        _phrase(found, inner[start : match.start()])
        found.append(Token("sep", match[1] or match[2], True))
        start = match.end()
    _phrase(found, inner[start:])


_NAME = re.compile(r"[A-Z][a-z]{2}")
"""First name of three letters, such as Bob; longer runs are always words."""
_PIECES = re.compile(r"\d+(?:\.\d+)?|[^\W\d_]+(?:['’.-][^\W\d_]+)*\.?|\S")


def _phrase(found: list[Token], words: str) -> None:
    """Append upright text: numbers and marks keep their kinds, everything else is a word."""
    if words.strip().casefold() == "to":
        found.append(Token("colon", ":", True))  # 5 to 3
        return
    for match in _PIECES.finditer(words.replace("\\cdot", "*").replace("\\times", "*")):
        piece = match[0]
        if piece[0].isdigit():
            found.append(Token("num", piece, True, roman=True))
        elif piece == "%":
            found.append(Token("unit", "percent", True, roman=True))
        elif piece in "+-*/^_!'()[]{}:|=<>":
            found.extend(lex(piece) or ())
        elif piece in "$€£¥₹¢":
            found.append(Token("unit", piece, True, roman=True))
        elif piece[0].isupper() and piece.rstrip(".") in _MONEY:
            found.append(Token("unit", _MONEY[piece.rstrip(".")], True, roman=True))
        elif piece != "\\":
            found.append(Token("word", piece.rstrip("."), True, roman=True))
