"""Normalised equality in the calling process."""

from __future__ import annotations

import pytest

from magicrl.records import Outcome
from magicrl_verifiers.extraction import ExactVerifier, normalise
from magicrl_verifiers.records import Extract, JudgeOptions, Reasoning


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


def test_any_reference_counts_and_the_found_answer_is_told() -> None:
    verifier = ExactVerifier(JudgeOptions())
    assert verifier.judge(["7", "left"], "turn LEFT").correct
    assert verifier.judge(["7", "right"], "turn left").extracted == "left"
