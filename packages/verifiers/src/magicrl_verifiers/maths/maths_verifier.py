"""The maths verifier: answer part, extraction, comparison, Math-Verify.

    answer part after the reasoning -> last box -> string, rational, word, choice, structure -> Math-Verify

Departures from the released code: Math-Verify gets only the last box (it would join several boxes), cheaper and
stricter steps compare first, and a response whose reasoning never ended has no answer. Math-Verify's time-outs are
off: they use ``signal.alarm`` and depend on the load of the machine.
"""

from __future__ import annotations

import logging
import re
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise, product
from types import FrameType
from typing import Any

import math_verify
import sympy
from latex2sympy2_extended import NormalizationConfig
from sympy.core.random import seed as seed_sympy

from magicrl_verifiers.extraction import answer_part, joint_boxes, last_box, marked_answer
from magicrl_verifiers.isolated import Progress
from magicrl_verifiers.maths.answers import Brackets, Family, Named, Quantity, RealSet, Several, Shape, any_of
from magicrl_verifiers.maths.comparison import same
from magicrl_verifiers.maths.literals import (
    approximates_fraction,
    choice,
    choice_letter,
    choice_letters,
    plain_number,
    polar,
)
from magicrl_verifiers.maths.notation import (
    ELLIPSES,
    Token,
    canonical_notation,
    close_braces,
    congruence,
    letters_of,
    lex,
)
from magicrl_verifiers.maths.prose import final_answer
from magicrl_verifiers.maths.quantities import singular
from magicrl_verifiers.maths.reading import read
from magicrl_verifiers.maths.relations import restates
from magicrl_verifiers.maths.sequences import (
    arguments_of,
    periodic_parameters,
    same_antiderivative,
    same_constants,
    same_family,
)
from magicrl_verifiers.records import JudgeOptions, Verdict, make_verdict


class CpuAlarm(BaseException):
    """Exhausted CPU time. No `Exception`, so that no library catches it as an ordinary error."""


@contextmanager
def cpu_limit(seconds: float) -> Generator[None]:
    """Raise `CpuAlarm` in the block once it used so many seconds of CPU time."""
    # only the main thread may set signal handlers; in others the limit of the worker process applies
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise CpuAlarm

    before = signal.signal(signal.SIGPROF, ring)
    # repeated, because a bare ``except:`` in a library may catch the first one
    signal.setitimer(signal.ITIMER_PROF, seconds, 0.2)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


logging.getLogger("math_verify").setLevel(logging.CRITICAL)
logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)

_UNFINISHED = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit)
"""Slow to evaluate, but not hopeless."""

_WHOLE = (
    math_verify.LatexExtractionConfig(
        # units off: Math-Verify would read any last letter as a unit
        normalization_config=NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="last"
        )
    ),
)
_DIGITS = 50
_EXACT_TOLERANCE = 1e-30
_FLOAT_TOLERANCE = 1e-5


def parse_formula(latex: str) -> list[Any]:
    """Return the expressions that Math-Verify reads in ``latex``, taken as one answer.

    The box around it keeps Math-Verify from choosing or changing a part.
    """
    found = math_verify.parse(f"\\boxed{{{latex}}}", extraction_config=_WHOLE, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    return [item for item in found if not isinstance(item, str)]


def evaluates(parsed: list[Any]) -> bool:
    """Return whether the numbers of a reference answer can be computed; 10^{10^{10^{10}}} cannot.

    It runs in the phase in which an exhausted worker counts against the reference answer.
    """
    numbers = [item for item in parsed if isinstance(item, sympy.Expr) and not item.has(*_UNFINISHED)]
    return all(number.evalf(15) is not sympy.nan for number in numbers if number.is_number)


def equivalent(reference: list[Any], answer: list[Any]) -> bool:
    """Return whether Math-Verify accepts any pair, and exact numbers agree to more than its six decimals."""
    return any(
        math_verify.verify(left, right, timeout_seconds=None) and _numbers_agree(left, right)
        for left in reference
        for right in answer
    )


def _numbers_agree(reference: Any, answer: Any) -> bool:
    """Correct Math-Verify's absolute rounding, with which 1/2004! and 1/2006! are both 0.000000.

    Two exact numbers must agree to 30 digits; a decimal approximation to a relative 1e-5.
    """
    sides = (reference, answer)
    if not all(isinstance(side, sympy.Expr) and side.is_number for side in sides):
        return True
    left, right = (side.evalf(_DIGITS) for side in sides)
    if not (left.is_Number and right.is_Number and left.is_finite and right.is_finite):
        return True
    tolerance = _FLOAT_TOLERANCE if any(side.has(sympy.Float) for side in sides) else _EXACT_TOLERANCE
    return bool(abs(left - right) <= tolerance * max(abs(left), abs(right)))


_LOST_BACKSLASH = re.compile(r"[\a\b\v\f](?=[a-z])|\t(?=ext\{|frac|imes|heta)")
"""Control character that JSON or Python made of the first two characters of a LaTeX command."""


def _restored(match: re.Match[str]) -> str:
    return "\\" + {"\a": "a", "\b": "b", "\v": "v", "\f": "f", "\t": "t"}[match[0]]


def _joined(match: re.Match[str]) -> str:
    return re.sub(r"[ .]", "", match[0])


def _overlined(match: re.Match[str]) -> str:
    return rf"{match['head']}\overline{{{match['again'] or match['twice']}}}"


def _repeating(match: re.Match[str]) -> str:
    """Write a repeating decimal as a fraction."""
    whole, fixed = match["whole"] or "0", match["fixed"]
    again = match["over"] or match["again"] or (match["first"] + (match["middle"] or "") + (match["last"] or ""))
    bottom = (10 ** len(again) - 1) * 10 ** len(fixed)
    top = int(whole + fixed + again) - int(whole + fixed)
    return rf"\frac{{{top}}}{{{bottom}}}"


def _in_degrees(match: re.Match[str]) -> str:
    """Write degrees, minutes and seconds of arc as degrees."""
    seconds = int(match["degrees"]) * 3600 + int(match["minutes"] or 0) * 60 + int(match["seconds"] or 0)
    return rf"\frac{{{seconds}}}{{3600}}^\circ"


_NUMERALS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\A0[bB](?P<digits>[01]{1,200})\Z", r"\g<digits>_2"),
        (r"\A0[oO](?P<digits>[0-7]{1,200})\Z", r"\g<digits>_8"),
        (r"\A0[xX](?P<digits>[\dA-Fa-f]{1,200})\Z", r"\g<digits>_{16}"),
        (r"(?<![\w\\])(?P<n>\d{1,4}|n)C(?P<k>\d{1,4}|[rk])(?!\w)", r"\\binom{\g<n>}{\g<k>}"),  # 10C3
        (r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d,])", _joined),
        (r"(?<![\d.,])\d{1,3}(?:\.\d{3}){2,}(?![\d.])", _joined),
        # 0.2727... with a line over the period
        (
            r"(?<![\d.])(?P<head>\d{0,20}\.\d{0,6}?)(?:(?P<again>\d{1,3})(?P=again){2,9}|(?P<twice>\d{2,6})(?P=twice))"
            r"(?:\\[lc]?dots|\.\.\.)(?!\w)",
            _overlined,
        ),
        (
            r"(?<![\d.])(?P<whole>\d{0,20})\.(?P<fixed>\d{0,20})"
            r"(?:\\(?:overline|bar) ?\{(?P<over>\d{1,30})\}"
            r"|\((?P<again>\d{1,30})\)(?=$|[ ,;)\]}\\%])"
            r"|\\dot ?\{?(?P<first>\d)\}?(?:(?P<middle>\d{0,30})\\dot ?\{?(?P<last>\d)\}?)?)(?!\d)",
            _repeating,
        ),
        (
            r"(?<![\d.])(?P<degrees>\d{1,4})\^\\circ(?: ?(?P<minutes>\d{1,2})(?:\^\\prime|')(?!'))?"
            r"(?: ?(?P<seconds>\d{1,2})(?:\^\{\\prime ?\\prime\}|''|\"))?(?<!circ)(?!\d)",
            _in_degrees,
        ),
    )
)
"""Spellings of numbers, and their replacement for the grammar."""
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d|,\d)")
_EXPONENT = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)(?:[eE]|\\mathrm\{[eE]\})([+-]?\d{1,4})(?![\d.]|\w*_)")
_EXPONENT_BEFORE_LETTER = re.compile(r"\d[eE][+-]?\d{1,4}[A-Za-z]")
_MILLIONS = re.compile(r"-?\d{1,3}(?:,\d{3}){2,}")
_NO_ITEMS = re.compile(r"(?<!\d),0\d|\d,0\d|[$€£¥₹]\d{1,3},\d{3}")
_DECIMAL_COMMA = re.compile(r"-?(?:\d{1,3}(?:[. ]\d{3})+|\d+),\d+")
_INDIAN = re.compile(r"-?\d{1,2}(?:,\d{2})+,\d{3}")  # 12,34,567
_DECIMAL_POINT = re.compile(r"-?\d+\.\d+")
_IMPROPER = re.compile(r"(?<![\d.])\d+ ?\\frac ?(?:\{(\d+)\}|(\d)) ?(?:\{(\d+)\}|(\d))")
"""A whole number before a fraction, which Math-Verify adds whatever the fraction is."""
_CONNECTIVE = re.compile(r"\\(?:(?P<or>lor|vee)|land|wedge)(?![a-z])")
_PRIME = re.compile(r"'(?!\d)|\\prime")  # not the Swiss 1'000
_MOST_WORDS = 3
"""Most words of a text for Math-Verify: of a sentence it reads one formula of several."""
_SHAPE = frozenset(("open", "close", "sep", "rel", "cup", "colon"))


def same_structure(reference: str, answer: str) -> bool | None:
    """Compare two answers in canonical notation; None if one was not read or nothing was decided."""
    connectives = [[one["or"] is None for one in _CONNECTIVE.finditer(text)] for text in (reference, answer)]
    if all(connectives) and connectives[0] != connectives[1]:
        return False  # p and q is not p or q
    verdicts: list[bool | None] = []
    for left in readings(reference, trusted=True):
        for right in readings(answer, trusted=False):
            verdicts.append(same_shape(left, right))
            if verdicts[-1] is True:
                return True
    if _decimal_comma(reference, answer) or _rounded(reference, answer) or _rounded(answer, reference):
        return True
    return any_of(verdicts or [None])


def readings(text: str, *, trusted: bool) -> Iterator[Shape]:
    """Yield the shapes of a text: commas between groups of three digits may be those of a list or of a number."""
    for pattern, replacement in _NUMERALS:
        text = pattern.sub(replacement, text)
    plain = text if trusted or _EXPONENT_BEFORE_LETTER.search(text) else ""
    text = _EXPONENT.sub(r"\1\\times 10^{\2}", text)
    joined = _GROUPED.sub(lambda match: match[0].replace(",", ""), text) if text[:1] not in "([" else text
    # a reference answer 6e-10 may be 6e - 10 without spaces
    spellings = (joined, text, plain) if plain else (joined, text)
    if joined != text and (_NO_ITEMS.search(text) or (trusted and _MILLIONS.fullmatch(text))):
        spellings = (joined,)  # 10,000 and $1,250 are no lists, neither is the reference 1,234,567
    for spelling in dict.fromkeys(spellings):
        # 17 \bmod 5 is 2, and also the class of 2
        for one in (spelling, congruence(spelling)) if r"\bmod" in spelling else (spelling,):
            found = read(one, trusted)
            if found is not None:
                yield found


def has_shape(reference: str) -> bool:
    """Return whether a reference answer can be read at all."""
    return next(readings(reference, trusted=True), None) is not None


def same_shape(reference: Shape, answer: Shape) -> bool | None:
    """Compare two shapes, with their parameters renamed if they have any."""
    verdict = same(reference, answer)
    if verdict is True:
        return True
    if periodic_parameters(reference) and periodic_parameters(answer) and same_family(reference, answer, same) is True:
        return True
    if same_antiderivative(reference, answer):
        return True
    # f(x) = cx for some constant c: the constants of a function may be declared
    bare = [one.answer if isinstance(one, Family) and one.domain in ("", "R", "C") and arguments_of(one.answer) else one
            for one in (reference, answer)]  # fmt: skip
    return True if same_constants(bare[0], bare[1], same) else verdict


def same_list(reference: str, boxes: str, count: int) -> bool:
    """Return whether several boxes together are a reference answer that is a list of as many answers.

    Parts of a union of intervals are answers, too, and so are coordinates that the boxes name in alphabetical order.
    """
    for left, right in product(readings(reference, trusted=True), list(readings(boxes, trusted=False))):
        items: Sequence[object] = ()
        if isinstance(left, RealSet):
            items = left.spans
        elif isinstance(left, Several | Brackets):
            names = [one.name for one in right.items if isinstance(one, Named)] if isinstance(right, Several) else []
            named = len(set(names)) == count and names == sorted(names)  # y = 2, x = 3 is not (2, 3)
            items = left.items if isinstance(left, Several) or left.opening == "{" or named else ()
        if len(items) == count and same(left, right) is True:
            return True
    return False


def _decimal_comma(reference: str, answer: str) -> bool:
    """Accept ``2,74`` for the reference 2.74 and ``1,00,000`` for 100000, which show that no list is expected."""
    if _INDIAN.fullmatch(answer):
        return reference == answer.replace(",", "")
    if not (_DECIMAL_POINT.fullmatch(reference) and _DECIMAL_COMMA.fullmatch(answer)):
        return False
    return not _GROUPED.fullmatch(answer.lstrip("-")) and reference == re.sub("[. ]", "", answer).replace(",", ".")


def _rounded(reference: str, answer: str) -> bool:
    r"""Accept ``8/3 \approx 2.67`` for the reference 2.67, whose problem asked for a rounded value."""
    exact, sign, about = answer.rpartition(r"\approx")
    if not sign or "approx" in exact or next(readings(answer, trusted=False), None) is None:
        return False
    value = read(exact.rpartition("=")[2], False)
    return restates(read(reference, True), value) and same_structure(reference, about.strip()) is True


def engine_may_judge(reference: str, answer: str) -> bool:
    """Return whether Math-Verify reads all of both texts.

    It drops words, primes, bases and ellipses, and the order and multiplicity of items in a list. So words, primes,
    brackets, separators and relations must be the same on both sides, and there must be no bases and ellipses.
    """
    sides = ((reference, True), (answer, False))
    if all(any(isinstance(one, Quantity) for one in readings(text, trusted=trusted)) for text, trusted in sides):
        return False  # undecided: Math-Verify would compare roundings
    fractions = (match for text in (reference, answer) for match in _IMPROPER.finditer(text))
    if any(not 0 < int(match[1] or match[2]) < int(match[3] or match[4]) for match in fractions):
        return False
    if len(_PRIME.findall(reference.replace('"', "''"))) != len(_PRIME.findall(answer.replace('"', "''"))):
        return False
    left, right = lex(reference), lex(answer)
    if left is None or right is None or _unreadable(left) or _unreadable(right) or len(_words(left)) > _MOST_WORDS:
        return False
    if _numerals_side_by_side(left) or _numerals_side_by_side(right):
        return False
    return _words(left) == _words(right) and _shape(left) == _shape(right)


def engine_reads(reference: str) -> bool:
    """Return whether Math-Verify may read a reference: it takes ``assert f(1) == 1`` for a product of letters."""
    tokens = lex(reference)
    return tokens is not None and not _unreadable(tokens) and not _words(tokens)


def _unreadable(tokens: list[Token]) -> bool:
    dots = any(token.kind == "cmd" and (token.text in ELLIPSES or token.text in "?…") for token in tokens)
    subscripts = (before for before, token in pairwise(tokens) if (token.kind, token.text) == ("op", "_"))
    # \sqrt 21 is the root of 2 in TeX, and that of 21 for its author
    roots = any(a.text == "sqrt" and b.kind == "num" and len(b.text) > 1 for a, b in pairwise(tokens))
    return dots or roots or any(before.kind in ("num", "close") for before in subscripts)  # a base


def _numerals_side_by_side(tokens: list[Token]) -> bool:
    """Return whether a numeral follows another: Math-Verify multiplies ``8 0`` and adds ``2 3``."""
    scripts = {at for at, token in enumerate(tokens, start=1) if token.text in ("_", "^")}  # log_2 10 has one argument
    return any(a.kind == b.kind == "num" and at not in scripts for at, (a, b) in enumerate(pairwise(tokens)))


def _words(tokens: list[Token]) -> list[str]:
    """Return words and units; short runs of letters are products or differentials, which Math-Verify reads."""
    return sorted(
        token.text
        for token in tokens
        if token.kind == "unit" or (token.kind == "word" and (token.roman or len(token.text) > 3))
    )


def _shape(tokens: list[Token]) -> list[str]:
    """Return brackets, separators and relations in order, if there are any separators or relations."""
    marks = [f"{token.kind} {token.text}" for token in tokens if token.kind in _SHAPE]
    return marks if any(not mark.startswith(("open", "close")) for mark in marks) else []


Step = Callable[[str, str], bool | None]
"""Step of the comparison of canonical texts: equal (True), surely different (False), undecided (None)."""

_MARKED_CHOICE = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{\s*\((?P<letter>[A-J])\)\s*\}(?=.)")
_LETTERED = re.compile(
    r"\\(?:text|textbf|mathrm|mathbf)\s*\{\s*\(?[A-J][).]\s*\}(?=.)|\([A-J]\)(?=[\d\\]|[A-Za-z]{3})"
    r"|[A-J]\)(?=.)|[A-J]\.(?=[ \\])"
)
"""The letter of a choice and its meaning: ``(B) 15``, but not the product ``(D)(x+1)`` or the difference ``(A)-5``."""
_SMALL_CHOICE = re.compile(r"\(?(?P<letter>[a-j])\)?\.?")
_CAPITALS = re.compile(r"(?<![A-Za-z\\])[A-J]|(?<=[A-J])[A-J]")
_WRAPPED_CHOICE = re.compile(r"\(?\\(?:text|textbf|mathrm|mathbf)\s*\{\s*\(?[A-J]\)?\s*\}\)?")
_PHRASES = frozenset(("diverges", "divergent", "converges", "convergent", "dne", "none"))
"""Words with synonyms, see `phrases`."""
_WEEKDAYS = frozenset(("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"))
_POLAR = {"T": "true", "F": "false", "Y": "yes", "N": "no"}
_LETTERS = re.compile(r"[A-Za-z]+")


def same_string(reference: str, answer: str) -> bool | None:
    """Accept equal spelling without fonts, also where Math-Verify can parse neither side."""
    if reference == answer:
        return True if reference else None
    return True if letters_of(reference) == letters_of(answer) else None


def same_rational(reference: str, answer: str) -> bool | None:
    """Compare two plain numbers exactly; the result is final unless a separator may be that of a list.

    Only a fraction without an exact decimal may be given as a rounded one, see `approximates_fraction`.
    """
    left, right = plain_number(reference), plain_number(answer)
    if left is None or right is None:
        return None
    rounded = approximates_fraction(right, left.value) or approximates_fraction(left, right.value)
    if rounded or left.value == right.value:
        return True
    # 1,234 may also be a list of two: the structure decides
    return None if left.grouped or right.grouped else False


def same_word(reference: str, answer: str) -> bool | None:
    """Compare two words, from three letters on without regard to case.

    Words of the same letters in another order stay undecided: ``ab`` and ``ba`` may be products.
    """
    if not (_LETTERS.fullmatch(reference) and _LETTERS.fullmatch(answer)):
        return polar(reference, answer)
    if {reference.casefold(), answer.casefold()} & _PHRASES:
        return None
    if len(reference) >= 3 and reference.casefold() == answer.casefold():
        return True
    if _POLAR.get(answer.upper()) == reference.casefold():
        return True
    if _one_thing(reference.casefold(), answer.casefold()):
        return True
    return None if sorted(reference.casefold()) == sorted(answer.casefold()) else False


def _one_thing(reference: str, answer: str) -> bool:
    """Accept ``ellipse`` and ``ellipses``, ``Friday`` and ``Fri``; letters in alphabetical order may be a product."""
    short, long = sorted((reference, answer), key=len)
    if long in _WEEKDAYS:
        return 3 <= len(short) <= 5 and long.startswith(short)
    plural = long in (short + "s", short + "es") or singular(long) == singular(short)
    return plural and len(short) > 3 and sorted(short) != list(short)


def same_choice(reference: str, answer: str) -> bool | None:
    """Compare a multiple-choice letter with an answer such as ``(B) 15``."""
    several = choice_letters(reference)
    if several is not None:
        written = _CAPITALS.findall(reference)
        return True if several == choice_letters(answer) and sorted(written) == written else None
    asked, given = choice_letter(reference), choice_letter(answer)
    if len(reference) > 3 and not _WRAPPED_CHOICE.fullmatch(reference):
        if (marked := _MARKED_CHOICE.match(reference)) is not None:  # a letter and its meaning
            return _same_marked(marked["letter"], reference[marked.end() :].strip(), answer)
        asked = None
    if asked is None and given is not None and _LETTERED.match(answer):
        text = choice(answer)[1]  # the reference is the meaning only
        steps = (same_string, same_rational, same_word, same_structure)
        return True if any(step(reference, text) for step in steps) else None
    if asked is not None and (small := _SMALL_CHOICE.fullmatch(answer)):
        given = small["letter"].upper()  # c and (c) for C
    return None if asked is None or given is None else asked == given


def _same_marked(letter: str, meaning: str, answer: str) -> bool | None:
    """Compare with a letter and its meaning: an answer may give either, but nothing wrong."""
    given, text = choice(answer)
    if given is None:
        return True if same_rational(meaning, answer) or same_structure(meaning, answer) else None
    # if an answer gives both, both must be right: otherwise it would pay to guess the letter
    if given == letter and text and meaning != text:
        return False not in (same_rational(meaning, text), same_structure(meaning, text))
    return True if given == letter else None


CHEAP_STEPS: tuple[tuple[str, Step], ...] = (
    ("string", same_string),
    ("rational", same_rational),
    ("word", same_word),
    ("choice", same_choice),
    ("structure", same_structure),
)


MAX_PARSED_CHARS = 5000
"""Longest answer that is parsed; longer ones are only compared as strings."""
MAX_PROSE_CHARS = 8000
"""Length of the end of a response that is searched for an answer without a box."""
ENGINE_SECONDS = 1.6
"""CPU time limit of Math-Verify for one answer, and once for each reference answer.

It is twice the time that sympy needs for an integral on a slow machine, and less than the limit of the worker.
"""
STEPS_SECONDS = 1.0
"""CPU time limit of the steps before Math-Verify."""
_CACHED_REFERENCES = 4096
_MAY_BE_LIST = re.compile(r"[,;]|\\pm|\b(?:and|or)\b|\(b\)")


def _marked(reference: str) -> str:
    """Return a reference answer: of a solution, as columns of TRL and verl may hold, what it marks as its answer."""
    reference = _LOST_BACKSLASH.sub(_restored, reference)
    return marked_answer(reference) or reference


class MathsVerifier:
    """Verifier of responses against reference answers. It runs in a worker process; see `magicrl_verifiers.workers`."""

    def __init__(self, options: JudgeOptions, progress: Progress = lambda phase: None) -> None:
        self._options = options
        self._progress = progress
        self._references: dict[str, list[Any]] = {}
        self._exhausting: set[str] = set()

    def distrust(self, references: Sequence[str]) -> None:
        for reference in map(_marked, references):
            self._exhausting.add(reference)
            self._remember(reference, [])

    def judge(self, references: Sequence[str], response: str) -> Verdict:
        try:
            return self._judge(references, response)
        except RecursionError:
            return make_verdict("unparsable", reason="the answer is nested too deeply", decided_by="structure")

    def _judge(self, references: Sequence[str], response: str) -> Verdict:
        response = _LOST_BACKSLASH.sub(_restored, response)
        references = [_marked(reference) for reference in references]
        part = answer_part(response, self._options.reasoning)
        if part is None:
            return make_verdict("no_answer", reason="the reasoning never ended", decided_by="extraction")
        box = last_box(part)
        text, formula = (box.strip(), True) if box is not None else self._in_prose(references, part)
        if not text:
            lenient = self._options.extract == "lenient"
            reason = "the text denies or doubts its values" if lenient else "no closed box after the reasoning"
            if box is not None or (lenient and not part.strip()):
                reason = "the answer is empty"
            return make_verdict("no_answer", reason=reason, decided_by="extraction")
        pairs = [(reference, canonical_notation(close_braces(reference))) for reference in references]
        named = joint_boxes(part, named=True) if box is not None else None
        joint = named and joint_boxes(part)
        try:
            with cpu_limit(STEPS_SECONDS):
                verdict = None if named is None or named == joint else self._by_list(pairs, named)
                if verdict is None and named is not None and len({box.partition("=")[0] for box in named}) == 1:
                    joint = named if len(set(named)) > 1 else None  # the last of several values is no answer of its own
                if verdict is None:
                    verdict = self._by_steps(pairs, text) if joint is None else self._by_joint_boxes(pairs, joint)
        except CpuAlarm:
            reason = f"the answer used up {STEPS_SECONDS:g} s of CPU time"
            return make_verdict("timeout", reason=reason, decided_by="structure", extracted=text)
        return verdict or self._by_engine(pairs, text, formula)

    def _in_prose(self, references: Sequence[str], part: str) -> tuple[str, bool]:
        """Return the final answer of a text without a box, and whether one was found; else all of the text.

        The answer is empty if the text has values but gives none of them as its answer.
        """
        if self._options.extract == "box":
            return "", False
        letter = all(choice_letter(reference) is not None for reference in references)
        found = final_answer(part[-MAX_PROSE_CHARS:], choice=letter)
        return part.strip()[-MAX_PROSE_CHARS:] if found is None else found, found is not None

    def _by_steps(self, pairs: list[tuple[str, str]], text: str) -> Verdict | None:
        """Run steps 1 to 3, which need no symbolic algebra; None if a reference answer stays undecided."""
        spelled = canonical_notation(text)
        references = [reference for _, reference in pairs]
        # cheap and sure steps first; a very long answer is only compared as a string
        for name, step in CHEAP_STEPS if len(spelled) <= MAX_PARSED_CHARS else CHEAP_STEPS[:1]:
            opinions = [step(reference, spelled) for reference in references]
            if True in opinions:
                return make_verdict("matched", decided_by=name, extracted=text)
            # a step that is sure of "different" removes the reference answer; the next one gets the undecided ones
            references = [reference for reference, opinion in zip(references, opinions, strict=True) if opinion is None]
            if not references:
                return make_verdict("mismatch", decided_by=name, extracted=text)
        if len(spelled) > MAX_PARSED_CHARS:
            return make_verdict("mismatch", decided_by="string", reason="too long to be read", extracted=text)
        return None

    def _by_list(self, pairs: list[tuple[str, str]], boxes: tuple[str, ...]) -> Verdict | None:
        """Return "matched" if a reference is a list of as many answers as there are boxes, and they give them."""
        text = ", ".join(boxes)
        spelled = canonical_notation(text)
        lists = [reference for _, reference in pairs if _MAY_BE_LIST.search(reference)]
        short = len(spelled) <= MAX_PARSED_CHARS
        if short and any(same_list(reference, spelled, len(boxes)) for reference in lists):
            return make_verdict("matched", decided_by="boxes", extracted=text)
        return None

    def _by_joint_boxes(self, pairs: list[tuple[str, str]], boxes: tuple[str, ...]) -> Verdict:
        """Judge several boxes in a row: the reference is a list of as many answers, or each box is right."""
        if (listed := self._by_list(pairs, boxes)) is not None:
            return listed
        text = ", ".join(boxes)
        alone = (self._by_steps(pairs, box) for box in dict.fromkeys(boxes))
        if all(verdict is not None and verdict.correct for verdict in alone):
            return make_verdict("matched", decided_by="boxes", extracted=text)
        reason = "several boxes in a row give different answers"
        return make_verdict("mismatch", decided_by="boxes", reason=reason, extracted=text)

    def _by_engine(self, pairs: list[tuple[str, str]], text: str, formula: bool) -> Verdict:
        """Run step 4: Math-Verify on undecided reference answers."""
        spelled = canonical_notation(text)
        seed_sympy(0)  # sympy tests some identities at random points: use the same ones for every item
        parsed = {reference: self._parse_reference(reference) for reference, _ in pairs}
        if not any(
            (parsed[reference] and engine_reads(spelling))
            or (reference not in self._exhausting and has_shape(spelling))
            for reference, spelling in pairs
        ):
            reason = "the reference answer cannot be read"
            return make_verdict("reference_unparsable", reason=reason, decided_by="math_verify", extracted=text)
        self._progress("answer")
        usable = [
            parsed[reference]
            for reference, spelling in pairs
            if parsed[reference] and engine_may_judge(spelling, spelled)
        ]
        # prose without a formula is wrong
        if not formula or not (usable or has_shape(spelled)):
            return make_verdict("mismatch", decided_by="structure", extracted=text)
        if not usable:
            reason = "neither that they are equal nor that they differ could be shown"
            return make_verdict("undecided", reason=reason, decided_by="structure", extracted=text)
        try:
            with cpu_limit(ENGINE_SECONDS):
                found = parse_formula(spelled)
                status = "matched" if any(equivalent(reference, found) for reference in usable) else "mismatch"
        except CpuAlarm:
            reason = f"the answer used up {ENGINE_SECONDS:g} s of CPU time"
            return make_verdict("timeout", reason=reason, decided_by="math_verify", extracted=text)
        if not found:
            reason = "Math-Verify reads nothing in the answer"
            return make_verdict("unparsable", reason=reason, decided_by="math_verify", extracted=text)
        return make_verdict(status, decided_by="math_verify", extracted=text)

    def _parse_reference(self, reference: str) -> list[Any]:
        # a worker that dies in this phase counts against the reference answer (`worker.WorkerProcess.ask`); each
        # reference answer is a separate phase, since together they may exceed the limit of the worker
        self._progress("reference")
        if reference not in self._references:
            try:
                with cpu_limit(ENGINE_SECONDS):
                    parsed = parse_formula(canonical_notation(reference))
                    self._remember(reference, parsed if evaluates(parsed) else [])
            except CpuAlarm:
                self._exhausting.add(reference)
                self._remember(reference, [])
        return self._references[reference]

    def _remember(self, reference: str, parsed: list[Any]) -> None:
        if len(self._references) >= _CACHED_REFERENCES:
            # remove the oldest: dictionaries keep their order
            self._references.pop(next(iter(self._references)))
        self._references[reference] = parsed
