"""Values and probing: exact where it can be, never equal because it is small."""

from __future__ import annotations

from fractions import Fraction

import pytest

from magicrl.verifiers.maths.answers import Expr, signs
from magicrl.verifiers.maths.equality import number_value, same_value
from magicrl.verifiers.maths.formulas import parse
from magicrl.verifiers.maths.lexer import tokens_of
from magicrl.verifiers.maths.maths_verifier import CpuAlarm, cpu_limit
from magicrl.verifiers.maths.notation import canonical
from magicrl.verifiers.maths.quantities import UNITS, unit_phrase


def formula(text: str) -> Expr:
    tokens = tokens_of(canonical(text))
    assert tokens is not None
    tree = parse(tokens)
    assert tree is not None, text
    return tree


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"\frac{1}{3}+\frac16", Fraction(1, 2)),
        (r"2\frac{1}{2}", Fraction(5, 2)),
        ("2 3/4", Fraction(11, 4)),
        ("2^{-3}", Fraction(1, 8)),
        ("-2^2", Fraction(-4)),
        ("2^3^2", Fraction(64)),  # left to right: nobody writes this
        (r"\sqrt{\frac{9}{4}}", Fraction(3, 2)),
        (r"\sqrt[3]{-27}", Fraction(-3)),
        ("10!/8!", Fraction(90)),
        (r"\binom{6}{2}", Fraction(15)),
        (r"|{-3}|-\lfloor 2.7\rfloor", Fraction(1)),
        (r"\gcd(12,18)+\max\{1,5,2\}", Fraction(11)),
        ("6/2*3", Fraction(9)),
        (r"\frac12", Fraction(1, 2)),
        (r"\frac1{2}3", Fraction(3, 2)),
    ],
)
def test_exact_values(text: str, value: Fraction) -> None:
    assert number_value(formula(text)) == value


@pytest.mark.parametrize(
    "text",
    ["2 3", "x y 2 3", r"\sum_{k} k", r"1,2", "(1", r"x\text{cm}", "1++", r"\frac{1}", "^2", "5 apples", "a_"],
)
def test_what_is_no_formula_is_none_and_nothing_is_dropped(text: str) -> None:
    tokens = tokens_of(canonical(text))
    assert tokens is None or parse(tokens) is None


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("x^2-1", "(x-1)(x+1)", True),
        (r"\sqrt{x^2}", "x", False),
        (r"\sqrt{x^2}", "|x|", True),
        (r"\ln x^2", r"2\ln x", True),
        (r"\sin 2x", r"2\sin x\cos x", True),
        (r"\sin^2 x", r"\sin x^2", False),
        ("xy^2", "(xy)^2", False),
        ("(-1)^{2n}", "1", True),
        ("(-1)^n", r"\cos(n\pi)", True),
        ("i^2", "-1", True),
        (r"\frac{1}{2^{999}}", r"\frac{1}{2^{998}}", False),
        (r"\frac{1}{900!}", "0", False),
        (r"\sin\pi", "0", True),
        (r"10^{-300}", "0", False),
        (r"\sqrt{2}^2-2", "0", True),
        (r"\sqrt{10^{30}+1}-\sqrt{10^{30}}", "0", False),
        (r"e^{\pi\sqrt{163}}", "262537412640768744", False),
        (r"\log 100", "2", True),
        (r"\log e", "1", True),
        (r"\log 8 + \log 2", "1", False),
        ("f(2)", "f(1+1)", True),
        ("f(2)", "2f(1)", False),
        ("9^{9^{9^{9}}}", "1", None),
        ("1", "9^{9^{9^{9}}}", None),
    ],
)
def test_same_value(one: str, other: str, same: bool | None) -> None:
    assert same_value(formula(one), formula(other)) is same


def test_signs_are_free_but_opposite_signs_go_together() -> None:
    assert len(signs(formula(r"\pm 1 \pm x")) or ()) == 4
    both = signs(formula(r"\pm 1 \mp x"))
    assert both is not None
    assert len(both) == 2
    assert signs(formula(r"\pm a \pm b \pm c \pm d \pm x")) is None


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (r"\text{cm}", "unit"),
        (r"\text{square feet}", "unit"),
        (r"\text{miles per hour}", "unit"),
        (r"\text{percent}", "percent"),
        (r"\text{degrees}", "degree"),
        (r"\text{red apples}", "noun"),
        (r"\text{th}", "none"),
        (r"\text{or more}", None),
        (r"\text{is wrong}", None),
    ],
)
def test_units_and_nouns(text: str, kind: str | None) -> None:
    tokens = tokens_of("5" + text)
    assert tokens is not None
    unit = unit_phrase(tokens[1:], trusted=False)
    assert (None if unit is None else unit.kind) == kind


def test_units_convert_exactly() -> None:
    assert UNITS["km"].factor == 1000 * UNITS["m"].factor
    assert UNITS["inch"].factor * 12 == UNITS["foot"].factor
    assert UNITS["hour"].factor == 60 * UNITS["minutes"].factor
    assert UNITS["cents"].factor * 100 == UNITS["dollars"].factor


def test_the_alarm_ends_python_code_that_catches_everything() -> None:
    def stubborn() -> None:
        while True:
            try:
                sum(range(1000))
            except Exception:  # noqa: BLE001 - as a library might
                continue

    with pytest.raises(CpuAlarm), cpu_limit(0.05):
        stubborn()
    with cpu_limit(60):
        pass
