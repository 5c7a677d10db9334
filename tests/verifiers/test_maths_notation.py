r"""Glyphs, plain text, fonts and environments: what changes the looks of an answer and not what it says."""

import pytest

from magicrl.verifiers import JudgeOptions
from magicrl.verifiers.maths.maths_verifier import MathsVerifier

VERIFIER = MathsVerifier(JudgeOptions())


def accepts(gold: str, answer: str) -> bool:
    return VERIFIER.judge([gold], f"\\boxed{{{answer}}}").correct


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        (r"5\sqrt{6}", "5√6", "5√7"),
        (r"\frac{\sqrt{11}}{4}", "√11/4", "√(11/4)"),
        (r"\sqrt{y+9}", "√(y+9)", "√y+9"),
        (r"\sqrt[3]{7}", "∛7", "√7"),
        ("y^{12}", "y¹²", "y¹⁵"),
        (r"\frac{1}{100}", "10⁻²", "10²"),
        ("a_{1}+a_{2}", "a₁+a₂", "a₁+a₃"),
        (r"\frac{11}{4}", "2¾", "2¼"),
        (r"\frac{m}{n}", "m⁄n", "n⁄m"),
        (r"72^\circ", "72º", "71º"),
        (r"37^\circ\text{C}", "37℃", "37℉"),
        (r"\mathbb{R}", "x ∈ ℝ", "x ∈ ℕ"),
        (r"\alpha+2\beta", "α+2β", "2α+β"),
        ("8", "𝟖", "𝟗"),
        (r"\phi", r"\varphi", r"\psi"),
        ("9:45", "9{:}45", "9{:}54"),
    ],
)
def test_glyphs(gold: str, right: str, wrong: str) -> None:
    assert accepts(gold, right)
    assert accepts(right, gold)
    assert not accepts(gold, wrong)
    assert not accepts(wrong, gold)


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        ("|t|", "abs(t)", "t"),
        (r"\lfloor t \rfloor", "floor(t)", "ceil(t)"),
        (r"\sqrt[3]{5}", "cbrt(5)", "sqrt(5)"),
        (r"\alpha-\theta", "alpha - theta", "theta - alpha"),
        (r"\tan y", r"\operatorname{tg} y", r"\operatorname{ctg} y"),
        (r"\arctan 3", r"\operatorname{arctg} 3", r"\operatorname{arcctg} 3"),
        (r"\ln(2+\sqrt{5})", r"\operatorname{arcsinh} 2", r"\operatorname{arcsinh} 3"),
        (r"\sinh^{-1} 2", r"\ln(2+\sqrt{5})", r"\frac{1}{\sinh 2}"),
        (r"-1+\sqrt{3}i", r"2\operatorname{cis} 120^\circ", r"2\operatorname{cis} 60^\circ"),
        (r"\log_2 9", "log2(9)", "log10(9)"),
        ("36", r"\operatorname{lcm}(12, 18)", r"\operatorname{gcd}(12, 18)"),
        ("70000", "7 x 10^4", "7 x 10^5"),
        (r"(-\infty, 2) \cup (6, \infty)", "(-oo, 2) U (6, oo)", "(-oo, 2) U (7, oo)"),
        (r"(-\infty, 8]", r"]-\infty, 8]", r"]-\infty, 8["),
        ("[4,9)", "[4,9[", "[4,9]"),
        (r"(1,2) \cup [5,7)", r"x \in ]1,2[ \cup [5,7[", r"x \in ]1,2[ \cup ]5,7["),
    ],
)
def test_plain_text(gold: str, right: str, wrong: str) -> None:
    assert accepts(gold, right)
    assert accepts(right, gold)
    assert not accepts(gold, wrong)
    assert not accepts(wrong, gold)


@pytest.mark.parametrize(
    "layout",
    [
        r"**{}**",
        r"`{}`",
        r"\bf {}",
        r"{{\bf {}}}",
        r"\rm{{{}}}",
        r"\underline{{{}}}",
        r"\color{{red}}{{{}}}",
        r"\textcolor{{blue}}{{{}}}",
        r"\Large {}",
        r"\therefore {}",
        r"{} \checkmark",
        r"{}\text{{.}}",
        r"\text{{The final answer is: }} {}",
        r"\begin{{equation*}} {} \end{{equation*}}",
        r"\begin{{align}} n &= {} \end{{align}}",
    ],
)
def test_layout(layout: str) -> None:
    assert accepts("23", layout.format("23"))
    assert not accepts("23", layout.format("32"))
    assert not accepts("23", layout.format(r"23 \text{ or } 32"))


def test_nested_braces_in_a_font() -> None:
    assert accepts(r"\frac{2}{9}", r"\mathbf{\frac{2}{9}}")
    assert not accepts(r"\frac{2}{9}", r"\mathbf{\frac{2}{7}}")


@pytest.mark.parametrize("name", ["align", "aligned", "gather*", "eqnarray"])
def test_a_system_in_a_display(name: str) -> None:
    system = rf"\begin{{{name}}} x &= 8 \\ y &= 5 \end{{{name}}}"
    assert accepts("x=8, y=5", system)
    assert accepts(system, "(8, 5)")
    assert not accepts("x=5, y=8", system)
    assert not accepts(system, "(5, 8)")
