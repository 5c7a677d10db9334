"""The index from the report to the code: each symbol can be imported, each test exists."""

from __future__ import annotations

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "evidence" / "paper.md").read_text().partition("\n## Departures\n")[0]
ROWS = [row for row in re.findall(r"^\| (.+) \|$", PAGE, re.MULTILINE) if not row.startswith(("---", "the report"))]


@cache
def functions(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_the_index_names_the_numbered_parts() -> None:
    parts = (
        "Eq. 2.5",
        "Eq. 3.1",
        "3.2.5",
        "Table 7",
        "Table 8",
        "Table 9",
        "Table 13",
        "Figure 6",
        "Figure 8",
        "Figure 13",
    )
    assert [part for part in parts if not any(part in row.split("|")[0] for row in ROWS)] == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split(" |")[0][:60])
def test_symbol_and_test_are_there(row: str) -> None:
    symbols = re.findall(r"`((?:magicrl|studies)[\w.]*):(\w+)`", row)
    tests = re.findall(r"`((?:packages/verifiers/)?tests/[\w/]+\.py)::(\w+)`", row)
    assert symbols
    assert tests
    for module, name in symbols:
        assert hasattr(importlib.import_module(module), name), f"{module}:{name}"
    for file, name in tests:
        assert name in functions(file), f"{file}::{name}"
