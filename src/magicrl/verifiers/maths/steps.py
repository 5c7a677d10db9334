"""The comparison steps, cheapest first. A step says equal, different, or that it cannot tell.

A later kind of comparison (intervals, units, lists) is one more row of `CHEAP_STEPS`, before Math-Verify.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from magicrl.verifiers.maths.notation import letters_of, same_substance
from magicrl.verifiers.maths.rational import approximates, plain_number
from magicrl.verifiers.maths.structure import same_structure
from magicrl.verifiers.maths.units import singular
from magicrl.verifiers.maths.words import choice_letter, choice_letters, choice_text, polar

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
