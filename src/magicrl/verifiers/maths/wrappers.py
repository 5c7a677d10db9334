r"""What is put around an answer and says nothing: fonts, colours, sizes, environments, Markdown, "the answer is"."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import unescape

_MOST_CHARS = 6000
_MOST_OF_SET = 300
"""A union of intervals is shorter; a limit, since the patterns for one look at a long text many times."""
_OLD_FONT = re.compile(r"\{\s*\\(?P<font>rm|bf|it|tt|sf)(?![A-Za-z])\s*(?P<inside>[^{}]*)\}")
_OLD_COMMAND = re.compile(r"\\(?P<font>rm|bf|it|tt|sf) *(?=\{)")
_SWITCHES = re.compile(
    r"\\(?:bf|rm|it|tt|sf|tiny|small|normalsize|large|Large|LARGE|huge|Huge|bfseries|limits|nolimits|mathstrut|strut|"
    r"nonumber|notag)(?![A-Za-z])\s*|\\[hv]?phantom\s*(?:\{[^{}]*\}|[-+\d])"
)
_COLOUR = re.compile(r"\\(?:textcolor|colorbox)\s*\{[^{}]*\}|\\color\s*\{[^{}]*\}")
_SYSTEM = re.compile(r"\\left\s*\\\{\s*(?P<rows>\\begin\s*\{(?P<name>[a-z*]+)\}.*\\end\s*\{(?P=name)\})\s*\\right\s*\.")
_DISPLAY = re.compile(
    r"\s*\\begin\s*\{(?P<name>equation|align|aligned|gather|gathered|multline|split|eqnarray|displaymath|math)(?P<star>\*?)\}"
    r"(?P<inside>.*)\\end\s*\{(?P=name)(?P=star)\}\s*",
    re.DOTALL,
)
_INTERVAL = r"[\[\]][^\[\]()\\]*(?:\\[A-Za-z][^\[\]()\\]*)*[\[\]]"
_OUTWARD = re.compile(rf"(?P<head>[^\[\]()]*(?:=|\\in)\s*)?(?P<body>{_INTERVAL}(?:\s*\\cup\s*{_INTERVAL})*)")
_LETTER_UNION = re.compile(r"(?P<left>[(\[][^()\[\]]*,[^()\[\]]*[)\]])\s*U\s*(?=[(\[][^()\[\]]*,)")
_TIMES = re.compile(r"(?<=\d) ?x ?(?=10\s*\^)")
_LOG = re.compile(r"(?<![A-Za-z\\])log(?P<base>2|10)\(")
_STATES_DOLLAR = re.compile(r"(?<![A-Za-z])U\.?S\.? ?(?=\\\$)")
_RAISED_O = re.compile(
    r"(?<=\d)\s*\^\s*(?:o(?![A-Za-z])|\{\s*o\s*\}|\\(?:text|mathrm)\s*\{\s*o\s*\}|\{\s*\\(?:text|mathrm)\s*\{\s*o\s*\}\s*\})"
    r"|(?<=\d)\s*\\deg(?![A-Za-z])"
)
_SLANTED = re.compile(r"(?:\{\})?\^\{?(?P<top>\d{1,9})\}?\s*/\s*_\{?(?P<bottom>\d{1,9})\}?(?!\d)")
_ENTITY = re.compile(r"&(?:[A-Za-z]{2,8}|#\d{2,5});")

_ENCLOSING = re.compile(
    r"\\(?:text|textbf|textit|textrm|texttt|textsf|emph|underline|mathrm|mathbf|mathit|mathsf|boldsymbol|bm|mbox|hbox|ce|"
    r"operatorname)\s*(?P<rest>\{.*\})",
    re.DOTALL,
)
_BEFORE = re.compile(r"\\(?:therefore|Rightarrow|implies|Longrightarrow)(?![A-Za-z])\s*|=>\s*")
_ANNOUNCED = re.compile(
    r"\\text(?:bf|it|rm)?\s*\{\s*(?:so,? |thus,? |hence,? )?"
    r"(?:the )?(?:final )?answer(?: is)?\s*[:=]?\s*\}\s*[:=]?\s*(?=.)",
    re.IGNORECASE,
)
_AFTER = re.compile(r"\s*(?:\\(?:checkmark|blacksquare|qed)(?![A-Za-z])|\\text\s*\{\s*\.\s*\})")
_QUOTES = ("**", "`", '"')


def without_entities(text: str) -> str:
    """``text`` with the characters that HTML's names stand for.

    Example:
        >>> without_entities("x &le; 5")
        'x ≤ 5'
    """
    return _ENTITY.sub(lambda match: unescape(match[0]), text) if "&" in text else text


def without_layout(text: str) -> str:
    r"""``text`` without fonts, sizes and colours, and plain-text notation as LaTeX.

    Example:
        >>> without_layout(r"\color{red}{\bf 7}")
        '{\\mathbf{7}}'
    """
    if len(text) > _MOST_CHARS:
        return text
    text = text.replace(r"\&", " and ")
    if "/" in text:
        text = _SLANTED.sub(r"\\frac{\g<top>}{\g<bottom>}", text)
    if "\\" in text:
        text = _OLD_FONT.sub(r"{\\math\g<font>{\g<inside>}}", text)
        text = _OLD_COMMAND.sub(r"\\math\g<font>", text)
        text = _SWITCHES.sub("", _COLOUR.sub("", text))
        text = _STATES_DOLLAR.sub("", text)
        text = _SYSTEM.sub(r"\g<rows>", text)
        display = _DISPLAY.fullmatch(text)
        if display is not None:
            text = _display(display["inside"])
    text = _RAISED_O.sub(r"^\\circ ", _LOG.sub(r"\\log_{\g<base>}(", _TIMES.sub(r"\\times ", text)))
    if len(text) > _MOST_OF_SET:
        return text
    return _outward(_LETTER_UNION.sub(r"\g<left>\\cup ", text))


def _display(inside: str) -> str:
    """The content of a display; its rows are a system, without what only aligns them."""
    rows = [row.strip() for row in re.split(r"\\\\", inside.replace("&", "")) if row.strip()]
    if r"\begin" in inside or len(rows) < 2:
        return inside if r"\begin" in inside else inside.replace("&", "").replace(r"\\", "")
    return r"\begin{gathered}" + r"\\".join(row.rstrip(",;") for row in rows) + r"\end{gathered}"


def _outward(text: str) -> str:
    """``]1,2]`` and ``[1,2[``, where brackets that open outwards leave the bound out, as ``(1,2]`` and ``[1,2)``."""
    whole = _OUTWARD.fullmatch(text.strip())
    if whole is None or "," not in text.replace(";", ","):
        return text
    parts = re.split(r"\s*\\cup\s*", whole["body"])
    if not any(part[0] == "]" or part[-1] == "[" for part in parts):
        return text
    turned = [("(" if part[0] == "]" else "[") + part[1:-1] + (")" if part[-1] == "[" else "]") for part in parts]
    return (whole["head"] or "") + r"\cup ".join(turned)


def unwrapped(text: str, strip_braces: Callable[[str], str]) -> str:
    r"""``text`` without one layer around it: ``\mathbf{\frac{1}{2}}``, ``**7**``, ``\therefore 7``."""
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
    if around is not None and (inside := strip_braces(around["rest"])) != around["rest"]:
        return inside
    return text
