r"""Names that answers give to their values: ``x``, ``f(x)``, ``(p, q)``, ``AB``, ``P(X > 1)``, ``Paolo``."""

from __future__ import annotations

from collections.abc import Sequence

from magicrl.verifiers.maths.expression import Expr
from magicrl.verifiers.maths.formulas import parse
from magicrl.verifiers.maths.lexer import Token
from magicrl.verifiers.maths.pieces import depths
from magicrl.verifiers.maths.words import word_set

_NAMING = word_set("abs sin cos tan cot sec csc")
_APPLIED = word_set("f g h P E D S V")
_MEASURED = frozenset("EPDV")
_MEASURES = word_set("Var Cov Pr Corr")


def name_of(tokens: Sequence[Token]) -> tuple[str, tuple[str, ...], Expr | None] | None:
    """The name that the tokens spell, its arguments, and its symbol; None when they are no name."""
    if not tokens:
        return None
    spelled = " ".join(token.text.casefold() for token in tokens)
    wordy = tokens[0].kind == "word" and (tokens[0].roman or len(tokens[0].text) > 3)
    if wordy and all(token.kind in ("word", "sym") for token in tokens):
        return spelled, (), None
    if [token.text for token in tokens[:2]] == ["m", "angle"]:
        tokens = tokens[1:]  # the measure of an angle
    colons = [at for at, token in enumerate(tokens) if token.kind == "colon"]
    if colons:
        sides = [name_of(tokens[: colons[0]]), name_of(tokens[colons[0] + 1 :])]
        known = [side[0] for side in sides if side is not None]
        return (":".join(known), (), None) if len(known) == 2 else None
    if _measured(tokens):
        return _measure(tokens)
    tree = parse(tokens)
    if tree is not None and tree.op == "sym":
        return tree.name, (), tree
    if tree is not None and _derivative(tree):
        return tree.args[0].args[1].name + "'", (), None
    if tree is not None and tree.op == "apply" and not tree.symbols:
        return "".join(token.text for token in tokens), (), None  # f(0)
    if tree is not None and _point_pair(tree):
        return "".join(part.name for part in tree.args), (), None
    if tree is not None and tree.op == "fn" and tree.name == "abs" and _point_pair(tree.args[0]):
        return "".join(part.name for part in tree.args[0].args), (), None  # |AB|
    if tree is not None and tree.op == "fn" and tree.name in _NAMING and tree.symbols:
        return spelled, (), None  # |AB|, cos A
    return _function_name(tokens) or _tuple_name(tokens) or _column_name(tokens)


def _measured(tokens: Sequence[Token]) -> bool:
    r"""Whether the tokens are ``\operatorname{Var}(X)`` or ``\mathbb{E}[X]``: an upright name, then brackets."""
    opening = next((at for at, token in enumerate(tokens) if token.kind == "open"), None)
    if not opening or tokens[-1].kind != "close":
        return False
    levels = depths(tokens)
    if levels is None or 0 in levels[opening + 1 : -1]:
        return False
    head = [token.text for token in tokens[:opening] if token.kind not in ("lbrace", "rbrace")]
    return head in (["mathbb", "E"], ["mathbb", "P"], ["E"]) or (len(head) == 1 and head[0] in _MEASURES)


def _measure(tokens: Sequence[Token]) -> tuple[str, tuple[str, ...], Expr | None]:
    r"""``\mathbb{E}[X]`` by the name of ``E(X)``."""
    opening = next(at for at, token in enumerate(tokens) if token.kind == "open")
    letter = [token.text for token in tokens[:opening] if token.kind not in ("lbrace", "rbrace")][-1]
    inner = tokens[opening + 1 : -1]
    return letter + "(" + "".join(token.text for token in inner) + "(", (), None


def _derivative(tree: Expr) -> bool:
    r"""``\frac{dy}{dx}``."""
    sides = [[part.name for part in side.args] for side in tree.args if side.op == "mul"]
    return tree.op == "div" and len(sides) == 2 and all(len(side) == 2 and side[0] == "d" and side[1] for side in sides)


def _point_pair(tree: Expr) -> bool:
    """``AB``: a segment, an angle or a triangle is named by its points."""
    return tree.op == "mul" and all(part.op == "sym" and part.name[0].isupper() for part in tree.args)


def _function_name(tokens: Sequence[Token]) -> tuple[str, tuple[str, ...], Expr | None] | None:
    opening = next((at for at, token in enumerate(tokens) if token.kind == "open" and token.text == "("), None)
    if not opening or tokens[-1].kind != "close":
        return None
    levels = depths(tokens)
    if levels is None or 0 in levels[opening + 1 : -1]:
        return None  # f(x) + g(y): the first bracket is not the last one's partner
    head = parse(tokens[:opening])
    inner = tokens[opening + 1 : -1]
    names = [token.text for token in inner[::2]]
    if head is not None and head.op == "pow" and head.args[0].op == "sym" and head.args[0].name in _APPLIED:
        return "".join(token.text for token in tokens[:opening]), tuple(names), None  # the inverse of f
    if head is None or head.op != "sym" or not inner:
        return None
    plain = all(token.kind == "sym" for token in inner[::2]) and all(token.text == "," for token in inner[1::2])
    if plain and head.name in _MEASURED and all(name.isupper() for name in names):
        return head.name + "(" + "".join(token.text for token in inner) + "(", (), None  # of a random variable
    if plain:
        return head.name, tuple(names), None
    # P(X > 1): what is in the brackets is part of the name
    return ("".join(token.text for token in tokens), (), None) if head.name in _APPLIED else None


def _tuple_name(tokens: Sequence[Token]) -> tuple[str, tuple[str, ...], Expr | None] | None:
    if len(tokens) < 5 or (tokens[0].kind, tokens[0].text) != ("open", "(") or tokens[-1].text != "(":
        return None
    inner = list(tokens[1:-1])
    parts: list[list[Token]] = [[]]
    for token in inner:
        if token.kind == "sep":
            parts.append([])
        else:
            parts[-1].append(token)
    trees = [parse(part) for part in parts]
    if all(tree is not None and tree.op == "sym" for tree in trees):
        return "(" + ",".join(tree.name for tree in trees if tree is not None) + ")", (), None
    return None


def _column_name(tokens: Sequence[Token]) -> tuple[str, tuple[str, ...], Expr | None] | None:
    r"""``\begin{pmatrix} x \\\\ y \end{pmatrix}``, a column of letters, as the name ``(x,y)``."""
    inner = tokens[1:-1]
    if len(inner) < 3 or tokens[0].kind != "env" or tokens[-1].kind != "env":
        return None
    rows = all((token.kind, token.text) == ("cell", "row") for token in inner[1::2])
    if not rows or any(token.kind != "sym" for token in inner[::2]):
        return None
    return "(" + ",".join(token.text for token in inner[::2]) + ")", (), None


def point_label(tokens: Sequence[Token], levels: Sequence[int]) -> tuple[str, int] | None:
    """The name of ``A(1,2)`` or ``P_1(0,3)`` and where its bracket begins; None when it is no named point."""
    opening = next((at for at, token in enumerate(tokens) if (token.kind, token.text) == ("open", "(")), None)
    if not opening or tokens[0].kind != "sym" or not tokens[0].text.isupper() or len(tokens[0].text) != 1:
        return None
    if 0 in levels[opening + 1 : -1] or (tokens[-1].kind, tokens[-1].text) != ("close", "("):
        return None
    if not any(token.kind == "sep" and level == 1 for token, level in zip(tokens, levels, strict=True)):
        return None
    head = parse(tokens[:opening])
    return (head.name, opening) if head is not None and head.op == "sym" else None
