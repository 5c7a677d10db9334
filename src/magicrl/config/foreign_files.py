"""Reads configurations of other libraries: YAML and JSON files, ``a.b.c=d`` overrides, and scripts that hold them."""

from __future__ import annotations

import ast
import json
import operator
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import yaml

from magicrl.config.errors import RecipeError

_OVERRIDE = re.compile(r"[+~]{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)
_ASSIGNED = re.compile(r"\s*(?:export\s+|declare\s+-\w+\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_ARITHMETIC = re.compile(r"\$\(\(((?:[^()$]|\((?:[^()$]|\([^()$]*\))*\))*)\)\)")
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^${}]*))?\}|\$(\w+)")
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?(\w+(?:\.\w+)+)(?:,.*)?\}")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def read_options(path: Path) -> dict[str, Any]:
    """Options by dotted name, references among them resolved.

    Raises:
        RecipeError: no such file, not readable, or without options.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read: {error}") from None
    try:
        if path.suffix.lower() in (".yaml", ".yml", ".json"):
            tree = json.loads(text) if path.suffix.lower() == ".json" else yaml.safe_load(text)
            options = _flat(tree) if isinstance(tree, Mapping) else {}
        else:
            options = _overrides(text)
    except (yaml.YAMLError, json.JSONDecodeError, RecursionError) as error:
        raise RecipeError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
    if not options:
        raise RecipeError(
            f"{path}: holds no options; give the YAML of trl grpo --config, the JSON of a GRPOConfig (both by their "
            "endings .yaml and .json), verl's YAML, or the command or script that starts verl, with a.b.c=d in it"
        )
    return _resolved(options)


def _flat(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(cast("Mapping[Any, Any]", value), f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = _number(value)
    return found


def _number(value: Any) -> Any:
    """YAML 1.1 takes 1e-6 for a text."""
    if not isinstance(value, str):
        return value
    try:
        return float(value) if re.match(r"[-+.]?\d", value) else value
    except ValueError:
        return value


def _resolved(options: dict[str, Any]) -> dict[str, Any]:
    """References (``${a.b}``, ``${oc.select:a.b,1}``) as what is stated there; those to what is not are left out."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        for _ in range(8):
            named = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
            value = value if named is None else options.get(named[1])
        if not (value is None and options[name] is not None):
            found[name] = value
    return found


# --- scripts ---------------------------------------------------------------------------------------------------


def _overrides(text: str) -> dict[str, Any]:
    """The overrides of a shell command, its script's own variables put in. Nothing is run."""
    variables: dict[str, str] = {"HOME": "~", "PWD": "."}
    found: dict[str, Any] = {}
    for line in re.sub(r"\\\r?\n", " ", text).splitlines():
        words = _words(_expanded(line, variables))
        assigned = [match for word in words if (match := _ASSIGNED.fullmatch(word))]
        if words and len(assigned) == len(words):
            variables |= {match[1]: match[2] for match in assigned if "$" not in match[2]}
            continue
        for match in filter(None, map(_OVERRIDE.fullmatch, words)):
            if "$" in match[2]:
                raise RecipeError(
                    f"{match[1]}={match[2]}: the script does not set this variable; write its value there"
                )
            try:
                found[match[1]] = _number(yaml.safe_load(match[2]))
            except yaml.YAMLError:
                found[match[1]] = match[2]
    return found


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # a quotation of several lines, which is no override
        return []


def _expanded(line: str, variables: Mapping[str, str]) -> str:
    """Variables and sums put in, the innermost first; what is not known stays."""

    def variable(match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        if name in variables:
            return variables[name]
        return match[0] if default is None else default.strip("\"'")

    def arithmetic(match: re.Match[str]) -> str:
        value = _sum(re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0], name[0]), match[1]))
        return match[0] if value is None else str(value)

    line = re.sub(r"\$[@*#]", "", line)
    before = ""
    while before != line:
        before, line = line, _ARITHMETIC.sub(arithmetic, _VARIABLE.sub(variable, line))
    return line


def _sum(text: str) -> int | None:
    """A shell's integer arithmetic; None where it is none."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError(text)

    try:
        return value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None
