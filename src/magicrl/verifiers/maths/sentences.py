r"""Sentences with formulas in them, as golds have them: ``circle with center (1,2) and radius 3``.

Two sentences say the same when their words are the same, one for one, and so are the formulas between the words. It
is the last way to read a text: whatever has a shape of its own is compared by that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from magicrl.verifiers.maths.answers import Answer, Sentence
from magicrl.verifiers.maths.lexer import Token
from magicrl.verifiers.maths.pieces import depths
from magicrl.verifiers.maths.units import singular
from magicrl.verifiers.maths.words import word_set

Read = Callable[[Sequence[Token]], "Answer | None"]
_UNSAID = word_set("a an the all any every of that is are it its this which at interval point")
_SPELLINGS = {"centre": "center", "centred": "centered", "colour": "color", "metre": "meter", "litre": "liter"}
_MOST_PARTS = 40


def sentence(tokens: Sequence[Token], read: Read) -> Sentence | None:
    """The words and formulas of a text that holds both; None where a formula in it cannot be read."""
    parts: list[str | Answer] = []
    levels = depths(tokens)
    if levels is None:
        return None
    for kind, run in groupby(zip(tokens, levels, strict=True), key=_kind):
        piece = [token for token, _ in run]
        if kind == "word":
            parts += [word for token in piece if (word := _plain(token.text)) not in _UNSAID]
        elif kind == "sep":
            parts += [token.text for token in piece if token.text not in ",;"]
        elif (read_part := read(piece)) is not None:
            parts.append(read_part)
        else:
            return None
    words = sum(isinstance(part, str) for part in parts)
    return Sentence(tuple(parts)) if 0 < words < len(parts) <= _MOST_PARTS else None


def same_sentence(gold: Sentence, answer: Sentence, same: Callable[[Answer, Answer], bool | None]) -> bool:
    """Word for word, formula for formula."""
    if len(gold.parts) != len(answer.parts):
        return False
    for left, right in zip(gold.parts, answer.parts, strict=True):
        if isinstance(left, str) or isinstance(right, str):
            if left != right:
                return False
        elif same(left, right) is not True:
            return False
    return True


def _kind(placed: tuple[Token, int]) -> str:
    token, level = placed
    if level:
        return "formula"
    if token.kind == "sep":
        return "sep"
    # a lone letter between words is an article or a name, and reads as a formula too
    return "word" if token.kind == "word" and (token.roman or len(token.text) > 1) else "formula"


def _plain(word: str) -> str:
    low = word.casefold().strip(".,")
    return singular(_SPELLINGS.get(low, low))
