r"""The comparison by structure: both sides are read whole and compared part by part, without Math-Verify.

Math-Verify is asked where this cannot tell, and only about texts of which it drops nothing (`engine_may_judge`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from magicrl.verifiers.maths.answers import Answer, Family, Group, Quantity, Several
from magicrl.verifiers.maths.comparison import same
from magicrl.verifiers.maths.families import arguments_of, names_of, periodic_parameters, same_constants, same_family
from magicrl.verifiers.maths.lexer import ELLIPSES, Token, tokens_of
from magicrl.verifiers.maths.notation import congruence
from magicrl.verifiers.maths.reading import read

_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_SPACED = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d,])")
_POINTS = re.compile(r"(?<![\d.,])\d{1,3}(?:\.\d{3}){2,}(?![\d.])")
_EXPONENT = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)(?:[eE]|\\mathrm\{[eE]\})([+-]?\d{1,4})(?![\d.]|\w*_)")
_EXPONENT_BEFORE_LETTER = re.compile(r"\d[eE][+-]?\d{1,4}[A-Za-z]")
_LEADING_NOUGHT = re.compile(r"(?<!\d),0\d|\d,0\d")
_CHOSEN = re.compile(r"(?<![\w\\])(?P<n>\d{1,4}|n)C(?P<k>\d{1,4}|[rk])(?!\w)")
_PREFIXED = re.compile(
    r"0(?:(?P<two>[bB])(?P<b>[01]{1,200})|(?P<eight>[oO])(?P<o>[0-7]{1,200})|[xX](?P<x>[\dA-Fa-f]{1,200}))"
)
_REPEATING = re.compile(
    r"(?<![\d.])(?P<whole>\d{0,20})\.(?P<fixed>\d{0,20})"
    r"(?:\\(?:overline|bar) ?\{(?P<over>\d{1,30})\}"
    r"|\((?P<again>\d{1,30})\)(?=$|[ ,;)\]}\\%])"
    r"|\\dot ?\{?(?P<first>\d)\}?(?:(?P<middle>\d{0,30})\\dot ?\{?(?P<last>\d)\}?)?)(?!\d)"
)
_GOING_ON = re.compile(
    r"(?<![\d.])(?P<head>\d{0,20}\.\d{0,6}?)(?:(?P<again>\d{1,3})(?P=again){2,9}|(?P<twice>\d{2,6})(?P=twice))"
    r"(?:\\[lc]?dots|\.\.\.)(?!\w)"
)
_MINUTES = re.compile(
    r"(?<![\d.])(?P<degrees>\d{1,4})\^\\circ ?(?P<minutes>\d{1,2})(?:\^\\prime|')"
    r"(?: ?(?P<seconds>\d{1,2})(?:\^\{\\prime ?\\prime\}|''|\"))?(?!\d)"
)
_DECIMAL_COMMA = re.compile(r"-?\d+,\d+")
_DECIMAL_POINT = re.compile(r"-?\d+\.\d+")
_MOST_WORDS = 3
"""In a sentence Math-Verify reads one formula of several."""
_BOUNDED = frozenset(("sum", "prod", "int", "lim"))
_SHAPE = frozenset(("open", "close", "sep", "rel", "cup", "colon"))


def same_structure(gold: str, answer: str) -> bool | None:
    """Whether two answers in canonical notation say the same; None when one was not read or nothing was decided."""
    if gold == answer:
        return None
    verdict: bool | None = None
    undecided = False
    for left in readings(gold, trusted=True):
        for right in readings(answer, trusted=False):
            verdict = compare(left, right)
            if verdict is True:
                return True
            undecided = undecided or verdict is None
    if verdict is None or undecided:
        return True if _decimal_comma(gold, answer) else None
    return _decimal_comma(gold, answer)


def readings(text: str, *, trusted: bool) -> Iterator[Answer]:
    """The shapes that a text can have: commas between groups of three digits may be no list."""
    if text[:1] == "0" and (prefixed := _PREFIXED.fullmatch(text)) is not None:
        base = 2 if prefixed["two"] else 8 if prefixed["eight"] else 16
        text = f"{prefixed['b'] or prefixed['o'] or prefixed['x']}_{{{base}}}"
    if "C" in text:
        text = _CHOSEN.sub(r"\\binom{\g<n>}{\g<k>}", text)  # 10C3
    text = _SPACED.sub(lambda match: match[0].replace(" ", ""), text)
    text = _POINTS.sub(lambda match: match[0].replace(".", ""), text)
    text = _REPEATING.sub(_repeating, _GOING_ON.sub(_going_on, text))
    text = _MINUTES.sub(_in_degrees, text)
    plain = text if trusted or _EXPONENT_BEFORE_LETTER.search(text) else ""
    text = _EXPONENT.sub(r"\1\\times 10^{\2}", text)
    joined = _GROUPED.sub(lambda match: match[0].replace(",", ""), text) if text[:1] not in "([" else text
    # 6e-10 may be a gold's 6e - 10, its spaces lost
    spellings = (joined, text, plain) if plain else (joined, text)
    if joined != text and _LEADING_NOUGHT.search(text):
        spellings = (joined,)  # 10,000 is no list: no item is written 000
    for spelling in dict.fromkeys(spellings):
        # 17 \bmod 5 is 2, and the class of 2 where a congruence is asked for
        for one in (spelling, congruence(spelling)) if r"\bmod" in spelling else (spelling,):
            found = read(one, trusted)
            if found is not None:
                yield found


def _going_on(match: re.Match[str]) -> str:
    """``0.2727...`` with a line over what repeats."""
    return rf"{match['head']}\overline{{{match['again'] or match['twice']}}}"


def _repeating(match: re.Match[str]) -> str:
    """A repeating decimal as the fraction that it is."""
    whole, fixed = match["whole"] or "0", match["fixed"]
    again = match["over"] or match["again"] or (match["first"] + (match["middle"] or "") + (match["last"] or ""))
    bottom = (10 ** len(again) - 1) * 10 ** len(fixed)
    top = int(whole + fixed + again) - int(whole + fixed)
    return rf"\frac{{{top}}}{{{bottom}}}"


def _in_degrees(match: re.Match[str]) -> str:
    """Degrees, minutes and seconds of arc as degrees."""
    seconds = int(match["degrees"]) * 3600 + int(match["minutes"]) * 60 + int(match["seconds"] or 0)
    return rf"\frac{{{seconds}}}{{3600}}^\circ"


def has_shape(gold: str) -> bool:
    """Whether a gold can be read at all."""
    return next(readings(gold, trusted=True), None) is not None


def compare(gold: Answer, answer: Answer) -> bool | None:
    """Compare two shapes, with their parameters renamed where they have some."""
    verdict = same(gold, answer)
    if verdict is True:
        return True
    if periodic_parameters(gold) and periodic_parameters(answer) and same_family(gold, answer, same) is True:
        return True
    if names_of(gold) == names_of(answer):
        return verdict
    gold, answer = _without_constants(gold), _without_constants(answer)
    return True if same_constants(gold, answer, same) else verdict


def _without_constants(answer: Answer) -> Answer:
    """A function whose letters are declared to be any numbers: ``f(x) = cx for some constant c``."""
    if not isinstance(answer, Family) or answer.domain not in ("", "R", "C"):
        return answer
    return answer.answer if arguments_of(answer.answer) else answer


def same_list(gold: str, boxes: str, count: int) -> bool:
    """Whether several boxes together are a gold that is a list of as many answers."""
    for left in readings(gold, trusted=True):
        items = left.items if isinstance(left, Several) or (isinstance(left, Group) and left.opening == "{") else ()
        if len(items) == count and any(same(left, right) is True for right in readings(boxes, trusted=False)):
            return True
    return False


def _decimal_comma(gold: str, answer: str) -> bool:
    """An answer ``2,74`` to a gold 2.74: in the answer only, where the gold shows that no list is asked for."""
    if not (_DECIMAL_POINT.fullmatch(gold) and _DECIMAL_COMMA.fullmatch(answer)):
        return False
    return not _GROUPED.fullmatch(answer.lstrip("-")) and gold == answer.replace(",", ".")


def engine_may_judge(gold: str, answer: str) -> bool:
    """Whether Math-Verify reads all that these texts say.

    It drops words, bases and ellipses, forgets how often an item stands in a list and in which order: words,
    brackets, separators and relations must be the same on both sides, and the rest must be there at all.
    """
    if _formula(gold, trusted=True) and _formula(answer, trusted=False):
        return False  # undecided here: Math-Verify would compare roundings
    left, right = tokens_of(gold), tokens_of(answer)
    if left is None or right is None:
        return False
    if any(_unreadable(tokens) for tokens in (left, right)) or len(_words(left)) > _MOST_WORDS:
        return False
    return _words(left) == _words(right) and _shape(left) == _shape(right)


def _formula(text: str, *, trusted: bool) -> bool:
    return any(isinstance(one, Quantity) for one in readings(text, trusted=trusted))


def _unreadable(tokens: list[Token]) -> bool:
    for position, token in enumerate(tokens):
        if token.kind == "cmd" and (token.text in ELLIPSES or token.text in "?…"):
            return True
        if token.kind == "op" and token.text == "_" and position and tokens[position - 1].kind in ("num", "close"):
            return True
    return False


def _words(tokens: list[Token]) -> list[str]:
    """Words and units; short plain runs of letters are products or differentials, which Math-Verify reads."""
    return sorted(
        token.text
        for token in tokens
        if token.kind == "unit" or (token.kind == "word" and (token.roman or len(token.text) > 3))
    )


def _shape(tokens: list[Token]) -> list[str]:
    """Brackets, separators and relations in order, where there are any separators or relations."""
    marks = [f"{token.kind} {token.text}" for token in _without_bounds(tokens) if token.kind in _SHAPE]
    return marks if any(not mark.startswith(("open", "close")) for mark in marks) else []


def _without_bounds(tokens: list[Token]) -> Iterator[Token]:
    r"""All but the bounds of a sum, a product, an integral or a limit: ``k=1`` there is no relation."""
    depth = skip_at = 0
    bounded = False
    for position, token in enumerate(tokens):
        bounded = bounded or (token.kind == "cmd" and token.text in _BOUNDED)
        if token.kind == "lbrace":
            depth += 1
            before = tokens[position - 1] if position else token
            if bounded and not skip_at and before.kind == "op" and before.text in "_^":
                skip_at = depth
        if not skip_at:
            yield token
        if token.kind == "rbrace":
            if skip_at == depth:
                skip_at = 0
            depth -= 1
