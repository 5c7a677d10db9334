"""The maths verifier (RECIPE section 8): answer part, extraction, comparison, Math-Verify.

    answer part after the reasoning -> last box -> string, rational, word, choice, structure -> Math-Verify

Departures from the released code: the last box is cut out before Math-Verify sees it (several boxes would be
joined), golds and answers are compared by steps of our own before anything is left to Math-Verify, and a response
whose reasoning never ended has no answer. Math-Verify's own time-outs are off: they use ``signal.alarm`` and measure
the machine's load.
"""

from __future__ import annotations

import logging
import re
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from types import FrameType
from typing import Any

import math_verify
import sympy
from latex2sympy2_extended import NormalizationConfig
from sympy.core.random import seed as seed_sympy

from magicrl.records import Verdict
from magicrl.verifiers.base import JudgeOptions, Progress, make_verdict
from magicrl.verifiers.extraction import answer_part, joint_boxes, last_box
from magicrl.verifiers.maths.answers import Answer, Family, Group, Quantity, Several, names_of
from magicrl.verifiers.maths.comparison import same
from magicrl.verifiers.maths.lexer import ELLIPSES, Token, tokens_of
from magicrl.verifiers.maths.literals import (
    approximates,
    choice_letter,
    choice_letters,
    choice_text,
    plain_number,
    polar,
)
from magicrl.verifiers.maths.notation import canonical, close_braces, congruence, letters_of, same_substance
from magicrl.verifiers.maths.prose import final_answer
from magicrl.verifiers.maths.quantities import singular
from magicrl.verifiers.maths.reading import read
from magicrl.verifiers.maths.sequences import arguments_of, periodic_parameters, same_constants, same_family


class CpuAlarm(BaseException):
    """The CPU time was used up. No `Exception`, so that no library takes it for one of its own errors."""


@contextmanager
def cpu_limit(seconds: float) -> Generator[None]:
    """Raise `CpuAlarm` in the block once it used so many seconds of CPU time."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise CpuAlarm

    before = signal.signal(signal.SIGPROF, ring)
    # again and again: a library may catch the first one in an ``except:`` of its own
    signal.setitimer(signal.ITIMER_PROF, seconds, 0.2)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


logging.getLogger("math_verify").setLevel(logging.CRITICAL)
logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)

Expression = sympy.Basic | sympy.MatrixBase

_UNFINISHED = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit)
"""Slow to evaluate without being out of reach."""

_WHOLE = (
    math_verify.LatexExtractionConfig(
        # units off: it would take any last letter for one
        normalization_config=NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="last"
        )
    ),
)
_BLANKS = re.compile(r"[ \t]{2,}")
_DIGITS = 50
_EXACT_TOLERANCE = 1e-30
_FLOAT_TOLERANCE = 1e-5


def parse_formula(latex: str) -> list[Any]:
    """The expressions that Math-Verify reads in ``latex``, which is taken as one answer; empty when it reads none.

    The box around it keeps Math-Verify from picking a part or altering it (RECIPE section 8, step 4).
    """
    found = math_verify.parse(f"\\boxed{{{latex}}}", extraction_config=_WHOLE, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    return [item for item in found if not isinstance(item, str)]


def parse_prose(text: str) -> tuple[list[Any], str | None]:
    """The expressions found in running text by Math-Verify's own patterns, and the text of the first."""
    found = math_verify.parse(_BLANKS.sub(" ", text), parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    source = next((item for item in found if isinstance(item, str)), None)
    return [item for item in found if not isinstance(item, str)], source


def evaluates(parsed: list[Any]) -> bool:
    """Whether numbers among the expressions can be computed at all; a gold like 10^{10^{10^{10}}} cannot.

    Called for golds, in the phase where an exhausted worker is the gold's fault and not the answer's.
    """
    numbers = [item for item in parsed if isinstance(item, sympy.Expr) and not item.has(*_UNFINISHED)]
    return all(number.evalf(15) is not sympy.nan for number in numbers if number.is_number)


def equivalent(gold: list[Any], answer: list[Any]) -> bool:
    """Whether Math-Verify holds any pair for equal, and exact numbers agree to more than its six decimals."""
    return any(
        math_verify.verify(left, right, timeout_seconds=None) and _numbers_agree(left, right)
        for left in gold
        for right in answer
    )


def _numbers_agree(gold: Any, answer: Any) -> bool:
    """Undo Math-Verify's absolute rounding: 1/2004! and 1/2006! are both 0.000000 there.

    Two exact numbers must agree to 30 digits; a decimal approximation to a relative 1e-5.
    """
    if not (isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr)):
        return True
    if not (gold.is_number and answer.is_number):
        return True
    left, right = gold.evalf(_DIGITS), answer.evalf(_DIGITS)
    if not (left.is_Number and right.is_Number and left.is_finite and right.is_finite):
        return True
    exact = not (gold.has(sympy.Float) or answer.has(sympy.Float))
    tolerance = _EXACT_TOLERANCE if exact else _FLOAT_TOLERANCE
    return bool(abs(left - right) <= tolerance * max(abs(left), abs(right)))


_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_SPACED = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d,])")
_POINTS = re.compile(r"(?<![\d.,])\d{1,3}(?:\.\d{3}){2,}(?![\d.])")
_EXPONENT = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)(?:[eE]|\\mathrm\{[eE]\})([+-]?\d{1,4})(?![\d.]|\w*_)")
_EXPONENT_BEFORE_LETTER = re.compile(r"\d[eE][+-]?\d{1,4}[A-Za-z]")
_LEADING_ZERO = re.compile(r"(?<!\d),0\d|\d,0\d")
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
_SHAPE = frozenset(("open", "close", "sep", "rel", "cup", "colon"))


def same_structure(gold: str, answer: str) -> bool | None:
    """Whether two answers in canonical notation say the same; None when one was not read or nothing was decided."""
    verdicts: list[bool | None] = []
    for left in readings(gold, trusted=True):
        for right in readings(answer, trusted=False):
            verdicts.append(compare(left, right))
            if verdicts[-1] is True:
                return True
    if _decimal_comma(gold, answer):
        return True
    return None if not verdicts or None in verdicts else False


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
    if joined != text and _LEADING_ZERO.search(text):
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
    # f(x) = cx for some constant c: the letters of a function may be declared to be any numbers
    bare = [one.answer if isinstance(one, Family) and one.domain in ("", "R", "C") and arguments_of(one.answer) else one
            for one in (gold, answer)]  # fmt: skip
    return True if same_constants(bare[0], bare[1], same) else verdict


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
    sides = ((gold, True), (answer, False))
    if all(any(isinstance(one, Quantity) for one in readings(text, trusted=trusted)) for text, trusted in sides):
        return False  # undecided here: Math-Verify would compare roundings
    left, right = tokens_of(gold), tokens_of(answer)
    if left is None or right is None or _unreadable(left) or _unreadable(right) or len(_words(left)) > _MOST_WORDS:
        return False
    return _words(left) == _words(right) and _shape(left) == _shape(right)


def _unreadable(tokens: list[Token]) -> bool:
    dots = any(token.kind == "cmd" and (token.text in ELLIPSES or token.text in "?…") for token in tokens)
    subscripts = (before for before, token in pairwise(tokens) if (token.kind, token.text) == ("op", "_"))
    return dots or any(before.kind in ("num", "close") for before in subscripts)  # a base


def _words(tokens: list[Token]) -> list[str]:
    """Words and units; short plain runs of letters are products or differentials, which Math-Verify reads."""
    return sorted(
        token.text
        for token in tokens
        if token.kind == "unit" or (token.kind == "word" and (token.roman or len(token.text) > 3))
    )


def _shape(tokens: list[Token]) -> list[str]:
    """Brackets, separators and relations in order, where there are any separators or relations."""
    marks = [f"{token.kind} {token.text}" for token in tokens if token.kind in _SHAPE]
    return marks if any(not mark.startswith(("open", "close")) for mark in marks) else []


Step = Callable[[str, str], bool | None]
"""(gold, answer), both in canonical notation -> equal (True), surely different (False), cannot tell (None)."""

_MARKED_CHOICE = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{\s*\((?P<letter>[A-J])\)\s*\}(?=.)")
_SMALL_CHOICE = re.compile(r"\(?(?P<letter>[a-j])\)?\.?")
_CAPITALS = re.compile(r"(?<![A-Za-z\\])[A-J]|(?<=[A-J])[A-J]")
_WRAPPED_CHOICE = re.compile(r"\(?\\(?:text|textbf|mathrm|mathbf)\s*\{\s*\(?[A-J]\)?\s*\}\)?")
_PHRASES = frozenset(("diverges", "divergent", "converges", "convergent", "dne", "none"))
"""Words that another word or phrase may stand for, see `phrases`."""
_WEEKDAYS = frozenset(("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"))
_POLAR = {"T": "true", "F": "false", "Y": "yes", "N": "no"}
_LETTERS = re.compile(r"[A-Za-z]+")


def same_string(gold: str, answer: str) -> bool | None:
    """Equal spelling, fonts aside. Right even where Math-Verify can parse neither side."""
    if gold == answer:
        return True if gold else None
    return True if letters_of(gold) == letters_of(answer) or same_substance(gold, answer) else None


def same_rational(gold: str, answer: str) -> bool | None:
    """Two plain numbers are compared exactly, and that is final unless a separator leaves room for doubt.

    Only a fraction that no decimal can say may be given as one, see `approximates`.
    """
    left, right = plain_number(gold), plain_number(answer)
    if left is None or right is None:
        return None
    if left.value == right.value or approximates(right, left.value) or approximates(left, right.value):
        return True
    return None if left.grouped or right.grouped else False


def same_word(gold: str, answer: str) -> bool | None:
    """Two bare words: case does not matter from three letters on, other letters are another answer.

    Words of the same letters in another order stay open: ``ab`` and ``ba`` may be products.
    """
    if not (_LETTERS.fullmatch(gold) and _LETTERS.fullmatch(answer)):
        return polar(gold, answer)
    if {gold.casefold(), answer.casefold()} & _PHRASES:
        return None
    if len(gold) >= 3 and gold.casefold() == answer.casefold():
        return True
    if _POLAR.get(answer.upper()) == gold.casefold():
        return True
    if _one_thing(gold.casefold(), answer.casefold()):
        return True
    return None if sorted(gold.casefold()) == sorted(answer.casefold()) else False


def _one_thing(gold: str, answer: str) -> bool:
    """``ellipse`` and ``ellipses``, ``Friday`` and ``Fri``; a product of letters in their order is no word."""
    short, long = sorted((gold, answer), key=len)
    if long in _WEEKDAYS:
        return 3 <= len(short) <= 5 and long.startswith(short)
    plural = long in (short + "s", short + "es") or singular(long) == singular(short)
    return plural and len(short) > 3 and sorted(short) != list(short)


def same_choice(gold: str, answer: str) -> bool | None:
    """A multiple-choice letter against whatever the answer makes of one: ``B`` and ``(B) 15``."""
    several = choice_letters(gold)
    if several is not None:
        written = _CAPITALS.findall(gold)
        return True if several == choice_letters(answer) and sorted(written) == written else None
    if len(gold) > 3 and not _WRAPPED_CHOICE.fullmatch(gold):
        marked = _MARKED_CHOICE.match(gold)  # a letter with what it stands for
        return _same_marked(marked["letter"], gold[marked.end() :].strip(), answer) if marked else None
    asked, given = choice_letter(gold), choice_letter(answer)
    if asked is not None and (small := _SMALL_CHOICE.fullmatch(answer)):
        given = small["letter"].upper()  # c and (c) for C
    return None if asked is None or given is None else asked == given


def _same_marked(letter: str, stands_for: str, answer: str) -> bool | None:
    """A letter and what it stands for: either will do, but what is given of both must not be wrong."""
    given = choice_letter(answer)
    if given is None:
        return True if same_rational(stands_for, answer) or same_structure(stands_for, answer) else None
    said = choice_text(answer)
    if given == letter and said and stands_for != said:
        wrong = False in (same_rational(stands_for, said), same_structure(stands_for, said))
        return not wrong
    return True if given == letter else None


CHEAP_STEPS: tuple[tuple[str, Step], ...] = (
    ("string", same_string),
    ("rational", same_rational),
    ("word", same_word),
    ("choice", same_choice),
    ("structure", same_structure),
)


MAX_PARSED_CHARS = 5000
"""A longer answer is compared as a string only: no formula that anyone asks for has this length."""
MAX_PROSE_CHARS = 8000
"""Without a box, only the end of the text is searched for an answer."""
ENGINE_SECONDS = 0.8
"""CPU time that Math-Verify may use for one answer, and once for each gold."""
STEPS_SECONDS = 1.0
"""CPU time that the steps before it may use."""
_CACHED_GOLDS = 4096
_MAY_BE_LIST = re.compile(r"[,;]|\\pm|\b(?:and|or)\b")


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the response gives: a box's content, or running text when there is no box (lenient)."""

    text: str
    boxed: bool
    source: str = ""


class MathsVerifier:
    """Judges one response against its golds. Runs in a worker process; see `magicrl.verifiers.pool`."""

    def __init__(self, options: JudgeOptions, progress: Progress = lambda phase: None) -> None:
        self._options = options
        self._progress = progress
        self._golds: dict[str, list[Any]] = {}
        self._exhausting: set[str] = set()

    def distrust(self, golds: Sequence[str]) -> None:
        for gold in golds:
            self._exhausting.add(gold)
            self._remember(gold, [])

    def judge(self, golds: Sequence[str], response: str) -> Verdict:
        try:
            return self._judge(golds, response)
        except RecursionError:
            return make_verdict("unparsable", reason="the answer is nested too deeply", decided_by="structure")

    def _judge(self, golds: Sequence[str], response: str) -> Verdict:
        answer = self._extract(golds, response)
        if isinstance(answer, Verdict):
            return answer
        pairs = [(gold, canonical(close_braces(gold))) for gold in golds]
        try:
            with cpu_limit(STEPS_SECONDS):
                verdict = self._by_steps(pairs, canonical(answer.text), answer)
                if answer.source and (verdict is None or verdict.status == "mismatch"):
                    verdict = self._by_joint_boxes(pairs, answer) or verdict
        except CpuAlarm:
            reason = f"the answer used up {STEPS_SECONDS:g} s of CPU time"
            return make_verdict("timeout", reason=reason, decided_by="structure", extracted=answer.text)
        if isinstance(verdict, Verdict):
            return verdict
        return self._by_engine(pairs, answer)

    def _extract(self, golds: Sequence[str], response: str) -> _Answer | Verdict:
        text = answer_part(response, self._options.reasoning)
        if text is None:
            return make_verdict("no_answer", reason="the reasoning never ended", decided_by="extraction")
        box = last_box(text)
        if box is not None:
            answer = _Answer(box.strip(), boxed=True, source=text)
        elif self._options.extract == "lenient":
            choice = all(choice_letter(gold) is not None for gold in golds)
            found = final_answer(text[-MAX_PROSE_CHARS:], choice=choice)
            answer = _Answer(found or text.strip()[-MAX_PROSE_CHARS:], boxed=found is not None)
        else:
            return make_verdict("no_answer", reason="no closed box after the reasoning", decided_by="extraction")
        if not answer.text:
            return make_verdict("no_answer", reason="the answer is empty", decided_by="extraction")
        return answer

    def _by_steps(self, pairs: list[tuple[str, str]], spelled: str, answer: _Answer) -> Verdict | None:
        """Steps 1 to 3: everything that needs no symbolic algebra. None when a gold stays open."""
        candidates = pairs
        for name, step in CHEAP_STEPS if len(spelled) <= MAX_PARSED_CHARS else CHEAP_STEPS[:1]:
            opinions = [step(gold, spelled) for _, gold in candidates]
            if True in opinions:
                return make_verdict("matched", decided_by=name, extracted=answer.text)
            candidates = [pair for pair, opinion in zip(candidates, opinions, strict=True) if opinion is None]
            if not candidates:
                return make_verdict("mismatch", decided_by=name, extracted=answer.text)
        if len(spelled) > MAX_PARSED_CHARS:
            return make_verdict("mismatch", decided_by="string", reason="too long to be read", extracted=answer.text)
        return None

    def _by_joint_boxes(self, pairs: list[tuple[str, str]], answer: _Answer) -> Verdict | None:
        """Several boxes in a row are one list, if the gold is a list of as many answers."""
        if not any(_MAY_BE_LIST.search(gold) for _, gold in pairs):
            return None
        boxes = joint_boxes(answer.source)
        if boxes is None:
            return None
        spelled = canonical(", ".join(boxes))
        if len(spelled) <= MAX_PARSED_CHARS and any(same_list(gold, spelled, len(boxes)) for _, gold in pairs):
            return make_verdict("matched", decided_by="boxes", extracted=", ".join(boxes))
        return None

    def _by_engine(self, pairs: list[tuple[str, str]], answer: _Answer) -> Verdict:
        """Step 4: Math-Verify on what the steps before left open."""
        spelled = canonical(answer.text)
        seed_sympy(0)  # sympy probes some identities at random points: the same ones for every item
        self._progress("gold")
        parsed = {gold: self._parse_gold(gold) for gold, _ in pairs}
        if not any(parsed[gold] or (gold not in self._exhausting and has_shape(text)) for gold, text in pairs):
            reason = "the gold answer cannot be read"
            return make_verdict("gold_unparsable", reason=reason, decided_by="math_verify", extracted=answer.text)
        self._progress("answer")
        usable = [
            parsed[gold]
            for gold, text in pairs
            if parsed[gold] and (not answer.boxed or engine_may_judge(text, spelled))
        ]
        if not usable:
            if not has_shape(spelled):
                return make_verdict("mismatch", decided_by="structure", extracted=answer.text)
            reason = "neither that they are equal nor that they differ could be shown"
            return make_verdict("undecided", reason=reason, decided_by="structure", extracted=answer.text)
        try:
            with cpu_limit(ENGINE_SECONDS):
                return self._engine_verdict(usable, answer, spelled)
        except CpuAlarm:
            reason = f"the answer used up {ENGINE_SECONDS:g} s of CPU time"
            return make_verdict("timeout", reason=reason, decided_by="math_verify", extracted=answer.text)

    def _engine_verdict(self, golds: list[list[Any]], answer: _Answer, spelled: str) -> Verdict:
        extracted: str | None = answer.text
        if answer.boxed:
            parsed = parse_formula(spelled)
        else:
            parsed, extracted = parse_prose(answer.text)
        if not parsed:
            reason = "Math-Verify reads nothing in the answer"
            return make_verdict("unparsable", reason=reason, decided_by="math_verify", extracted=extracted)
        equal = any(equivalent(gold, parsed) for gold in golds)
        return make_verdict("matched" if equal else "mismatch", decided_by="math_verify", extracted=extracted)

    def _parse_gold(self, gold: str) -> list[Any]:
        if gold not in self._golds:
            try:
                with cpu_limit(ENGINE_SECONDS):
                    parsed = parse_formula(canonical(gold))
                    self._remember(gold, parsed if evaluates(parsed) else [])
            except CpuAlarm:
                self._exhausting.add(gold)
                self._remember(gold, [])
        return self._golds[gold]

    def _remember(self, gold: str, parsed: list[Any]) -> None:
        if len(self._golds) >= _CACHED_GOLDS:
            self._golds.pop(next(iter(self._golds)))
        self._golds[gold] = parsed
