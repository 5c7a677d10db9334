r"""Tokens of an answer in canonical notation: one linear pass, no recursion.

Words inside ``\text{}`` and plain words become one kind of token, so that ``3 cm``, ``3\text{ cm}`` and
``3\,\mathrm{cm}`` are read the same way.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from magicrl_verifiers.maths.literals import amount, word_set
from magicrl_verifiers.maths.notation import FONTS

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
    _join_numbers(found)
    return found


def _join_numbers(found: list[Token]) -> None:
    """Turn the "and" inside a number, as in ``one and a half``, from a separator into a word."""
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


_SIMPLE: dict[str, tuple[Kind, str]] = {
    "degree": ("unit", "degree"), "percent": ("unit", "percent"), "row": ("cell", "row"), "dots": ("cmd", "ldots"),
    "power": ("op", "^"),
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
