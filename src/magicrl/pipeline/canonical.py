"""One form for a text however it is typeset: LaTeX, Unicode or plain; case, whitespace and punctuation do not count.

Numbers, operators and words stay, so that equal canonical texts are the same problem but for its typesetting. The
lists of words say which ones decide what a problem asks and which do not (English, school and competition
mathematics). A list is never whole: an unknown word counts as deciding when it is all that two texts differ in
(`guard.py`), so what is missing here costs a duplicate that stays, not a problem that is lost.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable

from magicrl.records import typed

AXES: tuple[tuple[str, ...], ...] = (
    (
        "maximum max maximize maximal greatest largest biggest highest most longest",
        "minimum min minimize minimal least smallest lowest fewest shortest",
    ),
    ("positive", "negative", "nonnegative"),
    ("increase increased increasing", "decrease decreased decreasing"),
    ("more greater", "less fewer smaller", "total altogether combined together all"),
    ("before", "after"),
    ("hour", "minute", "second", "day", "week", "month", "year"),
    ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"),
    ("january", "february", "march", "april", "june", "july", "august", "september", "october", "november", "december"),
    ("start begin beginning initially originally first", "end left remain remaining now last"),
    ("row", "column"),
    ("inch", "foot feet", "yard", "mile", "meter", "centimeter", "kilometer"),
    ("clockwise", "counterclockwise"),
    ("domain", "range"),
    ("horizontal", "vertical"),
    ("numerator", "denominator"),
    ("pentagon", "hexagon", "heptagon", "octagon", "nonagon", "decagon", "dodecagon"),
    ("heart heartsuit", "spade spadesuit", "diamond diamondsuit", "club clubsuit"),
    ("cylindrical", "spherical", "polar"),
)
"""Groups of poles. Words of one pole say the same; texts with different poles of a group ask different things."""

STRICT_AXES: tuple[tuple[str, ...], ...] = (
    ("even", "odd"),
    ("sum", "difference", "product", "quotient", "remainder"),
    ("sin sine", "cos cosine", "tan tangent", "cot cotangent", "sec secant", "csc cosecant"),
    ("arcsin", "arccos", "arctan"),
    ("area", "perimeter circumference", "volume", "circumradius", "inradius"),
    ("mean average", "median", "mode", "range", "variance deviation"),
    ("inscribed", "circumscribed"),
    ("gcd gcf", "lcm"),
    ("divisor factor", "multiple"),
    ("rational", "irrational"),
    ("distinguishable", "indistinguishable"),
    ("atmost", "atleast", "exactly"),
    ("median", "altitude", "bisector"),
    ("prime", "composite"),
    ("distinct different",),
    ("not no neither never except without cannot",),
    ("consecutive",),
    ("restriction",),
    ("probability chance",),
    ("repeating",),
    ("tenth", "hundredth", "thousandth"),
)
"""Of these a text that does not mention the group at all is another problem too."""

_NEUTRAL = (
    "a an the of to in is are was were be been being and or that this these those it its with for as at by on from if "
    "then than so how what which who where when why there here has have had having he she they we you i his her their "
    "our your do does did will would can could may might must shall should let suppose given assume consider find "
    "determine compute calculate evaluate solve state give show tell work out figure answer express write enter "
    "provide form value number real following such also each every both any some one please your in terms simplest "
    "lowest simplified common fraction decimal exact integer nearest solution result problem question respectively "
    "satisfying satisfy satisfies denote called define defined know known we'll now just only upon per into onto about "
    "happens follows below shown many much possible measure measured thereby hence therefore thus order overall ( ) [ "
    "] | : * / = ' - ~ # @ _"
)
_SAME = (
    "buy buys bought purchase purchases purchased",
    "get gets got receive receives received obtain obtains obtained",
    "make makes made earn earns earned",
    "sell sells sold",
    "give gives gave hand hands handed",
    "own owns possess possesses",
    "spend spends spent pay pays paid",
    "cost costs price priced",
    "kid kids child children",
    "begin begins began start starts started",
    "finish finishes finished complete completes completed end ends ended",
    "need needs needed require requires required want wants wanted wish wishes",
    "eat eats ate consume consumes consumed",
    "use uses used utilize utilizes",
    "pick picks picked choose chooses chose chosen select selects selected draw draws drawn drew",
    "big large huge",
    "small little tiny",
    "walk walks walked stroll strolls strolled",
    "trip trips journey journeys travel travels",
    "house houses home homes",
    "shop shops store stores",
    "picture pictures photo photos",
    "answer answers reply",
    "quick fast",
    "whole entire",
    "mom mother",
    "dad father",
    "say says said",
    "go goes went",
    "see sees saw",
    "way ways method methods",
    "collect collects collected gather gathers gathered",
    "put puts place places placed arrange arranges arranged",
    "contain contains hold holds include includes",
    "half halves",
    "twice double doubled",
    "money dollar dollars cash",
    "total altogether combined together sum",
    "rest remaining left remain remains",
    "point points",
    "rectangle rectangular",
    "triangle triangular",
    "circle circular",
    "square squared",
    "equal equals equivalent",
    "interior inside within",
    "exterior outside",
    "random randomly",
    "root roots zero zeros",
    "reals real",
)


def listed(words: str) -> frozenset[str]:
    """The words of a list written as one text."""
    return frozenset(words.split())


def _poles(axes: Iterable[tuple[str, ...]]) -> dict[str, list[tuple[int, int]]]:
    found: dict[str, list[tuple[int, int]]] = {}
    for axis, poles in enumerate(axes):
        for pole, words in enumerate(poles):
            for word in words.split():
                found.setdefault(word, []).append((axis, pole))
    return found


POLES = _poles(AXES + STRICT_AXES)
"""Axis and pole of each deciding word; strict axes come after the others."""

NEUTRAL = listed(_NEUTRAL)
_ONE_FOR_ALL = {word: words.split()[0] for words in _SAME for word in words.split()}


def stem(word: str) -> str:
    """One form for a word's inflections and for what is known to mean the same.

    Example:
        >>> stem("purchased"), stem("apples")
        ('buy', 'apple')
    """
    if word in _ONE_FOR_ALL:
        return _ONE_FOR_ALL[word]
    for ending in ("ing", "ies", "ed", "es", "s"):
        if word.endswith(ending) and len(word) - len(ending) > 3:
            return word.removesuffix("s" if word.endswith("les") else ending)
    return word.removesuffix("s") if len(word) > 3 else word


_RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n", strict=True))
_LOWERED = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
_SYMBOLS = {
    "×": "*", "·": "*", "⋅": "*", "∗": "*", "÷": "/", "⁄": "/", "−": "-", "–": "-", "—": " ", "‐": "-", "‑": "-",
    "≤": " <= ", "⩽": " <= ", "≥": " >= ", "⩾": " >= ", "≠": " != ", "≈": " approx ", "≡": " equiv ", "±": " pm ",
    "→": " to ", "∞": " infinity ", "°": " degrees ", "√": " sqrt ", "∠": " angle ", "△": " triangle ",
    "∆": " triangle ", "∈": " in ", "∉": " notin ", "∩": " cap ", "∪": " cup ", "⊂": " subset ", "⊆": " subset ",
    "∑": " sum ", "∏": " prod ", "∫": " int ", "⊥": " perp ", "∥": " parallel ", "⌊": " floor ", "⌋": " ",
    "⌈": " ceil ", "⌉": " ", "…": " ", "⋯": " ", "“": '"', "”": '"', "‘": "'", "’": "'", "\u00a0": " ",
}  # fmt: skip
_NAMED = {
    "times": "*", "cdot": "*", "ast": "*", "div": "/", "le": " <= ", "leq": " <= ", "leqslant": " <= ", "lt": "<",
    "ge": " >= ", "geq": " >= ", "geqslant": " >= ", "gt": ">", "ne": " != ", "neq": " != ", "infty": " infinity ",
    "circ": " degrees ", "degree": " degrees ", "rightarrow": " to ", "lfloor": " floor ", "rfloor": " ",
    "lceil": " ceil ", "rceil": " ", "ldots": " ", "dots": " ", "cdots": " ", "vdots": " ", "lvert": "|", "rvert": "|",
    "vert": "|", "mid": "|", "colon": ":", "lbrace": " ", "rbrace": " ", "pmod": " mod ", "bmod": " mod ",
    "varepsilon": " epsilon ", "varphi": " phi ", "subseteq": " subset ", "dollar": " ",
}  # fmt: skip
# what only says how something looks
_LOOKS = listed(
    "left right big Big bigg Bigg bigl bigr Bigl Bigr displaystyle textstyle limits nolimits quad qquad text textrm "
    "textbf textit textsf textnormal mathrm mathbf mathit mathsf mathcal mathbb mathfrak boldsymbol operatorname "
    "mbox hbox emph underline overline overrightarrow vec hat bar noindent newline hspace vspace hfill par item "
    "itemize enumerate centering ensuremath mathop rm bf it label"
)
_COMMAND = re.compile(r"\\([A-Za-z]+)\*?|\\(.)", re.DOTALL)
_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{([^{}]*)\}|([0-9A-Za-z]))\s*(?:\{([^{}]*)\}|([0-9A-Za-z]))")
_ROOT = re.compile(r"\\sqrt\s*(?:\{([^{}]*)\}|([0-9A-Za-z]))")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{[A-Za-z*]+\}")
_GROUP = re.compile(r"\{([^{}\\]*)\}")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:,|\{,\}|\\,)\d{3})+(?![\d])")
_RAISED_RUN = re.compile(f"[{''.join(_RAISED)}]+")
_LOWERED_RUN = re.compile(f"[{''.join(_LOWERED)}]+")
_ATOM = re.compile(r"\(\s*([A-Za-z]?[0-9.]*[0-9]|[A-Za-z])\s*\)")
_SPECIAL = re.compile(r"[\\$^{}\x80-\U0010ffff]")
_FOREIGN = re.compile(r"[^\x00-\x7f]")
_TOKEN = re.compile(r"\d+(?:\.\d+)?|\.\d+|[^\W\d_]+|<=|>=|!=|(?<=[\d)])!|[-+*/^=<>|%@#~()\[\]_]")
_REPEATING = re.compile(r"\\(?:overline|bar|dot)\s*(?=\{?\s*\d)")
_SINGLE = re.compile(r"(?:sqrt )?\w+")
_DEGREES = re.compile(r"\^\s*\{?\s*(?:\\circ|\\degree|°)\s*\}?")


def tokens_of(text: str) -> list[str]:
    """The words, numbers and operators of ``text`` in one form.

    Example:
        >>> tokens_of(r"Find $\\frac{1}{2}x^{2} \\le 10{,}000$.")
        ['find', '1', '/', '2', 'x', '^', '2', '<=', '10000']
        >>> tokens_of("Find 1/2 x² ≤ 10,000")
        ['find', '1', '/', '2', 'x', '^', '2', '<=', '10000']
    """
    text = typed(text)
    if "," in text or "{,}" in text:
        text = _THOUSANDS.sub(lambda m: re.sub(r"\D", "", m[0]), text)
    if _SPECIAL.search(text):
        text = _plain(text)
    if "(" in text:
        text = _ATOM.sub(r" \1 ", text)
    return [_number(token) if token[-1].isdigit() else token for token in _TOKEN.findall(text.lower())]


def canonical(text: str) -> str:
    """``tokens_of`` with single spaces between."""
    return " ".join(tokens_of(text))


def _plain(text: str) -> str:
    """LaTeX and Unicode notation as plain text."""
    if _FOREIGN.search(text):
        text = _RAISED_RUN.sub(lambda m: "^" + "".join(_RAISED[c] for c in m[0]), text)
        text = _LOWERED_RUN.sub(lambda m: "_" + "".join(_LOWERED[c] for c in m[0]), text)
        text = _FOREIGN.sub(_symbol, text)
    text = _DEGREES.sub(" degrees ", text)
    if "\\" in text:
        text = _REPEATING.sub(" repeating ", _ENVIRONMENT.sub(" ", text))
        text = _until_settled(_innermost, text)
        text = _COMMAND.sub(_command, text)
    # a group of one atom needs no brackets, one of several does: x^{2} and x^2, but x^{2n} is x^(2n)
    text = _until_settled(lambda t: _GROUP.sub(_bracketed, t), text)
    return text.replace("$", " ").replace("{", " ").replace("}", " ")


def _innermost(text: str) -> str:
    text = _ROOT.sub(lambda m: f" sqrt {_grouped(m[1] or m[2] or '')} ", text)
    return _FRACTION.sub(lambda m: f" {_grouped(m[1] or m[2] or '')}/{_grouped(m[3] or m[4] or '')} ", text)


def _until_settled(change: Callable[[str], str], text: str) -> str:
    for _ in range(8):  # deeper nesting keeps its outermost levels as they are
        changed = change(text)
        if changed == text:
            break
        text = changed
    return text


def _grouped(inside: str) -> str:
    inside = inside.strip()
    return inside if len(inside) <= 1 or _SINGLE.fullmatch(inside) else f"({inside})"


def _bracketed(match: re.Match[str]) -> str:
    """Contents of braces: with brackets after ^ and _ only, elsewhere braces mark what is set in another face."""
    before = match.string[max(0, match.start() - 1) : match.start()]
    return _grouped(match[1]) if before in ("^", "_") else f" {match[1]} "


def _command(match: re.Match[str]) -> str:
    name = match[1]
    if name is None:
        return match[2] if match[2] in "%#" else " "
    if name in _LOOKS:
        return " "
    return _NAMED.get(name, f" {name} ")


def _symbol(match: re.Match[str]) -> str:
    char = match[0]
    if char in _SYMBOLS:
        return _SYMBOLS[char]
    name = unicodedata.name(char, "")
    if name.startswith("GREEK "):  # of "GREEK SMALL LETTER FINAL SIGMA" the last word
        return f" {name.split(' WITH ')[0].rsplit(' ', 1)[-1].lower().replace('lamda', 'lambda')} "
    decomposed = unicodedata.normalize("NFKD", char)
    return "".join(_SYMBOLS.get(c, c) for c in decomposed if not unicodedata.combining(c))


def _number(token: str) -> str:
    """``007.50`` as ``7.5``."""
    if not token[0].isdigit() and token[0] != ".":
        return token
    whole, _, part = token.partition(".")
    part = part.rstrip("0")
    return (whole.lstrip("0") or "0") + (f".{part}" if part else "")
