"""Figures of the code's size, on two small modules whose figures are counted by hand."""

from __future__ import annotations

from pathlib import Path

from tools.size import ROOT, circles, figures

ONE = '''"""Doc
of two lines."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass
class Row:
    """Doc."""

    value: int  # a comment


class Pair(NamedTuple):
    one: int


class Triple(Pair):
    two: int


class Plain:
    def method(self):
        # a comment
        text = """not
        a docstring"""
        return _helper(text)


def _helper(text):
    return text
'''
OTHER = "def build(): return 1\n\n\nclass Row: ...\n"


def test_figures_of_two_modules() -> None:
    found = figures({Path("one.py"): ONE, Path("other.py"): OTHER})
    assert (found["files"], found["lines"], found["code_lines"]) == (2, ONE.count("\n") + 4, 18)
    assert (found["record_types"], found["record_types_per_1000_code_lines"]) == (3, 166.67)
    assert (found["code_lines_per_function"], found["longest_function"]) == (2.3, "one.py:method (4)")
    assert found["private_functions_called_once"] == 1
    assert (found["public_names_with_several_meanings"], found["these_names"]) == (1, "Row")


def test_comment_lines_are_counted_in_the_packages_of_the_algorithm() -> None:
    found = figures({ROOT / "src/magicrl/training/one.py": ONE, Path("other.py"): ONE})
    assert found["comment_percent"] == "algorithms 0.0, training 6.2, rollout 0.0, models 0.0, distributed 0.0"


def test_circles() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == 2
