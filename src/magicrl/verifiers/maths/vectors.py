r"""Vectors in unit vectors: ``3\mathbf{i} - 4\mathbf{j}`` as ``(3, -4)``."""

from __future__ import annotations

from collections.abc import Sequence

from magicrl.verifiers.maths.answers import Group, Quantity
from magicrl.verifiers.maths.equality import same_value
from magicrl.verifiers.maths.expression import Expr, number, put
from magicrl.verifiers.maths.formulas import parse
from magicrl.verifiers.maths.lexer import Token

_AXES = "ijk"


def vector(tokens: Sequence[Token]) -> Group | None:
    """A sum over at least the second or third unit vector, marked by bold type or an accent."""
    accented = parse(tokens)
    if accented is not None and (found := components(accented, ("hat", "vec", "bar"))) is not None:
        return found
    bold = any(token.kind == "sym" and token.roman and token.text in ("j", "k") for token in tokens)
    marked = [
        Token("sym", "unit:" + token.text) if bold and token.kind == "sym" and token.roman and token.text in _AXES
        else token
        for token in tokens
    ]  # fmt: skip
    tree = parse(marked)
    return None if tree is None else components(tree, ("unit",))


def components(tree: Expr, marks: Sequence[str]) -> Group | None:
    """The components of a formula that is linear in unit vectors; with the mark "" in plain ``i, j, k``."""
    names: dict[str, Expr] = {}
    for mark in marks:
        for axis in _AXES:
            name = f"{mark}:{axis}" if mark else axis
            leaf = Expr("const", name="i") if name == "i" else Expr("sym", name=name)
            if tree.holds(leaf.op, leaf.name):
                if axis in names:
                    return None
                names[axis] = leaf
    if not set(names) & {"j", "k"}:
        return None
    values = {axis: _at(tree, names, {axis: 1}) for axis in _AXES}
    doubled = _at(tree, names, {"i": 2, "j": 3, "k": 5})
    total = Expr("add", tuple(Expr("mul", (number(n), values[a])) for a, n in zip(_AXES, (2, 3, 5), strict=True)))
    if same_value(doubled, total) is not True or same_value(_at(tree, names, {}), number(0)) is not True:
        return None
    axes = _AXES if "k" in names else "ij"
    return Group("<", "<", tuple(Quantity(values[axis]) for axis in axes))


def _at(tree: Expr, names: dict[str, Expr], ones: dict[str, int]) -> Expr:
    for axis, leaf in names.items():
        tree = put(tree, leaf, number(ones.get(axis, 0)))
    return tree
