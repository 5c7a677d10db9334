"""Properties for every text: a reference equals itself, equality is symmetric, and a hedge never earns anything."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magicrl.records import Verdict
from magicrl_verifiers.maths.answers import Quantity
from magicrl_verifiers.maths.equality import same_value
from magicrl_verifiers.maths.maths_verifier import MathsVerifier, readings
from magicrl_verifiers.maths.notation import canonical_notation
from magicrl_verifiers.records import JudgeOptions

VERIFIER = MathsVerifier(JudgeOptions(reasoning="none", extract="box"))
QUICK = settings(max_examples=200, derandomize=True)

NUMBERS = st.one_of(
    st.integers(-9999, 9999).map(str),
    st.tuples(st.integers(1, 99), st.integers(2, 99)).map(lambda pair: rf"\frac{{{pair[0]}}}{{{pair[1]}}}"),
    st.integers(2, 99).map(lambda value: rf"\sqrt{{{value}}}"),
    st.sampled_from([r"\pi", "e", "x", "n", r"2^{10}", "0.25"]),
)
FORMULAS = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", r"\cdot "]), inner).map(lambda t: f"({t[0]}){t[1]}({t[2]})"),
        st.tuples(inner, inner).map(lambda t: rf"\frac{{{t[0]}}}{{{t[1]}}}"),
        inner.map(lambda part: rf"\left({part}\right)^2"),
    ),
    max_leaves=5,
)
ANSWERS = st.one_of(
    FORMULAS,
    st.lists(FORMULAS, min_size=2, max_size=4).map(", ".join),
    st.tuples(FORMULAS, FORMULAS).map(lambda pair: f"({pair[0]}, {pair[1]}]"),
    FORMULAS.map(lambda part: f"x > {part}"),
    st.tuples(FORMULAS, FORMULAS).map(lambda pair: rf"\begin{{pmatrix}}{pair[0]}\\{pair[1]}\end{{pmatrix}}"),
    FORMULAS.map(lambda part: rf"{part} + 2k\pi, k \in \mathbb{{Z}}"),
)


def judged(reference: str, answer: str) -> Verdict:
    return VERIFIER.judge([reference], f"\\boxed{{{answer}}}")


def formula(text: str) -> Quantity | None:
    found = next(readings(canonical_notation(text), trusted=False), None)
    return found if isinstance(found, Quantity) and found.unit is None else None


@QUICK
@given(ANSWERS)
def test_a_reference_meets_itself(reference: str) -> None:
    assert judged(reference, reference).correct


@QUICK
@given(FORMULAS, FORMULAS)
def test_equality_has_two_directions(one: str, other: str) -> None:
    left, right = formula(one), formula(other)
    if left is not None and right is not None:
        assert same_value(left.expr, right.expr) == same_value(right.expr, left.expr)


@QUICK
@given(st.integers(2, 10**6), st.integers(2, 10**6))
def test_a_second_number_never_helps(reference: int, other: int) -> None:
    if reference == other:
        other += 1
    for answer in (
        f"{reference}, {other}",
        rf"{reference} \text{{ or }} {other}",
        rf"\{{{reference}, {other}\}}",
        f"{reference} = {other}",
        rf"{reference} \text{{ and }} {other}",
        rf"\text{{not }} {reference}",
        rf"{reference} \pmod{{{other}}}",
        rf"{reference} + k, k \in \mathbb{{Z}}",
    ):
        assert not judged(str(reference), answer).correct, answer


@pytest.mark.parametrize(
    "answer",
    [
        ", ".join(str(value) for value in range(1000)),
        r"1, 2, \ldots, 1000",
        r"\mathbb{Z}",
        r"\mathbb{R}",
        r"(-\infty, \infty)",
        r"x",
        r"\text{any number}",
        r"\text{What is the answer? } 437",
        r"437 \text{ or } 438",
        r"437k",
        r"437^x",
        r"\boxed{436} \boxed{437} \boxed{438}",
        r"\begin{cases} 437 & x > 0 \\ 438 & x \le 0 \end{cases}",
        "+".join(["1"] * 2000),
        r"(" * 300 + "437" + ")" * 300,
    ],
    ids=range(15),
)
def test_what_holds_many_answers_is_none(answer: str) -> None:
    assert not judged("437", answer).correct
