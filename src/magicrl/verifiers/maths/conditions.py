r"""Conditions and the values that hold under them, in one line: ``0 if n is odd, 1 if n is even``; ``2^n, n \ge 0``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from magicrl.verifiers.maths.answers import Answer, Named, Piecewise, Quantity, RealSet, Several, Span
from magicrl.verifiers.maths.expression import rename
from magicrl.verifiers.maths.families import arguments_of, names_of, renamed
from magicrl.verifiers.maths.lexer import Token
from magicrl.verifiers.maths.names import name_of
from magicrl.verifiers.maths.phrases import number_domain
from magicrl.verifiers.maths.pieces import split
from magicrl.verifiers.maths.words import word_set

Read = Callable[[Sequence[Token]], "Answer | None"]
_CONDITION_WORDS = word_set("if for when where")
_KINDS = word_set("even odd prime positive negative nonnegative real rational irrational integer an a")


def inline_cases(tokens: Sequence[Token], levels: list[int], read: Read) -> Piecewise | None:
    """``0 if n is odd, 1 if n is even``; None where it is no list of values with their conditions."""
    if not any(token.kind == "word" and token.text.casefold() in _CONDITION_WORDS for token in tokens):
        return None
    pieces, separators = split(tokens, levels, "sep")
    if len(pieces) < 2 or "or" in separators:
        return None
    found: list[tuple[Answer, Answer | None]] = []
    for piece in (piece for piece in pieces if piece):
        at = next((at for at, token in enumerate(piece) if token.kind == "word" and
                   token.text.casefold() in (*_CONDITION_WORDS, "otherwise", "else")), None)  # fmt: skip
        if not at:
            return None
        otherwise = piece[at].text.casefold() in ("otherwise", "else")
        value = read(piece[:at])
        condition = None if otherwise else read(piece[at + 1 :])
        if value is None or (condition is None) != otherwise or isinstance(condition, Quantity):
            return None
        found.append((value, condition))
    conditions = [condition for _, condition in found]
    return Piecewise(tuple(found)) if len(found) > 1 and None not in conditions[:-1] else None


def of_a_kind(tokens: Sequence[Token]) -> Named | None:
    """``n is even``: the name is in a set that words describe."""
    at = next((at for at, token in enumerate(tokens) if token.kind == "word" and token.text.casefold() == "is"), 0)
    kind = tokens[at + 1 :]
    if not at or not kind or tokens[0].kind != "sym":
        return None
    name = name_of(tokens[:at])
    divided = [token.text.casefold() for token in kind[:2]] in (["divisible", "by"], ["multiple", "of"])
    if name is None or not (divided or all(token.text.casefold() in _KINDS for token in kind)):
        return None
    words = [Token("word", "all", True, roman=True), *(token for token in kind if token.text not in ("a", "an"))]
    domain = number_domain(words if divided else [*words, Token("word", "numbers", True, roman=True)])
    return None if domain is None else Named(name[0], name[1], domain, name[2])


def same_under_condition(gold: Answer, answer: Answer, same: Callable[[Answer, Answer], bool | None]) -> bool:
    r"""``2^n, n \ge 0`` and ``2^k, k \ge 0``: a letter that a condition bounds may be any letter."""
    one, other = _bounded(gold), _bounded(answer)
    if one is None or other is None or one == other:
        return False
    assert isinstance(answer, Several)
    if one in names_of(answer) or other in arguments_of(answer.items[0]):
        return False
    items = tuple(_with_letter(item, other, one) for item in answer.items)
    return same(gold, Several(items, answer.signs, answer.either)) is True


def _bounded(answer: Answer) -> str | None:
    """The letter of a value, and then one condition on it."""
    if not isinstance(answer, Several) or len(answer.items) != 2:
        return None
    value, condition = answer.items
    if not isinstance(condition, RealSet) or not isinstance(value, Quantity | Named):
        return None
    return condition.subject if condition.subject in names_of(value) else None


def _with_letter(item: Answer, old: str, new: str) -> Answer:
    if not isinstance(item, RealSet):
        return renamed(item, {old: new})
    spans = tuple(
        Span(rename(one.low, {old: new}), one.low_closed, rename(one.high, {old: new}), one.high_closed)
        for one in item.spans
    )
    return RealSet(spans, new if item.subject == old else item.subject)
