r"""Congruences: ``x \equiv 3 \pmod 7`` as the whole numbers ``7k + 3``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from magicrl.verifiers.maths.answers import Answer, Family, Named, Quantity, Several
from magicrl.verifiers.maths.expression import Expr
from magicrl.verifiers.maths.formulas import parse
from magicrl.verifiers.maths.lexer import Token
from magicrl.verifiers.maths.names import name_of
from magicrl.verifiers.maths.pieces import split

Read = Callable[[Sequence[Token]], "Answer | None"]


def congruent(tokens: Sequence[Token], levels: list[int], read: Read) -> Answer | None:
    """The numbers that are congruent to one of some numbers: with one modulus, and about one name at most."""
    pieces, _ = split(tokens, levels, "sep")
    residues: list[Expr] = []
    names: set[str] = set()
    moduli: list[Expr] = []
    for piece in pieces:
        if not piece:
            continue
        at = next((at for at, token in enumerate(piece) if token.kind == "cmd" and token.text == "pmod"), None)
        if at is not None:
            modulus = parse(piece[at + 1 :])
            if modulus is None:
                return None
            moduli.append(modulus)
            piece = piece[:at]
        relations = [place for place, token in enumerate(piece) if token.kind == "rel"]
        if relations:
            name = name_of(piece[: relations[0]])
            if len(relations) > 1 or piece[relations[0]].text not in ("==", "=") or name is None or name[2] is None:
                return None
            names.add(name[0])
            piece = piece[relations[0] + 1 :]
        value = read(piece)
        values = value.items if isinstance(value, Several) and value.signs else (value,)
        plain = [one.expr for one in values if isinstance(one, Quantity) and one.unit is None]
        if len(plain) != len(values):
            return None
        residues += plain
    if len(names) > 1 or not residues or not moduli or any(modulus != moduli[0] for modulus in moduli):
        return None
    steps = Expr("mul", (moduli[0], Expr("sym", name="#k")))
    items = tuple(Quantity(Expr("add", (residue, steps))) for residue in residues)
    family = Family(items[0] if len(items) == 1 else Several(items), frozenset(("#k",)), "Z")
    return Named(names.pop(), (), family) if names else family
