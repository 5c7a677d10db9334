"""Extraction of the answer, hostile text that neither fools nor slows the search, and normalised equality."""

from __future__ import annotations

import pytest

from magicrl.records import Outcome
from magicrl_verifiers.extraction import MAX_ANSWER_CHARS, ExactVerifier, answer_part, last_box, normalise
from magicrl_verifiers.records import Extract, JudgeOptions, Reasoning


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
        (r"\boxed{1} then \boxed{2", "1"),  # truncated: the second is no box
        (r"\boxed{2", None),
        (r"\boxed{}5{}", ""),
        (r"$\boxed{5}$. I put it in \boxed{} as asked.", "5"),
        (r"\boxed{5}\boxed{ }", "5"),
        (r"Use \boxed{}. \boxed{5}, no: \boxed{6}", "6"),
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
        (r"It is $\boxed 12$.", "12"),  # in the data set MATH
        (r"It is $\boxed12$.", "12"),
        (r"$\boxed{1}$, no: $\boxed 2 $", "2"),
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


@pytest.mark.parametrize(
    ("text", "expected"),
    [(" A  b\n", "a b"), ("007", "7"), ("-0", "0"), ("+05", "5"), ("-012", "-12"), ("0.50", "0.50"), ("x01", "x01")],
)
def test_normalise(text: str, expected: str) -> None:
    assert normalise(text) == expected


@pytest.mark.parametrize(
    ("reference", "response", "reasoning", "extract", "status"),
    [
        ("3", "L 7 S3 4 1 S4 2 3", "auto", "lenient", "matched"),
        ("4", "L 7 S3 4 1 S4 2 3", "auto", "lenient", "mismatch"),
        ("3", "L 7 S3 4 1 S4 2 3", "auto", "box", "no_answer"),
        ("3", r"so \boxed{ 03 } and 4", "auto", "lenient", "matched"),
        ("4", r"so \boxed{ 03 } and 4", "auto", "lenient", "mismatch"),  # the box decides
        ("2 3", "steps 1 2 3", "auto", "lenient", "matched"),  # as many tokens as the reference answer has
        ("1 3", "steps 1 2 3", "auto", "lenient", "mismatch"),
        ("3", "", "auto", "lenient", "no_answer"),
        ("3", r"\boxed{}", "auto", "lenient", "no_answer"),
        ("3", "<think> 3", "auto", "lenient", "no_answer"),
        ("3", "<think> 3", "none", "lenient", "matched"),
        ("3", "1 </think> 3", "required", "lenient", "matched"),
        ("3", "1 3", "required", "lenient", "no_answer"),
    ],
)
def test_exact(reference: str, response: str, reasoning: Reasoning, extract: Extract, status: str) -> None:
    verdict = ExactVerifier(JudgeOptions(reasoning=reasoning, extract=extract)).judge([reference], response)
    assert verdict.status == status
    assert verdict.outcome is (Outcome.CORRECT if status == "matched" else Outcome.WRONG)


def test_any_reference_counts_and_the_found_answer_is_reported() -> None:
    verifier = ExactVerifier(JudgeOptions())
    assert verifier.judge(["7", "left"], "turn LEFT").correct
    assert verifier.judge(["7", "right"], "turn left").extracted == "left"
