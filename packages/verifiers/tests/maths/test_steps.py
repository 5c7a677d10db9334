"""Notation, exact numbers and the order of the comparison steps."""

from __future__ import annotations

from fractions import Fraction

import pytest

from magicrl_verifiers.maths.literals import plain_number
from magicrl_verifiers.maths.maths_verifier import MathsVerifier, same_rational, same_string, same_word
from magicrl_verifiers.maths.notation import canonical_notation, strip_outer_braces
from magicrl_verifiers.records import JudgeOptions


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"\left( -\infty ,\, 5 \right]", r"(-\infty,5]"),
        (r"$\dfrac{1}{2}$.", r"\frac{1}{2}"),
        (r"\(x+1\)", "x + 1"),
        (r"\[ 5 \]", "5"),
        (r"\text{yes}", "yes"),
        (r"{{{42}}}", "42"),
        ("x^{2}", "x^2"),
        (r"90^{\circ}", "90°"),
        (r"90^{\circ}", r"90^\circ"),
        (r"1{,}234", "1,234"),
        ("٥", "5"),
        ("５", "5"),
        ("5\u200b", "5"),
        ("5\x00", "5"),
        ("−3", "-3"),
        ("2 \\pi r", "2\\pi r"),
        (r"x \leqslant 3", "x ≤ 3"),
        (r"\varnothing", r"\emptyset"),
        (r"\sin ^2 t", r"\sin^{2} t"),
    ],
)
def test_spellings_of_one_answer(one: str, other: str) -> None:
    assert canonical_notation(one) == canonical_notation(other)
    assert same_string(canonical_notation(one), canonical_notation(other)) is True


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1 000", "1000"),
        ("1 1/2", "11/2"),
        (r"\sin x", r"\sinx"),
        (r"\frac{1}{2}", r"\frac{12}{}"),
        ("(1,2)", "[1,2]"),
        ("A", "a"),
        ("5²", "52"),
        ("x_1", "x^1"),
        (r"e^{\alpha}b", r"e^{\alpha b}"),
        ("{1}{2}", "1}{2"),
        (r"\{1\}", "1"),
        ("$1$ and $2$", "1$ and $2"),
    ],
)
def test_different_answers_stay_different(one: str, other: str) -> None:
    assert canonical_notation(one) != canonical_notation(other)


def test_deep_nests_are_unwrapped_in_one_pass() -> None:
    nest = "{" * 200_000 + "42" + "}" * 200_000
    assert strip_outer_braces(nest) == "42"
    assert canonical_notation(nest) == "42"
    assert canonical_notation("{" * 200_000) == "{" * 200_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5", Fraction(5)),
        ("025", Fraction(25)),
        ("-0.125", Fraction(-1, 8)),
        (".5", Fraction(1, 2)),
        ("5.", Fraction(5)),
        ("1,234.5", Fraction(2469, 2)),
        ("1 234", Fraction(1234)),
        (r"1\,234", Fraction(1234)),
        ("1,234,5", None),
        ("12,34", None),
        ("1/3", Fraction(1, 3)),
        (r"-\frac{2}{6}", Fraction(-1, 3)),
        (r"\frac{-2}{6}", Fraction(-1, 3)),
        (r"\frac12", Fraction(1, 2)),
        (r"1\frac{1}{2}", Fraction(3, 2)),
        (r"-1\frac{1}{2}", Fraction(-3, 2)),
        ("1 1/2", Fraction(3, 2)),
        (r"2\frac{3}{2}", None),  # improper: a product or a slip
        ("1/0", None),
        (r"3 \times 10^{8}", Fraction(300_000_000)),
        ("1e-3", Fraction(1, 1000)),
        ("1e99999999", None),
        (r"10^{10^{10}}", None),
        ("9" * 2000, None),
        ("x", None),
        (r"\pi", None),
    ],
)
def test_plain_number(text: str, expected: Fraction | None) -> None:
    number = plain_number(canonical_notation(text))
    assert (None if number is None else number.value) == expected


@pytest.mark.parametrize(
    ("reference", "answer", "expected"),
    [
        ("0.5", "1/2", True),
        ("0.1", "0.10000001", False),
        ("100000000000", "99999999999", False),
        ("0.00000001", "0", False),
        ("1,234", "1,235", None),  # could be two lists: a later step decides
        (r"\frac{1}{12}", "0.0833333333", True),  # has no finite decimal
        (r"\frac{1}{12}", "0.083333", False),  # five significant digits are too few
        (r"\frac{1}{3}", "0.333334", False),
        (r"\frac{2}{3}", "0.666667", True),  # rounded
        (r"\frac{2}{3}", "0.666666", True),  # truncated
        (r"\frac{2}{3}", "0.666668", False),
        (r"\frac{1}{2}", "0.5000001", False),
        ("0.333333", r"\frac{1}{3}", True),
        ("5", "x", None),
    ],
)
def test_same_rational(reference: str, answer: str, expected: bool | None) -> None:
    assert same_rational(canonical_notation(reference), canonical_notation(answer)) is expected


@pytest.mark.parametrize(
    ("reference", "answer", "expected"),
    [
        ("yes", "Yes", True),
        ("yes", "no", False),
        ("A", "B", False),
        ("A", "a", None),
        ("ab", "ba", None),
        ("a", "1", None),
    ],
)
def test_same_word(reference: str, answer: str, expected: bool | None) -> None:
    assert same_word(reference, answer) is expected


@pytest.mark.parametrize(
    "reference", [r"So, $x = \boxed{12}$.", r"$2+10=\boxed{12}$", r"So $\boxed 12$.", "2 + 10 = 12\n#### 12"]
)
def test_a_reference_that_is_a_solution_counts_by_its_marked_answer(reference: str) -> None:
    judged = [MathsVerifier(JudgeOptions()).judge([reference], text) for text in (r"\boxed{12}", r"\boxed{10}")]
    assert [verdict.status for verdict in judged] == ["matched", "mismatch"]


def test_boxes_of_a_solution_that_belong_together_are_one_reference() -> None:
    reference = r"The solutions are $\boxed{1}$ and $\boxed{-2}$."
    judged = [MathsVerifier(JudgeOptions()).judge([reference], text) for text in (r"\boxed{-2, 1}", r"\boxed{-2}")]
    assert [verdict.status for verdict in judged] == ["matched", "mismatch"]


@pytest.mark.parametrize("reference", ["assert f(1)==1", "{'inputs': ['1'], 'outputs': ['2']}"])
def test_tests_of_a_program_are_no_reference_answer(reference: str) -> None:
    assert MathsVerifier(JudgeOptions()).judge([reference], r"\boxed{12}").status == "reference_unparsable"


@pytest.mark.parametrize(
    ("reference", "response"),
    [("6", "So \boxed{6}"), (r"\frac{1}{2}", "\boxed{\frac{1}{2}}"), ("\frac{1}{2}", r"\boxed{0.5}"),
     ("2\times 3", r"\boxed{6}"), (r"\alpha", "\boxed{\alpha}"), (r"\vec{a}", "\boxed{\vec{a}}")],
)  # fmt: skip
def test_commands_whose_backslash_json_or_python_took(reference: str, response: str) -> None:
    assert MathsVerifier(JudgeOptions()).judge([reference], response).correct


def test_a_lost_backslash_hides_no_wrong_box() -> None:
    assert not MathsVerifier(JudgeOptions(extract="lenient")).judge(["5"], "5 \boxed{6}").correct
