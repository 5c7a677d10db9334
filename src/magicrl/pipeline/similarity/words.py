"""Words that decide what a problem asks, and words that do not: English, school and competition mathematics.

A list is never whole. An unknown word counts as deciding when it is all that two texts differ in (`guard.py`), so what
is missing here costs a duplicate that stays, not a problem that is lost.
"""

from __future__ import annotations

from collections.abc import Iterable

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
