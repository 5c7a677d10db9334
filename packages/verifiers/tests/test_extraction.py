"""Where the answer is found, and that hostile text neither fools nor slows the search."""

from __future__ import annotations

import pytest

from magicrl_verifiers.extraction import MAX_ANSWER_CHARS, answer_part, last_box
from magicrl_verifiers.records import Reasoning


@pytest.mark.parametrize(
    ("text", "reasoning", "expected"),
    [
        ("plain", "auto", "plain"),
        ("plain", "required", None),
        ("plain", "none", "plain"),
        ("<think>a</think>b", "auto", "b"),
        ("<think>a</think>b", "none", "<think>a</think>b"),
        ("a</think>b", "required", "b"),  # the chat template opened the tag
        ("a</think>b", "auto", "b"),
        ("<think>a</think>6</think>5", "auto", "5"),
        (r"<think>so \boxed{5}", "auto", None),
        (r"<think>so \boxed{5}", "required", None),
        (r"<think>a</think>\boxed{6}<think>b \boxed{5}", "auto", None),
        (r"<think>a</think>\boxed{6}<think>b \boxed{5}", "required", None),
    ],
)
def test_answer_part(text: str, reasoning: Reasoning, expected: str | None) -> None:
    assert answer_part(text, reasoning) == expected


def test_only_the_tail_of_a_huge_answer_is_read_but_its_tags_are_seen() -> None:
    padding = "x" * MAX_ANSWER_CHARS
    assert answer_part(f"head {padding}5", "auto") == padding[1:] + "5"
    assert answer_part(f"<think>{padding}5", "auto") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no box", None),
        (r"\boxed{5}", "5"),
        (r"\boxed {5}", "5"),
        ("\\boxed\n{5}", "5"),
        (r"\fbox{5}", "5"),
        (r"$\boxed{\frac{1}{\sqrt{2}}}$.", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{43}. No: \boxed{42}", "42"),
        (r"\boxed{1} then \boxed{2", "1"),  # cut off: the second is no box
        (r"\boxed{2", None),
        (r"\boxed{}5{}", ""),
        (r"\boxed{x = \boxed{5}}", "x = {5}"),
        (r"\boxed{ \boxed{\fbox{5}} }", "5"),
        (r"\boxed{2\cdot\boxed{3}\\\fbox{5}}", r"2\cdot{3}\\{5}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{(1, 2\}}", r"(1, 2\}"),  # an escaped brace closes nothing
        (r"} \boxed{3} }", "3"),
        (r"{ \boxed{3}", "3"),
        (r"\boxedfoo{3}", None),
        (r"a\\\boxed{3}", "3"),  # a line break, then a box
        (r"\boxed 5", None),
    ],
)
def test_last_box(text: str, expected: str | None) -> None:
    assert last_box(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\\boxed{" + "{" * 100_000 + "1" + "}" * 100_000 + "}", "{" * 100_000 + "1" + "}" * 100_000),
        ("\\boxed{9} " * 50_000 + "\\boxed{3}", "3"),
        ("\\boxed{" * 50_000, None),
        ("\\boxed{" * 50_000 + "7" + "}" * 50_000, "7"),
        ("\\boxed" + " " * 500_000, None),
        ("\\" * 500_001, None),
        ("}" * 200_000 + "\\boxed{1}" + "{" * 200_000, "1"),
    ],
)
def test_last_box_of_hostile_text(text: str, expected: str | None) -> None:
    assert last_box(text) == expected
