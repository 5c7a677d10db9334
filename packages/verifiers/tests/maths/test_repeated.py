"""Answers that repeat the problem's computation, whose value is the reference answer."""

from __future__ import annotations

import pytest

from magicrl_verifiers import JudgeOptions, VerifierPool
from magicrl_verifiers.maths.protocol import repeats_problem
from magicrl_verifiers.records import Problem


def problem(prompt: str, *references: str) -> Problem:
    return Problem(id="p", prompt=prompt, references=references, verifier="maths", source="test")


@pytest.mark.parametrize(
    ("prompt", "reference", "answer"),
    [
        ("What is 5 + 8?\n\nPut it in a box.", "13", "5 + 8"),
        ("What is 5 + 8?", "13", "8+5"),
        ("What is 5 + 8?", "13", r"5 + 8\text{ apples}"),
        ("What is 12 ÷ 4?", "3", r"12 \div 4"),
        ("What is 12 / 4?", "3", "12/4"),
        (r"Compute $1.5 \times 3$.", "4.5", r"3 \cdot 1.5"),
        (r"What is $\sqrt{16}$?", "4", r"\sqrt{16}"),
        ("Compute $2^{10}$ and (3).", "1,024", "2^{10}"),
        ("What is 5!?", "120", "5!"),
    ],
)
def test_a_repeated_computation_is_no_answer(prompt: str, reference: str, answer: str) -> None:
    assert repeats_problem(problem(prompt, reference), answer)


@pytest.mark.parametrize(
    ("prompt", "reference", "answer"),
    [
        ("What is 5 + 8?", "13", "13"),
        ("What is 5 + 8?", "13", "10 + 3"),
        ("What is -5?", "-5", "-5"),
        ("Which is larger, $2^5$ or $5^2$?", "2^5", "2^5"),
        ("Write 3/4 as a decimal, or not.", "0.75", "3/4"),
        ("Light moves at 3*10^8 m/s. How fast?", "300000000", r"3 \times 10^8"),
        ("Expand $(x+1)^2$.", "x^2+2x+1", "(x+1)^2"),
        ("A side has 12 cm. How long is it?", "12", r"12\text{ cm}"),
    ],
)
def test_other_answers_are_not_affected(prompt: str, reference: str, answer: str) -> None:
    assert not repeats_problem(problem(prompt, reference), answer)


def test_the_pool_rejects_a_repeated_computation() -> None:
    with VerifierPool(options=JudgeOptions(extract="lenient")) as pool:
        verdicts = pool.judge(
            problem("What is 5 + 8?", "13"), [r"\boxed{5 + 8}", "It is 5 + 8.", "5 + 8 = 13", r"\boxed{10 + 3}"]
        )
    assert [verdict.correct for verdict in verdicts] == [False, False, True, True]
    assert verdicts[0].reason == "the answer repeats the problem's computation and does not give its result"
    assert (verdicts[0].status, verdicts[0].extracted) == ("mismatch", "5 + 8")
