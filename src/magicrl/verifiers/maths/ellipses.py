r"""Lists with dots: ``1, 2, \\ldots, 10`` as its items, ``1, 3, \\ldots, 2n-1`` as a rule."""

from __future__ import annotations

from collections.abc import Sequence

from magicrl.verifiers.maths.answers import Answer, Several
from magicrl.verifiers.maths.dotted import continued, expanded
from magicrl.verifiers.maths.formulas import parse
from magicrl.verifiers.maths.lexer import ELLIPSES, Token


def goes_on(piece: Sequence[Token]) -> bool:
    """Whether an item is only dots."""
    return len(piece) == 1 and piece[0].kind == "cmd" and piece[0].text in ELLIPSES


def dotted_list(pieces: Sequence[Sequence[Token]], at: int) -> Answer | None:
    """The list whose item ``at`` is dots; None when the items show no rule."""
    shown = [parse(piece) for piece in (*pieces[:at], *pieces[at + 1 :]) if piece]
    known = [item for item in shown if item is not None]
    if len(known) != len(shown):
        return None
    found = continued(known[:at], known[at:])
    if found is None:
        return None
    items = expanded(found)
    return found if items is None else Several(tuple(items))
